"""A circuit breaker for calls to the pool. Time is an argument.

Invariants:
- after a failure no call is allowed during a pause, which doubles up to `LONGEST_SECONDS`;
- after the pause calls are allowed again: a success resets the pause, a failure begins a longer one.
"""

from __future__ import annotations

from dataclasses import dataclass

FIRST_SECONDS = 0.5
LONGEST_SECONDS = 15.0
"""Longest pause: a restarted pool is used again within it; a dead one costs one call's deadline each time."""


@dataclass(slots=True)
class CircuitBreaker:
    """No call is allowed before `until`, in monotonic seconds."""

    until: float = 0.0
    pause: float = FIRST_SECONDS

    def allows(self, now: float) -> bool:
        """Say whether a call may be tried."""
        return now >= self.until

    def failed(self, now: float) -> None:
        """Note a failed call. Calls that fail during a pause do not lengthen it."""
        if self.allows(now):
            self.until = now + self.pause
            self.pause = min(2 * self.pause, LONGEST_SECONDS)

    def succeeded(self) -> None:
        """Note a successful call."""
        self.until, self.pause = 0.0, FIRST_SECONDS
