"""Length estimates: how long a group's responses will be.

An estimator sees what is known of groups and says what to expect of a response that has not begun.
It never changes a token: a bad estimate costs time, not correctness.

Invariants (tests/property/test_length.py asserts them):
- an estimate is from 1 token to the cap, and a function of what the estimator was shown, in order;
- `Longest` says the cap until a response finishes, then the longest finished one: it falls once,
  and only rises from there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Estimate:
    """The median length in tokens, at most the cap; `spread` is the deviation of its natural log.

    A `spread` of 0 says nothing of how sure it is: the paper's plain number.
    """

    tokens: float
    spread: float = 0.0


QUANTILE_90 = 1.2816
"""Nine of ten draws of a normal distribution lie below so many deviations above its middle."""


@dataclass(slots=True)
class Error:
    """How far responses that finished were from what was foretold.

    `absolute` and `signed` are sums of ln(actual / foretold) over `responses`; `beyond` of them were
    longer than the 90 % quantile. Of `unpredicted` ones nothing had been said but the cap.
    """

    responses: int = 0
    unpredicted: int = 0
    absolute: float = 0.0
    signed: float = 0.0
    beyond: int = 0

    def count(self, foretold: Estimate | None, tokens: int) -> None:
        """Add one response; None: of its group nothing was foretold."""
        if foretold is None or tokens < 1:
            self.unpredicted += 1
            return
        log = math.log(tokens / foretold.tokens)
        self.responses += 1
        self.absolute += abs(log)
        self.signed += log
        self.beyond += log > QUANTILE_90 * foretold.spread

    def summary(self) -> dict[str, float]:
        """Return both counts, the means of absolute and signed error, and the share beyond."""
        of = max(self.responses, 1)
        return {
            "predicted": self.responses,
            "unpredicted": self.unpredicted,
            "error": round(self.absolute / of, 4),
            "bias": round(self.signed / of, 4),
            "beyond_90": round(self.beyond / of, 4),
        }


@dataclass(slots=True)
class Evidence:
    """What is known of one group: tokens by response index. No response is longer than `cap`."""

    cap: int
    finished: dict[int, int] = field(default_factory=dict)
    unfinished: dict[int, int] = field(default_factory=dict)

    def forget(self) -> None:
        """Take everything back."""
        self.finished.clear()
        self.unfinished.clear()


class Estimator(Protocol):
    """What tells lengths. Whoever owns the evidence changes it and says so here."""

    @property
    def share(self) -> float:
        """How much a group tells: the share of the variance of log lengths that lies between groups."""

    def opened(self, group: Evidence) -> None:
        """Take note of a new group."""

    def ended(self) -> None:
        """Take note that a response of some group finished."""

    def refit(self) -> bool:
        """Learn what groups have in common if it is time; True: all estimates may have changed."""

    def estimates(self, groups: Sequence[Evidence]) -> list[Estimate]:
        """Return what to expect of a response of each group that has not begun."""


class Longest:
    """The paper's estimate (Algorithm 2); it takes no account of unfinished responses."""

    share = 1.0

    def opened(self, group: Evidence) -> None:
        """Nothing is common to groups."""

    def ended(self) -> None:
        """Nor learnt from them."""

    def refit(self) -> bool:
        """Return False."""
        return False

    def estimates(self, groups: Sequence[Evidence]) -> list[Estimate]:
        """Return the longest finished length of each group, or its cap."""
        return [
            Estimate(float(min(max(1, *group.finished.values()) if group.finished else group.cap, group.cap)))
            for group in groups
        ]


ESTIMATORS: dict[str, Callable[[], Estimator]] = {"longest": Longest}
"""By the names that policies give."""
