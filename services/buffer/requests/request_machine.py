"""The life of every request: waiting, running one chunk, waiting again, finished.

`RequestMachine.apply(event, now)` returns instructions; the server carries them out in order. The machine
counts tokens and has none, so the simulator runs it as it is. Its `registry` has rollouts and groups, its
`scheduler` the waiting requests, and `deaths` remembers which engines died.

Invariants (tests/invariants.py asserts them after every event):
- a request is queued, parked, a suspect, lost alone, running or finished; a running one has one attempt;
- an ended chunk counts only if its instance and attempt are the current ones: late answers to earlier
  attempts change nothing, so every output token is kept exactly once;
- the counts of an instance are the sums over the chunks that run there; with an admission policy they never
  exceed its capacity;
- losing an engine costs the requests that ran there time, nothing else. Only a request that ran on
  `SUSPECT_DEATHS` engines that died, with no chunk that ended in between, runs alone next; and it fails only
  if two engines die on which it ran alone, and do not come back in time (`engine_deaths.py`).
"""

from __future__ import annotations

from zlib import crc32

from seer.common import ids, wire
from seer.common.policy.fleet import Fleet, InstanceView
from seer.common.policy.length import Estimate
from seer.common.policy.schedule import Policy
from seer.services.buffer.events import Drained, FromEngine, FromTrainer, Joined, Left, Tick, ToEngine
from seer.services.buffer.requests.engine_deaths import EngineDeaths
from seer.services.buffer.requests.events import (
    ChunkEnded,
    EngineReported,
    EstimatesChanged,
    Event,
    GroupsSubmitted,
    ImageArrived,
    ImagesStalled,
    RolloutsAborted,
    SubmissionsHeld,
    TokensArrived,
    TrainerLost,
    WeightsChanged,
)
from seer.services.buffer.requests.group_registry import GroupRegistry, no_engine
from seer.services.buffer.requests.instructions import (
    Dispatch,
    Instruction,
    Keep,
    Restore,
    Stream,
)
from seer.services.buffer.requests.scheduler import Scheduler
from seer.services.buffer.requests.state import GroupState, Limits, RequestState, RolloutState
from seer.services.buffer.requests.turn_placement import Away, progress_of_turns

COUNTERS = ["chunks", "migrations", "preemptions", "lost", "late", "refused", "expired", "tokens", "restored"]


