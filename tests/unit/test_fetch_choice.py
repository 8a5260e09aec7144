"""Whether the pool is worth a fetch: what `fetch_choice` promises."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seer.common.policy.fetch_choice import (
    ENOUGH,
    FORGET_SECONDS,
    MOST_STALLED,
    NEVER,
    UNMEASURED_TOKENS,
    WINDOW,
    FetchChoice,
)

NOW = 100_000.0
APART = 1000.0  # seconds: loads that do not overlap


def measured(compute=1e-3, latency=0.0, fetch=1e-4, sizes=(200, 400, 800, 1600), now=NOW):
    choice = FetchChoice()
    for place, size in enumerate(sizes, start=1):
        choice.step({"prefill": size}, {}, compute * (size - 1))
        choice.load(size, latency + fetch * size, now + APART * (place - len(sizes)))
    return choice


@given(
    compute=st.floats(1e-6, 1e-2),
    latency=st.floats(0, 1),
    ratio=st.floats(0.01, 0.9),
    missing=st.integers(1, 100_000),
)
def test_tokens_are_fetched_where_that_takes_less_time(compute, latency, ratio, missing):
    fetch = compute * ratio
    pull = measured(compute, latency, fetch).pull_tokens(NOW)
    saved = compute * missing - (latency + fetch * missing)
    if abs(saved) > 1e-3 * compute * missing + 2 * compute:  # beyond rounding
        assert (missing > pull) == (saved > 0)


def test_what_takes_longer_to_fetch_is_never_fetched():
    assert measured(compute=1e-4, fetch=1.1e-4).pull_tokens(NOW) == NEVER
    # 144 KiB a token of an 8B model, 25,000 tokens/s of prefill, TCP at 1 GB/s; shared memory at 9.
    assert measured(compute=1 / 25_000, latency=0.002, fetch=144 * 1024 / 1e9).pull_tokens(NOW) == NEVER
    assert 50 < measured(compute=1 / 25_000, latency=0.002, fetch=144 * 1024 / 9e9).pull_tokens(NOW) < 100


def test_speeds_are_those_that_were_measured():
    assert measured(compute=1e-3, latency=0.01, fetch=1e-4).speeds() == pytest.approx((0.01, 1e-4, 1e-3))
    assert FetchChoice().speeds() is None


def test_what_is_computed_costs_its_time_for_all_that_wait():
    def pull(others, fetch):
        choice = measured(compute=1e-3, latency=0.1, fetch=fetch)
        for _ in range(WINDOW):
            choice.step({"prefill": 1000} | {str(row): 1 for row in range(others)}, {}, 999e-3)
        return choice.pull_tokens(NOW)

    assert pull(0, 2e-3) == pull(0, 1e-3) == NEVER
    assert pull(2, 2e-3) == pytest.approx(0.1 / (3 - 2) * 1e3, abs=1)
    assert pull(MOST_STALLED - 1, 2e-3) == pull(200, 2e-3) == pytest.approx(50, abs=1)
    assert pull(200, 1e-3 * MOST_STALLED) == NEVER


def test_a_pool_that_may_be_slow_is_tried_with_few_loads():
    choice = FetchChoice()
    for _ in range(ENOUGH):
        choice.step({"a": 1001}, {}, 1.0)
        assert choice.pull_tokens(NOW) == UNMEASURED_TOKENS
        choice.order(NOW)
    assert choice.pull_tokens(NOW) == NEVER
    choice.load(1000, 0.1, NOW + 1)
    assert choice.pull_tokens(NOW + 1) == UNMEASURED_TOKENS
    choice.order(NOW + 1)
    assert choice.pull_tokens(NOW + 1) == NEVER
    choice.lost()
    assert choice.pull_tokens(NOW + 1) == UNMEASURED_TOKENS
    choice.order(NOW + 1)
    assert choice.pull_tokens(NOW + 1 + FORGET_SECONDS) == NEVER
    assert choice.pull_tokens(NOW + 2 + FORGET_SECONDS) == UNMEASURED_TOKENS, "none of them came"


def test_until_both_are_measured_the_papers_number_holds():
    choice = FetchChoice()
    assert choice.pull_tokens(NOW) == UNMEASURED_TOKENS
    for count in range(ENOUGH):
        choice.load(600, 0.01, NOW + count)
    assert choice.pull_tokens(NOW) == UNMEASURED_TOKENS
    for count in range(ENOUGH):
        assert choice.pull_tokens(NOW) == UNMEASURED_TOKENS, count
        choice.step({"a": 601}, {}, 6.0)
    assert choice.pull_tokens(NOW) == 0


def test_after_a_minute_without_a_load_it_is_tried_again_and_steps_still_count():
    choice = measured(compute=1e-4, fetch=1e-3)
    assert choice.pull_tokens(NOW + FORGET_SECONDS) == NEVER
    assert choice.pull_tokens(NOW + FORGET_SECONDS + 1) == UNMEASURED_TOKENS
    for count in range(ENOUGH):
        choice.load(1000, 0.001, NOW + 100 + count)
    assert choice.pull_tokens(NOW + 104) < 100


def test_the_choice_follows_a_network_that_changes():
    choice = measured(compute=1e-3, fetch=1e-4)
    for count in range(WINDOW):
        choice.load(random.Random(0).randint(100, 900), 10.0, NOW + APART * count)
    assert choice.pull_tokens(NOW + APART * WINDOW - APART) == NEVER


@given(
    loads=st.integers(ENOUGH, 100),
    fetch=st.floats(1e-7, 2e-4),
    tokens=st.integers(200, 20_000),
    at_once=st.booleans(),
)
def test_a_burst_of_loads_does_not_make_the_pool_look_slow(loads, fetch, tokens, at_once):
    choice = measured(compute=1e-3, fetch=fetch)
    for place in range(1, loads + 1):  # ordered at once; they arrive one after the other, or all in the end
        seconds = fetch * tokens * (loads if at_once else place)
        choice.load(tokens, seconds, NOW + APART + seconds)
    assert choice.pull_tokens(NOW + APART + fetch * tokens * loads) <= fetch * tokens * loads / 1e-3 + 1


@pytest.mark.parametrize(
    ("scheduled", "drafts"),
    [({"a": 100}, {}), ({str(row): 1 for row in range(500)}, {}),
     ({str(row): 9 for row in range(64)}, {str(row): [0] * 8 for row in range(64)}),
     ({"a": 300} | {str(row): 1 for row in range(200)}, {})],
    ids=["few tokens", "decoding", "drafts", "as much decoding"],
)  # fmt: skip
def test_steps_that_say_little_of_prefill_do_not_count(scheduled, drafts):
    choice = measured(compute=1e-3, fetch=1e-4)
    before = choice.pull_tokens(NOW)
    for _ in range(WINDOW):
        choice.step(scheduled, drafts, 1e-9)
    assert choice.pull_tokens(NOW) == before


def test_a_slow_step_decides_nothing():
    choice = measured(compute=1e-4, fetch=2e-4)
    choice.step({"a": 1000}, {}, 100.0)
    assert choice.pull_tokens(NOW) == NEVER


@given(st.lists(st.tuples(st.integers(1, 5000), st.floats(0, 10)), min_size=ENOUGH, max_size=WINDOW))
def test_whatever_was_measured_gives_a_number_of_tokens(loads):
    choice = measured()
    for count, (tokens, seconds) in enumerate(loads):
        choice.load(tokens, seconds, NOW + count)
    assert 0 <= choice.pull_tokens(NOW) <= NEVER
