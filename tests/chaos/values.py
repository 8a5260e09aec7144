"""Values that meet faults, and sleep, wake, updates and deaths in every order: drawn on top of a plan.

Each is drawn apart, so that seeds stay what they were otherwise.
"""

from __future__ import annotations

import random
from dataclasses import replace

from chaos.plan import Catch, Fault, Pause, Plan, Renew, Rest, Roll, Step

BLOCK_SIZE = 32

STATUS_BYTES = 2**13
"""A `Status` of all engines, with its figures, has less."""

AT_LIMIT, BEYOND = "p91", "p92"
"""Ids of prompts that just fit an empty engine with all that may follow, and of those that are one token longer."""

ODD_WEIGHTS = (0.0, 1e-40, -0.0, 3.4e38, -1e-45, 65504.0)
"""Values of all weights of a version: zeros, denormals, the largest: they are numbers, and go live."""

NIGHT_FAULTS = (
    "kill buffer", "kill buffer", "kill engine", "kill engine", "drain buffer", "drain engine", "join engine",
    "cut engine-buffer", "cut engine-buffer", "part engine", "stop engine", "stop buffer", "kill trainer", "reset engine",
)  # fmt: skip
NIGHT_SECONDS = 30.0
NIGHT_WAYS = (
    ("trainers", True, "Sleep"), ("trainers", False, "Slept"), ("engines", False, "Sleep"), ("engines", True, "Slept"),
    ("engines", True, "Register"), ("engines", False, "LoadWeights"), ("engines", True, "WeightsLoaded"),
    ("trainers", False, "WeightsLive"), ("trainers", True, "UpdateWeights"),
)  # fmt: skip


def with_values(plan: Plan) -> Plan:
    """Have some plans with prompts at the limit, odd weights, engines of one name, a spoilt memory, and nights."""
    seed = plan.seed
    plan = _with_edges(random.Random(f"edges {seed}"), plan)
    plan = _with_nights(random.Random(f"nights {seed}"), plan)
    rand = random.Random(f"values {seed}")
    faults = list(plan.faults)
    if rand.random() < 0.1:
        name = f"e{rand.randrange(plan.engines)}"
        faults.append(Fault(rand.uniform(0.0, 4.0), "twin engine", name, rand.choice((0.5, 3.0, 8.0))))
    memory = rand.random() < 0.3
    if memory and rand.random() < 0.5:
        faults.append(Fault(rand.uniform(0.0, 4.0), "spoil memory", "dgds", rand.uniform(0.01, 2.0)))
    faults.sort(key=lambda fault: fault.at)
    # Who updates reads a `Status`, to see whether the weights are still live; it is the longest message.
    header_bytes = max(plan.header_bytes, STATUS_BYTES) if plan.updates else plan.header_bytes
    odd = rand.random() < 0.3
    return replace(plan, faults=tuple(faults), memory=memory, odd_weights=odd, header_bytes=header_bytes)


# --- prompts at the limit ------------------------------------------------------------------------


def _with_edges(rand: random.Random, plan: Plan) -> Plan:
    return replace(
        plan, scripts=tuple(tuple(_edged(rand, plan, step) for step in each) for each in plan.scripts)
    )


def _edged(rand: random.Random, plan: Plan, step: Step) -> Step:
    plain = isinstance(step, Roll) and not (
        step.parts or step.turns or step.shared or step.images or step.ahead
    )
    if rand.random() > 0.15 or not plain or step.cancel or step.deadline:
        return step
    longest = BLOCK_SIZE * plan.kv_blocks - 1 - step.max_tokens
    edges = tuple(each for each in ((AT_LIMIT, longest), (BEYOND, longest + 1), ("p93", 1)) if each[1] > 0)
    return replace(step, prompts=(*step.prompts, *edges))


# --- nights --------------------------------------------------------------------------------------


def _with_nights(rand: random.Random, plan: Plan) -> Plan:
    """Interleave the first trainer's rollouts with sleep, wake and updates, and those with deaths."""
    if rand.random() > 0.25 or plan.poison:
        return plan
    steps: list[Step] = []
    for step in plan.scripts[0]:
        steps += _night(rand)
        steps.append(step)
    steps += _night(rand)
    if not any(isinstance(step, Rest) for step in steps):
        steps.insert(rand.randrange(len(steps) + 1), Rest(0.2))
    if any(isinstance(step, Roll) and step.ahead for step in steps):
        steps.append(Renew(False, "finish"))
    faults = [_night_fault(rand, plan) for _ in range(rand.randint(1, 4))]
    catches = [
        Catch(
            rand.choice(NIGHT_WAYS),
            rand.choice((1, 1, 2, 3)),
            rand.choice(("reset", "cut", "kill source", "kill target")),
            rand.choice((0.05, 0.5, 2.0, 8.0)),
        )
        for _ in range(rand.choice((0, 1, 2, 4)))
    ]
    if rand.random() < 0.2:  # one engine sleeps on while others wake, and meets the next buffer first
        catches.append(Catch(("engines", True, "Slept"), rand.choice((1, 2)), "cut", rand.uniform(8.0, 24.0)))
        catches.append(Catch(("trainers", False, "GroupDone"), rand.choice((1, 2, 5)), "kill source", 0.5))
        faults.append(Fault(rand.uniform(5.0, NIGHT_SECONDS), "part engine", "e0", rand.uniform(4.0, 12.0)))  # fmt: skip
    return replace(
        plan,
        scripts=(tuple(steps), *plan.scripts[1:]),
        faults=(*plan.faults, *faults),
        catches=(*plan.catches, *catches),
    )


def _night(rand: random.Random) -> list[Step]:
    """Return nothing, an update, or sleep of some length, in which weights may be renewed before all wakes."""
    drawn = rand.random()
    if drawn < 0.3:
        return []
    if drawn < 0.45:
        return [Renew(rand.random() < 0.3, rand.choice(("finish", "abort")))]
    rest = Rest(rand.choice((0.0, 0.2, 1.0, 4.0, 12.0)), renews=rand.random() < 0.5)
    return [rest] if rand.random() < 0.7 else [rest, Pause(rand.choice((0.1, 1.0)))]


def _night_fault(rand: random.Random, plan: Plan) -> Fault:
    what, target = rand.choice(NIGHT_FAULTS).split()
    names = {"engine": f"e{rand.randrange(plan.engines)}", "trainer": "t0"}
    kind = f"{what} {target}"
    target = "-".join(names.get(part, part) for part in target.split("-"))
    seconds = rand.uniform(0.01, 2.0) if rand.random() < 0.5 else rand.uniform(4.0, 24.0)
    return Fault(rand.uniform(0.0, NIGHT_SECONDS), kind, target, seconds)
