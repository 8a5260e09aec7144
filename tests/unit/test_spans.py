"""Rows to spans: ids that a second reading has, too, what ends early, and logs that are cut, rotated or damaged."""

import contextlib
from pathlib import Path
from types import SimpleNamespace

import orders
import pytest
from log_spans import agreed, check_tree, held, named, spans_of
from logged_buffer import LoggedBuffer
from report_rows import CAPACITY, HEADER

from seer.common import wire
from seer.services.buffer.events import FromTrainer, ToIncarnation, ToTrainer
from seer.services.buffer.log import log_folder, rows, writer
from seer.services.buffer.requests import events, instructions
from seer.spans import span_ids
from seer.spans.log_tail import LogTail
from seer.spans.span_reader import QUIET_SECONDS, SpanReader


@pytest.fixture
def rotated(tmp_path, monkeypatch):
    """The log of 8 rollouts in many segments."""
    monkeypatch.setattr(writer.Folder, "limit", 6000)
    monkeypatch.setattr(writer, "SNAPSHOTS", 2)
    # The wall's clock goes with the log's: where it falls back, times depend on rows that the tail leaves out.
    monkeypatch.setattr(writer, "time", SimpleNamespace(time=lambda: 1e9))
    buffer = LoggedBuffer(tmp_path)
    monkeypatch.setattr(writer, "time", SimpleNamespace(time=lambda: 1e9 + buffer.now))
    for number in range(8):
        buffer.roll(number)
        buffer.now += 2 * QUIET_SECONDS
    buffer.log.close()
    return tmp_path


def read(path):
    return list(LogTail(path).read())


def told(*lines, reader=None):
    reader = reader or SpanReader()
    reader.begin(HEADER)
    for time, event, out in lines:
        reader.add(rows.Line(HEADER.clock + time, event, out))
    return reader


def submitted(*prompts, submission=1, n=1, most=64, is_open=False, digest=0):
    specs = [events.GroupSpec(prompt, 8) for prompt in prompts]
    return events.GroupsSubmitted(
        "t", "r", n, most, specs, submission=submission, open=is_open, params_digest=digest
    )


def test_spans_of_many_rollouts_say_what_the_report_says_and_nothing_is_kept(rotated):
    assert len(log_folder.segments(rotated)) > 5
    _, spans, reader = agreed(rotated)
    assert [len(named(spans, name)) for name in ("rollout", "group", "request")] == [8, 32, 64]
    assert held(reader) == 0
    assert {span.attributes["gen_ai.usage.output_tokens"] for span in named(spans, "request")} == {30}


def test_a_second_reading_has_the_same_spans_wherever_it_is_interrupted(rotated):
    first, _ = spans_of(rotated)
    sent = {span.place: span for span in first}
    assert {span.place: span for span in spans_of(rotated, every=7)[0]} == sent
    log_folder.segments(rotated)[0].unlink()  # as an old one
    later, _ = spans_of(rotated)
    begun = next(span.attributes["seer.rollout"] for span in later)
    whole = [span for span in later if span.attributes["seer.rollout"] != begun]
    assert 0 < len(whole) < len(later) < len(first)
    assert [span for span in whole if sent[span.place] != span] == []
    assert {span.place for span in later} <= sent.keys()


def test_ids_tell_all_names_apart():
    ids = {
        span_ids.group_trace("t", "r", 1, "p"), span_ids.group_trace("t", "r1", 1, "p"),
        span_ids.group_trace("t", "r", 11, "p"), span_ids.group_trace("tr", "", 1, "p"),
        span_ids.group_trace("", "tr", 1, "p"), span_ids.rollout_trace("t", "r", 1), span_ids.update_trace(1, "t", 1),
    }  # fmt: skip
    assert len(ids) == 7
    assert 0 not in ids
    assert max(ids) < 2**128
    assert (
        span_ids.span_id(1, "chunk", 1) == span_ids.span_id(1, "chunk", 1) != span_ids.span_id(2, "chunk", 1)
    )


