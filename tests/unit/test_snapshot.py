"""Nothing of the machines' state is left out of a snapshot; what it says is kept is."""

import orders
from buffer_events import end, make, pick, submit
from snapshots import again

from seer.common import wire
from seer.common.sleep import SleepState
from seer.services.buffer.buffer_machine import BufferMachine
from seer.services.buffer.log import snapshot
from seer.services.buffer.requests.group_registry import GroupRegistry
from seer.services.buffer.requests.instructions import Dispatch
from seer.services.buffer.requests.request_machine import RequestMachine
from seer.services.buffer.sleep_machine import SleepMachine
from seer.services.buffer.weights.weights_machine import WeightsMachine

AWAKE, KV_ASLEEP, ASLEEP = SleepState
BY_NAME = {"rollouts", "groups", "held", "finished", "_partial", "trajectories", "holdings"}


def test_every_attribute_is_in_a_snapshot():
    machine = make()
    given = {"limits", "first_attempt", "requests", "instances", "registry", "scheduler", "deaths"}
    of_parts = {*snapshot.OF_SCHEDULER, *snapshot.OF_DEATHS}
    assert vars(machine).keys() - given == set(snapshot.MachineFields.__struct_fields__) - of_parts
    given = {
        "policy",
        "now",
        "queue",
        "_chunk_size",
        "_instances",
        "_requests",
        "_estimates",
        "_counters",
        "_deaths",
        "_running",
    }
    assert vars(machine.scheduler).keys() - given == set(snapshot.OF_SCHEDULER)
    assert vars(machine.deaths).keys() - {"_requests"} == set(snapshot.OF_DEATHS)
    given = {"_limits", "_fleet", "_counters", "_drop"} | BY_NAME
    assert vars(machine.registry).keys() - given == set(snapshot.RegistryFields.__struct_fields__)
    whole = BufferMachine(machine, WeightsMachine(), SleepMachine())
    assert vars(whole).keys() == {"requests", "weights", "sleep", "engines", "_idle", "_changed", "_shared"}


def test_parts_that_machines_share_are_shared_by_restored_ones():
    machine = make()
    submit(machine, "p", "q")
    new = again(BufferMachine(machine, WeightsMachine(), SleepMachine())).requests
    assert isinstance(new, RequestMachine)
    assert isinstance(new.registry, GroupRegistry)
    assert new.registry._counters is new.counters
    assert new.registry._fleet is new.instances
    assert new.counters == machine.counters
    assert new.requests["r/p#0"].group is new.groups["r/p"]
    assert new.groups["r/p"].rollout is new.rollouts["r"]
    assert new.rollouts["r"].members == new.groups


def test_orders_and_what_a_collected_part_leaves_are_kept():
    machine = make()
    groups = [f"{name}{number}" for name in "zya" for number in (3, 2, 1, 0)]
    out = submit(machine, *groups, n=2, max_tokens=8)
    for dispatch in pick(out, Dispatch)[:4]:
        end(machine, dispatch)
    finished = list(machine.registry.finished)
    assert finished == ["r/z3", "r/z2"]
    assert list(machine.scheduler.queue) != sorted(machine.scheduler.queue)
    new = again(BufferMachine(machine, WeightsMachine(), SleepMachine())).requests
    assert list(new.registry.finished) == finished
    assert list(new.scheduler.queue) == list(machine.scheduler.queue)
    machine.apply(orders.acknowledged("t", "r", ["z3", "z2"]), 2.0)
    machine.apply(orders.cancelled("t", "r", []), 3.0)
    assert machine.registry._partial
    new = again(BufferMachine(machine, WeightsMachine(), SleepMachine())).requests
    assert new.registry._partial == machine.registry._partial


def test_a_trainer_of_a_state_without_shares_is_the_one_that_goes_on():
    whole = BufferMachine(make(), WeightsMachine(), SleepMachine())
    dispatched = pick(submit(whole.requests, *"abcdefghijklmn", rollout="before"), Dispatch)
    state = snapshot.parse(snapshot.snapshot(whole))
    state.shares = None
    for rollout in state.rollouts:
        rollout.share = ""
    for request in [request for group in state.groups for request in group.results]:
        request.cost = 0
    new = snapshot.restored(state, make(engines=())).requests
    for machine in (new, whole.requests):
        submit(machine, "p", rollout="after")
    for dispatch in dispatched:
        assert end(new, dispatch) == end(whole.requests, dispatch)


def test_who_has_joined_is_known_again():
    machine = BufferMachine(make(engines=()), WeightsMachine(), SleepMachine())
    machine.apply(orders.joined("a", incarnation=7), 1.0)
    assert again(machine).engines == machine.engines


def test_what_was_dropped_and_what_sleeps_is_known_again():
    machine = BufferMachine(make(engines=()), WeightsMachine(), SleepMachine())
    machine.apply(orders.joined("a"), 0.0)
    machine.apply(orders.sleep("t", True, 1, 2), 1.0)
    machine.apply(orders.slept("a", True, ("kv_cache", "weights"), True), 2.0)
    machine.apply(orders.sleep("t", False, 2, tags=("weights",)), 3.0)
    new = again(machine)
    assert new.apply(orders.slept("a", True, ("kv_cache",), True), 4.0) == [
        orders.rests("t", False, "", 2, True, 2)
    ]
    assert new.sleep.weights_awake == {"a"}
    assert new.weights._dropped == {"a"}
    woken = new.apply(orders.sleep("t", False, 3), 5.0) + new.apply(orders.slept("a", False), 6.0)
    [load] = pick(woken, wire.LoadWeights)
    assert load.source == ""
