"""An instance of data-parallel ranks: each has KV and requests of its own, and all step together.

A step takes as long as one of an engine that has the requests of all ranks, and as much KV to read on each as
the fullest has: experts are shared, attention is not. A rank without a request runs a dummy.

Invariants (tests/property/test_sim_ranks.py asserts them):
- one rank is as `Instance`; more ranks never end sooner;
- KV in use on a rank never exceeds the rank's share;
- under a policy with admission a chunk begins once its worst case fits its rank, so none is preempted.

Chunks are placed by production's `common/policy/ranks.py`. What one rank has cached counts as cached on all.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from seer.common.policy.ranks import RankPlacement
from seer.sim.drafting import Drafting
from seer.sim.instance import EPSILON, Chunk, Instance
from seer.sim.workload import Model


class RankedInstance(Instance):
    """See the module's docstring. `gates`: the policy has admission.

    `steps` and `dummies` count, over all ranks, steps, and those of ranks without a request.
    """

    def __init__(
        self, name: str, model: Model, drafting: Drafting | None, ranks: int, *, gates: bool
    ) -> None:
        super().__init__(name, model, drafting)
        self._ranks, self._gates = ranks, gates
        self._tokens, self._seats = model.kv_tokens / ranks, max(1, model.max_num_seqs // ranks)
        blocks = model.kv_tokens // ranks // model.block_size
        self._placement = RankPlacement.of(ranks, blocks, self._seats)
        self._places: dict[str, int] = {}
        self._queues: list[deque[Chunk]] = [deque() for _ in range(ranks)]
        self._unbooked = [blocks] * ranks  # of the chunks that have begun
        self._kv = np.zeros(ranks)
        self._kinds = np.zeros((ranks, len(self._counts)))  # running chunks by class
        self._gains = np.zeros(ranks)
        self.steps = self.dummies = 0.0

    @property
    def waiting(self) -> int:
        """See `Instance.waiting`."""
        return sum(map(len, self._queues))

    def _blocks(self, chunk: Chunk) -> int:
        return -(-chunk.most // self.model.block_size)

    def _queue_of(self, chunk: Chunk) -> deque[Chunk]:
        if chunk.request_id not in self._places:
            rank = self._placement.place(chunk.request_id, self._blocks(chunk))
            self._places[chunk.request_id] = rank
        return self._queues[self._places[chunk.request_id]]

    def _admit(self) -> None:
        for rank, queue in enumerate(self._queues):
            while queue and self._fits(rank, queue[0]):
                self._begin(queue.popleft())
        self._evict()
        self._up_to_date = False

    def _fits(self, rank: int, chunk: Chunk) -> bool:
        running = self._kinds[rank].sum()
        if running >= self._seats or (self._gates and self._blocks(chunk) > self._unbooked[rank]):
            return False
        return bool(chunk.length + 1 + running <= self._tokens - self._kv[rank] + EPSILON)

    def _begin(self, chunk: Chunk) -> None:
        super()._begin(chunk)
        rank = self._places[chunk.request_id]
        self._kv[rank] += chunk.length
        self._kinds[rank, chunk.kind] += 1
        self._unbooked[rank] -= self._blocks(chunk)

    def _remove(self, chunk: Chunk) -> None:
        super()._remove(chunk)
        rank = self._places[chunk.request_id]
        self._kinds[rank, chunk.kind] -= 1
        self._kv[rank] = self._kv[rank] - chunk.length if self._kinds[rank].any() else 0.0
        self._unbooked[rank] += self._blocks(chunk)

    def _ended(self, chunk: Chunk) -> None:
        self._placement.end(self._places.pop(chunk.request_id), self._blocks(chunk))

    def _kv_read(self) -> float:
        return self._ranks * float(self._kv.max())

    def _growth(self) -> float:
        self._gains = self._kinds @ np.array(self._rates)
        return self._ranks * float(self._gains[self._kv.argmax()])

    def _steps_to_full(self) -> float:
        used = self._gains > 0
        return float(((self._tokens - self._kv[used]) / self._gains[used]).min())

    def _grow(self, steps: float) -> None:
        super()._grow(steps)
        self._kv += self._gains * steps
        self.steps += self._ranks * steps
        self.dummies += int((self._kinds.sum(axis=1) == 0).sum()) * steps

    def _victim(self) -> Chunk | None:
        full = (self._kv >= self._tokens - EPSILON) & (self._kinds.sum(axis=1) > 1)
        if not full.any():
            return None
        return next(
            chunk for chunk in reversed(self._running.values()) if full[self._places[chunk.request_id]]
        )
