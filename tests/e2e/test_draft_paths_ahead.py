"""Several draft paths in steps that are scheduled ahead: whatever shape drafts have, no token changes.

Invariants:
- tokens, logprobs and ends are those without drafts, though only the device knows where a path begins;
- no draft takes a KV block that its chunk has not reserved, and all are free when all have ended;
- a response's KV is its own, whichever path won: what follows on it in the prefix cache is the same.
"""

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from ahead import check_on_two_ranks
from draft_plans import PLANS, counts, gained, script
from engine_cases import chunk, clear, engine_of, one_go, run
from shared_engines import MODEL
from ways import BLOCKS, WAYS, Results, check_rows_fail_alone, prompt, siblings

from seer.common.config import DraftsConfig
from seer.common.policy.draft_costs import StepCosts
from seer.common.policy.draft_paths import Entries
from seer.common.policy.draft_shape import DraftShape
from seer.common.types import SamplingParams
from seer.services.dgds.client import StreamDelta
from seer.services.engine.vllm.backend import VllmBackend
from seer.services.engine.vllm.drafts.draft_script import DraftScript

VOCAB = 60
SHAPES = [0, 1, 5, 11, *(Entries(each * paths + paths - 1, paths) for paths in (2, 3) for each in (1, 2, 3))]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmBackend]:
    drafts = DraftsConfig(max_draft=11, max_paths=3, cache=str(tmp_path_factory.mktemp("profiles")))
    with engine_of(MODEL, drafts, kv_blocks=BLOCKS, async_scheduling=True) as backend:
        backend._drafting.start_always()
        yield backend


@pytest.fixture
def backend(engine: VllmBackend, monkeypatch: pytest.MonkeyPatch) -> Iterator[VllmBackend]:
    """The engine, with drafts of any shape from step to step."""
    dice = random.Random(7)
    monkeypatch.setattr(engine._drafting, "_choose", lambda *_: dice.choice(SHAPES))
    yield engine
    clear(engine)
    assert engine.stats().free_blocks == BLOCKS


