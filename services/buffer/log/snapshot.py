"""Snapshots of the whole state of the buffer's machines, and machines restored from them.

Invariants (tests/property/test_buffer_machine.py and test_weights_and_sleep.py, tests/unit/test_snapshot.py):
- restored machines return the same instructions for every further event, to the last bit;
- every field of the machines' state is in a snapshot, or follows from fields that are, as what trainers hold;
- every order that decisions depend on is restored: of rollouts, groups, and requests that wait, run or are
  suspects.

The times at which responses finished are left out: the server takes them away. The keys of waiting requests
are left out, too: they follow from the requests and their estimates, as policies are pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from typing import Any

import msgspec
from msgspec.structs import replace

from seer.common import ids
from seer.common.policy.fleet import InstanceView
from seer.common.policy.length import Estimate
from seer.common.policy.shares import Shares
from seer.services.buffer.buffer_machine import BufferMachine
from seer.services.buffer.events import Joined
from seer.services.buffer.requests.request_machine import RequestMachine
from seer.services.buffer.requests.state import GroupState, RolloutState
from seer.services.buffer.requests.turn_placement import Away, Key
from seer.services.buffer.sleep_machine import SleepMachine
from seer.services.buffer.weights.weights_machine import WeightsMachine


class RegistryFields(msgspec.Struct):
    """The state of a `GroupRegistry` beside rollouts and groups."""

    weight_version: int
    weights_digest: str
    holding: bool
    draining: bool
    weights_by: str = ""


class MachineFields(msgspec.Struct):
    """The state of a `RequestMachine` and its parts that no other Struct here has."""

    estimates: dict[str, Estimate]
    counters: dict[str, int]
    parked: set[str]
    suspects: dict[str, None]
    emptied: str
    lost_alone: dict[str, tuple[str, int, float]]
    _attempt: int
    _maybe_damaged: set[str]
    _running: dict[str, dict[str, None]]
    _incarnations: dict[str, int]
    _dead_incarnations: dict[int, set[str]]
    _no_engine_since: float | None
    _last_tick: float | None
    _queued: int
    _group_number: int
    ending: dict[str, int] = {}


OF_SCHEDULER = ("parked", "suspects", "emptied", "_queued", "ending")
OF_DEATHS = ("lost_alone", "_maybe_damaged", "_dead_incarnations", "_last_tick")
"""The fields of `MachineFields` that are in the machine's `scheduler` and `deaths`."""


class State(msgspec.Struct):
    """The state of a `BufferMachine`.

    Groups have the id of their rollout in its place, and all their requests as `results`, which have none in
    place of their group. `queue`: waiting requests by trainer, the longest waiting one first; `finished`:
    groups in the order of finishing. `shares`: null in states of releases up to 0.4.0.
    """

    machine: MachineFields
    registry: RegistryFields
    partial: list[tuple[tuple[str, str, int], int]]
    rollouts: list[RolloutState]
    groups: list[GroupState]
    finished: list[str]
    queue: list[str]
    fleet: list[InstanceView]
    engines: dict[str, Joined]
    weights: WeightsMachine
    sleep: SleepMachine
    away: list[Away] = []
    latest: list[tuple[Key, str]] = []
    returning: dict[str, str] = {}
    places: list[tuple[Key, str]] = []
    shares: Shares | None = None


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(State)


def _getter(kind: type[msgspec.Struct], **parts: tuple[str, ...]) -> attrgetter[Any]:
    """Return a function that makes a tuple of an object's fields; it is encoded as a `kind` would be.

    `parts`: by attribute of the object, the fields that are attributes of that part.
    """
    paths = {name: f"{part}.{name}" for part, names in parts.items() for name in names}
    return attrgetter(*(paths.get(name, name) for name in kind.__struct_fields__))


_registry = _getter(RegistryFields)
_machine = _getter(MachineFields, scheduler=OF_SCHEDULER, deaths=OF_DEATHS)


