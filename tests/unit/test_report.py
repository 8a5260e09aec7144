"""The report's parts alone: what rows become, what is drawn of very many chunks, and what is refused."""

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import msgspec
import numpy as np
import orders
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from report_rows import CAPACITY, HEADER, told

from seer.cli.main import main
from seer.common.errors import InvalidField
from seer.report import view as view_module
from seer.report.hard_prompts import MOST, HardPrompt
from seer.report.log_reader import LogReader, read_timeline
from seer.report.records import Chunk, End, EngineIncarnation, Response, Rollout, Timeline
from seer.report.svg import WIDTH, Drawing, date, duration, ticks
from seer.report.timeline_page import HARD_COLOURS, page
from seer.report.trace import trace
from seer.report.view import RolloutView, choose_rollout, lay_out, levels
from seer.services.buffer.buffer_machine import BufferMachine
from seer.services.buffer.events import Left, Tick
from seer.services.buffer.log import rows
from seer.services.buffer.requests import events, instructions
from seer.services.buffer.requests.state import Limits

SVG = "{http://www.w3.org/2000/svg}"


def submitted(
    prompts: str = "a", *, submission: int = 1, n: int = 1, most: int = 64
) -> events.GroupsSubmitted:
    groups = [events.GroupSpec(prompt, 8) for prompt in prompts]
    return events.GroupsSubmitted("t", "r", n, most, groups, submission=submission)


def dispatch(engine: str, request: str, attempt: int, most: int = 32) -> instructions.Dispatch:
    return instructions.Dispatch(engine, request, attempt, most)


def beginning(*prompts: str) -> list[tuple[float, object, list[object]]]:
    return [
        (0.0, orders.joined("e0", CAPACITY, 1), []),
        (0.0, orders.joined("e1", CAPACITY, 2), []),
        (1.0, submitted("a"), [dispatch("e0", "r/a#0", 1)]),
    ]


def test_a_response_moves_and_ends() -> None:
    timeline = told(
        *beginning(),
        (2.0, orders.ended("e0", "r/a#0", 1, 32, preemptions=2), [dispatch("e1", "r/a#0", 2)]),
        (2.5, orders.ended("e0", "r/a#0", 1, 32), []),  # late: another attempt is the current one
        (4.0, orders.ended("e1", "r/a#0", 2, 32), []),
    )
    first, second = timeline.chunks
    assert (first.start, first.end, first.tokens, first.preemptions, first.moved) == (
        1e9 + 1,
        1e9 + 2,
        32,
        2,
        False,
    )
    assert (second.end, second.context, second.moved) == (1e9 + 4, 40, True)
    assert (first.blocks, second.blocks) == (CAPACITY.blocks_for(8, 32), CAPACITY.blocks_for(40, 32))
    assert {first.how, second.how} == {End.KEPT}
    (response,) = timeline.rollouts[0].responses
    assert (response.generated, response.finish, response.finished) == (64, "length", 1e9 + 4)


@pytest.mark.parametrize(
    ("event", "out", "how"),
    [
        (orders.ended("e0", "r/a#0", 1, 0), [], End.FAILED),
        (orders.ended("e0", "r/a#0", 1, 65), [], End.FAILED),
        (orders.rejected("e0", "r/a#0", 1, False, "no room"), [], End.FAILED),
        (orders.cancelled("t", "r", []), [orders.dropped_chunk("e0", "r/a#0", 1)], End.DROPPED),
        (Left(["e0"]), [], End.ENGINE_LOST),
        (Left(["e0"], died=True), [], End.ENGINE_LOST),
        (orders.joined("e0", CAPACITY, 1), [], End.ENGINE_LOST),  # the same incarnation, again
        (orders.joined("e0", CAPACITY, 9), [], End.ENGINE_LOST),
        (Tick(), [dispatch("e1", "r/a#0", 2)], End.ENGINE_LOST),
        (Tick(), [], End.RUNNING),
        (Left(["e1"]), [], End.RUNNING),
        (orders.ended("e1", "r/a#0", 1, 5), [], End.RUNNING),
    ],
)
def test_how_a_chunk_ends(event: object, out: list[object], how: End) -> None:
    timeline = told(*beginning(), (3.0, event, out))
    chunk = timeline.chunks[0]
    assert (chunk.how, chunk.end, chunk.tokens) == (how, 1e9 + 3, 0)


