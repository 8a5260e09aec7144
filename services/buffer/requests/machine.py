"""The life of every request: waiting, running one chunk, waiting again, finished.

`RequestMachine.apply(event, now)` returns instructions; the server performs them in order. The machine
counts tokens and never sees one, so the simulator runs it as it is. Rollouts and groups are the
the `registry`'s.

Invariants (tests/invariants.py asserts them after every event):
- a request is waiting, parked, suspect, accused, running or finished, and a running one has one attempt;
- an ended chunk counts only if its instance and attempt are the current ones: late answers of
  dropped attempts change nothing, so every output token is kept exactly once;
- an instance's books are the sums over the chunks running there; with an admission policy they
  never pass its capacity;
- the loss of an engine says nothing against a request, and costs time in what ran there. Only who
  ran on `SUSPECT_DEATHS` engines that died, without a chunk that ended in between, runs alone next.
  If that engine is lost, too, it is accused, and fails once that one has not come back, alive, in time.
"""

from __future__ import annotations

from collections import OrderedDict

from seer.common import ids
from seer.common.group_events import GroupOpened, RequestProgress
from seer.common.policy.draft_costs import ALL_GROUPS
from seer.common.policy.fleet import Fleet, InstanceView
from seer.common.policy.length import Estimate
from seer.common.policy.request import RequestView
from seer.common.policy.schedule import FAIR_DISPATCHES, Policy
from seer.services.buffer.events import Drained, Joined, Left, Tick
from seer.services.buffer.requests.events import (
    ChunkEnded,
    ChunkRejected,
    EngineReported,
    EstimatesChanged,
    Event,
    GroupsAcknowledged,
    GroupsSubmitted,
    RolloutCancelled,
    RolloutsAborted,
    SubmissionsHeld,
    TrainerLost,
    WeightsChanged,
)
from seer.services.buffer.requests.group_registry import GroupRegistry, no_engine
from seer.services.buffer.requests.instructions import (
    Dispatch,
    Drop,
    Instruction,
    Keep,
    Restore,
)
from seer.services.buffer.requests.queue import WaitingQueue
from seer.services.buffer.requests.state import GroupState, Limits, RequestState, RolloutState

COUNTERS = ["chunks", "migrations", "preemptions", "lost", "late", "refused", "expired", "tokens", "restored"]

SUSPECT_DEATHS = 3
"""Engines that died with a request before it is taken for the cause."""

ACCUSED_SECONDS = 30.0
"""An engine of which only the connection broke is back by then: hosts that vanish are noticed after 10 s."""

STALL_SECONDS = 10.0
"""A longer pause between two ticks is a stall of our own: nobody could be heard in it."""

MOURNED = 1000
"""Bound on dead engines that are remembered: one of which only the connection broke comes back."""


