"""Simulated instances of data-parallel ranks."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from seer.common.policy.schedule import POLICIES
from seer.sim.cluster import Cluster
from seer.sim.drafting import CLASSES, Drafting
from seer.sim.instance import Chunk, Instance
from seer.sim.ranks import RankedInstance
from seer.sim.workload import Model, Workload

MODEL = Model(
    step=0.01, request=1e-4, kv=1e-6, attend=0.0, row=0.0, weights=0.0, prefill=1e-6, pull=0.0,
    kv_tokens=4000, block_size=1, max_num_seqs=64,
)  # fmt: skip


def run(instance: Instance, seed: int, *, drafts: bool = False) -> dict[str, float]:
    """Return when each of some chunks ended; checks memory at each event."""
    rng, now, ends = random.Random(seed), 0.0, {}
    times = sorted(rng.random() * 5 for _ in range(rng.randint(2, 40)))
    todo = []
    for number, at in enumerate(times):
        length, more = rng.randint(1, 150), rng.randint(1, 300)
        kind = number % CLASSES if drafts else 0
        todo.append(
            (at, Chunk(f"c{number:02}", 1, float(length), length + more, 5.0, kind, most=length + more + 1))
        )
    while len(ends) < len(times):
        arrival = todo[0][0] if todo else float("inf")
        now = min(instance.next_event(), arrival)
        ends |= {chunk.request_id: now for chunk in instance.settle(now)}
        if arrival == now:
            instance.add(todo.pop(0)[1], now)
        if isinstance(instance, RankedInstance):
            assert instance._kv.sum() == pytest.approx(instance.kv_tokens, abs=1e-3)
            assert instance._kv.max() <= instance._tokens + 1e-3
            assert instance._kinds.sum() == instance.running
    return ends


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.booleans(), st.sampled_from((1000, 4000)))
def test_one_rank_is_as_an_engine_without(seed, drafts, kv_tokens):
    model = replace(MODEL, kv_tokens=kv_tokens)
    one, two = (Drafting() if drafts else None for _ in range(2))
    plain, ranked = Instance("e", model, one), RankedInstance("e", model, two, 1, gates=False)
    assert run(ranked, seed, drafts=drafts) == pytest.approx(run(plain, seed, drafts=drafts))
    assert ranked.preempted == plain.preempted
    assert ranked.dummies == 0
    assert ranked.steps > 0


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.sampled_from((2, 4, 8)), st.booleans())
def test_more_ranks_are_no_faster_and_gates_preempt_nothing(seed, ranks, gates):
    whole = run(Instance("e", replace(MODEL, kv_tokens=10**6), None), seed)
    instance = RankedInstance("e", MODEL, None, ranks, gates=gates)
    ends = run(instance, seed)
    assert max(ends.values()) >= max(whole.values()) - 1e-6
    assert not (gates and instance.preempted)
    assert 0 <= instance.dummies <= instance.steps * (ranks - 1) / ranks + 1e-6
    assert instance._placement.free == instance._unbooked == [MODEL.kv_tokens // ranks] * ranks
    assert not instance._kv.any()


def test_a_step_is_the_fullest_rank_s():
    def seconds(ranks: int, contexts: list[int]) -> float:
        instance = RankedInstance("e", MODEL, None, ranks, gates=True)
        for number, context in enumerate(contexts):
            instance.add(Chunk(str(number), 1, float(context), context + 1, most=context + 2), 0.0)
        return instance.next_event()

    even = seconds(2, [500, 500])
    assert even == pytest.approx(seconds(1, [500, 500]), rel=1e-3)
    assert seconds(2, [900, 100]) == pytest.approx(even + 800e-6, rel=1e-3)
    alone = RankedInstance("e", MODEL, None, 4, gates=True)
    alone.add(Chunk("a", 1, 10.0, 110, most=111), 0.0)
    alone.settle(alone.next_event())
    assert (alone.steps, alone.dummies) == pytest.approx((400, 300))


@pytest.mark.parametrize("policy", ["seer", "static"])
@pytest.mark.parametrize("drafts", [False, True])
def test_a_rollout_on_ranks_ends_with_every_response(policy, drafts):
    load = Workload(
        name="w", instances=2, groups=12, group_size=4, cap=900, mean=300.0, prompt=16,
        model=replace(MODEL, kv_tokens=8000, block_size=16),
    )  # fmt: skip
    plain, ranked = (
        Cluster(each, POLICIES[policy], load.draw(0), 128, drafts).run()
        for each in (load, replace(load, ranks=4))
    )
    assert len(ranked.finished) == 48
    assert ranked.total >= 0.98 * plain.total  # another order may be luckier
    assert 0 < ranked.counts["dummies"] < 1
    assert "dummies" not in plain.counts
    assert policy == "static" or not ranked.counts["preemptions"]
    assert np.isfinite(ranked.total)
