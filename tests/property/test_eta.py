"""The estimate of a rollout's end: bounds, and what makes it later."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seer.common.policy.eta import (
    SHOWN_FROM,
    UNSURE,
    Pace,
    Work,
    eta_seconds,
    expected_remainder,
    first_range,
    shortened,
)
from seer.common.policy.length import Estimate

ESTIMATES = st.builds(
    Estimate,
    st.one_of(st.floats(1, 1e6), st.floats(1e-300, 1.7e308)),
    st.one_of(st.just(0.0), st.floats(1e-3, 3), st.floats(0, 1e308)),
)


@given(ESTIMATES, st.integers(0, 2**24), st.integers(1, 2**24))
def test_a_remainder_is_positive_and_ends_at_the_cap(estimate, generated, cap):
    remainder = expected_remainder(estimate, generated, cap)
    assert 0 < remainder <= max(cap - generated, 1)


def test_a_remainder_is_the_mean_of_what_is_left():
    rng = random.Random(3)
    lengths = [min(math.exp(math.log(500) + 0.7 * rng.gauss(0, 1)), 2000) for _ in range(200_000)]
    for generated in (0, 300, 900):
        left = [length - generated for length in lengths if length > generated]
        assert expected_remainder(Estimate(500, 0.7), generated, 2000) == pytest.approx(
            sum(left) / len(left), rel=0.02
        )
    assert expected_remainder(Estimate(500), 100, 2000) == 400
    assert expected_remainder(Estimate(500), 600, 2000) == 700


def work(open_, generated=10, running=None):
    it, estimate = Work(open_), Estimate(400, 0.5)
    remainder = open_ * expected_remainder(estimate, generated, 1000)
    it.add(estimate, [generated] * open_, 1000, remainder, open_ if running is None else running)
    return it


@given(st.integers(1, 40), st.integers(1, 40), st.floats(1e-4, 10), st.floats(1, 5))
def test_more_work_fewer_runners_and_slower_chunks_never_end_sooner(some, more, seconds, slower):
    pace, slow = Pace(), Pace()
    pace.add(seconds * 100, 100)
    slow.add(seconds * slower * 100, 100)
    base = eta_seconds(work(some, running=1), pace, 1000)
    assert eta_seconds(work(some + more, running=1), pace, 1000) >= base
    assert eta_seconds(work(some, running=1), slow, 1000) >= base * (1 - 1e-9)
    assert eta_seconds(work(some), pace, 1000) <= base
    assert base >= work(some).longest * pace.alone


def test_nothing_is_said_before_a_tenth_has_finished_nor_while_nothing_runs():
    pace = Pace()
    assert eta_seconds(work(9), pace, 1) is None, "no chunk has ended"
    pace.add(1.0, 100)
    assert eta_seconds(work(9), pace, 1) is not None
    assert SHOWN_FROM > 1 / 11
    assert eta_seconds(work(10), pace, 1) is None
    assert eta_seconds(work(9, running=0), pace, 1) is None
    assert eta_seconds(Work(0), pace, 1) is None


@given(st.lists(st.tuples(st.floats(0, 1e3), st.integers(1, 10_000)), min_size=1, max_size=600))
def test_the_pace_is_that_of_the_last_chunks(chunks):
    pace = Pace()
    for chunk in chunks:
        pace.add(*chunk)
    last = chunks[-256:]
    expected = sum(seconds for seconds, _ in last) / sum(tokens for _, tokens in last)
    assert pace.token_seconds == pytest.approx(expected, rel=1e-6, abs=1e-6)


@given(
    ESTIMATES, st.integers(0, 5000), st.integers(1, 5000), st.integers(1, 40), st.floats(0.01, 1e6), st.data()
)
def test_the_first_range_is_from_short_lengths_to_all_at_the_cap(
    estimate, generated, more, responses, rate, data
):
    cap, running, short = generated + more, data.draw(st.integers(1, responses)), Work(responses)
    remainder = responses * expected_remainder(shortened(estimate), generated, cap)
    short.add(shortened(estimate), [generated] * responses, cap, remainder, running)
    capped = Work(responses)
    capped.add_capped([generated] * responses, cap, running)
    least, most = first_range(short, capped, rate)
    assert 0 < least <= most < math.inf
    assert least == pytest.approx(short.tokens / rate)
    assert most == pytest.approx(responses * more / rate)
    assert first_range(short, capped, 2 * rate)[1] <= most
    assert first_range(short, capped, 0.0) is None
    assert first_range(Work(responses), capped, rate) is None, "nothing runs"
    assert shortened(estimate).tokens == max(estimate.tokens / UNSURE, 1.0)
