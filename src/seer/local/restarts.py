"""When a child that ended unexpectedly is started again.

Invariants:
- after `HEALTHY_SECONDS` of running, earlier failures do not count;
- after `LIMIT` failures in a row the child is given up; until then the pauses grow.
"""

from __future__ import annotations

from dataclasses import dataclass

LIMIT = 4
"""Failures in a row, failed starts included, after which a child is still restarted."""

PAUSES = (0.2, 1.0, 5.0, 15.0)
"""Seconds before each restart in a row: short at first, as others wait for it; then longer, so that it can
recover."""

HEALTHY_SECONDS = 60.0


@dataclass(slots=True)
class Restarts:
    """The restarts of one child; `total` counts all of them, `in_a_row` failures since it was healthy."""

    total: int = 0
    in_a_row: int = 0

    def pause(self, lived: float) -> float | None:
        """Return the seconds to wait before a restart; None: give it up.

        `lived`: seconds from being ready to its end (0: it was never ready).
        """
        self.in_a_row = 1 if lived >= HEALTHY_SECONDS else self.in_a_row + 1
        if self.in_a_row > LIMIT:
            return None
        self.total += 1
        return PAUSES[self.in_a_row - 1]
