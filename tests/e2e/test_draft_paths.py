"""Several draft paths per step under the real engine: they change no token, no logprob and no block."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from ahead import check_on_two_ranks
from draft_plans import PLANS, check_only_reserved_blocks, check_preempted_go_on, counts, gained, script
from engine_cases import (
    BASE,
    CASES,
    KEY,
    LENGTH,
    PROMPT,
    check_every_cut,
    check_only_the_spoilt_fail,
    chunk,
    clear,
    engine_of,
    one_go,
    products,
    run,
    sampling_of,
)

from seer.common.config import DraftsConfig
from seer.common.policy.draft_budget import DraftBudget
from seer.common.policy.draft_costs import StepCosts
from seer.common.types import SamplingParams
from seer.services.dgds.client import StreamDelta
from seer.services.engine.vllm.backend import VllmBackend
from seer.services.engine.vllm.drafts.draft_script import DraftScript

VOCAB = 200


@pytest.fixture(scope="module")
def engine(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmBackend]:
    drafts = DraftsConfig(max_draft=11, max_paths=3, cache=str(tmp_path_factory.mktemp("profiles")))
    with engine_of(tiny_model, drafts, kv_blocks=36) as engine:
        engine._drafting.start_always()
        yield engine


@pytest.fixture
def backend(engine: VllmBackend) -> Iterator[VllmBackend]:
    yield engine
    clear(engine)
    assert engine.stats().free_blocks == engine.capacity.kv_blocks == 36


@pytest.mark.parametrize(
    ("case", "plan"), products(CASES, ["right_third", "all_wrong", "forks"], "everything", "right_third")
)
def test_paths_at_every_offset_change_nothing(backend, case, plan):
    script(backend, "none")
    sampling = sampling_of(backend, case)
    whole = one_go(backend, sampling)
    before = counts(backend)
    # More is known than the response may have: a draft goes on where a stop must cut it.
    script(backend, plan, {0: whole.tokens + [7] * LENGTH})
    check_every_cut(backend, sampling, whole)
    after = gained(backend, before)
    assert after["rows"] > 0
    assert after["conflicts"] == 0
    assert (after["won"] == 0) == (plan == "all_wrong")


@pytest.mark.parametrize("plan", ["right_third", "forks"])
def test_rows_that_cannot_be_sampled_fail_alone(backend, monkeypatch, plan):
    chunks = [
        chunk(str(i), CASES["everything"], index=i, key=KEY + i, prompt=PROMPT[: 4 + i]) for i in range(6)
    ]
    script(backend, "none")
    script(backend, plan, {i: one.tokens for i, one in enumerate(run(backend, chunks).values())})
    before = counts(backend)
    spoilt = {KEY + 1: 5, KEY + 2: 12, KEY + 3: 7 + LENGTH - 1}
    check_only_the_spoilt_fail(backend, monkeypatch, chunks, spoilt)
    assert gained(backend, before)["rows"] > 0


LONG = SamplingParams(max_tokens=150, temperature=0.8, ignore_eos=True)


def check_kv(backend: VllmBackend, plan: str, sizes: tuple[int, ...] = (70, 97)) -> None:
    """Compare responses that siblings won, and what follows on their cached KV, with plain decoding."""
    script(backend, "none")
    whole = one_go(backend, LONG, group_id="")
    before, steps = counts(backend), backend.stats().steps
    known = {0: whole.tokens}
    for size in sizes:
        backend.core.reset_prefix_cache()  # raises if scratch blocks count as used
        script(backend, plan, known)
        begun = one_go(backend, LONG, max_new_tokens=size)
        assert begun.tokens == whole.tokens[:size]
        assert begun.logprobs == pytest.approx(whole.logprobs[:size], abs=1e-4)
        script(backend, "none")
        rest = one_go(backend, LONG, tokens=PROMPT + begun.tokens, prompt_len=len(PROMPT))
        assert rest.ends[0].cached_tokens == (len(PROMPT) + size - 1) // 32 * 32
        assert rest.tokens == whole.tokens[size:]
        assert rest.logprobs == pytest.approx(whole.logprobs[size:], abs=1e-4)
    after = gained(backend, before)
    assert after["won"] > 10
    assert after["conflicts"] == after["dropped"] == 0
    assert backend.stats().steps - steps < len(sizes) * len(whole.tokens)


@pytest.mark.parametrize("plan", ["right_second", "right_third", "forks"])
def test_a_winners_kv_is_the_requests_own(backend, plan):
    check_kv(backend, plan)


@pytest.mark.parametrize("place", ["before", "after"])
def test_without_either_copy_of_kv_something_differs(backend, monkeypatch, place):
    """The partial block is copied before the forward pass, a winner's blocks after sampling."""
    from seer.services.engine.vllm.drafts import path_ops

    monkeypatch.setattr(path_ops.PathOps, f"copy_{place}", lambda *_: None)
    with pytest.raises(AssertionError):
        check_kv(backend, "right_second")


