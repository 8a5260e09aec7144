"""What drafting costs and how often drafts are accepted: measured step times, acceptance statistics.

Invariants (tests/property/test_drafting.py asserts them):
- a step never gets faster with more requests or longer drafts, whatever noise was measured;
- acceptance rates are in (0, 1), and with no data they are the prior's;
- counts that are inconsistent (other lengths, more accepted than drafted) change nothing.

Whether a drafted token is accepted depends on the score that its tree gave it, and on its place in the
draft: a later one has the longer match behind it. So acceptance is counted by cell, one per place class and
score class. Scores alone are too optimistic: on our workloads tokens with a score of 0.97 are accepted 0.6
to 0.85 times.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise

import msgspec
import numpy as np
from numpy.typing import NDArray

from seer.common.errors import InvalidField
from seer.common.policy.graph_times import Axis, GraphTimes

SCORE_EDGES = (0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 0.9)
"""Lower bounds of the score classes but the first, which begins at 0."""

PLACES = (0, 1, 3)
"""First draft positions of the place classes: the first token, the next two, the rest."""

CELLS = len(PLACES) * (len(SCORE_EDGES) + 1)
"""Cell of a token = place class x score classes + score class."""

_CENTRES = (0.01, 0.035, 0.075, 0.15, 0.3, 0.5, 0.7, 0.85, 0.97)

PRIOR: tuple[float, ...] = tuple(0.75 * score for _ in PLACES for score in _CENTRES)
"""Acceptance rates before there is data: three quarters of the score, so that good drafts are tried."""

PRIOR_WEIGHT = 8.0
"""Weight of the prior, in drafted tokens per cell."""

GROUP_WEIGHT = 32.0
"""Weight of the rates of all groups as the prior of one group's, in drafted tokens per cell."""

HALF_LIFE = 12_000.0
"""Drafted tokens after which counts weigh half: acceptance changes as trees get more responses."""


_FAR = 2**20  # requests, or tokens of a draft


