"""From a log's rows to a timeline.

Invariants (tests/unit/test_report_timeline.py, tests/cluster/test_report.py):
- every chunk that was dispatched is there once, and has one end;
- a chunk's tokens count exactly if the buffer kept them;
- rows of a kind that is not known here change nothing; a log that begins in the middle of an incarnation is
  read from there on: chunks that ran then begin with it.
"""

from __future__ import annotations

import contextlib
import heapq
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from seer.common import ids, wire
from seer.common.errors import InvalidField
from seer.common.types import TurnSpec
from seer.report.records import Chunk, End, EngineIncarnation, Response, Rollout, Span, Speed, Timeline
from seer.report.trajectories import join_turns
from seer.services.buffer import sleep_machine
from seer.services.buffer.buffer_machine import BufferMachine, Event, Instruction
from seer.services.buffer.events import (
    FromEngine,
    FromTrainer,
    Joined,
    Left,
    ToEngine,
    ToIncarnation,
    ToTrainer,
)
from seer.services.buffer.log import rows
from seer.services.buffer.log.log_folder import begun
from seer.services.buffer.requests import events, instructions
from seer.services.buffer.requests.state import GroupState


def read_timeline(log: Path, named: str = "LOG") -> Timeline:
    """Read a file, or all files `*.jsonl` of a folder: every incarnation of a buffer.

    Raises `InvalidField`, whose field is `named`, for what is no log.
    """
    reader = LogReader()
    with log_files(log, named) as files:
        for path in files:
            header, lines = rows.read(path)
            reader.begin(header)
            for line in lines:
                reader.add(line)
    reader.finish()
    return reader.timeline


@contextlib.contextmanager
def log_files(log: Path, named: str = "LOG") -> Iterator[list[Path]]:
    """Give the files of a log, or of its folder, that have a whole header.

    Raises `InvalidField`, whose field is `named`, for what is no log, also if that is found in the context.
    """
    fix = "give a folder or file that buffer.log wrote"
    try:
        files = sorted(log.glob("*.jsonl")) if log.is_dir() else [log]
        files = [path for path in files if begun(path)]
        if not files:
            raise InvalidField(named, str(log), f"holds no log: {fix}")
        yield files
    except OSError as error:
        raise InvalidField(named, str(log), f"{error.strerror}; {fix}") from error
    except rows.LogError as error:
        raise InvalidField(named, str(log), str(error)) from error


class _Engine:
    """What the chunks of one engine's name are: which run, and which slots are free."""

    def __init__(self) -> None:
        self.incarnation: EngineIncarnation | None = None
        self.running: dict[str, Chunk] = {}
        self._free: list[int] = []
        self._slots = 0

    def take_slot(self) -> int:
        if self._free:
            return heapq.heappop(self._free)
        self._slots += 1
        return self._slots - 1

    def free_slot(self, slot: int) -> None:
        heapq.heappush(self._free, slot)


