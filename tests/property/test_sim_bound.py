"""What `sim/bound.py` promises of its charges, for any batch, and of the bound that they make."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from seer.common.policy.schedule import oracle
from seer.sim.bound import _charges, of_rollout
from seer.sim.cluster import Cluster
from seer.sim.drafting import DRAFT_SHARE, GAINS
from seer.sim.workload import Model, Workload

CAP = 1000
MODEL = Model(
    step=0.02, request=1e-4, kv=5e-6, attend=1e-7, row=4e-4, weights=4e-3, prefill=1e-5, pull=1e-6,
    kv_tokens=6000,
)  # fmt: skip
LOAD = Workload(name="small", instances=2, groups=8, group_size=4, cap=CAP, mean=200, prompt=8, model=MODEL)
members = st.lists(
    st.tuples(st.integers(0, CAP), st.sampled_from([0.0, 0.01, 0.1, 1.0, 30.0]), st.integers(0, 8)),
    min_size=1,
    max_size=40,
)


@given(members, st.sampled_from([0.0, 1.0]), st.booleans())
def test_no_batch_takes_less_than_its_responses_are_charged(batch, part, drafts):
    """Each of (tokens, weight, drafted); memory bounds how many there are."""
    places = np.linspace(0.0, CAP, CAP + 1)
    gains = GAINS[0] if drafts else np.ones(1)
    charges = {each: _charges(LOAD, places, gains, part, each) for each in {w for _, w, _ in batch}}
    weight = rows = kv = charged = 0.0
    drafted_any = False
    for tokens, each, drafted in batch:
        drafted *= drafts
        if kv + tokens + LOAD.prompt > MODEL.kv_tokens:
            continue
        weight, rows, kv = weight + each, rows + 1 + drafted, kv + tokens + LOAD.prompt
        charged += gains[drafted] * charges[each][tokens]
        drafted_any |= drafted > 0
    compute = max(0.0, MODEL.row * rows - MODEL.weights)
    step = (
        MODEL.step + MODEL.request * rows + compute + MODEL.kv * kv
    )  # what rows read each of KV comes on top
    assert charged <= (1 + weight) * step * (1 + DRAFT_SHARE * drafted_any) + 1e-9


def test_a_long_response_among_others_counts_for_more_than_either_alone():
    lengths = [[CAP, CAP], *[[150] * 4] * 30]
    least = of_rollout(LOAD, lengths, drafts=False)
    work, seconds = least.work / LOAD.instances, least.seconds(LOAD.instances)
    assert seconds > 1.02 * max(work, least.alone)
    known = oracle({f"r/{g}#{i}": n for g, group in enumerate(lengths) for i, n in enumerate(group)})
    assert Cluster(LOAD, known, lengths, chunk_size=64).run().total >= seconds


@pytest.mark.parametrize("drafts", [False, True])
def test_more_instances_never_raise_it_and_a_longer_longest_never_lowers_it(drafts):
    lengths = LOAD.draw(0)
    least = of_rollout(LOAD, lengths, drafts)
    bounds = [least.seconds(instances) for instances in range(1, 12)]
    assert bounds == sorted(bounds, reverse=True)
    assert least.seconds(1000) == pytest.approx(least.alone)
    longest = max(map(max, lengths))
    longer = [[2 * n if n == longest else n for n in group] for group in lengths]
    load = replace(LOAD, cap=2 * CAP)
    assert of_rollout(load, longer, drafts).seconds(2) >= least.seconds(2)
