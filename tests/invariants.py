"""The buffer machine's invariants, as its docstring lists them; O(everything)."""

from seer.common import ids
from seer.common.policy.placement import stay_or_least_loaded
from seer.services.buffer.machine import Machine


def check_work_conserved(machine: Machine) -> None:
    """Who goes next fits nowhere now, and who is set aside fits no instance that lives."""
    instances, policy = machine.instances, machine.policy
    for request_id in machine.parked:
        view = machine.requests[request_id].view
        assert not instances.holding(view.context, policy.chunk(view, machine.limits.chunk_size)), request_id
    head = machine._next()
    if head is None or not instances or policy.place is not stay_or_least_loaded:
        return
    view = machine.requests[head].view
    chunk = policy.chunk(view, machine.limits.chunk_size)
    assert instances.holding(view.context, chunk), f"{head} should be set aside"
    assert not [name for name in instances if instances.has_room(name, view.context, chunk)], head
    if len(set(instances.capacities)) == 1:
        idle = [name for name, view in instances.items() if not view.chunks and not view.pinned_blocks]
        assert not idle, "nothing waits while an instance that could hold it runs nothing"


def check(machine: Machine) -> None:
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
            request_id in machine.queue,
            request_id in machine.parked,
            bool(request.instance),
            bool(request.finish),
        )
        assert sum(places) == 1, (request_id, places)
        assert not request.instance or request.instance in machine.instances, request_id
        assert request.view.remaining > 0 or request.finish, request_id
    assert machine.waiting == sum(not r.instance and not r.finish for r in machine.requests.values())
    for group in machine.groups.values():
        held = group.results or [
            machine.requests[ids.request_id(group.group_id, index)] for index in range(group.size)
        ]
        assert sum(not request.finish for request in held) == group.unfinished, group.group_id
        assert group.done == (group.unfinished == 0)
        assert group.done or group.group_id in machine.estimates
    assert set(machine.estimates) <= set(machine.groups)
    for rollout in machine.rollouts.values():
        assert rollout.groups - rollout.groups_gone == sum(
            g.rollout is rollout for g in machine.groups.values()
        )
    finished = [group.group_id for group in machine.groups.values() if group.done]
    assert sorted(finished) == sorted(machine._finished)
    kept = sum(machine.groups[name].tokens for name in finished)
    assert kept == machine._finished_tokens
    assert kept <= machine.limits.result_tokens or len(finished) == 1
    check_work_conserved(machine)
