"""The estimate of a rollout's end: what makes it later, and how fast engines are found to be."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seer.common.policy.eta import (
    HALF_SECONDS,
    SHOWN_FROM,
    UNSURE,
    Pace,
    Placed,
    Room,
    Work,
    eta_seconds,
    first_range,
    shortened,
)
from seer.common.policy.length import Estimate
from seer.common.policy.remaining_tokens import Remainders

ESTIMATES = st.builds(Estimate, st.floats(1, 1e6), st.one_of(st.just(0.0), st.floats(1e-3, 3)))
ROOM = Room(2, 64, 40_000)
UNBOUND = Placed()


def work(open_, generated=10, running=None, prompt=20, placed=UNBOUND):
    it = Work(open_)
    of = Remainders(Estimate(400, 0.5), 1000)
    it.add(of, [generated] * open_, prompt, open_ if running is None else running, placed)
    return it


def paced(base, request, kv_token, loads=((1, 100), (8, 900), (32, 9000), (30, 20_000))):
    pace = Pace()
    for now in range(50):
        for requests, kv in loads:
            pace.add(now, 100 * (base + request * requests + kv_token * kv), 100 * requests, requests, kv)
    return pace


@given(st.integers(1, 400), st.integers(1, 40), st.integers(0, 5000), st.floats(1e-4, 1), st.floats(1, 5))
def test_more_work_less_room_and_slower_chunks_never_end_sooner(some, more, prompt, seconds, slower):
    pace = paced(seconds, seconds / 30, seconds / 9000)
    slow = paced(*(slower * each for each in (seconds, seconds / 30, seconds / 9000)))
    base = eta_seconds(work(some), ROOM, pace, 1000)
    assert eta_seconds(work(some + more), ROOM, pace, 1000) >= base
    assert eta_seconds(work(some, prompt=20 + prompt), ROOM, pace, 1000) >= base
    held = eta_seconds(work(some, placed=Placed(prompt)), ROOM, pace, 1000)
    assert eta_seconds(work(some, placed=Placed(prompt, 20_000)), ROOM, pace, 1000) >= held >= base
    assert eta_seconds(work(some), ROOM, slow, 1000) >= base * (1 - 1e-9)
    assert eta_seconds(work(some), ROOM.part(0.5), pace, 1000) >= base
    assert base >= work(some).longest * pace.token_seconds().base


def test_the_estimate_is_the_time_of_the_steps_that_seats_kv_or_the_longest_response_need():
    pace = paced(0.01, 0.001, 0.0)
    seconds, of = (
        pace.token_seconds(),
        Work(200, tokens=64_000, kv_tokens=3e6, placed=4e6, longest=500, running=64),
    )
    beside = (seconds.request * of.tokens + seconds.kv_token * of.kv_tokens) / 2
    for room, steps in ((Room(2, 64, 40_000), 1000), (Room(2, 64, 2_000), 2000), (Room(2, 640, 1e9), 500)):
        assert eta_seconds(of, room, pace, 1000) == pytest.approx(seconds.base * steps + beside)


@given(st.integers(1, 40), st.integers(0, 500), st.floats(0, 300))
def test_of_an_engine_that_holds_few_requests_half_of_one_is_left_over(fit, context, reserved):
    needed = context + reserved + 1
    taken = [Placed(reserved, room).taken(context + 1) for room in np.linspace(fit, fit + 1, 101) * needed]
    assert sum(room / each for room, each in zip(np.linspace(fit, fit + 1, 101) * needed, taken, strict=True)
    ) / 101 == pytest.approx(fit, rel=0.13)  # fmt: skip
    assert Placed(reserved).taken(context + 1) == needed, "without an end"


def test_nothing_is_said_before_a_tenth_has_finished_nor_while_nothing_runs():
    pace = Pace()
    assert eta_seconds(work(9), ROOM, pace, 1) is None, "no engine has reported"
    pace.add(0.0, 1.0, 100, 4, 500)
    assert eta_seconds(work(9), ROOM, pace, 1) is not None
    assert SHOWN_FROM > 1 / 11
    assert eta_seconds(work(10), ROOM, pace, 1) is None
    assert eta_seconds(work(9, running=0), ROOM, pace, 1) is None
    assert eta_seconds(work(9), Room(0, 0, 0), pace, 1) is None
    assert eta_seconds(Work(0), ROOM, pace, 1) is None


REPORTS = st.tuples(
    st.floats(0, 1e9), st.floats(0, 1e3), st.integers(0, 10_000), st.floats(0, 1e4), st.floats(0, 1e8)
)


@given(st.lists(REPORTS, min_size=1, max_size=50))
def test_no_time_is_negative_whatever_is_reported(reports):
    pace = Pace()
    for report in reports:
        pace.add(*report)
    found = pace.token_seconds()
    if found is None:
        counted = [0.0, *(seconds for _, seconds, tokens, *_ in reports if tokens)]
        assert not counted[-1], "what is forgotten may have taken time"
        return
    assert all(0 <= each < math.inf for each in (found.base, found.request, found.kv_token))


def test_times_are_found_where_loads_differ_and_their_sum_where_they_do_not():
    found = paced(
        0.01, 0.002, 1e-6, [(1, 100), (8, 200), (64, 900), (30, 90_000), (2, 60_000)]
    ).token_seconds()
    for requests, kv in ((30, 1000), (60, 1000), (8, 80_000)):
        truth = 0.01 + 0.002 * requests + 1e-6 * kv
        assert found.base + found.request * requests + found.kv_token * kv == pytest.approx(truth, rel=0.25)
    found = paced(0.01, 0.002, 1e-6, [(64, 9000)]).token_seconds()
    one = 0.01 + 0.128 + 0.009
    assert found.base + 64 * found.request + 9000 * found.kv_token == pytest.approx(one, rel=0.01)


@pytest.mark.parametrize("engines", [1, 50])
def test_a_report_counts_half_as_much_after_so_long_however_many_engines_there_are(engines):
    pace = Pace()
    for now, seconds in ((0.0, 1.0), (HALF_SECONDS, 4.0)):
        for _ in range(engines):
            pace.add(now, 100 * seconds, 800, 8, 900)
    found = pace.token_seconds()
    assert found.base + 8 * found.request + 900 * found.kv_token == pytest.approx(3.0, rel=0.01)


@given(
    ESTIMATES, st.integers(0, 5000), st.integers(1, 5000), st.integers(1, 40), st.floats(0.01, 1e6), st.data()
)
def test_the_first_range_is_from_short_lengths_to_all_at_the_cap(
    estimate, generated, more, responses, rate, data
):
    cap, running, short = generated + more, data.draw(st.integers(1, responses)), Work(responses)
    short.add(Remainders(shortened(estimate), cap), [generated] * responses, 0, running, Placed())
    capped = Work(responses)
    capped.add_capped([generated] * responses, cap, running)
    least, most = first_range(short, capped, rate)
    assert 0 < least <= most < math.inf
    assert least == pytest.approx(short.tokens / rate)
    assert most == pytest.approx(responses * more / rate)
    assert first_range(short, capped, 2 * rate)[1] <= most
    assert first_range(short, capped, 0.0) is None
    assert first_range(Work(responses), capped, rate) is None, "nothing runs"
    assert shortened(estimate).tokens == max(estimate.tokens / UNSURE, 1.0)