class RequestMachine:
    """See the module's docstring. `counters` holds totals since the start.

    Attempts count up from `first_attempt` over all requests, and no earlier incarnation of the buffer had
    numbers near it. So an answer to an earlier use of a request's id, or to an earlier incarnation of the
    buffer, never counts as one to the current attempt; nor do token streams of such attempts in the dgds.
    """

    def __init__(self, policy: Policy, limits: Limits, first_attempt: int = 0) -> None:
        self.limits, self.first_attempt = limits, first_attempt
        self._attempt = first_attempt
        self.requests: dict[str, RequestState] = {}
        self.instances = Fleet()
        self.estimates: dict[str, Estimate] = {}  # of open groups
        self.counters: dict[str, int] = dict.fromkeys(COUNTERS, 0)
        self.registry = GroupRegistry(limits, self.instances, self.counters, self._drop)
        self.deaths = EngineDeaths(self.requests)
        self._running: dict[str, dict[str, None]] = {}  # by instance
        self.scheduler = Scheduler(
            policy,
            limits.chunk_size,
            self.instances,
            self.requests,
            self.estimates,
            self.counters,
            self.deaths,
            self._running,
            limits.shares,
        )
        self._incarnations: dict[str, int] = {}  # by instance
        self._no_engine_since: float | None = 0.0
        self._group_number = 0

    @property
    def policy(self) -> Policy:
        """The policy that schedules requests."""
        return self.scheduler.policy

    @property
    def rollouts(self) -> dict[str, RolloutState]:
        """Rollouts with groups that are not removed, by id."""
        return self.registry.rollouts

    @property
    def groups(self) -> dict[str, GroupState]:
        """Groups that are not removed, by id."""
        return self.registry.groups

    @property
    def weight_version(self) -> int:
        """The version under which groups are opened now."""
        return self.registry.weight_version

    @property
    def idle(self) -> bool:
        """Whether no request is unfinished, and no trajectory awaits its next turn."""
        return not self.requests and not self.registry.trajectories.away

    @property
    def waiting(self) -> int:
        """Requests that do not run and have not finished."""
        return len(self.scheduler) + len(self.deaths.lost_alone)

    def apply(self, event: Event, now: float) -> list[Instruction]:
        """Apply one event at `now` (monotonic seconds) and return what to do, in order."""
        out: list[Instruction] = []
        self.scheduler.now = now
        match event:
            case ChunkEnded():
                self._chunk_ended(event, now, out)
            case TokensArrived():
                self._tokens_arrived(event, out)
            case EngineReported():
                if event.instance in self.instances:
                    self.instances.pin(event.instance, event.pinned_blocks)
            case FromEngine(name, wire.ChunkFailed() as failed):
                self._chunk_failed(name, failed, out)
            case Joined():
                self._engine_joined(event, now, out)
            case Left():
                self._engines_left(event, now, out)
            case EstimatesChanged():
                self._estimates_changed(event)
            case Tick():
                self._tick(now, out)
            case _:
                self._handle_groups(event, now, out)
        self._schedule(now, out)
        return out

    def _handle_groups(self, event: Event, now: float, out: list[Instruction]) -> None:
        registry = self.registry
        match event:
            case GroupsSubmitted():
                self._open(registry.submitted(event, now, out), now, out)
            case FromTrainer(trainer, wire.Acknowledge() as named):
                registry.acknowledged(trainer, named, out)
            case FromTrainer(trainer, wire.Cancel() as named):
                registry.cancelled(trainer, named, out)
            case TrainerLost():
                registry.trainer_lost(event.address, out)
            case RolloutsAborted():
                registry.aborted(event.message, out)
            case ImageArrived():
                self._open(registry.arrived(event.name, out), now, out)
            case ImagesStalled():
                registry.stalled(event, out)
            case Drained():
                registry.draining = True
            case SubmissionsHeld():
                registry.holding = event.held
                self._open(registry.open_held(out), now, out)
            case WeightsChanged():
                registry.weight_version, registry.weights_digest = event.version, event.digest
                registry.weights_by = event.by
                self._open(registry.open_held(out), now, out)

    # --- groups --------------------------------------------------------------------------

    def _open(self, groups: list[GroupState], now: float, out: list[Instruction]) -> None:
        """Open groups: add their requests, which wait."""
        for group in groups:
            place = self.registry.trajectories.place(group)
            away = self._continue(group, out)
            # Groups that belong together are placed as one, whenever they are opened.
            number = crc32(group.shared_id.encode()) if group.shared_id else self._group_number
            for index in range(group.size):
                view = group.view(number, index)
                view.last_instance = away.last_instance if away else place
                self.requests[view.request_id] = RequestState(view, group)
            self._group_number += 1
            self._restore(group, now, out)

    def _continue(self, group: GroupState, out: list[Instruction]) -> Away | None:
        """Publish a group that is opened; return what is known of its trajectory if that was away."""
        away = self.registry.trajectories.opened(group)
        opened = group.opened
        closed = [wire.GroupClosed(group_id=away.group_id)] if away else []
        # Groups of one name share evidence, which is lost when none of them is open.
        out += [*closed, opened] if away and away.group_id == group.group_id else [opened, *closed]
        if group.turn is not None and group.turn.generated:
            out.append(progress_of_turns(group.group_id, group.turn.generated))
        self.estimates[group.group_id] = away.estimate if away else Estimate(float(opened.cap))
        group.acceptance = away.acceptance if away else group.acceptance
        return away

    def _restore(self, group: GroupState, now: float, out: list[Instruction]) -> None:
        """Queue a group's requests, from where an earlier incarnation kept them if weights are the same."""
        live = (self.registry.weight_version, self.registry.weights_digest)
        earlier, group.earlier = group.earlier, None
        kept = earlier.responses if earlier and (earlier.version, earlier.digest) == live else []
        if not all(0 <= each.index < group.size and 0 < each.count <= group.max_tokens for each in kept):
            kept = []
        if kept:
            out.append(Restore(group.group_id))
        for each in kept:
            request = self.requests[ids.request_id(group.group_id, each.index)]
            request.view.generated = each.count
            request.finish, request.stop_reason = each.finish, each.stop_reason
            self._reached(request, now, out)
        for index in range(group.size):
            request_id = ids.request_id(group.group_id, index)
            if not self.requests[request_id].finish:
                self.scheduler.wait(request_id)
        restored = sum(each.count for each in kept)
        self.counters["restored"] += restored
        self.registry.keep(group, restored, out)
        if not group.unfinished and group.group_id in self.groups:
            self._finish(group, now, out)

    def _drop(self, group: GroupState, out: list[Instruction]) -> None:
        """End the requests of an open group that ends early."""
        for index in range(group.size):
            request_id = ids.request_id(group.group_id, index)
            request = self.requests.pop(request_id)
            self.deaths.remove(request)
            if request.instance:
                drop = wire.DropChunk(request_id=request_id, attempt=request.attempt)
                out.append(ToEngine(request.instance, drop))
                self._release(request)
            self.scheduler.discard(request)
        del self.estimates[group.group_id]

    # --- placement -----------------------------------------------------------------------

    def _schedule(self, now: float, out: list[Instruction]) -> None:
        for request_id, instance, chunk in self.scheduler.placements(now):
            self._dispatch(request_id, instance, chunk, out)
        for name, ending in self.scheduler.ends().items():
            ids_, attempts = [each.view.request_id for each in ending], [each.attempt for each in ending]
            out.append(ToEngine(name, wire.EndChunks(request_ids=ids_, attempts=attempts)))

    def _dispatch(
        self,
        request_id: str,
        instance: InstanceView,
        chunk: int,
        out: list[Instruction],
        waited: bool = True,
    ) -> None:
        request = self.requests[request_id]
        if waited or request.view.last_instance != instance.name:
            request.view.came_with = request.view.produced
        self._attempt += 1
        request.attempt = self._attempt
        request.parked_since, request.streamed = None, 0
        request.instance = instance.name
        request.blocks = instance.capacity.blocks_for(request.view.context, chunk)
        self._running[instance.name][request_id] = None
        self.instances.reserve(instance.name, request.blocks, request_id)
        self.scheduler.takes(request, instance)
        self._count(request, "chunks", 1)
        if request.view.last_instance not in ("", instance.name):
            self._count(request, "migrations", 1)
        request.view.last_instance = instance.name
        acceptance, probe = request.group.acceptance, request.view.index < self.policy.probes
        order = instance.name, request_id, request.attempt, chunk, acceptance, probe, request.group.stream
        out.append(Dispatch(*order))

    def _release(self, request: RequestState) -> None:
        if request.instance in self.instances:
            request_id = request.view.request_id
            self.instances.release(request.instance, request.blocks, request_id)
            del self._running[request.instance][request_id]
        self.scheduler.gives(request)
        request.instance = ""
        request.alone = False

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
        result = event.result
        request = self._current(event.instance, result.request_id, result.attempt)
        if request is None:
            return
        self.deaths.chunk_ended(event.instance)
        self._release(request)
        stands = not result.count and result.start and not result.finish  # it ended where it stood
        if result.start != request.streamed or not (stands or 0 < result.count <= request.view.remaining):
            # Tokens before these were lost, there is no progress, or there is more than was asked for.
            self._lost(request, out, f"ended a chunk with {result.count} tokens after {result.start}")
            return
        request.losses = 0
        self.deaths.clear(request)
        request.view.generated += result.count
        self._count(request, "tokens", result.count)
        if result.preemptions:
            self._count(request, "preemptions", result.preemptions)
        finish = result.finish or ("" if request.view.remaining else "length")
        out.append(Keep(result.request_id, finish, result.stop_reason))
        if finish:
            request.finish, request.stop_reason = finish, result.stop_reason
        self._reached(request, now, out, result)
        if not finish:
            if (going_on := self.scheduler.going_on(result.request_id)) is not None:
                self._dispatch(result.request_id, *going_on, out, waited=False)
            else:
                self.scheduler.wait(result.request_id)
        group = request.group
        self.registry.keep(group, result.count, out, sum(result.beside.values()))
        if group.group_id not in self.groups:
            return  # there was no room for it
        if not group.unfinished:
            self._finish(group, now, out)
        elif group.stream:
            out.append(Stream(result.request_id, group.rollout.address, group.submission))

    def _tokens_arrived(self, event: TokensArrived, out: list[Instruction]) -> None:
        """Keep what a chunk that goes on has generated: what a trainer has seen stands, whatever happens."""
        part = event.tokens
        request_id, count = part.request_id, part.count
        request = self._current(event.instance, request_id, part.attempt)
        if request is None:
            return
        group = request.group
        if part.start != request.streamed or not group.stream or not 0 < count < request.view.remaining:
            # Tokens before these were lost, or the last ones are not sent as the chunk's end.
            drop = wire.DropChunk(request_id=request_id, attempt=part.attempt)
            out.append(ToEngine(event.instance, drop))
            self._release(request)
            self._lost(request, out, f"sent {count} tokens after {part.start} of a chunk that goes on")
            return
        request.streamed += count
        request.view.generated += count
        self._count(request, "tokens", count)
        out.append(Keep(request_id))
        self.registry.keep(group, count, out, sum(part.beside.values()))
        if group.group_id in self.groups:  # else there was no room for it
            out.append(Stream(request_id, group.rollout.address, group.submission))

    def _reached(
        self, request: RequestState, now: float, out: list[Instruction], chunk: wire.ChunkResult | None = None
    ) -> None:
        """Publish a request's progress, with the drafts of its `chunk`; count a request that has finished."""
        group = request.group
        out.append(request.progress(chunk))
        if request.finish:
            group.unfinished -= 1
            group.rollout.finish_times.append(now - group.rollout.submitted)
            group.rollout.finished += 1

    def _finish(self, group: GroupState, now: float, out: list[Instruction]) -> None:
        group.results = [
            self.requests.pop(ids.request_id(group.group_id, index)) for index in range(group.size)
        ]
        self.registry.finish(group, self.estimates.pop(group.group_id), now, out)

    def _chunk_failed(self, instance: str, failed: wire.ChunkFailed, out: list[Instruction]) -> None:
        request = self._current(instance, failed.request_id, failed.attempt)
        if request is None:
            return
        self._release(request)
        if failed.fatal:
            self.registry.fail([request.group], "failed", failed.message, out)
        else:
            self._lost(request, out, failed.message)

    def _lost(self, request: RequestState, out: list[Instruction], why: str) -> None:
        """Try a chunk that failed again, unless it was the `max_attempts`-th in a row."""
        self.counters["lost"] += 1
        request.losses += 1
        if request.losses >= self.limits.max_attempts:
            message = f"response {request.view.index} was lost {request.losses} times in a row; last: {why}"
            self.registry.fail([request.group], "failed", message, out)
        else:
            self.scheduler.wait(request.view.request_id)

    def _estimates_changed(self, event: EstimatesChanged) -> None:
        self.registry.trajectories.estimates_changed(event.estimates, event.acceptance)
        for group_id in event.acceptance.keys() & self.groups.keys():
            self.groups[group_id].acceptance = event.acceptance[group_id]
        for group_id, estimate in event.estimates.items():
            if group_id not in self.estimates:
                continue
            self.estimates[group_id] = estimate
            queued = self.scheduler.queue.of(self.groups[group_id].rollout.share)
            for index in range(self.groups[group_id].size):
                request_id = ids.request_id(group_id, index)
                if request_id in queued:
                    self.scheduler.push(request_id)

    # --- engines and time ----------------------------------------------------------------

    def _engine_joined(self, event: Joined, now: float, out: list[Instruction]) -> None:
        self._engines_left(Left([event.instance]), now, out)
        self.deaths.engine_joined(event.incarnation)
        self._decide_lost_alone(event.instance, event.incarnation, now, out)
        self.instances.add(InstanceView(event.instance, event.register.capacity))
        self._running[event.instance] = {}
        self._incarnations[event.instance] = event.incarnation
        first, self._no_engine_since = self._no_engine_since is not None, None
        self.scheduler.engine_joined()
        if first:
            self._open(self.registry.open_held(out), now, out)

    def _engines_left(self, event: Left, now: float, out: list[Instruction]) -> None:
        """Remove engines; requests that ran there wait again, before anything is placed."""
        gone = [name for name in event.instances if name in self.instances]
        lost = [self.requests[request_id] for name in gone for request_id in self._running[name]]
        for name in gone:
            incarnation = self._incarnations.pop(name)
            if event.died and self._running[name]:
                self.deaths.died(name, incarnation, self._running[name], now)
            del self._running[name]
        if gone:
            self.instances.remove(*gone)
        self.deaths.engines_left(gone)
        self.scheduler.engines_left(gone)
        if gone and not self.instances:
            self._no_engine_since = now
        for request in lost:
            self.counters["lost"] += 1
            self._release(request)
            if request.view.request_id not in self.deaths.lost_alone:
                self.scheduler.wait(request.view.request_id)

    def _decide_lost_alone(self, instance: str, incarnation: int, now: float, out: list[Instruction]) -> None:
        """Queue requests lost alone again; fail those that seem to have killed their engines."""
        for request, blamed in self.deaths.decided(instance, incarnation, now):
            if not blamed:
                self.scheduler.wait(request.view.request_id)
                continue
            message = (
                f"response {request.view.index} ran on {len(request.deaths)} engines that died, on the "
                "last two alone: it seems to be what kills them"
            )
            self.registry.fail([request.group], "failed", message, out)

    def _tick(self, now: float, out: list[Instruction]) -> None:
        self.registry.tick(now, out)
        self.deaths.tick(now)
        self._decide_lost_alone("", 0, now, out)
        overdue = now - self.limits.engine_wait_seconds
        late: list[GroupState] = []
        if self._no_engine_since is not None and self._no_engine_since < overdue:
            late = [group for group in self.groups.values() if not group.done and group.held_since is None]
        elif self.scheduler.parked:
            parked = [self.requests[request_id] for request_id in sorted(self.scheduler.parked)]
            groups = [each.group for each in parked if (each.parked_since or 0.0) < overdue]
            late = list({group.group_id: group for group in groups}.values())
        self.registry.fail(late, "failed", no_engine(self.limits.engine_wait_seconds), out)
