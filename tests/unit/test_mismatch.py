"""What a trainer tells of its own logprobs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seer.client.mismatch import divergence, mismatch_of
from seer.client.results import Response
from seer.common.errors import InvalidField


def response(*logprobs: float) -> Response:
    return Response(
        0, np.arange(len(logprobs), dtype=np.int32), np.array(logprobs, np.float32), None, "stop", ""
    )


def test_figures_are_of_all_tokens_that_the_trainer_has() -> None:
    found = mismatch_of([response(-1, -2), response(-3)], [[-1.5, np.nan], np.array([-2.0])], 7)
    assert (found.tokens, found.mean, found.largest, found.weight_version) == (2, 0.75, 1.0, 7)
    assert found.kl == pytest.approx((np.exp(-0.5) - 0.5 + np.e - 2) / 2)


@given(st.lists(st.floats(-1e4, 1e4), min_size=1))
def test_the_divergence_is_a_number_and_never_negative(differences: list[float]) -> None:
    assert 0 <= divergence(np.array(differences)) < np.inf


def test_it_is_that_of_the_distributions() -> None:
    rng = np.random.default_rng(1)
    engine, trainer = (np.log(rng.dirichlet(np.ones(9) * 5)) for _ in range(2))
    drawn = rng.choice(9, 400_000, p=np.exp(engine))
    exact = float((np.exp(engine) * (engine - trainer)).sum())
    assert divergence((trainer - engine)[drawn]) == pytest.approx(exact, rel=0.03)


@pytest.mark.parametrize(
    ("logprobs", "field"),
    [([], "logprobs"), ([[-1.0]], r"logprobs\[0\]"), ([[-1.0, -np.inf]], r"logprobs\[0\]\[1\]"),
     ([[np.nan, np.nan]], "logprobs")],
)  # fmt: skip
def test_what_fits_no_response_is_refused_by_name(logprobs: list[list[float]], field: str) -> None:
    with pytest.raises(InvalidField, match=f"^{field} = "):
        mismatch_of([response(-1, -2)], logprobs, 0)
