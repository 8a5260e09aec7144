"""The life of every request: waiting, running one chunk, waiting again, finished.

`Machine.handle(event, now)` returns instructions; the server performs them in order. The machine
counts tokens and never sees one, so the simulator runs it as it is.

Invariants (tests/invariants.py asserts them after every event):
- a request is waiting, parked, running or finished; each running one has one current attempt;
- an ended chunk counts only if its instance and attempt are the current ones: late answers of
  dropped attempts change nothing, so every output token is kept exactly once;
- an instance's books are the sums over the chunks running there; with an admission policy they
  never pass its capacity;
- a group is opened, run and finished under one weight version; while submissions are held, none is
  opened;
- a group is delivered when all its requests finished, refused with a reason otherwise, and is
  remembered until it is acknowledged, its time to live is over, or finished groups hold more
  tokens than the limit, the oldest first. One that is forgotten and asked for again is made again.
"""

from __future__ import annotations

from dataclasses import replace

from seer.common import ids
from seer.common.policy.drafting import ALL_GROUPS
from seer.common.policy.fleet import Fleet, InstanceView
from seer.common.policy.length import Estimate
from seer.common.policy.request import RequestView
from seer.common.policy.schedule import FAIR_DISPATCHES, Policy
from seer.services.buffer.admission import misfit
from seer.services.buffer.events import (
    Accept,
    ChunkEnded,
    ChunkRejected,
    Deliver,
    Dispatch,
    Drop,
    EngineJoined,
    EngineLeft,
    EngineReported,
    EstimatesChanged,
    Event,
    Forget,
    GroupsAcknowledged,
    GroupSpec,
    GroupsSubmitted,
    GroupState,
    Instruction,
    Keep,
    Limits,
    PublishClosed,
    PublishOpened,
    PublishProgress,
    Refuse,
    RequestState,
    RolloutCancelled,
    RolloutsAborted,
    RolloutState,
    SubmissionsHeld,
    Tick,
    WeightsChanged,
)
from seer.services.buffer.queue import WaitingQueue