def test_incarnations_of_engines() -> None:
    timeline = told(
        *beginning(),
        (2.0, orders.joined("e0", CAPACITY, 1), []),
        (3.0, orders.joined("e0", CAPACITY, 5), []),
        (4.0, Left(["e1"]), []),
    )
    incarnations = [
        (each.name, each.number, each.left and each.left - 1e9, each.lost) for each in timeline.incarnations
    ]
    assert incarnations == [("e0", 1, 3.0, True), ("e1", 2, 4.0, False), ("e0", 5, None, False)]


def test_a_log_that_begins_in_the_middle_and_rows_of_another_kind() -> None:
    class Snapshot(msgspec.Struct):
        state: int

    timeline = told(
        (0.0, Snapshot(1), [Snapshot(2)]),
        (1.0, orders.ended("e0", "r/a#1", 4, 32), [dispatch("e0", "r/b/c#2", 5)]),
        (2.0, orders.ended("e0", "r/b/c#2", 5, 32, "stop"), []),
    )
    (chunk,) = timeline.chunks
    assert (chunk.response.name, chunk.response.finish, chunk.blocks) == ("b/c#2", "stop", 0)
    assert choose_rollout(timeline).rollout_id == "r"
    ET.fromstring(page(RolloutView(timeline, choose_rollout(timeline))))


class LaterSegment(msgspec.Struct):
    """A header that holds the machines' state, as a segment in the middle of an incarnation has one."""

    state: BufferMachine
    incarnation: int = HEADER.incarnation
    version: str = ""
    policy: str = "seer"
    started: float = HEADER.started
    clock: float = HEADER.clock
    number: int = HEADER.number
    limits: Limits = HEADER.limits

    def machine(self) -> BufferMachine:
        return self.state


def test_a_log_begins_with_what_the_machines_hold() -> None:
    machine = HEADER.machine()
    whole, part = LogReader(), LogReader()
    whole.begin(HEADER)
    lines: list[rows.Line] = []

    def tell(event: rows.Event) -> list[instructions.Dispatch]:
        now = HEADER.clock + len(lines)
        lines.append(rows.Line(now, event, machine.apply(event, now)))
        whole.add(lines[-1])
        return [item for item in lines[-1].out if isinstance(item, instructions.Dispatch)]

    tell(orders.joined("e0", CAPACITY, 1))
    tell(orders.joined("e1", CAPACITY, 2))
    work = [(each, 32) for each in tell(submitted("abc", n=2))]
    assert len(work) > 2
    half = 0
    while work:
        if len(lines) == 6:  # some run, some finished one chunk
            part.begin(LaterSegment(machine))  # type: ignore[arg-type]
            half = len(lines)
            (response,) = {each.finish for each in part.timeline.rollouts[0].responses}
            assert response == ""
        each, count = work.pop(0)
        ended = tell(orders.ended(each.instance, each.request_id, each.attempt, count))
        work += [(each, 32) for each in ended]
        if half:
            part.add(lines[-1])
    whole.finish()
    part.finish()
    for reader in (whole, part):
        (rollout,) = reader.timeline.rollouts
        assert (rollout.trainer, rollout.submission, len(rollout.responses)) == ("t", 1, 6)
        assert {each.generated for each in rollout.responses} == {64}
        assert {chunk.how for chunk in rollout.chunks} == {End.KEPT}
    ends = [
        [(c.response.name, c.end) for c in sorted(r.timeline.chunks, key=lambda c: c.end)]
        for r in (whole, part)
    ]
    assert ends[0][-len(ends[1]) :] == ends[1]
    assert part.timeline.rollouts[0].submitted == whole.timeline.rollouts[0].submitted
    for reader in (whole, part):  # what was generated before the log begins was not computed again
        names = [name for _, name in RolloutView(reader.timeline, reader.timeline.rollouts[0]).figures()]
        assert "tokens computed again" not in names
    edges = np.array([HEADER.started + 6, HEADER.started + 7.5])
    booked = [RolloutView(r.timeline, r.timeline.rollouts[0]).booked("e0", edges) for r in (whole, part)]
    assert booked[0] == booked[1] > 0


