"""The buffer machine's invariants, as its docstring lists them; O(everything)."""

from seer.common import ids
from seer.common.policy.placement import stay_or_least_loaded
from seer.services.buffer.requests.group_registry import GroupRegistry
from seer.services.buffer.requests.holdings import ALL, Holdings
from seer.services.buffer.requests.request_machine import RequestMachine
from seer.services.buffer.requests.state import GroupState, Limits
from seer.services.buffer.statistics import Statistics


def check_work_conserved(machine: RequestMachine) -> None:
    """Who goes next fits nowhere now, and who is set aside fits no instance that lives."""
    instances, policy = machine.instances, machine.policy
    for request_id in machine.scheduler.parked:
        view = machine.requests[request_id].view
        chunk = policy.chunk(view, machine.limits.chunk_size)
        assert not instances.holding(view.context, chunk, view.image_tokens), request_id
    head = machine.scheduler.next()
    if head is None or not instances or policy.place is not stay_or_least_loaded:
        return
    view = machine.requests[head].view
    chunk = policy.chunk(view, machine.limits.chunk_size)
    asked = view.context, chunk, view.image_tokens
    assert instances.holding(*asked), f"{head} should be set aside"
    assert not [name for name in instances if instances.has_room(name, *asked)], head
    if len(set(instances.capacities)) == 1:
        idle = [
            name
            for name, view in instances.items()
            if not view.chunks and not view.pinned_blocks and name != machine.scheduler.emptied
        ]
        assert not idle, "nothing waits while an instance that could hold it runs nothing"


def check(machine: RequestMachine) -> None:
    assert machine.instances.chunks == sum(bool(r.instance) for r in machine.requests.values())
    for name, instance in machine.instances.items():
        running = [request for request in machine.requests.values() if request.instance == name]
        assert instance.chunks == len(running), name
        assert instance.reserved_blocks == sum(request.blocks for request in running), name
        if machine.policy.admission:
            assert instance.reserved_blocks <= instance.capacity.kv_blocks, name
            assert instance.chunks <= instance.capacity.max_num_seqs, name
    for request_id, request in machine.requests.items():
        places = (
            request_id in machine.scheduler.queue,
            request_id in machine.scheduler.parked,
            request_id in machine.scheduler.suspects,
            request_id in machine.deaths.lost_alone,
            bool(request.instance),
            bool(request.finish),
        )
        assert sum(places) == 1, (request_id, places)
        assert not request.instance or request.instance in machine.instances, request_id
        assert request.view.remaining > 0 or request.finish, request_id
        for incarnation in request.deaths:
            assert request_id in machine.deaths._dead_incarnations[incarnation], request_id
        if request.alone:
            assert machine.instances[request.instance].chunks == 1, request_id
            assert request.instance == machine.scheduler.emptied, request_id
    assert machine.waiting == sum(not r.instance and not r.finish for r in machine.requests.values())
    check_registry(machine)
    check_deaths(machine)
    check_work_conserved(machine)


def check_deaths(machine: RequestMachine) -> None:
    for incarnation, request_ids in machine.deaths._dead_incarnations.items():
        assert request_ids, incarnation
        assert all(incarnation in machine.requests[request_id].deaths for request_id in request_ids)


def check_trajectories(registry: GroupRegistry) -> None:
    """A trajectory is open or away, under its latest turn."""
    trajectories = registry.trajectories
    for key, group_id in trajectories.latest.items():
        group = registry.groups.get(group_id)
        is_open = group is not None and not group.done and group.held_since is None
        assert is_open != (group_id in trajectories.away), key
    assert set(trajectories.returning) <= set(trajectories.away)
    assert set(trajectories.returning.values()) <= set(registry.held)
    assert {away.key for away in trajectories.away.values()} <= set(trajectories.latest)
    assert all(trajectories.latest[away.key] == name for name, away in trajectories.away.items())


def check_holdings(registry: GroupRegistry, unfinished: list[GroupState]) -> None:
    """What each trainer holds is what its groups and trajectories say."""
    counted = Holdings(Limits(None))
    for group in unfinished:
        counted.add(group.rollout.share, requests=group.size, tokens=group.held)
    for group in registry.finished.values():
        counted.add(group.rollout.share, results=group.tokens)
    trajectories = registry.trajectories
    for name in trajectories.away.keys() - trajectories.returning.keys():
        counted.add(trajectories.away[name].share, requests=1)
    assert (counted.all, counted.of) == (registry.holdings.all, registry.holdings.of)


def check_registry(machine: RequestMachine) -> None:
    registry, limits = machine.registry, machine.limits
    for group in registry.groups.values():
        states = (group.group_id in registry.held, group.group_id in machine.estimates, group.done)
        assert sum(states) == 1, (group.group_id, states)
        assert (group.held_since is not None) == states[0]
        assert states[0] or not group.missing, group.group_id
        assert group.rollout.members[group.group_id] is group
        assert registry.rollouts[group.rollout.rollout_id] is group.rollout
        if states[0]:
            continue
        least = -1 if group.rollout.open else 0
        assert least <= group.rollout.weight_version <= (-1 if least else registry.weight_version)
        requests = group.results or [
            machine.requests[ids.request_id(group.group_id, index)] for index in range(group.size)
        ]
        assert sum(not request.finish for request in requests) == group.unfinished, group.group_id
        assert group.done == (group.unfinished == 0)
        assert group.kept == sum(request.view.generated for request in requests)
    assert sum(len(rollout.members) for rollout in registry.rollouts.values()) == len(registry.groups)
    assert set(machine.estimates) <= set(registry.groups)
    unfinished = [group for group in registry.groups.values() if not group.done]
    check_trajectories(registry)
    check_holdings(registry, unfinished)
    assert sum(group.held for group in unfinished) <= limits.unfinished_tokens
    held = registry.holdings
    assert max((each.requests for each in held.of.values()), default=0) <= limits.max_requests
    assert held.all.requests <= ALL * limits.max_requests
    assert {group.group_id for group in registry.groups.values() if group.done} == set(registry.finished)
    assert held.all.results <= limits.result_tokens or len(registry.finished) == 1


def check_statistics(statistics: Statistics, machine: RequestMachine, opened: int, dispatched: int) -> None:
    """Every response that was opened, and every chunk that was dispatched and not dropped, is counted once."""
    assert (
        sum(statistics.finished.values()) + sum(not each.finish for each in machine.requests.values())
        == opened
    )
    running = sum(bool(each.instance) for each in machine.requests.values())
    assert sum(statistics.chunk_seconds.counts) + statistics.lost.total() + running == dispatched
    assert statistics._groups.keys() <= machine.groups.keys()
    assert statistics._rollouts.keys() <= machine.rollouts.keys()
    for name, rollout in statistics._rollouts.items():
        members = machine.rollouts[name].members.values()
        assert not (rollout.open and rollout.times), "an open rollout may go on for weeks"
        assert rollout.groups == sum(not group.done for group in members)
    chunks = {key for engine in statistics.running._engines.values() for key in engine.chunks}
    assert set(statistics.running.engines) <= machine.instances.keys(), "an engine that is gone is remembered"
    assert chunks == {each.view.request_id for each in machine.requests.values() if each.instance}
