"""Places of SkyRL's requests: the list in `seer.integrations.skyrl.sessions`. No SkyRL."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from seer.integrations.skyrl.sessions import Sessions
from seer.integrations.submissions import Place


def begun(step: int = 1, phase: str = "train") -> Sessions:
    sessions = Sessions()
    sessions.begin(step, phase)
    return sessions


def test_siblings_share_a_group():
    got = [begun().place(each) for each in ("7_0", "7_1", "a_b_2")]
    names = ("skyrl-train-0-7", "skyrl-train-0-7", "skyrl-train-0-a_b")
    assert got == [Place(name, index) for name, index in zip(names, (0, 1, 2), strict=True)]


def test_calls_and_phases_of_a_step_have_groups_of_their_own():
    sessions, got = Sessions(), []
    for step, phase in ((1, "train"), (1, "train"), (1, "eval"), (2, "train"), (2, "train")):
        sessions.begin(step, phase)
        got.append((sessions.step, sessions.place("7_0").group))
    assert got == [
        (1, "skyrl-train-0-7"), (1, "skyrl-train-1-7"), (1, "skyrl-eval-0-7"),
        (2, "skyrl-train-0-7"), (2, "skyrl-train-1-7"),
    ]  # fmt: skip


def test_a_session_without_a_repetition_is_a_group_of_its_own():
    assert [begun().place(each) for each in ("f00", "_3")] == [
        Place("skyrl-train-0-f00", 0), Place("skyrl-train-0-_3", 0),
    ]  # fmt: skip


@given(st.lists(st.tuples(st.text("xy_0", min_size=1), st.integers(0, 3)), unique=True, max_size=30))
def test_no_two_trajectories_of_a_call_have_the_same_place(trajectories):
    sessions = begun()
    places = [sessions.place(f"{uid}_{repetition}") for uid, repetition in trajectories]
    assert len(set(places)) == len(places)