class LogReader:
    """Call `begin` with every file's header, `add` with its lines, then `finish`; `timeline` has it all."""

    def __init__(self) -> None:
        self.timeline = Timeline()
        self._incarnation: int | None = None
        self._number = 0  # of the segment
        self._offset = 0.0
        self._engines: dict[str, _Engine] = defaultdict(_Engine)
        self._running: dict[str, Chunk] = {}  # by request id
        self._responses: dict[str, Response] = {}  # by request id, of the latest submission
        self._rollouts: dict[tuple[str, str, int], Rollout] = {}
        self._kept: dict[str, events.Kept] = {}  # by group id: what an earlier incarnation of the buffer kept
        self._updates: dict[tuple[str, int], Span] = {}
        self._asleep: Span | None = None

    def begin(self, header: rows.Header) -> None:
        """Go on with another file: a segment of the same incarnation of the buffer, or of its next one."""
        timeline = self.timeline
        self._offset = header.started - header.clock
        if self._incarnation is None:
            timeline.end = header.started
        elif header.incarnation != self._incarnation:
            back = max(header.started, timeline.end)
            lost = len(self._running)
            text = f"buffer lost; chunks lost: {lost}" if lost else "buffer began anew"
            timeline.spans.append(Span(timeline.end, back, text, failed=True))
            for request_id in list(self._running):
                self._close(request_id, End.BUFFER_LOST)
            for response in self._responses.values():
                response.generated = 0 if response.finished is None else response.generated
            self._asleep = None
            self._updates.clear()
            timeline.end = back
        missing = header.incarnation == self._incarnation and header.number > self._number + 1
        if missing:
            self._miss(header.started)
        if missing or header.incarnation != self._incarnation:
            with contextlib.suppress(rows.LogError):  # a state of another version: rows tell enough
                self._take_over(header.machine())
        self._incarnation, self._number = header.incarnation, header.number
        timeline.version, timeline.policy = header.version, header.policy
        timeline.chunk_size = header.limits.chunk_size

    def add(self, line: rows.Line) -> None:
        """Take a row: what happened, then what the buffer answered."""
        timeline = self.timeline
        timeline.end = max(timeline.end, self._offset + line.time)
        self._happened(line.event)
        for item in line.out:
            self._answered(item)

    def finish(self) -> None:
        """Have what still runs end with the log."""
        self._stop()
        for rollout in self.timeline.rollouts:
            join_turns(rollout)

    def _stop(self) -> None:
        for chunk in self._running.values():
            chunk.end = self.timeline.end
        for span in (*self._updates.values(), self._asleep):
            if span is not None:
                span.end = self.timeline.end

    # --- rows ------------------------------------------------------------------------------

    def _happened(self, event: Event) -> None:
        match event:
            case events.ChunkEnded():
                self._chunk_ended(event)
            case events.TokensArrived():
                self._tokens_arrived(event)
            case FromEngine(instance, wire.ChunkFailed(request_id=request_id, attempt=attempt)):
                if self._current(instance, request_id, attempt) is not None:
                    self._close(request_id, End.FAILED)
            case events.GroupsSubmitted():
                self._submitted(event)
            case events.EngineReported():
                self._reported(event)
            case Joined():
                self._joined(event)
            case Left(instances, died):
                for name in instances:
                    self._left(name, died=died)
            case FromTrainer(trainer, wire.UpdateWeights(version=version, call_id=ask)):
                now = self.timeline.end
                span = Span(now, now, f"weights {version}", version=version)
                self._updates[trainer, ask] = span
                self.timeline.spans.append(span)

    def _answered(self, item: Instruction) -> None:
        match item:
            case instructions.Dispatch():
                self._dispatched(item)
            case ToEngine(instance, wire.DropChunk(request_id=request_id, attempt=attempt)):
                if self._current(instance, request_id, attempt) is not None:
                    self._close(request_id, End.DROPPED)
            case instructions.Restore(group_id):
                self._restored(group_id)
            case ToIncarnation(message=wire.Refused() as refused):
                self._refused(refused)
            case sleep_machine.GiveUp(instance):
                self._left(instance, died=True)
            case ToTrainer(trainer, wire.WeightsLive(call_id=ask)):
                self._updated(trainer, ask, "")
            case ToTrainer(trainer, wire.WeightsFailed(call_id=ask, reasons=reasons)):
                self._updated(trainer, ask, "; ".join(filter(None, reasons.values())) or "failed")
            case ToTrainer(message=wire.Slept(problem="", tags=tags)):
                self._slept(bool(tags))

    # --- what was before the first row -----------------------------------------------------

    def _miss(self, until: float) -> None:
        """Skip a time of which there are no rows, as the log could not be written."""
        timeline = self.timeline
        until = max(until, timeline.end)
        self._stop()  # chunks that ran: what became of them is not known
        timeline.spans.append(Span(timeline.end, until, "no log: it could not be written", failed=True))
        for name, engine in self._engines.items():
            engine.running.clear()
            self._left(name, died=False)
        self._engines.clear()
        self._running.clear()
        self._updates.clear()
        self._asleep = None
        timeline.end = until

    def _take_over(self, machine: BufferMachine) -> None:
        """Begin with engines and groups that were there before the log; an incarnation begins with none."""
        for joined in machine.engines.values():
            self._joined(joined)
        for group in machine.requests.groups.values():
            self._take_over_group(machine, group)

    def _take_over_group(self, machine: BufferMachine, group: GroupState) -> None:
        owner = group.rollout
        number = 0 if owner.open else owner.submission
        rollout = self._rollout(owner.trainer, owner.rollout_id, number, self._offset + owner.submitted)
        rollout.open = owner.open
        if group.earlier is not None:
            self._kept[group.group_id] = group.earlier
        for index in range(group.size):
            request_id = ids.request_id(group.group_id, index)
            response = self._response(rollout, group.prompt_id, index, request_id)
            response.prompt_len, response.max_tokens = group.prompt_len, group.max_tokens
            self._place(response, group.shared_id, group.first_index, group.turn)
            request = group.results[index] if group.done else machine.requests.requests.get(request_id)
            if request is None:
                continue  # its group is held
            response.generated, response.finish = request.view.generated, request.finish
            response.finished = self.timeline.end if request.finish else None
            if request.instance:
                self._began(response, request_id, request.instance, request.attempt, request.blocks)
                self._running[request_id].tokens = request.streamed

    # --- requests --------------------------------------------------------------------------

    def _submitted(self, event: events.GroupsSubmitted) -> None:
        number = 0 if event.open else event.submission
        rollout = self._rollout(event.trainer, event.rollout_id, number, self.timeline.end)
        rollout.open = event.open
        for spec in event.groups:
            group_id = ids.group_id(event.rollout_id, spec.prompt_id)
            if spec.kept is not None:
                self._kept[group_id] = spec.kept
            for index in range(event.n):
                response = self._response(rollout, spec.prompt_id, index, ids.request_id(group_id, index))
                response.prompt_len, response.max_tokens = spec.prompt_len, event.max_tokens
                self._place(response, spec.shared_id, spec.first_index, spec.turn)
                if response.finished is None:
                    response.finish = ""

    def _place(self, response: Response, shared_id: str, index: int, turn: TurnSpec | None) -> None:
        """Note which trajectory a response is a turn of, if it is one."""
        if turn is not None:
            response.trajectory = shared_id.removeprefix(ids.group_id(response.rollout.rollout_id, ""))
            response.index = index

    def _rollout(self, trainer: str, rollout_id: str, submission: int, submitted: float) -> Rollout:
        known = self._rollouts.get((trainer, rollout_id, submission))
        if known is None:
            known = Rollout(rollout_id, trainer, submission, submitted)
            self._rollouts[trainer, rollout_id, submission] = known
            self.timeline.rollouts.append(known)
        return known

    def _response(self, rollout: Rollout, prompt_id: str, index: int, request_id: str) -> Response:
        known = self._responses.get(request_id)
        if known is None or known.rollout is not rollout:
            number = rollout.prompts.setdefault(prompt_id, len(rollout.prompts))
            now = self.timeline.end
            known = self._responses[request_id] = Response(rollout, prompt_id, number, index, submitted=now)
            rollout.responses.append(known)
        return known

    def _refused(self, item: wire.Refused) -> None:
        for prompt_id in item.prompt_ids:
            group_id = ids.group_id(item.rollout_id, prompt_id)
            index = 0
            while (response := self._responses.get(ids.request_id(group_id, index))) is not None:
                meant = response.rollout.open or response.rollout.submission == item.submission
                if response.finished is None and meant:
                    response.finish = item.code
                index += 1

    def _restored(self, group_id: str) -> None:
        """Have responses go on where an earlier incarnation of the buffer had them."""
        kept = self._kept.pop(group_id, None)
        for each in kept.responses if kept else ():
            response = self._responses[ids.request_id(group_id, each.index)]
            response.generated = each.count
            if each.finish and response.finished is None:
                response.finish, response.finished = each.finish, self.timeline.end

    def _dispatched(self, item: instructions.Dispatch) -> None:
        if item.request_id in self._running:  # its engine lost it by a way that no row names
            self._close(item.request_id, End.ENGINE_LOST)
        response = self._responses.get(item.request_id) or self._unknown(item.request_id)
        if response.finish:  # it is generated again: its group was forgotten
            response.generated, response.finish, response.finished = 0, "", None
        incarnation = self._engines[item.instance].incarnation
        context = response.prompt_len + response.generated
        blocks = incarnation.capacity.blocks_for(context, item.max_new_tokens) if incarnation else 0
        self._began(response, item.request_id, item.instance, item.attempt, blocks)

    def _began(self, response: Response, request_id: str, name: str, attempt: int, blocks: int) -> None:
        engine, now = self._engines[name], self.timeline.end
        context = response.prompt_len + response.generated
        moved = bool(response.chunks) and response.chunks[-1].engine != name
        chunk = Chunk(response, name, attempt, engine.take_slot(), now, now, context, blocks, moved)
        for chunks in (response.chunks, response.rollout.chunks, self.timeline.chunks):
            chunks.append(chunk)
        engine.running[request_id] = self._running[request_id] = chunk

    def _unknown(self, request_id: str) -> Response:
        """Return a response that was submitted before the log begins."""
        group_id, _, index = request_id.rpartition("#")
        rollout_id, _, prompt_id = group_id.partition("/")
        return self._response(
            self._rollout("", rollout_id, -1, self.timeline.end), prompt_id, int(index), request_id
        )

    def _current(self, instance: str, request_id: str, attempt: int) -> Chunk | None:
        chunk = self._running.get(request_id)
        if chunk is None or (chunk.engine, chunk.attempt) != (instance, attempt):
            return None
        return chunk

    def _chunk_ended(self, event: events.ChunkEnded) -> None:
        result = event.result
        chunk = self._current(event.instance, result.request_id, result.attempt)
        if chunk is None:
            return
        if not self._keeps(chunk, result):
            self._close(result.request_id, End.FAILED)
            return
        chunk.preemptions = result.preemptions
        if len(result.verified) == 2:
            chunk.drafted, chunk.accepted = result.verified
        self._close(result.request_id, End.KEPT)
        response, most = chunk.response, chunk.response.max_tokens
        response.finish = result.finish or ("length" if most and response.generated == most else "")
        if response.finish:
            response.finished = self.timeline.end

    def _tokens_arrived(self, event: events.TokensArrived) -> None:
        part = event.tokens
        chunk = self._current(event.instance, part.request_id, part.attempt)
        if chunk is None:
            return
        if not self._keeps(chunk, part, rest=1):
            self._close(part.request_id, End.FAILED)

    def _keeps(self, chunk: Chunk, part: wire.ChunkResult | wire.ChunkTokens, rest: int = 0) -> bool:
        """Count tokens of a chunk if the machine keeps them; so many more must be left to generate."""
        response = chunk.response
        most, made = response.max_tokens, response.generated + part.count
        if part.start != chunk.tokens or part.count <= 0 or (most and made + rest > most):
            return False
        chunk.tokens += part.count
        response.generated = made
        return True

    def _close(self, request_id: str, how: End) -> None:
        chunk = self._running.pop(request_id)
        chunk.end, chunk.how = self.timeline.end, how
        engine = self._engines[chunk.engine]
        del engine.running[request_id]
        engine.free_slot(chunk.slot)

    # --- engines ---------------------------------------------------------------------------

    def _joined(self, event: Joined) -> None:
        engine = self._engines[event.instance]
        known = engine.incarnation
        if known is not None and known.number == event.incarnation:
            for request_id in list(engine.running):  # the engine lost its chunks, and lives
                self._close(request_id, End.ENGINE_LOST)
            return
        self._left(event.instance, died=True)
        engine.incarnation = EngineIncarnation(
            event.instance, event.incarnation, event.register.capacity, self.timeline.end
        )
        self.timeline.incarnations.append(engine.incarnation)

    def _left(self, name: str, *, died: bool) -> None:
        engine = self._engines[name]
        incarnation, lost = engine.incarnation, list(engine.running)
        for request_id in lost:
            self._close(request_id, End.ENGINE_LOST)
        if incarnation is not None:
            incarnation.left, incarnation.died, incarnation.chunks_lost = self.timeline.end, died, len(lost)
            engine.incarnation = None

    def _reported(self, event: events.EngineReported) -> None:
        self.timeline.reports.setdefault(event.instance, []).append((self.timeline.end, event))
        speed = self.timeline.speeds.setdefault(event.instance, Speed())
        speed.best_rate = max(speed.best_rate, event.best_rate)
        alone = [each for each in (speed.seconds_alone, event.token_seconds_alone) if each]
        speed.seconds_alone = min(alone, default=0.0)

    def _updated(self, trainer: str, ask: int, problem: str) -> None:
        span = self._updates.pop((trainer, ask), None)
        if span is not None:
            span.end, span.failed = self.timeline.end, bool(problem)
            span.text += f" failed: {problem}" if problem else ""

    def _slept(self, asleep: bool) -> None:
        now = self.timeline.end
        if asleep and self._asleep is None:
            self._asleep = Span(now, now, "engines asleep")
            self.timeline.spans.append(self._asleep)
        elif not asleep and self._asleep is not None:
            self._asleep.end, self._asleep = now, None
