"""Noise ids: the list in `seer.gateway.noise`."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from seer.client.prompts import MAX_ID_BYTES
from seer.common.types import SamplingParams
from seer.gateway.noise import NoiseIds, request_hash


def ids(salt: str = "a", most: int = 1000) -> NoiseIds:
    salts = (f"{salt}{i}" for i in itertools.count())
    return NoiseIds(lambda: next(salts), most)


def test_a_hash_depends_on_the_prompt_and_each_sampling_parameter() -> None:
    plain = SamplingParams()
    others = [
        SamplingParams(temperature=0.5),
        SamplingParams(max_tokens=3),
        SamplingParams(logit_bias={1: 2.0}),
        SamplingParams(stop=("x",)),
        SamplingParams(logprobs="raw"),
    ]
    hashes = {request_hash([1, 2], each) for each in (plain, *others)} | {request_hash([1, 3], plain)}
    assert len(hashes) == len(others) + 2
    biases = SamplingParams(logit_bias={1: 2.0, 3: 4.0}), SamplingParams(logit_bias={3: 4.0, 1: 2.0})
    assert request_hash([1], biases[0]) == request_hash([1], biases[1])


def test_a_seed_makes_equal_requests_equal() -> None:
    assert ids("a").prompt_ids(["h", "h"], 7, "") == ids("b").prompt_ids(["h", "h"], 7, "any")
    assert len(set(ids().prompt_ids(["h", "h"], 7, ""))) == 1


def test_a_request_id_makes_a_retry_equal_and_prompts_distinct() -> None:
    one = ids("a")
    first = one.prompt_ids(["h", "h", "g"], None, "r1")
    assert one.prompt_ids(["h", "h", "g"], None, "r1") == first
    assert ids("b").prompt_ids(["h", "h", "g"], None, "r1") == first
    assert len({*first, *ids("a").prompt_ids(["h", "h", "g"], None, "r2")}) == 6


def test_anonymous_requests_share_no_noise_in_any_process() -> None:
    one, other = ids("a"), ids("b")
    got = [name for each in (one, other) for _ in range(5) for name in each.prompt_ids(["h", "h"], None, "")]
    assert len(set(got)) == len(got)


def test_arrival_order_does_not_matter_to_equal_requests() -> None:
    one, other = ids(), ids()
    forth = one.prompt_ids(["h"], None, "") + one.prompt_ids(["g"], None, "")
    back = other.prompt_ids(["g"], None, "") + other.prompt_ids(["h"], None, "")
    assert sorted(forth) == sorted(back)


@given(st.lists(st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=4), max_size=40))
def test_past_the_bound_no_noise_repeats_either(requests: list[list[str]]) -> None:
    noise = ids(most=5)
    got = [name for hashes in requests for name in noise.prompt_ids(hashes, None, "")]
    assert len(set(got)) == len(got)
    assert len(noise._counts) <= 5 + 4


@given(st.text(max_size=2000), st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1)))
def test_every_id_is_one_that_the_client_takes(request_id: str, seed: int | None) -> None:
    clean = request_id.encode("utf-8", "ignore").decode()
    for name in ids().prompt_ids([request_hash([1], SamplingParams())] * 2, seed, clean):
        assert 1 <= len(name.encode()) <= MAX_ID_BYTES
        assert "/" not in name
