"""One system on virtual time under the trainers and faults of a seed, and what is checked of it.

A failing seed replays exactly: `python bench/correctness/chaos.py --replay 17` runs it with its logs.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import logging
import os
import random
import re
import secrets
import shutil
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import structlog
from faulty_transport import Faults
from virtual_time import PROCESS, Deadlock
from virtual_time import run as run_virtual

from chaos import stuck, whole
from chaos.images import LARGEST_BYTES
from chaos.outcome import Outcome
from chaos.plan import Fault, Plan
from chaos.plan import draw as drawn
from chaos.values import with_values
from chaos.world import World
from seer.client import image_uploads
from seer.common import wire
from seer.common.blobs import on_this_machine
from seer.common.config import BufferConfig
from seer.common.net import stream
from seer.common.wire import codec
from seer.services.buffer import conductor
from seer.services.buffer.images import image_server
from seer.services.buffer.log import writer
from seer.services.buffer.log.log_folder import incarnations
from seer.services.buffer.log.replay import replay_incarnation
from seer.services.buffer.log.rows import LogError
from seer.services.buffer.requests import deliveries
from seer.services.buffer.weights import fan_out
from seer.services.dgds import server as dgds_server
from seer.services.engine import images as engine_images
from seer.services.engine.weights import updater
from seer.services.engine.weights.holders import Buffer, Holder

BOUND_SECONDS = 150.0
"""Longest time from the end of the last fault to the last trainer's, beyond that of the whole work done
one token at a time. Silence, spools that stand still and repeated questions are parts of it."""

ENGINE_WAIT_SECONDS = BufferConfig().engine_wait_seconds

SETTLE_SECONDS = 90.0
"""Longest time until everything is whole and nothing is held, once the trainers have left."""

LIMIT_SECONDS = 2 * 3600.0
"""A run that takes longer is stuck."""

PART_BYTES = 1024
"""Of a stream of weights: small, so that even small ones have several."""

_MEMORY = Path("/dev/shm")
"""Where files cost nothing."""

SEGMENT_BYTES = 2**14
"""Of the buffer's log: small, so that most runs have several."""

EPOCH_NS = 1_700_000_000 * 10**9


def draw(seed: int, *, noise: bool = False) -> Plan:
    """Return the plan of a seed, with the values that meet its faults."""
    return with_values(drawn(seed, noise=noise))


def run(seed: int, *, noise: bool = False) -> Outcome:
    """Run the plan of `seed` and return its outcome."""
    return run_plan(draw(seed, noise=noise))


def run_plan(plan: Plan) -> Outcome:
    """Run a plan and return its outcome."""
    outcome = Outcome(plan.seed)
    home = Path(tempfile.mkdtemp(prefix="chaos-", dir=_MEMORY if _MEMORY.is_dir() else None))
    try:
        run_virtual(_play(plan, outcome, home), LIMIT_SECONDS)
    except (Deadlock, AssertionError) as error:
        outcome.problems.append(f"{type(error).__name__}: {error}")
    finally:
        shutil.rmtree(home, ignore_errors=True)
    return outcome


async def _play(plan: Plan, outcome: Outcome, home: Path) -> None:
    world = World(plan, home)
    with _determined(world):
        for name in ("buffer", "context", "dgds", *plan.trainers):
            world.start(name)
        try:
            await _live(world, outcome)
        finally:
            outcome.seconds = world.loop.time()
            _judge(world, outcome)
            outcome.problems += [f"left over: {what}" for what in await world.end()]
            outcome.problems += _replayed(world)


async def _live(world: World, outcome: Outcome) -> None:
    plan = world.plan
    lasting = [fault for fault in plan.faults if _passable(plan, fault)]
    async with asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(_watch(world, outcome))
        apart = [tasks.create_task(_inflict(world, each, outcome)) for each in lasting]
        others = [_inflict(world, each, outcome) for each in plan.faults if each not in lasting]
        await asyncio.gather(_bring_engines(world), *others)
        await _ended(world, outcome)
        await asyncio.gather(*apart)
        watching.cancel()
    if world.finished.is_set():
        outcome.problems += await _settled(world)


async def _ended(world: World, outcome: Outcome) -> None:
    """Wait until all trainers are done, within a bound from the last fault on."""
    began, bound = world.loop.time(), _bound(world.plan)
    while not world.finished.is_set():
        over = max([began, *(each.at + each.seconds for each in world.caught)])
        if world.may_lack_weights:
            over += ENGINE_WAIT_SECONDS  # the live weights may be gone with the buffer: who began under them waits
        # An update that was refused so held submissions for all its time.
        over += world.plan.update_seconds * sum(
            "of the old version went on" in why for why in _retries(world)
        )
        if world.loop.time() >= over + bound:
            outcome.stuck = len(world._left)
            outcome.problems.append(f"not finished {bound:.1f} s after the last fault (at {over:.3f})")
            outcome.problems += stuck.waits(world)
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(over + bound):
                await world.finished.wait()


