"""The instances as policies see them: what each can hold, and what is promised there.

Invariants:
- an instance's books are the sums of what was reserved and not yet released;
- questions are answered from sorted indices, not by looking at every instance: a buffer asks
  several thousand times a second, of hundreds of instances.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from seer.common.types import Capacity

_Load = tuple[int, int, str]  # chunks, free blocks below 0, name
_Room = tuple[int, str]  # free blocks if a seat is, name


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

    @property
    def free_blocks(self) -> int:
        """Blocks that no running chunk was promised and no pool save pins."""
        return self.capacity.kv_blocks - self.reserved_blocks - self.pinned_blocks

    def has_room(self, context: int, chunk: int) -> bool:
        """Say whether a chunk's worst case fits now."""
        capacity = self.capacity  # `capacity.holds`, but for blocks that are free
        return (
            self.chunks < capacity.max_num_seqs
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
        self._by_load: list[_Load] = []
        self._by_room: list[_Room] = []
        self._keys: dict[str, tuple[_Load, _Room]] = {}  # as they stand in both
        for instance in instances:
            self.add(instance)

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
        self._views[instance.name] = instance
        insort(self._names, instance.name)
        self._capacities[instance.capacity] += 1
        self.chunks += instance.chunks
        self._index(instance)

    def remove(self, name: str) -> None:
        """Let go of an instance and all that was promised there."""
        instance = self._views[name]
        self._unindex(instance)
        del self._views[name], self._names[bisect_left(self._names, name)]
        self._capacities -= Counter([instance.capacity])
        self.chunks -= instance.chunks

    def reserve(self, name: str, blocks: int) -> None:
        """Promise blocks to one more chunk."""
        self._book(self._views[name], 1, blocks)

    def release(self, name: str, blocks: int) -> None:
        """Take back what one chunk was promised."""
        self._book(self._views[name], -1, -blocks)

    def pin(self, name: str, blocks: int) -> None:
        """Note how many blocks saves to the pool hold."""
        instance = self._views[name]
        if instance.pinned_blocks != blocks:
            self._unindex(instance)
            instance.pinned_blocks = blocks
            self._index(instance)

    def _book(self, instance: InstanceView, chunks: int, blocks: int) -> None:
        self._unindex(instance)
        instance.chunks += chunks
        instance.reserved_blocks += blocks
        self.chunks += chunks
        self._index(instance)

    def _index(self, instance: InstanceView) -> None:
        free, name = instance.free_blocks, instance.name
        load = (instance.chunks, -free, name)
        room = (free if instance.chunks < instance.capacity.max_num_seqs else -1, name)
        self._keys[name] = (load, room)
        insort(self._by_load, load)
        insort(self._by_room, room)

    def _unindex(self, instance: InstanceView) -> None:
        load, room = self._keys.pop(instance.name)
        del self._by_load[bisect_left(self._by_load, load)]
        del self._by_room[bisect_left(self._by_room, room)]

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
        if not self._names:
            return None
        least = min([capacity.blocks_for(context, chunk) for capacity in self._capacities])
        first = bisect_left(self._by_room, (least, ""))
        # Of n instances f have blocks: either those f are looked at or, from the least loaded on, n / f.
        if (len(self._by_room) - first) ** 2 <= len(self._by_room):
            names = [name for _, name in self._by_room[first:]]
            loads = [self._keys[name][0] for name in names if self._views[name].has_room(context, chunk)]
            return self._views[min(loads)[2]] if loads else None
        for _, _, name in self._by_load:
            if self._views[name].has_room(context, chunk):
                return self._views[name]
        return None

    def least_loaded(self, context: int, chunk: int) -> InstanceView | None:
        """Return the one with the fewest chunks that has a seat left and could hold this one if empty."""
        for chunks, _, name in self._by_load:
            capacity = self._views[name].capacity
            if chunks < capacity.max_num_seqs and capacity.holds(context, chunk):
                return self._views[name]
        return None
