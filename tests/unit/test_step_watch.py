"""A step that stands still is found; whatever else takes long is not."""

import pytest

from seer.services.engine.step_watch import LOOK_SECONDS, STEP_SECONDS, StepWatch

LOOKS = int(STEP_SECONDS / LOOK_SECONDS)


def looks(watch, steps, start=0):
    """Look at these steps, one every `LOOK_SECONDS`; return which look found one that stands still."""
    return [at for at, step in enumerate(steps, start) if watch.stands_still(step, at * LOOK_SECONDS)]


def test_a_step_that_lasts_too_long_stands_still():
    assert looks(StepWatch(0.0), [7] * (LOOKS + 2)) == [LOOKS, LOOKS + 1]


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param([0] * 10 * LOOKS, id="idle, asleep, waiting for the buffer, or reading weights"),
        pytest.param(range(1, 10 * LOOKS), id="working"),
        pytest.param([5] * LOOKS + [6] * LOOKS, id="slow steps"),
        pytest.param(([5] * LOOKS + [0]) * 3, id="a slow step, and nothing after"),
    ],
)
def test_what_is_no_standstill(steps):
    assert looks(StepWatch(0.0), steps) == []


def test_a_stall_of_the_process_counts_as_one_look():
    watch = StepWatch(0.0)
    assert looks(watch, [5, 5]) == []
    assert not watch.stands_still(5, 1e6)  # SIGSTOP, a suspended machine: the step may well go on
    left = [watch.stands_still(5, 1e6 + at * LOOK_SECONDS) for at in range(1, LOOKS)]
    assert left.index(True) == LOOKS - 4  # the stall counted for two looks
