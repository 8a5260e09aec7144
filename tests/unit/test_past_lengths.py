"""What is remembered of prompts: the memory's invariants, and what the context machine makes of it."""

import math

import orders
import pytest

from seer.common.policy.length import PastLengths, Posterior
from seer.services.context.context_machine import EstimateMachine
from seer.services.context.past_lengths import DECAY, PastPrompts

PROMPT, CAP = 512, 40_000


def group(rollout, prompt, lengths, size=None):
    """All events of a group, to its end."""
    group_id = f"{rollout}/{prompt}"
    ended = [orders.progress(group_id, index, length, finished=True) for index, length in enumerate(lengths)]
    return [
        orders.opened(group_id, len(lengths) if size is None else size, PROMPT, CAP),
        *ended,
        orders.closed(group_id),
    ]


def played(machine, *events):
    for event in events:
        machine.apply(event)
    return machine


def test_an_earlier_group_counts_half():
    memory = PastPrompts(2)
    memory.keep("p", [100, 10_000])
    assert memory.recall("p") == PastLengths(pytest.approx(math.log(1000)), 2)
    memory.keep("p", [10] * 4)
    old = 2 * DECAY
    mean = (old * math.log(1000) + 4 * math.log(10)) / (old + 4)
    assert memory.recall("p") == PastLengths(pytest.approx(mean), old + 4)


def test_the_least_recently_used_prompt_goes_first():
    memory = PastPrompts(2)
    memory.keep("a", [1])
    memory.keep("b", [1])
    assert memory.recall("a") is not None
    memory.keep("c", [1])
    assert (memory.recall("b"), len(memory)) == (None, 2)
    memory.keep("a", [1])
    memory.keep("d", [1])
    assert memory.recall("c") is None
    assert memory.recall("a") is not None


def test_nothing_is_remembered_unless_asked():
    machine = played(EstimateMachine(Posterior()), *group("r1", "p", [10, 20]))
    assert len(machine.memory) == 0
    assert machine.memory.recall("p") is None


def test_only_whole_groups_are_remembered_by_their_prompts_whole_id():
    machine = EstimateMachine(Posterior(), remember_prompts=10)
    played(machine, *group("r1", "math/7", [10, 20]), *group("r1", "7", [10, 20], size=3))
    assert machine.memory.recall("7") is None
    assert machine.memory.recall("math/7").responses == 2


def test_a_remembered_prompt_begins_with_what_it_was_like():
    machine = EstimateMachine(Posterior(), remember_prompts=10)
    for prompt, length in (("short", 300), ("long", 9000)):
        played(machine, *group("r1", prompt, [length] * 8))
    played(
        machine,
        orders.opened("r2/short", 8, PROMPT, CAP),
        orders.opened("r2/long", 8, PROMPT, CAP),
        orders.opened("r2/new", 8, PROMPT, CAP),
    )
    now = machine.changes()
    assert now["r2/short"].tokens < 900 < now["r2/new"].tokens < 6000 < now["r2/long"].tokens
    assert now["r2/short"].spread < now["r2/new"].spread


def test_what_a_group_does_outweighs_memory():
    machine = played(EstimateMachine(Posterior(), remember_prompts=10), *group("r1", "p", [300] * 8))
    played(machine, orders.opened("r2/p", 16, PROMPT, CAP))
    before = machine.changes()["r2/p"].tokens
    for index in range(16):
        machine.apply(orders.progress("r2/p", index, 20_000, finished=False))
    assert machine.changes()["r2/p"].tokens > 10 * before


def test_a_group_that_ended_unheard_is_remembered_and_counts_once():
    machine = EstimateMachine(Posterior(), remember_prompts=10)
    *begun, _closed = group("r1", "p", [300] * 8)
    played(machine, *begun)
    machine.replace([])
    assert machine.memory.recall("p").responses == 8
    machine.replace(begun)
    machine.replace([])
    assert machine.memory.recall("p").responses == 8 * DECAY + 8
