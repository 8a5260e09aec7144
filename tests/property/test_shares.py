"""Trainers share engines by weight whatever arrives when, and where one waits, its queue alone decides."""

import random
from collections import Counter
from itertools import count

import orders
import pytest
from buffer_events import pick
from hypothesis import given, settings
from hypothesis import strategies as st
from invariants import check_work_conserved
from msgspec import structs

from seer.common.policy.schedule import FAIR_DISPATCHES, POLICIES
from seer.common.policy.shares import MAX_REMEMBERED, UNIT, Shares, cost
from seer.common.types import Capacity
from seer.services.buffer.requests import events, instructions, state
from seer.services.buffer.requests.queue import SharedQueue, WaitingQueue
from seer.services.buffer.requests.request_machine import RequestMachine

SEATS = 8
CAPACITY = Capacity(kv_blocks=10**6, block_size=16, max_num_seqs=SEATS, max_model_len=10**6)


class Engines:
    """A machine whose chunks take as long as `seconds` says; `had` has seat-seconds by trainer."""

    def __init__(self, weights=None, engines=2, policy="seer", seconds=lambda: 1.0):
        limits = state.Limits(chunk_size=16, shares=weights or {}, max_requests=10**6)
        self.machine = RequestMachine(POLICIES[policy], limits)
        self.seconds, self.now, self.numbers = seconds, 0.0, count()
        self.running: list[tuple[float, int, instructions.Dispatch]] = []
        self.had: Counter[str] = Counter()
        self.dispatched: list[str] = []
        for number in range(engines):
            self.tell(orders.joined(f"e{number}", CAPACITY))

    def tell(self, event):
        for item in pick(self.machine.apply(event, self.now), instructions.Dispatch):
            self.running.append((self.now + self.seconds(), next(self.numbers), item))
            self.dispatched.append(item.request_id)

    def submit(self, trainer, requests, max_tokens=16 * 10**4):
        group = events.GroupSpec(f"p{next(self.numbers)}", 16)
        self.tell(events.GroupsSubmitted(trainer, f"r-{trainer}", requests, max_tokens, [group]))

    def run(self, until):
        while self.running and min(self.running)[0] <= until:
            end, _, item = min(self.running)
            self.running.remove((end, _, item))
            self._pass(end)
            limit = self.machine.requests[item.request_id].view.remaining <= item.max_new_tokens
            finish = "length" if limit else ""
            self.tell(orders.ended(item.instance, item.request_id, item.attempt, item.max_new_tokens, finish))
            check_work_conserved(self.machine)
        self._pass(until)

    def _pass(self, now):
        for trainer, seats in self.seats().items():
            self.had[trainer] += seats * (now - self.now)
        self.now = now

    def seats(self):
        return Counter(each.group.rollout.share for each in self.machine.requests.values() if each.instance)


WEIGHTS = st.sampled_from((0.25, 0.5, 1.0, 2.0, 3.0))


@settings(max_examples=12)
@given(
    weights=st.lists(WEIGHTS, min_size=2, max_size=5),
    arrivals=st.lists(st.floats(0, 60), min_size=5, max_size=5),
    engines=st.sampled_from((1, 3)),
    seed=st.integers(0, 99),
)
def test_those_that_wait_have_engines_by_weight_whenever_they_came(weights, arrivals, engines, seed):
    rng = random.Random(seed)
    named = {f"t{number}": weight for number, weight in enumerate(weights)}
    world = Engines(named, engines, seconds=lambda: rng.uniform(0.2, 3.0))
    for trainer, at in sorted(zip(named, arrivals, strict=False), key=lambda item: item[1]):
        world.run(at)
        world.submit(trainer, 60)
    before = world.had.copy()
    start = world.now
    seconds = 120.0
    world.run(start + seconds)
    assert sum(world.had.values()) - sum(before.values()) == pytest.approx(engines * SEATS * seconds)
    for trainer, weight in named.items():
        due = engines * SEATS * seconds * weight / sum(weights)
        # What a trainer may lack or have beyond its share does not grow with time.
        assert abs(world.had[trainer] - before[trainer] - due) < engines * SEATS * 16, trainer


@pytest.mark.parametrize("policy", ["seer", "seer-paper", "least-loaded"])
def test_a_trainer_that_comes_has_half_of_the_engines_once_chunks_have_ended(policy):
    rng = random.Random(0)
    world = Engines(policy=policy, seconds=lambda: rng.uniform(0.5, 1.5))
    world.submit("flood", 5000, max_tokens=160)
    world.run(30.0)
    assert world.seats() == {"flood": 2 * SEATS}
    world.had.clear()
    world.submit("small", 2000, max_tokens=160)
    world.run(40.0)
    share = world.had["small"] / world.had.total()
    assert 0.45 < share < 0.55


LARGE = structs.replace(CAPACITY, kv_blocks=8000)
MIDDLE = structs.replace(CAPACITY, kv_blocks=800)
SMALL = structs.replace(MIDDLE, max_model_len=2000)