def test_refused_cancelled_and_replaced_groups_end_and_say_why():
    refused = orders.refused(b"", "r", ["a"], "failed", "it kills engines", submission=1)
    cancelled = orders.refused(b"", "r", ["b"], "cancelled", "cancelled by its trainer", submission=1)
    reader = told(
        (0.0, orders.joined("e0", CAPACITY, 1), []),
        (1.0, submitted("a", "b", "c", n=2), []),
        (2.0, orders.cancelled("t", "r", ["b"]), [cancelled]),
        (3.0, orders.cancelled("t", "r", ["b"]), [refused]),
        (4.0, submitted("c", submission=2, digest=1), []),
    )
    spans = reader.take(HEADER.started + 5 + QUIET_SECONDS)
    check_tree(spans)
    assert [(span.attributes["seer.prompt"], span.error) for span in named(spans, "group")] == [
        ("b", None), ("a", "failed: it kills engines"), ("c", "replaced"),
    ]  # fmt: skip
    assert [span.error for span in named(spans, "request")] == [None] * 2 + [
        "failed: it kills engines"
    ] * 2 + ["replaced"] * 2
    [rollout] = named(spans, "rollout")
    assert (rollout.error, rollout.end) == ("2 of 3 groups failed", HEADER.started + 4)


def test_versions_are_those_that_groups_were_accepted_for():
    def accepted(*prompts, version):
        message = wire.Accepted(
            rollout_id="r", prompt_ids=list(prompts), submission=1, weight_version=version
        )
        return ToIncarnation(b"", message)

    update = wire.UpdateWeights(version=4, source="/w", call_id=9)
    reader = told(
        (0.0, orders.joined("e0", CAPACITY, 1), []),
        (1.0, submitted("a"), [accepted("a", version=3)]),
        (2.0, FromTrainer("t", update), []),
        (3.0, submitted("b", is_open=True), [ToTrainer("t", wire.WeightsLive(version=4, digest="", call_id=9))]),
        (4.0, submitted("b", is_open=True), [accepted("b", version=-1)]),
        (5.0, FromTrainer("t", wire.UpdateWeights(version=5, source="/w", call_id=10)), []),
        (6.0, orders.cancelled("t", "r", []), [orders.refused(b"", "r", ["a", "b"], "cancelled", "", submission=1),
               ToTrainer("t", wire.WeightsFailed(version=5, reasons={"e0": "no room"}, call_id=10))]),
    )  # fmt: skip
    spans = reader.take()
    assert {
        span.attributes["seer.prompt"]: span.attributes["seer.weight_version"]
        for span in named(spans, "request")
    } == {"a": 3, "b": 4}
    assert [(span.start, span.end, span.error) for span in named(spans, "update")] == [
        (HEADER.started + 2, HEADER.started + 3, None), (HEADER.started + 5, HEADER.started + 6, "no room"),
    ]  # fmt: skip


def test_what_was_delivered_before_is_not_sent_again():
    chunk = [instructions.Dispatch("e0", "r/a#0", 1, 64)]
    done = [instructions.Deliver(b"", "r/a")]
    reader = told(
        (0.0, orders.joined("e0", CAPACITY, 1), []),
        (1.0, submitted("a"), chunk),
        (2.0, orders.ended("e0", "r/a#0", 1, 64), done),
    )
    first = reader.take(HEADER.started + 3 + QUIET_SECONDS)
    assert [span.name for span in first] == ["chunk", "request", "group", "rollout"]
    reader.add(rows.Line(HEADER.clock + 90, submitted("a"), done))
    assert reader.take(HEADER.started + 91 + QUIET_SECONDS) == []
    assert held(reader) == 0


def test_a_trainer_that_began_again_goes_on_with_what_its_buffer_has(tmp_path):
    buffer = LoggedBuffer(tmp_path)
    specs = [events.GroupSpec(prompt, 10) for prompt in "ab"]

    def submitted(number):
        return buffer.tell(events.GroupsSubmitted("t", "r", 2, 30, specs, submission=number))

    todo, number = submitted(1), 1
    while todo:
        chunk = todo.pop(0)
        todo += buffer.tell(
            orders.ended(
                chunk.instance,
                chunk.request_id,
                chunk.attempt,
                7 if chunk.max_new_tokens > 6 else chunk.max_new_tokens,
            )
        )
        if len(todo) == 3 and number == 1:
            number = 2
            todo += submitted(2)
    buffer.tell(orders.acknowledged("t", "r", ["a", "b"]))
    buffer.log.close()
    spans, reader = spans_of(tmp_path)
    check_tree(spans)
    assert held(reader) == 0
    assert [span.error for span in spans] == [None] * len(spans)
    assert [span.attributes["gen_ai.usage.output_tokens"] for span in named(spans, "request")] == [30] * 4
    assert sum(span.attributes["gen_ai.usage.output_tokens"] for span in named(spans, "chunk")) == 120
    [rollout] = named(spans, "rollout")
    assert (rollout.attributes["seer.submission"], rollout.attributes["seer.groups"]) == ("2", 2)


