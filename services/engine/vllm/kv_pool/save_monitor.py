"""When to log that the pool takes no blocks, and that it does again. Time is an argument.

Invariants:
- if every block was dropped for `PATIENCE_SECONDS`, this is reported once, and once when a block is saved
  again; a pool that is full now and then is not reported.
"""

from __future__ import annotations

from dataclasses import dataclass

PATIENCE_SECONDS = 10.0
"""A full pool makes room within a second or two."""


@dataclass(slots=True)
class SaveMonitor:
    """`since`: when the first block after the last save was dropped, in monotonic seconds."""

    since: float | None = None
    reported: bool = False

    def dropped(self, now: float) -> bool:
        """Note a dropped block; return whether to report now that nothing is saved."""
        if self.since is None:
            self.since = now
        if self.reported or now - self.since < PATIENCE_SECONDS:
            return False
        self.reported = True
        return True

    def saved(self) -> bool:
        """Note a saved block; return whether to report that blocks are saved again."""
        reported, self.since, self.reported = self.reported, None, False
        return reported