def test_a_group_that_is_held_as_the_log_begins_goes_on_from_what_was_kept() -> None:
    machine, reader = HEADER.machine(), LogReader()
    kept = events.Kept(0, "", [events.KeptResponse(0, 10)])
    groups = [events.GroupSpec(prompt, 8, kept=kept if prompt == "a" else None) for prompt in "ab"]
    machine.apply(events.GroupsSubmitted("t", "r", 1, 64, groups, submission=1), HEADER.clock)
    reader.begin(LaterSegment(machine))  # type: ignore[arg-type]
    restored = [instructions.Restore(f"r/{prompt}") for prompt in "ab"]  # of b nobody knows what was kept
    sent = [dispatch("e0", f"r/{prompt}#0", number) for number, prompt in enumerate("ab")]
    reader.add(rows.Line(HEADER.clock + 1, orders.joined("e0", CAPACITY, 1), [*restored, *sent]))
    assert [chunk.context for chunk in reader.timeline.chunks] == [18, 8]


def test_segments_of_one_incarnation_are_one_and_another_incarnation_is_a_loss() -> None:
    reader = LogReader()
    told(*beginning(), reader=reader)
    reader.begin(HEADER)  # the next segment
    assert not reader.timeline.spans
    reader.begin(msgspec.structs.replace(HEADER, incarnation=8, started=1e9 + 9))
    (span,) = reader.timeline.spans
    assert (span.start, span.end, span.text) == (1e9 + 1, 1e9 + 9, "buffer lost; chunks lost: 1")
    assert [chunk.how for chunk in reader.timeline.chunks] == [End.BUFFER_LOST]


def test_what_is_refused_is_no_open_response_and_a_second_use_is_another_rollout() -> None:
    refused = orders.refused(b"", "r", ["a"], "cancelled", "", 1)
    ended = orders.ended("e0", "r/a#0", 1, 32)
    timeline = told(
        *beginning(), (2.0, ended, []), (2.0, Tick(), [refused]), (3.0, submitted("a", submission=2), [])
    )
    first, second = timeline.rollouts
    assert ("32", "tokens") in RolloutView(timeline, first).figures()
    assert (first.submission, second.submission) == (1, 2)
    assert (first.responses[0].finish, second.responses[0].finish) == ("cancelled", "")


def test_levels_are_means_over_time() -> None:
    rollout = Rollout("r", "t", 0, 0.0)
    response = Response(rollout, "a", 0, 0)
    chunks = [Chunk(response, "e", 0, 0, start, end, 0, 0) for start, end in ((-1.0, 1.0), (0.5, 3.0))]
    assert levels(chunks, [2.0, 4.0], np.array([0.0, 1.0, 2.0, 4.0])).tolist() == [4.0, 4.0, 2.0]
    assert levels([], [], np.array([0.0, 1.0])).tolist() == [0.0]


def many(chunks: int, *, engines: int = 4, slots: int = 8) -> RolloutView:
    """A rollout of so many chunks of a second, each of a response of its own, all slots always full."""
    rollout = Rollout("r", "t", 0, 0.0)
    timeline = Timeline(rollouts=[rollout])
    timeline.incarnations = [
        EngineIncarnation(f"e{number:03}", number, CAPACITY, 0.0) for number in range(engines)
    ]
    for number in range(chunks):
        at, place = divmod(number, engines * slots)
        response = Response(
            rollout, f"p{number // 8}", number // 8, number % 8, finished=at + 1.0, finish="stop"
        )
        chunk = Chunk(response, f"e{place // slots:03}", number, place % slots, at, at + 1.0, 8, 1, tokens=8)
        chunk.how = End.KEPT
        response.chunks.append(chunk)
        rollout.responses.append(response)
        rollout.chunks.append(chunk)
    timeline.chunks, timeline.end = rollout.chunks, rollout.end
    return RolloutView(timeline, rollout)


