"""A two-level model of response lengths: groups vary around a common mean, responses around their group's.

ln length = theta of its group + sigma x e; theta is normal with mean `mean` and standard deviation
`between`; e has Huber's density: normal in the middle, with exponential tails beyond `BEND`. Among the
densities that differ from the normal one by 5 % contamination it is the least informative (Huber 1964), so
a few outliers have little influence: where one in twenty is cut to a hundredth, estimates err 20 % less
than under a normal density; where one in twenty is 2.5 times as long, 2 % more. Its log is concave, so a
longer response never lowers an estimate. A response that has not ended, or ended at its cap, is a censored
observation: its likelihood is the probability of being longer.

Theta is kept on a grid of `POINTS` multiples of `STEP`, and log lengths are rounded to such multiples.
A likelihood depends on their difference only, so it is a slice of one precomputed table.

Invariants (tests/property/test_length.py asserts them):
- more and longer evidence never lowers a group's mean, at the same parameters;
- no parameter leaves its bounds, and nothing is infinite or NaN, whatever the evidence.
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
"""Resolution in natural log: 2 % of a length, a fifteenth of the spread of lengths within any group."""

POINTS = 64
"""Points of the grid, which covers `SPAN` standard deviations between groups to both sides."""

SPAN = 4.5

BEND = 1.4
"""Where the density's tails begin, in sigma: Huber's value for 5 % contamination."""

MIN_DEVIATION, MAX_DEVIATION = 0.05, 2.5
"""Bounds of both deviations; 2.5 is a factor of 12."""

ROWS = math.ceil(math.log(2**24) / STEP) + 1
"""Log lengths on the grid: a response has at most 2^24 tokens (`wire.drafts.Count`)."""

PRIOR_GROUPS = 2
"""Weight of the prior parameters, in groups and in responses.

They keep deviations away from 0 while there is little data; with 4, a `share` of 7 % is found where it is 0.
"""

ROUNDS = 3
"""Most rounds of a fit. It starts where the last one ended, and the next one comes soon."""

MAX_EXTRAPOLATION = 8.0
"""Most EM steps that a round extrapolates by."""

TOLERANCE = 0.002
"""A fit ends with a round that moves no parameter by more than this: a tenth of `STEP`."""

_ROOT = math.sqrt(2 * math.pi)
_CORE = math.erf(BEND / math.sqrt(2))
_TAIL = math.exp(-(BEND**2) / 2)
_HEIGHT = 1 / (_ROOT * _CORE + 2 * _TAIL / BEND)
_Z = np.linspace(-BEND, BEND, 561)
_ABOVE = 0.5 - _HEIGHT * _ROOT / 2 * np.array([math.erf(z / math.sqrt(2)) for z in _Z])

VARIANCE = _HEIGHT * (_ROOT * _CORE - 2 * BEND * _TAIL + 2 * _TAIL * (BEND + 2 / BEND + 2 / BEND**3))
"""Variance of e."""


class Observations(NamedTuple):
    """Responses of some groups, one group after the other; `sizes` are the numbers of responses by group.

    `rows` are log lengths in `STEP`s; `censored` is 1 where the response is that long or longer, else 0.
    """

    censored: Ints
    rows: Ints
    sizes: Ints


def observations(tokens: Ints, censored: Ints, sizes: Ints) -> Observations:
    """Return observations of lengths in tokens."""
    rows = np.rint(np.log(np.maximum(tokens, 1)) / STEP).astype(np.intp)
    return Observations(censored, np.minimum(rows, ROWS - 1), sizes)


@dataclass(frozen=True, slots=True)
class Parameters:
    """What all groups share, in natural log; see the module. `sigma` is the scale within a group."""

    mean: float
    between: float
    sigma: float

    @staticmethod
    def of(vector: Floats) -> Parameters:
        """Return the parameters that `vector` made these numbers of, kept within bounds."""
        mean, between, sigma = vector.tolist()
        mean = min(max(mean, 0.0), ROWS * STEP)
        return Parameters(mean, _bounded(math.exp(between)), _bounded(math.exp(sigma)))

    def vector(self) -> Floats:
        """Return unconstrained numbers to extrapolate: the mean, and the logs of the deviations."""
        return np.array([self.mean, math.log(self.between), math.log(self.sigma)])

    @property
    def within(self) -> float:
        """Standard deviation within a group."""
        return self.sigma * math.sqrt(VARIANCE)

    @property
    def share(self) -> float:
        """Share of the variance that lies between groups."""
        return self.between**2 / (self.between**2 + self.within**2)


class Model:
    """The model with one set of parameters: tables of the likelihood on the grid."""

    def __init__(self, parameters: Parameters) -> None:
        self.parameters = parameters
        stride = max(1, math.ceil(2 * SPAN * parameters.between / (POINTS - 1) / STEP))
        first = round(parameters.mean / STEP) - stride * (POINTS - 1) // 2
        steps = first + stride * np.arange(POINTS)
        self.grid: Floats = np.multiply(steps, STEP, dtype=np.float64)
        self.prior: Floats = -(((self.grid - parameters.mean) / parameters.between) ** 2) / 2
        z = (np.arange(ROWS + stride * (POINTS - 1)) - steps[-1]) * (STEP / parameters.sigma)
        log_density, log_above, hazard = density(z)
        size = np.abs(z)
        self._likelihood = _slices(np.stack((log_density, log_above)), stride)
        # The mean of z x psi(z), psi the density's score: 1 on average where sigma is right.
        self._scale = _slices(np.stack((np.minimum(size, BEND) * size, 1 + z * hazard)), stride)

    def weights(self, known: Observations, extra: Floats | float = 0.0) -> Floats:
        """Return each group's posterior over the grid, [groups, POINTS]; `extra` adds to its log."""
        logs = _sums(self._likelihood, known) + self.prior + extra
        weights = np.exp(logs - logs.max(axis=1, keepdims=True))
        return np.asarray(weights / weights.sum(axis=1, keepdims=True))

    def moments(self, weights: Floats) -> tuple[Floats, Floats]:
        """Return mean and variance of each group's theta."""
        means = weights @ self.grid
        return means, np.maximum(weights @ self.grid**2 - means**2, 0.0)

    def em_step(self, known: Observations, prior: Parameters) -> Parameters:
        """Return better parameters for these groups: one step of expectation maximisation (EM)."""
        weights = self.weights(known)
        means, variances = self.moments(weights)
        groups = len(means) + PRIOR_GROUPS
        mean = (means.sum() + PRIOR_GROUPS * prior.mean) / groups
        square = (variances + (means - mean) ** 2).sum() + PRIOR_GROUPS * prior.between**2
        scale = (weights * _sums(self._scale, known)).sum() * self.parameters.sigma**2
        sigma = (scale + PRIOR_GROUPS * prior.sigma**2) / (len(known.rows) + PRIOR_GROUPS)
        return Parameters(float(mean), _bounded(math.sqrt(square / groups)), _bounded(math.sqrt(sigma)))


