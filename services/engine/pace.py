"""How fast this engine can be, by what was seen of it.

Invariants (tests/unit/test_pace.py asserts them):
- only time spent in steps counts: an idle engine learns nothing, and its figures stay;
- the best rate never falls, the time of a token alone never rises.
"""

from __future__ import annotations

WINDOW_SECONDS = 1.0
"""Stepping time over which the best rate counts: shorter ones see the luck of single steps."""

WINDOW_TOKENS = 64
"""Tokens of a request alone over which its time per token counts, for the same reason."""


class Pace:
    """`rate`: most tokens/s over a window; `alone`: least seconds per token of a request alone.

    Both are 0 until a whole window was seen.
    """

    def __init__(self) -> None:
        self.rate = self.alone = 0.0
        self._tokens = self._alone_tokens = 0
        self._seconds = self._alone_seconds = 0.0

    def add(self, requests: int, tokens: int, seconds: float) -> None:
        """Count a step of `seconds` that brought `tokens` to `requests` in all."""
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
