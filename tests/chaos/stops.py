"""A rollout in which one process stands still, or is cut off, for so long: the configuration is the default.

Invariants:
- what is disturbed is disturbed while the rollout has work for longer than that;
- afterwards everything finishes: nothing lost, doubled or changed, and no request fails;
- each engine registers at most once more.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from chaos.outcome import Outcome
from chaos.rollouts import Judge, Roll, job
from chaos.system import System, replay

SERVICES = ("buffer", "context", "dgds", "engine-0", "engine-1", "trainer")
SECONDS = (5.0, 15.0, 45.0, 90.0)

GROUPS_PER_SECOND = 0.8
"""What two replay engines make, 8 responses of 50 tokens at 0.1 s each at a time, 4 to a group."""

AFTER_SECONDS = 15.0
"""So much work is left when the disturbance ends, if nothing was lost by it."""

SILENCE_SECONDS = 60.0
"""A client's default: it gives up on a buffer that says nothing for so long; that is documented."""

BOUND_SECONDS = 240.0
"""Longest time from the end of a disturbance to the end of the rollout."""

Disturb = Callable[[System], Awaitable[None]]


class Trial(msgspec.Struct):
    """One disturbance: `rejoins` by engine, `recovery` in seconds until the next group, None if none came."""

    what: str
    seconds: float
    problems: list[str]
    lost: int
    doubled: int
    changed: int
    responses: int
    rejoins: dict[str, int]
    recovery: float | None
    wall_seconds: float


async def trial(
    system: System, number: int, what: str, seconds: float, begin: Disturb, end: Disturb
) -> Trial:
    """Disturb a rollout once it gives results, for so long, and judge it."""
    clock = asyncio.get_running_loop().time
    prompts = int((seconds + AFTER_SECONDS) * GROUPS_PER_SECOND)
    roll, outcome = Roll(system, job(system, prompts, number=number)), Outcome(number)
    began, before, incarnations = clock(), system.rejoins(), system.incarnations()
    running = asyncio.create_task(roll.run())
    ended = None
    try:
        async with asyncio.timeout(BOUND_SECONDS):
            await roll.first()
        await begin(system)
        try:
            await asyncio.sleep(seconds)
        finally:
            await end(system)
        ended = clock()
        async with asyncio.timeout(BOUND_SECONDS):
            await running
    except TimeoutError:
        outcome.problems.append(f"not finished {BOUND_SECONDS:g} s after the end")
    finally:
        running.cancel()
        await asyncio.wait([running])
    roll.judge(outcome, Judge(system))
    if roll.buffer_lost != (what == "stop buffer" and seconds > SILENCE_SECONDS):
        outcome.problems.append(f"the trainer gave up on the buffer {roll.buffer_lost} times")
    outcome.count()
    outcome.problems += system.leaks()
    rejoins = {name: count - before[name] for name, count in system.rejoins().items()}
    outcome.problems += [
        f"{name} registered {count} times more" for name, count in rejoins.items() if count > 1
    ]
    for name, count in system.incarnations().items():
        if count > incarnations[name] and not name.startswith("pool"):
            outcome.problems.append(f"{name} was started again")
    later = [at for at in roll.arrivals if ended is not None and at >= ended]
    return Trial(
        what, seconds, outcome.problems, outcome.lost, outcome.doubled, outcome.changed, outcome.responses,
        rejoins, round(min(later) - ended, 2) if later else None, round(clock() - began, 1),
    )  # fmt: skip


async def stops(target: str, seconds: Sequence[float]) -> list[Trial]:
    """Stop one process of a system for each of these times, one after the other."""

    async def stop(system: System) -> None:
        if not system.signal(target, signal.SIGSTOP):
            raise ProcessLookupError(f"there is no {target}")

    async def go_on(system: System) -> None:
        system.signal(target, signal.SIGCONT)

    async with System(replay(), tcp=True) as system:
        trials = [
            await trial(system, number, f"stop {target}", each, stop, go_on)
            for number, each in enumerate(seconds)
        ]
    left = system.leftovers()
    trials[-1].problems += [f"left over: {what}" for what in left]
    return trials


async def matrix(targets: Sequence[str] = SERVICES, seconds: Sequence[float] = SECONDS) -> list[Trial]:
    """Stop each of these processes for each of these times; a system each, all at once."""
    return [
        each
        for trials in await asyncio.gather(*(stops(target, seconds) for target in targets))
        for each in trials
    ]