class StepCosts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds of one decode step as measured on a grid: `grid[i][j]` is T(batches[i], drafts[j]).

    T(B, gamma) is a step of B requests that verifies B x gamma drafted tokens in all. Noise is
    smoothed to the mean of the least rising surface above the measurements and the greatest below.
    `sibling` is what a path beside a request's first adds to the time of its rows.

    The grid holds for requests of `context` tokens. Attention to longer ones takes `reading` seconds more for
    each further token of each request: the first, and the second once for each of its drafted tokens.
    Where steps replay CUDA graphs, `graphs` has their times, and the grid is not used.
    Raises `InvalidField` for axes that do not rise, another shape, and times that are not positive.
    """

    batches: Axis
    drafts: Axis
    grid: tuple[tuple[float, ...], ...]
    sibling: float = 0.0
    context: int = 0
    reading: tuple[float, float] = (0.0, 0.0)
    graphs: GraphTimes | None = None

    def __post_init__(self) -> None:
        for name, axis, least in (("batches", self.batches, 1), ("drafts", self.drafts, 0)):
            if not axis or axis[0] < least or any(b <= a for a, b in pairwise(axis)):
                raise InvalidField(f"costs.{name}", axis, f"give rising numbers from {least} on")
        shape = [len(line) for line in self.grid]
        if shape != [len(self.drafts)] * len(self.batches):
            raise InvalidField("costs.grid", shape, "give one line per batch, one time per draft length")
        if not all(0 < seconds < float("inf") for line in self.grid for seconds in line):
            raise InvalidField("costs.grid", self.grid, "times must be positive seconds")
        if self.context < 0 or not all(0 <= seconds < float("inf") for seconds in self.reading):
            raise InvalidField("costs.reading", self.reading, "give seconds that are not negative")
        if self.graphs is not None and len(self.graphs.tokens) != len(self.batches):
            raise InvalidField("costs.graphs", len(self.graphs.tokens), "give one line per batch")
        msgspec.structs.force_setattr(self, "grid", _rising(self.grid))

    def seconds(self, batch: int, gamma: float) -> float:
        """Return T(batch, gamma), linear between and beyond what was measured, but for jumps of graphs."""
        if self.graphs is not None:
            return float(self.by_rows(batch, round(batch * gamma))[-1])
        drafts, curve = self._curve(batch)
        return _line(drafts, curve, gamma)

    def by_rows(self, batch: int, most: int) -> NDArray[np.float64]:
        """Return the seconds of a step of `batch` requests with 0 to `most` drafted tokens in all."""
        if self.graphs is not None:
            return self.graphs.by_rows(self.batches, batch, most)
        times: NDArray[np.float64] = np.interp(np.arange(most + 1) / batch, *self._curve(batch))
        return times

    def longer(self, batch: int, context: float) -> tuple[float, float]:
        """Return the further seconds of a step of `batch` requests with `context` tokens on average.

        The first for the step, the second for each drafted token of it.
        """
        beyond = max(0.0, context - self.context)
        return self.reading[0] * beyond * batch, self.reading[1] * beyond

    def _curve(self, batch: int) -> tuple[Axis, list[float]]:
        batches, drafts, surface = _surface(self)
        return drafts, [_line(batches, column, batch) for column in zip(*surface, strict=True)]


@lru_cache(maxsize=8)
def _surface(costs: StepCosts) -> tuple[Axis, Axis, Sequence[Sequence[float]]]:
    """Return a profile that reaches further than anyone asks, and rises there, too."""
    longer = list(accumulate((_line(costs.drafts, line, _FAR) for line in costs.grid), max))
    surface = [(*line, far) for line, far in zip(costs.grid, longer, strict=True)]
    larger = (_line(costs.batches, column, _FAR) for column in zip(*surface, strict=True))
    surface.append(tuple(accumulate(larger, max)))
    return (*costs.batches, _FAR), (*costs.drafts, _FAR), surface


def _rising(grid: Sequence[Sequence[float]]) -> tuple[tuple[float, ...], ...]:
    rows, columns = range(len(grid)), range(len(grid[0]))

    def mean(i: int, j: int) -> float:
        above = max(grid[a][b] for a in rows[: i + 1] for b in columns[: j + 1])
        below = min(grid[a][b] for a in rows[i:] for b in columns[j:])
        return (above + below) / 2

    return tuple(tuple(mean(i, j) for j in columns) for i in rows)


def _line(axis: Sequence[int], values: Sequence[float], at: float) -> float:
    if len(axis) == 1:
        return values[0]
    right = min(max(bisect_left(axis, at), 1), len(axis) - 1)
    share = (at - axis[right - 1]) / (axis[right] - axis[right - 1])
    # Below the first point nothing was measured: a line down from it could turn negative.
    return values[right - 1] + max(0.0, share) * (values[right] - values[right - 1])


class Acceptance:
    """Counts, by cell, drafted tokens and how many were accepted; older counts decay by `HALF_LIFE`."""

    __slots__ = ("drafted", "right")

    def __init__(self) -> None:
        self.drafted = [0.0] * CELLS
        self.right = [0.0] * CELLS

    def add(self, drafted: Sequence[int], accepted: Sequence[int]) -> bool:
        """Add drafted and accepted tokens, both by cell. False: inconsistent, nothing is added."""
        total = sum(drafted)
        fits = len(drafted) == len(accepted) == CELLS and all(
            0 <= right <= tried for right, tried in zip(accepted, drafted, strict=True)
        )
        if not fits or not total:
            return fits
        keep = 0.5 ** (total / HALF_LIFE)
        for cell in range(CELLS):
            self.drafted[cell] = self.drafted[cell] * keep + drafted[cell]
            self.right[cell] = self.right[cell] * keep + accepted[cell]
        return True

    def rates(self, prior: Sequence[float] = PRIOR, weight: float = PRIOR_WEIGHT) -> tuple[float, ...]:
        """Return P(a token of the cell and all before it are accepted); `prior` weighs `weight` tokens."""
        return tuple(
            (right + weight * before) / (drafted + weight)
            for drafted, right, before in zip(self.drafted, self.right, prior, strict=True)
        )


def to_percent(rates: Sequence[float]) -> list[int]:
    """Return rates as they are sent: whole percent, 1 to 99; never 0, so that drafts are tried again."""
    return [min(99, max(1, round(100 * rate))) for rate in rates]


def from_percent(percent: Sequence[int]) -> tuple[float, ...]:
    """Read what `to_percent` wrote; empty for anything that it cannot have written."""
    sound = len(percent) == CELLS and all(0 < value < 100 for value in percent)
    return tuple(value / 100 for value in percent) if sound else ()
