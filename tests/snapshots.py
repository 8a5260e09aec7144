"""Machines made anew of their own snapshot."""

from seer.services.buffer.buffer_machine import BufferMachine
from seer.services.buffer.log.snapshot import parse, restored, snapshot
from seer.services.buffer.requests.request_machine import RequestMachine


def again(machine: BufferMachine) -> BufferMachine:
    """Return machines made of a snapshot, after a look at a snapshot of these."""
    text = snapshot(machine)
    requests = machine.requests
    new = restored(parse(text), RequestMachine(requests.policy, requests.limits))
    assert parse(snapshot(new)) == parse(text)
    assert ordered(new) == ordered(machine)
    return new


def ordered(machine: BufferMachine) -> list[list[object]]:
    """Return what is kept in an order that decisions depend on."""
    requests, registry, sleep = machine.requests, machine.requests.registry, machine.sleep
    scheduler, deaths = requests.scheduler, requests.deaths
    groups = (registry.rollouts, registry.groups, registry.held, registry.finished, registry._partial.items())
    running = (requests._running[name] for name in requests.instances)
    waiting = (scheduler.queue, scheduler.suspects, deaths.lost_alone, deaths._dead_incarnations)
    members = (rollout.members for rollout in registry.rollouts.values())
    return [list(each) for each in (*groups, *members, *running, *waiting, sleep._ordered, sleep._waiting)]
