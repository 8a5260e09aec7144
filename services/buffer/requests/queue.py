"""The waiting requests, ordered by a policy's key: an indexed heap, O(log n) a change.

Invariants:
- an id is in the queue at most once; pushing it again with another key moves it;
- `head` is the id with the smallest key, `oldest` the one that has waited longest: a new key does not change
  since when it waits;
- memory is bounded by the number of ids, not of pushes: after a push there are at most `MAX_HEAP_ITEMS` heap
  items for each id.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator

from seer.common.policy.schedule import OrderKey

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