class RequestMachine:
    """See the module's docstring. `counters` holds totals since the start.

    Attempts count up from `first_attempt`, over all requests: an answer to an earlier use of a request's id,
    or to an earlier life of the buffer that came nowhere near, never passes for one of now; nor do the
    streams of such in the dgds.
    """

    def __init__(self, policy: Policy, limits: Limits, first_attempt: int = 0) -> None:
        self.policy = policy
        self.limits = limits
        self._attempt = first_attempt
        self.requests: dict[str, RequestState] = {}
        self.instances = Fleet()
        self.estimates: dict[str, Estimate] = {}  # of open groups
        self.acceptance: list[int] = []  # of all groups' drafts, as far as known
        self.counters: dict[str, int] = dict.fromkeys(COUNTERS, 0)
        self.registry = GroupRegistry(limits, self.instances, self.counters, self._drop)
        self.queue = WaitingQueue()
        self.parked: set[str] = set()
        self.suspects: dict[str, None] = {}  # in the order in which they are tried alone
        self.emptied = ""  # the instance where they are
        self.accused: dict[str, tuple[str, int, float]] = {}  # by whom it was lost: name, life, since when
        self._doubted: set[str] = set()  # instances that one who ran alone, and ended early, may have killed
        self._running: dict[str, dict[str, None]] = {}  # by instance
        self._lives: dict[str, int] = {}
        self._mourned: OrderedDict[int, set[str]] = OrderedDict()  # who has this life among its deaths
        self._no_engine_since: float | None = 0.0
        self._last_tick: float | None = None
        self._queued = 0
        self._group_number = 0

    @property
    def rollouts(self) -> dict[str, RolloutState]:
        """Rollouts with groups that are not forgotten, by id."""
        return self.registry.rollouts

    @property
    def groups(self) -> dict[str, GroupState]:
        """Groups that are not forgotten, by id."""
        return self.registry.groups

    @property
    def weight_version(self) -> int:
        """Under which groups are opened now."""
        return self.registry.weight_version

    @property
    def waiting(self) -> int:
        """Requests that wait for a placement."""
        return len(self.queue) + len(self.parked) + len(self.suspects) + len(self.accused)

    def apply(self, event: Event, now: float) -> list[Instruction]:
        """Apply one event at `now` (monotonic seconds) and return what to do, in order."""
        out: list[Instruction] = []
        match event:
            case ChunkEnded():
                self._chunk_ended(event, now, out)
            case EngineReported():
                if event.instance in self.instances:
                    self.instances.pin(event.instance, event.pinned_blocks)
            case ChunkRejected():
                self._chunk_rejected(event, out)
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
            case GroupsAcknowledged():
                registry.acknowledged(event, out)
            case RolloutCancelled():
                registry.cancelled(event, out)
            case TrainerLost():
                registry.trainer_lost(event.life, out)
            case RolloutsAborted():
                registry.aborted(event.message, out)
            case Drained():
                registry.drain(out)
            case SubmissionsHeld():
                registry.holding = event.held
                self._open(registry.open_held(out), now, out)
            case WeightsChanged():
                registry.weight_version, registry.weights_digest = event.version, event.digest
                self._open(registry.open_held(out), now, out)

    # --- groups --------------------------------------------------------------------------

    def _open(self, groups: list[GroupState], now: float, out: list[Instruction]) -> None:
        """Have the requests of new groups wait."""
        for group in groups:
            self.estimates[group.group_id] = Estimate(float(group.max_tokens))
            out.append(GroupOpened(group.group_id, group.size, group.prompt_len, group.max_tokens))
            for index in range(group.size):
                request_id = ids.request_id(group.group_id, index)
                view = RequestView(request_id, self._group_number, index, group.prompt_len, group.max_tokens)
                self.requests[request_id] = RequestState(view, group)
            self._group_number += 1
            self._restore(group, now, out)

    def _restore(self, group: GroupState, now: float, out: list[Instruction]) -> None:
        """Have a group's requests go on where an earlier life of the buffer had them, by the same weights."""
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
                self._wait(request_id)
        restored = sum(each.count for each in kept)
        self.counters["restored"] += restored
        self.registry.keep(group, restored, out)
        if not group.unfinished and group.group_id in self.groups:
            self._finish(group, now, out)

    def _drop(self, group: GroupState, out: list[Instruction]) -> None:
        """End what runs and waits of a group that ends early."""
        for index in range(group.size):
            request_id = ids.request_id(group.group_id, index)
            request = self.requests.pop(request_id)
            if request.instance:
                if request.alone:
                    self._doubted.add(request.instance)
                out.append(Drop(request.instance, request_id, request.attempt))
                self._release(request)
            self.queue.discard(request_id)
            self.parked.discard(request_id)
            self.suspects.pop(request_id, None)
            self.accused.pop(request_id, None)
            self._absolve(request)
        del self.estimates[group.group_id]

    # --- queue and placement -------------------------------------------------------------

    def _wait(self, request_id: str) -> None:
        request = self.requests[request_id]
        self._queued += 1
        request.view.queued = self._queued
        if len(request.deaths) >= SUSPECT_DEATHS:
            self.suspects[request_id] = None
        else:
            self._push(request_id)

    def _push(self, request_id: str) -> None:
        request = self.requests[request_id]
        self.queue.push(request_id, self.policy.order(request.view, self.estimates[request.group.group_id]))

    def _schedule(self, now: float, out: list[Instruction]) -> None:
        if self.suspects or self.emptied:
            self._try_suspects(now, out)
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

    def _try_suspects(self, now: float, out: list[Instruction]) -> None:
        """Run suspects one after the other, each alone on an instance that was emptied for them."""
        while self.instances:
            if self.emptied and self.instances[self.emptied].chunks:
                return
            if not self.suspects:
                break
            request_id = next(iter(self.suspects))
            view = self.requests[request_id].view
            chunk = self.policy.chunk(view, self.limits.chunk_size)
            able = self.instances.holding(view.context, chunk)
            if able and self.emptied not in able:
                self._stop_emptying()
                self.emptied = min(able, key=lambda name: (self.instances[name].chunks, name))
                self.instances.close(self.emptied)
                continue
            del self.suspects[request_id]
            if able:
                self.requests[request_id].alone = self.emptied not in self._doubted
                self._dispatch(request_id, self.instances[self.emptied], chunk, out)
            else:
                self._park(request_id, now)
        self._stop_emptying()

    def _stop_emptying(self) -> None:
        if self.emptied in self.instances:
            self.instances.close(self.emptied, closed=False)
        self.emptied = ""

    def _park(self, request_id: str, now: float) -> None:
        """Set a request aside until an engine joins that can hold it."""
        self.parked.add(request_id)
        request = self.requests[request_id]
        request.parked_since = now if request.parked_since is None else request.parked_since

    def _dispatch(self, request_id: str, instance: InstanceView, chunk: int, out: list[Instruction]) -> None:
        request = self.requests[request_id]
        self._attempt += 1
        request.attempt = self._attempt
        request.parked_since = None
        request.instance = instance.name
        request.blocks = instance.capacity.blocks_for(request.view.context, chunk)
        self._running[instance.name][request_id] = None
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
            del self._running[request.instance][request.view.request_id]
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
        request = self._current(event.instance, event.request_id, event.attempt)
        if request is None:
            return
        self._doubted.discard(event.instance)
        self._release(request)
        if event.count == 0 or event.count > request.view.remaining:
            # An engine that made no progress, or too much, is not believed.
            self._lost(request, out, f"ended a chunk with {event.count} tokens")
            return
        request.losses = 0
        self._absolve(request)
        request.view.generated += event.count
        self._count(request, "tokens", event.count)
        if event.preemptions:
            self._count(request, "preemptions", event.preemptions)
        finish = event.finish or ("" if request.view.remaining else "length")
        out.append(Keep(event.request_id, finish, event.stop_reason))
        if finish:
            request.finish, request.stop_reason = finish, event.stop_reason
        self._reached(request, now, out, event)
        if not finish:
            self._wait(event.request_id)
        group = request.group
        self.registry.keep(group, event.count, out)
        if not group.unfinished and group.group_id in self.groups:
            self._finish(group, now, out)

    def _reached(
        self, request: RequestState, now: float, out: list[Instruction], chunk: ChunkEnded | None = None
    ) -> None:
        """Publish how far a request is, with what became of the drafts of its `chunk`; note its end."""
        group, view = request.group, request.view
        drafts = (chunk.drafted, chunk.accepted) if chunk is not None else ((), ())
        out.append(RequestProgress(group.group_id, view.index, view.generated, bool(request.finish), *drafts))
        if request.finish:
            group.unfinished -= 1
            group.rollout.finish_times.append(now - group.rollout.submitted)
            group.rollout.finished += 1

    def _finish(self, group: GroupState, now: float, out: list[Instruction]) -> None:
        group.results = [
            self.requests.pop(ids.request_id(group.group_id, index)) for index in range(group.size)
        ]
        del self.estimates[group.group_id]
        self.registry.finish(group, now, out)

    def _chunk_rejected(self, event: ChunkRejected, out: list[Instruction]) -> None:
        request = self._current(event.instance, event.request_id, event.attempt)
        if request is None:
            return
        self._release(request)
        if event.fatal:
            self.registry.fail([request.group], "failed", event.message, out)
        else:
            self._lost(request, out, event.message)

    def _lost(self, request: RequestState, out: list[Instruction], why: str) -> None:
        """Give a chunk that failed by its own doing another attempt, up to `max_attempts` in a row."""
        self.counters["lost"] += 1
        request.losses += 1
        if request.losses >= self.limits.max_attempts:
            message = f"response {request.view.index} was lost {request.losses} times in a row; last: {why}"
            self.registry.fail([request.group], "failed", message, out)
        else:
            self._wait(request.view.request_id)

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

    def _engine_joined(self, event: Joined, now: float, out: list[Instruction]) -> None:
        self._engines_left(Left([event.instance]), now, out)
        for request_id in self._mourned.pop(event.life, ()):  # its connection was gone, no more
            self.requests[request_id].deaths.discard(event.life)
        self._judge(event.instance, event.life, now, out)
        self.instances.add(InstanceView(event.instance, event.capacity))
        self._running[event.instance] = {}
        self._lives[event.instance] = event.life
        first, self._no_engine_since = self._no_engine_since is not None, None
        parked, self.parked = self.parked, set()
        for request_id in sorted(parked, key=lambda item: self.requests[item].view.queued):
            if len(self.requests[request_id].deaths) >= SUSPECT_DEATHS:
                self.suspects[request_id] = None
            else:
                self._push(request_id)
        if first:
            self._open(self.registry.open_held(out), now, out)

    def _engines_left(self, event: Left, now: float, out: list[Instruction]) -> None:
        """Have what ran on engines that are gone wait again: before anything is placed anew."""
        gone = [name for name in event.instances if name in self.instances]
        lost = [self.requests[request_id] for name in gone for request_id in self._running[name]]
        self._doubted.difference_update(gone)
        for name in gone:
            life = self._lives.pop(name)
            if event.died and self._running[name]:
                self._mourned[life] = set(self._running[name])
                for request_id in self._running[name]:
                    self.requests[request_id].deaths.add(life)
                    if self.requests[request_id].alone:
                        self.accused[request_id] = (name, life, now)
            del self._running[name]
        if gone:
            self.instances.remove(*gone)
        while len(self._mourned) > MOURNED:
            life, mourners = self._mourned.popitem(last=False)
            for request_id in mourners:
                self.requests[request_id].deaths.discard(life)
        if gone and not self.instances:
            self._no_engine_since = now
        if self.emptied in gone:
            self.emptied = ""
        for request in lost:
            self.counters["lost"] += 1
            self._release(request)
            if request.view.request_id not in self.accused:
                self._wait(request.view.request_id)

    def _absolve(self, request: RequestState) -> None:
        """Forget which engines died with a request."""
        for life in request.deaths:
            self._mourned[life].discard(request.view.request_id)
            if not self._mourned[life]:
                del self._mourned[life]
        request.deaths.clear()

    def _judge(self, instance: str, life: int, now: float, out: list[Instruction]) -> None:
        """Clear whom the return of an engine clears; fail who was lost alone with one that stays away."""
        for request_id, (name, lost, since) in list(self.accused.items()):
            if request_id not in self.accused:
                continue  # its group has just failed
            if (name, lost) == (instance, life):
                del self.accused[request_id]
                self._wait(request_id)
            elif name == instance or now - since > ACCUSED_SECONDS:
                request = self.requests[request_id]
                message = (
                    f"response {request.view.index} ran on {len(request.deaths)} engines that died, on the "
                    "last one alone: it seems to be what kills them"
                )
                self.registry.fail([request.group], "failed", message, out)

    def _tick(self, now: float, out: list[Instruction]) -> None:
        self.registry.tick(now, out)
        stood = 0.0 if self._last_tick is None else max(0.0, now - self._last_tick - STALL_SECONDS)
        self._last_tick = now
        for request_id, (name, life, since) in self.accused.items():
            self.accused[request_id] = (name, life, min(now, since + stood))  # who is back is not read yet
        self._judge("", 0, now, out)
        overdue = now - self.limits.engine_wait_seconds
        late: list[GroupState] = []
        if self._no_engine_since is not None and self._no_engine_since < overdue:
            late = [group for group in self.groups.values() if not group.done and group.held_since is None]
        elif self.parked:
            waiting = [self.requests[request_id] for request_id in sorted(self.parked)]
            groups = [each.group for each in waiting if (each.parked_since or 0.0) < overdue]
            late = list({group.group_id: group for group in groups}.values())
        self.registry.fail(late, "failed", no_engine(self.limits.engine_wait_seconds), out)
