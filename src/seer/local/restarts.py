"""When a child that ended unexpectedly is started again.

Invariants:
- after `HEALTHY_SECONDS` of running, earlier failures do not count;
- after `LIMIT` failures in a row the child is given up; until then the pauses grow;
- a child that has proved that it works did not fail: its work did, which the buffer gives up instead
  (`services/buffer/requests/engine_deaths.py`). So no prompt takes an engine from all others.
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
    """The restarts of one child; `total` counts all of them.

    Since the child was healthy, `in_a_row` counts its ends, and `failures` its ends in a row without a proof.
    """

    total: int = 0
    in_a_row: int = 0
    failures: int = 0

    def pause(self, lived: float, *, proved: bool = False) -> float | None:
        """Return the seconds to wait before a restart; None: give the child up.

        `lived`: seconds from ready to its end (0: never ready). `proved`: the child had shown that it works.
        """
        healthy = lived >= HEALTHY_SECONDS
        self.in_a_row = 1 if healthy else self.in_a_row + 1
        self.failures = 0 if proved else 1 if healthy else self.failures + 1
        if self.failures > LIMIT:
            return None
        self.total += 1
        return PAUSES[min(self.in_a_row, LIMIT) - 1]
