"""What our connector measures of vLLM's steps and loads, and does about it."""

import sys
from types import ModuleType, SimpleNamespace

import msgspec
import pytest

pytest.importorskip("torch")
pytest.importorskip("vllm")

from seer.common.policy.fetch_choice import NEVER, UNMEASURED_TOKENS
from seer.services.engine.vllm.kv_pool import connect, vllm_patches
from seer.services.engine.vllm.kv_pool import connector as connector_module
from seer.services.engine.vllm.kv_pool.connector import MooncakeStoreConnector, SeerStoreConnector
from seer.services.engine.vllm.kv_pool.guarded_store import StoreSettings

pytestmark = pytest.mark.vllm

COMPUTE = 0.001
"""Seconds a token."""


class Scheduler:
    """vLLM's scheduler, as far as it calls a connector, on a clock of its own."""

    def __init__(self, monkeypatch, pull_tokens=None):
        self.now = 100.0
        base = MooncakeStoreConnector
        for name, answer in {
            "__init__": None, "update_state_after_alloc": None, "build_connector_meta": "meta",
            "update_connector_output": None, "take_events": (), "get_num_new_matched_tokens": (900, True),
        }.items():  # fmt: skip
            monkeypatch.setattr(base, name, lambda *_, answer=answer: answer)
        monkeypatch.setattr(base, "connector_scheduler", None, raising=False)
        monkeypatch.setattr(connector_module, "time", SimpleNamespace(monotonic=lambda: self.now))
        extra = {"seer_pull_tokens": pull_tokens, "seer_lookup": "", "seer_settings": SETTINGS}
        transfer = SimpleNamespace(kv_connector_extra_config=extra)
        self.connector = SeerStoreConnector(SimpleNamespace(kv_transfer_config=transfer), None)
        self.connector.connector_scheduler = SimpleNamespace(load_specs={"r": None})

    def step(self, tokens, seconds, *, finished=(), failed=()):
        scheduled = SimpleNamespace(num_scheduled_tokens={"p": tokens}, scheduled_spec_decode_tokens={})
        assert self.connector.build_connector_meta(scheduled) == "meta"
        self.now += seconds
        if finished:
            self.connector.update_connector_output(
                SimpleNamespace(
                    finished_recving=finished, invalid_block_ids=set(failed), failed_recving=set()
                )
            )
        assert self.connector.take_events() == ()

    def load(self, name, tokens, seconds, failed=()):
        self.connector.update_state_after_alloc(SimpleNamespace(request_id=name), None, tokens)
        self.step(1, seconds, finished={name}, failed=failed)

    def fetches(self, missing):
        request = SimpleNamespace(num_tokens=missing, request_id="r", skip_reading_prefix_cache=False)
        return self.connector.get_num_new_matched_tokens(request, 0)


SETTINGS = {"master": "", "host": "h", "protocol": "tcp", "device": "", "lease_seconds": 1, "call_seconds": 1,
            "staging_mib": 1}  # fmt: skip


@pytest.fixture
def scheduler(monkeypatch):
    return Scheduler(monkeypatch)


def computes(scheduler, seconds=COMPUTE):
    for _ in range(8):
        scheduler.step(1001, 1000 * seconds)


def test_a_pool_slower_than_computing_is_left_alone_and_tried_again(scheduler):
    assert scheduler.connector.pull_tokens == UNMEASURED_TOKENS
    computes(scheduler)
    for i in range(8):
        scheduler.load(f"r{i}", 600, 600 * 2 * COMPUTE)
    assert scheduler.connector.pull_tokens == NEVER
    assert scheduler.fetches(10_000) == (0, False)
    scheduler.now += 100
    assert scheduler.fetches(1000) == (900, True)


def test_a_pool_that_is_faster_is_used_for_less_and_what_it_has_too_little_of_is_computed(scheduler):
    computes(scheduler)
    for i in range(8):
        scheduler.load(f"r{i}", 500 + i, 0.1)
    assert scheduler.connector.pull_tokens < UNMEASURED_TOKENS
    assert scheduler.fetches(600) == (900, True)
    assert scheduler.fetches(scheduler.connector.pull_tokens) == (0, False)


def test_loads_that_failed_at_once_do_not_count_as_fast(scheduler):
    computes(scheduler)
    for i in range(8):
        scheduler.load(f"r{i}", 5000, 1e-6, failed={1})
    assert scheduler.connector.pull_tokens == UNMEASURED_TOKENS
    assert scheduler.connector._loads == {}


def test_of_steps_that_overlap_each_counts_from_the_end_of_the_one_before(scheduler):
    def scheduled():
        step = SimpleNamespace(num_scheduled_tokens={"p": 1001}, scheduled_spec_decode_tokens={})
        scheduler.connector.build_connector_meta(step)

    scheduled()
    for _ in range(8):
        scheduled()
        scheduler.now += 1000 * COMPUTE
        scheduler.connector.take_events()
    assert list(scheduler.connector.choice._computed) == pytest.approx([COMPUTE] * 8)


def test_a_number_that_is_configured_is_kept_whatever_was_measured(monkeypatch):
    scheduler = Scheduler(monkeypatch, pull_tokens=800)
    computes(scheduler)
    for i in range(8):
        scheduler.load(f"r{i}", 600, 600 * 2 * COMPUTE)
    assert (scheduler.fetches(800), scheduler.fetches(801)) == ((0, False), (900, True))
    scheduler.connector._pull_tokens = 900  # as many as the pool has
    assert scheduler.fetches(2000) == (0, False)


def test_a_store_that_connects_while_another_connector_is_created_is_mooncakes(monkeypatch):
    module, package = ModuleType("mooncake.store"), ModuleType("mooncake")
    module.MooncakeDistributedStore, package.store = FakeStore, module
    monkeypatch.setitem(sys.modules, "mooncake", package)
    monkeypatch.setitem(sys.modules, "mooncake.store", module)
    connect.store_class.cache_clear()
    try:
        with vllm_patches.patched(lambda: "ours", "ipc:///lookup"):
            assert module.MooncakeDistributedStore() == "ours"
            assert isinstance(connect.open_store(msgspec.convert(SETTINGS, StoreSettings)), FakeStore)
        assert module.MooncakeDistributedStore is FakeStore
    finally:
        connect.store_class.cache_clear()


class FakeStore:
    def setup(self, *_):
        return 0
