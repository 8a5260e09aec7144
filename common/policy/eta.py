"""When open work will have ended: an estimate from length estimates, and from how fast chunks ran lately.

A rollout ends when its work is done at the present rate, or with its longest response, whichever is later
(`eta_seconds`). Pure and cheap, but not exact: nobody knows lengths, and the rate changes towards the end.
bench/scheduling/eta.py measures how far it is from what happened.

Invariants (tests/property/test_eta.py asserts them):
- an expected remainder is positive and leads to no length beyond the cap, whatever the estimate;
- more work, fewer running requests or slower chunks never make the estimate shorter;
- there is no estimate before a tenth of the responses has finished, nor while nothing runs; before that there
  is a range, which is wide, as little is known of lengths.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from seer.common.policy.length import Estimate
from seer.common.policy.schedule import length_quantile

SHOWN_FROM = 0.1
"""Share of responses that have to finish before there is an estimate: earlier nothing is known of lengths."""

UNSURE = 3.0
"""Before `SHOWN_FROM` lengths may be so many times shorter than estimated, and as long as they may be."""

WINDOW_CHUNKS = 256
"""Chunks over which speeds are taken: the last ones, about as many as run at once on a few engines."""

_ROOT = math.sqrt(0.5)


def expected_remainder(estimate: Estimate, generated: int, cap: int) -> float:
    """Return how many more tokens a response is expected to have: lengths are log-normal, cut at the cap.

    Without a spread it is the rest to the estimate, beyond that half the rest to the cap.
    """
    room = float(max(cap - generated, 1))
    if estimate.tokens > 1e300 or not estimate.spread:
        return min(max(estimate.tokens - generated, 1.0), room) if generated < estimate.tokens else room / 2
    typical, spread = math.log(estimate.tokens), estimate.spread
    low = (math.log(max(generated, 1)) - typical) / spread
    high = (math.log(max(cap, 2)) - typical) / spread
    left = _above(low)
    if left < 1e-9:  # longer than any the estimate knows
        return room / 2
    moment = typical + spread * spread / 2
    inside = math.exp(moment) * (_above(low - spread) - _above(high - spread)) if moment < 600 else math.inf
    mean = (inside + cap * _above(high)) / left
    return min(max(mean - generated, 1.0), room)


def _above(z: float) -> float:
    """Return the probability that a standard normal variable is above `z`."""
    return 0.5 * math.erfc(z * _ROOT)


@dataclass(slots=True)
class Work:
    """What is left to generate of `responses` open ones: their expected tokens, and the `longest` of them.

    `longest` is what the longest remainder of so many is expected to be: each is taken at the length that it
    exceeds with a chance of one in their number. Of a group, only those count that have least, or most: the
    longest remainder is nearly always one of theirs, and there may be 200,000 responses to look at.
    """

    responses: int
    tokens: float = 0.0
    longest: float = 0.0
    running: int = 0

    def add_capped(self, generated: Sequence[int], cap: int, running: int) -> None:
        """Add the open responses of a group as if all of them reach the cap."""
        self.tokens += sum(cap - each for each in generated)
        self.longest = max(self.longest, cap - min(generated))
        self.running += running

    def add(
        self, estimate: Estimate, generated: Sequence[int], cap: int, remainder: float, running: int
    ) -> None:
        """Add the open responses of a group, which have `generated` so many tokens and expect `remainder`."""
        self.tokens += remainder
        self.running += running
        chance = 1 / (1 + self.responses)
        for each in {min(generated), max(generated)}:
            self.longest = max(self.longest, length_quantile(estimate, each, cap, chance) - each)


@dataclass(slots=True)
class Pace:
    """Seconds per token of running requests: over the last chunks, and at best."""

    _chunks: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=WINDOW_CHUNKS))
    _seconds: float = 0.0
    _tokens: int = 0
    alone: float = 0.0

    def add(self, seconds: float, tokens: int) -> None:
        """Count a chunk that ended."""
        if len(self._chunks) == WINDOW_CHUNKS:
            old_seconds, old_tokens = self._chunks[0]
            self._seconds -= old_seconds
            self._tokens -= old_tokens
        self._chunks.append((seconds, tokens))
        self._seconds += seconds
        self._tokens += tokens
        each = seconds / tokens
        if each > 0 and (not self.alone or each < self.alone):
            self.alone = each

    @property
    def token_seconds(self) -> float:
        """Seconds per token of a running request; 0: unknown."""
        return max(self._seconds, 0.0) / self._tokens if self._tokens else 0.0


def eta_seconds(work: Work, pace: Pace, finished: int) -> float | None:
    """Return in how many seconds all of `work` will have ended; None: too little is known."""
    of = finished + work.responses
    token = pace.token_seconds
    if not (work.responses and work.running and token) or finished < SHOWN_FROM * of:
        return None
    return max(work.tokens * token / work.running, work.longest * pace.alone)


def shortened(estimate: Estimate) -> Estimate:
    """Return the estimate if lengths are `UNSURE` times shorter."""
    return Estimate(max(estimate.tokens / UNSURE, 1.0), estimate.spread)


def first_range(short: Work, capped: Work, rate: float) -> tuple[float, float] | None:
    """Return in how many seconds a rollout ends, at least and at most, before lengths are known.

    `short`: its work if lengths are `shortened`; `capped`: if all responses reach their caps. `rate`: its
    tokens/s now, at which the one is done at the earliest; the other takes as long as its longest response,
    too, if requests do not become faster. None: nothing runs, or nobody knows how fast.
    """
    if not (short.running and rate > 0):
        return None
    least = short.tokens / rate
    return least, max(least, capped.tokens / rate, capped.longest * capped.running / rate)
