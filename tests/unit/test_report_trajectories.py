"""Turns of a trajectory are one response in a report: totals, times away, and what stays as it was."""

import orders
import pytest
from report_rows import CAPACITY, told

from seer.common.types import TurnSpec
from seer.report.records import Timeline
from seer.report.timeline_page import page
from seer.report.trajectories import away
from seer.report.view import RolloutView, choose_rollout
from seer.services.buffer.requests import events, instructions


def turn(number: int, context: int, generated: int, index: int = 0, group: str = "p") -> events.GroupSpec:
    spec = TurnSpec(8, generated, 500)
    return events.GroupSpec(f"{group}#{index}.{number}", context, False, None, f"r/{group}", index, spec)


def submitted(*specs: events.GroupSpec, submission: int) -> events.GroupsSubmitted:
    return events.GroupsSubmitted("t", "r", 1, 20, list(specs), submission=submission, open=True)


def dispatch(engine: str, request: str, attempt: int) -> instructions.Dispatch:
    return instructions.Dispatch(engine, request, attempt, 20)


JOINED = [(0.0, orders.joined("e0", CAPACITY, 1), []), (0.0, orders.joined("e1", CAPACITY, 2), [])]
TURNS = [
    (1.0, submitted(turn(0, 8, 0), submission=1), [dispatch("e0", "r/p#0.0#0", 1)]),
    (1.0, submitted(turn(0, 8, 0, 1), submission=2), [dispatch("e0", "r/p#1.0#0", 2)]),
    (1.0, submitted(events.GroupSpec("q", 4), submission=3), [dispatch("e1", "r/q#0", 3)]),
    (2.0, orders.ended("e0", "r/p#0.0#0", 1, 5, "stop"), []),
    (3.0, orders.ended("e0", "r/p#1.0#0", 2, 7, "stop"), []),
    (3.5, orders.ended("e1", "r/q#0", 3, 2, "stop"), []),
    (5.0, submitted(turn(1, 16, 5), submission=4), [dispatch("e1", "r/p#0.1#0", 4)]),
    (9.0, orders.ended("e1", "r/p#0.1#0", 4, 20), []),
]


def responses(timeline: Timeline) -> dict[str, tuple[int, str, int]]:
    (rollout,) = timeline.rollouts
    return {each.name: (each.generated, each.finish, len(each.turns)) for each in rollout.responses}


def test_turns_are_one_response_and_others_stay_as_they_are():
    timeline = told(*JOINED, *TURNS)
    assert responses(timeline) == {"q#0": (2, "stop", 0), "p#0": (25, "length", 2), "p#1": (7, "stop", 1)}
    (rollout,) = timeline.rollouts
    assert rollout.prompts == {"q": 0, "p": 1}
    assert [each.prompt for each in rollout.responses] == [0, 1, 1]
    first = rollout.responses[1]
    assert [(left - 1e9, back - 1e9) for left, back in away(first)] == [(2, 5)]
    assert not list(away(rollout.responses[2]))
    assert [(chunk.context, chunk.engine, chunk.moved, chunk.tokens) for chunk in first.chunks] == [
        (8, "e0", False, 5),
        (16, "e1", True, 20),
    ]
    assert all(chunk.response is each for each in rollout.responses for chunk in each.chunks)
    assert first.finished == 1e9 + 9
    view = RolloutView(timeline, choose_rollout(timeline))
    figures = {name: value for value, name in view.figures()}
    assert (figures["responses"], figures["tokens"], figures["chunks"]) == ("3", "34", "4")
    assert (figures["turns"], figures["away, per trajectory"]) == ("3", "1.5 s")
    assert "tokens computed again" not in figures
    text = page(view)
    assert text.count("p#0: away for 3.0 s after turn 1") == 1
    assert ">25 · 0.0 s<" in text  # 8 s, less chunks of 5 s in all, less 3 s away
    plain = told(*JOINED, TURNS[2], TURNS[5])
    assert "away" not in page(RolloutView(plain, choose_rollout(plain))).partition("</style>")[2]


@pytest.mark.parametrize("again", [0, 1])
def test_a_turn_that_is_taken_again_counts_once(again: int):
    lines = [*JOINED, *TURNS]
    if again:  # by a trainer that was started again: the first is made anew, the second is delivered alone
        lines += [
            (10.0, submitted(turn(0, 8, 0), submission=9), [dispatch("e0", "r/p#0.0#0", 5)]),
            (11.0, orders.ended("e0", "r/p#0.0#0", 5, 5, "stop"), []),
            (12.0, submitted(turn(1, 16, 5), submission=10), []),
        ]
    timeline = told(*lines)
    assert responses(timeline)["p#0"] == (25, "length", 2)
    figures = {name: value for value, name in RolloutView(timeline, choose_rollout(timeline)).figures()}
    assert figures["tokens"] == "34"
    assert figures.get("tokens computed again") == ("5" if again else None)


def test_a_turn_that_was_refused_is_told_of_its_trajectory():
    refused = orders.refused(b"", "r", ["p#0.1"], "refused", "weight version 0 is past", 4)
    timeline = told(*JOINED, *TURNS[:6], (5.0, submitted(turn(1, 16, 5), submission=4), [refused]))
    assert responses(timeline)["p#0"] == (5, "refused", 2)
    figures = {name: value for value, name in RolloutView(timeline, choose_rollout(timeline)).figures()}
    assert figures["responses"] == "2 of 3"
