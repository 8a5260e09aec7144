"""The draft budget's compiled loops do exactly what the same lines in numpy do, and refuse what does not fit."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seer import _native
from seer.common.policy.draft_budget import COST_FACTOR, choose_lengths

EDGES, WIDTH, SLOTS = np.array([0.25, 0.5, 0.75], dtype=np.float32), 3, 2
BASES = np.array([0, 4, 4])


@st.composite
def drafted(draw):
    """Scores and rates of few values, so that many tokens tie; lengths, slots and weights by row."""
    n = draw(st.integers(0, 12))

    def array(values, *shape):
        size = int(np.prod(shape))
        return np.array(draw(st.lists(st.sampled_from(values), min_size=size, max_size=size))).reshape(shape)

    scores = array((0.0, 0.25, 0.3, 0.5, 0.9), n, WIDTH).astype(np.float32)
    rates = array((0.0, 0.1, 0.5, 0.7), SLOTS, 8)
    lengths, slots = array(range(WIDTH + 1), n).astype(np.int32), array(range(SLOTS), n).astype(np.int64)
    return scores, rates, lengths, slots, draw(st.sampled_from((None, array((1.0, 2.0), n))))


def rated(scores, rates, lengths, slots):
    cells = np.searchsorted(EDGES, scores, side="right") + BASES
    chances = rates[slots[:, None], cells] * (np.arange(WIDTH) < lengths[:, None])
    return cells, np.minimum.accumulate(chances, axis=1)


def chosen(chances, seconds, others, weights):
    gains = chances.ravel() if weights is None else (chances * weights[:, None]).ravel()
    order = (-gains).argsort(kind="stable")
    start = others + (len(chances) if weights is None else weights.sum())
    tokens = np.concatenate([[start], gains[order]]).cumsum()
    price = COST_FACTOR * (tokens / seconds).max()
    taken = order[: (tokens - price * seconds).argmax()]
    return np.bincount(taken // WIDTH, minlength=len(chances))


@settings(max_examples=300)
@given(drafted(), st.data(), st.integers(0, 3))
def test_the_compiled_loops_do_what_numpy_does(step, data, others):
    scores, rates, lengths, slots, weights = step
    cells, chances = np.full(scores.shape, -1, dtype=np.int32), np.full(scores.shape, np.nan)
    _native.rate_drafts(scores, lengths, slots, EDGES, BASES, rates, cells, chances)
    for got, expected in zip((cells, chances), rated(scores, rates, lengths, slots), strict=True):
        assert np.array_equal(got, expected)
    some = st.lists(st.sampled_from((0.5, 0.6, 1.0, 1.5)), min_size=scores.size + 1, max_size=scores.size + 1)
    seconds = np.cumsum(data.draw(some)) if data.draw(st.booleans()) else np.sort(data.draw(some))
    keep = choose_lengths(chances, seconds, float(others), weights)
    assert np.array_equal(keep, chosen(chances, seconds, float(others), weights))

    lists = _native.draft_lists(cells, keep)
    assert lists == [row[:kept] for row, kept in zip(cells.tolist(), keep.tolist(), strict=True)]

    accepted = np.array([data.draw(st.integers(-1, kept)) for kept in keep], dtype=np.int32)
    fresh, unreported = np.zeros((SLOTS, 2, 8), dtype=np.int64), np.ones((SLOTS, 2, 8), dtype=np.int64)
    _native.count_drafts(cells, keep, accepted, slots, fresh, unreported)
    rows, at = np.nonzero(np.arange(WIDTH) < np.where(accepted < 0, 0, keep)[:, None])
    expected = np.zeros_like(fresh)
    np.add.at(expected, (slots[rows], 0, cells[rows, at]), 1)
    np.add.at(expected, (slots[rows], 1, cells[rows, at]), at < accepted[rows])
    assert np.array_equal(fresh, expected)
    assert np.array_equal(unreported, expected + 1)


def arrays(**changed):
    return {
        "scores": np.zeros((2, WIDTH), dtype=np.float32), "lengths": np.zeros(2, dtype=np.int32),
        "slots": np.zeros(2, dtype=np.int64), "edges": EDGES, "bases": BASES, "rates": np.zeros((SLOTS, 8)),
        "out_cells": np.zeros((2, WIDTH), dtype=np.int32), "out_chances": np.zeros((2, WIDTH)), **changed,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"lengths": np.zeros(3, dtype=np.int32)}, "number of rows"),
        ({"slots": np.array([0, SLOTS])}, "slots has 2; must be 0 to 2 - 1"),
        ({"slots": np.array([-1, 0])}, "slots has -1"),
        ({"bases": np.array([0, 4, 5])}, "bases has 5; must be 0 to 5 - 1"),
        ({"bases": BASES[:2]}, "bases must have a place"),
        ({"edges": np.zeros(8, dtype=np.float32)}, "more columns"),
        ({"out_chances": np.zeros((2, 2))}, "out_chances"),
    ],
)
def test_arrays_that_cannot_be_rated_are_refused(changed, message):
    with pytest.raises(ValueError, match=message):
        _native.rate_drafts(**arrays(**changed))


def test_arrays_that_cannot_be_chosen_from_or_counted_are_refused():
    keep, cells = np.zeros(2, dtype=np.int32), np.zeros((2, WIDTH), dtype=np.int32)
    slots, tally = np.zeros(2, dtype=np.int64), np.zeros((SLOTS, 2, 8), dtype=np.int64)
    with pytest.raises(ValueError, match="seconds must reach"):
        choose_lengths(np.zeros((2, WIDTH)), np.ones(2 * WIDTH), 0.0)
    with pytest.raises(ValueError, match="weights and out_keep"):
        choose_lengths(np.zeros((2, WIDTH)), np.ones(2 * WIDTH + 1), 0.0, np.ones(3))
    with pytest.raises(ValueError, match="keep has 4"):
        _native.count_drafts(cells, keep + WIDTH + 1, keep, slots, tally, tally.copy())
    with pytest.raises(ValueError, match="cells has 8"):
        _native.count_drafts(cells + 8, keep, keep, slots, tally, tally.copy())
    with pytest.raises(ValueError, match="fresh and untold"):
        _native.count_drafts(cells, keep, keep, slots, tally, tally[:1].copy())
    assert not tally.any()


@settings(max_examples=200)
@given(st.integers(0, 2**32 - 1), st.integers(0, 400), st.sampled_from((1e-300, 1e-6, 1.0)))
def test_chances_of_any_size_are_taken_in_falling_order(seed, n, least):
    rng = np.random.default_rng(seed)
    chances = np.minimum.accumulate(least ** rng.random((n, WIDTH)) * rng.random((n, WIDTH)), axis=1)
    weights = rng.choice((1.0, 2.0), n)
    seconds = 1.0 + np.sort(rng.random(chances.size + 1))
    assert np.array_equal(
        choose_lengths(chances, seconds, 1.0, weights), chosen(chances, seconds, 1.0, weights)
    )


@st.composite
def verified(draw):
    """What a step verifies: drafts by row, and what was drawn."""
    n = draw(st.integers(0, 6))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    counts = rng.integers(0, 4, n).astype(np.int32)
    drafts, drawn = (rng.integers(0, 3, size).astype(np.int32) for size in (counts.sum(), counts.sum() + n))
    return counts, drafts, drawn, rng.random(len(drawn), np.float32)


@settings(max_examples=300)
@given(verified())
def test_drafts_count_up_to_the_first_that_is_not_what_was_drawn(step):
    counts, drafts, drawn, logprobs = step
    width = int(counts.max(initial=0)) + 1
    tokens, values = np.full((len(counts), width), 9, np.int32), np.full((len(counts), width), 9, np.float32)
    _native.accept_drafts(drawn, logprobs, counts, drafts, -1, tokens, values)
    begin, left = 0, drafts.tolist()
    for row, count in enumerate(counts.tolist()):
        draft, left = left[:count], left[count:]
        end = begin + len(draft) + 1
        mine = drawn[begin:end].tolist()
        right = next((i for i, (a, b) in enumerate(zip(mine, draft, strict=False)) if a != b), len(draft))
        assert tokens[row].tolist() == mine[: right + 1] + [-1] * (width - right - 1)
        assert values[row].tolist() == logprobs[begin:end].tolist() + [0.0] * (width - len(mine))
        begin = end


def test_what_a_step_verifies_is_refused_where_it_does_not_fit():
    two = np.array([1, 2], np.int32)
    out, values = np.zeros((2, 3), np.int32), np.zeros((2, 3), np.float32)
    drawn, logprobs, drafts = np.zeros(5, np.int32), np.zeros(5, np.float32), np.zeros(3, np.int32)
    _native.accept_drafts(drawn, logprobs, two, drafts, -1, out, values)
    for bad in (
        (drawn[:4], logprobs, two, drafts, -1, out, values),
        (drawn, logprobs[:4], two, drafts, -1, out, values),
        (drawn, logprobs, two, drafts[:2], -1, out, values),
        (drawn, logprobs, np.array([0, 3], np.int32), drafts, -1, out, values),  # wider than what is filled
        (drawn, logprobs, two, drafts, -1, out[:1], values),
        (drawn, logprobs, two, drafts, -1, out, values[:, :2].copy()),
    ):
        with pytest.raises(ValueError, match="must"):
            _native.accept_drafts(*bad)
    with pytest.raises(ValueError, match="keep"):
        _native.draft_lists(out, np.array([4, 0], np.int32))
