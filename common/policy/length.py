"""Length estimates: how long a group's responses will be.

An estimator sees the lengths of a group's responses so far, and estimates the length of one that has not
begun. It never changes a token: a bad estimate costs time, not correctness.

`Longest` is the paper's estimator. `Posterior` is ours: a Bayesian estimate from all responses of the group,
finished or not (`length_model.py` has the density), with parameters that are fitted over all groups: how
far lengths vary between groups, and within one.

Invariants (tests/property/test_length.py asserts them):
- an estimate is from 1 token to the cap, and a function of what the estimator was shown, in order;
- `Longest` returns the cap until a response finishes, then the longest finished one: it falls once,
  and only rises from there;
- `Posterior` forgets: it is fitted to the last `RETAINED` groups, at most `FIT_RESPONSES` responses at once.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from seer.common.policy.length_model import Floats, Model, Observations, Parameters, fit, observations


@dataclass(frozen=True, slots=True)
class Estimate:
    """The median length in tokens, at most the cap; `spread` is the standard deviation of its natural log.

    A `spread` of 0: the estimator gives none, as the paper's.
    """

    tokens: float
    spread: float = 0.0

    @property
    def valid(self) -> bool:
        """Whether a policy can compute with it; what comes over the wire may be anything."""
        return 0 < self.tokens < math.inf and 0 <= self.spread < math.inf


QUANTILE_90 = 1.2816
"""The 90 % quantile of the standard normal distribution."""


@dataclass(slots=True)
class EstimateError:
    """How far the lengths of finished responses were from their groups' estimates.

    `absolute` and `signed` are sums of ln(actual / estimated) over `responses`; `beyond` of them were
    longer than the estimate's 90 % quantile. For `unpredicted` ones there was no estimate but the cap.

    It tells how an estimator does under a schedule, not which estimator is better: where the short finish
    before the long, the longest finished response is always near the next one to finish.
    """

    responses: int = 0
    unpredicted: int = 0
    absolute: float = 0.0
    signed: float = 0.0
    beyond: int = 0

    def count(self, predicted: Estimate | None, tokens: int) -> None:
        """Add one response; `predicted` is its group's estimate, None if there was none but the cap."""
        if predicted is None or tokens < 1:
            self.unpredicted += 1
            return
        log = math.log(tokens / predicted.tokens)
        self.responses += 1
        self.absolute += abs(log)
        self.signed += log
        self.beyond += log > QUANTILE_90 * predicted.spread

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
class PastLengths:
    """Earlier groups of the same prompt: mean log length of their responses, and how many they count as."""

    mean: float
    responses: float


@dataclass(slots=True)
class Evidence:
    """The lengths of one group's responses so far: tokens by response index. None is longer than `cap`.

    `past` is what earlier groups of its prompt were like, where that is remembered.
    """

    cap: int
    finished: dict[int, int] = field(default_factory=dict)
    unfinished: dict[int, int] = field(default_factory=dict)
    past: PastLengths | None = None

    @property
    def shows(self) -> bool:
        """Whether anything is known of its lengths."""
        return bool(self.finished or self.unfinished or self.past)

    def forget(self) -> None:
        """Drop all lengths of this group."""
        self.finished.clear()
        self.unfinished.clear()


class Estimator:
    """Estimates lengths. The evidence's owner changes it, and says so: `opened`, `began`, `ended`."""

    @property
    def share(self) -> float:
        """Share of the variance of log lengths that lies between groups: 1 if all of a group are as long."""
        return 1.0

    def opened(self, group: Evidence) -> None:
        """Note a new group."""

    def began(self, group: Evidence) -> None:
        """Note the first evidence of a group."""

    def ended(self) -> None:
        """Count a response, of any group, that finished."""

    def refit(self) -> bool:
        """Fit what all groups share, if enough is new; True: all estimates may have changed."""
        return False

    def estimates(self, groups: Sequence[Evidence]) -> list[Estimate]:
        """Return, for each group, the estimated length of a response that has not begun."""
        raise NotImplementedError


class Longest(Estimator):
    """The paper's estimate (Algorithm 2); it takes no account of unfinished responses."""

    def estimates(self, groups: Sequence[Evidence]) -> list[Estimate]:
        """Return the longest finished length of each group, or its cap."""
        return [
            Estimate(float(min(max(1, *group.finished.values()) if group.finished else group.cap, group.cap)))
            for group in groups
        ]


RETAINED = 2048
"""Groups that parameters are fitted to: the last ones that began, as lengths drift over rollouts."""

FIT_GROUPS = 256
"""Groups that a fit uses, spread evenly over those retained: deviations are then known within 5 %."""

FIT_RESPONSES = 8192
"""Responses that one fit, or one batch of estimates, uses: 4 MiB a table."""