@pytest.mark.parametrize(
    ("capacities", "prompt_len", "most"),
    [([LARGE, SMALL, SMALL, SMALL, SMALL], 4800, SEATS), ([MIDDLE] * 5, 7680, 5)],
    ids=["engines-that-cannot-hold-it", "engines-that-are-full-of-it"],
)
def test_a_trainer_that_waits_for_its_own_chunks_keeps_others_from_no_room(capacities, prompt_len, most):
    rng = random.Random(0)
    world = Engines(engines=0, seconds=lambda: rng.uniform(0.5, 1.5))
    for number, capacity in enumerate(capacities):
        world.tell(orders.joined(f"e{number}", capacity))
    world.submit("small", 600, max_tokens=1500)
    world.run(3.0)
    for number in range(20):
        group = events.GroupSpec(f"w{number}", prompt_len)
        world.tell(events.GroupsSubmitted("wide", "r-wide", 1, 1600, [group]))
    world.run(10.0)
    world.had.clear()
    world.run(20.0)
    assert world.had["wide"] / 10 > most - 0.5, "it has all that it can have"
    assert world.had["small"] / 10 > len(capacities) * SEATS - most - 2.5


def test_a_weight_holds_where_trainers_are_more_than_seats():
    world = Engines({"a": 3.0}, engines=1)
    for trainer in "abcdefghijkl":
        world.submit(trainer, 20)
    world.run(400.0)
    due = world.had.total() / 14
    assert world.had["a"] / 3 == pytest.approx(due, rel=0.1)
    assert [trainer for trainer in "bcdefghijkl" if abs(world.had[trainer] / due - 1) > 0.1] == []


def test_who_did_not_wait_has_no_claim_to_what_others_had():
    world = Engines()
    world.submit("busy", 5000)
    world.submit("late", 1)  # less than its share, all the time
    world.run(200.0)
    world.had.clear()
    world.submit("late", 5000)
    world.run(230.0)
    assert world.had["late"] / world.had.total() < 0.6


def test_who_is_served_as_the_oldest_keeps_no_newcomer_from_its_share():
    world = Engines({"low": 0.01})
    world.submit("low", 300)
    world.run(20.0)  # alone: it owes for what runs when another comes
    world.submit("busy", 300)
    world.run(54.0)
    assert world.machine.counters["chunks"] > FAIR_DISPATCHES, "it had a turn as the oldest"
    world.had.clear()
    world.submit("new", 300)
    world.run(74.0)
    assert world.had["new"] / world.had.total() > 0.4


def test_a_new_name_each_time_has_no_more_than_one_share():
    world = Engines()
    world.submit("steady", 50)
    names = Counter()
    for turn in range(400):
        world.submit(f"n{turn}", SEATS, max_tokens=16)
        world.run(world.now + 1.0)
        names[turn] = len(world.machine.scheduler.queue.shares._of)
    assert world.had["steady"] / world.had.total() > 0.4
    assert max(names.values()) <= MAX_REMEMBERED


@settings(max_examples=60)
@given(
    moves=st.lists(
        st.tuples(st.sampled_from(("push", "push", "take", "oldest")), st.integers(0, 9), st.integers(0, 5)),
        max_size=100,
    )
)
def test_one_trainer_is_served_as_by_its_queue_alone(moves):
    shared, alone = SharedQueue(Shares()), WaitingQueue()
    pushed: dict[str, int] = {}
    for number, (what, name, key) in enumerate(moves):
        if what == "push":
            pushed.setdefault(str(name), number)
            shared.push("t", str(name), (key, number), float(number))
            alone.push(str(name), (key, number))
        else:
            gone = shared.head() if what == "take" else shared.oldest(pushed.__getitem__)
            assert gone == (alone.head() if what == "take" else alone.oldest())
            if gone is not None:
                shared.takes("t", UNIT, float(number))
                shared.discard("t", gone)
                alone.discard(gone)
                del pushed[gone]
        assert (shared.head(), list(shared), len(shared)) == (alone.head(), list(alone), len(alone))
        assert not shared.is_ahead("t")


def test_memory_is_bounded_by_who_is_active_whatever_the_names():
    queue = SharedQueue(Shares({"\x00\n/": 1000.0, "": 0.001}))
    queue.push("steady", "x", (0.0,), 0.0)
    for number in range(20_000):
        name = f"{number}\u202e/{'#' * (number % 300)}"
        queue.shares.takes(name, UNIT, float(number))
        queue.shares.gives(name, UNIT, number + 1.0)
        assert len(queue.shares._of) <= MAX_REMEMBERED
    assert queue.head() == "x"
    for number in range(3000):
        queue.push(str(number), f"q{number}", (0.0,), 0.0)
    for number in range(3000):
        queue.discard(str(number), f"q{number}")
        queue.shares.takes(f"m{number}", 1, 0.0)
        queue.shares.gives(f"m{number}", 1, 0.0)
    assert len(queue.shares._of) <= 6002
    queue.discard("steady", "x")
    assert queue.shares == Shares({"\x00\n/": 1000.0, "": 0.001}), "nobody is active: all begin anew"


@given(st.integers(1, 2**31 - 1), st.integers(1, 2**31 - 1), st.integers(0, 2**31))
def test_a_chunk_costs_the_greater_of_its_seat_and_its_blocks(seats, blocks, taken):
    capacity = Capacity(kv_blocks=blocks, block_size=16, max_num_seqs=seats, max_model_len=100)
    found = cost(capacity, min(taken, blocks))
    assert 1 <= found <= UNIT
    assert found >= UNIT // seats
    assert found == UNIT or (taken < blocks and seats > 1)
