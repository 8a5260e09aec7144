"""Which waiting request runs next, where, and for how many tokens: a policy's choice, and two exceptions.

Invariants (tests/invariants.py asserts them after every event):
- a waiting request is queued, parked or a suspect; a parked one fits no registered instance;
- if the request that goes next has to wait for room, no waiting one overtakes it, but one of another trainer
  may where the request would not fit beside its own trainer's chunks alone;
- shares say which trainer's request goes next (`common/policy/shares.py`), but not when it is the turn of the
  request that has waited longest; where one trainer waits, the policy alone decides;
- suspects run one after the other, each alone on an instance that gets no other work until they are done.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from seer.common.policy.fleet import Fleet, InstanceView
from seer.common.policy.length import Estimate
from seer.common.policy.request import RequestView
from seer.common.policy.schedule import FAIR_DISPATCHES, Policy
from seer.common.policy.shares import UNIT, Shares, cost
from seer.services.buffer.requests.engine_deaths import EngineDeaths
from seer.services.buffer.requests.queue import SharedQueue
from seer.services.buffer.requests.state import RequestState

MAX_PASSED = 8
"""Trainers whose next requests are looked at when the first of them has to wait."""


MAX_LOOKS = 4096
"""Chunks that are looked at in vain when some are to end early."""


class Scheduler:
    """`requests` and `estimates` are by request and group id, `running` has request ids by instance;
    `counters["chunks"]` counts dispatches.

    `now` (monotonic seconds) is the time of the present event. `weights`: of trainers.
    """

    def __init__(
        self,
        policy: Policy,
        chunk_size: int | None,
        instances: Fleet,
        requests: Mapping[str, RequestState],
        estimates: Mapping[str, Estimate],
        counters: Mapping[str, int],
        deaths: EngineDeaths,
        running: Mapping[str, Collection[str]],
        weights: Mapping[str, float],
    ) -> None:
        self.policy = policy
        self.now = 0.0
        self.queue = SharedQueue(Shares(dict(weights)))
        self.parked: set[str] = set()
        self.suspects: dict[str, None] = {}  # in the order in which they are to run
        self.emptied = ""  # the instance that gets no work but suspects; empty: none
        self._chunk_size = chunk_size
        self._instances = instances
        self._requests, self._estimates = requests, estimates
        self._counters, self._deaths, self._running = counters, deaths, running
        self._queued = 0
        self.ending: dict[str, int] = {}  # by share, what chunks have that were told to end where they stand

    def __len__(self) -> int:
        """Return how many requests wait."""
        return len(self.queue) + len(self.parked) + len(self.suspects)

    def chunk(self, view: RequestView) -> int:
        """Return the number of tokens of a request's next chunk."""
        return self.policy.chunk(view, self._chunk_size)

    # --- waiting requests ----------------------------------------------------------------

    def wait(self, request_id: str) -> None:
        """Add a request that runs nowhere, behind all others that are equal to it under the policy."""
        self._queued += 1
        view = self._requests[request_id].view
        view.queued = self._queued
        self._add(view.request_id)  # not the caller's text: no second one is kept for each request

    def push(self, request_id: str) -> None:
        """Queue a request, or move it to where its group's present estimate puts it."""
        request = self._requests[request_id]
        key = self.policy.order(request.view, self._estimates[request.group.group_id])
        self.queue.push(request.group.rollout.share, request_id, key, self.now)

    def discard(self, request: RequestState) -> None:
        """Remove a request if it waits."""
        request_id = request.view.request_id
        self.queue.discard(request.group.rollout.share, request_id)
        self.parked.discard(request_id)
        self.suspects.pop(request_id, None)

    def _add(self, request_id: str) -> None:
        if self._deaths.is_suspect(self._requests[request_id]):
            self.suspects[request_id] = None
        else:
            self.push(request_id)

    def _park(self, request_id: str, now: float) -> None:
        """Set a request aside until an engine joins that can hold it."""
        self.parked.add(request_id)
        request = self._requests[request_id]
        request.parked_since = now if request.parked_since is None else request.parked_since

    # --- engines -------------------------------------------------------------------------

    def engine_joined(self) -> None:
        """Queue parked requests again: the new engine may hold them."""
        parked, self.parked = self.parked, set()
        for request_id in sorted(parked, key=lambda item: self._requests[item].view.queued):
            self._add(request_id)

    def engines_left(self, instances: Collection[str]) -> None:
        """Note that instances are gone."""
        if self.emptied in instances:
            self.emptied = ""

    # --- shares --------------------------------------------------------------------------

    def takes(self, request: RequestState, instance: InstanceView) -> None:
        """Count what a chunk that begins has of its engine."""
        share = request.group.rollout.share
        request.cost = cost(instance.capacity, request.blocks)
        self.queue.takes(share, request.cost, self.now)

    def gives(self, request: RequestState) -> None:
        """Count that no more: the chunk has ended."""
        share = request.group.rollout.share
        self.queue.gives(share, request.cost, self.now)
        if request.ending:
            self.ending[share] -= request.cost
            if not self.ending[share]:
                del self.ending[share]
        request.cost, request.ending = 0, False

    def ends(self) -> dict[str, list[RequestState]]:
        """Return, by instance, chunks that are to end where they stand, for the trainer that goes next.

        They are spread over as many instances as its requests need; of each those go first that run for
        longest, so none is ended again and again.
        """
        first, shares = self.queue.first(), self.queue.shares
        if first is None or not self._instances:
            return {}
        total, already = UNIT * len(self._instances), sum(self.ending.values())
        lacks = shares.lacks(first, total) - already
        if lacks <= 0:
            return {}
        head = self._requests[str(self.queue.head())]
        asked = head.view.context, self.chunk(head.view), head.view.image_tokens
        able = [self._instances[name] for name in self._instances.holding(*asked) if name != self.emptied]
        if not able:
            return {}
        capacity = able[0].capacity
        each = cost(capacity, capacity.blocks_for(*asked[:2]))
        needed = min(lacks, len(self.queue.of(first)) * each - already)
        if needed < UNIT // capacity.max_num_seqs:
            return {}
        beyond = shares.beyond(first, total, self.ending)
        able.sort(key=lambda instance: (-instance.free_blocks, instance.name))
        return self._ended(head, [instance.name for instance in able], needed, each, beyond) if beyond else {}

    def _ended(
        self, head: RequestState, able: list[str], needed: int, each: int, beyond: dict[str, int]
    ) -> dict[str, list[RequestState]]:
        """Mark chunks as ending that have `needed` on the `able` instances, for requests that need `each`."""
        left = min(len(able), max(1, needed // each))
        found: dict[str, list[RequestState]] = {}
        budget, looks = 0.0, 0
        for name in able:
            if not left or looks > MAX_LOOKS:
                break
            looks += len(self._running[name])
            if self._waits_for_its_own(head, name):
                continue
            budget, left = budget + (needed - budget) / left, left - 1
            for request_id in self._running[name]:
                request = self._requests[request_id]
                share = request.group.rollout.share
                if request.ending or request.alone or request.cost > min(budget, beyond.get(share, 0)):
                    continue
                request.ending = True
                self.ending[share] = self.ending.get(share, 0) + request.cost
                beyond[share] -= request.cost
                budget, needed = budget - request.cost, needed - request.cost
                looks -= 1
                found.setdefault(name, []).append(request)
        return found

    # --- placement -----------------------------------------------------------------------

    def going_on(self, request_id: str) -> tuple[InstanceView, int] | None:
        """Return where a request whose chunk has just ended goes on at once, and for how many tokens.

        None: it waits with the others.
        """
        request = self._requests[request_id]
        view, estimate = request.view, self._estimates[request.group.group_id]
        if self._is_turn_of_oldest or not self.policy.goes_on(view, estimate):
            return None
        chunk = self.chunk(view)
        if not self._instances.has_room(view.last_instance, view.context, chunk, view.image_tokens):
            return None
        name = self.policy.place(view, chunk, self._instances)
        if name is None:
            return None
        if self.queue.is_ahead(request.group.rollout.share):
            ahead = self._requests[str(self.queue.head())]
            if not self._waits_for_its_own(ahead, name):
                return None
        return self._instances[name], chunk

    @property
    def _is_turn_of_oldest(self) -> bool:
        """Whether the next dispatch is that of the request which has waited longest."""
        return self.policy.fair and self._counters["chunks"] % FAIR_DISPATCHES == FAIR_DISPATCHES - 1

    def next(self) -> str | None:
        """Return the queued request that goes next."""
        if self._is_turn_of_oldest:
            return self.queue.oldest(lambda request_id: self._requests[request_id].view.queued)
        return self.queue.head()

    def placements(self, now: float) -> Iterator[tuple[str, InstanceView, int]]:
        """Yield what to dispatch at `now` (monotonic seconds): request id, instance, tokens.

        The caller dispatches each before it takes the next one.
        """
        if self.suspects or self.emptied:
            yield from self._suspects_placed(now)
        while self._instances and (request_id := self.next()) is not None:
            request = self._requests[request_id]
            view = request.view
            chunk = self.chunk(view)
            name = self.policy.place(view, chunk, self._instances)
            if name is None and self._instances.holding(view.context, chunk, view.image_tokens):
                overtaking = self._overtaking(request)
                if overtaking is None:
                    return
                request, name, chunk = overtaking
            if name is not None:
                yield request.view.request_id, self._instances[name], chunk
            else:
                self._park(request_id, now)
            self.queue.discard(request.group.rollout.share, request.view.request_id)

    def _overtaking(self, first: RequestState) -> tuple[RequestState, str, int] | None:
        """Return which other trainer's request goes before `first`, where, and for how many tokens."""
        if self._is_turn_of_oldest:
            return None
        passed = [first]
        for request_id in self.queue.heads(MAX_PASSED):
            request = self._requests[request_id]
            if request is first:
                continue
            chunk = self.chunk(request.view)
            name = self.policy.place(request.view, chunk, self._instances)
            if name is not None and all(self._waits_for_its_own(each, name) for each in passed):
                return request, name, chunk
            passed.append(request)
        return None

    def _waits_for_its_own(self, request: RequestState, name: str) -> bool:
        """Return whether a request would not fit on an instance beside its own trainer's chunks alone."""
        view, share, capacity = request.view, request.group.rollout.share, self._instances[name].capacity
        chunk = self.chunk(view)
        if not capacity.holds(view.context, chunk, view.image_tokens):
            return True
        running = [self._requests[each] for each in self._running[name]]
        own = [each.blocks for each in running if each.group.rollout.share == share]
        blocks = sum(own) + capacity.blocks_for(view.context, chunk)
        return len(own) >= capacity.max_num_seqs or blocks > capacity.kv_blocks

    def _suspects_placed(self, now: float) -> Iterator[tuple[str, InstanceView, int]]:
        while self._instances:
            if self.emptied and self._instances[self.emptied].chunks:
                return
            if not self.suspects:
                break
            request_id = next(iter(self.suspects))
            view = self._requests[request_id].view
            chunk = self.chunk(view)
            able = self._instances.holding(view.context, chunk, view.image_tokens)
            if able and self.emptied not in able:
                self._stop_emptying()
                self.emptied = min(able, key=lambda name: (self._instances[name].chunks, name))
                self._instances.close(self.emptied)
                continue
            del self.suspects[request_id]
            if able:
                self._requests[request_id].alone = self._deaths.is_conclusive(self.emptied)
                yield request_id, self._instances[self.emptied], chunk
            else:
                self._park(request_id, now)
        self._stop_emptying()

    def _stop_emptying(self) -> None:
        if self.emptied in self._instances:
            self._instances.close(self.emptied, closed=False)
        self.emptied = ""
