"""The instances as policies see them: what each can hold, and what is reserved there.

Invariants:
- an instance's counts are the sums of what was reserved and not yet released;
- an instance of data-parallel ranks has room for what its emptiest rank has room for: chunks are counted on
  ranks as the engine places them, if it has heard the same in the same order;
- arrays, rows in the order of names, hold the same counts; queries read them in one pass, fastest in a
  full fleet: a buffer makes several thousand a second.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from seer.common.policy.ranks import RankPlacement
from seer.common.types import Capacity

_CHUNK = 2**40  # weight of a chunk in `_load`: more than that of any number of blocks
_NEVER = 2**62  # more blocks than any instance has

SPARE_PART = 256
"""At most one in so many of a rank's blocks is left free for the chunks that run there."""


@dataclass(slots=True)
class InstanceView:
    """An instance, with what its running chunks have reserved counted as used.

    Only the `Fleet` that an instance is in changes its counts.
    """

    name: str
    capacity: Capacity
    chunks: int = 0
    reserved_blocks: int = 0
    pinned_blocks: int = 0
    closed: bool = False  # takes no new chunks
    ranks: RankPlacement | None = None  # of several data-parallel ones
    placed: dict[str, int] = field(default_factory=dict)  # rank of each request that runs

    def __post_init__(self) -> None:
        """Divide the blocks among data-parallel ranks, if there are several and no snapshot has them."""
        if (parts := self.capacity.parts) > 1 and self.ranks is None:
            seats = max(1, self.capacity.max_num_seqs // parts)
            self.ranks = RankPlacement.of(parts, self.capacity.kv_blocks // parts, seats)

    @property
    def free_blocks(self) -> int:
        """Blocks that no running chunk has reserved and no save to the KV pool pins."""
        return self.capacity.kv_blocks - self.reserved_blocks - self.pinned_blocks

    @property
    def room(self) -> int:
        """Blocks that one chunk may take."""
        return self.free_blocks if self.ranks is None else min(self.free_blocks, self.ranks.room)

    def has_room(self, context: int, chunk: int, image_tokens: int = 0) -> bool:
        """Return whether a chunk's worst case fits now; `image_tokens` as in `Capacity.holds`."""
        capacity = self.capacity
        return (
            not self.closed
            and self.chunks < capacity.max_num_seqs
            and capacity.holds(context, chunk, image_tokens)
            and capacity.blocks_for(context, chunk) <= self.room
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
        self._kind = np.zeros(0, dtype=np.intp)  # index into `_kinds` of each instance
        self._load = np.zeros(0, dtype=np.int64)  # sorts by chunks, then by blocks that are not free
        self._room = np.zeros(0, dtype=np.int64)  # blocks for one chunk; -1 if no chunk more may run
        self._seats = np.zeros(0, dtype=np.int64)
        for instance in instances:
            self._insert(instance)
        self._rebuild()

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

    # --- changes -------------------------------------------------------------------------

    def add(self, instance: InstanceView) -> None:
        """Add an instance; its name must be new."""
        self._insert(instance)
        self._rebuild()

    def remove(self, *names: str) -> None:
        """Remove instances, with all that is reserved there."""
        for name in names:
            instance = self._views.pop(name)
            del self._names[bisect_left(self._names, name)]
            self._capacities -= Counter([instance.capacity])
            self.chunks -= instance.chunks
        self._rebuild()

    def reserve(self, name: str, blocks: int, request_id: str) -> None:
        """Reserve blocks for one more chunk, of a request that runs nowhere."""
        instance = self._views[name]
        if instance.ranks is not None:
            instance.placed[request_id] = instance.ranks.place(request_id, blocks)
        self._count(instance, 1, blocks)

    def release(self, name: str, blocks: int, request_id: str) -> None:
        """Release what one chunk had reserved."""
        instance = self._views[name]
        if instance.ranks is not None:
            instance.ranks.end(instance.placed.pop(request_id), blocks)
        self._count(instance, -1, -blocks)

    def pin(self, name: str, blocks: int) -> None:
        """Set how many blocks saves to the KV pool hold, as an engine reports it, within what is possible."""
        instance = self._views[name]
        instance.pinned_blocks = min(max(blocks, 0), instance.capacity.kv_blocks)
        self._write(self._rows[name], instance)

    def close(self, name: str, closed: bool = True) -> None:
        """Let an instance take no new chunks, or take them again."""
        instance = self._views[name]
        instance.closed = closed
        self._write(self._rows[name], instance)

    def _count(self, instance: InstanceView, chunks: int, blocks: int) -> None:
        instance.chunks += chunks
        instance.reserved_blocks += blocks
        self.chunks += chunks
        self._write(self._rows[instance.name], instance)

    def _insert(self, instance: InstanceView) -> None:
        self._views[instance.name] = instance
        insort(self._names, instance.name)
        self._capacities[instance.capacity] += 1
        self.chunks += instance.chunks

    def _rebuild(self) -> None:
        """Rebuild the arrays: instances join and leave rarely."""
        self._rows = {name: row for row, name in enumerate(self._names)}
        self._kinds = list(self._capacities)
        places = {capacity: place for place, capacity in enumerate(self._kinds)}
        self._kind = np.array([places[self._views[name].capacity] for name in self._names], dtype=np.intp)
        self._load, self._room, self._seats = np.zeros((3, len(self._names)), dtype=np.int64)
        for name, row in self._rows.items():
            self._write(row, self._views[name])

    def _write(self, row: int, instance: InstanceView) -> None:
        free, room = instance.free_blocks, instance.room
        seats = 0 if instance.closed else instance.capacity.max_num_seqs - instance.chunks
        self._load[row] = instance.chunks * _CHUNK - free
        self._room[row] = room if seats > 0 else -1
        self._seats[row] = seats

    # --- queries -------------------------------------------------------------------------

    def holding(self, context: int, chunk: int, image_tokens: int = 0) -> Sequence[str]:
        """Return the names of those that could hold a chunk if they were empty, sorted."""
        able = [capacity for capacity in self._capacities if capacity.holds(context, chunk, image_tokens)]
        if len(able) == len(self._capacities):
            return self._names
        return [name for name in self._names if self._views[name].capacity in able]

    def has_room(self, name: str, context: int, chunk: int, image_tokens: int = 0) -> bool:
        """Return whether this instance is there and has room for a chunk's worst case."""
        instance = self._views.get(name)
        return instance is not None and instance.has_room(context, chunk, image_tokens)

    def emptiest(
        self, context: int, chunk: int, spare: int = 0, image_tokens: int = 0
    ) -> InstanceView | None:
        """Return the one with the fewest chunks, then most free blocks, of those that have room.

        Where chunks run, room for `spare` more tokens must be left, at most for one in `SPARE_PART` of all.
        """
        needs = [
            capacity.blocks_for(context, chunk) if capacity.holds(context, chunk, image_tokens) else _NEVER
            for capacity in self._kinds
        ]
        parts = [kind.kv_blocks // kind.parts for kind in self._kinds]
        more = [
            min(spare // kind.block_size, part // SPARE_PART)
            for kind, part in zip(self._kinds, parts, strict=True)
        ]
        if len(needs) == 1:
            found = self._least_loaded(self._room >= needs[0] + more[0])
            if found is None and more[0]:
                found = self._least_loaded((self._room >= needs[0]) & (self._load < 0))
            return found
        need = np.array(needs, dtype=np.int64)[self._kind]
        found = self._least_loaded(self._room >= need + np.array(more, dtype=np.int64)[self._kind])
        return found or self._least_loaded((self._room >= need) & (self._load < 0))

    def least_loaded(self, context: int, chunk: int, image_tokens: int = 0) -> InstanceView | None:
        """Return the one with the fewest chunks of those below `max_num_seqs` that could hold it if empty."""
        holds = np.array([each.holds(context, chunk, image_tokens) for each in self._kinds], dtype=np.bool_)
        return self._least_loaded((self._seats > 0) & holds[self._kind])

    def _least_loaded(self, able: NDArray[np.bool_]) -> InstanceView | None:
        rows = able.nonzero()[0]  # few in a full fleet, which is where time counts
        if not rows.size:
            return None
        return self._views[self._names[rows[self._load[rows].argmin()]]]  # the first by name among equals
