"""How many missing tokens are worth a fetch from the KV pool: by how fast this engine fetched and computed.

Invariants (tests/unit/test_fetch_choice.py asserts them):
- once both were measured, tokens are fetched only if that takes less time than to compute them: their number
  is where both times, the fetch with its latency, are equal. If a token takes longer to fetch, it is `NEVER`;
- until then, it is `UNMEASURED_TOKENS`;
- an engine that fetches nothing measures again: loads are forgotten `FORGET_SECONDS` after the last one;
- of loads that overlap each counts from the end of the one before, as they share the way: a burst does not
  make the pool look slow;
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

LEAST_TOKENS = 128
"""A step that computes fewer says little of long prefills: its cost hardly depends on them."""

LEAST_SHARE = 0.75
"""Share of prefill in a step's tokens; in other steps, decoding takes most of the time."""


class FetchChoice:
    """What one engine measured; a load is that of all ranks."""

    def __init__(self) -> None:
        self._computed: deque[float] = deque(maxlen=WINDOW)
        self._fetched: deque[tuple[int, float]] = deque(maxlen=WINDOW)
        self._fetched_at = -math.inf

    def step(self, scheduled: Mapping[str, int], drafts: Mapping[str, Sequence[int]], seconds: float) -> None:
        """Count a step: its tokens by request, those drafted among them, and how long it took."""
        prefill = sum(tokens - 1 - len(drafts.get(name, ())) for name, tokens in scheduled.items())
        if prefill >= max(LEAST_TOKENS, LEAST_SHARE * sum(scheduled.values())):
            self._computed.append(seconds / prefill)

    def load(self, tokens: int, seconds: float, now: float) -> None:
        """Count a load that brought all it was to bring, `seconds` after it was ordered."""
        self._fetched.append((tokens, min(seconds, max(now - self._fetched_at, 0.0))))
        self._fetched_at = now

    def pull_tokens(self, now: float) -> int:
        """Return the number of missing tokens up to which they are computed."""
        if now - self._fetched_at > FORGET_SECONDS:
            self._fetched.clear()
        speeds = self.speeds()
        if speeds is None:
            return UNMEASURED_TOKENS
        latency, fetch, compute = speeds
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
