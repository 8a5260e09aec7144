"""How well columns tell a value, on prompts that no regression saw; and how sure that is.

Rows belong to groups, the responses to one prompt: folds and bootstrap draws are of whole groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Groups = NDArray[np.int64]

FOLDS = 5
PENALTIES = (1.0, 10.0, 100.0, 1000.0)
DRAWS = 1000


def centred(values: Floats, group: Groups) -> Floats:
    """Return values [rows] or [rows, columns] less the mean of their group."""
    _, place, count = np.unique(group, return_inverse=True, return_counts=True)
    sums = np.zeros((count.size, *values.shape[1:]))
    np.add.at(sums, place, values)
    return values - (sums.T / count).T[place]


def ridge(x: Floats, y: Floats, new: Floats, penalty: float) -> Floats:
    """Return predictions for `new` of a ridge regression on standardised columns."""
    middle, spread = x.mean(0), x.std(0) + 1e-9
    scaled = (x - middle) / spread
    weights = np.linalg.solve(scaled.T @ scaled + penalty * np.eye(x.shape[1]), scaled.T @ (y - y.mean()))
    return np.asarray(y.mean() + (new - middle) / spread @ weights)


def held_out(x: Floats, y: Floats, group: Groups, penalties: Sequence[float] = PENALTIES) -> Floats:
    """Return a prediction for each row, of a regression that saw no row of its prompt."""
    fold = np.unique(group, return_inverse=True)[1] % FOLDS
    found = np.zeros_like(y)
    for own in range(FOLDS):
        rest, mine = fold != own, fold == own
        best = 0
        if len(penalties) > 1:
            inner = [held_out(x[rest], y[rest], group[rest], [each]) for each in penalties]
            best = int(np.argmin([((guess - y[rest]) ** 2).sum() for guess in inner]))
        found[mine] = ridge(x[rest], y[rest], x[mine], penalties[best])
    return found


def redrawn(group: Groups) -> tuple[Groups, Floats]:
    """Return the place of each row's group, and how often [1 + DRAWS, groups] a draw has it: first once."""
    _, place, count = np.unique(group, return_inverse=True, return_counts=True)
    times = np.random.default_rng(0).multinomial(count.size, np.full(count.size, 1 / count.size), DRAWS)
    return place, np.vstack([np.ones(count.size), times])


def correlations(predictions: Sequence[Floats], y: Floats, group: Groups) -> Floats:
    """Return [predictions, 1 + DRAWS]: each one's correlation with `y`, and those of prompts drawn anew."""
    place, times = redrawn(group)
    rows = []
    for p in predictions:
        n, sp, sy, spp, syy, spy = (
            times @ np.bincount(place, each) for each in (np.ones_like(y), p, y, p * p, y * y, p * y)
        )
        spread = np.sqrt(np.maximum(spp / n - (sp / n) ** 2, 1e-12) * (syy / n - (sy / n) ** 2))
        rows.append((spy / n - sp * sy / n**2) / spread)
    return np.array(rows)


def foreseeable(again: Floats, y: Floats, group: Groups) -> Floats:
    """Return [1 + DRAWS]: the correlation of `y` with its expectation, of which `again` is an estimate.

    Means are 0. Chance in `again` is independent of that in `y`, so their covariance is what both expect.
    """
    place, times = redrawn(group)
    shared, all_of_it = (times @ np.bincount(place, each) for each in (again * y, y * y))
    return np.sqrt(np.maximum(shared / all_of_it, 0))


def told(names: Iterable[str], draws: Floats) -> dict[str, str]:
    """Return each figure and its 95 % interval."""
    ends = np.percentile(draws[:, 1:], [2.5, 97.5], axis=1)
    rows = zip(names, draws[:, 0], *ends, strict=True)
    return {name: f"{figure:.2f} ({low:.2f} to {high:.2f})" for name, figure, low, high in rows}
