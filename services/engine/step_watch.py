"""Says when an engine stands still within a step: pure.

Invariants (tests/unit/test_step_watch.py):
- only one step that lasts counts: neither loading, nor an idle or sleeping engine, nor one that waits for the
  buffer or reads weights, all of which have deadlines of their own or need none;
- a stall of the whole process counts as one look (`common/process/watchdog.py`).
"""

from __future__ import annotations

from seer.common.process.watchdog import Watchdog

STEP_SECONDS = 300.0
"""A step that lasts longer will not end; vLLM waits as long for its ranks. Steps take milliseconds, on slow
CPUs seconds, and a minute where a kernel is compiled first."""

LOOK_SECONDS = 5.0
"""Time between two looks."""


class StepWatch:
    """Looks at which step is under way. `now`: seconds."""

    def __init__(self, now: float) -> None:
        self._watchdog = Watchdog(STEP_SECONDS, 2 * LOOK_SECONDS, now)
        self._seen = 0

    def stands_still(self, step: int, now: float) -> bool:
        """Add a look. `step`: the number of the step under way; 0: between steps, or something else runs."""
        same = step != 0 and step == self._seen
        self._seen = step
        return self._watchdog.expired(now, missing=same)
