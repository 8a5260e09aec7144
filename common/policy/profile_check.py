"""Whether a profile of step times is still right, compared with the fastest steps that are seen.

Invariants (tests/unit/test_profile_check.py asserts them):
- a profile is off if, in `WINDOWS` windows in a row, the fastest steps without drafts take more than `FACTOR`
  times as long as the profile says; or if in as many windows the steps take less than one `FACTOR`th;
- a busy while is not enough, nor single steps, nor steps that also prefill or verify: the profile has none.

A profile holds the shortest of several steps, so the profile is compared with the shortest of many. A profile
that was measured while others used the machine says too much; a profile of a machine that has become slower
says too little. Its times are then also wrong relative to each other, as each was measured at another moment,
and these ratios decide how much is drafted.
"""

from __future__ import annotations

import math

from seer.common.policy.draft_costs import StepCosts

FACTOR = 1.5
"""Largest ratio between the profile and the fastest steps."""

EVERY, WINDOW, WINDOWS = 8, 32, 16
"""Of so many steps one is looked at, so many of these are a window, so many windows decide: some minutes."""


class ProfileCheck:
    """`off`: once the profile is off, how many times as long as it says the fastest steps take; 0 before."""

    def __init__(self, costs: StepCosts) -> None:
        self._costs = costs
        self._plain: dict[int, float] = {}  # seconds of a step by its requests
        self._steps = self._seen = self._slower = self._faster = 0
        self._least = math.inf
        self.off = 0.0

    def looks(self) -> bool:
        """Whether to `add` the step that just ended; call it once a step that only decoded one token each."""
        self._steps += 1
        return self._steps % EVERY == 0

    def add(self, requests: int, context: float, seconds: float) -> None:
        """Count a step of so many requests with `context` tokens on average."""
        if requests not in self._plain:
            self._plain[requests] = self._costs.seconds(requests, 0)
        expected = self._plain[requests] + self._costs.longer(requests, context)[0]
        self._least = min(self._least, seconds / expected)
        self._seen += 1
        if self._seen == WINDOW:
            self._slower = self._slower + 1 if self._least > FACTOR else 0
            self._faster = self._faster + 1 if self._least * FACTOR < 1 else 0
            if max(self._slower, self._faster) >= WINDOWS:
                self.off = self._least
            self._seen, self._least = 0, math.inf
