"""What the buffer's machines did, for operators: distributions of times and lengths, losses, ended rollouts.

It watches: events and the instructions that they led to go in, nothing comes out that a decision depends on.
So it is no part of the machines' state or of their snapshots, and starts anew with each incarnation of the
buffer, as counters of processes do.

Invariants (tests/property/test_buffer_machine.py asserts them, by tests/invariants.py):
- it is a function of the events, their times, and the machines' instructions and state;
- every response that began is counted once in `finished`: stop, length, failed or cancelled;
- every chunk that was dispatched ends once: in the histogram of chunks, as lost, or dropped;
- it remembers no group, chunk or rollout that the machines have forgotten, and at most `MAX_ENGINES` names;
- an engine counts for the part of a rollout's time in which it was there, also if it is gone
  (tests/cluster/test_observer.py).
"""

from __future__ import annotations

import math
from array import array
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from seer.common import ids
from seer.common.policy.eta import Pace
from seer.common.policy.remaining_tokens import EndRates
from seer.common.policy.tail import before_tail, tail_seconds
from seer.common.wire import (
    ChunkFailed,
    ChunkResult,
    DropChunk,
    GroupOpened,
    Histogram,
    LoadWeights,
    PrepareWeights,
    Refused,
    WeightsPrepared,
)
from seer.services.buffer.buffer_machine import BufferMachine, Event, Instruction
from seer.services.buffer.events import FromEngine, Joined, Left, ToEngine, ToIncarnation
from seer.services.buffer.requests import events, instructions
from seer.services.buffer.requests.state import RequestState
from seer.services.buffer.running_chunks import InFlight, RunningChunk, RunningChunks, Stretch

MAX_ENGINES = 10_000
"""Most names of engines whose lost chunks are counted, as many as the sockets know peers."""

REASONS = ("stop", "length", "failed", "cancelled")
PHASES = ("check", "drain", "load")

TOKENS = [float(2**power) for power in range(6, 18)]
SECONDS = [0.01, 0.05, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0]
"""Twelve bounds each: 64 to 131,072 tokens, and from a chunk of a tiny model to a load of the largest."""

_CHANGES_NO_ENGINE = (events.ChunkEnded, events.TokensArrived, events.EngineReported, events.EstimatesChanged)

_OVER = -1.0
"""Stands for the time since which a request waits, once it has ended."""


@dataclass(slots=True)
class _Group:
    """A group: since when each request waits or runs, its chunks, and how many requests have not ended.

    `since` is empty until the group is opened. `had`: tokens that an earlier incarnation had kept.
    """

    rollout: _Rollout
    left: int
    since: array[float] = field(default_factory=lambda: array("d"))
    chunks: array[int] = field(default_factory=lambda: array("l"))
    had: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Rollout:
    """A rollout. `times`: when responses finished, unless it is open; `groups`: those that have not ended.

    `made` and `longest_made`: as `tokens` and `longest`, without what an earlier incarnation had kept.
    """

    rollout_id: str
    submitted: float
    open: bool
    times: array[float] = field(default_factory=lambda: array("d"))
    tokens: int = 0
    longest: int = 0
    made: int = 0
    longest_made: int = 0
    groups: int = 0


@dataclass(frozen=True, slots=True)
class Ended:
    """A rollout whose groups have all ended; see `wire.RolloutEnd` and `_Rollout`.

    `there`: by engine, the share of `seconds` in which it was there.
    """

    rollout_id: str
    seconds: float
    tail_seconds: float
    requests: int
    tokens: int
    longest: int
    made: int
    longest_made: int
    there: dict[str, float]


