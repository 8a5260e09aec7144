import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seer.common.ids import group_id, new_incarnation, params_digest, request_id, request_key
from seer.common.types import Placed, SamplingParams

INT64 = st.integers(-(2**63), 2**63 - 1)
INDEX = st.integers(0, 4095)


def test_keys_are_frozen():
    """A change here changes every response ever recorded: it needs a new key version."""
    assert request_key(0, 0, "", 0) == 11605466740983073713
    assert request_key(7, 3, "aime-12", 5) == 3440140761567347714
    assert request_key(-(2**63), 2**63 - 1, "é", 4095) == 8304670612040147006


@given(INT64, INT64, st.text(), INDEX)
def test_a_key_is_64_bits_and_a_function_of_its_coordinates(seed, rollout, prompt, index):
    key = request_key(seed, rollout, prompt, index)
    assert 0 <= key < 2**64
    assert key == request_key(seed, rollout, prompt, index)


def test_every_coordinate_matters():
    coordinates = list(itertools.product((0, 1, -1), (0, 1), ("", "a", "b", "ab"), range(8)))
    assert len({request_key(*each) for each in coordinates}) == len(coordinates)


@given(INT64, INDEX, st.text(max_size=8), st.text(max_size=8))
def test_prompt_ids_do_not_run_into_other_coordinates(seed, index, one, two):
    if one != two:
        assert request_key(seed, 0, one, index) != request_key(seed, 0, two, index)


@pytest.mark.parametrize(("seed", "rollout"), [(2**63, 0), (-(2**63) - 1, 0), (0, 2**63)])
def test_coordinates_beyond_64_bits_are_refused(seed, rollout):
    with pytest.raises(ValueError, match="64 signed bits"):
        request_key(seed, rollout, "p", 0)


def test_ids_are_unique_in_a_rollout():
    ids = {request_id(group_id("r", prompt), index) for prompt in ("p", "q", "p#1") for index in range(20)}
    assert len(ids) == 60
    assert request_id(group_id("r", "p"), 3) == "r/p#3"


def test_incarnations_differ_and_fit_a_message():
    made = {new_incarnation() for _ in range(100)}
    assert len(made) == 100
    assert all(0 <= number < 2**63 for number in made)


def test_a_later_start_has_a_greater_incarnation(monkeypatch):
    for now in (0, 1, 1_800_000_000_000, 2**43 - 1):
        monkeypatch.setattr("time.time_ns", lambda now=now: now * 10**6)
        earlier = max(new_incarnation() for _ in range(100))
        assert earlier < 2**63
        monkeypatch.setattr("time.time_ns", lambda now=now: (now + 1) * 10**6)
        assert min(new_incarnation() for _ in range(100)) > earlier


def test_a_digest_depends_on_every_parameter_and_not_on_the_order_of_biases():
    """The first two are frozen: a client and a buffer of different versions compare them."""
    assert params_digest(0, 0, 1, SamplingParams()) == 5900145312030465417
    assert params_digest(5, 2, 8, SamplingParams(stop=("a",), temperature=0.5)) == 2840198648669002388
    biased = params_digest(0, 0, 1, SamplingParams(logit_bias={1: 2.0, 10: 3.0}))
    assert params_digest(0, 0, 1, SamplingParams(logit_bias={10: 3.0, 1: 2.0})) == biased
    images = [Placed("a" * 64, 1, 2)]
    assert params_digest(0, 0, 1, SamplingParams(), images=[]) == 5900145312030465417
    seen = {params_digest(0, 0, 1, SamplingParams(), images=each) for each in (images, images * 2, [])}
    assert len(seen) == 3, "with other images it is another prompt"
    others = [SamplingParams(), SamplingParams(logit_bias={1: 3.0, 10: 2.0}), SamplingParams(logprobs="raw")]
    others.append(SamplingParams(routed_experts_from=0))
    assert len({biased, *(params_digest(0, 0, 1, each) for each in others)}) == 5
