"""Seer's scheduler in a real engine: its steps go the short way, and give what those of vLLM's own give."""

from collections.abc import Iterator

import pytest
from engine_cases import engine_of
from shared_engines import MODEL
from ways import BLOCKS, WAYS, in_chunks, in_one_go, with_preemptions, with_turns

from seer.common.config import DraftsConfig
from seer.services.engine.vllm.backend import VllmBackend

ENGINES = {
    "plain": ({}, None),
    "drafts": ({}, DraftsConfig(source="random", max_draft=4)),
    "ahead": ({"async_scheduling": True}, None),
    "ahead with drafts": ({"async_scheduling": True}, DraftsConfig(source="random", max_draft=4)),
}

DECODING = {in_one_go, with_turns, in_chunks, with_preemptions}
"""Ways in most of whose steps somebody decodes, and nobody before it in vLLM's order has a prompt left."""


@pytest.fixture(scope="module", params=ENGINES)
def backend(request: pytest.FixtureRequest) -> Iterator[VllmBackend]:
    settings, drafts = ENGINES[request.param]
    with engine_of(MODEL, drafts, kv_blocks=BLOCKS, **settings) as backend:
        yield backend


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_tokens_and_ends_are_those_of_vllms_own_scheduler(backend, way):
    scheduler = backend.core.engine_core.scheduler
    assert scheduler._fits
    scheduler.short_schedules = scheduler.short_updates = 0
    scheduler._fits = False
    expected = way(backend)
    assert scheduler.short_schedules == scheduler.short_updates == 0
    scheduler._fits = True
    steps = backend.stats().steps
    assert way(backend) == expected
    steps = backend.stats().steps - steps
    schedules, updates = scheduler.short_schedules, scheduler.short_updates
    assert updates > 0.4 * steps
    assert schedules > (0.5 if way in DECODING else 0.25) * steps
    assert not scheduler._rows
    assert backend.stats().free_blocks == BLOCKS
