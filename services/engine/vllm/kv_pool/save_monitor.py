"""When to say that the pool takes nothing any more: a pure machine of time.

Invariants:
- a pool that has taken nothing for `PATIENCE_SECONDS` of what it was given is said once, and once when
  it takes something again; one that is full now and then is not.
"""

from __future__ import annotations

from dataclasses import dataclass

PATIENCE_SECONDS = 10.0
"""A full pool makes room within a second or two."""


@dataclass(slots=True)
class Saves:
    """`since`: when the first block after the last save was dropped, in monotonic seconds."""

    since: float | None = None
    said: bool = False

    def dropped(self, now: float) -> bool:
        """Note a dropped block; return whether to say now that nothing is saved."""
        if self.since is None:
            self.since = now
        if self.said or now - self.since < PATIENCE_SECONDS:
            return False
        self.said = True
        return True

    def saved(self) -> bool:
        """Note a saved block; return whether to say that saving goes on."""
        said, self.since, self.said = self.said, None, False
        return said