def test_a_right_sibling_saves_steps(backend):
    script(backend, "none")
    whole = one_go(backend, LONG)
    steps = []
    for plan in ("wrong", "right_second"):
        before = backend.stats().steps
        script(backend, plan, {0: whole.tokens})
        assert one_go(backend, LONG).tokens == whole.tokens
        steps.append(backend.stats().steps - before)
    assert steps[1] < 0.7 * steps[0]


@pytest.mark.parametrize("plan", PLANS)
def test_preempted_requests_with_paths_go_on_the_same(backend, plan):
    before = counts(backend)
    check_preempted_go_on(backend, plan)
    after = gained(backend, before)
    assert after["rows"] > 0
    assert after["dropped"] > 0, "16 requests have more paths than there is scratch"


@pytest.mark.parametrize("plan", PLANS)
def test_paths_take_no_block_that_was_not_reserved(backend, plan):
    sampling = SamplingParams(max_tokens=100, ignore_eos=True)
    chunks = [chunk(f"r{i}", sampling, index=i, key=i, wait_for_room=True) for i in range(12)]
    check_only_reserved_blocks(backend, chunks, plan)


def test_rows_of_prefills_and_paths_share_a_step(backend):
    script(backend, "none")
    sampling = SamplingParams(max_tokens=40, ignore_eos=True)
    chunks = [chunk(str(i), sampling, index=i, key=i, prompt=[1, *range(3 + i, 60)]) for i in range(6)]
    alone = {one.request_id: run(backend, [one])[one.request_id] for one in chunks}
    backend.core.reset_prefix_cache()
    before = counts(backend)
    script(backend, "right_second", {i: alone[str(i)].tokens for i in range(6)})
    got: dict[str, list[int]] = {one.request_id: [] for one in chunks}
    waiting = list(chunks)
    while waiting or backend.has_work():
        if waiting:  # each joins while the others decode
            backend.add(waiting.pop())
        for generated in backend.step().generated:
            got[generated.request_id] += generated.token_ids
    assert got == {name: response.tokens for name, response in alone.items()}
    assert gained(backend, before)["won"] > 0


def test_captured_requests_have_one_row(backend):
    script(backend, "none")
    whole = one_go(backend, BASE)
    script(backend, "right_second", {0: whole.tokens})
    before = counts(backend)
    tokens, (rows,) = backend.probe.capture(chunk("one", BASE))
    assert tokens == whole.tokens
    assert len(rows) == len(tokens)
    assert gained(backend, before)["rows"] == 0 < gained(backend, before)["dropped"]


def test_a_torn_request_keeps_its_own_row(backend, monkeypatch):
    """Rows that should say the same differ by last bits on some hardware; here, by force."""
    from seer.services.engine.vllm.sampling import slot_rows

    script(backend, "none")
    whole = one_go(backend, BASE)
    backend.probe.script_drafts(
        DraftScript(kind="wrong", vocab=VOCAB, known={0: whole.tokens}, others=("right",))
    )
    before, accept_drafts = counts(backend), slot_rows.accept_drafts

    def torn(tokens, logprobs, counts, drafts):
        if len(counts) > 1:
            tokens[counts[0] + 1] ^= 1  # what the sibling's first row drew
        return accept_drafts(tokens, logprobs, counts, drafts)

    monkeypatch.setattr(slot_rows, "accept_drafts", torn)
    assert one_go(backend, BASE).tokens == whole.tokens
    after = gained(backend, before)
    assert after["conflicts"] == after["rows"] > 0
    assert after["won"] == 0


