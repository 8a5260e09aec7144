"""Asynchronous scheduling: a step begins before the tokens of the last one are known, and changes no token.

Invariants:
- whatever runs, and however it is cut, batched, stopped, dropped or preempted, tokens and ends are those of
  synchronous scheduling;
- what the host has of a running request's tokens is not read;
- when all chunks have ended, no step is under way, and all KV blocks are free.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from engine_cases import chunk, engine_of
from shared_engines import MODEL
from ways import BLOCKS, CASES, STOP, WAYS, Results, check_rows_fail_alone, in_one_go, prompt

from seer.common.config import DraftsConfig, EngineConfig, SharedConfig
from seer.common.errors import EngineError
from seer.services.engine.vllm.backend import VllmBackend
from seer.services.engine.vllm.sampling.rows import RowParams


@pytest.mark.parametrize("drafts", [None, DraftsConfig()])
def test_what_cannot_schedule_ahead_is_refused_by_name(drafts: DraftsConfig | None) -> None:
    config = EngineConfig(kv_blocks=BLOCKS, max_num_seqs=8, max_model_len=256, async_scheduling=True)
    with pytest.raises(EngineError, match=r"engine.async_scheduling = true: .*not allow it on this device"):
        VllmBackend(config, SharedConfig(model=str(MODEL)), drafts=drafts).start()


@pytest.fixture(scope="module")
def engine(expected_ways: dict[str, Results]) -> Iterator[VllmBackend]:
    with engine_of(MODEL, kv_blocks=BLOCKS, async_scheduling=True) as backend:
        yield backend


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_tokens_are_those_of_synchronous_scheduling(
    backend: VllmBackend, expected_ways: dict[str, Results], way: Callable[[VllmBackend], Results]
) -> None:
    assert way(backend) == expected_ways[way.__name__]
    assert not backend.core.has_steps_under_way
    assert backend.stats().free_blocks == BLOCKS


def test_the_ways_stop_as_they_say(expected_ways: dict[str, Results]) -> None:
    reasons = {finish for _, finish in expected_ways["in_one_go"].values()}
    assert {("stop", str(STOP)), ("length", "")} < reasons
    assert any(reason in CASES["stop strings"].stop for _, reason in reasons)
    assert expected_ways["in_chunks"] == expected_ways["told_to_end"] == expected_ways["in_one_go"]


def test_a_step_begins_before_the_last_one_is_known(backend: VllmBackend) -> None:
    assert backend.versions["scheduling"] == "asynchronous"
    runner = backend.core.engine_core.model_executor.driver_worker.worker.model_runner
    backend.add(chunk("one", CASES["repetition"], prompt=prompt(0)))
    outputs = [backend.step() for _ in range(5)]
    assert [len(output.generated) for output in outputs] == [0, 1, 1, 1, 1]
    # Five tokens are drawn, of which the host was given four.
    (slot,) = runner.req_states.req_id_to_index.values()
    assert runner.req_states.total_len.gpu[slot] == 25


def test_histories_on_the_device_are_what_counts(
    backend: VllmBackend, expected_ways: dict[str, Results], monkeypatch: pytest.MonkeyPatch
) -> None:
    from seer.services.engine.vllm.sampling.slot_rows import SlotRows

    made = SlotRows.rows

    def forgotten(rows: SlotRows, batch: Any) -> RowParams:
        return replace(made(rows, batch), history=np.zeros_like(rows.history.numpy()))

    monkeypatch.setattr(SlotRows, "rows", forgotten)
    assert in_one_go(backend) != expected_ways["in_one_go"]


def test_rows_that_cannot_be_sampled_fail_alone(
    backend: VllmBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_rows_fail_alone(backend, monkeypatch)


def test_logits_are_captured(backend: VllmBackend) -> None:
    tokens, (logits,) = backend.probe.capture(chunk("one", CASES["plain"], prompt=prompt(0)))
    assert logits.shape == (len(tokens), backend.core.vocab_size)
    assert np.isfinite(logits).all()
