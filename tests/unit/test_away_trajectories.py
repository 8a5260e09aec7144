"""Trajectories between two turns, in the buffer: one next turn each, counted once, known to context until they end."""

import orders
import pytest

from seer.common import wire
from seer.common.policy.length import Estimate
from seer.common.types import TurnSpec
from seer.services.buffer.requests.holdings import Holdings
from seer.services.buffer.requests.state import GroupState, Limits, RequestState, RolloutState
from seer.services.buffer.requests.turn_placement import Trajectories

ESTIMATE = Estimate(50.0)


def turn(prompt_id, *, generated=0, submission=1, idle_seconds=10.0):
    rollout = RolloutState("r", "trainer", b"address", submission, 0, 0.0, open=True)
    return GroupState(
        f"r/{prompt_id}", prompt_id, rollout, 1, 4, 16, submission=submission, shared_id="r/g",
        turn=TurnSpec(4, generated, 100, idle_seconds),
    )  # fmt: skip


def finish(group, generated=5, instance="a"):
    view = group.view(0, 0)
    view.generated, view.last_instance = generated, instance
    group.results, group.finished_at = [RequestState(view, group, finish="stop")], 1.0
    return group


@pytest.fixture
def trajectories():
    """One is away after its turn `r/1`, the submission 3, since time 1."""
    made = Trajectories(Holdings(Limits(None)))
    away(made, turn("1", submission=3))
    return made


def away(trajectories, group):
    trajectories.submitted(group, [])
    trajectories.opened(group)
    assert trajectories.ended(finish(group), ESTIMATE, 1.0)


def repeat(trajectories, group, *, room=True):
    out = []
    trajectories.repeated(group, 2.0, out, room=room)
    return out


def test_one_turn_at_a_time_continues_it_and_counts_once(trajectories):
    first, second = turn("2", generated=5), turn("2 again", generated=5)
    assert trajectories._holdings.all.requests == 1
    assert trajectories.continues(first)
    trajectories.submitted(first, [])
    assert trajectories._holdings.all.requests == 0
    assert trajectories.continues(first)
    assert not trajectories.continues(second)
    trajectories.withdrawn(second)
    assert not trajectories.continues(second)
    trajectories.withdrawn(first)
    assert trajectories.continues(second)
    assert trajectories._holdings.all.requests == 1


def test_who_is_forgotten_leaves_nothing(trajectories):
    trajectories.submitted(turn("2", generated=5), [])
    out = []
    trajectories.aborted(out)
    assert out == [orders.closed("r/1")]
    assert trajectories._holdings.all.requests == 0
    assert not any((trajectories.away, trajectories.latest, trajectories.returning))


@pytest.mark.parametrize(("submission", "ends"), [(0, True), (2, False), (3, True), (4, True)])
def test_an_end_is_of_its_submission_and_of_earlier_ones(trajectories, submission, ends):
    out = []
    trajectories.finished(
        "trainer", wire.Cancel(rollout_id="r", prompt_ids=["1"], submission=submission), out
    )
    assert out == ([orders.progress("r/1", 0, 5, True), orders.closed("r/1")] if ends else [])
    assert trajectories._holdings.all.requests == (not ends)


def test_only_its_trainer_ends_it(trajectories):
    out = []
    trajectories.finished("another", wire.Cancel(rollout_id="r", prompt_ids=["1"], submission=0), out)
    assert (out, trajectories._holdings.all.requests) == ([], 1)


def test_the_next_turn_begins_with_the_estimate_of_now(trajectories):
    trajectories.estimates_changed({"r/1": Estimate(70.0), "r/other": ESTIMATE}, {"r/1": [3]})
    known = trajectories.opened(turn("2", generated=5))
    assert (known.estimate, known.acceptance) == (Estimate(70.0), [3])


# --- turns that are submitted again: by an incarnation of the trainer that takes those before them again, too


def test_a_turn_that_is_repeated_is_the_latest_and_the_one_after_it_is_closed(trajectories):
    again = finish(turn("0"), 3)
    out = repeat(trajectories, again)
    assert list(trajectories.away) == ["r/0"]
    assert trajectories.away["r/0"].since == 2.0
    assert out == [
        orders.opened("r/0", 1, 4, 100, "r/g", 0), orders.progress("r/0", 0, 3, False), orders.closed("r/1"),
    ]  # fmt: skip
    assert trajectories.continues(turn("1 again", generated=3))


def test_a_repeated_turn_that_is_under_way_is_the_latest_and_not_away(trajectories):
    assert repeat(trajectories, turn("0")) == [orders.closed("r/1")]
    assert not trajectories.away
    assert trajectories.latest == {("trainer", "r/g", 0): "r/0"}


def test_the_latest_turn_repeated_changes_nothing(trajectories):
    known = trajectories.away["r/1"]
    assert repeat(trajectories, finish(turn("1"))) == []
    assert trajectories.away == {"r/1": known}


def test_who_takes_the_latest_turn_up_is_whose_trajectory_it_is(trajectories):
    again = finish(turn("1", submission=9))
    again.rollout.address = b"later"
    repeat(trajectories, again)
    out = []
    trajectories.trainer_lost(b"address", out)  # the incarnation before it: its lease has ended
    assert [(each.address, each.submission) for each in trajectories.away.values()] == [(b"later", 9)]
    trajectories.trainer_lost(b"later", out)
    assert out == [orders.closed("r/1")]


def test_nothing_is_repeated_under_another_turn_that_waits_or_is_open(trajectories):
    following = turn("2", generated=5)
    trajectories.submitted(following, [])
    assert repeat(trajectories, finish(turn("0"))) == []
    trajectories.opened(following)
    assert repeat(trajectories, finish(turn("0"))) == []
    assert not trajectories.away
    assert trajectories.latest == {("trainer", "r/g", 0): "r/2"}


@pytest.mark.parametrize("room", [False, True])
def test_a_repeated_turn_of_a_forgotten_trajectory_is_awaited_if_there_is_room(room):
    trajectories = Trajectories(Holdings(Limits(None)))
    out = repeat(trajectories, finish(turn("1")), room=room)
    assert trajectories._holdings.all.requests == room
    assert len(out) == 2 * room