class Statistics:
    """See the module's docstring. `lost` counts chunks by engine, `finished` requests by reason.

    `pace` is how fast engines are, `ends` how often responses ended; `running` are the chunks that run,
    `ended` is the rollout that ended last.
    """

    def __init__(self, machine: BufferMachine) -> None:
        self._machine = machine
        self.response_tokens = Histogram(TOKENS)
        self.chunk_seconds = Histogram(SECONDS)
        self.chunk_wait_seconds = Histogram(SECONDS)
        self.weight_update_seconds = {phase: Histogram(SECONDS) for phase in PHASES}
        self.lost: Counter[str] = Counter()
        self.finished: Counter[str] = Counter(dict.fromkeys(REASONS, 0))
        self.pace = Pace()
        self.ends = EndRates()
        self.running = RunningChunks()
        self.ended: Ended | None = None
        self._groups: dict[str, _Group] = {}
        self._rollouts: dict[str, _Rollout] = {}
        self._phase, self._phase_since = "", 0.0
        self._here: dict[str, float] = {}  # by engine: since when it is there
        self._gone: deque[tuple[str, float, float]] = deque(maxlen=MAX_ENGINES)  # name, joined, left
        self._unchecked: set[str] = set()  # engines that have not answered a `PrepareWeights`

    def chunks(self, request: RequestState) -> int:
        """Return how many chunks of an open request were dispatched."""
        _, chunks, index = self._find(request.view.request_id)
        return chunks[index] if index < len(chunks) else 0

    def tail(self, rollout_id: str, requests: int, now: float) -> float | None:
        """Return for how long nine tenths of a rollout's requests have finished; None: they have not."""
        rollout = self._rollouts.get(rollout_id)
        before = before_tail(requests)
        if rollout is None or not before or len(rollout.times) < before:
            return None
        return now - rollout.times[before - 1]

    def record(self, now: float, event: Event, out: Sequence[Instruction]) -> None:
        """Note an event that the machines applied at `now`, and what they answered."""
        if not isinstance(event, _CHANGES_NO_ENGINE):
            self._lose_engines(event, now)
            self._note_stays(now)
        self._end_chunk(event, out, now)
        refused: dict[str, str] = {}
        seen = InFlight(self.running, now)
        for item in out:
            match item:
                case instructions.Dispatch():
                    self._dispatch(item, now)
                case ToEngine(instance, DropChunk(request_id=request_id)):
                    self.running.dropped(instance, request_id, seen)
                case instructions.Take():
                    self._take(item.group_id)
                case GroupOpened():
                    self._open(item, now)
                case instructions.Restore():
                    self._restore(item.group_id, now)
                case ToIncarnation(message=Refused() as answer):
                    names = [ids.group_id(answer.rollout_id, each) for each in answer.prompt_ids]
                    refused |= dict.fromkeys(names, answer.code)
                case instructions.Forget():
                    failed = refused.get(item.group_id) == "failed"
                    self._forget(item.group_id, now, "failed" if failed else "cancelled")
        self._follow_update(event, out, now)

    # --- groups and rollouts -------------------------------------------------------------

    def _take(self, group_id: str) -> None:
        group = self._machine.requests.groups.get(group_id)
        if group is None:  # refused at once
            return
        of = group.rollout
        rollout = self._rollouts.get(of.rollout_id)
        if rollout is None or rollout.submitted != of.submitted:
            rollout = self._rollouts[of.rollout_id] = _Rollout(of.rollout_id, of.submitted, of.open)
        rollout.groups += 1
        self._groups[group_id] = _Group(rollout, group.size)

    def _open(self, item: GroupOpened, now: float) -> None:
        if (group := self._groups.get(item.group_id)) and not group.since:
            group.since = array("d", [now]) * item.size
            group.chunks = array("l", [0]) * item.size

    def _restore(self, group_id: str, now: float) -> None:
        """Leave out what had finished in an earlier incarnation of the buffer, which counted it."""
        for index in range(len(self._groups[group_id].since) if group_id in self._groups else 0):
            request = self._request(group_id, index)
            if request is None:
                continue
            self._groups[group_id].had[index] = request.view.generated
            if request.finish:
                self._ended(self._groups[group_id], index, now)

    def _forget(self, group_id: str, now: float, reason: str) -> None:
        group = self._groups.pop(group_id, None)
        if group is None:
            return
        for index, since in enumerate(group.since):
            if since != _OVER:
                self.finished[reason] += 1
                self._ended(group, index, now)
        if not group.since:  # it was held to its end
            self._group_ended(group.rollout, now)
        if group.rollout.rollout_id not in self._machine.requests.rollouts:
            self._rollouts.pop(group.rollout.rollout_id, None)
            self._forget_stays()

    def _ended(self, group: _Group, index: int, now: float) -> None:
        group.since[index] = _OVER
        group.left -= 1
        if not group.left:
            self._group_ended(group.rollout, now)

    def _group_ended(self, rollout: _Rollout, now: float) -> None:
        rollout.groups -= 1
        if not rollout.groups and rollout.times:
            seconds, tail = now - rollout.submitted, tail_seconds(rollout.times)
            self.ended = Ended(
                rollout.rollout_id, seconds, tail, len(rollout.times), rollout.tokens, rollout.longest,
                rollout.made, rollout.longest_made, self._there(rollout.submitted, now),
            )  # fmt: skip

    def _request(self, group_id: str, index: int) -> RequestState | None:
        requests = self._machine.requests
        if found := requests.requests.get(ids.request_id(group_id, index)):
            return found
        group = requests.groups.get(group_id)
        return group.results[index] if group is not None and group.results else None

    # --- chunks --------------------------------------------------------------------------

    def _find(self, request_id: str) -> tuple[array[float], array[int], int]:
        """Return a request's place in its group's arrays; these are empty if it is not known."""
        group_id, _, index = request_id.rpartition("#")
        group = self._groups.get(group_id)
        return (group.since, group.chunks, int(index)) if group else (array("d"), array("l"), 0)

    def _dispatch(self, item: instructions.Dispatch, now: float) -> None:
        estimate = self._machine.requests.estimates.get(item.request_id.rpartition("#")[0])
        request = self._machine.requests.requests.get(item.request_id)
        context = request.view.context if request is not None else 0
        chunk = RunningChunk(item.attempt, now, now, item.max_new_tokens, estimate, context)
        self.running.began(item.instance, item.request_id, chunk)
        since, chunks, index = self._find(item.request_id)
        if since:
            self.chunk_wait_seconds.add(now - since[index])
            chunks[index] += 1

    def _end_chunk(self, event: Event, out: Sequence[Instruction], now: float) -> None:
        match event:
            case events.EngineReported(instance) if instance in self._machine.requests.instances:
                if did := self.running.reported(instance, event.generated_tokens, now):
                    self._learn_pace(instance, did, now)
            case events.TokensArrived(instance, tokens):
                self.running.returned(instance, tokens.request_id, tokens.attempt, tokens.count, now)
            case events.ChunkEnded(instance, result):
                self.running.returned(instance, result.request_id, result.attempt, result.count, now)
                kept = [item for item in out if isinstance(item, instructions.Keep)]
                for item in kept:
                    self._keep(item, instance, result.start + result.count, now)
                if not kept:
                    self._lose_unkept(instance, result, now)
            case FromEngine(instance, ChunkFailed() as failed):
                self._lose_unkept(instance, failed, now)

    def _keep(self, item: instructions.Keep, instance: str, count: int, now: float) -> None:
        chunk = self.running.ended(instance, item.request_id)
        started = chunk.started if chunk else now
        self.chunk_seconds.add(now - started)
        since, _, index = self._find(item.request_id)
        if since:
            since[index] = now
        group_id = item.request_id.rpartition("#")[0]
        request, group = self._request(group_id, index), self._groups.get(group_id)
        if chunk:
            self._learn(item, chunk, request, count)
        if not item.finish:
            return
        self.finished[item.finish] += 1
        if request is not None and group is not None:
            tokens, rollout = request.view.generated, group.rollout
            self.response_tokens.add(tokens)
            if not rollout.open:  # which may go on for weeks
                rollout.times.append(now)
            rollout.tokens += tokens
            rollout.longest = max(rollout.longest, tokens)
            made = tokens - group.had.get(index, 0)
            rollout.made += made
            rollout.longest_made = max(rollout.longest_made, made)
            self._ended(group, index, now)

    def _learn_pace(self, instance: str, did: Stretch, now: float) -> None:
        """Learn how fast tokens come. Without admission some of an engine's requests wait there, by turns."""
        of = self._machine.requests.instances[instance].capacity
        fit = min(1.0, of.kv_blocks * of.block_size / max(did.kv_tokens, 1))
        ran = min(did.requests * fit, of.max_num_seqs)
        self.pace.add(now, did.seconds, did.tokens, ran, did.kv_tokens * fit)

    def _learn(
        self, item: instructions.Keep, chunk: RunningChunk, request: RequestState | None, count: int
    ) -> None:
        """Learn from a chunk that ended how often responses end."""
        estimate = self._machine.requests.estimates.get(item.request_id.rpartition("#")[0], chunk.estimate)
        if request is not None and estimate is not None:
            has = request.view.produced
            self.ends.lived(estimate, has - count, has, item.finish == "stop")

    def _lose(self, instance: str, request_id: str, now: float) -> None:
        self.lost[instance] += 1
        since, _, index = self._find(request_id)
        if since and since[index] != _OVER:
            since[index] = now
        if len(self.lost) > MAX_ENGINES:
            self.lost.pop(next(each for each in self.lost if each not in self._machine.engines))

    def _lose_unkept(self, instance: str, chunk: ChunkResult | ChunkFailed, now: float) -> None:
        """Count a chunk that ended and was not kept; late answers to earlier attempts are about none."""
        running = self.running.of(instance, chunk.request_id)
        if running is not None and running.attempt == chunk.attempt:
            self.running.dropped(instance, chunk.request_id, InFlight(self.running, now))
            self._lose(instance, chunk.request_id, now)

    def _lose_engines(self, event: Event, now: float) -> None:
        """Count what ran on engines that are gone, or have registered again."""
        again = {event.instance} if isinstance(event, Joined) else set()
        gone = {each for each in self.running.engines if each not in self._machine.requests.instances}
        for name in sorted(again | gone):
            for request_id in self.running.gone(name):
                self._lose(name, request_id, now)

    # --- how long engines were there ---------------------------------------------------------

    def _note_stays(self, now: float) -> None:
        engines = self._machine.engines.keys()
        if self._here.keys() == engines:
            return
        self._gone.extend((name, self._here.pop(name), now) for name in sorted(self._here.keys() - engines))
        self._here |= dict.fromkeys(sorted(engines - self._here.keys()), now)
        self._forget_stays()

    def _forget_stays(self) -> None:
        """Forget engines that had left before any rollout began that is still there."""
        if self._gone:
            begun = [each.submitted for each in self._rollouts.values() if not each.open]
            oldest = min(begun, default=math.inf)
            while self._gone and self._gone[0][2] <= oldest:
                self._gone.popleft()

    def _there(self, since: float, now: float) -> dict[str, float]:
        """Return the share of a time in which each engine was there, if it was."""
        shares: dict[str, float] = {}
        for name, joined, left in (*self._gone, *((name, each, now) for name, each in self._here.items())):
            if left > since < now:
                shares[name] = shares.get(name, 0.0) + (left - max(joined, since)) / (now - since)
        return shares

    # --- weight updates --------------------------------------------------------------------

    def _follow_update(self, event: Event, out: Sequence[Instruction], now: float) -> None:
        """Note how long each phase of an update takes: checks, the end of open work, loads."""
        if not self._phase and not self._machine.weights.updating:
            return
        orders = [item for item in out if isinstance(item, ToEngine)]
        prepared = [item.instance for item in orders if isinstance(item.message, PrepareWeights)]
        loads = any(isinstance(item.message, LoadWeights) for item in orders)
        if not self._phase:
            self._phase, self._phase_since = "check" if prepared else "load", now
        self._unchecked.update(prepared)
        match event:
            case FromEngine(instance, WeightsPrepared()):
                self._unchecked.discard(instance)
            case Left(instances):
                self._unchecked.difference_update(instances)
        if self._phase == "check" and not self._unchecked:
            self._enter("drain", now)
        if self._phase == "drain" and loads:
            self._enter("load", now)
        if not self._machine.weights.updating:
            self._enter("", now)
            self._unchecked.clear()

    def _enter(self, phase: str, now: float) -> None:
        self.weight_update_seconds[self._phase].add(now - self._phase_since)
        self._phase, self._phase_since = phase, now
