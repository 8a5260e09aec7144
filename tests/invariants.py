"""The buffer machine's invariants, as its docstring lists them; O(everything)."""

from seer.common import ids
from seer.services.buffer.machine import Machine


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
