"""Lengths of responses as draws within groups, and groups as draws around a common middle.

ln length = theta of its group + sigma x e; theta is normal with mean `middle` and deviation `between`;
e has Huber's density, a normal one whose tails beyond `BEND` fall exponentially. That is the worst
density next to the normal one where a twentieth is contaminated (Huber 1964), so a few responses of
another kind pull little: where one in twenty is cut to a hundredth, estimates err 20 % less than under
a normal density; where one in twenty is 2.5 times as long, 2 % more. And its log is concave, so a longer
response never lowers what is expected. A response that has not ended, or ended at its cap, counts as
longer than that: the probability above.

Theta is kept on a grid of `POINTS` whole multiples of `STEP`, lengths are rounded to such multiples:
what depends on their difference is a line of numbers, and a response's likelihood a slice of it.

Invariants (tests/property/test_length.py asserts them):
- more and longer evidence never lowers a group's mean, at the same parameters;
- no parameter leaves its bounds, and nothing is infinite or no number, whatever the evidence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.intp]

STEP = 0.02
"""Resolution in natural log: 2 % of a length, a fifteenth of what lengths spread within any group."""

POINTS = 64
"""Points of the grid, over `SPAN` deviations between groups to both sides."""

SPAN = 4.5

BEND = 1.4
"""Where the density's tails begin, in sigma: Huber's figure for a twentieth contaminated."""

LOWEST, HIGHEST = 0.05, 2.5
"""Bounds of both deviations: none is ever nothing, and 2.5 is a factor of 12."""

ROWS = math.ceil(math.log(2**24) / STEP) + 1
"""Lengths that are told apart: a response has at most 2^24 tokens (`wire.drafts.Count`)."""

GROUPS_BEFORE = 2
"""What the parameters assumed before any data weigh, in groups and in responses.

They keep deviations from 0 while little is known; 4 would say that groups tell 7 % where they tell nothing.
"""

ROUNDS = 3
"""Most rounds of a fit. It starts where the last one ended, and there is a next one soon."""

FARTHEST = 8.0
"""Most steps that a round looks ahead."""

ENOUGH = 0.002
"""A round that moves no parameter by more than this ends a fit: a tenth of `STEP`."""

_ROOT = math.sqrt(2 * math.pi)
_CORE = math.erf(BEND / math.sqrt(2))
_TAIL = math.exp(-(BEND**2) / 2)
_HEIGHT = 1 / (_ROOT * _CORE + 2 * _TAIL / BEND)
_Z = np.linspace(-BEND, BEND, 561)
_ABOVE = 0.5 - _HEIGHT * _ROOT / 2 * np.array([math.erf(z / math.sqrt(2)) for z in _Z])

VARIANCE = _HEIGHT * (_ROOT * _CORE - 2 * BEND * _TAIL + 2 * _TAIL * (BEND + 2 / BEND + 2 / BEND**3))
"""Of e."""


class Responses(NamedTuple):
    """What is known of some groups' responses, one group after the other: `sizes` says how many of each.

    `rows` are logs of lengths in `STEP`s; where `bounds` is 1 they are bounds from below, else 0.
    """

    bounds: Ints
    rows: Ints
    sizes: Ints


def responses(tokens: Ints, bounds: Ints, sizes: Ints) -> Responses:
    """Return what is known, given lengths in tokens."""
    rows = np.rint(np.log(np.maximum(tokens, 1)) / STEP).astype(np.intp)
    return Responses(bounds, np.minimum(rows, ROWS - 1), sizes)


@dataclass(frozen=True, slots=True)
class Parameters:
    """What groups have in common; all in natural log. `sigma` is the scale within a group."""

    middle: float
    between: float
    sigma: float

    @staticmethod
    def of(vector: Floats) -> Parameters:
        """Return parameters from `vector`'s numbers, kept within bounds."""
        middle, between, sigma = vector.tolist()
        middle = min(max(middle, 0.0), ROWS * STEP)
        return Parameters(middle, _bounded(math.exp(between)), _bounded(math.exp(sigma)))

    def vector(self) -> Floats:
        """Return numbers of any sign: the middle, and logs of the deviations."""
        return np.array([self.middle, math.log(self.between), math.log(self.sigma)])

    @property
    def within(self) -> float:
        """Standard deviation within a group."""
        return self.sigma * math.sqrt(VARIANCE)

    @property
    def share(self) -> float:
        """Share of the variance that lies between groups."""
        return self.between**2 / (self.between**2 + self.within**2)


