"""From a log's rows to the way of one prompt: submitted, placed, moved, lost, delivered. Pure.

Invariants (tests/unit/test_prompt_trace.py, tests/cluster/test_buffer_log.py):
- every chunk of the prompt that was dispatched is there, with what became of it: kept, lost or dropped;
- rows about other prompts add no lines;
- an id names the last rollout with such a prompt; an unknown one is refused with what ids look like.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime

import msgspec

from seer.common import ids, wire
from seer.common.errors import InvalidField
from seer.services.buffer.buffer_machine import Event, Instruction
from seer.services.buffer.events import (
    Drained,
    FromEngine,
    FromTrainer,
    Joined,
    Left,
    ToEngine,
    ToIncarnation,
)
from seer.services.buffer.log import rows
from seer.services.buffer.requests import events, instructions
from seer.services.buffer.sleep_machine import GiveUp

SHOWN = 5
"""Ids, and other rollouts, that are named at most."""

FORMS = "PROMPT, ROLLOUT/PROMPT or ROLLOUT/PROMPT#INDEX, as results and logs have them"

ALWAYS = (b'["GroupsSubmitted",', b'["Joined",', b'["Left",', b'["GiveUp",', b'["Drained"')
"""What rows have that may concern any prompt."""


def needle(wanted: str) -> bytes:
    """Return text that is in every row about the prompt alone, as JSON has it. Raises `InvalidField`."""
    name = _split(wanted)[0]
    try:
        return msgspec.json.encode(name.partition("/")[2] or name)[1:-1]
    except UnicodeEncodeError as error:
        raise InvalidField("ID", wanted, f"is not UTF-8: give {FORMS}") from error


def concerns(text: bytes, needle: bytes) -> bool:
    """Return whether a row's text may concern the prompt; decoding all rows takes ten times as long."""
    return needle in text or any(mark in text for mark in ALWAYS)


def follow(segments: Iterable[tuple[rows.Header, Iterable[rows.Line]]], wanted: str) -> list[str]:
    """Return the lines about the prompt. Raises `InvalidField` for an id that the log does not have."""
    reader = _Reader(wanted)
    for header, lines in segments:
        reader.begin(header)
        for line in lines:
            reader.add(line)
    return reader.lines()


def _split(wanted: str) -> tuple[str, int | None]:
    """Return an id without the index of a response, and the index; None: all responses are meant."""
    name, mark, index = wanted.rpartition("#")
    return (name, int(index)) if mark and index.isdecimal() else (wanted, None)


@dataclass(slots=True)
class _Response:
    """One response: its tokens, the `engine` where it runs (empty: none), and the last one where it ran."""

    generated: int = 0
    engine: str = ""
    attempt: int = 0
    finished: bool = False
    streamed: int = 0
    last: str = ""
    chunks: int = 0


@dataclass(slots=True)
class _Way:
    """A prompt of a rollout: its responses by index, and its lines, each with the response's index or None.

    `only`: the response that is meant, None: all. `kept`: what an earlier buffer kept of it. `over`: it
    ended, and a submission begins it anew.
    """

    rollout_id: str
    prompt_id: str
    only: int | None
    submitted: float
    max_tokens: int = 0
    kept: events.Kept | None = None
    over: bool = False
    responses: dict[int, _Response] = field(default_factory=dict)
    lines: list[tuple[float, int | None, str]] = field(default_factory=list)

    def response(self, index: int) -> _Response:
        return self.responses.setdefault(index, _Response())


_Named = wire.Accepted | wire.Refused | wire.Acknowledge | wire.Cancel


