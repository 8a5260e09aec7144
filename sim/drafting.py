"""Drafts in simulated engines: acceptance from the paper, and the production's choice of draft lengths.

A drafted token at place k is accepted with probability alpha^k; alpha follows from the paper's mean
acceptance length with n other responses of the group in the tree (its linear drafts on Qwen2-VL). Draft
lengths are chosen by `common/policy/draft_budget.choose_lengths`, with the instance's step times. With a
recorded `Workload.acceptance` all requests have what was measured with about as large a batch and as long
contexts instead; then the times of steps, recorded as well, have the time of drafting.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np

from seer.common.policy.draft_budget import HIGH_WEIGHT, choose_lengths
from seer.sim.workload import Accepted, Model

SIBLINGS = (0, 1, 5, 15)
"""Numbers of siblings (other responses of the group in the tree) with a published acceptance length."""

ACCEPTANCE_LENGTH = (1.70, 2.04, 2.32, 2.53)
"""Mean tokens per step with that many siblings, the bonus token included."""

MAX_DRAFT = 8
"""Most tokens drafted per request and step, in the paper's tables as here."""

CLASSES = 2 * len(SIBLINGS)
"""Classes of chunks: one per number of siblings, and the same again for probes, whose drafts come first."""

DRAFT_SHARE = 0.02
"""Time of drafting as a share of the step: 1.9 to 2.6 % were measured (docs/drafts.md)."""


def kind_of(siblings: int, probe: bool) -> int:
    """Return the class of a chunk whose group has this many other responses started."""
    return bisect_right(SIBLINGS, siblings) - 1 + len(SIBLINGS) * probe


def _alpha(mean: float) -> float:
    """Return the alpha with which drafts of `MAX_DRAFT` tokens give `mean` tokens per step."""
    low, high = 0.0, 1.0
    for _ in range(50):
        alpha = (low + high) / 2
        low, high = (alpha, high) if sum(alpha**k for k in range(MAX_DRAFT + 1)) < mean else (low, alpha)
    return low


_CHANCES = np.array([[_alpha(mean) ** k for k in range(1, MAX_DRAFT + 1)] for mean in ACCEPTANCE_LENGTH] * 2)
_WEIGHTS = np.array([1.0] * len(SIBLINGS) + [HIGH_WEIGHT] * len(SIBLINGS))
GAINS = np.concatenate([np.ones((CLASSES, 1)), 1 + _CHANCES.cumsum(axis=1)], axis=1)
"""Tokens per step [class, drafted tokens], the bonus token included."""


class Drafting:
    """Tokens per step by class, cached: batches that differ by a few percent share an entry.

    `share`: time of drafting as a share of the step.
    """

    share = DRAFT_SHARE

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], tuple[list[float], float]] = {}

    def rates(self, model: Model, counts: list[int], kv_tokens: float) -> tuple[list[float], float]:
        """Return the tokens per step of each class, and how many drafted tokens a step verifies."""
        key = (_coarse(int(kv_tokens)), *map(_coarse, counts))
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = _choose(model, key[1:], key[0])
        rates, drafted = known
        return rates, drafted * sum(counts) / sum(key[1:])


class RecordedDrafting(Drafting):
    """What was measured with the batch and the contexts that are nearest."""

    share = 0.0

    def __init__(self, acceptance: Sequence[Accepted]) -> None:
        super().__init__()
        batches, contexts, self._tokens, self._drafted = np.array(acceptance, np.float64).T
        self._places = np.log2([batches, contexts])

    def rates(self, model: Model, counts: list[int], kv_tokens: float) -> tuple[list[float], float]:
        """See `Drafting.rates`."""
        batch = sum(counts)
        here = np.log2([max(batch, 1), max(kv_tokens / max(batch, 1), 1.0)])
        nearest = int(np.square(self._places - here[:, None]).sum(axis=0).argmin())
        return [float(self._tokens[nearest])] * CLASSES, batch * float(self._drafted[nearest])


def _coarse(number: int) -> int:
    """Round to 4 significant bits."""
    shift = max(0, number.bit_length() - 4)
    return (number >> shift) << shift


def _choose(model: Model, counts: tuple[int, ...], kv_tokens: float) -> tuple[list[float], float]:
    batch = sum(counts)
    kinds = np.repeat(np.arange(CLASSES), counts)
    rows = np.arange(batch * MAX_DRAFT + 1)
    read = np.maximum(model.kv, model.attend * (1 + rows / batch)) * kv_tokens
    compute = np.maximum(0.0, model.row * (batch + rows) - model.weights)
    seconds = (1 + DRAFT_SHARE) * (model.step + model.request * (batch + rows) + compute + read)
    keep = choose_lengths(np.ascontiguousarray(_CHANCES[kinds]), seconds, 0.0, _WEIGHTS[kinds])
    kept = np.bincount(kinds, weights=GAINS[kinds, keep], minlength=CLASSES)
    rates = [float(total / n) if n else 1.0 for total, n in zip(kept, counts, strict=True)]
    return rates, float(keep.sum())