def test_a_group_that_ended_while_the_log_could_not_be_written_has_ended_well(tmp_path):
    buffer = LoggedBuffer(tmp_path)
    todo = buffer.tell(events.GroupsSubmitted("t", "r", 1, 16, [events.GroupSpec("a", 10)], submission=1))
    buffer.log.flush()
    buffer.log._stop(OSError(28, "full"))
    while todo:
        chunk = todo.pop(0)
        todo += buffer.tell(orders.ended(chunk.instance, chunk.request_id, chunk.attempt, 8))
    buffer.log.tick(buffer.now + 3600)
    buffer.tell(orders.acknowledged("t", "r", ["a"]))
    buffer.log.close()
    spans, reader = spans_of(tmp_path)
    [group] = named(spans, "group")
    assert (group.error, group.attributes["gen_ai.usage.output_tokens"]) == (None, 16)
    assert not reader._groups


# --- files ---------------------------------------------------------------------------------


def test_lines_are_read_as_they_come_and_a_dead_writers_last_one_is_left(rotated, tmp_path_factory):
    whole = read(rotated)
    folder, found = tmp_path_factory.mktemp("live"), []
    tail = LogTail(folder)
    assert list(tail.read()) == []
    for path in log_folder.segments(rotated):
        text = path.read_bytes()
        for at in range(0, len(text), 700):
            with (folder / path.name).open("ab") as file:
                file.write(text[at : at + 700])
            found += tail.read()
        with (folder / path.name).open("ab") as file:
            file.write(b'[1.0,["Tick"')  # killed
    found += tail.read()
    assert found == whole


@pytest.mark.parametrize("question", ["exists", "is_dir", "is_file"])
def test_a_folder_that_is_made_while_one_looks_for_it_is_no_file(tmp_path, monkeypatch, question):
    folder = tmp_path / "log"
    asked = getattr(Path, question)

    def made_then(path):
        answer = asked(path)
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
        return answer

    monkeypatch.setattr(Path, question, made_then)
    tail = LogTail(folder)
    assert not [*tail.read(), *tail.read()]
    LoggedBuffer(folder).log.close()
    assert list(tail.read())


def test_a_file_that_is_no_segment_hides_none(rotated):
    whole, tail = read(rotated), LogTail(rotated)
    last = log_folder.segments(rotated)[-1]
    text = last.read_bytes()
    last.unlink()
    (rotated / "notes.jsonl").write_text("{}\n")
    found = list(tail.read())
    last.write_bytes(text)
    assert found + list(tail.read()) == whole


@pytest.mark.parametrize("damage", [b"\0" * 900 + b"\n", b'[1.0,["Nothing"],[]]\n', b"{}\n", b'"\xff"\n'])
def test_a_damaged_line_costs_its_segment_and_no_other(rotated, damage):
    second = log_folder.segments(rotated)[1]
    lines = second.read_bytes().splitlines(keepends=True)
    second.write_bytes(b"".join([*lines[:3], damage, *lines[3:]]))
    items = read(rotated)
    assert [type(item) for item in items].count(rows.LogError) == 1
    headers = [item.number for item in items if isinstance(item, rows.Header)]
    assert len(headers) == len(log_folder.segments(rotated))
    second.write_bytes(damage)
    assert [type(item) for item in read(rotated)].count(rows.LogError) == 1


def test_a_file_that_another_format_has_is_told(rotated):
    first = log_folder.segments(rotated)[0]
    first.write_bytes(first.read_bytes().replace(b'"format":2', b'"format":1', 1))
    items = read(rotated)
    assert "read it with the version that wrote it" in str(items[0])
    assert isinstance(items[1], rows.Header)