FIT_GROWTH = 0.15
"""Fit again when this share more responses have finished: what a fit finds moves with their logarithm."""

MIN_FIT_RESPONSES = 8
"""Finished responses before the first fit: as many as the prior parameters weigh."""

DRIFT = 0.2
"""Standard deviation by which a prompt's typical log length moves from one of its groups to the next."""


class Posterior(Estimator):
    """Ours: the posterior, from finished responses and from how far the others have come."""

    def __init__(self) -> None:
        self._groups: deque[Evidence] = deque(maxlen=RETAINED)
        self._prior: Parameters | None = None
        self._model: Model | None = None
        self._fresh = 0
        self._due = MIN_FIT_RESPONSES

    @property
    def parameters(self) -> Parameters | None:
        """The parameters that all groups share, as last fitted; None before the first group."""
        return None if self._model is None else self._model.parameters

    @property
    def share(self) -> float:
        """See `Estimator`."""
        return 0.0 if self._model is None else self._model.parameters.share

    def opened(self, group: Evidence) -> None:
        """Take the prior parameters from the first group's cap."""
        if self._model is None:
            self._prior = Parameters(math.log(max(group.cap / 6, 1.0)), between=0.7, sigma=0.55)
            self._model = Model(self._prior)

    def began(self, group: Evidence) -> None:
        """Keep the group. One that only waits says nothing, and there may be far more of them."""
        self._groups.append(group)

    def ended(self) -> None:
        """Count towards the next fit."""
        self._fresh += 1

    def refit(self) -> bool:
        """Fit the parameters again if enough finished since."""
        if self._fresh < self._due or self._model is None or self._prior is None:
            return False
        known = [group for group in self._groups if group.finished or group.unfinished]
        size = sum(len(group.finished) + len(group.unfinished) for group in known)
        stride = math.ceil(max(len(known) / FIT_GROUPS, size / FIT_RESPONSES, 1))
        self._model = fit(self._model, _observations(list(islice(known, 0, None, stride))), self._prior)
        finished = sum(len(group.finished) for group in known)
        self._due = max(MIN_FIT_RESPONSES, math.ceil(FIT_GROWTH * finished))
        self._fresh = 0
        return True

    def estimates(self, groups: Sequence[Evidence]) -> list[Estimate]:
        """See `Estimator`. Groups that show nothing yet may be many, and differ in their cap only."""
        known = iter(self._in_batches([group for group in groups if group.shows]))
        caps = {group.cap for group in groups if not group.shows}
        silent = {cap: self._estimates([Evidence(cap)])[0] for cap in sorted(caps)}
        return [next(known) if group.shows else silent[group.cap] for group in groups]

    def _in_batches(self, groups: Sequence[Evidence]) -> list[Estimate]:
        found: list[Estimate] = []
        start = size = 0
        for end, group in enumerate(groups, 1):
            size += len(group.finished) + len(group.unfinished)
            if size >= FIT_RESPONSES or end == len(groups):
                found += self._estimates(groups[start:end])
                start, size = end, 0
        return found

    def _past_log_likelihood(self, model: Model, groups: Sequence[Evidence]) -> Floats | float:
        past = [(i, group.past) for i, group in enumerate(groups) if group.past is not None]
        if not past:
            return 0.0
        means = np.array([known.mean for _, known in past])
        counts = np.array([known.responses for _, known in past])
        variances = model.parameters.within**2 / counts + DRIFT**2
        logs = np.zeros((len(groups), len(model.grid)))
        logs[[i for i, _ in past]] = -((model.grid - means[:, None]) ** 2) / (2 * variances[:, None])
        return logs

    def _estimates(self, groups: Sequence[Evidence]) -> list[Estimate]:
        model = self._model
        if model is None:
            raise ValueError("an estimate of a group that was never opened")
        past = self._past_log_likelihood(model, groups)
        means, variances = model.moments(model.weights(_observations(groups), past))
        spreads = np.sqrt(variances + model.parameters.within**2)
        return [
            Estimate(min(max(math.exp(mean), 1.0), float(group.cap)), spread)
            for group, mean, spread in zip(groups, means.tolist(), spreads.tolist(), strict=True)
        ]


def _observations(groups: Sequence[Evidence]) -> Observations:
    tokens: list[int] = []
    censored: list[int] = []
    for group in groups:
        tokens += group.finished.values()
        censored += [length >= group.cap for length in group.finished.values()]
        tokens += group.unfinished.values()
        censored += [1] * len(group.unfinished)
    sizes = [len(group.finished) + len(group.unfinished) for group in groups]
    return observations(np.array(tokens, np.intp), np.array(censored, np.intp), np.array(sizes, np.intp))


ESTIMATORS: dict[str, Callable[[], Estimator]] = {"longest": Longest, "posterior": Posterior}
"""By the names that policies give."""
