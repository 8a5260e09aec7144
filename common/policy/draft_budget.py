"""How many drafted tokens of each request a step verifies: Algorithm 1, token by token.

Invariants (tests/property/test_drafting.py asserts them):
- what is kept of a draft is a beginning of it, and never past its end;
- the choice is the best there is: no other beginnings are worth more, by what `best` calls worth;
- a likelier token is never dropped for a less likely one, high priority never served after low at equal
  chances, and better drafts never make the choice smaller;
- where nothing pays nothing is drafted, and every `PAUSE_STEPS` one draft is tried all the same;
- the compiled loops over tokens choose and count what the same lines in numpy do (test_draft_loops.py).

The paper plans one draft length for all requests of a priority from average acceptance by position.
Here every token has its own chance, from its tree's score and what became of such tokens before, so
the same rule (take the token of the greatest marginal benefit, as long as tokens per second rise) is
applied to tokens. bench/drafts/budget.py compares both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from seer import _native
from seer.common.policy.draft_costs import (
    CELLS,
    GROUP_WEIGHT,
    HALF_LIFE,
    PLACES,
    PRIOR,
    PRIOR_WEIGHT,
    SCORE_EDGES,
    StepCosts,
)

HIGH_WEIGHT = 2.0
"""What a token of a high-priority request counts (the paper's lambda)."""

PRICE = 1.15
"""A row must bring this much more than it costs: chances are estimates, and 1.1 to 1.4 measure best."""

PAUSE_AFTER_STEPS = 16
"""After so many steps in a row in which no draft was worth a row, drafting rests."""

PAUSE_STEPS = 32
"""Steps of rest; then one draft is verified unasked, or nothing would ever be learned again."""

PROBE_TOKENS = 4
"""Tokens of that draft: 4 rows in 33 steps."""

REFRESH_STEPS = 32
"""Learned counts become rates this often: one step's tokens change little, and it takes 100 us."""

_EDGES = np.array(SCORE_EDGES, dtype=np.float32)
_CLASSES = len(SCORE_EDGES) + 1
_PRIOR = np.array(PRIOR)

Counts = NDArray[np.int32]
Scores = NDArray[np.float32]


@dataclass(slots=True)
class Choice:
    """What a step verifies: `keep[i]` first tokens of draft i; `cells` [n, width], `slots` [n]."""

    keep: Counts
    cells: Counts
    slots: NDArray[np.intp]


def best(
    chances: NDArray[np.float64],
    seconds: NDArray[np.float64],
    others: float,
    weights: NDArray[np.float64] | None = None,
) -> Counts:
    """Return how many tokens of each draft to verify.

    `chances` [n, width] fall along a draft and are 0 past its end; `seconds[k]` is the step's time
    with k drafted tokens, k = 0 to n x width; `others` are the tokens that the step brings to requests
    without drafts, `weights` [n] is what a token of each other request counts (None: 1).

    Tokens are taken by falling weighted chance. With the best tokens per second that this can reach
    as the worth of a second, the choice is the one with the most tokens less `PRICE` x seconds x worth.
    """
    keep = np.empty(len(chances), dtype=np.int32)
    _native.choose_drafts(chances, seconds, others, PRICE, weights, keep)
    return keep


class _Tables:
    """What is known of each group, by its slot."""

    def __init__(self, slots: int) -> None:
        self.counts = np.zeros((slots, 2, CELLS))  # verified, right
        self.fresh = np.zeros((slots, 2, CELLS), dtype=np.int64)  # the same, since the last refresh
        self.untold = np.zeros((slots, 2, CELLS), dtype=np.int64)  # the same, since last taken
        self.prior = np.zeros((slots, CELLS))
        self.rates = np.zeros((slots, CELLS))
        self.told = np.zeros(slots, dtype=bool)  # the prior is this group's own, not that of all

    def clear(self, slot: int) -> None:
        self.counts[slot] = self.fresh[slot] = self.untold[slot] = 0

    def doubled(self) -> _Tables:
        more = _Tables(2 * len(self.told))
        for name, table in vars(self).items():
            getattr(more, name)[: len(table)] = table
        return more


class DraftBudget:
    """One engine's choices and what it learns from them. `width` is the most tokens of a draft.

    A step: `wanted()`; if so draft, `choose`, verify, and tell `learn` what was right.
    """

    def __init__(self, costs: StepCosts, width: int) -> None:
        self._costs, self._width = costs, width
        self.sibling_seconds = costs.sibling
        self._batch, self._seconds = 0, np.zeros(0)
        self._bases = _bases(np.arange(width))
        self._barren, self._rested, self._age = 0, 0, 0
        self._slots: dict[str, int] = {}
        self._free: list[int] = []
        self._all = np.zeros((2, CELLS))  # tokens verified and right, of all groups
        self._tables = _Tables(16)

    def slot(self, group_id: str, told: Sequence[float] = ()) -> int:
        """Return a group's place in the tables; `told` are rates that others learned of it."""
        slot = self._slots.get(group_id)
        if slot is None:
            slot = self._slots[group_id] = self._free.pop() if self._free else len(self._slots)
            if slot == len(self._tables.told):
                self._tables = self._tables.doubled()
            self._tables.clear(slot)
        elif not told:
            return slot
        group = self._tables
        group.told[slot] = bool(told)
        group.prior[slot] = told or _rates(self._all, _PRIOR, PRIOR_WEIGHT)
        group.rates[slot] = _rates(group.counts[slot], group.prior[slot], GROUP_WEIGHT)
        return slot

    def forget(self, group_id: str) -> None:
        """Drop what was learned of a group."""
        slot = self._slots.pop(group_id, None)
        if slot is not None:
            self._free.append(slot)

    def wanted(self) -> bool:
        """Say whether to draft in this step; asked once a step."""
        if self._barren < PAUSE_AFTER_STEPS:
            return True
        self._rested += 1
        return self._rested > PAUSE_STEPS

    def choose(
        self,
        slots: NDArray[np.intp],
        scores: Scores,
        lengths: Counts,
        batch: int,
        high: NDArray[np.bool_] | None = None,
    ) -> Choice:
        """Choose among n drafts with `scores` [n, width], `lengths` [n], in a step of `batch` requests."""
        n, width = scores.shape
        cells, chances = np.empty((n, width), dtype=np.int32), np.empty((n, width))
        _native.rate_drafts(scores, lengths, slots, _EDGES, self._bases, self._tables.rates, cells, chances)
        weights = None if high is None else np.where(high, HIGH_WEIGHT, 1.0)
        batch = max(batch, n)
        keep = best(chances, self.seconds(batch, n * width), batch - n, weights)
        if np.count_nonzero(keep):  # any() takes a microsecond more
            self._barren = self._rested = 0
        elif self._barren >= PAUSE_AFTER_STEPS:
            self._rested = 0
            likeliest = int(chances[:, 0].argmax())
            keep[likeliest] = min(PROBE_TOKENS, int(lengths[likeliest]))
        elif np.count_nonzero(lengths):  # an empty tree is no verdict on drafts
            self._barren += 1
        return Choice(keep, cells, slots)

    def learn(self, choice: Choice, accepted: Counts) -> None:
        """Count what became of a choice: `accepted` [n] tokens were right, -1 where none was verified."""
        group = self._tables
        _native.count_drafts(choice.cells, choice.keep, accepted, choice.slots, group.fresh, group.untold)
        self._age += 1
        if self._age % REFRESH_STEPS == 0:
            self._refresh()

    def take_learned(self, group_id: str) -> tuple[list[int], list[int]]:
        """Return how many tokens of a group were verified, and right, by cell, since last asked."""
        slot = self._slots.get(group_id)
        if slot is None:
            return [], []
        drafted, right = self._tables.untold[slot].tolist()
        self._tables.untold[slot] = 0
        return drafted, right

    def _refresh(self) -> None:
        group = self._tables
        slots = np.flatnonzero(group.fresh[:, 0].any(axis=1))
        fresh = group.fresh[slots]
        totals = fresh[:, 0].sum(axis=1)
        counts = group.counts[slots] * 0.5 ** (totals / HALF_LIFE)[:, None, None] + fresh
        self._all = self._all * 0.5 ** (totals.sum() / HALF_LIFE) + fresh.sum(axis=0)
        common = _rates(self._all, _PRIOR, PRIOR_WEIGHT)
        prior = np.where(group.told[slots, None], group.prior[slots], common)
        group.counts[slots], group.prior[slots], group.fresh[slots] = counts, prior, 0
        group.rates[slots] = _rates(counts, prior, GROUP_WEIGHT)

    def chances(
        self, slots: NDArray[np.intp], scores: Scores, places: NDArray[np.intp]
    ) -> NDArray[np.float64]:
        """Return P(a token, and all before it, is right) of tokens at these places of drafts: one each."""
        cells = _EDGES.searchsorted(scores, side="right")
        cells += _bases(places)
        return self._tables.rates[slots, cells]

    def seconds(self, batch: int, most: int) -> NDArray[np.float64]:
        """Return the seconds of a step of `batch` requests with 0 to `most` drafted tokens."""
        if batch != self._batch or most >= len(self._seconds):
            self._batch = batch
            self._seconds = np.array(self._costs.by_rows(batch, max(most, batch * self._width)))
        return self._seconds[: most + 1]


def _bases(places: NDArray[np.intp]) -> NDArray[np.intp]:
    # The first cell of each place of a draft.
    return (np.searchsorted(PLACES, places, side="right") - 1) * _CLASSES


def _rates(counts: NDArray[np.float64], prior: NDArray[np.float64], weight: float) -> NDArray[np.float64]:
    # As `Acceptance.rates`, for [..., 2, CELLS].
    return (counts[..., 1, :] + weight * prior) / (counts[..., 0, :] + weight)
