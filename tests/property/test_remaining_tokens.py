"""Expected remainders: bounds, the mean of what is left, and what counted ends change of it."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seer.common.policy.length import Estimate
from seer.common.policy.remaining_tokens import EVEN, OCTAVES, REMEMBERED_ENDS, EndRates, Remainders

ESTIMATES = st.builds(
    Estimate,
    st.one_of(st.floats(1, 1e6), st.floats(1e-300, 1.7e308)),
    st.one_of(st.just(0.0), st.floats(1e-3, 3), st.floats(0, 1e308)),
)
TOKENS = st.integers(0, 2**24)
RATIOS = st.lists(st.one_of(st.just(1.0), st.floats(0, 1e6)), min_size=OCTAVES, max_size=OCTAVES)


@given(ESTIMATES, TOKENS, st.integers(1, 2**24), RATIOS, st.integers(0, 1000), st.floats(1e-9, 1))
def test_a_remainder_is_positive_and_ends_at_the_cap(estimate, generated, cap, ratios, below, chance):
    of = Remainders(estimate, cap, ratios, max(generated - below, 0))
    room, left = max(cap - generated, 1), of.left(generated)
    assert 0 < left.tokens <= room
    assert left.tokens * generated <= left.lengths <= left.tokens * max(cap, generated + 1)
    assert 0 < of.longest(generated, chance) <= room


def lengths(median: float, spread: float, cap: int) -> list[float]:
    rng = random.Random(3)
    return [min(math.exp(math.log(median) + spread * rng.gauss(0, 1)), cap) for _ in range(200_000)]


def test_a_remainder_is_the_mean_of_what_is_left():
    of, all_lengths = Remainders(Estimate(500, 0.7), 2000), lengths(500, 0.7, 2000)
    for generated in (0, 300, 900):
        left = sorted(length - generated for length in all_lengths if length > generated)
        found = of.left(generated)
        assert found.tokens == pytest.approx(sum(left) / len(left), rel=0.03)
        at_each = sum((each + generated) ** 2 / 2 - generated**2 / 2 for each in left) / len(left)
        assert found.lengths == pytest.approx(at_each, rel=0.08)
        assert of.longest(generated, 0.1) == pytest.approx(left[int(0.9 * len(left))], rel=0.05)


def test_without_a_spread_it_is_the_rest_to_the_estimate_then_half_of_the_rest_to_the_cap():
    of = Remainders(Estimate(500), 1000)
    assert (of.left(100).tokens, of.left(600).tokens) == (400, 200)
    assert (of.longest(100, 0.1), of.longest(600, 0.1)) == (400, 400)


@given(st.integers(0, OCTAVES - 1), st.floats(0, 0.9), st.integers(0, 3000), st.integers(2, 4000))
def test_where_responses_end_less_often_remainders_grow(octave, ratio, generated, cap):
    estimate, fewer = Estimate(400, 0.8), list(EVEN)
    fewer[octave] = ratio
    before = Remainders(estimate, cap).left(generated).tokens
    after = Remainders(estimate, cap, fewer).left(generated).tokens
    assert after >= before * (1 - 1e-9)
    if generated >= 2 << octave:
        assert after == pytest.approx(before)


def test_ends_that_come_as_expected_change_nothing_and_half_as_many_are_found():
    estimate, even, half = Estimate(500, 0.7), EndRates(), EndRates()
    for length in lengths(500, 0.7, 2000)[:4000]:
        even.lived(estimate, 0, int(length), length < 2000)
        half.lived(estimate, 0, int(length), False)
    ratios = even.ratios()
    assert all(0.75 < each <= 1 for each in ratios[6:11])
    assert all(each < 0.3 for each in half.ratios()[8:11]), "nobody ended"


def test_parts_of_a_response_count_as_the_whole_and_an_octave_without_ends_follows_the_one_below():
    estimate, whole, parts = Estimate(100, 0.5), EndRates(), EndRates()
    for _ in range(200):
        whole.lived(estimate, 0, 300, False)
        for start in range(0, 300, 25):
            parts.lived(estimate, start, start + 25, False)
    assert parts.ratios() == pytest.approx(whole.ratios())
    assert whole.ratios()[12] == pytest.approx(whole.ratios()[9]), "none was as long"
    assert whole.ratios()[3] == pytest.approx(1.0, abs=0.01), "none was expected to end"
    copy = whole.copy()
    copy.lived(estimate, 0, 300, True)
    assert copy.ratios() != whole.ratios()


def test_old_ends_are_forgotten():
    estimate, rates = Estimate(100, 0.5), EndRates()
    for _ in range(2 * REMEMBERED_ENDS):
        rates.lived(estimate, 64, 127, False)
    assert rates.ratios()[6] < 0.01
    for _ in range(20 * REMEMBERED_ENDS):
        rates.lived(estimate, 64, 100, True)
    assert rates.ratios()[6] == 1.0, "never more often than expected"


@given(st.lists(st.tuples(ESTIMATES, TOKENS, TOKENS, st.booleans()), max_size=20))
def test_no_estimate_and_no_length_breaks_the_counts(lived):
    rates = EndRates()
    for estimate, start, more, ended in lived:
        rates.lived(estimate, start, start + more, ended)
    assert all(0 < each <= 1 for each in rates.ratios())
