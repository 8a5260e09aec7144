"""When a profile of step times is off."""

import pytest

from seer.common.policy.draft_costs import StepCosts
from seer.common.policy.profile_check import EVERY, FACTOR, WINDOW, WINDOWS, ProfileCheck

COSTS = StepCosts(
    batches=(1, 64), drafts=(0, 8), grid=((0.002, 0.003), (0.005, 0.012)), context=16, reading=(1e-6, 1e-7)
)
LONG = WINDOW * (WINDOWS + 1)


def check(*ratios: float, requests: int = 64, context: float = 16.0) -> ProfileCheck:
    """Show steps that take so many times what the profile says, over and over, for long enough."""
    found = ProfileCheck(COSTS)
    says = COSTS.seconds(requests, 0) + COSTS.longer(requests, context)[0]
    for step in range(LONG):
        found.add(requests, context, ratios[step % len(ratios)] * says)
    return found


@pytest.mark.parametrize("requests", [1, 7, 64, 256])
@pytest.mark.parametrize("context", [16.0, 4000.0])
def test_a_profile_that_fits_is_not_off_whatever_the_batch_and_the_context(requests, context):
    for ratio in (1.0, FACTOR / 1.1, 1.1 / FACTOR):
        assert check(ratio, requests=requests, context=context).off == 0


@pytest.mark.parametrize("ratio", [1.1 * FACTOR, 1 / FACTOR / 1.1])
def test_one_measured_on_a_busy_machine_or_on_a_faster_one_is(ratio):
    assert check(ratio).off == pytest.approx(ratio)


def test_slow_steps_among_fast_ones_mean_nothing():
    assert check(*[9.0] * (WINDOW - 1), 1.0).off == 0


def test_a_busy_while_is_not_enough():
    found = ProfileCheck(COSTS)
    for ratio in (4.0, 1.0) * 3:
        for _ in range(WINDOW * (WINDOWS - 1)):
            found.add(64, 16, ratio * 0.005)
        assert found.off == 0


def test_slower_and_faster_in_turn_is_no_direction():
    found = ProfileCheck(COSTS)
    for window in range(4 * WINDOWS):
        for _ in range(WINDOW):
            found.add(64, 16, (4.0 if window % 2 else 0.25) * 0.005)
    assert found.off == 0


def test_few_steps_are_looked_at():
    found = ProfileCheck(COSTS)
    assert sum(found.looks() for _ in range(100 * EVERY)) == 100
