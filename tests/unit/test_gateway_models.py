"""Which models requests may name, and what a gateway does with adapters."""

from __future__ import annotations

import contextlib
from functools import partial
from types import SimpleNamespace

import pytest
from msgspec.structs import replace
from virtual_time import VIRTUAL

from seer.client import LoraAdapter
from seer.common.config import Config
from seer.common.errors import WeightsRefused
from seer.gateway.control import Control, obey
from seer.gateway.errors import HttpError
from seer.gateway.models import Adapter, Models

pytestmark = VIRTUAL


def models(status=None):
    return Models("/m/base", "", SimpleNamespace(status=status))


def test_a_request_names_the_model_or_the_live_adapter():
    named = models()
    assert [named.check(each) for each in (None, "", "base", "/m/base")] == ["", "", "", ""]
    with pytest.raises(HttpError, match="model = 'a': this system has 'base' alone") as info:
        named.check("a")
    assert info.value.status == 404
    named.loaded(Adapter("a", "/a", 3))
    assert (named.check("a"), named.check("base")) == ("a", "")
    with pytest.raises(HttpError, match="has 'base' and the adapter 'a'"):
        named.check("b")
    named.loaded(Adapter("b", "/b", 4))
    with pytest.raises(HttpError, match="has 'base' and the adapter 'b'"):
        named.check("a")
    named.loaded(None)
    with pytest.raises(HttpError, match="has 'base' alone"):
        named.check("b")


def test_an_adapter_is_live_until_others_load_weights():
    for version, live in ((2, True), (3, True), (4, False)):
        named = models(SimpleNamespace(weight_version=version))
        named.loaded(Adapter("a", "/a", 3))
        assert (named.adapter is not None) is live


def test_an_answer_is_of_the_adapter_that_was_named():
    named = models()
    for version, name in enumerate("aab", 1):
        named.loaded(Adapter(name, "/x", version))
    for name, version in (("a", 1), ("a", 2), ("b", 3), ("", 1), ("", 9)):
        named.check_version(name, version)
    for name, version in (("a", 3), ("b", 2), ("a", 4), ("b", 0)):
        with pytest.raises(HttpError, match="other weights went live") as info:
            named.check_version(name, version)
        assert info.value.status == 409
    named.loaded(Adapter("b", "/x", 3), Adapter("a", "/x", 4))
    named.check_version("a", 4)  # its answers may come before its update has ended
    with pytest.raises(HttpError, match="the adapter 'b'"):
        named.check("a")
    named.loaded(Adapter("b", "/x", 3))
    with pytest.raises(HttpError, match="other weights"):
        named.check_version("a", 4)


class FakeBuffer:
    """Notes the updates that it is asked for."""

    def __init__(self):
        self.client, self.status, self.version = self, None, 0
        self.updates, self.refuse, self.meanwhile = [], {}, lambda: None

    async def fresh_status(self):
        return SimpleNamespace(weight_version=self.version)

    async def update_weights(self, version, source, *, in_flight, timeout_seconds):
        self.updates.append((version, source, in_flight))
        self.meanwhile()
        if self.refuse:
            raise WeightsRefused(version, self.refuse)
        self.version = version
        return SimpleNamespace(version=version)


def control():
    buffer = FakeBuffer()
    named = [Models("/m/base", "", buffer) for _ in range(2)]
    config = Config()
    config = replace(config, shared=replace(config.shared, model="/m/base"))
    return buffer, named, Control(config, buffer, [partial(obey, None, each) for each in named])


async def test_adapters_are_updates_that_every_process_knows_of():
    buffer, named, asked = control()
    await asked.load_adapter("a", "/a", in_place=False)
    assert [each.adapter for each in named] == [Adapter("a", "/a", 1)] * 2
    with pytest.raises(HttpError, match="is loaded: set load_inplace") as info:
        await asked.load_adapter("a", "/a", in_place=False)
    assert info.value.status == 400
    await asked.load_adapter("a", "/a2", in_place=True)
    await asked.load_adapter("b", "/b", in_place=False)  # takes the place of a
    with pytest.raises(HttpError, match="no such adapter is live") as info:
        await asked.unload_adapter("a")
    assert info.value.status == 404
    await asked.unload_adapter("b")
    assert [each.adapter for each in named] == [None] * 2
    sources = [
        source.folder if isinstance(source, LoraAdapter) else source for _, source, _ in buffer.updates
    ]
    assert sources == ["/a", "/a2", "/b", "/m/base"]
    assert {in_flight for *_, in_flight in buffer.updates} == {"abort"}


async def test_answers_of_an_adapter_may_come_before_its_update_has_ended():
    buffer, named, asked = control()
    for refuse in ({}, {"engine-0": "no such folder"}):
        buffer.refuse = refuse
        buffer.meanwhile = lambda: [each.check_version("a", buffer.version + 1) for each in named]
        with contextlib.suppress(HttpError):
            await asked.load_adapter("a", "/a", in_place=True)
    with pytest.raises(HttpError, match="other weights"):
        named[0].check_version("a", 2)  # it was refused


async def test_an_adapter_whose_weights_others_replaced_is_not_live():
    buffer, _, asked = control()
    await asked.load_adapter("a", "/a", in_place=False)
    buffer.version = 7
    with pytest.raises(HttpError, match="no such adapter is live"):
        await asked.unload_adapter("a")
    await asked.load_adapter("a", "/a", in_place=False)
    await asked.update("/w", "weight_dir")
    assert asked.adapter is None


async def test_an_adapter_that_is_refused_leaves_the_one_that_is_live():
    buffer, named, asked = control()
    await asked.load_adapter("a", "/a", in_place=False)
    buffer.refuse = {"engine-0": "no such folder"}
    with pytest.raises(HttpError, match=r"lora_path = '/b': .*engine-0: no such folder") as info:
        await asked.load_adapter("b", "/b", in_place=False)
    assert (info.value.status, info.value.param) == (400, "lora_path")
    assert named[0].adapter == Adapter("a", "/a", 1)
    for name, path, why in (
        ("", "/b", "lora_name"),
        ("base", "/b", "not the model's own"),
        ("/m/base", "/b", "lora_name"),
        ("b", "b", "give an absolute path"),
    ):
        with pytest.raises(HttpError, match=why):
            await asked.load_adapter(name, path, in_place=False)
