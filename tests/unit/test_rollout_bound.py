"""What `common/policy/rollout_bound.py` makes of lengths and speeds."""

from __future__ import annotations

import pytest

from seer.common.errors import InvalidField
from seer.common.policy.rollout_bound import best_of_incarnations, bound_seconds, lower_bound
from seer.common.types import InstanceStats


def test_the_bound_is_all_work_or_the_longest_response_whichever_takes_longer() -> None:
    assert lower_bound(1000, 10, capacity=100.0, seconds_per_token=0.5) == 10.0
    assert lower_bound(1000, 30, capacity=100.0, seconds_per_token=0.5) == 15.0
    assert lower_bound(0, 0, capacity=1.0, seconds_per_token=0.0) == 0.0


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("tokens", (-1, 0, 1.0, 0.0)),
        ("longest", (5, 6, 1.0, 0.0)),
        ("capacity", (5, 5, 0.0, 0.0)),
        ("seconds_per_token", (5, 5, 1.0, -0.1)),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(field: str, arguments: tuple[int, int, float, float]) -> None:
    with pytest.raises(InvalidField, match=field):
        lower_bound(*arguments)


def test_a_rollouts_bound_is_of_its_engines_at_their_best() -> None:
    seen = InstanceStats(best_rate=100.0, token_seconds_alone=0.02)
    other = InstanceStats(best_rate=50.0, token_seconds_alone=0.04)
    both = [(seen, 1.0), (other, 1.0)]
    assert bound_seconds(600, 300, both) == 6.0  # 300 tokens alone, at 0.02 s, beat 600 / 150
    assert bound_seconds(900, 30, both) == 6.0
    # As fast as the other, for all one knows.
    assert bound_seconds(900, 30, [(seen, 1.0), (InstanceStats(), 1.0)]) == 4.5


def test_an_engine_counts_for_as_long_as_it_was_there() -> None:
    fast = InstanceStats(best_rate=100.0, token_seconds_alone=0.01)
    assert bound_seconds(900, 30, [(fast, 1.0), (fast, 0.5)]) == 6.0
    assert bound_seconds(900, 30, [(fast, 1.0), (InstanceStats(), 0.5)]) == 6.0
    assert bound_seconds(900, 30, [(InstanceStats(best_rate=50.0), 1.0), (fast, 0.0)]) == 18.0


def test_the_best_speeds_are_those_of_all_incarnations() -> None:
    before = InstanceStats(best_rate=100.0, token_seconds_alone=0.02, steps=9)
    assert best_of_incarnations(before, None) is before
    after = best_of_incarnations(InstanceStats(steps=1), before)
    assert (after.best_rate, after.token_seconds_alone, after.steps) == (100.0, 0.02, 1)
    after = best_of_incarnations(InstanceStats(best_rate=200.0, token_seconds_alone=0.01), before)
    assert (after.best_rate, after.token_seconds_alone) == (200.0, 0.01)


def test_without_a_second_of_work_there_is_no_bound() -> None:
    assert bound_seconds(30, 30, [(InstanceStats(token_seconds_alone=0.1), 1.0)]) is None
    assert bound_seconds(0, 0, [(InstanceStats(best_rate=1.0), 1.0)]) is None
    assert bound_seconds(30, 30, []) is None
