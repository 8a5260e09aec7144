"""The instances as policies see them: what each can hold, and what is promised there.

Invariants:
- an instance's books are the sums of what was reserved and not yet released;
- arrays, rows in the order of names, say what the books say; questions are answered from them in one
  pass, quickest in a full fleet: a buffer asks several thousand times a second.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from seer.common.types import Capacity

_CHUNK = 2**40  # a chunk more is a greater load than any number of free blocks less
_NEVER = 2**62  # more than any number of blocks, any load


@dataclass(slots=True)
class InstanceView:
    """An instance as the books show it: what is promised to running chunks counts as used.

    Of one that is in a `Fleet`, only the fleet changes the books.
    """

    name: str
    capacity: Capacity
    chunks: int = 0
    reserved_blocks: int = 0
    pinned_blocks: int = 0
    closed: bool = False  # to new chunks

    @property
    def free_blocks(self) -> int:
        """Blocks that no running chunk was promised and no pool save pins."""
        return self.capacity.kv_blocks - self.reserved_blocks - self.pinned_blocks

    def has_room(self, context: int, chunk: int) -> bool:
        """Say whether a chunk's worst case fits now."""
        capacity = self.capacity  # `capacity.holds`, but for blocks that are free
        return (
            not self.closed
            and self.chunks < capacity.max_num_seqs
            and context + chunk <= capacity.max_model_len
            and capacity.blocks_for(context, chunk) <= self.free_blocks
        )


class Fleet(Mapping[str, InstanceView]):
    """All living instances by name."""

    def __init__(self, instances: Iterable[InstanceView] = ()) -> None:
        self.chunks = 0
        self._views: dict[str, InstanceView] = {}
        self._names: list[str] = []
        self._capacities: Counter[Capacity] = Counter()
        self._rows: dict[str, int] = {}
        self._kinds: list[Capacity] = []
        self._kind = np.zeros(0, dtype=np.intp)  # of each instance, its place in `_kinds`
        self._load = np.zeros(0, dtype=np.int64)  # chunks, then blocks that are not free
        self._room = np.zeros(0, dtype=np.int64)  # free blocks; -1 without a free seat
        self._seats = np.zeros(0, dtype=np.int64)
        for instance in instances:
            self._enter(instance)
        self._lay_out()

    def __getitem__(self, name: str) -> InstanceView:
        return self._views[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    @property
    def names(self) -> Sequence[str]:
        """All names, sorted."""
        return self._names

    @property
    def capacities(self) -> Iterable[Capacity]:
        """The different capacities."""
        return self._capacities

    # --- the books -----------------------------------------------------------------------

    def add(self, instance: InstanceView) -> None:
        """Take in an instance; its name must be new."""
        self._enter(instance)
        self._lay_out()

    def remove(self, *names: str) -> None:
        """Let go of instances and all that was promised there."""
        for name in names:
            instance = self._views.pop(name)
            del self._names[bisect_left(self._names, name)]
            self._capacities -= Counter([instance.capacity])
            self.chunks -= instance.chunks
        self._lay_out()

    def reserve(self, name: str, blocks: int) -> None:
        """Promise blocks to one more chunk."""
        self._book(self._views[name], 1, blocks)

    def release(self, name: str, blocks: int) -> None:
        """Take back what one chunk was promised."""
        self._book(self._views[name], -1, -blocks)

    def pin(self, name: str, blocks: int) -> None:
        """Note how many blocks saves to the pool hold: what an engine says, as far as it can be true."""
        instance = self._views[name]
        instance.pinned_blocks = min(max(blocks, 0), instance.capacity.kv_blocks)
        self._write(self._rows[name], instance)

    def close(self, name: str, closed: bool = True) -> None:
        """Have an instance take no more chunks, or take them again."""
        instance = self._views[name]
        instance.closed = closed
        self._write(self._rows[name], instance)

    def _book(self, instance: InstanceView, chunks: int, blocks: int) -> None:
        instance.chunks += chunks
        instance.reserved_blocks += blocks
        self.chunks += chunks
        self._write(self._rows[instance.name], instance)

    def _enter(self, instance: InstanceView) -> None:
        self._views[instance.name] = instance
        insort(self._names, instance.name)
        self._capacities[instance.capacity] += 1
        self.chunks += instance.chunks

    def _lay_out(self) -> None:
        """Make the arrays anew: instances join and leave rarely."""
        self._rows = {name: row for row, name in enumerate(self._names)}
        self._kinds = list(self._capacities)
        places = {capacity: place for place, capacity in enumerate(self._kinds)}
        self._kind = np.array([places[self._views[name].capacity] for name in self._names], dtype=np.intp)
        self._load, self._room, self._seats = np.zeros((3, len(self._names)), dtype=np.int64)
        for name, row in self._rows.items():
            self._write(row, self._views[name])

    def _write(self, row: int, instance: InstanceView) -> None:
        free = instance.free_blocks
        seats = 0 if instance.closed else instance.capacity.max_num_seqs - instance.chunks
        self._load[row] = instance.chunks * _CHUNK - free
        self._room[row] = free if seats > 0 else -1
        self._seats[row] = seats

    # --- questions -----------------------------------------------------------------------

    def holding(self, context: int, chunk: int) -> Sequence[str]:
        """Return the names of those that could hold a chunk if they were empty, sorted."""
        able = [capacity for capacity in self._capacities if capacity.holds(context, chunk)]
        if len(able) == len(self._capacities):
            return self._names
        return [name for name in self._names if self._views[name].capacity in able]

    def has_room(self, name: str, context: int, chunk: int) -> bool:
        """Say whether this instance lives and has room for a chunk's worst case."""
        instance = self._views.get(name)
        return instance is not None and instance.has_room(context, chunk)

    def emptiest(self, context: int, chunk: int) -> InstanceView | None:
        """Return the one with the fewest chunks, then most free blocks, of those that have room."""
        needs = [
            capacity.blocks_for(context, chunk) if context + chunk <= capacity.max_model_len else _NEVER
            for capacity in self._kinds
        ]
        if len(needs) == 1:
            return self._least_loaded(self._room >= needs[0])
        return self._least_loaded(self._room >= np.array(needs, dtype=np.int64)[self._kind])

    def least_loaded(self, context: int, chunk: int) -> InstanceView | None:
        """Return the one with the fewest chunks that has a seat left and could hold this one if empty."""
        holds = np.array([capacity.holds(context, chunk) for capacity in self._kinds], dtype=np.bool_)
        return self._least_loaded((self._seats > 0) & holds[self._kind])

    def _least_loaded(self, able: NDArray[np.bool_]) -> InstanceView | None:
        rows = able.nonzero()[0]  # few in a full fleet, which is where time counts
        if not rows.size:
            return None
        return self._views[self._names[rows[self._load[rows].argmin()]]]  # the first by name among equals