class Machine:
    """See the module's docstring. `counters` holds totals since the start.

    Attempts count from `first_attempt`: one that no earlier life of the buffer came near keeps its
    late answers, and its streams in the dgds, from passing for those of this life.
    """

    def __init__(self, policy: Policy, limits: Limits, first_attempt: int = 0) -> None:
        self.policy = policy
        self.limits = limits
        self.first_attempt = first_attempt
        self.requests: dict[str, RequestState] = {}
        self.groups: dict[str, GroupState] = {}
        self.rollouts: dict[str, RolloutState] = {}
        self.instances = Fleet()
        self.estimates: dict[str, Estimate] = {}  # of unfinished groups
        self.acceptance: list[int] = []  # of all groups' drafts, as far as known
        self.counters: dict[str, int] = dict.fromkeys(
            ("chunks", "migrations", "preemptions", "lost", "late", "refused", "expired", "tokens"), 0
        )
        self._last_seen: dict[str, float] = {}
        self.queue = WaitingQueue()
        self.parked: set[str] = set()
        self._finished: dict[str, GroupState] = {}  # in the order in which they finished
        self._finished_tokens = 0
        self.weight_version = 0
        self._held = False
        self._unchecked: list[tuple[float, GroupsSubmitted]] = []
        self._no_engine_since: float | None = 0.0
        self._queued = 0
        self._group_number = 0

    @property
    def waiting(self) -> int:
        """Requests that wait for a placement."""
        return len(self.queue) + len(self.parked)

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """Apply one event at `now` (monotonic seconds) and return what to do, in order."""
        out: list[Instruction] = []
        match event:
            case ChunkEnded():
                self._chunk_ended(event, now, out)
            case EngineReported():
                self._engine_reported(event, now)
            case ChunkRejected():
                self._chunk_rejected(event, now, out)
            case EngineJoined():
                self._engine_joined(event, now, out)
            case EngineLeft():
                self._engine_left(event.instance, now, out)
            case EstimatesChanged():
                self._estimates_changed(event)
            case Tick():
                self._tick(now, out)
            case _:
                self._handle_groups(event, now, out)
        self._schedule(now, out)
        return out

    def _handle_groups(self, event: Event, now: float, out: list[Instruction]) -> None:
        match event:
            case GroupsSubmitted():
                self._submitted(event, now, out)
            case GroupsAcknowledged():
                for prompt_id in event.prompt_ids:
                    self._acknowledged(ids.group_id(event.rollout_id, prompt_id), out)
            case RolloutCancelled():
                self._cancelled(event, out)
            case RolloutsAborted():
                for group in [group for group in self.groups.values() if not group.done]:
                    self._fail(group, "cancelled", event.message, out)
            case SubmissionsHeld():
                self._held = event.held
                self._check_again(now, out)
            case WeightsChanged():
                self.weight_version = event.version

    # --- submissions ---------------------------------------------------------------------

    def _submitted(
        self, event: GroupsSubmitted, now: float, out: list[Instruction], since: float | None = None
    ) -> None:
        rollout = self.rollouts.get(event.rollout_id)
        if rollout is not None and rollout.trainer != event.trainer:
            whole = [spec.prompt_id for spec in event.groups]
            self._refuse(event, whole, "refused", "another trainer uses this rollout id", out)
            return
        fresh: list[GroupSpec] = []
        accepted: list[str] = []
        for spec in event.groups:
            known = self.groups.get(ids.group_id(event.rollout_id, spec.prompt_id))
            if known is None:
                fresh.append(spec)
                continue
            accepted.append(spec.prompt_id)
            if known.done:
                out.append(Deliver(event.trainer, known.group_id))
        if 0 <= event.weight_version < self.weight_version and fresh:
            late = [spec.prompt_id for spec in fresh]
            message = f"weight version {event.weight_version} is past: version {self.weight_version} is live"
            self._refuse(event, late, "refused", message, out)
        elif self.instances and not self._held and event.weight_version <= self.weight_version:
            accepted += self._open_fitting(event, fresh, now, out)
        else:
            self._hold(event, fresh, now if since is None else since)
        if accepted:
            out.append(Accept(event.trainer, event.rollout_id, accepted))

    def _hold(self, event: GroupsSubmitted, fresh: list[GroupSpec], now: float) -> None:
        """Keep what cannot be checked yet, once: the first time counts."""
        held = {(held.rollout_id, spec.prompt_id) for _, held in self._unchecked for spec in held.groups}
        groups = [spec for spec in fresh if (event.rollout_id, spec.prompt_id) not in held]
        if groups:
            self._unchecked.append((now, replace(event, groups=groups)))

    def _open_fitting(
        self, event: GroupsSubmitted, fresh: list[GroupSpec], now: float, out: list[Instruction]
    ) -> list[str]:
        rollout = self.rollouts.get(event.rollout_id)
        if rollout is None:
            rollout = self.rollouts[event.rollout_id] = RolloutState(event.rollout_id, event.trainer, now)
        opened: list[str] = []
        for spec in fresh:
            problem = misfit(
                len(self.requests), self.limits, self.instances, spec.prompt_len, event.max_tokens, event.n
            )
            if problem:
                self._refuse(event, [spec.prompt_id], "refused", problem, out)
            else:
                group_id = ids.group_id(event.rollout_id, spec.prompt_id)
                self._open(rollout, group_id, spec.prompt_id, spec.prompt_len, event, out)
                opened.append(spec.prompt_id)
        self._close_rollout_if_empty(rollout)
        return opened

    def _open(
        self,
        rollout: RolloutState,
        group_id: str,
        prompt_id: str,
        prompt_len: int,
        event: GroupsSubmitted,
        out: list[Instruction],
    ) -> None:
        group = GroupState(group_id, prompt_id, rollout, event.n, prompt_len, event.max_tokens)
        self.groups[group_id] = group
        self.estimates[group_id] = Estimate(float(event.max_tokens))
        rollout.groups += 1
        rollout.requests += event.n
        out.append(PublishOpened(group_id, event.n, prompt_len, event.max_tokens))
        for index in range(event.n):
            request_id = ids.request_id(group_id, index)
            view = RequestView(request_id, self._group_number, index, prompt_len, event.max_tokens)
            self.requests[request_id] = RequestState(view, group, attempt=self.first_attempt)
            self._wait(request_id)
        self._group_number += 1

    def _refuse(
        self, event: GroupsSubmitted, prompt_ids: list[str], code: str, message: str, out: list[Instruction]
    ) -> None:
        self.counters["refused"] += len(prompt_ids)
        out.append(Refuse(event.trainer, event.rollout_id, prompt_ids, code, message))

    # --- queue and placement -------------------------------------------------------------

    def _wait(self, request_id: str) -> None:
        request = self.requests[request_id]
        self._queued += 1
        request.view.queued = self._queued
        self._push(request_id)

    def _push(self, request_id: str) -> None:
        request = self.requests[request_id]
        self.queue.push(request_id, self.policy.order(request.view, self.estimates[request.group.group_id]))

    def _schedule(self, now: float, out: list[Instruction]) -> None:
        while self.instances and (request_id := self._next()) is not None:
            view = self.requests[request_id].view
            chunk = self.policy.chunk(view, self.limits.chunk_size)
            name = self.policy.place(view, chunk, self.instances)
            if name is not None:
                self._dispatch(request_id, self.instances[name], chunk, out)
            elif self.instances.holding(view.context, chunk):
                return  # the head waits for room; nobody overtakes it
            else:
                self._park(request_id, now)
            self.queue.discard(request_id)

    def _next(self) -> str | None:
        turn_of_oldest = self.policy.fair and self.counters["chunks"] % FAIR_DISPATCHES == FAIR_DISPATCHES - 1
        return self.queue.oldest() if turn_of_oldest else self.queue.head()

    def _park(self, request_id: str, now: float) -> None:
        """Set a request aside until an engine joins that can hold it."""
        self.parked.add(request_id)
        request = self.requests[request_id]
        request.parked_since = now if request.parked_since is None else request.parked_since

    def _dispatch(self, request_id: str, instance: InstanceView, chunk: int, out: list[Instruction]) -> None:
        request = self.requests[request_id]
        request.attempt += 1
        request.parked_since = None
        request.instance = instance.name
        request.blocks = instance.capacity.blocks_for(request.view.context, chunk)
        self.instances.reserve(instance.name, request.blocks)
        self._count(request, "chunks", 1)
        if request.view.last_instance not in ("", instance.name):
            self._count(request, "migrations", 1)
        request.view.last_instance = instance.name
        acceptance = request.group.acceptance or self.acceptance
        probe = request.view.index < self.policy.probes
        out.append(Dispatch(instance.name, request_id, request.attempt, chunk, acceptance, probe))

    def _release(self, request: RequestState) -> None:
        if request.instance in self.instances:
            self.instances.release(request.instance, request.blocks)
        request.instance = ""

    def _count(self, request: RequestState, name: str, amount: int) -> None:
        for counters in (self.counters, request.group.rollout.counters, request.group.counters):
            counters[name] += amount

    # --- chunks --------------------------------------------------------------------------

    def _current(self, instance: str, request_id: str, attempt: int) -> RequestState | None:
        request = self.requests.get(request_id)
        if request is None or (request.instance, request.attempt) != (instance, attempt):
            self.counters["late"] += 1
            return None
        return request

    def _chunk_ended(self, event: ChunkEnded, now: float, out: list[Instruction]) -> None:
        request = self._current(event.instance, event.request_id, event.attempt)
        if request is None:
            return
        self._release(request)
        if event.count == 0 or event.count > request.view.remaining:
            # An engine that made no progress, or too much, is not believed.
            self._lost(request, out, f"ended a chunk with {event.count} tokens")
            return
        request.losses = 0
        request.view.generated += event.count
        self._count(request, "tokens", event.count)
        if event.preemptions:
            self._count(request, "preemptions", event.preemptions)
        out.append(Keep(event.request_id))
        finish = event.finish or ("" if request.view.remaining else "length")
        group = request.group
        reached = (group.group_id, request.view.index, request.view.generated, bool(finish))
        out.append(PublishProgress(*reached, event.drafted, event.accepted))
        if not finish:
            self._wait(event.request_id)
            return
        request.finish, request.stop_reason = finish, event.stop_reason
        group.unfinished -= 1
        group.rollout.finish_times.append(now - group.rollout.submitted)
        group.rollout.finished += 1
        if group.unfinished == 0:
            self._deliver(group, now, out)

    def _deliver(self, group: GroupState, now: float, out: list[Instruction]) -> None:
        group.finished_at = now
        group.results = [
            self.requests.pop(ids.request_id(group.group_id, index)) for index in range(group.size)
        ]
        group.rollout.groups_finished += 1
        self._finished[group.group_id] = group
        self._finished_tokens += group.tokens
        self.estimates.pop(group.group_id, None)
        out.append(PublishClosed(group.group_id))
        out.append(Deliver(group.rollout.trainer, group.group_id))
        while self._finished_tokens > self.limits.result_tokens and len(self._finished) > 1:
            self._expire(next(iter(self._finished.values())), out)

    def _chunk_rejected(self, event: ChunkRejected, now: float, out: list[Instruction]) -> None:
        request = self._current(event.instance, event.request_id, event.attempt)
        if request is None:
            return
        self._release(request)
        if event.fatal:
            self._fail(request.group, "failed", event.message, out)
        else:
            self._lost(request, out, event.message)

    def _lost(self, request: RequestState, out: list[Instruction], why: str) -> None:
        self.counters["lost"] += 1
        request.losses += 1
        if request.losses >= self.limits.max_attempts:
            message = f"response {request.view.index} was lost {request.losses} times in a row; last: {why}"
            self._fail(request.group, "failed", message, out)
        else:
            self._wait(request.view.request_id)

    # --- groups that end early -----------------------------------------------------------

    def _fail(self, group: GroupState, code: str, message: str, out: list[Instruction]) -> None:
        self.counters["refused"] += 1
        out.append(Refuse(group.rollout.trainer, group.rollout.rollout_id, [group.prompt_id], code, message))
        self._remove(group, out)

    def _remove(self, group: GroupState, out: list[Instruction]) -> None:
        for index in range(group.size):
            request_id = ids.request_id(group.group_id, index)
            request = self.requests.pop(request_id, None)
            if request is not None and request.instance:
                out.append(Drop(request.instance, request_id, request.attempt))
                self._release(request)
            self.queue.discard(request_id)
            self.parked.discard(request_id)
        if not group.done:
            out.append(PublishClosed(group.group_id))
        self._forget(group, out)

    def _acknowledged(self, group_id: str, out: list[Instruction]) -> None:
        group = self.groups.get(group_id)
        if group is not None and group.done:
            self._forget(group, out)

    def _expire(self, group: GroupState, out: list[Instruction]) -> None:
        self.counters["expired"] += 1
        self._forget(group, out)

    def _forget(self, group: GroupState, out: list[Instruction]) -> None:
        del self.groups[group.group_id]
        if self._finished.pop(group.group_id, None) is not None:
            self._finished_tokens -= group.tokens
        self.estimates.pop(group.group_id, None)
        out.append(Forget(group.group_id))
        group.rollout.groups_gone += 1
        self._close_rollout_if_empty(group.rollout)

    def _close_rollout_if_empty(self, rollout: RolloutState) -> None:
        if rollout.groups_gone == rollout.groups:
            self.rollouts.pop(rollout.rollout_id, None)

    def _cancelled(self, event: RolloutCancelled, out: list[Instruction]) -> None:
        rollout = self.rollouts.get(event.rollout_id)
        self._cancel_held(event, out)
        if rollout is None or rollout.trainer != event.trainer:
            return
        every = [group.prompt_id for group in self.groups.values() if group.rollout is rollout]
        for prompt_id in event.prompt_ids or every:
            group = self.groups.get(ids.group_id(event.rollout_id, prompt_id))
            if group is not None and not group.done:
                self._fail(group, "cancelled", "cancelled by its trainer", out)

    def _cancel_held(self, event: RolloutCancelled, out: list[Instruction]) -> None:
        unchecked, self._unchecked = self._unchecked, []
        for since, held in unchecked:
            mine = (held.rollout_id, held.trainer) == (event.rollout_id, event.trainer)
            gone = [
                spec.prompt_id
                for spec in held.groups
                if mine and (not event.prompt_ids or spec.prompt_id in event.prompt_ids)
            ]
            if gone:
                self._refuse(held, gone, "cancelled", "cancelled by its trainer", out)
            if left := [spec for spec in held.groups if spec.prompt_id not in gone]:
                self._unchecked.append((since, replace(held, groups=left)))

    def _estimates_changed(self, event: EstimatesChanged) -> None:
        self.acceptance = event.acceptance.get(ALL_GROUPS, self.acceptance)
        for group_id in event.acceptance.keys() & self.groups.keys():
            self.groups[group_id].acceptance = event.acceptance[group_id]
        for group_id, estimate in event.estimates.items():
            if group_id not in self.estimates:
                continue
            self.estimates[group_id] = estimate
            for index in range(self.groups[group_id].size):
                request_id = ids.request_id(group_id, index)
                if request_id in self.queue:
                    self._push(request_id)

    # --- engines and time ----------------------------------------------------------------

    def _engine_joined(self, event: EngineJoined, now: float, out: list[Instruction]) -> None:
        self._engine_left(event.instance, now, out)  # a new life of a known name holds nothing of the old
        self.instances.add(InstanceView(event.instance, event.capacity))
        self._last_seen[event.instance] = now
        self._no_engine_since = None
        parked, self.parked = self.parked, set()
        for request_id in sorted(parked, key=lambda item: self.requests[item].view.queued):
            self._push(request_id)
        self._check_again(now, out)

    def _check_again(self, now: float, out: list[Instruction]) -> None:
        """Look again at what was held back; what still is keeps its time of arrival."""
        unchecked, self._unchecked = self._unchecked, []
        for since, submission in unchecked:
            self._submitted(submission, now, out, since)

    def _engine_left(self, name: str, now: float, out: list[Instruction]) -> None:
        if name not in self.instances:
            return
        self.instances.remove(name)
        del self._last_seen[name]
        if not self.instances:
            self._no_engine_since = now
        lost = [request for request in self.requests.values() if request.instance == name]
        for request in lost:
            self._release(request)
        for request in lost:
            if request.view.request_id in self.requests:  # else its group just failed
                self._lost(request, out, f"engine {name} was lost")

    def _engine_reported(self, event: EngineReported, now: float) -> None:
        if event.instance in self.instances:
            self._last_seen[event.instance] = now
            self.instances.pin(event.instance, event.pinned_blocks)

    def _tick(self, now: float, out: list[Instruction]) -> None:
        for name, seen in list(self._last_seen.items()):
            if now - seen > self.limits.engine_silence_seconds:
                self._engine_left(name, now, out)
        overdue = now - self.limits.engine_wait_seconds
        message = f"no engine that fits registered within {self.limits.engine_wait_seconds:g} s: start one"
        for since, submission in list(self._unchecked):
            if since < overdue and not self._held:  # an update has deadlines of its own
                self._unchecked.remove((since, submission))
                prompt_ids = [spec.prompt_id for spec in submission.groups]
                self._refuse(submission, prompt_ids, "failed", message, out)
        if self._no_engine_since is not None and self._no_engine_since < overdue:
            for group in [group for group in self.groups.values() if not group.done]:
                self._fail(group, "failed", message, out)
        for request in [self.requests[request_id] for request_id in sorted(self.parked)]:
            if request.view.request_id in self.parked and (request.parked_since or 0.0) < overdue:
                self._fail(request.group, "failed", message, out)
        for group in list(self._finished.values()):
            if now - (group.finished_at or 0.0) <= self.limits.result_ttl_seconds:
                break
            self._expire(group, out)
