"""Groups of HTTP requests: the list in `seer.gateway.group_names`."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seer.client.prompts import MAX_ID_BYTES
from seer.common.types import SamplingParams
from seer.gateway.errors import HttpError
from seer.gateway.group_names import (
    GROUP_HEADER,
    INDEX_HEADER,
    MAX_NAME_BYTES,
    GroupNames,
    Place,
    group_seed,
    places_in_headers,
    request_hashes,
)


def ids(salt: str = "a", most: int = 1000) -> GroupNames:
    salts = (f"{salt}{i}" for i in itertools.count())
    return GroupNames(lambda: next(salts), most)


def test_a_hash_depends_on_the_prompt_and_each_sampling_parameter() -> None:
    plain = SamplingParams()
    others = [
        SamplingParams(temperature=0.5),
        SamplingParams(max_tokens=3),
        SamplingParams(logit_bias={1: 2.0}),
        SamplingParams(stop=("x",)),
        SamplingParams(logprobs="raw"),
    ]
    hashes = {each for one in (plain, *others) for each in request_hashes([[1, 2]], one)}
    hashes |= {*request_hashes([[1, 2], [1, 3]], plain)}
    assert len(hashes) == len(others) + 2
    biases = SamplingParams(logit_bias={1: 2.0, 3: 4.0}), SamplingParams(logit_bias={3: 4.0, 1: 2.0})
    assert request_hashes([[1]], biases[0]) == request_hashes([[1]], biases[1])


def test_a_seed_makes_equal_requests_equal() -> None:
    assert ids("a").places(["h", "h"], 7, "") == ids("b").places(["h", "h"], 7, "any")
    assert len(set(ids().places(["h", "h"], 7, ""))) == 1


def test_a_request_id_makes_a_retry_equal_and_prompts_distinct() -> None:
    one = ids("a")
    first = one.places(["h", "h", "g"], None, "r1")
    assert one.places(["h", "h", "g"], None, "r1") == first
    assert ids("b").places(["h", "h", "g"], None, "r1") == first
    assert len({*first, *ids("a").places(["h", "h", "g"], None, "r2")}) == 6


def test_anonymous_requests_share_no_noise_in_any_process() -> None:
    one, other = ids("a"), ids("b")
    got = [name for each in (one, other) for _ in range(5) for name in each.places(["h", "h"], None, "")]
    assert len(set(got)) == len(got)


def test_arrival_order_does_not_matter_to_equal_requests() -> None:
    one, other = ids(), ids()
    forth = one.places(["h"], None, "") + one.places(["g"], None, "")
    back = other.places(["g"], None, "") + other.places(["h"], None, "")
    assert sorted(forth) == sorted(back)


@given(st.lists(st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=4), max_size=40))
def test_past_the_bound_no_noise_repeats_either(requests: list[list[str]]) -> None:
    noise = ids(most=5)
    got = [name for hashes in requests for name in noise.places(hashes, None, "")]
    assert len(set(got)) == len(got)
    assert len(noise._counts) <= 5 + 4


@given(st.text(max_size=2000), st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1)))
def test_every_id_is_one_that_the_client_takes(request_id: str, seed: int | None) -> None:
    clean = request_id.encode("utf-8", "ignore").decode()
    for name, first in ids().places(request_hashes([[1]] * 2, SamplingParams()), seed, clean):
        assert 1 <= len(name.encode()) <= MAX_ID_BYTES
        assert "/" not in name
        assert first == 0


def named(group: str | None, index: str | None, prompts: int = 1, n: int = 1) -> list[Place]:
    given = {GROUP_HEADER: group, INDEX_HEADER: index}
    headers = {name: value for name, value in given.items() if value is not None}
    return places_in_headers(headers, prompts, n)


def test_headers_name_a_group_that_all_processes_share() -> None:
    assert named(None, None) == []
    assert named("step 3/7", "5") == [Place("/step 3/7", 5)]
    assert named("g", "4", prompts=3, n=2) == [Place("/g", 4), Place("/g", 6), Place("/g", 8)]
    assert named("g" * MAX_NAME_BYTES, "4095")[0].first_index == 4095


@pytest.mark.parametrize(
    ("group", "index", "prompts", "header"),
    [
        ("", "0", 1, GROUP_HEADER),
        (None, "0", 1, GROUP_HEADER),
        ("g" * (MAX_NAME_BYTES + 1), "0", 1, GROUP_HEADER),
        ("g", "0", 5000, GROUP_HEADER),
        ("g", None, 1, INDEX_HEADER),
        ("g", "", 1, INDEX_HEADER),
        ("g", "-1", 1, INDEX_HEADER),
        ("g", "1.0", 1, INDEX_HEADER),
        ("g", "\u0663", 1, INDEX_HEADER),
        ("g", "4096", 1, INDEX_HEADER),
        ("g", "4095", 2, INDEX_HEADER),
        ("g", "9" * 5000, 1, INDEX_HEADER),
    ],
)
def test_bad_headers_are_refused_by_name(
    group: str | None, index: str | None, prompts: int, header: str
) -> None:
    with pytest.raises(HttpError, match=f"^{header} = ") as info:
        named(group, index, prompts)
    assert (info.value.status, info.value.param) == (400, header)


def test_other_requests_at_a_place_of_a_named_group_have_other_noise() -> None:
    seeds = [
        group_seed(["h"], None),
        group_seed(["g"], None),
        group_seed(["h"], 1),
        group_seed(["h", "g"], 1),
    ]
    assert len(set(seeds)) == 4
    assert group_seed(["h"], 1) == seeds[2]
    assert all(0 <= seed < 2**63 for seed in seeds)
