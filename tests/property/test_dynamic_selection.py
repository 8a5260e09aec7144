"""Which groups dynamic sampling accepts, whatever the schedule: the invariants of seer.client.dynamic_selection."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seer.client.dynamic_selection import Selection
from seer.common.errors import InvalidField


def sampled(keep, choose, *, target, oversample=1.5, limit=None, biased=False):
    """Draw from a stream of verdicts until it is done; `choose` picks who is judged next of those under way."""
    selection = Selection(target, oversample, limit or max(len(keep), target), biased)
    under_way, order = [], []
    while not selection.done:
        wanted = selection.wanted()
        if wanted:
            count = min(wanted, len(keep) - selection.drawn)
            under_way += range(selection.drawn, selection.drawn + count)
            selection.draw(count, ended=count < wanted)
            continue
        assert under_way, "neither prompts to draw nor any under way: this would hang"
        order.append(under_way.pop(choose(len(under_way))))
        selection.judge(order[-1], keep[order[-1]])
        assert len(selection.accepted) <= target
    assert selection.drawn <= (limit or len(keep))
    return selection, order


STREAMS = st.lists(st.booleans(), max_size=40)


@settings(deadline=None, max_examples=300)
@given(STREAMS, st.integers(1, 12), st.floats(1, 4), st.randoms())
def test_the_first_kept_of_the_stream_whatever_the_order(keep, target, oversample, random):
    expected = [position for position, kept in enumerate(keep) if kept][:target]
    selection, _ = sampled(keep, lambda n: random.randrange(n), target=target, oversample=oversample)
    assert selection.accepted == expected
    assert selection.complete == (len(expected) == target)
    outcomes = selection.outcomes()
    assert len(outcomes) == selection.drawn
    assert [i for i, outcome in enumerate(outcomes) if outcome == "accepted"] == expected
    until = expected[-1] + 1 if selection.complete else len(keep)
    assert all(outcome == "dropped" for i, outcome in enumerate(outcomes[:until]) if not keep[i])
    assert set(outcomes[until:]) <= {"surplus", "cancelled"}


@settings(deadline=None, max_examples=200)
@given(STREAMS, st.integers(1, 12), st.randoms())
def test_with_the_bias_the_first_kept_that_finish(keep, target, random):
    selection, order = sampled(keep, lambda n: random.randrange(n), target=target, biased=True)
    assert selection.accepted == [position for position in order if keep[position]][:target]
    outcomes = selection.outcomes()
    judged = {"accepted" if keep[position] else "dropped" for position in order}
    assert {outcomes[position] for position in order} == judged
    assert all(outcomes[i] == "cancelled" for i in set(range(selection.drawn)) - set(order))


@settings(deadline=None, max_examples=200)
@given(st.integers(1, 40), st.integers(0, 40), st.randoms())
def test_no_more_than_the_limit_is_drawn(target, more, random):
    keep = [False] * 200
    selection, _ = sampled(keep, lambda n: random.randrange(n), target=target, limit=target + more)
    assert selection.drawn == target + more
    assert not selection.complete


def test_what_is_missing_is_oversampled():
    selection = Selection(64, 1.5, 1000, False)
    assert selection.wanted() == 96
    selection.draw(96, ended=False)
    for position in range(5):
        selection.judge(position, keep=False)
    assert selection.wanted() == 0  # five are not worth a rollout of their own
    for position in range(5, 8):
        selection.judge(position, keep=False)
    assert selection.wanted() == 8
    for position in range(8, 72):
        selection.judge(position, keep=True)
    assert selection.complete
    assert selection.wanted() == 0
    assert selection.outcomes() == ["dropped"] * 8 + ["accepted"] * 64 + ["cancelled"] * 24


def test_a_refill_is_no_longer_put_off_when_little_is_under_way():
    selection = Selection(64, 1.0, 1000, False)
    selection.draw(64, ended=False)
    for position in range(63):
        selection.judge(position, keep=position != 20)
    assert selection.wanted() == 1


@pytest.mark.parametrize(
    ("arguments", "field"),
    list(
        itertools.zip_longest(
            [(0, 1.5, 8, False), (4, 0.9, 8, False), (4, float("nan"), 8, False), (4, 1.5, 3, False)],
            ["target", "oversample", "oversample", "max_prompts"],
        )
    ),
)
def test_what_cannot_be(arguments, field):
    with pytest.raises(InvalidField) as caught:
        Selection(*arguments)
    assert caught.value.field == field
