"""A whole system as simulated processes in one event loop, which can be killed, stopped and cut off.

A killed process is frozen for good and its sockets vanish: as with SIGKILL, not one line of it runs on.
It is cancelled only when the world ends. A stopped one keeps its connections: its kernel takes what comes.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import json
import os
import random
import re
import struct
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from faulty_transport import Faults, FaultyTransport
from memory_transport import MemoryNetwork, MemoryTransport
from virtual_time import PROCESS, VirtualTimeLoop, eventually

from chaos import engines
from chaos.expected import Expected, weights_digest
from chaos.images import PLACEHOLDER, image
from chaos.in_place import planned
from chaos.plan import POISON, UNSAMPLEABLE, Catch, Fault, Plan, Roll, Step
from chaos.roads import BACKOFF_SECONDS, ChaosRoads
from chaos.trainers import Trainer
from chaos.values import ODD_WEIGHTS
from seer.client import SamplingParams
from seer.client.prompts import Prompt
from seer.common import wire
from seer.common.clock import LoopClock
from seer.common.config import (
    BufferConfig,
    Config,
    DgdsConfig,
    EngineConfig,
    ReplayConfig,
    SharedConfig,
    shared_hash,
)
from seer.common.errors import Unreachable
from seer.common.net.channel import Channel
from seer.common.net.identity import Identity
from seer.common.process.service import Service
from seer.common.weights.in_place import is_in_place
from seer.common.wire import IMAGE_STALL_SECONDS
from seer.common.wire.codec import encode
from seer.services.buffer import server as buffer
from seer.services.context import server as context
from seer.services.dgds import server as dgds

SERVERS = {"buffer": buffer.make, "context": context.make, "dgds": dgds.make}
ENDPOINTS = Config().endpoints
VOCAB = 1_000
CALM = Faults()
HOUR = 3600.0
SIGN_SECONDS = 5.0
"""How often a trainer that is well says something to the buffer."""

Links = MemoryTransport | FaultyTransport

TWIN = "twin"
"""At the end of the name that a process has here, which is an engine of another one's name."""

FOREIGN = ("venv", "v1-notes", "spare", "model")
"""Folders that lie in a spool and are nobody's to touch."""


@dataclass(slots=True, eq=False)
class Process:
    """One start of a process: `incarnation` is its name in the event loop; `buffers` began before it."""

    name: str
    incarnation: str
    links: Links
    context: contextvars.Context
    service: Service | None = None
    task: asyncio.Task[None] | None = None
    stops: int = 0
    buffers: int = 0


