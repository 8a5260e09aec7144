"""When open work will have ended: an estimate from expected remainders, and from how fast engines are.

Engines do all tokens in steps, with as many requests in each as their seats and their KV have room for. So
the number of steps follows from what is left (`remaining_tokens.py`), and is at least the longest remainder;
the time of a step follows from its requests and its KV, as `Pace` has learnt (`eta_seconds`). Pure and cheap,
but not exact: nobody knows lengths. bench/scheduling/eta.py measures how far it is from what happened.

Invariants (tests/property/test_eta.py asserts them):
- more work, less room or slower engines never make the estimate shorter;
- there is no estimate before a tenth of the responses has finished, nor while nothing runs; before that there
  is a range, which is wide, as little is known of lengths.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from seer.common.policy.length import Estimate
from seer.common.policy.remaining_tokens import Remainders

SHOWN_FROM = 0.1
"""Share of responses that have to finish before there is an estimate: earlier nothing is known of lengths."""

UNSURE = 3.0
"""Before `SHOWN_FROM` lengths may be so many times shorter than estimated, and as long as they may be."""

HALF_SECONDS = 300.0
"""After so long a report counts half as much: drafts, and a machine's other work, change steps' times."""

PRIOR, PARTS = 1.0, np.array([3, 2, 1]) / 6
"""Parts of a step's time that are its own, its requests' and its KV's, as if so many reports had said so.

Until loads differ, reports do not tell these parts apart. Decoding mostly waits for weights.
"""


@dataclass(frozen=True, slots=True)
class Placed:
    """How requests take up an engine's KV: each has `reserved` so many tokens for its chunk, beside its own.

    Of the `whole` engine, what is less than one more needs is left over: half of that, on average.
    """

    reserved: float = 0.0
    whole: float = math.inf

    def taken(self, kv_tokens: float) -> float:
        """Return how much KV others cannot have while a request has so much."""
        needed = kv_tokens + self.reserved
        return needed * (1 + needed / (2 * self.whole))


@dataclass(slots=True)
class Work:
    """What is left to generate of `responses` open ones: their expected tokens, and the `longest` of them.

    `kv_tokens`: the KV that they read, summed over these tokens; `placed`: what they keep from others.
    `longest` is what the longest remainder of so many is expected to be: each is taken at the length that it
    exceeds with a chance of one in their number. Of a group, only those count that have least, or most: the
    longest is nearly always one of them.
    """

    responses: int
    tokens: float = 0.0
    kv_tokens: float = 0.0
    longest: float = 0.0
    placed: float = 0.0
    running: int = 0

    def add_capped(self, generated: Sequence[int], cap: int, running: int) -> None:
        """Add the open responses of a group as if all of them reach the cap."""
        self.tokens += sum(cap - each for each in generated)
        self.longest = max(self.longest, cap - min(generated))
        self.running += running

    def add(
        self, remainders: Remainders, generated: Sequence[int], prompt: int, running: int, placed: Placed
    ) -> None:
        """Add the open responses of a group, which have `generated` so many tokens after a prompt."""
        for each in generated:
            left = remainders.left(each)
            self.tokens += left.tokens
            self.kv_tokens += left.lengths + prompt * left.tokens
            self.placed += left.tokens * placed.taken(left.lengths / left.tokens + prompt)
        self.running += running
        chance = 1 / (1 + self.responses)
        for each in {min(generated), max(generated)}:
            self.longest = max(self.longest, remainders.longest(each, chance))


@dataclass(frozen=True, slots=True)
class Room:
    """What `engines` hold at once, all together: requests (`seats`), and tokens of KV."""

    engines: float
    seats: float
    kv_tokens: float

    def part(self, share: float) -> Room:
        """Return what one of several has whose requests share the engines."""
        return Room(self.engines * share, self.seats * share, self.kv_tokens * share)


@dataclass(frozen=True, slots=True)
class TokenSeconds:
    """Seconds of a request's token: `base`, and for each request and each KV token of its engine."""

    base: float
    request: float
    kv_token: float


@dataclass(slots=True)
class Pace:
    """How long tokens took, as engines reported it, by how many requests ran there, and with how much KV.

    Sums for least squares, weighted by tokens; older reports count less.
    """

    _last: float = 0.0
    _reports: float = 0.0
    _sums: list[float] = field(default_factory=lambda: [0.0] * 9)

    def add(self, now: float, seconds: float, tokens: int, requests: float, kv_tokens: float) -> None:
        """Count what an engine did in so many seconds, in which so many requests ran with so much KV."""
        if tokens < 1:
            return
        rows, kv = max(requests, 1.0), max(kv_tokens, 1.0)
        each = (1.0, rows, kv, rows * rows, rows * kv, kv * kv)
        new = (*(tokens * of for of in each), *(rows * seconds * of for of in each[:3]))
        kept = 0.5 ** (max(0.0, now - self._last) / HALF_SECONDS)
        self._last = max(now, self._last)
        self._reports = kept * self._reports + 1
        self._sums = [kept * old + of for old, of in zip(self._sums, new, strict=True)]

    def token_seconds(self) -> TokenSeconds | None:
        """Return the times that are nearest to what was reported; None: nothing was."""
        weight, rows, kv, rows_2, rows_kv, kv_2, *totals = self._sums
        if not (weight and totals[0]):
            return None
        means = np.array([1.0, rows / weight, kv / weight])
        prior = PRIOR / self._reports
        moments = np.array([[weight, rows, kv], [rows, rows_2, rows_kv], [kv, rows_kv, kv_2]]) / weight
        squares = moments / np.outer(means, means) + prior * np.eye(3)
        seconds = np.array(totals) / totals[0] / means + prior * PARTS
        kinds = [0, 1, 2]
        while (found := np.linalg.solve(squares[np.ix_(kinds, kinds)], seconds[kinds])).min() < 0:
            kinds.pop(int(found.argmin()))
        times = np.zeros(3)
        times[kinds] = found
        base, request, kv_token = (times * totals[0] / weight / means).tolist()
        return TokenSeconds(base, request, kv_token)


def eta_seconds(work: Work, room: Room, pace: Pace, finished: int) -> float | None:
    """Return in how many seconds all of `work` will have ended; None: too little is known."""
    of = finished + work.responses
    if not (work.responses and work.running and room.engines) or finished < SHOWN_FROM * of:
        return None
    if (seconds := pace.token_seconds()) is None:
        return None
    steps = max(work.tokens / max(room.seats, 1), work.placed / max(room.kv_tokens, 1), work.longest)
    beside = seconds.request * work.tokens + seconds.kv_token * work.kv_tokens
    return seconds.base * steps + beside / room.engines


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
