"""Machines made anew of their own snapshot."""

from seer.services.buffer.log.snapshot import parse, restored, snapshot
from seer.services.buffer.machine import BufferMachine
from seer.services.buffer.requests.machine import RequestMachine


def again(machine: BufferMachine) -> BufferMachine:
    """Return machines made of a snapshot, after a look at a snapshot of these."""
    text = snapshot(machine)
    requests = machine.requests
    new = restored(parse(text), RequestMachine(requests.policy, requests.limits))
    assert parse(snapshot(new)) == parse(text)
    assert ordered(snapshot(new)) == ordered(text)
    return new


def ordered(text: bytes) -> list[list[object]]:
    """Return the orders that dicts in a snapshot have."""
    state = parse(text)
    machine, sleep = state.machine, state.sleep
    dicts = (machine.suspects, machine.accused, *machine._running.values(), machine._mourned)
    return [list(each) for each in (*dicts, sleep._ordered, sleep._waiting)]