def _passable(plan: Plan, fault: Fault) -> bool:
    """Say whether work must go on while this fault lasts: one engine of several stands still for long."""
    touched = {each.target for each in plan.faults if each.target.startswith("e")}
    stops = fault.kind in ("stop engine", "part engine")
    return stops and fault.seconds > 2 * plan.silence_seconds and len(touched) < plan.engines


def _bound(plan: Plan) -> float:
    tokens = sum(step.most_tokens for step in plan.rolls)
    trip = 2 * (plan.latency + plan.jitter)  # of a chunk
    return (
        BOUND_SECONDS
        + tokens * (plan.step_seconds + trip / plan.chunk_size)
        + 2 * plan.turn_seconds
        + 200 * (plan.latency + plan.jitter)
    )


async def _watch(world: World, outcome: Outcome) -> None:
    progress = stuck.Progress(world)
    while True:
        whole.check_now(world)
        if problems := progress.check():
            outcome.stuck = len(world._left)
            outcome.problems += problems
        await asyncio.sleep(1.0)


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
            world.start(name)
        case "lose":
            await world.lose(name)
        case "reset":
            await world.reset(name)
        case "cut" | "hole":
            await world.cut(*name.split("-"), fault.seconds, both=what == "cut")
        case "noise":
            await world.noise(name, fault.seconds, _noise(world.plan.seed, fault))
        case "stop" | "part" | "spoil" | "twin":
            await getattr(world, what)(name, fault.seconds)
        case "fill":
            await world.fill_disk(fault.seconds)
        case "join":
            world.start(f"e{world.plan.engines + outcome.faults.count(fault.kind)}")
        case "drain":
            await world.drain(name)
            await asyncio.sleep(fault.seconds)
            world.start(name)
    whole.check_now(world)


def _noise(seed: int, fault: Fault) -> Faults:
    # Not both lost and doubled in one run: the counts that reveal a loss could agree. ZeroMQ never doubles.
    rand = random.Random(f"noise {seed} {fault.at}")
    kind = random.Random(f"noise {seed}").choice(("drop", "duplicate"))
    plan = {name: rand.choice((0.02, 0.2)) for name in (kind, "reorder")}
    return Faults(**plan, delay_seconds=rand.choice((0.0, 0.05, 1.0)))


async def _settled(world: World) -> list[str]:
    """Wait until the system is whole and holds nothing; return what is still missing."""
    bound = SETTLE_SECONDS + (world.plan.ttl_seconds if world.plan.ttl_seconds < 3600 else 0)
    try:
        async with asyncio.timeout(bound):
            while whole.missing(world):
                await asyncio.sleep(1.0)
    except TimeoutError:
        return [f"{bound:.0f} s after the end: {what}" for what in whole.missing(world)]
    whole.check_now(world)
    return [*whole.tables(world), *whole.made_again(world)]


def _judge(world: World, outcome: Outcome) -> None:
    plan = world.plan
    ended = [(trainer, ended) for trainer in world.trainers.values() for ended in trainer.ended.values()]
    outcome.responses = plan.requests
    wanted = sum(
        len(step.prompts) for name in plan.trainers for step in _rolls(world, name) if name not in world.lost
    )
    outcome.lost = max(0, wanted - sum(trainer.name not in world.lost for trainer, _ in ended))
    outcome.doubled, outcome.changed = world.doubled, world.changed
    outcome.count()
    outcome.problems += list(dict.fromkeys(world.problems))
    outcome.problems += [f"crashed: {what}" for what in world.crashes]
    reasons = (*world.excuses, *(each.why for _, each in ended if each.why), *_retries(world))
    outcome.excuses = Counter(re.sub(r"[0-9a-f]{12}|\d+", "#", why)[:100] for why in reasons)
    outcome.ways = Counter(world.roads.seen)
    outcome.faults += [fault.kind for fault in world.caught]
    ends = [each.at + (0.0 if "kill" in each.kind else each.seconds) for each in world.inflicted]
    outcome.recovered(ends, world.arrivals)


def _replayed(world: World) -> Iterator[str]:
    """Run the log of every buffer through the machines again; yield what they answer otherwise."""
    for paths in incarnations(world.logs):
        try:
            deque(replay_incarnation(paths), maxlen=0)
        except LogError as error:
            yield f"replay: {error}"


def _rolls(world: World, trainer: str) -> list[Any]:
    return [step for step in world.script(trainer) if hasattr(step, "prompts")]