@pytest.mark.parametrize("slots", [1, 8])
def test_of_very_many_chunks_a_bounded_number_is_drawn(monkeypatch: pytest.MonkeyPatch, slots: int) -> None:
    monkeypatch.setattr(view_module, "BARS", 1000)
    few, view = many(1000, slots=slots), many(5000, slots=slots)
    assert (lay_out(few).step, lay_out(few).count) == (1, 1000)
    layout = lay_out(view)
    assert layout.step > 1
    assert 300 < layout.count <= 1000
    drawn = [bar.chunk for bars in layout.bars.values() for bar in bars]
    assert len(set(drawn)) == len(drawn)
    assert set(drawn) >= {chunk for response in layout.tail for chunk in response.chunks}
    text = page(view)
    assert f"{layout.count:,} of 5,000 chunks are drawn" in text
    assert text.count("<title>") < 1000 + view_module.TAIL_ROWS + 10
    assert len([e for e in msgspec.json.decode(trace(view))["traceEvents"] if e["ph"] == "X"]) == 5000


@pytest.mark.parametrize("bars", [20_000, 500])
def test_of_very_many_engines_those_that_were_lost_are_drawn(
    monkeypatch: pytest.MonkeyPatch, bars: int
) -> None:
    monkeypatch.setattr(view_module, "BARS", bars)
    view = many(2000, engines=200)
    view.incarnations[199].left, view.incarnations[199].died = 1.5, True
    layout = lay_out(view)
    assert len(layout.engines) == view_module.ENGINES
    assert "e199" in layout.engines
    assert "64 of 200 engines" in page(view)


def test_hard_prompts_are_named_in_colours_of_their_own() -> None:
    view = many(400)  # 50 prompts of 8 responses of 8 tokens
    assert view.hard == [], "all are equally long"
    for response in view.rollout.responses:
        if response.prompt in (3, 7):
            response.generated, response.finish = 100 * response.prompt, "length"
        else:
            response.generated = 100
    view = RolloutView(view.timeline, view.rollout)
    assert [each.prompt_id for each in view.hard] == ["p7", "p3"]
    assert view.hard[0] == HardPrompt("p7", 7, 8, 700.0, 8)
    text = page(view)
    assert "p7: 700 tokens, 8 of 8 cut" in text
    drawn = [
        each for each in ET.fromstring(text).iter(f"{SVG}rect") if each.get("class", "").startswith("h0")
    ]
    assert len(drawn) == 8 + 1, "its chunks, and the legend"
    for response in view.rollout.responses:
        response.generated = 50 * (1 + response.prompt)
    assert len(RolloutView(view.timeline, view.rollout).hard) == len(HARD_COLOURS) == MOST


