"""Trainers' sampling fields: the list in `seer.integrations.sampling`."""

from __future__ import annotations

import pytest

from seer.client import InvalidField, SamplingParams
from seer.integrations.sampling import FIELDS, sampling_params


def test_fields_have_vllms_names_and_meaning():
    given = {"temperature": 0.5, "top_k": -1, "stop": ["a"], "top_p": None, "max_tokens": 7}
    assert sampling_params(given) == SamplingParams(temperature=0.5, stop=("a",), max_tokens=7)
    assert sampling_params({}) == SamplingParams()
    assert SamplingParams().logprobs == "scaled"
    assert "logprobs" not in FIELDS


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"bad_words": ["x"]}, r"args.x\['bad_words'\] = \['x'\]: Seer does not have it; it may be one of"),
        ({"return_routed_experts": True}, "return_routed_experts"),
        ({"logprobs": 1}, "logprobs"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0.0}, r"args.x.top_p = 0.0: must be in"),
    ],
)
def test_others_are_refused_by_name(given, named):
    with pytest.raises(InvalidField, match=named):
        sampling_params(given, "args.x")