class World:
    """Use inside a `VirtualTimeLoop`; `home` is an empty folder of this run's own."""

    def __init__(self, plan: Plan, home: Path) -> None:
        self.plan = plan
        self.home = home
        self.loop: VirtualTimeLoop = asyncio.get_running_loop()  # type: ignore[assignment]
        self.roads = ChaosRoads(plan.seed, plan.latency, plan.jitter, plan.catches)
        self.roads.on_catch = self._catch
        self.network = self.roads.network = MemoryNetwork(self.roads, plan.queue)
        self.trainers_at = ENDPOINTS.trainers
        self.processes: dict[str, Process] = {}
        self.trainers = {name: Trainer(self, name) for name in plan.trainers}
        self.clocks: dict[str, float] = {}
        self.arrivals: list[float] = []
        self.doubled = self.changed = 0
        self.crashes: list[str] = []
        self.problems: list[str] = []
        self.excuses: list[str] = []
        self.finished = asyncio.Event()
        self.asked_version = 0
        self.in_step_at = 0.0
        self.disk_full = self.disk_was_full = False
        self.in_place: set[int] = set()
        """Versions that were sent in place: all tries of one are."""
        self.lost: set[str] = set()
        self.caught: list[Fault] = []
        self.lost_at: dict[str, float] = {}
        self.spoilt = 0  # images, or parts of such
        self.served: list[buffer.BufferServer] = []  # every incarnation of the buffer
        self.given_up: Counter[bytes] = Counter()  # by address of an engine: how often a buffer did that
        self.noisy = any(fault.kind.startswith("noise") for fault in plan.faults)
        self._left = set(plan.trainers)
        self._dead: list[Process] = []
        self._incarnations = self.buffers = 0
        self._rand = random.Random(f"world {plan.seed}")
        self._talk: asyncio.Task[None] | None = None
        self._apart: set[asyncio.Task[None]] = set()
        self._outside = contextvars.copy_context()
        if plan.rogue:
            self._talk = self.loop.create_task(self._talk_nonsense())
        if plan.spool:
            for name in FOREIGN:
                (self.spool / name).mkdir(parents=True)
                (self.spool / name / "work").write_text("mine")

    @property
    def spool(self) -> Path:
        """The spool that is configured in some plans."""
        return self.home / "spool"

    @property
    def memory(self) -> Path:
        """Where the dgds keeps past groups in some plans."""
        return self.home / "memory"

    @property
    def logs(self) -> Path:
        """Where every incarnation of the buffer logs."""
        return self.home / "log"

    def config(self, name: str) -> Config:
        plan = self.plan
        return Config(
            shared=SharedConfig(block_size=32),
            buffer=BufferConfig(
                policy=plan.policy,
                chunk_size=plan.chunk_size,
                engine_silence_seconds=plan.silence_seconds,
                update_seconds=plan.update_seconds,
                result_ttl_seconds=plan.ttl_seconds,
                trainer_lease_seconds=plan.lease_seconds,
                result_bytes=plan.result_bytes,
                max_requests=plan.max_requests,
                log=str(self.logs),
                keep_chunks=plan.seed % 2 == 1,
                spool=str(self.spool) if plan.spool else "",
                images=str(self.home / "images") if plan.spool else "",
                image_bytes=plan.image_bytes or 2**30,
            ),
            dgds=DgdsConfig(remember_path=str(self.memory) if plan.memory else "", remember_tokens=10_000),
            engine=EngineConfig(
                name=name.removesuffix(TWIN), backend="replay", kv_blocks=plan.kv_blocks, max_num_seqs=8,
                replay=ReplayConfig(
                    step_seconds=plan.step_seconds, vocab_size=VOCAB, mean_tokens=plan.mean_tokens
                ),
                weights_endpoint=f"tcp://{name}:1", in_place_updates=True, image_bytes=plan.image_bytes or 2**30,
            ),
        )  # fmt: skip

    # --- what the oracle knows -----------------------------------------------------------

    def script(self, trainer: str) -> tuple[Step, ...]:
        """Return what a trainer does."""
        return self.plan.scripts[int(trainer[1:])]

    def tensors(self, version: int) -> dict[str, np.ndarray]:
        """Return the weights of a version: clients send few elements of them, as a delta, or all."""
        weights = np.ones(1000, dtype=np.float32)
        weights[:10] = ODD_WEIGHTS[version % len(ODD_WEIGHTS)] if self.plan.odd_weights else version
        return {"w": weights}

    def folder(self, version: int) -> str:
        """Return a folder with the weights of a version, which every node sees."""
        folder = self.home / f"model-{version}"
        if not folder.exists():
            folder.mkdir()
            data = self.tensors(version)["w"].tobytes()
            head = {"w": {"dtype": "F32", "shape": [1000], "data_offsets": [0, len(data)]}}
            text = json.dumps(head).encode()
            (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
        return str(folder)

    def digest(self, version: int) -> str:
        """Return the digest that weights of a version must have; the first ones have none."""
        if version in self.in_place:
            return planned(version).digest()
        return weights_digest(self.tensors(version)) if version else ""

    @staticmethod
    def prompt(step: Roll, prompt_id: str) -> Prompt:
        """Return a prompt of a rollout by its name."""
        length = dict(step.prompts)[prompt_id]
        if prompt_id == "poison":
            return Prompt(prompt_id, token_ids=[POISON] * length)
        if prompt_id == "mute":
            return Prompt(prompt_id, token_ids=[UNSAMPLEABLE] * length)
        number = int(prompt_id[1:])
        shown = min(step.images, length)
        images = [image(number + each, each) for each in range(shown)]
        tokens = [PLACEHOLDER] * shown + [number + 1] * (length - shown)
        return Prompt(prompt_id, token_ids=tokens, images=images)

    @property
    def modelled(self) -> EngineConfig:
        """Return what the oracle must know of engines."""
        return EngineConfig(replay=ReplayConfig(vocab_size=VOCAB, mean_tokens=self.plan.mean_tokens))

    def expected(
        self, step: Roll, prompt_id: str, version: int, *, name: str = "", seed: int | None = None
    ) -> Expected:
        """Return what a prompt must come to under some weights, in a group of this name, by default its own."""
        prompt = replace(self.prompt(step, prompt_id), id=name or prompt_id)
        seed = step.seed if seed is None else seed
        sampling = SamplingParams(max_tokens=step.max_tokens)
        digest = self.digest(version)
        return Expected.of_replay([prompt], step.n, sampling, self.modelled, step.number, digest, seed)

    def problem(self, what: str) -> None:
        """Note a broken promise."""
        self.problems.append(what)

    def arrived(self) -> None:
        """Note that a prompt ended."""
        self.arrivals.append(self.loop.time())

    @property
    def inflicted(self) -> tuple[Fault, ...]:
        """The plan's faults, and those that met a message so far."""
        return (*self.plan.faults, *self.caught)

    def disturbed_until(self) -> float:
        """Return when the last fault so far is over, or will be."""
        return max((each.at + each.seconds for each in self.inflicted), default=0.0)

    def finish(self, trainer: str) -> None:
        """Note that a trainer has done all it wanted, or never will."""
        self._left.discard(trainer)
        if not self._left:
            self.finished.set()
            self.roads.catches.clear()

    def excuse_silence(self, trainer: str, why: str) -> None:
        """A trainer gave the buffer up: legitimate only if one of both was away for long."""
        self.excuses.append(f"{trainer}: {why}")
        # Sleep waits for requests, and these for weights that are gone until its trainer updates again.
        waits = "not all engines answered" in why and self.may_lack_weights
        # With its clock set back, one has its name once the earlier connection is known to be gone.
        unknown = self.plan.clocks and any(
            not each.kind.startswith("kill") for each in self._between(trainer)
        )
        seems_earlier = unknown and re.search("another incarnation of trainer|the client is closed", why)
        if self.away(trainer) < 40.0 and not (waits or seems_earlier):
            self.problem(f"{trainer} gave the buffer up at {self.loop.time():.1f}: {why}")

    def away(self, trainer: str) -> float:
        """Return how long, at most, a trainer and the buffer have been cut off from each other so far."""
        return sum(fault.seconds for fault in self._between(trainer))

    def _between(self, trainer: str) -> list[Fault]:
        """Return the faults so far of a trainer, of the buffer, and of what connects them."""
        return [
            fault
            for fault in self.inflicted
            if {"buffer", trainer} & set(fault.target.split("-")) and fault.at <= self.loop.time()
        ]

    def excuses_quarantine(self, why: str) -> bool:
        """Say whether an engine may be without work: the stream died with its buffer."""
        gone = re.search(
            r"is not in this buffer's spool|the trainer sent nothing for|has no such bytes|no longer needed",
            why,
        )
        if self._live_in_place:  # who has none of them waits for the next update
            return True
        return gone is not None and not self.plan.spool and self.buffers > 1

    @property
    def _live_in_place(self) -> bool:
        live = self.processes["buffer"].service.weights.live
        return live is not None and is_in_place(live.source)

    @property
    def may_lack_weights(self) -> bool:
        """Whether the live weights may have been lost, with a buffer and engines that had them."""
        return bool(self.in_place) or (self.buffers > 1 and self.plan.updates and not self.plan.spool)

    def is_shared(self, rollout_id: str) -> bool:
        """Say whether several trainers use an id."""
        users = [
            name
            for name in self.plan.trainers
            if any(isinstance(step, Roll) and step.rollout_id == rollout_id for step in self.script(name))
        ]
        return len(users) > 1

    def excuses_of_images(self, trainer: str) -> list[str]:
        """Return why prompts may lack their images, and be worth another try."""
        excuses = list[str]()
        if self.plan.image_bytes:
            excuses.append("do not fit: images in use have")
        if self.spoilt:
            excuses += ["is not the name of these bytes", "is not in this buffer: submit it again"]
        if self.disk_was_full:
            excuses += ["cannot be stored", "is not in this buffer: submit it again"]
        shakes_hands = 10 * (self.plan.latency + self.plan.jitter)
        if self.away(trainer) > IMAGE_STALL_SECONDS - BACKOFF_SECONDS - shakes_hands:
            excuses.append("nothing of its trainer's images has come")
        return excuses

    async def spoil(self, name: str, seconds: float) -> None:
        """Damage files of the buffer's or the dgds's."""
        if name == "dgds":
            await self.spoil_memory(seconds)
        else:
            self.spoil_images()

    def spoil_images(self) -> None:
        """Damage all that the buffer has of images, and those that it has only in part."""
        process = self.processes.get("buffer")
        if process is None or process.service is None:
            return
        for file in process.service._images._folder.root.iterdir():
            if size := file.stat().st_size:
                self.spoilt += 1
                with file.open("r+b") as opened:
                    opened.seek(size // 2)
                    (byte,) = opened.read(1)
                    opened.seek(size // 2)
                    opened.write(bytes([byte ^ 1]))

    async def spoil_memory(self, seconds: float) -> None:
        """Have the dgds leave its file of past groups, damage that, and start the dgds again."""
        await self.drain("dgds")
        if self.memory.exists():
            data = bytearray(self.memory.read_bytes())
            place = self._rand.randrange(len(data))
            if self._rand.random() < 0.5:
                data[place] ^= 1
            self.memory.write_bytes(data[: place + 1] if self._rand.random() < 0.5 else data)
        await asyncio.sleep(seconds)
        self.start("dgds")

    def may_lapse(self, trainer: str) -> bool:
        """Say whether a trainer may have been away for longer than its lease."""
        return self.away(trainer) + BACKOFF_SECONDS > self.plan.lease_seconds - SIGN_SECONDS

    # --- processes -----------------------------------------------------------------------

    def start(self, name: str) -> None:
        """Begin an incarnation of a process, unless it lives, or is lost for good."""
        if name in self.processes or name in self.lost:
            return
        self._incarnations += 1
        self.buffers += name == "buffer"
        links: Links = MemoryTransport(self.network, name)
        if self.noisy:
            links = FaultyTransport(links, self.plan.seed + self._incarnations, CALM, LoopClock())
        scope = self._outside.copy()
        process = Process(name, f"{name}.{self._incarnations}", links, scope, buffers=self.buffers)
        if self.plan.clocks:
            self.clocks[process.incarnation] = self._rand.choice((0.0, -HOUR, HOUR))
        scope.run(PROCESS.set, process.incarnation)
        main = self._train(process) if name in self.trainers else self._serve(process)
        process.task = self.loop.create_task(self._watch(process, main), context=scope)
        self.processes[name] = process

    async def kill(self, name: str) -> None:
        """End a process as SIGKILL would, unless it is dead."""
        process = self.processes.pop(name, None)
        if process is not None:
            self.loop.freeze(process.incarnation)
            await process.links.close()
            _close_files(process.service)
            if name in self.trainers:
                self.trainers[name].died()
            self._dead.append(process)

    async def lose(self, name: str) -> None:
        """End a trainer for good."""
        self.lost.add(name)
        self.lost_at.setdefault(name, self.loop.time())
        await self.kill(name)
        self.finish(name)

    async def twin(self, name: str, seconds: float) -> None:
        """Have another engine under the name of one for a while."""
        self.start(f"{name}{TWIN}")
        await asyncio.sleep(seconds)
        self.lost.add(f"{name}{TWIN}")  # nobody starts it again
        await self.kill(f"{name}{TWIN}")

    async def stop(self, name: str, seconds: float) -> None:
        """Let a process stand still for a while; its connections stay."""
        process = self.processes.get(name)
        if process is None:
            return
        process.stops += 1
        self.loop.freeze(process.incarnation)
        await asyncio.sleep(seconds)
        process.stops -= 1
        if self.processes.get(name) is process and not process.stops:
            self.loop.thaw(process.incarnation)

    async def reset(self, name: str) -> None:
        """Break all connections of a process, once."""
        for other in self._others(name):
            self.network.reset(name, other)

    async def part(self, name: str, seconds: float) -> None:
        """Cut a process off from all others."""
        pairs = [pair for other in self._others(name) for pair in ((name, other), (other, name))]
        await self.roads.cut(pairs, seconds)

    async def cut(self, one: str, other: str, seconds: float, *, both: bool) -> None:
        """Cut the road between two processes, or one way of it."""
        ways = [(one, other), (other, one)]
        await self.roads.cut(ways if both else [self._rand.choice(ways)], seconds)

    def _catch(self, catch: Catch, source: str, target: str) -> None:
        what, _, who = catch.what.partition(" ")
        where = {"source": source, "target": target}.get(who, f"{source}-{target}")
        self.caught.append(Fault(self.loop.time(), f"{what} caught", where, catch.seconds))
        task = self.loop.create_task(self._befall(self.caught[-1]), context=self._outside.copy())
        self._apart.add(task)
        task.add_done_callback(self._apart.discard)

    async def _befall(self, fault: Fault) -> None:
        what, ends = fault.kind.split()[0], fault.target.split("-")
        if what == "reset":
            self.network.reset(*ends)
        elif what == "cut":
            await self.cut(*ends, fault.seconds, both=self._rand.random() < 0.5)
        else:
            await self.kill(fault.target)
            await asyncio.sleep(fault.seconds)
            if fault.target != "rogue":
                self.start(fault.target)

    async def noise(self, name: str, seconds: float, plan: Faults) -> None:
        """Have the network do to what a process sends what `plan` says."""
        process = self.processes.get(name)
        if process is not None and isinstance(process.links, FaultyTransport):
            process.links.plan = plan
            await asyncio.sleep(seconds)
            process.links.plan = CALM

    async def fill_disk(self, seconds: float) -> None:
        """Have nothing more written for a while."""
        self.disk_full = self.disk_was_full = True
        await asyncio.sleep(seconds)
        self.disk_full = False

    async def drain(self, name: str) -> None:
        """Have a service drain, as SIGTERM would, until it is gone or dead."""
        process = self.processes.get(name)
        if process is None or process.service is None:
            return
        self.loop.call_soon(process.service.drain, context=process.context)
        # What was begun under weights that are gone waits for an engine that has them.
        seconds = 400 + BufferConfig().engine_wait_seconds * self.may_lack_weights
        try:
            await eventually(lambda: self.processes.get(name) is not process, seconds)
        except TimeoutError:
            self.problem(f"{name} did not drain in {seconds:.0f} s")
            await self.kill(name)

    def _disturbed(self, trainer: str, since: float) -> bool:
        """Say whether faults may hold up what the buffer tells a trainer after a time."""
        return self.noisy or any(
            {trainer, "buffer"} & set(each.target.split("-"))
            and each.kind != "drain buffer"
            and each.at <= self.loop.time()
            and each.at + each.seconds + BACKOFF_SECONDS >= since
            for each in self.inflicted
        )

    def _others(self, name: str) -> list[str]:
        known = {*self.processes, "buffer", "context", "dgds", "rogue", *self.trainers}
        return sorted(known - {name})

    # --- what runs in them ---------------------------------------------------------------

    async def _watch(self, process: Process, main: Coroutine[Any, Any, None]) -> None:
        try:
            await main
        except Exception as error:  # noqa: BLE001 - whatever ends a process is a finding
            # An engine that finds no buffer for long ends, says so, and is started again by what supervises it.
            absent = process.service is None and isinstance(_root(error), Unreachable)
            if process not in self._dead and not absent:
                self.crashes.append(f"{process.incarnation} at {self.loop.time():.3f}: {_root(error)!r}")
            if self.processes.get(process.name) is process and process.name not in self.trainers:
                self._outside.run(self.loop.call_later, 1.0, self.start, process.name)
        if self.processes.get(process.name) is process:
            del self.processes[process.name]
        await process.links.close()

    async def _serve(self, process: Process) -> None:
        make = SERVERS.get(process.name)
        config = self.config(process.name)
        if make is None:
            nature = engines.Nature(
                self.plan.load_seconds,
                self.plan.rejections,
                functools.partial(self._poisoned, process),
                functools.partial(self._breach, process.name),
            )
            service: Service = engines.make(config, process.links, LoopClock(), nature)
        else:
            service = make(config, process.links, LoopClock())
        if isinstance(service, buffer.BufferServer):
            self._attend(service)
        await service.start()
        process.service = service
        await service.run()

    def _attend(self, service: buffer.BufferServer) -> None:
        """Count the engines that a buffer gives up."""
        self.served.append(service)
        out = service._out
        forget = out.forget_engine

        def counted(name: str) -> None:
            if address := out.registered_at.get(name):
                self.given_up[address] += 1
            forget(name)

        out.forget_engine = counted

    def _breach(self, name: str, what: str) -> None:
        if not self.noisy:  # an order that comes late or twice is no fault of who gave it
            self.problem(f"{name}: {what}")

    def _poisoned(self, process: Process) -> None:
        if self.processes.get(process.name) is process:
            self.loop.freeze(process.incarnation)
            death = self.loop.create_task(self._restart(process.name), context=self._outside.copy())
            self._apart.add(death)
            death.add_done_callback(self._apart.discard)

    async def _restart(self, name: str) -> None:
        await self.kill(name)
        await asyncio.sleep(0.5)
        self.start(name)

    async def _train(self, process: Process) -> None:
        await self.trainers[process.name].run(process.links)

    async def _talk_nonsense(self) -> None:
        """Send what decodes and makes no sense, and questions without a handshake."""
        me = Identity(
            role="engine", name="rogue", incarnation=1, config_hash=shared_hash(self.config("").shared)
        )
        transport = MemoryTransport(self.network, "rogue")
        channel: Channel[wire.EngineToDgds, wire.DgdsToEngine] = Channel(
            transport, ENDPOINTS.dgds, me, wire.DgdsToEngine, LoopClock()
        )
        asked = (ENDPOINTS.event_snapshots, ENDPOINTS.estimate_snapshots)
        strangers = [await transport.dealer(endpoint, b"stranger") for endpoint in asked]
        try:
            await channel.open(60)
            for _ in range(5):
                nonsense = wire.AppendBatch(
                    appends=[wire.Append(1, 0, 0, 0, 5)], tokens=np.zeros(3, np.uint8)
                )
                await channel.send(nonsense)
                for stranger in strangers:
                    await stranger.send(encode(wire.SnapshotRequest()))
                await asyncio.sleep(1.0)
        except Unreachable:
            pass
        finally:
            channel.close()
            for stranger in strangers:
                stranger.close()

    # --- the end -------------------------------------------------------------------------

    async def end(self) -> list[str]:
        """Kill everything; return what is left over: tasks, and endpoints that are still known."""
        if self._talk is not None:
            self._talk.cancel()
            await asyncio.wait([self._talk])
        for death in list(self._apart):
            death.cancel()
        for name in list(self.processes):
            await self.kill(name)
        tasks = [process.task for process in self._dead if process.task is not None]
        for process in self._dead:
            self.loop.thaw(process.incarnation)
            if process.task is not None:
                process.task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        left = [repr(task.get_coro()) for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for sockets in (self.network.routers, self.network.publishers):
            left += sockets
        for peers in (self.network.dealers, self.network.subscribers):
            left += [endpoint for endpoint, sockets in peers.items() if sockets]
        return left


def _root(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _close_files(service: Service | None) -> None:
    """Close the files, and so the locks, of a process that is dead, as its kernel does."""
    if isinstance(service, buffer.BufferServer):
        for folder in (service._spool._folder, service._images._folder):
            lock, folder._lock = folder._lock, None
            if lock is not None:
                os.close(lock)
        log, service._rows._segments = service._rows._segments, None
        if log is not None:
            log.close()
        for file in (file for files in service._kept._files.values() for file in files):
            file.pending.clear()  # what was not written is lost
        service._kept.close()
