"""LoRA adapters in virtual time: versions, digests, streams and quarantine as for full updates."""

import asyncio

import numpy as np
import pytest
from cluster_harness import Cluster, roll, running
from msgspec.structs import replace
from virtual_time import VIRTUAL, eventually

from seer.client import LoraAdapter, WeightsRefused
from seer.client.tensor_stream import TensorStream
from seer.common import wire
from seer.common.weights.digest import digest_of_folder

pytestmark = VIRTUAL

CONFIG = {"peft_type": "LORA", "r": 1, "lora_alpha": 2}


def adapter(fill, base):
    pair = {"w.lora_A.weight": (1, 3), "w.lora_B.weight": (2, 1)}
    return LoraAdapter({k: np.full(v, fill, np.float32) for k, v in pair.items()}, CONFIG, base=base)


def write(folder, fill):
    """A model of one tensor."""
    folder.mkdir(exist_ok=True)
    stream = TensorStream({"w.weight": np.full((2, 3), fill, np.float32)})
    (folder / "model.safetensors").write_bytes(stream.read(0, stream.size).tobytes())
    return folder


@pytest.fixture
def model(tmp_path, monkeypatch):
    """The folder of the model that every engine is started with."""
    base = write(tmp_path / "base", 1.0)
    config = Cluster.config

    def with_model(self, name):
        found = config(self, name)
        return replace(found, shared=replace(found.shared, model=str(base)))

    monkeypatch.setattr(Cluster, "config", with_model)
    return base


async def test_an_adapter_has_a_version_and_a_digest_as_weights_have(model, machines):
    async with running(engines=2) as cluster, cluster.client() as client:
        before = await roll(client)
        live = await client.update_weights(1, adapter(1.0, model))
        assert (live.digest, live.quarantined) == (adapter(1.0, model).digest(), {})
        one, weights = await roll(client)
        assert weights == (1, live.digest)
        assert one != before[0]
        again = await client.update_weights(1, adapter(1.0, model))  # as a trainer that was killed asks
        assert (again.version, again.digest) == (1, live.digest)
        other = await client.update_weights(2, adapter(2.0, model))
        assert other.digest != live.digest
        assert await client.update_weights(3, adapter(1.0, model)) == replace(live, version=3)
        assert (await roll(client))[0] == one
        back = await client.update_weights(4, model)
        assert back.digest == digest_of_folder(model)


async def test_an_engine_that_joins_later_loads_the_adapter(model, machines):
    async with running(engines=1) as cluster, cluster.client() as client:
        await client.update_weights(1, adapter(1.0, model))
        expected = await roll(client)
        await asyncio.sleep(10 * wire.SPOOL_STALL_SECONDS)
        await cluster.start("e1")
        server = cluster.services["buffer"]
        await eventually(lambda: set(server.machine.instances) == {"e0", "e1"})
        await cluster.kill("e0")
        assert await roll(client) == expected


async def test_a_refused_adapter_changes_nothing(model):
    async with running(engines=2) as cluster, cluster.client() as client:
        expected = await roll(client)
        with pytest.raises(WeightsRefused, match=r"e[01]: .*for a base with digest"):
            await client.update_weights(1, adapter(1.0, "1" * 32))
        with pytest.raises(WeightsRefused, match=r"e[01]: .*not finite"):
            await client.update_weights(1, adapter(np.nan, model))
        assert await roll(client) == expected
        assert (await client.status()).quarantined == {}


async def test_the_base_is_the_model_that_an_engine_was_started_with(model, tmp_path):
    async with running(engines=1) as cluster, cluster.client() as client:
        driver, bases = cluster.services["e0"]._driver, []
        load = driver.load_weights

        async def noted(folder, digest, base=None):
            bases.append(base)
            await load(folder, digest, base)

        driver.load_weights = noted
        await client.update_weights(1, write(tmp_path / "other", 2.0))
        for version in (2, 3):
            await client.update_weights(version, adapter(version, model))
        assert bases == [None, model, model]


async def test_a_base_that_changes_while_it_is_loaded_is_not_used(model):
    async with running(engines=1) as cluster, cluster.client() as client:
        driver = cluster.services["e0"]._driver

        async def changing(folder, digest, base=None):
            write(base, 3.0)

        driver.load_weights = changing
        live = await client.update_weights(1, adapter(1.0, model))
        assert "changed while it was loaded" in live.quarantined["e0"]
        with pytest.raises(WeightsRefused, match="files have changed since this engine was started"):
            await client.update_weights(2, adapter(2.0, digest_of_folder(model)))


async def test_an_engine_without_a_model_takes_no_adapter():
    async with running(engines=1) as cluster, cluster.client() as client:
        with pytest.raises(WeightsRefused, match=r"start it with shared\.model"):
            await client.update_weights(1, adapter(1.0, "1" * 32))
