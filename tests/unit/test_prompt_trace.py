"""`seer trace`: the way of one prompt, from rows and from files."""

from __future__ import annotations

import os
import re

import orders
import pytest
from click.testing import CliRunner
from logged_buffer import LoggedBuffer
from report_rows import CAPACITY, HEADER

from seer.cli.main import main
from seer.common import wire
from seer.common.errors import InvalidField
from seer.prompt_trace.way import concerns, follow, needle
from seer.services.buffer.events import Drained, Left, ToIncarnation
from seer.services.buffer.log import rows, writer
from seer.services.buffer.requests import events, instructions


def submitted(*prompts, rollout="r", n=2, most=64, kept=None):
    groups = [events.GroupSpec(prompt, 8, kept=kept) for prompt in prompts]
    return events.GroupsSubmitted("t", rollout, n, most, groups, submission=1)


def dispatch(engine, request, attempt, most=32):
    return instructions.Dispatch(engine, request, attempt, most)


def segment(*lines, incarnation=7, started=HEADER.started):
    header = rows.Header(
        incarnation=incarnation,
        policy="seer",
        limits=HEADER.limits,
        update_seconds=1,
        started=started,
        clock=50,
    )
    return header, [rows.Line(50 + time, event, out) for time, event, out in lines]


def told(wanted, *segments):
    """Return the lines without their times."""
    first, *lines = follow(segments, wanted)
    assert re.fullmatch(r"prompt .* of rollout .*, 2001-09-09 UTC", first)
    return [re.sub(r"^[\d:. ]{12}  ", "", line) for line in lines]


def moving():
    accepted = ToIncarnation(b"t", wire.Accepted(rollout_id="r", prompt_ids=["a", "b"], weight_version=3))
    return segment(
        (0.0, orders.joined("e0", CAPACITY, 1), []),
        (0.0, orders.joined("e1", CAPACITY, 2), []),
        (
            1.0, submitted("a", "b"),
            [accepted, dispatch("e0", "r/a#0", 1), dispatch("e0", "r/a#1", 2), dispatch("e1", "r/b#0", 3)],
        ),
        (2.0, orders.ended("e0", "r/a#0", 1, 32, preemptions=1), [dispatch("e1", "r/a#0", 4)]),
        (2.5, orders.ended("e0", "r/a#0", 1, 32), []),  # late: another attempt is the current one
        (3.0, Left(["e0"], died=True), [dispatch("e1", "r/a#1", 5)]),
        (4.0, orders.ended("e1", "r/a#0", 4, 32), []),
        (
            5.0, orders.ended("e1", "r/a#1", 5, 9, "stop"),
            [instructions.Deliver(b"t", "r/a")],
        ),
        (6.0, orders.acknowledged("t", "r", ["a"]), []),
    )  # fmt: skip


def test_a_prompts_way_is_told_from_its_submission_to_its_acknowledgement():
    assert told("a", moving()) == told("r/a", moving()) == [
        "submitted by trainer t: 8 tokens, 2 responses of at most 64",
        "accepted, for weight version 3",
        "#0 placed on e0, for at most 32 (chunk 1)",
        "#1 placed on e0, for at most 32 (chunk 1)",
        "#0 32 tokens from e0, preempted 1 times: 32 in all",
        "#0 moved from e0 to e1 after 32 tokens, for at most 32 (chunk 2)",
        "#1 lost with engine e0, which left or died",
        "#1 moved from e0 to e1, for at most 32 (chunk 2)",
        "#0 32 tokens from e1: finished (length), 64 in all",
        "#1 9 tokens from e1: finished (stop), 9 in all",
        "delivered to its trainer",
        "acknowledged by trainer t",
    ]  # fmt: skip
    assert follow([moving()], "a")[1].startswith("01:46:41.000  submitted")


def test_one_response_is_told_alone_and_another_prompt_adds_nothing():
    lines = told("r/a#1", moving())
    assert [line for line in lines if line.startswith("#")] == [
        "#1 placed on e0, for at most 32 (chunk 1)",
        "#1 lost with engine e0, which left or died",
        "#1 moved from e0 to e1, for at most 32 (chunk 2)",
        "#1 9 tokens from e1: finished (stop), 9 in all",
    ]
    assert told("b", moving())[-1] == "#0 still runs on e1 when the log ends"
    hashed = segment((0.0, submitted("a#1"), [dispatch("e0", "r/a#1#0", 1)]))
    assert told("a#1", hashed)[1] == "#0 placed on e0, for at most 32 (chunk 1)"


