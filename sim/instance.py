"""One engine as a fluid: all its requests advance together, at the pace of its steps.

Between two events (a chunk comes, ends or is preempted) nothing but lengths changes, so the time of
k steps is k x T + c x R x k² / 2, where T is the first step's time, R the tokens that each step adds,
and c the time to read one token's KV. Steps are not counted one by one: whole rollouts take seconds.

Batching and memory follow vLLM as `services/engine/replay/kv_model.py` does step by step, of which this is
the limit (tests/property/test_sim_instance.py compares them): first come, first served; a waiting
chunk is admitted when all tokens it has fit; when memory is full the last admitted is preempted,
goes to the head of the queue, and is prefilled again.

Invariants (the same test asserts them):
- KV in use never passes `kv_tokens`, and is the sum over running chunks;
- every chunk ends, exactly as long as it was asked to become;
- time moves forward, and the same calls have the same results.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict, deque
from dataclasses import dataclass
from itertools import count

from seer.sim.drafting import CLASSES, DRAFT_SHARE, Drafting
from seer.sim.workload import Model

_LITTLE = 1e-6  # tokens: rounding of clocks


@dataclass(slots=True, eq=False)
class Chunk:
    """A chunk of a request: `length` tokens of context and output when it came, `end` when it is over.

    `prefill` tokens of its context must be computed on admission; `kind` is its class of drafts.
    """

    request_id: str
    attempt: int
    length: float
    end: int
    prefill: float = 0.0
    kind: int = 0
    preemptions: int = 0
    base: float = 0.0  # length less its class' clock, while it runs


class Instance:
    """See the module's docstring. `admission`: the buffer promised room, so nothing is preempted."""

    def __init__(self, name: str, model: Model, drafting: Drafting | None) -> None:
        self.name, self.model = name, model
        self._drafting = drafting
        self._now = 0.0
        self._debt = 0.0  # seconds of prefill before the next step
        classes = CLASSES if drafting else 1
        self._clocks = [0.0] * classes
        self._rates = [1.0] * classes
        self._counts = [0] * classes
        self._ends: list[list[tuple[float, int, Chunk]]] = [[] for _ in range(classes)]
        self._order = count()
        self._running: OrderedDict[str, Chunk] = OrderedDict()
        self._waiting: deque[Chunk] = deque()
        self._step, self._gain, self._rise = model.step, 0.0, 0.0
        self._tuned = True
        self._cached: OrderedDict[str, float] = OrderedDict()  # left by requests that may come back
        self._cached_tokens = 0.0
        self.kv_tokens = 0.0
        self.link_free_at = 0.0
        self.busy_seconds = self.generated = self.preempted = self.recomputed = 0.0

    @property
    def running(self) -> int:
        """Chunks that decode."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Chunks in the engine's own queue."""
        return len(self._waiting)

    # --- the cache of requests that left ---------------------------------------------------

    def leave(self, request_id: str, tokens: float) -> None:
        """Remember that a request's KV lies here until its memory is needed."""
        self._cached[request_id] = tokens
        self._cached_tokens += tokens
        self._evict()

    def take(self, request_id: str) -> float:
        """Return, and no longer count as cached, the tokens of a request whose KV still lies here."""
        tokens = self._cached.pop(request_id, 0.0)
        self._cached_tokens -= tokens
        return tokens

    def _evict(self) -> None:
        while self._cached and self._cached_tokens > self.model.kv_tokens - self.kv_tokens:
            self._cached_tokens -= self._cached.popitem(last=False)[1]

    # --- chunks ------------------------------------------------------------------------------

    def add(self, chunk: Chunk, now: float) -> None:
        """Take a chunk in at `now`."""
        self.advance(now)
        self._waiting.append(chunk)
        self._admit()

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self.model.max_num_seqs:
            chunk = self._waiting[0]
            ahead = 1 + len(self._running)  # a slot each for the tokens that the next step samples
            if chunk.length + ahead > self.model.kv_tokens - self.kv_tokens + _LITTLE:
                break
            self._waiting.popleft()
            self.kv_tokens += chunk.length
            self._debt += chunk.prefill * self.model.prefill
            chunk.prefill = 0.0
            chunk.base = chunk.length - self._clocks[chunk.kind]
            self._running[chunk.request_id] = chunk
            self._counts[chunk.kind] += 1
            heapq.heappush(self._ends[chunk.kind], (chunk.end - chunk.base, next(self._order), chunk))
        self._evict()
        self._tuned = False

    def _remove(self, chunk: Chunk) -> None:
        chunk.length = self._clocks[chunk.kind] + chunk.base
        self.kv_tokens -= chunk.length
        del self._running[chunk.request_id]
        self._counts[chunk.kind] -= 1
        if not self._running:
            self.kv_tokens = 0.0

    def _tune(self) -> None:
        """Compute the step's time, and what it brings, for the batch that runs now."""
        self._tuned = True
        drafted, self._gain = 0.0, float(len(self._running))
        if self._drafting is not None:
            self._rates, drafted = self._drafting.rates(self.model, self._counts, self.kv_tokens)
            self._gain = sum(rate * n for rate, n in zip(self._rates, self._counts, strict=True) if n)
        share = 1 + DRAFT_SHARE if drafted else 1.0
        batch = len(self._running)
        self._step = share * self.model.seconds(batch, drafted, self.kv_tokens)
        self._rise = share * self.model.read(batch, drafted) * self._gain

    # --- time ------------------------------------------------------------------------------

    def next_event(self) -> float:
        """Return when the next chunk ends or is preempted; infinity if none runs."""
        if not self._running:
            return math.inf
        if not self._tuned:
            self._tune()
        steps = (self.model.kv_tokens - self.kv_tokens) / self._gain
        for kind, ends in enumerate(self._ends):
            while ends and self._stale(*ends[0]):
                heapq.heappop(ends)
            if ends:
                steps = min(steps, (ends[0][0] - self._clocks[kind]) / self._rates[kind])
        steps = max(steps, 0.0)
        return self._now + self._debt + steps * (self._step + self._rise * steps / 2)

    def advance(self, now: float) -> None:
        """Let time pass until `now`, which must not be after `next_event`."""
        seconds = now - self._now
        self._now = now
        if not self._running or seconds <= 0:
            return
        if not self._tuned:
            self._tune()
        self.busy_seconds += seconds
        paid = min(self._debt, seconds)
        self._debt -= paid
        seconds -= paid
        steps = 2 * seconds / (self._step + math.sqrt(self._step**2 + 2 * self._rise * seconds))
        for kind, n in enumerate(self._counts):
            if n:
                self._clocks[kind] += self._rates[kind] * steps
        self.kv_tokens += self._gain * steps
        self.generated += self._gain * steps
        self._step += self._rise * steps

    def settle(self, now: float) -> list[Chunk]:
        """Advance to `now`; return the chunks that ended, in the order of their admission."""
        self.advance(now)
        ended: list[tuple[int, Chunk]] = []
        for kind, ends in enumerate(self._ends):
            while ends and ends[0][0] <= self._clocks[kind] + _LITTLE:
                key, order, chunk = heapq.heappop(ends)
                if not self._stale(key, order, chunk):
                    self._remove(chunk)
                    chunk.length = chunk.end
                    ended.append((order, chunk))
        while self.kv_tokens >= self.model.kv_tokens - _LITTLE and len(self._running) > 1:
            self._preempt()
        self._admit()
        return [chunk for _, chunk in sorted(ended, key=lambda item: item[0])]

    def _stale(self, key: float, order: int, chunk: Chunk) -> bool:
        """Say whether an entry is of a run before a preemption."""
        return self._running.get(chunk.request_id) is not chunk or chunk.end - chunk.base != key

    def _preempt(self) -> None:
        chunk = self._running[next(reversed(self._running))]
        self._remove(chunk)
        chunk.length = float(math.floor(chunk.length + _LITTLE))
        chunk.prefill = chunk.length
        chunk.preemptions += 1
        self.preempted += 1
        self.recomputed += chunk.length
        self._waiting.appendleft(chunk)
