"""What a virtual run does, drawn from its seed alone."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

PROCESSES = ("buffer", "context", "dgds", "engine", "client")
LINK_FAULTS = ("reset", "part", "noise")
KINDS = (
    *(f"{what} {process}" for what in ("kill", "stop") for process in PROCESSES),
    *(f"{what} {process}" for what in LINK_FAULTS for process in PROCESSES),
    "join engine",
    "leave engine",
)
"""`stop` is SIGSTOP and later SIGCONT; `reset` breaks connections, `part` cuts links off, `noise` drops,
doubles, delays and reorders messages."""

BURST_SECONDS = 3.0
"""Faults begin within this time: a rollout takes about as long."""

UPDATE_SHARE = 0.3
"""Of the seeds, those whose trainer updates weights first."""


@dataclass(frozen=True, slots=True)
class Fault:
    """`seconds` until it is over: the pause before a restart, the length of anything else."""

    at: float
    kind: str
    target: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Plan:
    """A system, a rollout and its faults; times are virtual seconds."""

    seed: int
    engines: int
    prompts: tuple[int, ...]
    n: int
    max_tokens: int
    mean_tokens: int
    chunk_size: int
    policy: str
    kv_blocks: int
    step_seconds: float
    silence_seconds: float
    ttl_seconds: float
    engine_delay: float
    faults: tuple[Fault, ...]
    update: bool
    """The trainer streams weights before it asks for anything; then engines and buffer do not both die."""


def draw(seed: int) -> Plan:
    """Return the plan of a seed. `prompts` are lengths."""
    rand = random.Random(f"plan {seed}")
    engines = rand.randint(1, 3)
    plan = Plan(
        seed=seed,
        engines=engines,
        prompts=tuple(rand.randint(1, 20) for _ in range(rand.randint(1, 5))),
        n=rand.randint(1, 4),
        max_tokens=rand.choice((8, 40, 64)),
        mean_tokens=rand.choice((4, 12, 24)),
        chunk_size=rand.choice((1, 4, 8, 16, 100)),
        policy=rand.choice(("seer", "seer", "seer-paper", "divided", "least-loaded", "migrate", "static")),
        kv_blocks=rand.choice((3, 4, 6, 100)),
        step_seconds=rand.choice((0.05, 0.1)),
        silence_seconds=rand.choice((4.0, 20.0)),
        ttl_seconds=rand.choice((1.0, 4.0)),
        engine_delay=rand.choice((0.0, 0.0, 0.0, 2.0)),
        faults=tuple(sorted((_fault(rand, engines) for _ in range(rand.randint(1, 5))), key=_begin)),
        update=random.Random(f"update {seed}").random() < UPDATE_SHARE,
    )
    if plan.update and any(fault.kind == "kill buffer" for fault in plan.faults):
        lost = ("kill engine", "leave engine")  # with its buffer, weights that nobody has any more
        return replace(plan, faults=tuple(fault for fault in plan.faults if fault.kind not in lost))
    return plan


def _fault(rand: random.Random, engines: int) -> Fault:
    kind = rand.choice(KINDS)
    what, target = kind.split()
    if target == "engine":
        target = f"e{rand.randrange(engines)}"
    seconds = rand.uniform(0.01, 2.0)
    if what in ("stop", "part") and rand.random() < 0.3:
        seconds = rand.uniform(4.0, 24.0)  # past heartbeats, silence and repeated Hellos
    elif what == "noise":
        seconds = rand.uniform(0.5, 4.0)
    return Fault(rand.uniform(0.0, BURST_SECONDS), kind, target, seconds)


def _begin(fault: Fault) -> float:
    return fault.at
