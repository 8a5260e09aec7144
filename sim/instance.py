"""A fluid model of one engine: all its requests advance together, at the speed of its steps.

Between two events (a chunk arrives, ends or is preempted) only lengths change, so the time of k steps is
k x T + c x R x k² / 2, where T is the first step's time, R the tokens that each step adds, and c the time to
read one token's KV. Steps are not simulated one by one, so a whole rollout takes seconds.

Batching and memory follow vLLM, as in `services/engine/replay/kv_model.py`, which simulates single steps
(tests/property/test_sim_instance.py compares both): first come, first served; a waiting chunk is admitted
when all its tokens fit; when memory is full the last admitted chunk is preempted, goes to the head of the
queue, and is prefilled again.

Invariants (the same test asserts them):
- KV in use never exceeds `kv_tokens`, and is the sum over running chunks;
- every chunk ends at exactly its `end`;
- time never goes back, and the same calls have the same results.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict, deque
from dataclasses import dataclass
from itertools import count

from seer.sim.drafting import CLASSES, Drafting
from seer.sim.workload import Model

EPSILON = 1e-6
"""Tokens: rounding errors."""


@dataclass(slots=True, eq=False)
class Chunk:
    """A chunk of a request: `length` tokens of prompt and output now, `end` tokens when it ends.

    `prefill` tokens must be computed on admission; `kind` is its class of drafts (`drafting.kind_of`); it may
    have `most` tokens, drafted ones included.
    """

    request_id: str
    attempt: int
    length: float
    end: int
    prefill: float = 0.0
    kind: int = 0
    preemptions: int = 0
    most: int = 0
    base: float = 0.0  # length minus its class's clock, while it runs


class Instance:
    """See the module's docstring. `drafting`: None without drafts."""

    def __init__(self, name: str, model: Model, drafting: Drafting | None) -> None:
        self.name, self.model = name, model
        self._drafting = drafting
        self._now = 0.0
        self._prefill_seconds = 0.0  # of prefill before the next step
        classes = CLASSES if drafting else 1
        self._clocks = [0.0] * classes
        self._rates = [1.0] * classes
        self._counts = [0] * classes
        self._ends: list[list[tuple[float, int, Chunk]]] = [[] for _ in range(classes)]
        self._order = count()
        self._running: OrderedDict[str, Chunk] = OrderedDict()
        self._waiting: deque[Chunk] = deque()
        self._step, self._gain, self._rise = model.step, 0.0, 0.0
        self._up_to_date = True
        self._cached: OrderedDict[str, float] = OrderedDict()  # KV of requests that may come back
        self._cached_tokens = 0.0
        self.kv_tokens = 0.0
        self.busy_seconds = self.generated = self.preempted = self.recomputed = 0.0

    @property
    def running(self) -> int:
        """Number of running chunks."""
        return len(self._running)

    @property
    def step_seconds(self) -> float:
        """Time of a step of the requests that ran when time was last advanced, without any prefill."""
        return self._step

    @property
    def waiting(self) -> int:
        """Number of chunks in the engine's own queue."""
        return len(self._waiting)

    # --- the cache of requests that left ---------------------------------------------------

    def leave(self, request_id: str, tokens: float) -> None:
        """Keep a request's KV as cached until its memory is needed."""
        self._cached[request_id] = tokens
        self._cached_tokens += tokens
        self._evict()

    def take(self, request_id: str) -> float:
        """Return how many tokens of a request are cached here; they are not cached any more."""
        tokens = self._cached.pop(request_id, 0.0)
        self._cached_tokens -= tokens
        return tokens

    def _evict(self) -> None:
        while self._cached and self._cached_tokens > self.model.kv_tokens - self.kv_tokens:
            self._cached_tokens -= self._cached.popitem(last=False)[1]

    # --- chunks ------------------------------------------------------------------------------

    def add(self, chunk: Chunk, now: float) -> None:
        """Add a chunk to the queue at `now`."""
        self.advance(now)
        self._queue_of(chunk).append(chunk)
        self._admit()

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self.model.max_num_seqs:
            chunk = self._waiting[0]
            ahead = 1 + len(self._running)  # one slot for each token that the next step samples
            if chunk.length + ahead > self.model.kv_tokens - self.kv_tokens + EPSILON:
                break
            self._waiting.popleft()
            self._begin(chunk)
        self._evict()
        self._up_to_date = False

    def _begin(self, chunk: Chunk) -> None:
        self.kv_tokens += chunk.length
        self._prefill_seconds += chunk.prefill * self.model.prefill
        chunk.prefill = 0.0
        chunk.base = chunk.length - self._clocks[chunk.kind]
        self._running[chunk.request_id] = chunk
        self._counts[chunk.kind] += 1
        heapq.heappush(self._ends[chunk.kind], (chunk.end - chunk.base, next(self._order), chunk))

    def _remove(self, chunk: Chunk) -> None:
        chunk.length = self._clocks[chunk.kind] + chunk.base
        self.kv_tokens -= chunk.length
        del self._running[chunk.request_id]
        self._counts[chunk.kind] -= 1
        if not self._running:
            self.kv_tokens = 0.0

    def _update_step(self) -> None:
        """Compute the step's time and tokens for the running batch."""
        self._up_to_date = True
        drafted, self._gain = 0.0, float(len(self._running))
        if self._drafting is not None:
            self._rates, drafted = self._drafting.rates(self.model, self._counts, self._kv_read())
            self._gain = sum(rate * n for rate, n in zip(self._rates, self._counts, strict=True) if n)
        share = 1 + self._drafting.share if self._drafting is not None and drafted else 1.0
        batch = len(self._running)
        self._step = share * self.model.seconds(batch, drafted, self._kv_read())
        self._rise = share * self.model.read(batch, drafted) * self._growth()

    def _kv_read(self) -> float:
        """Return how many tokens' KV a step reads, as far as its time depends on it."""
        return self.kv_tokens

    def _growth(self) -> float:
        """Return by how much a step raises `_kv_read`."""
        return self._gain

    # --- time ------------------------------------------------------------------------------

    def next_event(self) -> float:
        """Return when the next chunk ends or is preempted; infinity if none runs."""
        if not self._running:
            return math.inf
        if not self._up_to_date:
            self._update_step()
        steps = self._steps_to_full()
        for kind, ends in enumerate(self._ends):
            while ends and self._stale(*ends[0]):
                heapq.heappop(ends)
            if ends:
                steps = min(steps, (ends[0][0] - self._clocks[kind]) / self._rates[kind])
        steps = max(steps, 0.0)
        return self._now + self._prefill_seconds + steps * (self._step + self._rise * steps / 2)

    def _steps_to_full(self) -> float:
        return (self.model.kv_tokens - self.kv_tokens) / self._gain

    def advance(self, now: float) -> None:
        """Let time pass until `now`, which must not be after `next_event`."""
        seconds = now - self._now
        self._now = now
        if not self._running or seconds <= 0:
            return
        if not self._up_to_date:
            self._update_step()
        self.busy_seconds += seconds
        paid = min(self._prefill_seconds, seconds)
        self._prefill_seconds -= paid
        seconds -= paid
        steps = 2 * seconds / (self._step + math.sqrt(self._step**2 + 2 * self._rise * seconds))
        for kind, n in enumerate(self._counts):
            if n:
                self._clocks[kind] += self._rates[kind] * steps
        self._grow(steps)
        self.generated += self._gain * steps
        self._step += self._rise * steps

    def _grow(self, steps: float) -> None:
        self.kv_tokens += self._gain * steps

    def settle(self, now: float) -> list[Chunk]:
        """Advance to `now`; return the chunks that ended, in the order of their admission."""
        self.advance(now)
        ended: list[tuple[int, Chunk]] = []
        for kind, ends in enumerate(self._ends):
            while ends and ends[0][0] <= self._clocks[kind] + EPSILON:
                key, order, chunk = heapq.heappop(ends)
                if not self._stale(key, order, chunk):
                    self._remove(chunk)
                    chunk.length = chunk.end
                    self._ended(chunk)
                    ended.append((order, chunk))
        while (victim := self._victim()) is not None:
            self._preempt(victim)
        self._admit()
        return [chunk for _, chunk in sorted(ended, key=lambda item: item[0])]

    def _stale(self, key: float, order: int, chunk: Chunk) -> bool:
        """Return whether an entry is from before a preemption of its chunk."""
        return self._running.get(chunk.request_id) is not chunk or chunk.end - chunk.base != key

    def _ended(self, chunk: Chunk) -> None:
        """Note that a chunk has ended."""

    def _victim(self) -> Chunk | None:
        """Return the chunk that is admitted last, if it has to make room."""
        if self.kv_tokens < self.model.kv_tokens - EPSILON or len(self._running) < 2:
            return None
        return self._running[next(reversed(self._running))]

    def _preempt(self, chunk: Chunk) -> None:
        self._remove(chunk)
        chunk.length = float(math.floor(chunk.length + EPSILON))
        chunk.prefill = chunk.length
        chunk.preemptions += 1
        self.preempted += 1
        self.recomputed += chunk.length
        self._queue_of(chunk).appendleft(chunk)

    def _queue_of(self, chunk: Chunk) -> deque[Chunk]:
        return self._waiting
