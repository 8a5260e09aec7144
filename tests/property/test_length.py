"""Estimators' and the length model's invariants, whatever the evidence."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seer.common.policy.length import ESTIMATORS, Evidence, PastLengths, Posterior
from seer.common.policy.length_model import (
    MAX_DEVIATION,
    MIN_DEVIATION,
    ROWS,
    STEP,
    VARIANCE,
    Model,
    Parameters,
    density,
    observations,
)

CAP = 5000
TOKENS = st.integers(1, CAP)
PARAMETERS = st.builds(
    Parameters,
    st.floats(0, ROWS * STEP),
    st.floats(MIN_DEVIATION, MAX_DEVIATION),
    st.floats(MIN_DEVIATION, MAX_DEVIATION),
)
GROUPS = st.lists(st.lists(st.tuples(TOKENS, st.booleans()), max_size=12), min_size=1, max_size=12)
REPEATED = st.lists(st.tuples(st.integers(0, 2**24), st.booleans(), st.integers(1, 30)), min_size=1)
MEMORIES = st.none() | st.builds(PastLengths, st.floats(0, 17), st.floats(0.1, 1e4))


def shown(estimator, groups, memories):
    """An estimator that saw these groups, and them: (tokens, whether finished) of each response."""
    known = []
    for group, before in zip(groups, memories, strict=True):
        known.append(Evidence(CAP, past=before))
        estimator.opened(known[-1])
        estimator.began(known[-1])
        for index, (tokens, finished) in enumerate(group):
            (known[-1].finished if finished else known[-1].unfinished)[index] = tokens
            if finished:
                estimator.ended()
        estimator.refit()
    return known


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
@given(groups=GROUPS, data=st.data())
def test_estimates_lie_within_bounds_and_are_a_function_of_what_was_shown(name, groups, data):
    memories = [data.draw(MEMORIES) for _ in groups]
    first, second = ESTIMATORS[name](), ESTIMATORS[name]()
    estimates = first.estimates(shown(first, groups, memories))
    assert estimates == second.estimates(shown(second, groups, memories))
    for estimate in estimates:
        assert 1 <= estimate.tokens <= CAP
        assert 0 <= estimate.spread < 10
    assert 0 <= first.share <= 1


@given(GROUPS)
def test_the_papers_estimate_is_the_longest_finished_one(groups):
    estimator = ESTIMATORS["longest"]()
    known = shown(estimator, groups, [None] * len(groups))
    for group, estimates in zip(groups, estimator.estimates(known), strict=True):
        assert estimates.tokens == max((tokens for tokens, finished in group if finished), default=CAP)
        assert estimates.spread == 0


def mean(model, tokens, censored):
    known = observations(np.array(tokens), np.array(censored, int), np.array([len(tokens)]))
    means, variances = model.moments(model.weights(known))
    assert np.isfinite(means).all()
    assert np.isfinite(variances).all()
    return means[0]


@given(PARAMETERS, st.lists(st.tuples(TOKENS, st.booleans()), min_size=1, max_size=12), st.data())
def test_more_and_longer_evidence_never_lowers_the_mean(parameters, evidence, data):
    model = Model(parameters)
    tokens, censored = [list(each) for each in zip(*evidence, strict=True)]
    before = mean(model, tokens, censored)
    slack = (
        1e-5  # `log_above` is interpolated, which alone lowers a mean by up to 4e-7 (seen in 860,000 draws)
    )
    # One more response of which only a bound from below is known.
    assert mean(model, [*tokens, data.draw(TOKENS)], [*censored, True]) >= before - slack
    # One more that finished, longer than anything that is thought possible, if a response can be so long.
    if model.grid[-1] + STEP <= math.log(2**24):
        beyond = math.exp(model.grid[-1] + STEP)
        assert mean(model, [*tokens, beyond], [*censored, False]) >= before - slack
    # One that went on, or that finished later.
    place = data.draw(st.integers(0, len(tokens) - 1))
    tokens[place] = data.draw(st.integers(tokens[place], 2**24))
    assert mean(model, tokens, censored) >= before - slack


@given(PARAMETERS, PARAMETERS, REPEATED)
def test_parameters_stay_within_bounds(parameters, before, groups):
    tokens = [tokens for tokens, _, size in groups for _ in range(size)]
    censored = [bound for _, bound, size in groups for _ in range(size)]
    known = observations(np.array(tokens), np.array(censored, int), np.array([size for *_, size in groups]))
    better = Model(parameters).em_step(known, before)
    for each in (better, Parameters.of(better.vector() * 3)):
        assert MIN_DEVIATION <= each.between <= MAX_DEVIATION
        assert MIN_DEVIATION <= each.sigma <= MAX_DEVIATION
        assert math.isfinite(each.mean)


def test_the_density_and_the_probability_above_agree():
    step = 1e-3
    z = np.arange(-30, 30, step)
    log_density, log_above, hazard = density(z)
    mass = np.exp(log_density) * step
    assert mass.sum() == pytest.approx(1, abs=1e-6)
    assert (mass * z**2).sum() == pytest.approx(VARIANCE, rel=1e-6)
    above = mass[::-1].cumsum()[::-1] - mass / 2
    assert np.exp(log_above) == pytest.approx(above, rel=1e-3)
    assert hazard == pytest.approx(np.exp(log_density - log_above))
    assert np.isfinite(np.concatenate(density(np.array([-1e4, 1e4])))).all()


def test_it_learns_from_the_latest_groups_only(monkeypatch):
    monkeypatch.setattr("seer.common.policy.length.RETAINED", 20)
    estimator = Posterior()
    for length in (100, 3000):
        shown(estimator, [[(length, True)] * 4] * 40, [None] * 40)
    assert math.exp(estimator.parameters.mean) > 2000


def test_groups_that_wait_do_not_displace_those_that_began(monkeypatch):
    monkeypatch.setattr("seer.common.policy.length.RETAINED", 20)
    estimator = Posterior()
    shown(estimator, [[(100, True)] * 4] * 40, [None] * 40)
    for _ in range(1000):
        estimator.opened(Evidence(CAP))
    shown(estimator, [[(3000, True)] * 4] * 10, [None] * 10)
    assert 100 < math.exp(estimator.parameters.mean) < 3000  # half of those it was fitted to are of each kind
    for _ in range(60):
        estimator.ended()
    fits = sum(estimator.refit() for _ in range(10))
    assert fits == 1  # ten more wait for more responses: the evidence says how many
