"""How fast this engine is at best, measured while it works.

Invariants (tests/unit/test_best_speed.py asserts them):
- only time spent in steps counts: while the engine is idle, its figures stay;
- the best rate never falls, the time per token of a lone request never rises.
"""

from __future__ import annotations

WINDOW_SECONDS = 1.0
"""Time in steps over which a rate is measured: in less, single fast steps would count too much."""

WINDOW_TOKENS = 64
"""Tokens of a lone request over which its time per token is measured, for the same reason."""


class Pace:
    """`rate`: most tokens/s; `alone`: least seconds per token while one request ran alone.

    Both are 0 until the first window is over.
    """

    def __init__(self) -> None:
        self.rate = self.alone = 0.0
        self._tokens = self._alone_tokens = 0
        self._seconds = self._alone_seconds = 0.0

    def add(self, requests: int, tokens: int, seconds: float) -> None:
        """Count a step of `seconds` that generated `tokens` for `requests`, all together."""
        self._tokens += tokens
        self._seconds += seconds
        if self._seconds >= WINDOW_SECONDS:
            self.rate = max(self.rate, self._tokens / self._seconds)
            self._tokens, self._seconds = 0, 0.0
        if requests != 1:
            return
        self._alone_tokens += tokens
        self._alone_seconds += seconds
        if self._alone_tokens >= WINDOW_TOKENS:
            alone = self._alone_seconds / self._alone_tokens
            self.alone = min(self.alone, alone) if self.alone else alone
            self._alone_tokens, self._alone_seconds = 0, 0.0