def snapshot(machine: BufferMachine) -> bytes:
    """Return the state as JSON."""
    requests, registry = machine.requests, machine.requests.registry
    state = State(
        machine=MachineFields(*_machine(requests)),
        registry=RegistryFields(*_registry(registry)),
        partial=list(registry._partial.items()),
        rollouts=[replace(each, members={}, finish_times=[]) for each in registry.rollouts.values()],
        groups=[_alone(requests, each) for each in registry.groups.values()],
        finished=list(registry.finished),
        queue=list(requests.scheduler.queue),
        fleet=list(requests.instances.values()),
        engines=machine.engines,
        weights=machine.weights,
        sleep=machine.sleep,
        away=list(registry.trajectories.away.values()),
        latest=list(registry.trajectories.latest.items()),
        returning=registry.trajectories.returning,
        places=list(registry.trajectories.places.items()),
        shares=requests.scheduler.queue.shares,
    )
    return _encoder.encode(state)


def _alone(machine: RequestMachine, group: GroupState) -> GroupState:
    requests = group.results
    if not group.done and group.held_since is None:
        requests = [machine.requests[ids.request_id(group.group_id, index)] for index in range(group.size)]
    results = [replace(each, group=None) for each in requests]
    return replace(group, rollout=group.rollout.rollout_id, results=results)


def parse(data: bytes | msgspec.Raw) -> State:
    """Return a snapshot's state. Raises `msgspec.MsgspecError` if it is not a snapshot."""
    return _decoder.decode(data)


def restored(state: State, empty: RequestMachine) -> BufferMachine:
    """Return machines in this state; `empty` is a new machine with its policy and limits.

    The machines keep and change parts of `state`.
    """
    of_machine = set(MachineFields.__struct_fields__).difference(OF_SCHEDULER, OF_DEATHS)
    for target, values, names in (
        (empty, state.machine, of_machine),
        (empty.scheduler, state.machine, OF_SCHEDULER),
        (empty.deaths, state.machine, OF_DEATHS),
        (empty.registry, state.registry, RegistryFields.__struct_fields__),
    ):
        _fill(target, values, names)
    empty.registry._partial.update(state.partial)
    trajectories = empty.registry.trajectories
    for each in state.away:
        each.share = each.share or each.key[0]  # states of releases up to 0.4.0 have none
        trajectories.away[each.group_id] = each
        if each.group_id not in state.returning:
            empty.registry.holdings.add(each.share, requests=1)
    trajectories.latest.update(state.latest)
    trajectories.returning.update(state.returning)
    trajectories.places.update(state.places)
    for instance in state.fleet:
        empty.instances.add(instance)
    _fill_groups(empty, state)
    if state.shares is not None:
        empty.scheduler.queue.shares = state.shares
    for request_id in state.queue:
        empty.scheduler.push(request_id)
    machine = BufferMachine(empty, state.weights, state.sleep)
    machine.engines = state.engines
    return machine


def _fill(target: object, values: msgspec.Struct, names: Iterable[str]) -> None:
    for name in names:
        value = getattr(values, name)
        if isinstance(value, dict | set):  # several parts of a machine may refer to it
            getattr(target, name).update(value)
        else:
            setattr(target, name, value)


def _fill_groups(machine: RequestMachine, state: State) -> None:
    registry = machine.registry
    for each in state.rollouts:
        each.share = each.share or each.trainer  # states of releases up to 0.4.0 have none
        registry.rollouts[each.rollout_id] = each
    for group in state.groups:
        group.rollout = rollout = registry.rollouts[str(group.rollout)]
        registry.groups[group.group_id] = rollout.members[group.group_id] = group
        if group.held_since is not None:
            registry.held[group.group_id] = group
        for request in group.results:
            request.group = group
        if group.done:
            registry.holdings.add(rollout.share, results=group.tokens)
        else:
            registry.holdings.add(rollout.share, requests=group.size, tokens=group.held)
            machine.requests.update((each.view.request_id, each) for each in group.results)
            group.results = []
    registry.finished.update((group_id, registry.groups[group_id]) for group_id in state.finished)