@pytest.mark.parametrize(
    ("most", "marks"),
    [
        (0.0, [0, 1]),
        (1.0, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (3617.2, [0, 1000, 2000, 3000, 4000]),
        (512, [0, 200, 400, 600]),
    ],
)
def test_axes_have_round_numbers(most: float, marks: list[float]) -> None:
    assert ticks(most) == pytest.approx(marks)


@given(st.floats(1e-6, 1e12))
def test_an_axis_ends_above_its_curve(most: float) -> None:
    marks = ticks(most)
    assert 3 <= len(marks) <= 6
    assert marks[-2] < most * (1 + 1e-6)
    assert most <= marks[-1] * (1 + 1e-6)


def test_a_legend_ends_within_the_page() -> None:
    drawing = Drawing(0.0, 1.0)
    drawing.legend([("h0", "prompts-045: 950 tokens, 6 of 8 cut")] * 9)
    texts = list(ET.fromstring(drawing.svg("", "")).iter(f"{SVG}text"))
    assert len({each.get("y") for each in texts}) > 1
    assert all(float(each.get("x", "")) + 5.6 * len(each.text or "") <= WIDTH for each in texts)


def test_each_curve_has_an_axis() -> None:
    texts = [each.text for each in ET.fromstring(page(many(5000))).iter(f"{SVG}text")]
    for title, label in (("Tokens/s", "300"), ("Open responses", "5,000")):
        assert label in texts[texts.index(title) :]


def test_names_are_escaped() -> None:
    view = many(8)
    nasty = "</title><script>&\"'\x00\x1b\u2028"
    view.rollout.rollout_id = view.rollout.responses[0].prompt_id = view.engines[0] = nasty
    view.timeline.incarnations[0].name = nasty
    for chunk in view.rollout.chunks:
        chunk.engine = nasty
    text = page(view)
    ET.fromstring(text)
    assert "<script" not in text
    assert not re.search(r"[\x00-\x09\x0b-\x1f]", text)
    msgspec.json.decode(trace(view))


def test_a_rollout_without_an_end_and_one_of_no_time() -> None:
    timeline = told(*beginning())
    view = RolloutView(timeline, choose_rollout(timeline))
    assert ("0 of 1", "responses") in view.figures()
    assert view.tail == view.rollout.responses
    ET.fromstring(page(view))


@pytest.mark.parametrize(
    ("seconds", "step", "text"),
    [(0.5, 0.1, "0.5 s"), (45, 5, "45 s"), (0, 600, "0 s"), (600, 600, "10 min"), (5400, 600, "1 h 30 min")],
)
def test_durations(seconds: float, step: float, text: str) -> None:
    assert duration(seconds, step) == text


def test_dates() -> None:
    assert date(1e9) == "2001-09-09 01:46:40 UTC"
    assert date(5.0) == ""


def write_log(folder: Path) -> Path:
    folder.mkdir()
    lines = [rows.header_line(HEADER)]
    lines += [rows.line(50 + time, event, out) for time, event, out in beginning()]
    (folder / "0000000000000007.jsonl").write_bytes(b"".join(lines))
    return folder


def test_the_command(tmp_path: Path) -> None:
    log, out = write_log(tmp_path / "log"), tmp_path / "out.html"
    (log / "0000000000000008.jsonl").write_bytes(b"")  # killed as it began
    (log / "chunks.bin").write_bytes(b"something else")
    result = CliRunner().invoke(
        main, ["report", str(log), "--out", str(out), "--trace", str(tmp_path / "t.json")]
    )
    assert result.exit_code == 0, result.output
    assert "rollout r: 0 of 1 responses" in result.output
    assert "<svg" in out.read_text()
    assert (tmp_path / "t.json").exists()
    assert len(read_timeline(log).chunks) == 1


def test_a_file_whose_header_was_cut_off_is_left_out(tmp_path: Path) -> None:
    log = write_log(tmp_path / "log")
    header = rows.header_line(HEADER)
    for cut in (1, len(header) // 2, len(header) - 1):
        (log / "0000000000000008.jsonl").write_bytes(header[:cut])
        assert len(read_timeline(log).chunks) == 1
    with pytest.raises(InvalidField, match="holds no log"):
        read_timeline(log / "0000000000000008.jsonl")


@pytest.mark.parametrize(
    ("log", "options", "message"),
    [
        ("nothing", [], "LOG = "),
        ("empty", [], "holds no log"),
        ("text", [], "is not a log of a buffer"),
        ("log", ["--rollout", "other"], "--rollout = 'other': the log has 1 rollouts, the last ones: r"),
        ("log", ["--out", "/nonexistent/x.html"], "--out = "),
        ("log", ["--trace", "/nonexistent/x.json"], "--trace = "),
        ("log", ["--out", "t", "--trace", "t"], "--trace = 't': is what --out names: give another file"),
    ],
)
def test_bad_input_is_refused_by_name(tmp_path: Path, log: str, options: list[str], message: str) -> None:
    write_log(tmp_path / "log")
    (tmp_path / "empty").mkdir()
    (tmp_path / "text").write_text("hello\n")
    options = options if "--out" in options else ["--out", str(tmp_path / "r.html"), *options]
    result = CliRunner().invoke(main, ["report", str(tmp_path / log), *options])
    assert result.exit_code == 2, result.output
    assert message in result.output
    assert not (tmp_path / "r.html").exists()


def test_a_log_without_a_rollout_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(rows.header_line(HEADER))
    with pytest.raises(InvalidField, match="no chunk of any ran"):
        choose_rollout(read_timeline(path))
