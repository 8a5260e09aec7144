"""The waiting requests: of each trainer by a policy's key, and of the trainers by their shares.

Both are indexed heaps, O(log n) a change. Where one trainer waits, its heap alone decides.

Invariants (tests/property/test_queue.py, tests/property/test_shares.py):
- an id is in the queue at most once; pushing it again with another key moves it;
- `head` is the id with the smallest key, `oldest` the one that has waited longest: a new key does not change
  since when it waits;
- memory is bounded by the number of ids, not of pushes: after a push there are at most `MAX_HEAP_ITEMS` heap
  items for each id.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from itertools import chain

from seer.common.policy.schedule import OrderKey
from seer.common.policy.shares import Shares

MAX_HEAP_ITEMS = 3
"""Heap items per id beyond which the heap is built anew: amortized O(1) a push."""


class WaitingQueue:
    """A priority queue whose entries can be given other keys and removed; outdated heap items are skipped."""

    def __init__(self) -> None:
        self._heap: list[tuple[OrderKey, str]] = []
        self._keys: OrderedDict[str, OrderKey] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._keys

    def __iter__(self) -> Iterator[str]:
        """Return all ids, the one that has waited longest first."""
        return iter(self._keys)

    def push(self, request_id: str, key: OrderKey) -> None:
        """Add an id, or move it to `key`."""
        if self._keys.get(request_id) != key:
            self._keys[request_id] = key
            heapq.heappush(self._heap, (key, request_id))
            if len(self._heap) > MAX_HEAP_ITEMS * len(self._keys):
                self._heap = [(key, request_id) for request_id, key in self._keys.items()]
                heapq.heapify(self._heap)

    def discard(self, request_id: str) -> None:
        """Remove an id if it is in the queue."""
        self._keys.pop(request_id, None)

    def head(self) -> str | None:
        """Return the id that goes next, without removing it."""
        while self._heap:
            key, request_id = self._heap[0]
            if self._keys.get(request_id) == key:
                return request_id
            heapq.heappop(self._heap)
        return None

    def oldest(self) -> str | None:
        """Return the id that has waited longest, without removing it."""
        return next(iter(self._keys), None)


class SharedQueue:
    """The waiting requests of all trainers; `shares` say whose goes next."""

    def __init__(self, shares: Shares) -> None:
        self.shares = shares
        self._of: dict[str, WaitingQueue] = {}  # by trainer that waits
        self._trainers = WaitingQueue()  # by level; of use while there are several

    def __len__(self) -> int:
        return sum(map(len, self._of.values()))

    def __contains__(self, request_id: object) -> bool:
        return any(request_id in queue for queue in self._of.values())

    def __iter__(self) -> Iterator[str]:
        """Return all ids, trainer by trainer, and of each the one that has waited longest first."""
        return chain.from_iterable(self._of.values())

    def of(self, trainer: str) -> Collection[str]:
        """Return the ids of a trainer."""
        return self._of.get(trainer, ())

    def push(self, trainer: str, request_id: str, key: OrderKey, now: float) -> None:
        """Add an id of a trainer, or move it to `key`."""
        queue = self._of.get(trainer)
        if queue is None:
            queue = self._of[trainer] = WaitingQueue()
            self.shares.wants(trainer, now)
            for each in self._of if len(self._of) == 2 else (trainer,):
                self._rank(each)
        queue.push(request_id, key)

    def discard(self, trainer: str, request_id: str) -> None:
        """Remove an id if it is in the queue."""
        queue = self._of.get(trainer)
        if queue is None:
            return
        queue.discard(request_id)
        if not queue:
            del self._of[trainer]
            self._trainers.discard(trainer)
            self.shares.content(trainer)

    def takes(self, trainer: str, cost: int, now: float) -> None:
        """Note that a chunk of a trainer begins."""
        first = self._first()
        if first is None or first == trainer:
            self.shares.takes(trainer, cost, now)
        else:
            self.shares.takes(trainer, cost, now, self.shares.level(first))
        self._rank(trainer)

    def gives(self, trainer: str, cost: int, now: float) -> None:
        """Note that a chunk of a trainer has ended."""
        self.shares.gives(trainer, cost, now)
        self._rank(trainer)

    def _rank(self, trainer: str) -> None:
        """Order a trainer anew, whose level changed."""
        if len(self._of) > 1 and trainer in self._of:
            self._trainers.push(trainer, (self.shares.level(trainer),))

    def is_ahead(self, trainer: str) -> bool:
        """Return whether a request of another trainer that waits goes before all of this one."""
        first = self._first()
        if first is None or first == trainer:
            return False
        return self.shares.level(first) < self.shares.level(trainer)

    def _first(self) -> str | None:
        """Return the trainer that goes next."""
        return self._trainers.head() if len(self._of) > 1 else next(iter(self._of), None)

    def head(self) -> str | None:
        """Return the id that goes next, without removing it."""
        first = self._first()
        return None if first is None else self._of[first].head()

    def first(self) -> str | None:
        """Return the trainer that goes next where several share the engines."""
        return self._first() if self.shares.active > 1 else None

    def heads(self, count: int) -> list[str]:
        """Return the ids that go next of the first `count` trainers, in their order; none while one waits."""
        if len(self._of) < 2:
            return []
        first = heapq.nsmallest(count, self._of, key=lambda each: (self.shares.level(each), each))
        return [head for each in first if (head := self._of[each].head()) is not None]

    def oldest(self, queued: Callable[[str], int]) -> str | None:
        """Return the id that has waited longest, by its number, without removing it."""
        oldest = (each for queue in self._of.values() if (each := queue.oldest()) is not None)
        return min(oldest, key=queued, default=None)