def _retries(world: World) -> Iterator[str]:
    for trainer in world.trainers.values():
        yield from trainer.retries.elements()


# --- a world that is a function of the seed ------------------------------------------------------


@contextmanager
def _determined(world: World) -> Iterator[None]:
    """Make random numbers, clocks, disks and sizes functions of the plan."""
    plan = world.plan
    rand = random.Random(f"secrets {plan.seed}")
    # Results that expire unread leave the window, and not what waits for their reader.
    small = plan.queue < 1000 and plan.result_bytes > 2**20 and plan.ttl_seconds >= 3600
    limits = codec.Limits(max_header_bytes=plan.header_bytes)

    def wall() -> int:
        return EPOCH_NS + int((world.loop.time() + world.clocks.get(PROCESS.get(), 0.0)) * 1e9)

    with ExitStack() as stack:
        for patch in (
            mock.patch.object(secrets, "randbits", rand.getrandbits),
            mock.patch.object(secrets, "token_hex", lambda size=32: rand.randbytes(size).hex()),
            mock.patch.object(time, "time_ns", wall),
            mock.patch.object(tempfile, "tempdir", str(world.home)),
            mock.patch.object(tempfile, "_name_sequence", _names()),
            mock.patch.object(Buffer, "here", _same(plan.same_machine)),
            mock.patch.object(Holder, "here", _same(plan.nodes == 1)),
            mock.patch.object(conductor, "node_id", return_value="the buffer's"),
            mock.patch.object(updater, "node_id", functools.partial(_node, plan)),
            mock.patch.object(fan_out, "FAN_OUT", plan.fan_out),
            mock.patch.object(dgds_server, "TTL_SECONDS", 20.0),
            mock.patch.object(wire, "SPOOL_BYTES", PART_BYTES),
            mock.patch.object(wire, "IMAGE_PART_BYTES", PART_BYTES),
            mock.patch.object(image_uploads, "IMAGE_PART_BYTES", PART_BYTES),
            mock.patch.object(image_server, "MAX_IMAGE_BYTES", LARGEST_BYTES),
            mock.patch.object(engine_images, "MAX_IMAGE_BYTES", LARGEST_BYTES),
            mock.patch.object(writer.Folder, "limit", SEGMENT_BYTES),
            mock.patch.object(writer.Folder, "append", _on_disk(world, writer.Folder.append)),
            mock.patch.object(os, "pwrite", _on_disk(world, os.pwrite)),
            mock.patch.object(Path, "write_text", _on_disk(world, Path.write_text)),
            mock.patch.object(Path, "write_bytes", _on_disk(world, Path.write_bytes)),
            mock.patch.object(codec.Decoder.__init__, "__defaults__", (limits,)),
            mock.patch.object(stream, "PAGE_ROWS", stream.PAGE_ROWS if plan.header_bytes > 2**20 else 4),
            mock.patch.object(deliveries, "WINDOW_BYTES", 2**11 if small else deliveries.WINDOW_BYTES),
        ):
            stack.enter_context(patch)
        yield


def _names() -> Iterator[str]:
    number = 0
    while True:
        number += 1
        yield f"n{number}"


def _same(same: bool) -> Any:
    return lambda self, state: same and on_this_machine(state)


def _node(plan: Plan) -> str:
    """Return the machine of the engine that this is called in."""
    number = re.match(r"e(\d+)", PROCESS.get())
    return f"n{int(number[1]) % plan.nodes}" if number else ""


def _on_disk(world: World, write: Callable[..., Any]) -> Callable[..., Any]:
    def written(*args: Any, **options: Any) -> Any:
        if world.disk_full and PROCESS.get()[:1] in ("b", "e"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(*args, **options)

    return written


@contextmanager
def quiet() -> Iterator[None]:
    """Log nothing: faults are what this is about."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    try:
        yield
    finally:
        structlog.configure(**before)


def story(seed: int) -> list[str]:
    """Run a seed and return every message that was sent: virtual time, fate, endpoint, size and tag."""
    told: list[str] = []

    def telling(saw: Callable[..., None]) -> Callable[..., None]:
        def tell(roads: Any, fate: str, endpoint: str, upward: bool, frames: list[Any]) -> None:
            saw(roads, fate, endpoint, upward, frames)
            now = asyncio.get_running_loop().time()
            told.append(f"{now:.6f} {fate} {endpoint} {upward} {sum(map(len, frames))}")

        return tell

    from chaos.roads import ChaosRoads

    with mock.patch.object(ChaosRoads, "saw", telling(ChaosRoads.saw)), quiet():
        told.append(str(run(seed)))
    return told
