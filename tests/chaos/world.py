"""A whole system as simulated processes in one event loop, which can be killed, stopped and cut off.

A killed process is frozen for good and its sockets vanish: as with SIGKILL, not one line of it runs on.
It is cancelled only when the world ends.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

import numpy as np
from msgspec.structs import asdict
from virtual_time import PROCESS, VirtualTimeLoop, eventually

from chaos.expected import Expected
from chaos.plan import Plan
from seer.client import RolloutClient, SamplingParams, WeightsRefused
from seer.client.prompts import Prompt
from seer.client.rollout import Group
from seer.client.tensors import TensorStream
from seer.common.clock import LoopClock
from seer.common.config import BufferConfig, Config, EngineConfig, SharedConfig
from seer.common.service import Service
from seer.common.transport.faulty import Faults, FaultyTransport
from seer.common.transport.memory import MemoryNetwork, MemoryTransport
from seer.services.buffer import server as buffer
from seer.services.context import server as context
from seer.services.dgds import server as dgds
from seer.services.engine import server as engine

SERVERS = {"buffer": buffer.make, "context": context.make, "dgds": dgds.make}
ENDPOINTS = Config().endpoints
VOCAB = 1_000
VERSIONS = 4

HEARTBEAT_SECONDS = 10.0
"""ZeroMQ breaks the connections of a process that stands still for this long."""

CALM = Faults()


def tensors(version: int) -> dict[str, np.ndarray]:
    """Return the weights of a version."""
    return {"w": np.full(1000, version, dtype=np.float32)}


@dataclass(slots=True, eq=False)
class Process:
    """One life of a process; `life` is its name in the event loop."""

    name: str
    life: str
    links: FaultyTransport
    sockets: MemoryTransport
    context: contextvars.Context
    service: Service | None = None
    task: asyncio.Task[None] | None = None
    stopped: bool = False


class World:
    """Use inside a `VirtualTimeLoop`; `journal` is what the client's lives have together."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.loop: VirtualTimeLoop = asyncio.get_running_loop()  # type: ignore[assignment]
        self.network = MemoryNetwork()
        self.processes: dict[str, Process] = {}
        self.journal: dict[str, Group] = {}
        self.arrivals: list[float] = []
        self.doubled = 0
        self.crashes: list[str] = []
        self.refusals: list[str] = []
        self.finished = asyncio.Event()
        self._dead: list[Process] = []
        self._lives = 0
        self.prompts = [Prompt(f"p{i}", token_ids=[i + 1] * length) for i, length in enumerate(plan.prompts)]
        self.sampling = SamplingParams(max_tokens=plan.max_tokens)
        digest = TensorStream(tensors(VERSIONS)).digest() if plan.update else ""
        self.expected = Expected.of_replay(
            self.prompts, plan.n, self.sampling, self.config("").engine, digest=digest
        )

    def config(self, name: str) -> Config:
        plan = self.plan
        return Config(
            shared=SharedConfig(block_size=32),
            buffer=BufferConfig(
                policy=plan.policy,
                chunk_size=plan.chunk_size,
                engine_silence_seconds=plan.silence_seconds,
                result_ttl_seconds=plan.ttl_seconds,
            ),
            engine=EngineConfig(
                name=name, backend="replay", kv_blocks=plan.kv_blocks, max_num_seqs=8,
                replay_step_seconds=plan.step_seconds, replay_vocab_size=VOCAB,
                replay_mean_tokens=plan.mean_tokens,
            ),
        )  # fmt: skip

    # --- processes -----------------------------------------------------------------------

    def start(self, name: str) -> None:
        """Begin a life of a process, unless it lives."""
        if name in self.processes:
            return
        self._lives += 1
        sockets = MemoryTransport(self.network)
        links = FaultyTransport(sockets, self.plan.seed + self._lives, CALM, LoopClock())
        scope = contextvars.copy_context()
        process = Process(name, f"{name}.{self._lives}", links, sockets, scope)
        scope.run(PROCESS.set, process.life)
        main = self._trainer(process) if name == "client" else self._serve(process)
        process.task = self.loop.create_task(self._watch(process, main), context=scope)
        self.processes[name] = process

    async def kill(self, name: str) -> None:
        """End a process as SIGKILL would, unless it is dead."""
        process = self.processes.pop(name, None)
        if process is not None:
            self.loop.freeze(process.life)
            await process.links.close()
            self._dead.append(process)

    async def stop(self, name: str, seconds: float) -> None:
        """Let a process stand still for a while; a long while breaks its connections."""
        process = self.processes.get(name)
        if process is None or process.stopped:
            return
        process.stopped = True
        self.loop.freeze(process.life)
        await asyncio.sleep(min(seconds, HEARTBEAT_SECONDS))
        if seconds > HEARTBEAT_SECONDS:
            process.sockets.disconnect()
            await asyncio.sleep(seconds - HEARTBEAT_SECONDS)
            process.sockets.reconnect()
        if self.processes.get(name) is process:
            process.stopped = False
            self.loop.thaw(process.life)

    async def reset(self, name: str, seconds: float) -> None:
        """Break a process's connections; they are back after a while."""
        if process := self.processes.get(name):
            process.sockets.disconnect()
            await asyncio.sleep(seconds)
            process.sockets.reconnect()

    async def part(self, name: str, seconds: float) -> None:
        """Have the network lose all of a process's messages for a while."""
        if process := self.processes.get(name):
            self._cut(process, True)
            await asyncio.sleep(seconds)
            self._cut(process, False)

    async def noise(self, name: str, seconds: float, plan: Faults) -> None:
        """Have the network do to what a process sends what `plan` says."""
        if process := self.processes.get(name):
            process.links.plan = plan
            await asyncio.sleep(seconds)
            process.links.plan = CALM

    async def leave(self, name: str) -> None:
        """Have a service drain, as SIGTERM would, until it is gone or dead."""
        process = self.processes.get(name)
        if process is not None and process.service is not None:
            self.loop.call_soon(process.service.drain, context=process.context)
            await eventually(lambda: self.processes.get(name) is not process)

    def _cut(self, process: Process, on: bool) -> None:
        for endpoint in asdict(ENDPOINTS).values():
            process.links.partition(endpoint, on)

    # --- what runs in them ---------------------------------------------------------------

    async def _watch(self, process: Process, main: Coroutine[Any, Any, None]) -> None:
        try:
            await main
        except Exception as error:  # noqa: BLE001 - whatever ends a process is a finding
            if process not in self._dead:
                self.crashes.append(f"{process.life} at {self.loop.time():.3f}: {error!r}")
        if self.processes.get(process.name) is process:
            del self.processes[process.name]
        await process.links.close()

    async def _serve(self, process: Process) -> None:
        make = SERVERS.get(process.name, engine.make)
        service = make(self.config(process.name), process.links, LoopClock())
        await service.start()
        process.service = service
        await service.run()

    async def _trainer(self, process: Process) -> None:
        at = ENDPOINTS.trainers
        async with RolloutClient(at, name="client", transport=process.links, connect_seconds=60) as client:
            left = [prompt for prompt in self.prompts if prompt.id not in self.journal]
            if left:
                if self.plan.update:
                    await self._update(client)
                rollout = await client.submit(left, n=self.plan.n, sampling=self.sampling, rollout_number=0)
                async for group in rollout:
                    self._arrived(group)
        self.finished.set()

    async def _update(self, client: RolloutClient) -> None:
        """Go on from the live version to the last one, as a trainer does that was killed."""
        version = 0
        while version < VERSIONS:
            live = (await client.status(60)).weight_version
            version = max(1, live, version + 1)
            try:
                await client.update_weights(version, tensors(version))
            except WeightsRefused as refused:  # no engine yet, or an earlier life's update goes on
                self.refusals.append(str(refused))
                version = 0
            await asyncio.sleep(0.5)

    def _arrived(self, group: Group) -> None:
        self.doubled += len(group.responses) if group.prompt_id in self.journal else 0
        self.journal[group.prompt_id] = group
        self.arrivals.append(self.loop.time())

    # --- the end -------------------------------------------------------------------------

    async def end(self) -> list[str]:
        """Kill everything; return what is left over: tasks, and endpoints that are still known."""
        for name in list(self.processes):
            await self.kill(name)
        tasks = [process.task for process in self._dead if process.task is not None]
        for process in self._dead:
            self.loop.thaw(process.life)
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
