"""Length estimates: how long a group's responses will be.

An estimator sees what is known of groups and says what to expect of a response that has not begun.
It never changes a token: a bad estimate costs time, not correctness.

`Posterior` says what the responses of a group, finished or not, make likely (`length_model.py` has the
density), given what all groups had in common so far: how far lengths vary between groups, and within.

Invariants (tests/property/test_length.py asserts them):
- an estimate is from 1 token to the cap, and a function of what the estimator was shown, in order;
- `Longest` says the cap until a response finishes, then the longest finished one: it falls once,
  and only rises from there;
- `Posterior` forgets: it learns from the `RETAINED` groups opened last, from at most `FIT_RESPONSES`
  responses at a time.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

import numpy as np

from seer.common.policy.length_model import Floats, Model, Parameters, Responses, fitted, responses


@dataclass(frozen=True, slots=True)
class Estimate:
    """The median length in tokens, at most the cap; `spread` is the deviation of its natural log.

    A `spread` of 0 says nothing of how sure it is: the paper's plain number.
    """

    tokens: float
    spread: float = 0.0

    @property
    def sound(self) -> bool:
        """Whether a policy can reckon with it; what comes over the wire may be anything."""
        return 0 < self.tokens < math.inf and 0 <= self.spread < math.inf


QUANTILE_90 = 1.2816
"""Nine of ten draws of a normal distribution lie below so many deviations above its middle."""


@dataclass(slots=True)
class EstimateError:
    """How far responses that finished were from what was foretold.

    `absolute` and `signed` are sums of ln(actual / foretold) over `responses`; `beyond` of them were
    longer than the 90 % quantile. Of `unpredicted` ones nothing had been said but the cap.

    It tells how an estimator does under a schedule, not which one is better: where the short finish
    before the long, the longest finished response is always near the next one to finish.
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


@dataclass(frozen=True, slots=True)
class Remembered:
    """What an earlier group of the same prompt was like: the mean log length of `responses` ones."""

    mean: float
    responses: float


@dataclass(slots=True)
class Evidence:
    """What is known of one group: tokens by response index. No response is longer than `cap`.

    `before` is what was known of its prompt when it opened.
    """

    cap: int
    finished: dict[int, int] = field(default_factory=dict)
    unfinished: dict[int, int] = field(default_factory=dict)
    before: Remembered | None = None

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


RETAINED = 2048
"""Groups whose evidence is kept to learn from: the last ones opened, as lengths drift over rollouts."""

FIT_GROUPS = 256
"""Groups that a fit looks at, spread evenly over those retained: deviations are then known within 5 %."""

FIT_RESPONSES = 8192
"""Responses that are looked at at once: 4 MiB a table."""

FIT_GROWTH = 0.15
"""A fit follows when so many more responses have finished: what is learnt moves with their logarithm."""

FIT_LEAST = 8
"""Finished responses before the first fit: as many as the parameters assumed before any data weigh."""

DRIFT = 0.2
"""Deviation by which a prompt's typical length, in natural log, moves from one of its groups to the next."""


class Posterior:
    """Ours: what is likely, from finished responses and from how far the others have come."""

    def __init__(self) -> None:
        self._groups: deque[Evidence] = deque(maxlen=RETAINED)
        self._before: Parameters | None = None
        self._model: Model | None = None
        self._fresh = 0
        self._due = FIT_LEAST

    @property
    def parameters(self) -> Parameters | None:
        """What groups have in common, as far as known; None before the first one."""
        return None if self._model is None else self._model.parameters

    @property
    def share(self) -> float:
        """See `Estimator`."""
        return 0.0 if self._model is None else self._model.parameters.share

    def opened(self, group: Evidence) -> None:
        """Keep the group. The first one's cap says what to assume before any data."""
        self._groups.append(group)
        if self._model is None:
            self._before = Parameters(math.log(max(group.cap / 6, 1.0)), between=0.7, sigma=0.55)
            self._model = Model(self._before)

    def ended(self) -> None:
        """Count towards the next fit."""
        self._fresh += 1

    def refit(self) -> bool:
        """Fit the parameters again if enough finished since."""
        if self._fresh < self._due or self._model is None or self._before is None:
            return False
        known = [group for group in self._groups if group.finished or group.unfinished]
        size = sum(len(group.finished) + len(group.unfinished) for group in known)
        stride = math.ceil(max(len(known) / FIT_GROUPS, size / FIT_RESPONSES, 1))
        self._model = fitted(self._model, _responses(list(islice(known, 0, None, stride))), self._before)
        finished = sum(len(group.finished) for group in known)
        self._due = max(FIT_LEAST, math.ceil(FIT_GROWTH * finished))
        self._fresh = 0
        return True

    def estimates(self, groups: Sequence[Evidence]) -> list[Estimate]:
        """See `Estimator`."""
        told: list[Estimate] = []
        start = size = 0
        for end, group in enumerate(groups, 1):
            size += len(group.finished) + len(group.unfinished)
            if size >= FIT_RESPONSES or end == len(groups):
                told += self._estimates(groups[start:end])
                start, size = end, 0
        return told

    def _remembered(self, model: Model, groups: Sequence[Evidence]) -> Floats | float:
        before = [(i, group.before) for i, group in enumerate(groups) if group.before is not None]
        if not before:
            return 0.0
        means = np.array([known.mean for _, known in before])
        counts = np.array([known.responses for _, known in before])
        variances = model.parameters.within**2 / counts + DRIFT**2
        logs = np.zeros((len(groups), len(model.grid)))
        logs[[i for i, _ in before]] = -((model.grid - means[:, None]) ** 2) / (2 * variances[:, None])
        return logs

    def _estimates(self, groups: Sequence[Evidence]) -> list[Estimate]:
        model = self._model
        if model is None:
            raise ValueError("an estimate of a group that was never opened")
        means, variances = model.moments(model.weights(_responses(groups), self._remembered(model, groups)))
        spreads = np.sqrt(variances + model.parameters.within**2)
        return [
            Estimate(min(max(math.exp(mean), 1.0), float(group.cap)), spread)
            for group, mean, spread in zip(groups, means.tolist(), spreads.tolist(), strict=True)
        ]


def _responses(groups: Sequence[Evidence]) -> Responses:
    tokens: list[int] = []
    bounds: list[int] = []
    for group in groups:
        tokens += group.finished.values()
        bounds += [length >= group.cap for length in group.finished.values()]
        tokens += group.unfinished.values()
        bounds += [1] * len(group.unfinished)
    sizes = [len(group.finished) + len(group.unfinished) for group in groups]
    return responses(np.array(tokens, np.intp), np.array(bounds, np.intp), np.array(sizes, np.intp))


ESTIMATORS: dict[str, Callable[[], Estimator]] = {"longest": Longest, "posterior": Posterior}
"""By the names that policies give."""