def plain(backend: VllmBackend, chunks: list[object]) -> dict[str, object]:
    """What chunks say without drafts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend._drafting, "_choose", lambda *_: 0)
        return run(backend, chunks)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_tokens_are_those_without_drafts(
    backend: VllmBackend, monkeypatch: pytest.MonkeyPatch, way: Callable[[VllmBackend], Results]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(backend._drafting, "_choose", lambda *_: 0)
        expected = way(backend)
    before = counts(backend)
    assert way(backend) == expected
    assert gained(backend, before)["rows"] > 0
    assert gained(backend, before)["conflicts"] == 0


@pytest.mark.parametrize("plan", PLANS)
def test_any_paths_change_nothing(backend: VllmBackend, plan: str) -> None:
    expected = plain(backend, siblings(6))
    script(backend, plan, {i: expected[f"r{i}"].tokens + [7] * 11 for i in range(6)})
    before = counts(backend)
    found = run(backend, siblings(6))
    for name, each in found.items():
        assert each.tokens == expected[name].tokens
        assert each.logprobs == pytest.approx(expected[name].logprobs, abs=1e-4)
    after = gained(backend, before)
    assert after["rows"] > 0
    assert after["conflicts"] == 0
    assert (after["won"] > 10) == (plan not in ("all_wrong", "right_first"))


@pytest.mark.parametrize("plan", ["right_second", "right_third", "forks"])
def test_a_winners_kv_is_the_requests_own(backend: VllmBackend, plan: str) -> None:
    check_kv(backend, plan)


def check_kv(backend: VllmBackend, plan: str) -> None:
    sampling = SamplingParams(max_tokens=150, temperature=0.8, ignore_eos=True)
    whole = plain(backend, [chunk("one", sampling, prompt=prompt(1))])["one"]
    before = counts(backend)
    for size in (70, 97):
        backend.core.reset_prefix_cache()
        script(backend, plan, {0: whole.tokens})
        begun = one_go(backend, sampling, prompt=prompt(1), max_new_tokens=size)
        assert begun.tokens == whole.tokens[:size]
        assert begun.logprobs == pytest.approx(whole.logprobs[:size], abs=1e-4)
        following = chunk("one", sampling, tokens=prompt(1) + begun.tokens, prompt_len=len(prompt(1)))
        rest = plain(backend, [following])["one"]
        assert rest.ends[0].cached_tokens > 32
        assert rest.tokens == whole.tokens[size:]
        assert rest.logprobs == pytest.approx(whole.logprobs[size:], abs=1e-4)
    after = gained(backend, before)
    assert after["won"] > 3
    assert after["conflicts"] == after["dropped"] == 0


@pytest.mark.parametrize("place", ["before", "after"])
def test_without_either_copy_of_kv_something_differs(
    backend: VllmBackend, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    from seer.services.engine.vllm.drafts.path_ops import PathOps

    monkeypatch.setattr(PathOps, f"copy_{place}", lambda *_: None)
    with pytest.raises(AssertionError):
        check_kv(backend, "right_second")


def test_a_right_second_path_saves_steps(backend: VllmBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = plain(backend, siblings(1))["r0"].tokens
    known = {0: expected}
    backend.probe.script_drafts(
        DraftScript(kind="wrong", vocab=VOCAB, known=known, count=5, others=("right",))
    )
    steps = []
    for shape in (11, Entries(11, 2)):
        monkeypatch.setattr(backend._drafting, "_choose", lambda *_, shape=shape: shape)
        before = backend.stats().steps
        assert run(backend, siblings(1))["r0"].tokens == expected
        steps.append(backend.stats().steps - before)
    assert steps[1] < 0.5 * steps[0]


def test_paths_take_no_block_that_was_not_reserved(backend: VllmBackend) -> None:
    sampling = SamplingParams(max_tokens=120, ignore_eos=True)
    chunks = [
        chunk(f"r{i}", sampling, index=i, key=i, prompt=prompt(i), wait_for_room=True) for i in range(12)
    ]
    expected = plain(backend, chunks)
    known = {i: expected[f"r{i}"].tokens for i in range(12)}
    before = backend.stats().preemptions
    for plan in PLANS:
        script(backend, plan, known)
        found = run(backend, chunks)
        assert all(found[name].tokens == expected[name].tokens for name in expected)
    assert backend.stats().preemptions == before


def test_preempted_requests_with_paths_go_on_the_same(backend: VllmBackend) -> None:
    chunks = siblings(24)
    expected = {one.request_id: plain(backend, [one])[one.request_id].tokens for one in chunks}
    before, preempted = counts(backend), backend.stats().preemptions
    script(backend, "right_second", {i: expected[f"r{i}"] for i in range(24)})
    found = run(backend, chunks)
    assert {name: each.tokens for name, each in found.items()} == expected
    assert backend.stats().preemptions > preempted
    assert gained(backend, before)["dropped"] > 0


def test_rows_that_cannot_be_sampled_fail_alone(
    backend: VllmBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_rows_fail_alone(backend, monkeypatch)


def test_trees_give_several_paths_where_they_pay(
    engine: VllmBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its own choice: the responses in the tree differ in their second tokens, and the oldest is right."""
    free = StepCosts(batches=(1,), drafts=(0,), grid=((1.0,),))
    sampling = SamplingParams(max_tokens=100, temperature=0.8, ignore_eos=True)
    whole = plain(engine, [chunk("one", sampling, index=8, prompt=prompt(3))])["one"].tokens
    engine.forget(["g"])
    monkeypatch.setattr(engine._drafting, "_length", DraftShape(free, 11, 3, 16))
    monkeypatch.setattr(engine._drafting, "_chosen_steps", 0)
    said = [[(token + add * (place == 1)) % VOCAB for place, token in enumerate(whole)] for add in range(2)]
    before, drafted = counts(engine), engine.stats()
    engine.add(chunk("again", sampling, index=9, prompt=prompt(3)))
    engine.feed(StreamDelta("g", index, 0, np.array(tokens, np.int32)) for index, tokens in enumerate(said))
    got: list[int] = []
    while engine.has_work():
        for generated in engine.step().generated:
            got += generated.token_ids
    after, stats = gained(engine, before), engine.stats()
    assert got == whole
    assert after["rows"] >= after["won"] > 0
    assert after["conflicts"] == 0
    assert stats.steps - drafted.steps < 60
    assert 0 < stats.accepted_tokens - drafted.accepted_tokens < stats.drafted_tokens - drafted.drafted_tokens


TWO_RANKS = """
import random
import sys

from ahead import scheduling_ahead
from ways import BLOCKS, WAYS

from seer.common.config import DraftsConfig, EngineConfig, SharedConfig
from seer.common.policy.draft_paths import Entries
from seer.services.engine.vllm.backend import VllmBackend

SHAPES = [0, 3, Entries(5, 2), Entries(8, 3), Entries(11, 2)]


if __name__ == "__main__":
    config = EngineConfig(
        kv_blocks=BLOCKS, max_num_seqs=32, max_model_len=256, tensor_parallel=2, async_scheduling=True,
    )
    with scheduling_ahead():
        drafts = DraftsConfig(max_draft=11, max_paths=3, cache=sys.argv[2])
        backend = VllmBackend(config, SharedConfig(model=sys.argv[1]), None, drafts)
        backend.start()
        backend._drafting.start_always()
        found = []
        for choose in (lambda *_: 0, lambda *_: random.choice(SHAPES)):
            backend._drafting._choose = choose
            found.append({way.__name__: way(backend) for way in WAYS})
        ranks = backend.core.rpc("seer_path_counts")
        backend.close()
    different = [name for name in found[0] if found[0][name] != found[1][name]]
    assert not different, different
    assert ranks[0] == ranks[1], ranks
    assert ranks[0]["won"] > 0, ranks
    assert ranks[0]["conflicts"] == 0, ranks
    print("the same")
"""


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.breadth
@pytest.mark.timeout(600)
def test_two_ranks_choose_the_same_paths(tmp_path: Path) -> None:
    check_on_two_ranks(tmp_path, TWO_RANKS, MODEL, tmp_path)
