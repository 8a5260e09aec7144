"""What `common/policy/schedule.py` promises: order, room and, on the real machine, an end to waiting."""

import math
import random
from collections import Counter
from copy import copy
from dataclasses import replace

import orders
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from seer.common.policy.fleet import Fleet, InstanceView
from seer.common.policy.length import Estimate
from seer.common.policy.request import RequestView
from seer.common.policy.schedule import FAIR_DISPATCHES, POLICIES, length_quantile, oracle
from seer.common.types import Capacity
from seer.services.buffer.requests import events, instructions, state
from seer.services.buffer.requests.request_machine import RequestMachine

CAP = 4000
EVERY = [*POLICIES.values(), oracle({"r/p#0": CAP})]
FAIR = [policy for policy in POLICIES.values() if policy.fair]
each_policy = pytest.mark.parametrize("policy", EVERY, ids=lambda policy: policy.name)
each_fair_policy = pytest.mark.parametrize("policy", FAIR, ids=lambda policy: policy.name)

POSITIVE = st.floats(0, 1e300, exclude_min=True) | st.floats(0.5, 2.0 * CAP)
SPREAD = st.just(0.0) | st.floats(0, 3) | st.floats(0, 1e300)
ESTIMATES = st.builds(Estimate, POSITIVE, SPREAD)
REQUESTS = st.builds(
    RequestView,
    st.just("r/p#0"),
    st.integers(0, 50),
    st.integers(0, 15),
    prompt_len=st.integers(1, 300),
    max_tokens=st.just(CAP),
    generated=st.integers(0, CAP - 1),
    queued=st.integers(1, 10**6),
    last_instance=st.sampled_from(("", "e0", "e7", "gone")),
)
CAPACITIES = [
    Capacity(kv_blocks=blocks, block_size=16, max_num_seqs=seqs, max_model_len=9000)
    for blocks, seqs in ((40, 8), (300, 3))
]
FLEETS = st.lists(
    st.builds(
        InstanceView,
        st.sampled_from([f"e{number}" for number in range(20)]),
        st.sampled_from(CAPACITIES),
        chunks=st.integers(0, 8),
        reserved_blocks=st.integers(0, 40),
        pinned_blocks=st.sampled_from((0, 0, 3)),
    ),
    unique_by=lambda view: view.name,
    max_size=20,
)


# --- single decisions --------------------------------------------------------------------------


@each_policy
@given(request=REQUESTS, estimate=ESTIMATES)
def test_order_is_total_whatever_the_estimate(policy, request, estimate):
    key = policy.order(request, estimate)
    assert key[-1] == request.queued, "no two requests have the same queue number"
    assert all(math.isfinite(part) for part in key)
    assert policy.order(copy(request), replace(estimate)) == key
    later = policy.order(structs.replace(request, queued=request.queued + 1), estimate)
    assert key < later, "first come, first served among equals"


@each_policy
@given(request=REQUESTS, views=FLEETS, chunk_size=st.integers(1, 5000))
def test_an_admitted_chunk_fits_where_it_is_placed(policy, request, views, chunk_size):
    chunk = policy.chunk(request, chunk_size)
    assert chunk == (min(chunk_size, request.remaining) if policy.chunked else request.remaining)
    fleet = Fleet(views)
    name = policy.place(request, chunk, fleet)
    assert policy.place(copy(request), chunk, Fleet(reversed(views))) == name
    if name is None:
        return
    assert fleet[name].capacity.holds(request.context, chunk)
    if policy.admission:
        assert fleet[name].free_blocks >= fleet[name].capacity.blocks_for(request.context, chunk)
        assert fleet[name].chunks < fleet[name].capacity.max_num_seqs


@given(ESTIMATES, st.integers(0, CAP - 1), st.integers(0, CAP - 1))
def test_plausible_is_from_what_is_there_to_the_cap_and_grows_with_it(estimate, generated, more):
    low, high = sorted((generated, more))
    shorter, longer = (length_quantile(estimate, tokens, CAP) for tokens in (low, high))
    assert low * (1 - 1e-9) <= shorter <= CAP
    assert high * (1 - 1e-9) <= longer <= CAP
    assert shorter <= longer * (1 + 1e-9)


# --- an end to waiting -------------------------------------------------------------------------


class Siege:
    """A full instance to which groups keep coming that are said to be longer than one that waits.

    `due` has, for each request that waits, the number of the dispatch by which it must have its turn.
    """

    def __init__(self, policy, seats, rng):
        self.machine = RequestMachine(policy, state.Limits(chunk_size=1))
        self.rng, self.seats = rng, seats
        self.running: list[instructions.Dispatch] = []
        self.turns: Counter[str] = Counter()
        self.due: dict[str, int] = {}
        self.groups = 0
        capacity = Capacity(kv_blocks=10**6, block_size=16, max_num_seqs=seats, max_model_len=9000)
        self.send(orders.joined("a", capacity))
        self.submit(seats, float(CAP))
        self.victims = self.submit(3, 1.0)

    def send(self, event):
        for item in self.machine.apply(event, 0.0):
            if isinstance(item, instructions.Dispatch):
                self.running.append(item)
                self.turns[item.request_id] += 1
                self.due.pop(item.request_id, None)
        number = self.turns.total()
        views = [request.view for request in self.machine.requests.values() if not request.instance]
        waiting = sorted(
            (view for view in views if view.request_id in self.machine.scheduler.queue), key=_queued
        )
        for longer, view in enumerate(waiting):
            bound = number + FAIR_DISPATCHES * (1 + longer)
            self.due[view.request_id] = min(self.due.get(view.request_id, bound), bound)
            assert number < self.due[view.request_id], f"{view.request_id} waits too long"

    def submit(self, size, tokens):
        self.groups += 1
        self.send(events.GroupsSubmitted("t", "r", size, CAP, [events.GroupSpec(str(self.groups), 16)]))
        self.send(events.EstimatesChanged({f"r/{self.groups}": Estimate(tokens, 0.01)}))
        return [f"r/{self.groups}#{index}" for index in range(size)]

    def last(self, dispatches):
        while self.turns.total() < dispatches:
            if len(self.machine.scheduler.queue) < 3 * self.seats + 3:
                self.submit(self.rng.randint(1, 3), float(CAP))
            chunk = self.running.pop(self.rng.randrange(len(self.running)))
            finish = "stop" if self.rng.random() < 0.2 else ""
            self.send(orders.ended("a", chunk.request_id, chunk.attempt, 1, finish))


def _queued(view):
    return view.queued


@each_fair_policy
@pytest.mark.parametrize("seats", [1, 2, 5])
def test_nobody_waits_longer_than_the_bound_whatever_is_said_of_lengths(policy, seats):
    siege = Siege(policy, seats, random.Random(seats))
    siege.last(20 * FAIR_DISPATCHES)
    assert all(siege.turns[victim] for victim in siege.victims)


@each_fair_policy
def test_without_fairness_the_same_siege_starves_and_breaks_the_bound(policy):
    siege = Siege(replace(policy, fair=False), 2, random.Random(2))
    with pytest.raises(AssertionError, match="waits too long"):
        siege.last(20 * FAIR_DISPATCHES)
    assert not any(siege.turns[victim] for victim in siege.victims[1:])
