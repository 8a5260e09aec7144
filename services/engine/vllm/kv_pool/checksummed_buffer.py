"""Host memory through which KV blocks pass between the engine and the pool.

Invariants:
- the pool never touches the engine's KV: a call that hangs, and goes on when its blocks belong to other
  requests, reads and writes its slots here alone, and these are not reused before it has returned;
- a block is saved with a checksum over its bytes and its key, and loaded only if the checksum is right:
  bytes that are damaged, incomplete or another key's are a miss.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import torch
import xxhash

from seer.services.engine.vllm.kv_pool.block_copies import CHECKSUM_BYTES, DeviceCopies, HostCopies, KvRegions


class StagingBuffer:
    """`slots` rows of `CHECKSUM_BYTES` and `block_bytes` of data each, in host memory."""

    def __init__(self, slots: int, block_bytes: int, regions: KvRegions) -> None:
        on_device = regions.device.type != "cpu"
        self._rows = torch.zeros(
            (slots, CHECKSUM_BYTES + block_bytes), dtype=torch.uint8, pin_memory=on_device
        )
        self._regions = regions
        self.copies = DeviceCopies(self._rows, regions) if on_device else HostCopies(self._rows)
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
            self._free = sorted([*self._free, *slots])  # neighbouring rows are copied at once
            self._changed.notify_all()

    def addresses(self, slots: Sequence[int]) -> list[int]:
        """Return where each slot's row begins."""
        return [self.address + slot * self._rows.shape[1] for slot in slots]

    def copy_in(self, slots: Sequence[int], keys: Sequence[str], blocks: Sequence[Sequence[int]]) -> None:
        """Copy KV blocks, each a list of its parts' addresses, into slots, with their checksums."""
        self.copies.to_rows(slots, self._regions.blocks(blocks))
        for slot, key in zip(slots, keys, strict=True):
            self._bytes[slot, :CHECKSUM_BYTES] = _checksum(self._bytes[slot, CHECKSUM_BYTES:], key)

    def copy_out(
        self, slots: Sequence[int], keys: Sequence[str], blocks: Sequence[Sequence[int]]
    ) -> list[bool]:
        """Copy slots whose checksum is right to their KV blocks; return which were right."""
        valid = [self._is_valid(slot, key) for slot, key in zip(slots, keys, strict=True)]
        right = [(slot, block) for slot, block, good in zip(slots, blocks, valid, strict=True) if good]
        if right:
            self.copies.to_blocks([slot for slot, _ in right], self._regions.blocks([b for _, b in right]))
        return valid

    def _is_valid(self, slot: int, key: str) -> bool:
        checksum, data = np.split(self._bytes[slot], [CHECKSUM_BYTES])
        return bool((checksum == _checksum(data, key)).all())


def _checksum(data: np.ndarray, key: str) -> np.ndarray:
    digest = xxhash.xxh3_128_digest(data.data, seed=xxhash.xxh3_64_intdigest(key.encode()))
    return np.frombuffer(digest, np.uint8)
