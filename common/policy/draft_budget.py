"""How many drafted tokens of each request a step verifies: the paper's Algorithm 1, token by token.

Invariants (tests/property/test_drafting.py asserts them):
- a draft is only ever cut at its end: the verified tokens are a prefix of the draft;
- the choice is optimal: no other prefixes have a greater value, as `choose_lengths` defines the value;
- a likelier token is never dropped for a less likely one, high priority never served after low at equal
  chances, and better drafts never make the choice smaller;
- where drafts do not pay no draft is verified, and every `PAUSE_STEPS` steps a draft is tried all the same;
- the compiled loops over tokens choose and count as the same algorithm in numpy (test_draft_loops.py).

The paper plans one draft length for all requests of a priority, from the mean acceptance by position.
Here every token has its own probability of acceptance, from the score that its tree gave it and from how
often tokens of that score were accepted. The paper's rule is applied to single tokens: take the one with
the greatest marginal benefit, as long as tokens per second rise. bench/drafts/budget.py compares both.
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
"""Weight of a token of a high-priority request (the paper's lambda)."""

COST_FACTOR = 1.15
"""A drafted token must bring this many times what it costs: chances are estimates, and 1.1 to 1.4 measured
best."""

PAUSE_AFTER_STEPS = 16
"""After this many steps in a row in which no draft was worth verifying, drafting pauses."""

PAUSE_STEPS = 32
"""Steps of a pause; then one draft is verified in any case, to learn whether drafts pay again."""

PROBE_TOKENS = 4
"""Tokens of that draft: 4 drafted tokens in 33 steps."""

REFRESH_STEPS = 32
"""Steps between updates of the rates: one step's tokens change them little, and an update takes 100 us."""

FIRST_REFRESHES = (2, 4, 8, 16)
"""Steps after which they are updated as well: what a new engine assumes of its drafts is too good."""

_EDGES = np.array(SCORE_EDGES, dtype=np.float32)
_CLASSES = len(SCORE_EDGES) + 1
_PRIOR = np.array(PRIOR * 2)
_CELLS = 2 * CELLS  # those of trees, then those of a head, whose scores are its own probabilities

Counts = NDArray[np.int32]
Scores = NDArray[np.float32]


@dataclass(slots=True)
class Choice:
    """What a step verifies: the first `keep[i]` tokens of draft i. `cells` [n, width], `slots` [n].

    `by_head` [n]: of the head's draft, not of the tree's; `saves`: the seconds that a head's drafts save.
    """

    keep: Counts
    cells: Counts
    slots: NDArray[np.intp]
    by_head: NDArray[np.bool_] | None = None
    saves: float = 0.0


def choose_lengths(
    chances: NDArray[np.float64],
    seconds: NDArray[np.float64],
    others: float,
    weights: NDArray[np.float64] | None = None,
) -> Counts:
    """Return how many tokens of each draft to verify.

    `chances` [n, width] are probabilities of acceptance: they fall along a draft and are 0 past its end.
    `seconds[k]` is the step's time with k drafted tokens, k = 0 to n x width; `others` is how many tokens the
    step generates for requests without drafts, `weights` [n] is the weight of each request's tokens (None:
    1).

    Tokens are taken in order of falling weighted chance. Of all numbers of tokens so taken, the highest
    tokens per second is the worth of a second; the choice maximises tokens - `COST_FACTOR` x seconds x worth.
    """
    keep = np.empty(len(chances), dtype=np.int32)
    _native.choose_drafts(chances, seconds, others, COST_FACTOR, weights, keep)
    return keep


class _Tables:
    """What was learned of each group, by its slot."""

    def __init__(self, slots: int) -> None:
        self.counts = np.zeros((slots, 2, _CELLS))  # verified, accepted
        self.fresh = np.zeros((slots, 2, _CELLS), dtype=np.int64)  # the same, since the last refresh
        self.unreported = np.zeros((slots, 2, _CELLS), dtype=np.int64)  # the same, since `take_learned`
        self.prior = np.zeros((slots, _CELLS))
        self.rates = np.zeros((slots, _CELLS))
        self.reported = np.zeros(slots, dtype=bool)  # whether the prior was reported for this very group

    def clear(self, slot: int) -> None:
        self.counts[slot] = self.fresh[slot] = self.unreported[slot] = 0

    def doubled(self) -> _Tables:
        more = _Tables(2 * len(self.reported))
        for name, table in vars(self).items():
            getattr(more, name)[: len(table)] = table
        return more


class DraftBudget:
    """One engine's choice of drafts, and its acceptance statistics. `width`: most tokens of a draft.

    In each step: `should_draft()`; if so draft, `choose`, verify, and `learn` from what was accepted.
    `context` is how many tokens the step's requests have, on average; whoever knows sets it before.
    """

    def __init__(self, costs: StepCosts, width: int) -> None:
        self._costs, self._width = costs, width
        self.sibling_seconds = costs.sibling
        self.context = 0.0
        self._batch, self._seconds = 0, np.zeros(0)
        self._bases = _bases(np.arange(width))
        self._useless_steps, self._paused_steps, self._age = 0, 0, 0
        self._slots: dict[str, int] = {}
        self._free: list[int] = []
        self._all = np.zeros((2, _CELLS))  # tokens verified and right, of all groups
        self._common = _rates(self._all, _PRIOR, PRIOR_WEIGHT)
        self._tables = _Tables(16)

    def slot(self, group_id: str, reported: Sequence[float] = ()) -> int:
        """Return a group's place in the tables; `reported`: acceptance rates that other engines found."""
        slot = self._slots.get(group_id)
        if slot is None:
            slot = self._slots[group_id] = self._free.pop() if self._free else len(self._slots)
            if slot == len(self._tables.reported):
                self._tables = self._tables.doubled()
            self._tables.clear(slot)
        elif not reported:
            return slot
        group = self._tables
        group.reported[slot] = bool(reported)
        group.prior[slot] = self._common
        if reported:
            group.prior[slot, :CELLS] = reported
        group.rates[slot] = _rates(group.counts[slot], group.prior[slot], GROUP_WEIGHT)
        return slot

    def forget(self, group_id: str) -> None:
        """Drop a group's statistics."""
        slot = self._slots.pop(group_id, None)
        if slot is not None:
            self._free.append(slot)

    def should_draft(self) -> bool:
        """Return whether to draft in this step. Call it once a step: it counts steps of a pause."""
        if self._useless_steps < PAUSE_AFTER_STEPS:
            return True
        self._paused_steps += 1
        return self._paused_steps > PAUSE_STEPS

    def choose(
        self,
        slots: NDArray[np.intp],
        scores: Scores,
        lengths: Counts,
        batch: int,
        high: NDArray[np.bool_] | None = None,
        head: tuple[Scores, Counts] | None = None,
    ) -> Choice:
        """Choose among n drafts with `scores` [n, width], `lengths` [n], in a step of `batch` requests.

        `head`: scores [n, k] and lengths [n] of a head's drafts, taken where they promise more tokens.
        """
        n, width = scores.shape
        cells, chances = self._rate(scores, lengths, slots, self._bases)
        by_head, more = None, 0.0
        if head is not None:
            by_head, more = self._replace(cells, chances, slots, *head)
            lengths = np.where(by_head, head[1], lengths)
        weights = None if high is None else np.where(high, HIGH_WEIGHT, 1.0)
        batch = max(batch, n)
        seconds = self.seconds(batch, n * width)
        keep = choose_lengths(chances, seconds, batch - n, weights)
        if np.count_nonzero(keep):  # any() takes a microsecond more
            self._useless_steps = self._paused_steps = 0
        elif self._useless_steps >= PAUSE_AFTER_STEPS:
            self._paused_steps = 0
            likeliest = int(chances[:, 0].argmax())
            keep[likeliest] = min(PROBE_TOKENS, int(lengths[likeliest]))
        elif np.count_nonzero(lengths):  # an empty tree says nothing about drafts
            self._useless_steps += 1
        # Without the head's tokens, others would take so long to come.
        saves = more * float(seconds[keep.sum()]) / (batch + float(chances.sum())) if more else 0.0
        return Choice(keep, cells, slots, by_head, saves)

    def _rate(
        self, scores: Scores, lengths: Counts, slots: NDArray[np.intp], bases: NDArray[np.intp]
    ) -> tuple[Counts, NDArray[np.float64]]:
        """Return each token's cell, and P(it and all before it are accepted)."""
        cells, chances = np.empty(scores.shape, dtype=np.int32), np.empty(scores.shape)
        _native.rate_drafts(scores, lengths, slots, _EDGES, bases, self._tables.rates, cells, chances)
        return cells, chances

    def _replace(
        self,
        cells: Counts,
        chances: NDArray[np.float64],
        slots: NDArray[np.intp],
        head: Scores,
        lengths: Counts,
    ) -> tuple[NDArray[np.bool_], float]:
        """Put the head's cells and chances where their sum is greater; return where, and how much more."""
        k = head.shape[1]
        own, likely = self._rate(head, lengths, slots, self._bases + CELLS)
        more = likely.sum(axis=1) - chances.sum(axis=1)
        better: NDArray[np.bool_] = more > 0
        cells[better, :k], chances[better, :k], chances[better, k:] = own[better], likely[better], 0.0
        return better, float(more[better].sum())

    def learn(self, choice: Choice, accepted: Counts) -> None:
        """Count the tokens of a choice: `accepted` [n] of each draft were, -1 where none was verified."""
        group = self._tables
        _native.count_drafts(choice.cells, choice.keep, accepted, choice.slots, group.fresh, group.unreported)
        self._age += 1
        if self._age % REFRESH_STEPS == 0 or self._age in FIRST_REFRESHES:
            self._refresh()

    def take_learned(self, group_id: str) -> tuple[list[int], list[int]]:
        """Return how many tokens of a group were verified and accepted since the last call, both by cell."""
        slot = self._slots.get(group_id)
        if slot is None:
            return [], []
        drafted, right = self._tables.unreported[slot, :, :CELLS].tolist()
        self._tables.unreported[slot] = 0
        return drafted, right

    def _refresh(self) -> None:
        group = self._tables
        slots = np.flatnonzero(group.fresh[:, 0].any(axis=1))
        fresh = group.fresh[slots]
        totals = fresh[:, 0].sum(axis=1)
        counts = group.counts[slots] * 0.5 ** (totals / HALF_LIFE)[:, None, None] + fresh
        self._all = self._all * 0.5 ** (totals.sum() / HALF_LIFE) + fresh.sum(axis=0)
        self._common = _rates(self._all, _PRIOR, PRIOR_WEIGHT)
        reported = group.reported[slots, None] & (np.arange(_CELLS) < CELLS)
        prior = np.where(reported, group.prior[slots], self._common)
        group.counts[slots], group.prior[slots], group.fresh[slots] = counts, prior, 0
        group.rates[slots] = _rates(counts, prior, GROUP_WEIGHT)

    def chances(
        self, slots: NDArray[np.intp], scores: Scores, places: NDArray[np.intp]
    ) -> NDArray[np.float64]:
        """Return P(a token and all before it are accepted) for tokens at these places of drafts."""
        cells = _EDGES.searchsorted(scores, side="right")
        cells += _bases(places)
        return self._tables.rates[slots, cells]

    def seconds(self, batch: int, most: int) -> NDArray[np.float64]:
        """Return the seconds of a step of `batch` requests with 0 to `most` drafted tokens."""
        if batch != self._batch or most >= len(self._seconds):
            self._batch = batch
            self._seconds = self._costs.by_rows(batch, max(most, batch * self._width))
        whole, each = self._costs.longer(batch, self.context)
        if not whole and not each:
            return self._seconds[: most + 1]
        return self._seconds[: most + 1] + (whole + each * np.arange(most + 1))


def _bases(places: NDArray[np.intp]) -> NDArray[np.intp]:
    # The first cell of each place of a draft.
    return (np.searchsorted(PLACES, places, side="right") - 1) * _CLASSES


def _rates(counts: NDArray[np.float64], prior: NDArray[np.float64], weight: float) -> NDArray[np.float64]:
    # As `Acceptance.rates`, for [..., 2, _CELLS].
    return (counts[..., 1, :] + weight * prior) / (counts[..., 0, :] + weight)
