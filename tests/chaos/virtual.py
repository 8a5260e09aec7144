"""One rollout on virtual time under the faults of a seed, and what is checked of it.

A failing seed replays exactly: `python bench/chaos.py --replay 17` runs it with its logs.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import secrets
import time
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import invariants
import structlog
from virtual_time import Deadlock
from virtual_time import run as run_virtual

from chaos.expected import answers
from chaos.outcome import Outcome
from chaos.plan import Fault, Plan, draw
from chaos.world import World
from seer.common import ids
from seer.common.transport.faulty import Faults
from seer.common.transport.memory import _Queue

BOUND_SECONDS = 60.0
"""Longest time from the end of the last fault to the last response, beyond that of the whole work done
one token at a time. By far the longest part is `engine_silence_seconds` (20 at most)."""

SETTLE_SECONDS = 30.0
"""Longest time until the buffer has forgotten everything, once the trainer has left."""


def run(seed: int) -> Outcome:
    """Run the plan of `seed` and return its outcome."""
    outcome = Outcome(seed)
    with _determined(seed):
        try:
            run_virtual(_play(draw(seed), outcome))
        except (Deadlock, AssertionError) as error:
            outcome.problems.append(f"{type(error).__name__}: {error}")
    return outcome


async def _play(plan: Plan, outcome: Outcome) -> None:
    world = World(plan)
    for name in ("buffer", "context", "dgds", "client"):
        world.start(name)
    try:
        await asyncio.gather(_bring_engines(world), *(_inflict(world, each, outcome) for each in plan.faults))
        over, bound = world.loop.time(), BOUND_SECONDS + world.expected.tokens * plan.step_seconds
        try:
            async with asyncio.timeout(bound):
                await world.finished.wait()
        except TimeoutError:
            outcome.problems.append(f"not finished {bound:.1f} s after the last fault (at {over:.3f})")
        else:
            outcome.problems += await _settled(world)
    finally:
        outcome.seconds = world.loop.time()
        _judge(world, outcome)
        outcome.problems += [f"left over: {what}" for what in await world.end()]
        outcome.problems += world.crashes


async def _bring_engines(world: World) -> None:
    await asyncio.sleep(world.plan.engine_delay)
    for number in range(world.plan.engines):
        world.start(f"e{number}")


async def _inflict(world: World, fault: Fault, outcome: Outcome) -> None:
    await asyncio.sleep(fault.at)
    what, name = fault.kind.split()[0], fault.target
    outcome.faults.append(fault.kind)
    match what:
        case "kill":
            await world.kill(name)
            await asyncio.sleep(fault.seconds)
            if name != "client" or not world.finished.is_set():
                world.start(name)
        case "stop":
            await world.stop(name, fault.seconds)
        case "reset":
            await world.reset(name, fault.seconds)
        case "part":
            await world.part(name, fault.seconds)
        case "noise":
            await world.noise(name, fault.seconds, _noise(world.plan.seed, fault))
        case "join":
            world.start(f"e{world.plan.engines + outcome.faults.count(fault.kind)}")
        case "leave":
            await world.leave(name)
            await asyncio.sleep(fault.seconds)
            world.start(name)
    _check_machine(world)


def _noise(seed: int, fault: Fault) -> Faults:
    # Not both lost and doubled: the counts that reveal a loss could agree. ZeroMQ never doubles.
    rand = random.Random(f"noise {seed} {fault.at}")
    plan = {name: rand.choice((0.02, 0.2)) for name in (rand.choice(("drop", "duplicate")), "reorder")}
    return Faults(**plan, delay_seconds=rand.choice((0.0, 0.05, 1.0)))


def _check_machine(world: World) -> None:
    if (process := world.processes.get("buffer")) and process.service is not None:
        service = process.service
        invariants.check(service.machine)
        waiting = {
            ids.group_id(event.rollout_id, spec.prompt_id)
            for _, event in service.machine._unchecked
            for spec in event.groups
        }
        assert set(service.store._groups) == set(service.machine.groups) | waiting


async def _settled(world: World) -> list[str]:
    """Wait until the buffer is empty; return what it still holds, and doubled connections."""
    service = world.processes["buffer"].service
    machine = service.machine
    try:
        async with asyncio.timeout(SETTLE_SECONDS):
            while machine.groups or machine._unchecked:
                await asyncio.sleep(0.5)
    except TimeoutError:
        return [f"the buffer still holds {sorted(machine.groups)}"]
    _check_machine(world)
    left = [f"the buffer still has {sorted(machine.rollouts)}"] if machine.rollouts else []
    engines = sum(name.startswith("e") for name in world.processes)
    for endpoint, dealers in world.network.dealers.items():
        if len(dealers) > engines:
            left.append(f"{len(dealers)} connections to {endpoint}")
    return left


def _judge(world: World, outcome: Outcome) -> None:
    plan = world.plan
    outcome.responses = plan.n * len(plan.prompts)
    outcome.lost = plan.n * (len(plan.prompts) - len(world.journal))
    outcome.doubled = world.doubled
    outcome.changed = sum(
        world.expected.changed(name, answers(group)) for name, group in world.journal.items()
    )
    outcome.count()
    ends = [fault.at + (0.0 if fault.kind.startswith("kill") else fault.seconds) for fault in plan.faults]
    outcome.recovered(ends, world.arrivals)


@contextmanager
def _determined(seed: int) -> Iterator[None]:
    """Make random numbers and the wall clock functions of the seed."""
    rand = random.Random(f"secrets {seed}")
    with ExitStack() as stack:
        for patch in (
            mock.patch.object(secrets, "randbits", rand.getrandbits),
            mock.patch.object(secrets, "token_hex", lambda size: rand.randbytes(size).hex()),
            mock.patch.object(time, "time_ns", side_effect=itertools.count(10**6, 10**6)),
        ):
            stack.enter_context(patch)
        yield


@contextmanager
def quiet() -> Iterator[None]:
    """Log nothing: faults are what this is about."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    yield
    structlog.configure(**before)


def story(seed: int) -> list[str]:
    """Run a seed and return every message that was sent: virtual time, endpoint and digest."""
    told: list[str] = []
    push = _Queue.push

    def pushed(queue: _Queue[object], item: object) -> None:
        if isinstance(item, list):
            now = asyncio.get_running_loop().time()
            told.append(f"{now:.6f} {queue._name} {zlib.crc32(item[0])}")
        push(queue, item)

    with mock.patch.object(_Queue, "push", pushed), quiet():
        told.append(str(run(seed)))
    return told