class Model:
    """The tables for one set of parameters."""

    def __init__(self, parameters: Parameters) -> None:
        self.parameters = parameters
        stride = max(1, math.ceil(2 * SPAN * parameters.between / (POINTS - 1) / STEP))
        first = round(parameters.middle / STEP) - stride * (POINTS - 1) // 2
        steps = first + stride * np.arange(POINTS)
        self.grid: Floats = np.multiply(steps, STEP, dtype=np.float64)
        self.prior: Floats = -(((self.grid - parameters.middle) / parameters.between) ** 2) / 2
        z = (np.arange(ROWS + stride * (POINTS - 1)) - steps[-1]) * (STEP / parameters.sigma)
        log_density, log_above, hazard = density(z)
        size = np.abs(z)
        self._likelihood = _slices(np.stack((log_density, log_above)), stride)
        # The mean of z x psi(z), psi the density's score: 1 on average where sigma is right.
        self._scale = _slices(np.stack((np.minimum(size, BEND) * size, 1 + z * hazard)), stride)

    def weights(self, known: Responses, extra: Floats | float = 0.0) -> Floats:
        """Return each group's posterior over the grid, [groups, POINTS]; `extra` adds to its log."""
        logs = _sums(self._likelihood, known) + self.prior + extra
        weights = np.exp(logs - logs.max(axis=1, keepdims=True))
        return np.asarray(weights / weights.sum(axis=1, keepdims=True))

    def moments(self, weights: Floats) -> tuple[Floats, Floats]:
        """Return mean and variance of each group's theta."""
        means = weights @ self.grid
        return means, np.maximum(weights @ self.grid**2 - means**2, 0.0)

    def improved(self, known: Responses, before: Parameters) -> Parameters:
        """Return better parameters for these groups: one round of expectation and maximisation."""
        weights = self.weights(known)
        means, variances = self.moments(weights)
        groups = len(means) + GROUPS_BEFORE
        middle = (means.sum() + GROUPS_BEFORE * before.middle) / groups
        square = (variances + (means - middle) ** 2).sum() + GROUPS_BEFORE * before.between**2
        scale = (weights * _sums(self._scale, known)).sum() * self.parameters.sigma**2
        sigma = (scale + GROUPS_BEFORE * before.sigma**2) / (len(known.rows) + GROUPS_BEFORE)
        return Parameters(float(middle), _bounded(math.sqrt(square / groups)), _bounded(math.sqrt(sigma)))


def fitted(model: Model, known: Responses, before: Parameters) -> Model:
    """Return a model fitted to these groups, from the given one on; `before` was assumed before data.

    Expectation and maximisation crawls where most responses are bounds, so every third round begins
    where the two before it were heading (SQUAREM: Varadhan and Roland 2008, its third step length).
    """
    for _ in range(ROUNDS):
        first = model.parameters.vector()
        second = Model(model.improved(known, before))
        third = second.improved(known, before)
        step = second.parameters.vector() - first
        bend = third.vector() - second.parameters.vector() - step
        ahead = min(max(_norm(step) / max(_norm(bend), 1e-6), 1.0), FARTHEST)
        model = Model(Parameters.of(first + 2 * ahead * step + ahead**2 * bend))
        model = Model(model.improved(known, before))
        if np.abs(model.parameters.vector() - first).max() < ENOUGH:
            break
    return model


def _norm(vector: Floats) -> float:
    return math.sqrt(float(vector @ vector))


def _bounded(deviation: float) -> float:
    return min(max(deviation, LOWEST), HIGHEST)


def density(z: Floats) -> tuple[Floats, Floats, Floats]:
    """Return the log density of e, the log of the probability above z, and their hazard."""
    size = np.abs(z)
    log_density = math.log(_HEIGHT) + np.where(size > BEND, BEND**2 / 2 - BEND * size, -(z**2) / 2)
    tail = log_density - math.log(BEND)  # of the probability beyond |z|, where the tail is exponential
    core = np.log(np.interp(z, _Z, _ABOVE))
    log_above = np.where(z > BEND, tail, np.where(z < -BEND, np.log1p(-np.exp(tail)), core))
    return log_density, log_above, np.exp(log_density - log_above)


def _slices(lines: Floats, stride: int) -> Floats:
    """Return [lines, ROWS, POINTS]: each line at a row less each point of the grid; a view."""
    return sliding_window_view(lines, stride * (POINTS - 1) + 1, axis=1)[:, :, ::-stride]


def _sums(table: Floats, known: Responses) -> Floats:
    some = known.sizes > 0
    sums = np.zeros((len(some), POINTS))
    if some.any():
        starts = (np.cumsum(known.sizes) - known.sizes)[some]
        sums[some] = np.add.reduceat(table[known.bounds, known.rows], starts, axis=0)
    return sums
