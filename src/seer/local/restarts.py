"""When a lost child is started again: pure, so that it can be read and tested in a minute.

Invariants:
- a child that ran for `HEALTHY_SECONDS` has its failures forgiven;
- after `LIMIT` failures in a row it is given up; before that the pauses grow.
"""

from __future__ import annotations

from dataclasses import dataclass

LIMIT = 4
"""Failures in a row, a failed start included, that a child survives."""

PAUSES = (0.2, 1.0, 5.0, 15.0)
"""Seconds before each start in a row: short first, for whoever waits; long last, for what must recover."""

HEALTHY_SECONDS = 60.0


@dataclass(slots=True)
class Restarts:
    """One child's record. `total` counts the starts granted."""

    total: int = 0
    in_a_row: int = 0

    def pause(self, lived: float) -> float | None:
        """Return the seconds to wait after a child ended `lived` seconds after being ready (0: it never was).

        None: it is given up.
        """
        self.in_a_row = 1 if lived >= HEALTHY_SECONDS else self.in_a_row + 1
        if self.in_a_row > LIMIT:
            return None
        self.total += 1
        return PAUSES[self.in_a_row - 1]
