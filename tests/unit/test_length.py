"""The posterior estimator on groups of known nature: what it learns, and how often it is right.

Work goes on as schedulers have it: the least generated responses first, a quarter of them at a time, in
chunks, so that most of what is known is that responses have not ended yet.
"""

import math

import numpy as np
import pytest

from seer.common.policy.length import Estimate, EstimateError, Evidence, Longest, Posterior

CAP, MEAN, SIGMA, CHUNK = 41_000, 7_600, 0.9, 2000
QUANTILES = (-1.2816, 0.0, 1.2816)


class Rollout:
    """`groups` prompts with `size` responses each; `share` of the variance lies between prompts."""

    def __init__(self, share, size, groups=150, seed=0, outliers=0.05):
        self.rng = np.random.default_rng(seed)
        self.share, self.outliers = share, outliers
        self.theta = self.rng.normal(math.log(MEAN) - SIGMA**2 / 2, SIGMA * math.sqrt(share), groups)
        self.lengths = np.clip(np.exp(self.draw(size)), 1, CAP).astype(int)
        self.generated = np.zeros_like(self.lengths)
        self.groups = [Evidence(CAP) for _ in range(groups)]
        self.estimator = Posterior()
        for group in self.groups:
            self.estimator.opened(group)
            self.estimator.began(group)

    def draw(self, count):
        """Logs of lengths of so many more responses of each group."""
        shape = (len(self.theta), count)
        noise = self.rng.normal(0, SIGMA * math.sqrt(1 - self.share), shape)
        return self.theta[:, None] + noise + math.log(2.5) * (self.rng.random(shape) < self.outliers)

    def until(self, part):
        """Generate until this part of all tokens is there."""
        while self.generated.sum() < part * self.lengths.sum():
            behind = np.where(self.generated < self.lengths, self.generated, np.inf).ravel()
            for place in np.argsort(behind, kind="stable")[: behind.size // 4]:
                if np.isfinite(behind[place]):
                    self.run(*divmod(int(place), self.lengths.shape[1]))
            self.estimator.refit()

    def run(self, group, index):
        tokens = int(min(self.generated[group, index] + CHUNK, self.lengths[group, index]))
        self.generated[group, index] = tokens
        known = self.groups[group]
        if tokens == self.lengths[group, index]:
            known.unfinished.pop(index, None)
            known.finished[index] = tokens
            self.estimator.ended()
        else:
            known.unfinished[index] = tokens

    def covered(self):
        """How many of further responses lie below the 10, 50 and 90 % quantiles foretold."""
        told = self.estimator.estimates(self.groups)
        middle = np.array([math.log(estimate.tokens) for estimate in told])
        spread = np.array([estimate.spread for estimate in told])
        more = self.draw(16)
        return [float((more < (middle + z * spread)[:, None]).mean()) for z in QUANTILES]


@pytest.mark.parametrize("size", [8, 16])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.65, 0.9])
def test_shares_and_quantiles_come_out_right(share, size):
    rollout = Rollout(share, size)
    rollout.until(0.1)
    assert np.mean(rollout.generated == rollout.lengths) < 0.12  # only short ones have ended
    low, middle, high = rollout.covered()
    assert low == pytest.approx(0.1, abs=0.05)
    assert middle == pytest.approx(0.5, abs=0.12)  # biased short: far below a half
    assert high == pytest.approx(0.9, abs=0.09)
    rollout.until(0.6)
    assert rollout.estimator.share == pytest.approx(share, abs=0.13)
    assert rollout.covered() == pytest.approx([0.1, 0.5, 0.9], abs=0.07)


def test_it_ranks_groups_and_the_papers_estimate_does_it_worse():
    rollout = Rollout(0.65, 8, groups=300)
    rollout.until(0.25)
    unsettled = [i for i, group in enumerate(rollout.groups) if len(group.finished) < 8]
    truth = rollout.theta[unsettled]
    open_groups = [rollout.groups[i] for i in unsettled]
    ours, papers = (
        np.corrcoef([math.log(told.tokens) for told in estimator.estimates(open_groups)], truth)[0, 1]
        for estimator in (rollout.estimator, Longest())
    )
    assert ours > 0.75
    assert ours > papers + 0.05


def test_a_few_responses_of_another_kind_pull_little():
    rollout = Rollout(0.65, 16)
    rollout.until(0.6)
    usual = Evidence(CAP, dict.fromkeys(range(15), 8000))
    broken = Evidence(CAP, {**usual.finished, 15: 1})
    was, now = rollout.estimator.estimates([usual, broken])
    assert now.tokens > 0.85 * was.tokens


def test_before_any_data_all_groups_are_alike_and_unsure():
    estimator = Posterior()
    groups = [Evidence(6000), Evidence(600)]
    for group in groups:
        estimator.opened(group)
    first, second = estimator.estimates(groups)
    assert (first.tokens, second.tokens) == (pytest.approx(1000, rel=0.03), 600)
    assert 0.8 < first.spread == second.spread < 1.1
    assert not estimator.refit()


def test_a_response_that_ended_at_its_cap_counts_as_longer():
    estimator = Posterior()
    estimator.opened(Evidence(1000))
    estimator.opened(Evidence(2000))
    capped, done = estimator.estimates([Evidence(1000, {0: 1000}), Evidence(2000, {0: 1000})])
    assert capped.tokens > done.tokens or capped.tokens == 1000


def test_estimates_do_not_depend_on_what_else_is_asked(monkeypatch):
    rollout = Rollout(0.65, 8)
    rollout.until(0.3)
    together = rollout.estimator.estimates(rollout.groups)
    monkeypatch.setattr("seer.common.policy.length.FIT_RESPONSES", 20)
    for one, other in zip(rollout.estimator.estimates(rollout.groups), together, strict=True):
        assert (one.tokens, one.spread) == pytest.approx((other.tokens, other.spread))
    assert rollout.estimator.estimates([]) == []


def test_errors_are_counted_against_what_was_foretold():
    error = EstimateError()
    error.count(None, 50)
    error.count(Estimate(100.0, 0.5), 100)
    error.count(Estimate(100.0, 0.5), 200)  # e^0.69: beyond 1.28 x 0.5
    error.count(Estimate(100.0, 0.5), 50)
    assert (error.responses, error.unpredicted, error.beyond) == (3, 1, 1)
    assert error.absolute == pytest.approx(2 * math.log(2))
    assert error.signed == pytest.approx(0.0)
    assert error.summary() == {
        "predicted": 3, "unpredicted": 1, "error": 0.4621, "bias": 0.0, "beyond_90": 0.3333
    }  # fmt: skip
