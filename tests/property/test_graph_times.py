"""Step times of CUDA graphs: one time for all steps of a graph, and never less for more."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seer.common.errors import InvalidField
from seer.common.policy.draft_costs import StepCosts
from seer.common.policy.graph_times import MOST_SIZES, Graphs, GraphTimes


@st.composite
def profiles(draw):
    """A profile with captured sizes, random times, and batches in powers of two."""
    draft = draw(st.integers(1, 8))
    batches = tuple(2**power for power in range(draw(st.integers(1, 5))))
    sizes = tuple(sorted(draw(st.sets(st.integers(1, 120), max_size=12))))
    full = sizes if draw(st.booleans()) else ()
    graphs = Graphs(mixed=sizes if draw(st.booleans()) else (), full=full)
    tokens = tuple(tuple(graphs.sizes(batch, draft)) for batch in batches)
    seconds = st.floats(1e-4, 1.0)
    times = GraphTimes(
        graphs=graphs, draft=draft, tokens=tokens,
        seconds=tuple(tuple(draw(seconds) for _ in line) for line in tokens),
        full=tuple(draw(seconds) for _ in tokens),
    )  # fmt: skip
    grid = tuple((line[0],) for line in times.seconds)
    return StepCosts(batches=batches, drafts=(0,), grid=grid, graphs=times)


@settings(max_examples=200)
@given(profiles(), st.integers(1, 40))
def test_a_step_costs_what_its_graph_does(costs, batch):
    times = costs.graphs
    most = batch * times.draft
    found = np.array(costs.by_rows(batch, most))
    assert len(found) == most + 1
    assert (found > 0).all()
    every = batch + most <= max(times.graphs.full, default=0)
    mixed = found[:-1] if every else found
    assert (np.diff(mixed) >= -1e-12).all(), "more tokens never take less time"
    padded = [times.graphs.padded(batch + drafted) for drafted in range(len(mixed))]
    for size in set(padded):
        same = mixed[np.array(padded) == size]
        assert np.ptp(same) == 0
    if batch in costs.batches and every:
        assert found[-1] == pytest.approx(times.full[costs.batches.index(batch)])
    assert costs.seconds(batch, times.draft) == found[-1]
    # Whatever is asked for at once, a number of drafts has one time.
    assert costs.by_rows(batch, most // 2).tolist() == found[: most // 2 + 1].tolist() or most // 2 == most


@settings(max_examples=200)
@given(profiles())
def test_what_was_measured_is_found_again(costs):
    times = costs.graphs
    for line, batch in enumerate(costs.batches):
        sizes, seconds = times.tokens[line], np.maximum.accumulate(times.seconds[line])
        assert len(sizes) <= MOST_SIZES
        found = costs.by_rows(batch, max(sizes) - batch)
        every = batch * times.draft
        for size, expected in zip(sizes, seconds, strict=True):
            if size - batch != every:
                assert found[size - batch] == pytest.approx(expected)


@settings(max_examples=200)
@given(st.sets(st.integers(1, 600), max_size=60), st.integers(1, 256), st.integers(1, 16))
def test_the_jumps_behind_the_largest_graph_are_measured(sizes, batch, most):
    graphs = Graphs(mixed=tuple(sorted(sizes)))
    found = graphs.sizes(batch, most)
    assert found == sorted(set(found))
    assert 1 <= len(found) <= MOST_SIZES
    least, last = graphs.padded(batch), graphs.padded(max(batch, batch * (most + 1) - 1))
    assert (found[0], found[-1]) == (least, last)
    top = max(sizes, default=0)
    if least < top and top + 1 < last:
        assert {top, top + 1} <= set(found)
    assert all(size in graphs.mixed or size > top for size in found)


def test_profiles_that_do_not_fit_are_refused():
    def times(**other):
        good = {
            "graphs": Graphs(mixed=(8,)),
            "draft": 1,
            "tokens": ((8,),),
            "seconds": ((0.1,),),
            "full": (0.1,),
        }
        return GraphTimes(**(good | other))

    StepCosts(batches=(1,), drafts=(0,), grid=((0.1,),), graphs=times())
    for other in (
        {"seconds": ((0.1, 0.2),)},
        {"full": ()},
        {"tokens": ((),), "seconds": ((),)},
        {"tokens": ((8, 8),), "seconds": ((0.1, 0.1),)},
        {"seconds": ((0.0,),)},
        {"full": (float("inf"),)},
    ):
        with pytest.raises(InvalidField):
            times(**other)
    with pytest.raises(InvalidField, match="one line per batch"):
        StepCosts(batches=(1, 2), drafts=(0,), grid=((0.1,), (0.1,)), graphs=times())
