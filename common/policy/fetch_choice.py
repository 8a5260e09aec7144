"""How many missing tokens are worth a fetch from the KV pool, by this engine's measured speeds.

Invariants (tests/unit/test_fetch_choice.py asserts them):
- once both speeds were measured, tokens are fetched only if a fetch costs less time than computing: the
  number is where both times, the fetch with its latency, are equal. A computed token costs its time for each
  request of the step, of which `MOST_STALLED` count; a fetched token costs its time for its own request
  alone. If a token costs more to fetch, the number is `NEVER`;
- until then, the number is `UNMEASURED_TOKENS`, but `NEVER` while `ENOUGH` loads are on their way: a pool
  that may be slow is tried with few loads;
- an engine that fetches nothing measures again: loads are forgotten `FORGET_SECONDS` after the last one;
- overlapping loads each count from the end of the load before, as loads share the way: a burst does not make
  the pool look slow;
- one slow step or a few tokens decide nothing. Time is an argument.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence

from seer.common.types import MAX_CONTEXT

UNMEASURED_TOKENS = 512
"""The paper's (OSDI version)."""

NEVER = MAX_CONTEXT
"""No request misses more tokens than that."""

WINDOW = 32
"""Loads, and steps, that count: the last ones, so that a choice follows what changes."""

ENOUGH = 4
"""Loads, and steps, before there is a choice."""

FORGET_SECONDS = 60.0

MOST_STALLED = 4
"""Requests that wait while a context is computed; more count as so many.

They all lose the time, where a fetch delays one. With 1 a simulated rollout took 1 and 2.5 % longer over
links of 100 and 25 Gbit/s (Qwen's workload, a quarter, one seed), with 16 up to 0.8 % less than with 4; but
what a fetch costs the machine besides is not simulated.
"""

LEAST_TOKENS = 128
"""A step that computes fewer tokens says little of long prefills: its cost hardly depends on the tokens."""

LEAST_SHARE = 0.75
"""Share of prefill in a step's tokens; in other steps, decoding takes most of the time."""


class FetchChoice:
    """What one engine measured; a load is that of all ranks."""

    def __init__(self) -> None:
        self._computed: deque[float] = deque(maxlen=WINDOW)
        self._stalled: deque[int] = deque(maxlen=WINDOW)
        self._fetched: deque[tuple[int, float]] = deque(maxlen=WINDOW)
        self._fetched_at = self._ordered_at = -math.inf
        self._under_way = 0  # loads that were ordered, and have neither come nor failed

    def step(self, scheduled: Mapping[str, int], drafts: Mapping[str, Sequence[int]], seconds: float) -> None:
        """Count a step: its tokens by request, the drafted tokens among them, and how long the step took."""
        prefill = sum(tokens - 1 - len(drafts.get(name, ())) for name, tokens in scheduled.items())
        if prefill >= max(LEAST_TOKENS, LEAST_SHARE * sum(scheduled.values())):
            self._computed.append(seconds / prefill)
            self._stalled.append(min(len(scheduled), MOST_STALLED))

    def order(self, now: float) -> None:
        """Count a load that was ordered."""
        self._under_way += 1
        self._ordered_at = now

    def lost(self) -> None:
        """Count a load that failed, or was given up."""
        self._under_way -= 1

    def load(self, tokens: int, seconds: float, now: float) -> None:
        """Count a load that brought all its tokens, `seconds` after the order."""
        self._fetched.append((tokens, min(seconds, max(now - self._fetched_at, 0.0))))
        self._fetched_at = now
        self._under_way -= 1

    def pull_tokens(self, now: float) -> int:
        """Return the number of missing tokens up to which they are computed."""
        if now - max(self._fetched_at, self._ordered_at) > FORGET_SECONDS:
            self._fetched.clear()
            self._under_way = 0
        speeds = self.speeds()
        if speeds is None:
            return NEVER if self._under_way >= ENOUGH else UNMEASURED_TOKENS
        latency, fetch, compute = speeds
        compute *= statistics.median(self._stalled)
        if fetch >= compute:
            return NEVER
        return min(NEVER, math.ceil(latency / (compute - fetch)))

    def speeds(self) -> tuple[float, float, float] | None:
        """Return the seconds of a fetch that do not depend on its tokens, of each token, and to compute one.

        None until there is enough of both.
        """
        if min(len(self._computed), len(self._fetched)) < ENOUGH:
            return None
        return *_line(self._fetched), statistics.median(self._computed)


def _line(loads: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Return the latency and the seconds per token, neither negative, that fit loads best."""
    tokens, seconds = zip(*loads, strict=True)
    if min(tokens) < max(tokens):
        fetch, latency = statistics.linear_regression(tokens, seconds)
        if latency >= 0:
            return (latency, fetch) if fetch >= 0 else (statistics.fmean(seconds), 0.0)
    return 0.0, sum(seconds) / sum(tokens)