def test_what_a_buffer_lost_and_what_its_successor_goes_on_from():
    kept = events.Kept(3, "", [events.KeptResponse(0, 32)])
    first = segment((0.0, submitted("a"), [dispatch("e0", "r/a#0", 1)]))
    second = segment(
        (
            0.0, submitted("a", kept=kept),
            [instructions.Restore("r/a"), dispatch("e1", "r/a#0", 8), dispatch("e1", "r/a#1", 9)],
        ),
        (1.0, orders.rejected("e1", "r/a#1", 9, True, "no"), [
            ToIncarnation(b"t", wire.Refused(code="failed", message="no", rollout_id="r", prompt_ids=["a"])),
            orders.dropped_chunk("e1", "r/a#0", 8),
        ]),
        incarnation=8, started=HEADER.started + 9,
    )  # fmt: skip
    lines = told("a", first, second)
    assert lines[2:] == [
        "#0 lost with the buffer, on e0",
        "submitted by trainer t: 8 tokens, 2 responses of at most 64",
        "#0 goes on from 32 tokens that an earlier buffer kept",
        "#0 moved from e0 to e1 after 32 tokens, for at most 32 (chunk 2)",
        "#1 placed on e1, for at most 32 (chunk 1)",
        "#1 failed on e1: no",
        "failed: no",
        "#0 dropped on e1",
    ]


def test_what_a_draining_buffer_held_its_successor_places():
    first = segment((0.0, Drained(), []), (1.0, submitted("a"), []))
    second = segment(
        (0.0, submitted("a"), [dispatch("e1", "r/a#0", 1)]), incarnation=8, started=HEADER.started + 9
    )
    held, again, placed, _ = told("a", first, second)
    assert held == f"{again}, held for the successor of a buffer that drains"
    assert placed.startswith("#0 placed on e1")


def test_an_id_of_several_rollouts_is_that_of_the_last_and_an_unknown_one_says_what_ids_look_like():
    steps = [segment((float(step), submitted("a", rollout=f"step-{step}"), [])) for step in range(8)]
    lines = told("a", *steps)
    assert lines[-1].startswith(
        "such prompts are in 7 more rollouts, as step-2, step-3, step-4, step-5, step-6: "
    )
    assert told("step-3/a", *steps)[-1].startswith("submitted")
    with pytest.raises(
        InvalidField, match=r"give PROMPT, ROLLOUT/PROMPT .*; the last ones: step-3/a, step-4/a"
    ):
        follow(steps, "step-9/a")
    with pytest.raises(InvalidField, match="no such response was placed; those that were: 0, 1"):
        follow([moving()], "r/a#5")
    begun = segment((0.0, orders.ended("e0", "r/x#0", 1, 4), [dispatch("e0", "r/y#0", 2)]))
    assert told("y", begun)[0] == "submitted before the log begins"


def test_an_id_that_no_log_can_have_is_refused():
    with pytest.raises(InvalidField, match=r"ID = .*: is not UTF-8: give PROMPT"):
        needle(os.fsdecode(b"\xff"))


def test_the_command_reads_files_and_only_the_rows_that_may_matter(tmp_path, monkeypatch):
    monkeypatch.setattr(writer.Folder, "limit", 4000)
    buffer = LoggedBuffer(tmp_path / "log")
    for number in range(3):
        buffer.roll(number)
    buffer.log.close()

    def seer_trace(wanted):
        return CliRunner().invoke(main, ["trace", wanted, str(tmp_path / "log")])

    result = seer_trace("r1/2")
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[0].startswith("prompt 2 of rollout r1")
    assert sum("tokens from" in line for line in lines) == sum("(chunk " in line for line in lines) > 2
    assert "acknowledged by trainer t" in lines[-1]
    segments = [rows.read(path) for path in sorted((tmp_path / "log").glob("*.jsonl"))]
    assert follow(segments, "r1/2") == lines  # rows that were left out would have added nothing
    assert len(segments) > 1
    assert not concerns(b'[1.0,["Tick"],[]]', needle("r1/2"))
    missing = seer_trace("nonsense")
    assert missing.exit_code == 2
    assert "ID = 'nonsense': the log has no such prompt: give PROMPT, ROLLOUT/PROMPT" in missing.output
    nothing = CliRunner().invoke(main, ["trace", "a", str(tmp_path / "none")])
    assert "LOG = " in nothing.output
    assert "give a folder or file that buffer.log wrote" in nothing.output
