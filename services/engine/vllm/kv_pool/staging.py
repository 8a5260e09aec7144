"""Host memory through which KV blocks pass between the engine and the pool.

Invariants:
- the pool never touches the engine's KV: a call that hangs, and goes on when its blocks belong to other
  requests, reads and writes its slots here alone, and these are not reused before it has returned;
- a block is saved with a checksum over its bytes and its key, and loaded only if the checksum is right:
  bytes that are damaged, incomplete or another key's are a miss.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterable, Sequence

import numpy as np
import torch
import xxhash

CHECKSUM_BYTES = 16


class KvRegions:
    """The engine's KV memory, by the addresses that vLLM's connector has for it.

    Addresses only identify blocks here: after `sleep` the memory lies elsewhere.
    """

    def __init__(self, regions: Iterable[tuple[int, torch.Tensor]]) -> None:
        """Take (address, bytes [blocks, block bytes]) of each region."""
        self._regions = sorted(regions, key=lambda region: region[0])
        self._starts = [start for start, _ in self._regions]

    def column(self, addresses: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the region that a column of addresses lies in, and the numbers of their blocks [n]."""
        start, memory = self._regions[bisect_right(self._starts, addresses[0]) - 1]
        blocks, rest = np.divmod(np.asarray(addresses) - start, memory.shape[1])
        if rest.any() or blocks.min() < 0 or blocks.max() >= len(memory):
            raise ValueError("these addresses are not blocks of one KV region")
        return memory, torch.from_numpy(blocks).to(memory.device)


class StagingBuffer:
    """`slots` rows of `CHECKSUM_BYTES` and `block_bytes` of data each, in host memory."""

    def __init__(self, slots: int, block_bytes: int) -> None:
        # Pinned where there is a GPU: copies are several times faster.
        self._rows = torch.zeros(
            (slots, CHECKSUM_BYTES + block_bytes), dtype=torch.uint8, pin_memory=torch.cuda.is_available()
        )
        self._bytes = self._rows.numpy()
        self.row_bytes = CHECKSUM_BYTES + block_bytes
        self._free = list(range(slots))
        self._changed = threading.Condition()

    @property
    def address(self) -> int:
        """Where the rows lie."""
        address: int = self._rows.data_ptr()
        return address

    @property
    def size(self) -> int:
        """Bytes of all rows."""
        return int(self._bytes.nbytes)

    @property
    def slots(self) -> int:
        """How many blocks fit at once."""
        return len(self._rows)

    def acquire(self, count: int, *, leave: int, seconds: float) -> list[int]:
        """Return that many slots, as soon as `leave` more are free, too; none after `seconds`."""
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._free) >= count + leave, seconds):
                return []
            taken, self._free = self._free[:count], self._free[count:]
        self._bytes[taken, :CHECKSUM_BYTES] = 0  # so that old contents have no valid checksum
        return taken

    def release(self, slots: Sequence[int]) -> None:
        """Free slots that no call uses any more."""
        with self._changed:
            self._free += slots
            self._changed.notify_all()

    def addresses(self, slots: Sequence[int]) -> list[int]:
        """Return where each slot's row begins."""
        return [self.address + slot * self._rows.shape[1] for slot in slots]

    def copy_in(
        self, slots: Sequence[int], keys: Sequence[str], regions: KvRegions, blocks: Sequence[Sequence[int]]
    ) -> None:
        """Copy KV blocks, each a list of its parts' addresses, into slots, with their checksums."""
        rows = torch.tensor(slots)
        start = CHECKSUM_BYTES
        for column in zip(*blocks, strict=True):
            memory, ids = regions.column(column)
            end = start + memory.shape[1]
            self._rows[rows, start:end] = memory[ids].cpu()
            start = end
        for slot, key in zip(slots, keys, strict=True):
            self._bytes[slot, :CHECKSUM_BYTES] = _checksum(self._bytes[slot, CHECKSUM_BYTES:], key)

    def copy_out(
        self, slots: Sequence[int], keys: Sequence[str], regions: KvRegions, blocks: Sequence[Sequence[int]]
    ) -> list[bool]:
        """Copy slots whose checksum is right to their KV blocks; return which were right."""
        valid = [self._is_valid(slot, key) for slot, key in zip(slots, keys, strict=True)]
        rows = torch.tensor([slot for slot, good in zip(slots, valid, strict=True) if good], dtype=torch.long)
        wanted = [block for block, good in zip(blocks, valid, strict=True) if good]
        start = CHECKSUM_BYTES
        for column in zip(*wanted, strict=True):
            memory, ids = regions.column(column)
            end = start + memory.shape[1]
            memory[ids] = self._rows[rows, start:end].to(memory.device)
            start = end
        if self._rows.is_pinned():
            torch.cuda.current_stream().synchronize()  # the model may read the blocks once this returns
        return valid

    def _is_valid(self, slot: int, key: str) -> bool:
        checksum, data = np.split(self._bytes[slot], [CHECKSUM_BYTES])
        return bool((checksum == _checksum(data, key)).all())


def _checksum(data: np.ndarray, key: str) -> np.ndarray:
    digest = xxhash.xxh3_128_digest(data.data, seed=xxhash.xxh3_64_intdigest(key.encode()))
    return np.frombuffer(digest, np.uint8)
