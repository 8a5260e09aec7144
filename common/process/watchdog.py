"""Says when something has been missing for too long: pure.

Invariants (tests/unit/test_watchdog.py):
- silence is measured in probes, each worth at most `longest` seconds: a stall of this process, or of the
  whole machine, counts as one probe, however long it took.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Watchdog:
    """Expires once all probes of `limit` seconds in a row failed. `probed`: when the last one was made.

    `longest`: most seconds from one probe to the next, unless this process stalled.
    """

    limit: float
    longest: float
    probed: float
    seconds: float = 0.0

    def expired(self, now: float, *, missing: bool) -> bool:
        """Add a probe's result; a probe without a clear result counts as not missing."""
        passed = min(now - self.probed, self.longest)
        self.probed = now
        self.seconds = self.seconds + passed if missing else 0.0
        return self.seconds >= self.limit
