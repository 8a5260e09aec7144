"""vLLM V1's scheduler and block allocator, in counts: who runs, who waits, who is preempted.

It follows `vllm/v1/core/sched/scheduler.py` (schedule) and `kv_cache_manager.py` (allocate_slots)
of vLLM 0.32 without a watermark: first come, first served; a waiting sequence is admitted when
all tokens it has fit; a running one that finds no block preempts the last admitted, which loses
its KV, goes to the head of the queue and is prefilled again; nothing is admitted in a step that
preempted. A sequence's blocks are not reused after it ends, and a prefill takes one step.

Invariants:
- blocks held by running sequences plus free blocks are always the usable blocks, and none of
  either is negative;
- at most `max_num_seqs` sequences run; each holds ceil((tokens + 1 lookahead) / block) blocks when
  its step runs, so `Capacity.blocks_for` bounds what it ever holds;
- the first sequence in order of admission is never preempted, so work always advances.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

LOOKAHEAD_SLOTS = 1
"""Slot for the token that the step samples, beyond the tokens whose KV it computes."""


@dataclass(slots=True, eq=False)
class Sequence:
    """One chunk: `length` tokens now, `end` tokens when it is over."""

    name: str
    length: int
    end: int
    blocks: int = 0
    preemptions: int = 0


@dataclass(frozen=True, slots=True)
class Step:
    """What one call of `KvModel.step` did: every sequence in `ran` got `steps` tokens.

    `prefilled` counts context tokens computed on admission, recomputed ones included.
    """

    ran: list[Sequence]
    ended: list[Sequence]
    steps: int
    prefilled: int


@dataclass(slots=True)
class KvModel:
    """`blocks` are usable ones: vLLM allocates one more, its null block."""

    blocks: int
    block_size: int
    max_num_seqs: int
    running: list[Sequence] = field(default_factory=list)
    waiting: deque[Sequence] = field(default_factory=deque)
    preemptions: int = 0
    free: int = field(init=False)

    def __post_init__(self) -> None:
        self.free = self.blocks

    def needed(self, length: int) -> int:
        """Return the blocks that a step of a sequence of `length` tokens needs."""
        return -(-(length + LOOKAHEAD_SLOTS) // self.block_size)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. Raises `ValueError` for one that could never run."""
        if not sequence.length < sequence.end or self.needed(sequence.end - 1) > self.blocks:
            raise ValueError(f"{sequence} does not fit {self.blocks} blocks of {self.block_size}")
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Drop a sequence, wherever it is; an unknown one is ignored."""
        if sequence in self.running:
            self.running.remove(sequence)
            self._release(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def step(self, most: int = 1) -> Step:
        """Run one step, and up to `most` - 1 more as long as these change nothing but lengths."""
        before = self.preemptions
        self._grow()
        quiet = self.preemptions == before
        prefilled = self._admit() if quiet else 0
        steps = self._steps_without_events(most) if quiet and most > 1 else 1
        ran, ended = list(self.running), []
        for sequence in ran:
            sequence.length += steps
            if sequence.length >= sequence.end:
                ended.append(sequence)
        for sequence in ended:
            self.running.remove(sequence)
            self._release(sequence)
        return Step(ran, ended, steps, prefilled)

    def _grow(self) -> None:
        position = 0
        while position < len(self.running):
            sequence = self.running[position]
            missing = self.needed(sequence.length) - sequence.blocks
            while missing > self.free:
                victim = self.running.pop()
                self._release(victim)
                victim.preemptions += 1
                self.preemptions += 1
                self.waiting.appendleft(victim)
                if victim is sequence:
                    return
            self._take(sequence, missing)
            position += 1

    def _admit(self) -> int:
        prefilled = 0
        while self.waiting and len(self.running) < self.max_num_seqs:
            sequence = self.waiting[0]
            missing = self.needed(sequence.length)
            if missing > self.free:
                break
            self.running.append(self.waiting.popleft())
            self._take(sequence, missing)
            prefilled += sequence.length
        return prefilled

    def _steps_without_events(self, most: int) -> int:
        # k more tokens cost a sequence at most ceil(k / block_size) more blocks; growth after the
        # first step is taken by the next call's _grow, so room for all of it must exist now.
        if not self.running:
            return 1
        shortest = min(sequence.end - sequence.length for sequence in self.running)
        covered = self.free // len(self.running) * self.block_size
        return max(1, min(most, shortest, covered))

    def _take(self, sequence: Sequence, blocks: int) -> None:
        sequence.blocks += blocks
        self.free -= blocks

    def _release(self, sequence: Sequence) -> None:
        self.free += sequence.blocks
        sequence.blocks = 0
