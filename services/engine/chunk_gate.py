"""Admits chunks to vLLM only when the free KV blocks cover their worst case, so that none is preempted.

The buffer places a chunk where, by its own count, there is room. But saves to the KV pool pin blocks, and
the buffer learns of these only with the next status report. So the engine checks again: a chunk waits in a
queue until the blocks that are really free cover all that it and all started chunks can still take.

Invariants (tests/property/test_chunk_gate.py asserts them on vLLM's allocator):
- as long as only started chunks take free blocks, each gets all it may ever need: none is preempted,
  whatever stays pinned after a chunk has ended;
- first come, first served: a small chunk never overtakes a large one, so each that fits the empty engine
  starts once those before it have ended and pins are released.
"""

from __future__ import annotations

from collections.abc import Callable


class ChunkGate:
    """The queued and the started chunks, with the blocks that each may need at worst.

    Names are the backend's own; blocks are `Capacity.blocks_for` of the chunk. Call `enter` for a new
    chunk, `leave` for one that ended or was dropped, and `start` before each step.
    """

    def __init__(self) -> None:
        self._queue: dict[str, int] = {}
        self._started: dict[str, int] = {}

    @property
    def waiting(self) -> int:
        """Queued chunks. They only start when the engine steps, so it has work while there are any."""
        return len(self._queue)

    def enter(self, name: str, blocks: int) -> None:
        """Queue a chunk. It must fit the empty engine, or it would block the queue for ever."""
        self._queue[name] = blocks

    def leave(self, name: str) -> None:
        """Forget a queued or started chunk that ended or was dropped; unknown ones are ignored."""
        self._queue.pop(name, None)
        self._started.pop(name, None)

    def start(self, free_blocks: int, held: Callable[[str], int]) -> list[str]:
        """Return the chunks that may start now, in order; from now on they count as started.

        `free_blocks`: those that the allocator could give out, including cached ones without a reference
        (vLLM: `block_pool.get_num_free_blocks()`). `held(name)`: blocks in a started chunk's block table,
        including shared ones, 0 before its first step (vLLM: the length of its `req_to_blocks` list). Both
        as of between two steps.
        """
        if not self._queue:
            return []
        spare = free_blocks - sum(max(0, most - held(name)) for name, most in self._started.items())
        names = []
        for name, blocks in self._queue.items():
            if blocks > spare:
                break
            spare -= blocks
            names.append(name)
        for name in names:
            self._started[name] = self._queue.pop(name)
        return names
