"""What `sim/pool.py` promises, on two nodes of two instances."""

from msgspec.structs import replace
from sim_parts import Clock

from seer.common.policy.fetch_choice import FORGET_SECONDS, NEVER, UNMEASURED_TOKENS
from seer.sim.pool import CHOICE_SECONDS, Pool
from seer.sim.workload import Model, Workload

MODEL = Model(
    step=0.02, request=1e-4, kv=1e-8, attend=1e-9, row=1e-5, weights=2e-3, prefill=1e-4, pull=1e-5,
    kv_tokens=100_000,
)  # fmt: skip
LOAD = Workload(
    name="small", instances=4, node_instances=2, groups=1, group_size=1, cap=20_000, mean=300, model=MODEL
)


class PoolClock(Clock):
    def __init__(self, pull=MODEL.pull):
        super().__init__()
        self.pool = Pool(replace(LOAD, model=replace(MODEL, pull=pull)), self.wake)

    def measure(self, instance=0):
        """Have an instance fetch and compute often enough for a choice."""
        for _ in range(4):
            self.pool.computed(instance, 1000, 1, 0.0)
            self.pool.fetch(instance, 1000, self.now, lambda at: None)
            self.until(self.now + 10)


def test_what_is_on_its_way_is_not_found():
    clock = PoolClock()
    clock.pool.save(0, "a", 1000, 0.0)
    clock.until(0.009)
    assert clock.pool.found(1, "a", 0.0, clock.now) == 0
    clock.until(0.011)
    assert clock.pool.found(1, "a", 0.0, clock.now) == 1000
    assert clock.pool.found(1, "a", 400.0, clock.now) == 600
    assert clock.pool.found(1, "b", 0.0, clock.now) == 0


def test_only_what_is_new_is_saved():
    clock = PoolClock()
    clock.pool.save(0, "a", 1000, 0.0)
    clock.until(1.0)
    clock.pool.save(1, "a", 1500, 1.0)
    clock.until(1.004)
    assert clock.pool.found(2, "a", 0.0, clock.now) == 1000
    clock.until(1.006)
    assert clock.pool.found(2, "a", 0.0, clock.now) == 1500
    clock.pool.save(1, "a", 1500, clock.now)
    assert not clock.events, "nothing is left to carry"


def test_until_it_is_measured_short_ones_are_computed():
    clock = PoolClock()
    clock.pool.save(0, "a", UNMEASURED_TOKENS, 0.0)
    assert not clock.events
    clock.pool.save(0, "a", UNMEASURED_TOKENS + 1, 0.0)
    clock.until(1.0)
    assert clock.pool.found(1, "a", 0.0, 1.0) == UNMEASURED_TOKENS + 1
    assert clock.pool.found(1, "a", 1.0, 1.0) == 0


def test_each_engine_chooses_by_what_it_measured_and_tries_again():
    clock = PoolClock(pull=1e-3)  # ten times as long as computing
    clock.measure()
    assert clock.pool.least(0, clock.now) == NEVER
    assert clock.pool.least(1, clock.now) == UNMEASURED_TOKENS
    clock.pool.save(0, "a", 10_000, clock.now)
    assert not clock.events, "nobody would fetch it here"
    again = clock.now + FORGET_SECONDS + CHOICE_SECONDS
    assert clock.pool.least(0, again) == UNMEASURED_TOKENS
    fast = PoolClock()
    fast.measure()
    assert fast.pool.least(0, fast.now) <= 1


def test_instances_of_a_node_share_its_link():
    clock, done = PoolClock(), {}
    for instance in (0, 1, 2):
        clock.pool.fetch(
            instance, 1000, 0.0, lambda at, instance=instance: done.update({instance: round(at, 6)})
        )
    clock.until(1.0)
    assert done == {0: 0.02, 1: 0.02, 2: 0.015}, (
        "the third has its link for itself, and a third of the others' outgoing ones"
    )
