"""When to leave a failing pool alone: a pure machine of time.

Invariants:
- after a failure nothing is tried for a pause that doubles up to `LONGEST_SECONDS`;
- after the pause whatever comes is tried: one success ends the matter, one failure begins a longer pause.
"""

from __future__ import annotations

from dataclasses import dataclass

FIRST_SECONDS = 0.5
LONGEST_SECONDS = 15.0
"""A restarted pool is found again within this; a dead one costs a call's deadline as often."""


@dataclass(slots=True)
class Breaker:
    """`until` is the time, in monotonic seconds, before which nothing is tried."""

    until: float = 0.0
    pause: float = FIRST_SECONDS

    def allows(self, now: float) -> bool:
        """Say whether a call may be tried."""
        return now >= self.until

    def failed(self, now: float) -> None:
        """Note a failed call; one of several that failed together lengthens the pause no further."""
        if self.allows(now):
            self.until = now + self.pause
            self.pause = min(2 * self.pause, LONGEST_SECONDS)

    def worked(self) -> None:
        """Note a call that worked."""
        self.until, self.pause = 0.0, FIRST_SECONDS
