"""Drafts in steps that are scheduled ahead: whatever is drafted, however many and however late, no token changes.

Invariants:
- tokens and ends are those of steps one at a time without drafts, whatever length each step drafts;
- no draft takes a KV block that its chunk has not reserved, and all are free when all have ended;
- drafts that come late, or not at all, cost time alone.
"""

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from ahead import check_on_two_ranks
from draft_plans import check_only_reserved_blocks, script
from engine_cases import chunk, clear, engine_of, run
from shared_engines import MODEL
from ways import BLOCKS, CASES, WAYS, Results, check_rows_fail_alone, in_chunks, in_one_go, prompt, siblings

from seer.common.config import DraftsConfig
from seer.common.sleep import SleepState
from seer.common.types import SamplingParams
from seer.services.engine.vllm.backend import VllmBackend
from seer.services.engine.vllm.core import CoreHandle

MOST = 5


class AnySampler:
    """Draws token 5 everywhere: stands for vLLM's, which has no kernels on CPUs."""

    compute_nans = enable_adaptive_verification = False

    def __init__(self, of: object) -> None:
        self.penalties_state, self.sampling_states = of.penalties_state, of.sampling_states

    def add_request(self, slot: int, params: object) -> None:
        pass

    def apply_staged_writes(self) -> None:
        pass

    def __call__(self, logits: torch.Tensor, batch: object, *_: object) -> object:
        from vllm.v1.worker.gpu.sample.output import SamplerOutput

        counts = batch.num_draft_tokens_per_req
        width = 1 if counts is None else int(counts.max()) + 1
        return SamplerOutput(
            sampled_token_ids=torch.full((batch.num_reqs, width), 5), logprobs_tensors=None, num_nans=None,
            num_sampled=torch.ones(batch.num_reqs, dtype=torch.int32),
            num_rejected=torch.full((batch.num_reqs,), width - 1, dtype=torch.int32),
        )  # fmt: skip


def warmed_up(describe: Callable[..., None]) -> Callable[..., None]:
    """Return `CoreHandle.describe` after vLLM's warm-up on GPUs, steps that know nothing of Seer."""

    def call(core: CoreHandle, *arguments: object) -> None:
        from vllm.v1.worker.gpu.warmup import warmup_kernels

        worker = core.engine_core.model_executor.driver_worker.worker
        runner, own = worker.model_runner, worker.model_runner.sampler
        runner.sampler = runner.rejection_sampler = AnySampler(own)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.accelerator, "synchronize", lambda: None)
            patch.setattr(runner, "kv_block_zeroer", None)
            patch.setattr(runner.prompt_logprobs_worker, "compute_prompt_logprobs", lambda *_: {})
            patch.setattr(runner.structured_outputs_worker, "apply_grammar_bitmask", lambda *_: None)
            patch.setattr(model_runner, "grammar_invalid_drafts", lambda *_: None)
            warmup_kernels(runner, worker.execute_model, worker.sample_tokens)
        runner.sampler = own
        describe(core, *arguments)

    from vllm.v1.worker.gpu import model_runner

    return call


@pytest.fixture(scope="module")
def engine(
    expected_ways: dict[str, Results], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VllmBackend]:
    drafts = DraftsConfig(max_draft=MOST, cache=str(tmp_path_factory.mktemp("profiles")))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CoreHandle, "describe", warmed_up(CoreHandle.describe))
        with engine_of(MODEL, drafts, kv_blocks=BLOCKS, async_scheduling=True) as backend:
            backend._drafting.start_always()
            yield backend


@pytest.fixture
def backend(engine: VllmBackend, monkeypatch: pytest.MonkeyPatch) -> Iterator[VllmBackend]:
    """The engine, drafting any number of tokens from step to step."""
    monkeypatch.setattr(engine._drafting, "_length", None)
    random.seed(7)
    yield engine
    clear(engine)


def speculator(backend: VllmBackend) -> object:
    return backend.core.engine_core.model_executor.driver_worker.worker.model_runner.speculator


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_tokens_are_those_without_drafts(
    backend: VllmBackend, expected_ways: dict[str, Results], way: Callable[[VllmBackend], Results]
) -> None:
    before = backend.stats()
    assert way(backend) == expected_ways[way.__name__]
    after = backend.stats()
    assert after.drafted_tokens - before.drafted_tokens > after.accepted_tokens - before.accepted_tokens > 0
    assert after.draft_seconds > before.draft_seconds
    assert not backend.core.has_steps_under_way
    assert after.free_blocks == BLOCKS


@pytest.mark.parametrize("kind", ["right", "wrong", "random", "truncated", "none"])
def test_any_draft_changes_nothing(backend: VllmBackend, kind: str) -> None:
    script(backend, "none")
    plain = run(backend, siblings(8))
    script(backend, kind, {i: plain[f"r{i}"].tokens + [7] * MOST for i in range(8)})
    before = backend.stats()
    found = run(backend, siblings(8))
    assert {name: each.tokens for name, each in found.items()} == {
        name: each.tokens for name, each in plain.items()
    }
    for name, each in found.items():
        assert each.logprobs == pytest.approx(plain[name].logprobs, abs=1e-4)
    after = backend.stats()
    accepted = after.accepted_tokens - before.accepted_tokens
    if kind == "right":
        assert accepted > 8 * 60 / 3
        assert after.steps - before.steps < 45
    assert after.free_blocks == BLOCKS


