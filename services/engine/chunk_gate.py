"""Which chunks an engine may start: those whose every block is sure to be there.

The buffer places a chunk where its books show room, but what it knows of blocks that saves to the
KV pool pin is as old as the last report. So the engine looks again, at its real free blocks, and
keeps a chunk in line until they cover what it and all started ones can still take.

Invariants (tests/property/test_chunk_gate.py asserts them on a model of vLLM's allocator, and on vLLM's):
- as long as only started chunks take free blocks, each has all it may ever need: none is preempted,
  whatever stays pinned after a chunk has ended;
- first come, first served: a small chunk does not overtake a large one for ever, so each that fits
  the empty engine starts once those before it have ended and pins are released.
"""

from __future__ import annotations

from collections.abc import Callable


class ChunkGate:
    """The chunks in line and the started ones, with the blocks that each may need at worst.

    Names are the backend's own; blocks are `Capacity.blocks_for` of the chunk. Tell `enter` of a
    chunk that comes, `leave` of one that ended or was dropped, and ask `start` before each step.
    """

    def __init__(self) -> None:
        self._line: dict[str, int] = {}
        self._started: dict[str, int] = {}

    @property
    def waiting(self) -> int:
        """Chunks in line. They end or start only as the engine steps: it has work while there are any."""
        return len(self._line)

    def enter(self, name: str, blocks: int) -> None:
        """Put a chunk at the end of the line: one that fits the empty engine, or it bars it for ever."""
        self._line[name] = blocks

    def leave(self, name: str) -> None:
        """Forget a chunk that ended or was dropped, in line or started; unknown ones are ignored."""
        self._line.pop(name, None)
        self._started.pop(name, None)

    def start(self, free_blocks: int, held: Callable[[str], int]) -> list[str]:
        """Return the chunks that may start now, in order; from now on they count as started.

        `free_blocks`: those that the allocator could give out, cached but unreferenced ones among
        them (vLLM: `block_pool.get_num_free_blocks()`). `held(name)`: blocks in a started chunk's
        table, shared ones among them, 0 before its first step (vLLM: the length of its
        `req_to_blocks` list). Both as they are between two steps.
        """
        if not self._line:
            return []
        spare = free_blocks - sum(max(0, most - held(name)) for name, most in self._started.items())
        names = []
        for name, blocks in self._line.items():
            if blocks > spare:
                break
            spare -= blocks
            names.append(name)
        for name in names:
            self._started[name] = self._line.pop(name)
        return names
