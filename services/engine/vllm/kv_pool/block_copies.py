"""Copies between KV blocks in an engine's memory and rows of host memory.

Invariants (tests/unit/test_kv_copies.py asserts them):
- a device's copies run on streams of their own, in threads whose current device it is: they neither wait for
  the model's later work nor delay it;
- blocks are written only after all work that the model's stream had when loads were last ordered;
- once a copy returns it is done: the pool may read the rows, the model the blocks;
- a device gathers or scatters blocks itself, and neighbouring rows cross the bus in one copy;
- no copy allocates device memory: vLLM fails to sleep if less is free afterwards than before.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import numpy.typing as npt
import torch

CHECKSUM_BYTES = 16
"""Each row begins with so many bytes that are no KV."""

DEVICE_SHARE = 4
"""In each direction a device has memory for one of so many rows; more are copied in several goes."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks of KV: each has a part in every memory [blocks, bytes of a part].

    `numbers` [memories, n]: where the parts of n blocks lie.
    """

    memories: list[torch.Tensor]
    numbers: npt.NDArray[np.int64]


class KvRegions:
    """The engine's KV memory, by the addresses that vLLM's connector has for it.

    Addresses only identify blocks here: after `sleep` the memory lies elsewhere. What is kept `beside` the KV
    of blocks, bytes [blocks, bytes of a block], is a last part of each.
    """

    def __init__(
        self, regions: Iterable[tuple[int, torch.Tensor]], beside: torch.Tensor | None = None
    ) -> None:
        """Take (address, bytes [blocks, block bytes]) of each region; all lie on one device."""
        self._regions = sorted(regions, key=lambda region: region[0])
        self._beside = beside
        self._starts = [start for start, _ in self._regions]

    @property
    def device(self) -> torch.device:
        """Where the KV lies."""
        return self._regions[0][1].device

    def __len__(self) -> int:
        return len(self._regions) + (self._beside is not None)

    def blocks(self, addresses: Sequence[Sequence[int]]) -> Blocks:
        """Return the blocks that these addresses of parts [n][parts] mean. Raises `ValueError`."""
        parts = np.asarray(addresses, np.int64).T
        found = [self._regions[bisect_right(self._starts, first) - 1] for first in addresses[0]]
        memories = [memory for _, memory in found]
        starts = np.array([[start] for start, _ in found])
        numbers, rest = np.divmod(parts - starts, np.array([[memory.shape[1]] for memory in memories]))
        if rest.any() or numbers.min() < 0 or (numbers >= [[len(memory)] for memory in memories]).any():
            raise ValueError("these addresses are not blocks of one KV region")
        if self._beside is not None:
            memories, numbers = [*memories, self._beside], np.concatenate((numbers, numbers[:1]))
        return Blocks(memories, numbers)


class HostCopies:
    """Moves blocks of KV in host memory. `rows` [slots, `CHECKSUM_BYTES` and a block's bytes]."""

    def __init__(self, rows: torch.Tensor) -> None:
        self._rows = rows

    def to_rows(self, slots: Sequence[int], blocks: Blocks) -> None:
        """Copy blocks into rows; `slots` are numbers of rows, one for each block."""
        index = torch.tensor(slots)
        for memory, numbers, part in _parts(blocks):
            self._rows[index, part] = memory[torch.from_numpy(numbers)]

    def to_blocks(self, slots: Sequence[int], blocks: Blocks) -> None:
        """Copy rows into blocks."""
        index = torch.tensor(slots)
        for memory, numbers, part in _parts(blocks):
            memory[torch.from_numpy(numbers)] = self._rows[index, part]

    def loads_ordered(self) -> None:
        """Do nothing: work on the host is done when its call returns."""


class CudaStream:
    """Work of a GPU that is done in order. A thread that uses it has that GPU as its device from then on."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    @contextmanager
    def current(self) -> Iterator[None]:
        """Have this thread give its work to this stream meanwhile."""
        # To go back to device 0 afterwards would open a context there, hundreds of MB, for each rank.
        torch.cuda.set_device(self._device)
        with torch.cuda.stream(self._stream):
            yield

    def mark(self) -> torch.cuda.Event:
        """Return an event after all that the calling thread's current stream was given."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def wait_for(self, event: torch.cuda.Event) -> None:
        """Have later work of this stream wait for an event."""
        self._stream.wait_event(event)

    def synchronize(self) -> None:
        """Wait on the host until all work is done."""
        self._stream.synchronize()


class DeviceCopies:
    """Moves blocks of KV on a device; `rows`, as for `HostCopies`, should be pinned."""

    def __init__(
        self,
        rows: torch.Tensor,
        regions: KvRegions,
        stream: Callable[[torch.device], CudaStream] = CudaStream,
    ) -> None:
        self._rows = rows
        self._saves = _Direction(rows, regions, stream(regions.device))
        self._loads = _Direction(rows, regions, stream(regions.device))
        self._ordered: torch.cuda.Event | None = None

    def to_rows(self, slots: Sequence[int], blocks: Blocks) -> None:
        """Copy blocks into rows. What the blocks hold must have been written: vLLM waits for an event."""
        way = self._saves
        with way.lock, way.stream.current():
            for part in way.goes(len(slots)):
                for memory, numbers, gathered in way.parts(blocks, part):
                    torch.index_select(memory, 0, numbers, out=gathered)
                for row, at in runs(slots[part]):
                    self._rows[row].copy_(way.rows[at], non_blocking=True)
                way.stream.synchronize()

    def to_blocks(self, slots: Sequence[int], blocks: Blocks) -> None:
        """Copy rows into blocks."""
        way = self._loads
        with way.lock, way.stream.current():
            if self._ordered is not None:
                way.stream.wait_for(self._ordered)
            for part in way.goes(len(slots)):
                for row, at in runs(slots[part]):
                    way.rows[at].copy_(self._rows[row], non_blocking=True)
                for memory, numbers, scattered in way.parts(blocks, part):
                    memory.index_copy_(0, numbers, scattered)
                way.stream.synchronize()

    def loads_ordered(self) -> None:
        """Have later `to_blocks` wait for what the calling thread's stream has to do now."""
        self._ordered = self._loads.stream.mark()


class _Direction:
    """A stream, and device memory for rows that pass through; used by one thread at a time."""

    def __init__(self, rows: torch.Tensor, regions: KvRegions, stream: CudaStream) -> None:
        self.lock = threading.Lock()
        self.stream = stream
        most = -(-len(rows) // DEVICE_SHARE)
        self.rows = torch.zeros((most, rows.shape[1]), dtype=torch.uint8, device=regions.device)
        self._numbers = torch.zeros(len(regions) * most, dtype=torch.int64, device=regions.device)
        self._sent = torch.zeros(len(self._numbers), dtype=torch.int64, pin_memory=rows.is_pinned())

    def goes(self, count: int) -> Iterator[slice]:
        """Yield slices of `count` blocks that fit the device's memory."""
        for start in range(0, count, len(self.rows)):
            yield slice(start, min(start + len(self.rows), count))

    def parts(self, blocks: Blocks, part: slice) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Send the numbers of some blocks; yield each memory, the numbers there, and these rows' part.

        The device must have done what it was given earlier.
        """
        numbers = blocks.numbers[:, part]
        count, end = numbers.shape[1], numbers.size
        self._sent.numpy()[:end] = numbers.ravel()
        self._numbers[:end].copy_(self._sent[:end], non_blocking=True)
        on_device = self._numbers[:end].view(numbers.shape)
        for i, (memory, _, columns) in enumerate(_parts(blocks)):
            wide, rows = _wide(memory, self.rows[:count, columns])
            yield wide, on_device[i], rows


def _wide(memory: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both with elements of 8 bytes, if possible: a GPU's thread moves one element."""
    offsets = memory.storage_offset(), rows.storage_offset()
    if any(size % 8 for size in (memory.shape[1], rows.stride(0), *offsets)):
        return memory, rows
    return memory.view(torch.int64), rows.view(torch.int64)


def _parts(blocks: Blocks) -> Iterator[tuple[torch.Tensor, npt.NDArray[np.int64], slice]]:
    """Yield each memory, the blocks' numbers there, and where their bytes lie in a row."""
    start = CHECKSUM_BYTES
    for memory, numbers in zip(blocks.memories, blocks.numbers, strict=True):
        yield memory, numbers, slice(start, start + memory.shape[1])
        start += memory.shape[1]


def runs(slots: Sequence[int]) -> Iterator[tuple[slice, slice]]:
    """Yield neighbouring slots, as a slice of all rows, and their places in `slots`."""
    for _, run in groupby(enumerate(slots), lambda each: each[1] - each[0]):
        places = list(run)
        (at, slot), count = places[0], len(places)
        yield slice(slot, slot + count), slice(at, at + count)