def test_drafts_take_no_block_that_was_not_reserved(backend: VllmBackend) -> None:
    sampling = SamplingParams(max_tokens=120, ignore_eos=True)
    chunks = [
        chunk(f"r{i}", sampling, index=i, key=i, prompt=prompt(i), wait_for_room=True) for i in range(12)
    ]
    for kind in ("right", "wrong"):
        check_only_reserved_blocks(backend, chunks, kind)


def test_drafts_that_come_late_or_not_at_all_change_nothing(
    backend: VllmBackend, expected_ways: dict[str, Results]
) -> None:
    steps = speculator(backend).trees.steps
    missed, before = steps.missed, backend.stats().accepted_tokens
    steps.stall(0.01)
    try:
        for way in (in_one_go, in_chunks):
            assert way(backend) == expected_ways[way.__name__]
    finally:
        steps.stall(0.0)
    assert steps.missed - missed > 20
    assert backend.stats().accepted_tokens > before


def test_what_is_said_while_drafts_are_off_is_in_the_trees(backend: VllmBackend) -> None:
    backend._drafting.begin_step(0, float, float)
    backend._drafting._on = False
    first = run(backend, siblings(8))
    before = backend.stats()
    assert before.steps
    backend._drafting._on = True
    second = run(
        backend,
        [chunk(f"s{i}", siblings(8)[i].sampling, index=10 + i, key=i, prompt=prompt(i)) for i in range(8)],
    )
    assert [second[f"s{i}"].tokens for i in range(8)] == [first[f"r{i}"].tokens for i in range(8)]
    assert backend.stats().accepted_tokens - before.accepted_tokens > 8 * 60 / 3


def test_rows_that_cannot_be_sampled_fail_alone(
    backend: VllmBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_rows_fail_alone(backend, monkeypatch)


def test_an_update_and_sleep_wait_for_the_step_under_way(
    backend: VllmBackend, expected_ways: dict[str, Results]
) -> None:
    for change in (
        lambda: backend.load_weights(MODEL, ""),
        lambda: [backend.sleep(SleepState.ASLEEP, 1), backend.sleep(SleepState.AWAKE, 1)],
    ):
        backend.add(chunk("dropped", CASES["plain"], prompt=prompt(0)))
        for _ in range(3):
            backend.step()
        assert backend.core.has_steps_under_way
        change()
        assert not backend.has_work()
        assert in_one_go(backend) == expected_ways["in_one_go"]


def test_lengths_follow_what_was_right(engine: VllmBackend) -> None:
    """By its own choice the engine drafts long where siblings say the same, and one token where nothing is right."""
    length = engine._drafting._length
    plain = run(engine, siblings(8))
    again = [chunk(f"s{i}", siblings(8)[i].sampling, index=10 + i, key=i, prompt=prompt(i)) for i in range(8)]
    assert [run(engine, again)[f"s{i}"].tokens for i in range(8)] == [plain[f"r{i}"].tokens for i in range(8)]
    assert length.expected()[-1] > 0.6


TWO_RANKS = """
import json
import sys
from pathlib import Path

from ahead import scheduling_ahead
from shared_engines import MODEL
from ways import BLOCKS, WAYS

from seer.common.config import DraftsConfig, EngineConfig, SharedConfig
from seer.services.engine.vllm.backend import VllmBackend


def check(expected, ahead, drafts=None):
    config = EngineConfig(
        kv_blocks=BLOCKS, max_num_seqs=32, max_model_len=256, tensor_parallel=2, async_scheduling=ahead
    )
    backend = VllmBackend(config, SharedConfig(model=str(MODEL)), None, drafts)
    backend.start()
    assert backend.versions["tensor_parallel"] == "2"
    assert backend.versions["scheduling"] == ("asynchronous" if ahead else "synchronous")
    if drafts is not None:
        backend._drafting.start_always()
        backend._drafting._length = None
    found = json.loads(json.dumps({way.__name__: way(backend) for way in WAYS}))
    assert drafts is None or backend.stats().accepted_tokens > 0
    workers = [worker.proc for worker in backend.core.engine_core.model_executor.workers]
    backend.close()
    assert [worker.is_alive() for worker in workers] == [False, False]
    different = [name for name in expected if found[name] != expected[name]]
    assert not different, different


if __name__ == "__main__":
    expected = json.loads(Path(sys.argv[1]).read_text())
    with scheduling_ahead():
        check(expected, True, DraftsConfig(max_draft=5, cache=sys.argv[2]))
        check(expected, True)
    check(expected, False)
    print("the same")
"""


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.breadth
@pytest.mark.timeout(900)
def test_two_ranks_draw_what_one_draws_ahead_or_not(
    expected_ways: dict[str, Results], tmp_path: Path
) -> None:
    (tmp_path / "expected.json").write_text(json.dumps(expected_ways))
    check_on_two_ranks(tmp_path, TWO_RANKS, tmp_path / "expected.json", tmp_path)