def test_one_path_takes_no_scratch(backend):
    from seer.services.engine.vllm.drafts.scratch_blocks import scratch_blocks, take_scratch_blocks

    one = DraftsConfig(max_paths=1)
    assert scratch_blocks(one, 32) == scratch_blocks(None, 32) == 0
    assert take_scratch_blocks(backend.core.engine_core, one, 32) == []


def test_what_cannot_have_paths_is_said_once(backend, monkeypatch):
    from seer.services.engine.vllm.drafts import scratch_blocks as scratch

    said = []
    monkeypatch.setattr(scratch._log, "info", lambda *text, **fields: said.append((text, fields)))
    config = backend.core.engine_core.vllm_config
    monkeypatch.setattr(config.cache_config, "num_gpu_blocks_override", None)
    monkeypatch.setattr(config, "lora_config", object())
    assert scratch.take_scratch_blocks(backend.core.engine_core, DraftsConfig(), 32) == []
    assert said == [(("one draft path per request",), {"why": "LoRA"})]


TWO_RANKS = """
import itertools
import sys

from draft_plans import script
from engine_cases import chunk, run

from seer.common.config import DraftsConfig, EngineConfig, SharedConfig
from seer.common.types import SamplingParams
from seer.services.engine.vllm.backend import VllmBackend


def rolled(backend):
    sampling = SamplingParams(max_tokens=60, temperature=0.9, repetition_penalty=1.3, ignore_eos=True)
    found = run(backend, [chunk(str(key), sampling, key=key, index=key) for key in range(3)])
    return {int(name): one.tokens for name, one in found.items()}


if __name__ == "__main__":
    config = EngineConfig(kv_blocks=40, max_num_seqs=12, max_model_len=256, tensor_parallel=2)
    drafts = DraftsConfig(max_draft=11, max_paths=3, cache=sys.argv[2])
    backend = VllmBackend(config, SharedConfig(model=sys.argv[1]), None, drafts)
    backend.start()
    script(backend, "none")
    plain = rolled(backend)
    script(backend, "right_third", plain)
    assert rolled(backend) == plain
    backend.probe.script_drafts(None)
    control, steps = backend._drafting, itertools.count()
    control.start_always()

    def switch(*_):
        control._queue("switch", on=next(steps) % 5 < 3)
        control.flush()

    control.begin_step = switch
    assert rolled(backend) == plain
    ranks = backend.core.rpc("seer_path_counts")
    backend.close()
    assert ranks[0] == ranks[1], ranks
    assert ranks[0]["won"] > 10, ranks
    assert ranks[0].get("conflicts", 0) == 0, ranks
    print("the same")
"""


@pytest.mark.breadth
@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.timeout(600)
def test_two_ranks_choose_the_same_paths(tiny_model, tmp_path):
    check_on_two_ranks(tmp_path, TWO_RANKS, tiny_model, tmp_path)


def test_trees_give_several_paths_where_they_pay(backend):
    """The responses in the tree differ in their second tokens, and the oldest is right."""
    script(backend, "none")
    sampling = SamplingParams(max_tokens=60, temperature=0.8, ignore_eos=True)
    whole = one_go(backend, sampling, group_id="").tokens
    said = [[(token + add * (place == 1)) % VOCAB for place, token in enumerate(whole)] for add in range(3)]
    runner = backend.core.engine_core.model_executor.driver_worker.worker.model_runner
    drafter = runner.speculator
    budget, paths = drafter.budget, drafter.path_selector.most_paths
    backend.probe.script_drafts(None)
    try:
        drafter.budget = DraftBudget(StepCosts(batches=(1,), drafts=(0,), grid=((1.0,),)), 11)
        drafter.path_selector.most_paths = 3
        before, drafted = counts(backend), backend.stats()
        backend.add(chunk("again", sampling, index=9))
        backend.feed(
            StreamDelta("g", index, 0, np.array(tokens, np.int32)) for index, tokens in enumerate(said)
        )
        got: list[int] = []
        while backend.has_work():
            for generated in backend.step().generated:
                got += generated.token_ids
    finally:
        drafter.budget, drafter.path_selector.most_paths = budget, paths
    after, stats = gained(backend, before), backend.stats()
    assert got == whole
    assert after["rows"] >= after["won"] > 0
    assert after["conflicts"] == 0
    assert 0 < stats.accepted_tokens - drafted.accepted_tokens < stats.drafted_tokens - drafted.drafted_tokens
