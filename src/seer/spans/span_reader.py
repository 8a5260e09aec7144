"""From a log's rows to the spans that ended by them: rollouts, groups, requests, chunks and updates. Pure.

A prompt's group is a trace of its own, with a link to its rollout's: tools bound the size of one trace, and a
rollout may have a million chunks. A span is known once it has ended.

Invariants (tests/unit/test_spans.py, tests/cluster/test_spans.py):
- every chunk, request and group of the log's report has one span, with the report's times and the log's ids;
- a chunk lies in its request, that in its group; ids are functions of the log, whoever reads it;
- what has ended is forgotten: memory is bounded by what is open in the buffer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import NamedTuple

from seer.common import ids, wire
from seer.common.errors import NOT_DECODED
from seer.report.log_reader import LogReader
from seer.report.records import Chunk, End, Response, Rollout, Span
from seer.services.buffer.buffer_machine import BufferMachine, Instruction
from seer.services.buffer.events import Joined, ToIncarnation
from seer.services.buffer.log import rows
from seer.services.buffer.log.snapshot import parse
from seer.services.buffer.requests import events, instructions
from seer.services.buffer.requests.state import GroupState
from seer.spans.span_ids import group_trace, rollout_trace, span_id, update_trace

QUIET_SECONDS = 10.0
"""A rollout without an open group ends when nothing has been submitted to it for so long."""

_GOOD = frozenset({"", "stop", "length", "cancelled"})

Value = str | int | bool | list[str]


class Place(NamedTuple):
    """Where a span is: its trace, and its own id."""

    trace: int
    span: int


class Ended(NamedTuple):
    """A span. Times are seconds since 1970. `error`: why the span is an error; None: it is none.

    `instance`: the incarnation of the buffer that told its end.
    """

    name: str
    place: Place
    parent: Place | None
    start: float
    end: float
    attributes: dict[str, Value]
    error: str | None = None
    link: Place | None = None
    instance: int = 0


@dataclass(slots=True, eq=False)
class _Rollout:
    """A rollout, or what came of an open one between two pauses. `left`: open groups, `end`: of the last.

    `incarnation`: the buffer's, when the rollout began.
    """

    of: Rollout
    submission: int
    incarnation: int
    groups: int = 0
    left: int = 0
    requests: int = 0
    tokens: int = 0
    failed: int = 0
    end: float = 0.0

    @property
    def place(self) -> Place:
        trace = rollout_trace(self.of.trainer, self.of.rollout_id, self.submission)
        return Place(trace, span_id(trace, self.incarnation))

    @property
    def key(self) -> tuple[str, str, int]:
        return self.of.trainer, self.of.rollout_id, 0 if self.of.open else self.of.submission


@dataclass(slots=True, eq=False)
class _Group:
    """An open group. `told`: requests whose span has ended. `version`: of the weights; -1: not known yet."""

    group_id: str
    prompt_id: str
    rollout: _Rollout
    place: Place
    start: float
    responses: list[Response]
    told: set[int] = field(default_factory=set)
    chunks: list[int] = field(default_factory=list)
    drafts: list[list[int]] = field(default_factory=list)
    version: int = -1
    error: str | None = None
    params_digest: int = 0


class SpanReader(LogReader):
    """Call `begin` and `add` as of a `LogReader`, and take spans by `take`."""

    def __init__(self) -> None:
        super().__init__()
        self._ended: list[Ended] = []
        self._groups: dict[str, _Group] = {}
        self._going: dict[tuple[str, str, int], _Rollout] = {}
        self._quiet: dict[tuple[str, str, int], _Rollout] = {}  # without open groups
        self._instance = 0  # incarnation of the buffer
        self._live = -1
        self._submission = self._digest = 0  # of the row that is read
        self._going_on: set[str] = set()  # groups that the row's submission has, as they are

    def take(self, now: float = 0.0) -> list[Ended]:
        """Return the spans that ended since the last call. `now`: the time until which all rows were read."""
        now = max(now, self.timeline.end)
        for key, rollout in list(self._quiet.items()):
            if now > rollout.end + QUIET_SECONDS:
                self._rollout_over(key, rollout)
        ended, self._ended = self._ended, []
        return ended

    def skipped(self) -> None:
        """Rows are missing until the next file."""
        self._number -= 1

    def finish(self) -> None:
        """End what is quiet: no more rows will come. What is open has no span."""
        for key, rollout in list(self._quiet.items()):
            self._rollout_over(key, rollout)

    # --- what the reader is told -----------------------------------------------------------

    def begin(self, header: rows.Header) -> None:
        """Go on with another file."""
        if self._incarnation not in (None, header.incarnation):
            self._buffer_lost()
        self._instance = header.incarnation
        state = None
        with contextlib.suppress(*NOT_DECODED):  # another version's: rows tell enough
            state = None if header.state == rows.NO_STATE else parse(header.state)
        if state is not None and state.weights.live is not None:
            self._live = state.weights.live.version
        super().begin(header)
        if state is not None:  # what the buffer has no longer ended in a way that no row names
            self._give_up(self._groups.keys() - {group.group_id for group in state.groups}, "replaced")

    def add(self, line: rows.Line) -> None:
        """Take a row, and keep no more of it than what is open."""
        super().add(line)
        self.timeline.spans.clear()
        self.timeline.incarnations.clear()

    def _buffer_lost(self) -> None:
        """End all that was open: clients submit what is unfinished to the buffer's successor."""
        for (trainer, ask), span in self._updates.items():
            span.end = self.timeline.end
            self._update_over(trainer, ask, span, End.BUFFER_LOST.value)
        for request_id in list(self._running):
            self._close(request_id, End.BUFFER_LOST)
        self._give_up(set(self._groups), End.BUFFER_LOST.value)
        self._live = -1

    def _answered(self, item: Instruction) -> None:
        super()._answered(item)
        match item:
            case ToIncarnation(message=wire.Accepted() as accepted):
                version = self._live if accepted.weight_version < 0 else accepted.weight_version
                for prompt_id in accepted.prompt_ids:
                    if (group := self._groups.get(ids.group_id(accepted.rollout_id, prompt_id))) is not None:
                        group.version = version
            case instructions.Restore(group_id):
                self._look(group_id)
            case instructions.Deliver(_, group_id) if group_id in self._groups:
                self._over(self._groups[group_id], told=False)  # again: its spans have ended before
            case ToIncarnation(message=wire.Refused() as refused):
                for prompt_id in refused.prompt_ids:
                    group = self._groups.get(ids.group_id(refused.rollout_id, prompt_id))
                    of = group.rollout.of if group else None
                    if group and of and (of.open or of.submission == refused.submission):
                        group.error = f"{refused.code}: {refused.message}"
                        self._look(group.group_id)

    def _joined(self, event: Joined) -> None:
        super()._joined(event)
        self._live = event.weights.version if self._live < 0 else self._live

    def _reported(self, event: events.EngineReported) -> None:
        """Nothing of what engines report is in a span."""

    # --- groups and rollouts ---------------------------------------------------------------

    def _take_over_group(self, machine: BufferMachine, group: GroupState) -> None:
        self._submission = group.rollout.first_submission if group.rollout.open else group.submission
        self._digest, self._going_on = group.rollout.params_digest, set()
        super()._take_over_group(machine, group)
        requests = [ids.request_id(group.group_id, index) for index in range(group.size)]
        if group.done:
            self._look(group.group_id)  # it was open before a time of which there are no rows
            for request_id in requests:
                self._responses.pop(request_id, None)
        else:
            self._open(group.group_id, group.prompt_id, group.submission, requests)
            self._groups[group.group_id].version = max(group.rollout.weight_version, self._live)

    def _submitted(self, event: events.GroupsSubmitted) -> None:
        self._submission, self._digest = event.submission, event.params_digest
        self._going_on = self._kept_on(event)
        super()._submitted(event)
        for spec in event.groups:
            group_id = ids.group_id(event.rollout_id, spec.prompt_id)
            requests = [ids.request_id(group_id, index) for index in range(event.n)]
            self._open(group_id, spec.prompt_id, event.submission, requests)

    def _kept_on(self, event: events.GroupsSubmitted) -> set[str]:
        """Return the open groups that the buffer goes on with, as `GroupRegistry.submitted` does.

        A trainer that began again has submitted them again.
        """
        found = set()
        for spec in event.groups:
            group = self._groups.get(ids.group_id(event.rollout_id, spec.prompt_id))
            if group is None or not spec.same or event.open or group.rollout.of.open:
                continue
            weights = -1 in (event.weight_version, group.version) or event.weight_version == group.version
            of = group.rollout.of
            if weights and (of.trainer, group.params_digest) == (event.trainer, event.params_digest):
                found.add(group.group_id)
        return found

    def _response(self, rollout: Rollout, prompt_id: str, index: int, request_id: str) -> Response:
        if (group := self._groups.get(request_id.rpartition("#")[0])) and group.group_id in self._going_on:
            group.responses[index].rollout = rollout
        return super()._response(rollout, prompt_id, index, request_id)

    def _move(self, group: _Group) -> None:
        """Count an open group for the later submission that has it now, which so began with it."""
        before, size = group.rollout, len(group.responses)
        before.groups, before.left = before.groups - 1, before.left - 1
        before.requests -= size
        before.end = max(before.end, self.timeline.end)
        if not before.left:
            self._quiet[before.key] = before
        group.rollout = self._counted(group.responses)
        of = group.rollout.of
        of.submitted = min(of.submitted, group.start)

    def _counted(self, responses: list[Response]) -> _Rollout:
        rollout = _Rollout(responses[0].rollout, self._submission, self._instance)
        rollout = self._going.setdefault(rollout.key, rollout)
        self._quiet.pop(rollout.key, None)
        rollout.groups, rollout.left = rollout.groups + 1, rollout.left + 1
        rollout.requests += len(responses)
        return rollout

    def _open(self, group_id: str, prompt_id: str, submission: int, requests: list[str]) -> None:
        responses = [self._responses[request_id] for request_id in requests]
        known = self._groups.get(group_id)
        if known is not None and known.responses[0] is responses[0]:
            if known.rollout.of is not responses[0].rollout:
                self._move(known)
            return  # submitted again
        if known is not None:
            self._over(known, error="replaced")
        rollout = self._counted(responses)
        of = rollout.of
        trace = group_trace(of.trainer, of.rollout_id, submission, prompt_id)
        place = Place(trace, span_id(trace, "group", self._instance))
        group = _Group(group_id, prompt_id, rollout, place, min(r.submitted for r in responses), responses)
        group.chunks = [0] * len(responses)
        group.drafts = [[0, 0] for _ in responses]
        group.version, group.params_digest = self._live, self._digest
        self._groups[group_id] = group
        for each in (of.responses, of.prompts):  # nobody asks for them
            each.clear()

    def _rollout(self, trainer: str, rollout_id: str, submission: int, submitted: float) -> Rollout:
        key = trainer, rollout_id, submission
        over = self._quiet.get(key)
        if over is not None and submitted > over.end + QUIET_SECONDS:
            self._rollout_over(key, over)
        known = super()._rollout(trainer, rollout_id, submission, submitted)
        self.timeline.rollouts.clear()
        return known

    def _rollout_over(self, key: tuple[str, str, int], rollout: _Rollout) -> None:
        del self._quiet[key], self._going[key]
        self._rollouts.pop(key, None)
        if not rollout.groups:
            return
        attributes: dict[str, Value] = {
            **_of_rollout(rollout), "seer.groups": rollout.groups, "seer.requests": rollout.requests,
            "seer.groups_failed": rollout.failed, "gen_ai.usage.output_tokens": rollout.tokens,
        }  # fmt: skip
        error = f"{rollout.failed} of {rollout.groups} groups failed" if rollout.failed else None
        self._end("rollout", rollout.place, None, rollout.of.submitted, rollout.end, attributes, error)

    # --- ends ------------------------------------------------------------------------------

    def _look(self, group_id: str) -> None:
        """Tell the requests of a group that have ended, and the group if all have."""
        group = self._groups.get(group_id)
        if group is None:
            return
        for index, response in enumerate(group.responses):
            if response.finish and index not in group.told:
                self._request_over(group, index)
        if len(group.told) == len(group.responses):
            self._over(group)

    def _request_over(self, group: _Group, index: int, error: str | None = None) -> None:
        group.told.add(index)
        response, place = group.responses[index], _request_place(group, index)
        end = self.timeline.end if response.finished is None else response.finished
        drafted, accepted = group.drafts[index]
        attributes: dict[str, Value] = {
            **_of_group(group), "seer.request": ids.request_id(group.group_id, index),
            "seer.weight_version": group.version, "seer.chunks": group.chunks[index],
            "seer.drafts.proposed": drafted, "seer.drafts.accepted": accepted,
            "gen_ai.operation.name": "text_completion", "gen_ai.provider.name": "seer",
            "gen_ai.request.max_tokens": response.max_tokens,
            "gen_ai.usage.input_tokens": response.prompt_len,
            "gen_ai.usage.output_tokens": response.generated,
            "gen_ai.response.finish_reasons": [response.finish] if response.finish else [],
        }  # fmt: skip
        if response.trajectory:
            attributes["gen_ai.conversation.id"] = f"{response.trajectory}#{response.index}"
        if response.finish not in _GOOD:
            error = group.error or response.finish
        self._end("request", place, group.place, response.submitted, end, attributes, error)

    def _over(self, group: _Group, error: str | None = None, *, told: bool = True) -> None:
        """Forget a group, and end its span unless that was `told` before."""
        del self._groups[group.group_id]
        for index, response in enumerate(group.responses):
            request_id = ids.request_id(group.group_id, index)
            if self._responses.get(request_id) is response:
                del self._responses[request_id]
        rollout, now = group.rollout, self.timeline.end
        self._kept.pop(group.group_id, None)
        rollout.left -= 1
        rollout.end = max(rollout.end, now)
        if not rollout.left:
            self._quiet[rollout.key] = rollout
        if not told:
            rollout.groups, rollout.requests = rollout.groups - 1, rollout.requests - len(group.responses)
            return
        for index in range(len(group.responses)):
            if index not in group.told:
                self._request_over(group, index, error)
        error = error or (group.error if not all(r.finish in _GOOD for r in group.responses) else None)
        tokens = sum(response.generated for response in group.responses)
        rollout.tokens += tokens
        rollout.failed += error is not None
        attributes: dict[str, Value] = {
            **_of_group(group), "seer.weight_version": group.version, "seer.requests": len(group.responses),
            "gen_ai.usage.output_tokens": tokens,
        }  # fmt: skip
        self._end("group", group.place, None, group.start, now, attributes, error, rollout.place)

    def _give_up(self, group_ids: AbstractSet[str], error: str) -> None:
        for group in [each for group_id, each in self._groups.items() if group_id in group_ids]:
            self._over(group, error)

    def _chunk_ended(self, event: events.ChunkEnded) -> None:
        super()._chunk_ended(event)
        self._look(event.result.request_id.rpartition("#")[0])

    def _close(self, request_id: str, how: End) -> None:
        chunk = self._running[request_id]
        super()._close(request_id, how)
        chunk.response.rollout.chunks.clear()
        self.timeline.chunks.clear()
        group_id, _, index = request_id.rpartition("#")
        group = self._groups.get(group_id)
        if group is None or group.responses[int(index)] is not chunk.response:
            self._responses.pop(request_id, None)  # submitted before the log begins
            return
        del chunk.response.chunks[:-1]
        group.chunks[int(index)] += 1
        drafts = group.drafts[int(index)]
        drafts[0] += chunk.drafted
        drafts[1] += chunk.accepted
        self._chunk_over(group, int(index), chunk)

    def _chunk_over(self, group: _Group, index: int, chunk: Chunk) -> None:
        parent = _request_place(group, index)
        attributes: dict[str, Value] = {
            **_of_group(group), "seer.request": ids.request_id(group.group_id, index),
            "seer.engine": chunk.engine, "seer.attempt": str(chunk.attempt),
            "seer.weight_version": group.version, "seer.chunk.end": chunk.how.value,
            "seer.chunk.context": chunk.context, "seer.chunk.moved": chunk.moved,
            "seer.chunk.preemptions": chunk.preemptions, "seer.drafts.proposed": chunk.drafted,
            "seer.drafts.accepted": chunk.accepted, "gen_ai.usage.output_tokens": chunk.tokens,
        }  # fmt: skip
        place = Place(parent.trace, span_id(*parent, "chunk", chunk.attempt))
        error = None if chunk.how in (End.KEPT, End.DROPPED) else chunk.how.value
        self._end("chunk", place, parent, chunk.start, chunk.end, attributes, error)

    # --- updates ---------------------------------------------------------------------------

    def _updated(self, trainer: str, ask: int, problem: str) -> None:
        span = self._updates.get((trainer, ask))
        super()._updated(trainer, ask, problem)
        if span is not None:
            self._update_over(trainer, ask, span, problem)
            self._live = self._live if problem else span.version

    def _update_over(self, trainer: str, ask: int, span: Span, problem: str) -> None:
        trace = update_trace(self._instance, trainer, ask)
        attributes: dict[str, Value] = {
            "seer.trainer": trainer, "seer.weight_version": span.version, "seer.update.call": str(ask),
        }  # fmt: skip
        place = Place(trace, span_id(trace))
        self._end("update", place, None, span.start, span.end, attributes, problem or None)

    def _end(
        self,
        name: str,
        place: Place,
        parent: Place | None,
        start: float,
        end: float,
        attributes: dict[str, Value],
        error: str | None,
        link: Place | None = None,
    ) -> None:
        self._ended.append(Ended(name, place, parent, start, end, attributes, error, link, self._instance))


def _request_place(group: _Group, index: int) -> Place:
    return Place(group.place.trace, span_id(*group.place, "request", index))


def _of_rollout(rollout: _Rollout) -> dict[str, Value]:
    of = rollout.of
    return {
        "seer.rollout": of.rollout_id,
        "seer.trainer": of.trainer,
        "seer.submission": str(rollout.submission),
    }


def _of_group(group: _Group) -> dict[str, Value]:
    return {**_of_rollout(group.rollout), "seer.group": group.group_id, "seer.prompt": group.prompt_id}