class _Reader:
    def __init__(self, wanted: str) -> None:
        self._wanted = wanted
        self._name, self._index = _split(wanted)
        self._ways: dict[str, _Way] = {}  # by group id
        self._examples: dict[str, None] = {}
        self._incarnation: int | None = None
        self._offset = self._now = 0.0
        self._draining = False

    # --- rows ------------------------------------------------------------------------------

    def begin(self, header: rows.Header) -> None:
        self._offset = header.started - header.clock
        anew = self._incarnation is not None and header.incarnation != self._incarnation
        self._incarnation, self._now = header.incarnation, max(self._now, header.started)
        if not anew:
            return
        self._draining = False
        for way in self._ways.values():
            for index, response in way.responses.items():
                if response.engine:
                    self._end(way, index, f"lost with the buffer, on {response.engine}")
                response.generated, response.finished = 0, False

    def add(self, line: rows.Line) -> None:
        self._now = max(self._now, self._offset + line.time)
        self._happened(line.event)
        for item in line.out:
            self._answered(item)

    def _happened(self, event: Event) -> None:
        match event:
            case events.GroupsSubmitted():
                self._submitted(event)
            case events.ChunkEnded(instance, result):
                self._ended(instance, result)
            case events.TokensArrived(instance, part):
                self._streamed(instance, part)
            case FromEngine(instance, wire.ChunkFailed() as failed):
                self._ended_badly(instance, failed, f"failed on {instance}: {failed.message}")
            case FromTrainer(trainer, wire.Acknowledge() as named):
                self._told(named, f"acknowledged by trainer {trainer}", over=True)
            case FromTrainer(trainer, wire.Cancel() as named):
                self._told(named, f"cancelled by trainer {trainer}")
            case Drained():
                self._draining = True
            case Left(instances):
                for name in instances:
                    self._engine_left(name, "which left or died")
            case Joined():
                self._engine_left(event.instance, "which registered again")

    def _answered(self, item: Instruction) -> None:
        match item:
            case instructions.Dispatch():
                self._placed(item)
            case instructions.Restore(group_id) if (way := self._ways.get(group_id)) is not None:
                self._restored(way)
            case instructions.Deliver(_, group_id) if (way := self._ways.get(group_id)) is not None:
                self._say(way, None, "delivered to its trainer")
            case ToEngine(instance, wire.DropChunk() as drop):
                self._ended_badly(instance, drop, f"dropped on {instance}")
            case ToIncarnation(_, wire.Accepted() as accepted):
                self._told(accepted, f"accepted, for weight version {accepted.weight_version}")
            case ToIncarnation(_, wire.Refused() as refused):
                self._told(refused, f"{refused.code}: {refused.message}", over=True)
            case GiveUp(instance):
                self._engine_left(instance, "which did not sleep or wake in time")

    # --- submissions -----------------------------------------------------------------------

    def _submitted(self, event: events.GroupsSubmitted) -> None:
        for spec in event.groups:
            group_id = ids.group_id(event.rollout_id, spec.prompt_id)
            way = self._way(group_id)
            if way is None:
                continue
            if way.over:
                running = {index: each for index, each in way.responses.items() if each.engine}
                way.responses, way.over = running, False
            way.submitted, way.max_tokens, way.kept = self._now, event.max_tokens, spec.kept
            held = ", held for the successor of a buffer that drains" if self._draining else ""
            images = f", {len(spec.missing)} images are missing" if spec.missing else ""
            self._say(
                way,
                None,
                f"submitted by trainer {event.trainer}: {spec.prompt_len} tokens, {event.n} responses of at "
                f"most {event.max_tokens}{images}{held}",
            )
        for spec in event.groups[-SHOWN:]:
            self._examples[ids.group_id(event.rollout_id, spec.prompt_id)] = None
        while len(self._examples) > SHOWN:
            del self._examples[next(iter(self._examples))]

    def _told(self, named: _Named, text: str, *, over: bool = False) -> None:
        """Add a line to the prompts that a message names, or to all of its rollout; `over`: they ended."""
        for way in self._ways.values():
            names = named.prompt_ids
            if way.rollout_id == named.rollout_id and (way.prompt_id in names or not names):
                self._say(way, None, text)
                way.over = way.over or over

    def _restored(self, way: _Way) -> None:
        for each in way.kept.responses if way.kept else ():
            response = way.response(each.index)
            response.generated, response.finished = each.count, bool(each.finish)
            self._say(way, each.index, f"goes on from {each.count} tokens that an earlier buffer kept")

    # --- chunks ----------------------------------------------------------------------------

    def _placed(self, item: instructions.Dispatch) -> None:
        group_id, _, index = item.request_id.rpartition("#")
        way = self._way(group_id)
        if way is None:
            return
        if not way.lines:
            self._say(way, None, "submitted before the log begins")
        response = way.response(int(index))
        if response.engine:
            self._end(way, int(index), f"lost on {response.engine}")
        if response.finished:  # its group was forgotten: it is generated again
            response.generated, response.finished = 0, False
        moved = response.last not in ("", item.instance)
        response.engine, response.attempt, response.streamed = item.instance, item.attempt, 0
        response.chunks += 1
        where = f"moved from {response.last} to {item.instance}" if moved else f"placed on {item.instance}"
        response.last = item.instance
        done = f" after {response.generated} tokens" if response.generated else ""
        self._say(
            way, int(index), f"{where}{done}, for at most {item.max_new_tokens} (chunk {response.chunks})"
        )

    def _way(self, group_id: str) -> _Way | None:
        """Return the way of a group, which begins now if the group is new; None: it is another prompt."""
        rollout_id, _, prompt_id = group_id.partition("/")
        names = group_id, prompt_id
        if group_id not in self._ways and not {self._wanted, self._name}.isdisjoint(names):
            only = None if self._wanted in names else self._index
            self._ways[group_id] = _Way(rollout_id, prompt_id, only, self._now)
        return self._ways.get(group_id)

    def _current(self, instance: str, request_id: str, attempt: int) -> Iterator[tuple[_Way, int, _Response]]:
        group_id, _, index = request_id.rpartition("#")
        if (way := self._ways.get(group_id)) is not None:
            response = way.response(int(index))
            if (response.engine, response.attempt) == (instance, attempt):
                yield way, int(index), response

    def _ended(self, instance: str, result: wire.ChunkResult) -> None:
        for way, index, response in self._current(instance, result.request_id, result.attempt):
            left = way.max_tokens - response.generated if way.max_tokens else result.count
            if result.start != response.streamed or not 0 < result.count <= left:
                self._end(way, index, f"lost on {instance}: {result.count} tokens after {result.start}")
                continue
            response.generated += result.count
            finish = result.finish or ("length" if response.generated == way.max_tokens else "")
            response.finished = bool(finish)
            so_far = f"{response.generated} in all"
            now = f"finished ({finish}), {so_far}" if finish else so_far
            preempted = f", preempted {result.preemptions} times" if result.preemptions else ""
            self._end(way, index, f"{result.count} tokens from {instance}{preempted}: {now}")

    def _ended_badly(self, instance: str, chunk: wire.ChunkFailed | wire.DropChunk, text: str) -> None:
        for way, index, _ in self._current(instance, chunk.request_id, chunk.attempt):
            self._end(way, index, text)

    def _streamed(self, instance: str, part: wire.ChunkTokens) -> None:
        for _, _, response in self._current(instance, part.request_id, part.attempt):
            response.streamed += part.count
            response.generated += part.count

    def _engine_left(self, name: str, how: str) -> None:
        for way in self._ways.values():
            for index, response in way.responses.items():
                if response.engine == name:
                    self._end(way, index, f"lost with engine {name}, {how}")

    def _end(self, way: _Way, index: int, text: str) -> None:
        way.response(index).engine = ""
        self._say(way, index, text)

    def _say(self, way: _Way, index: int | None, text: str) -> None:
        if way.only is None or index in (None, way.only):
            way.lines.append((self._now, index, text))

    # --- the text --------------------------------------------------------------------------

    def lines(self) -> list[str]:
        if not self._ways:
            examples = f"; the last ones: {', '.join(self._examples)}" if self._examples else ""
            raise InvalidField("ID", self._wanted, f"the log has no such prompt: give {FORMS}{examples}")
        way = max(self._ways.values(), key=lambda each: each.submitted)
        if way.only is not None and way.only not in way.responses:
            has = ", ".join(str(index) for index in sorted(way.responses)) or "none"
            raise InvalidField("ID", self._wanted, f"no such response was placed; those that were: {has}")
        found = [f"prompt {way.prompt_id} of rollout {way.rollout_id}, {_date(way.submitted)} UTC"]
        for time, index, text in way.lines:
            who = "" if index is None else f"#{index} "
            found.append(f"{_clock(time)}  {who}{text}")
        for index, response in sorted(way.responses.items()):
            if response.engine and way.only in (None, index):
                found.append(f"{'':12}  #{index} still runs on {response.engine} when the log ends")
        others = [each.rollout_id for each in self._ways.values() if each is not way]
        if others:
            shown = ", ".join(others[-SHOWN:])
            found.append(f"such prompts are in {len(others)} more rollouts, as {shown}: give ROLLOUT/PROMPT")
        return found


def _date(time: float) -> str:
    return datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%d")


def _clock(time: float) -> str:
    return datetime.fromtimestamp(time, UTC).strftime("%H:%M:%S.%f")[:-3]
