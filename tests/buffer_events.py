"""Events for a buffer's machine, whose invariants are checked after each, and what it answers."""

import orders
from invariants import check
from orders import pick as pick

from seer.common.policy.schedule import POLICIES
from seer.common.types import Capacity
from seer.services.buffer.events import Left
from seer.services.buffer.requests import events, instructions, state
from seer.services.buffer.requests.request_machine import RequestMachine

CAPACITY = Capacity(kv_blocks=20, block_size=16, max_num_seqs=8, max_model_len=256)
LARGE = Capacity(kv_blocks=200, block_size=16, max_num_seqs=8, max_model_len=2000)


def make(policy="divided", engines=("a", "b"), first_attempt=0, **limits) -> RequestMachine:
    machine = RequestMachine(POLICIES[policy], state.Limits(**{"chunk_size": 16, **limits}), first_attempt)
    for incarnation, name in enumerate(engines):
        machine.apply(orders.joined(name, CAPACITY, -incarnation), 0.0)
    return machine


def submit(
    machine,
    *prompts,
    n=2,
    max_tokens=32,
    rollout="r",
    trainer="t",
    now=0.0,
    prompt_len=10,
    same=True,
    kept=None,
    **more,
):
    specs = [events.GroupSpec(prompt, prompt_len, same, kept) for prompt in prompts]
    out = machine.apply(events.GroupsSubmitted(trainer, rollout, n, max_tokens, specs, **more), now)
    check(machine)
    return out


def end(machine, dispatch, count=None, finish="", now=1.0, **fields):
    count = count or dispatch.max_new_tokens
    event = orders.ended(dispatch.instance, dispatch.request_id, dispatch.attempt, count, finish, **fields)
    out = machine.apply(event, now)
    check(machine)
    return out


def run_to_end(machine, out, now=1.0):
    kept = []
    while dispatches := pick(out, instructions.Dispatch):
        out = []
        for dispatch in dispatches:
            more = end(machine, dispatch, now=now)
            kept += pick(more, instructions.Keep)
            out += more
    return out, kept


def die(machine, name, incarnation):
    out = machine.apply(Left([name], died=True), 1.0)
    check(machine)
    out += machine.apply(orders.joined(name, CAPACITY, incarnation), 1.0)
    check(machine)
    return out
