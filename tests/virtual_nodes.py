"""A leader and its followers on one network, with ranks that only take notes; a buffer played by the test."""

import asyncio
from contextlib import asynccontextmanager
from pathlib import Path

from engine_system import Buffer
from memory_transport import MemoryNetwork, MemoryTransport
from msgspec import structs
from virtual_time import PROCESS, eventually

from seer.common import wire
from seer.common.clock import LoopClock
from seer.common.config import Config, EngineConfig, SharedConfig
from seer.common.errors import EngineError
from seer.services.engine.nodes.follower import Follower
from seer.services.engine.nodes.same_settings import Meeting
from seer.services.engine.replay.backend import ReplayBackend
from seer.services.engine.server import EngineServer
from seer.services.engine.weights.manifest import read_manifest

ENGINE = EngineConfig(
    backend="replay", name="e0", tensor_parallel=2, nodes=2, leader="tcp://127.0.0.1:7120", load_seconds=60.0,
    kv_blocks=200, in_place_updates=True,
)  # fmt: skip


class Ranks:
    """Ranks that note what befalls them; `problem`: why they do not load."""

    def __init__(self, problem=""):
        self.problem, self.meeting, self.ended, self.closed = problem, None, None, 0

    def start(self, meeting, ended):
        if self.problem:
            raise EngineError(self.problem)
        self.meeting, self.ended = meeting, ended

    def close(self):
        self.closed += 1


class Loaded(ReplayBackend):
    """Notes from where each node loads."""

    def __init__(self, config, meeting):
        super().__init__(config.engine, config.shared)
        self.meeting, self.meanwhile = meeting, lambda: None
        self.loaded, self.digests = [], []

    def load_weights(self, folder, digest, base=None):
        self.loaded.append((folder, *self.meeting.folders))
        self.digests += [read_manifest(Path(each)).digest for each in self.meeting.folders]
        self.meanwhile()


class Process:
    """A node's process: its transport ends with it."""

    def __init__(self, network, make, name):
        PROCESS.set(name)
        self.transport = MemoryTransport(network)
        self.service = make(self.transport)
        self.task = asyncio.create_task(self._run())
        PROCESS.set("")

    async def _run(self):
        try:
            await self.service.start()
            await self.service.run()
        finally:
            await self.transport.close()

    async def ended(self, seconds=120.0):
        """Return what it raised, or None."""
        await asyncio.wait([self.task], timeout=seconds)
        assert self.task.done()
        problem = None if self.task.cancelled() else self.task.exception()
        while isinstance(problem, ExceptionGroup):
            (problem,) = problem.exceptions
        return problem

    async def kill(self):
        await self.transport.close()
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


class System:
    """A buffer, a leader and its followers on one network; a trainer's orders are the buffer's."""

    def __init__(self, model, nodes):
        self.network = MemoryNetwork()
        engine = structs.replace(ENGINE, nodes=nodes, tensor_parallel=nodes)
        self.config = Config(engine=engine, shared=SharedConfig(model=str(model)))
        self.buffer = Buffer(self.network, shared=self.config.shared)
        self.ranks, self.given_up, self.processes = [], [], []

    def leader(self, **changes):
        config = structs.replace(self.config, engine=structs.replace(self.config.engine, **changes))
        meeting = Meeting("127.0.0.1", "127.0.0.1")
        self.backend = Loaded(config, meeting)

        def make(transport):
            server = EngineServer(config, transport, LoopClock(), self.backend, meeting)
            server._driver.give_up = lambda: self.given_up.append(1)
            return server

        return self._begun(make, "leader")

    def follower(self, rank=1, problem="", **changes):
        engine = structs.replace(self.config.engine, node_rank=rank, **changes)
        config = structs.replace(self.config, engine=engine)
        self.ranks.append(ranks := Ranks(problem))
        return self._begun(lambda transport: Follower(config, transport, LoopClock(), ranks), f"node {rank}")

    def _begun(self, make, name):
        self.processes.append(Process(self.network, make, name))
        return self.processes[-1]


@asynccontextmanager
async def buffer_alone(model="", nodes=2):
    """Yield a system without nodes; in the end kill all processes that were begun."""
    system = System(model, nodes)
    await system.buffer.start()
    yield system
    for process in system.processes:
        await process.kill()
    await system.buffer.kill()


@asynccontextmanager
async def running(model="", followers=1):
    async with buffer_alone(model, followers + 1) as system:
        first = system.leader()
        others = [system.follower(rank) for rank in range(1, followers + 1)]
        await eventually(lambda: system.buffer.heard(wire.Register) != [])
        await eventually(lambda: all(ranks.meeting is not None for ranks in system.ranks))
        yield system, first, others


async def said(buffer, kind, count=1, seconds=60.0):
    await eventually(lambda: len(buffer.heard(kind)) >= count, seconds)
    return buffer.heard(kind)[-1]