def fit(model: Model, known: Observations, prior: Parameters) -> Model:
    """Return a model fitted to these groups, starting from the given one, with `prior` parameters.

    EM is slow where most responses are censored, so each round extrapolates from two EM steps and takes a
    third from there (SQUAREM: Varadhan and Roland 2008, its third step length).
    """
    for _ in range(ROUNDS):
        first = model.parameters.vector()
        second = Model(model.em_step(known, prior))
        third = second.em_step(known, prior)
        step = second.parameters.vector() - first
        bend = third.vector() - second.parameters.vector() - step
        ahead = min(max(_norm(step) / max(_norm(bend), 1e-6), 1.0), MAX_EXTRAPOLATION)
        model = Model(Parameters.of(first + 2 * ahead * step + ahead**2 * bend))
        model = Model(model.em_step(known, prior))
        if np.abs(model.parameters.vector() - first).max() < TOLERANCE:
            break
    return model


def _norm(vector: Floats) -> float:
    return math.sqrt(float(vector @ vector))


def _bounded(deviation: float) -> float:
    return min(max(deviation, MIN_DEVIATION), MAX_DEVIATION)


def density(z: Floats) -> tuple[Floats, Floats, Floats]:
    """Return the log density of e, the log of the probability above z, and their hazard."""
    size = np.abs(z)
    log_density = math.log(_HEIGHT) + np.where(size > BEND, BEND**2 / 2 - BEND * size, -(z**2) / 2)
    tail = log_density - math.log(BEND)  # of the probability beyond |z|, where the tail is exponential
    core = np.log(np.interp(z, _Z, _ABOVE))
    log_above = np.where(z > BEND, tail, np.where(z < -BEND, np.log1p(-np.exp(tail)), core))
    return log_density, log_above, np.exp(log_density - log_above)


def _slices(lines: Floats, stride: int) -> Floats:
    """Return a view [lines, ROWS, POINTS]: each line at the difference of row and point of the grid."""
    return sliding_window_view(lines, stride * (POINTS - 1) + 1, axis=1)[:, :, ::-stride]


def _sums(table: Floats, known: Observations) -> Floats:
    some = known.sizes > 0
    sums = np.zeros((len(some), POINTS))
    if some.any():
        starts = (np.cumsum(known.sizes) - known.sizes)[some]
        sums[some] = np.add.reduceat(table[known.censored, known.rows], starts, axis=0)
    return sums
