"""Which groups of a stream of prompts are accepted, and when to draw more prompts. Pure decisions on
positions.

Invariants:
- by default the first `target` positions of the stream that are kept are accepted, whatever the order in
  which they finish: neither the schedule nor the length of responses has an influence;
- with `first_finished_biased` the first `target` kept that finish are accepted, so both have an influence;
- a position is accepted at most once, at most `target` are, and at most `max_prompts` are drawn.
"""

from __future__ import annotations

import math
from typing import Literal

from seer.common.errors import InvalidField

Outcome = Literal["accepted", "dropped", "failed", "surplus", "cancelled"]
"""`dropped`: not kept (by default: its rewards do not differ). `failed`: no group, or no rewards.

`surplus`: finished, but not needed. `cancelled`: cancelled before it finished.
"""

REFILL_SHARE = 8
"""A new wave has at least target / 8 prompts, or as many as are in progress: each wave is a submission."""


class Selection:
    """Raises `InvalidField` for an invalid target, oversampling factor or limit.

    `accepted`: positions accepted so far, in the order of these decisions, which are final.
    """

    def __init__(self, target: int, oversample: float, max_prompts: int, first_finished_biased: bool) -> None:
        if target < 1:
            raise InvalidField("target", target, "must be 1 or more")
        if not 1 <= oversample < math.inf:
            raise InvalidField("oversample", oversample, "must be finite and 1 or more")
        if max_prompts < target:
            raise InvalidField("max_prompts", max_prompts, f"must be target = {target} or more")
        self.accepted: list[int] = []
        self.drawn = 0
        self._target = target
        self._oversample = oversample
        self._max_prompts = max_prompts
        self._biased = first_finished_biased
        self._verdicts: dict[int, bool] = {}
        self._keeping = 0
        self._ended = False
        self._next = 0

    @property
    def complete(self) -> bool:
        """Whether `target` positions are accepted."""
        return len(self.accepted) == self._target

    @property
    def done(self) -> bool:
        """Whether the selection is final."""
        exhausted = self._ended or self.drawn == self._max_prompts
        return self.complete or (exhausted and len(self._verdicts) == self.drawn)

    def wanted(self) -> int:
        """Return how many prompts to draw now, so that `oversample` x the missing groups are in progress."""
        if self.done or self._ended:
            return 0
        pending = self.drawn - len(self._verdicts)
        missing = self._target - self._keeping
        more = min(math.ceil(missing * self._oversample) - pending, self._max_prompts - self.drawn)
        return more if more >= min(self._target / REFILL_SHARE, max(1, pending)) else 0

    def draw(self, count: int, ended: bool) -> None:
        """Add `count` positions in progress; `ended`: the stream has no more."""
        self.drawn += count
        self._ended = ended

    def judge(self, position: int, keep: bool) -> None:
        """Record whether a drawn position is kept; call it once for each."""
        self._verdicts[position] = keep
        self._keeping += keep
        if self._biased:
            if keep and not self.complete:
                self.accepted.append(position)
            return
        while self._next in self._verdicts and not self.complete:
            if self._verdicts[self._next]:
                self.accepted.append(self._next)
            self._next += 1

    def outcomes(self) -> list[Outcome]:
        """Return the outcome of every drawn position if no more are judged."""
        accepted = set(self.accepted)
        counted = self._next if self.complete and not self._biased else self.drawn
        outcomes: list[Outcome] = []
        for position in range(self.drawn):
            keep = self._verdicts.get(position)
            if position in accepted:
                outcomes.append("accepted")
            elif keep is None:
                outcomes.append("cancelled")
            else:
                outcomes.append("dropped" if not keep and position < counted else "surplus")
        return outcomes
