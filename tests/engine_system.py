"""One engine, and a buffer played by the test."""

import asyncio
from contextlib import asynccontextmanager

import numpy as np
from memory_transport import MemoryNetwork, MemoryTransport
from virtual_time import eventually

from seer.common import wire
from seer.common.clock import LoopClock
from seer.common.config import Config, EngineConfig, ReplayConfig, SharedConfig, shared_hash
from seer.common.net.hub import Hub
from seer.common.net.identity import Identity
from seer.common.types import SamplingParams
from seer.common.weights.digest import BLAKE3
from seer.services.engine.replay.backend import ReplayBackend
from seer.services.engine.server import EngineServer

REPLAY = EngineConfig(
    backend="replay",
    name="e0",
    kv_blocks=200,
    replay=ReplayConfig(step_seconds=0.01, row_seconds=0.0),
    max_num_seqs=4,
)


class Buffer:
    """A hub that keeps what engines say, in order, and of what kind the first message was."""

    def __init__(self, network, incarnation=1, shared=None):
        self.network, self.config = network, Config(shared=shared or SharedConfig())
        self.me = Identity(
            role="buffer", name="buffer", incarnation=incarnation, config_hash=shared_hash(self.config.shared)
        )
        self.said, self.stats, self.peer, self.first = [], [], None, None
        self.answered = 0  # questions for images

    async def start(self):
        self.transport = MemoryTransport(self.network)
        router = await self.transport.router(self.config.endpoints.engines)
        self.hub = Hub(router, self.me, wire.EngineToBuffer, require_config_hash=True, digests=lambda: BLAKE3)
        self.listening = asyncio.create_task(self._listen())

    async def _listen(self):
        while True:
            self.peer, message = await self.hub.recv()
            if not isinstance(message, wire.Hello):
                self.first = self.first or type(message)
            if isinstance(message, wire.EngineStatus):
                self.stats.append(message.stats)
            elif not isinstance(message, wire.Hello):
                self.said.append(message)

    async def kill(self):
        self.listening.cancel()
        await self.transport.close()

    async def send(self, message):
        assert await self.hub.send(self.peer, message)

    async def give(self, *images):
        """Answer every question for a part of these images, until none has come for a while."""
        data = {image.name: image.data for image in images}
        answered = 0
        await asyncio.sleep(0.01)
        while len(asked := self.heard(wire.ReadImage)[self.answered :]):
            for question in asked:
                self.answered += 1
                whole = data.get(question.name)
                if whole is None:
                    continue
                part = whole[question.offset : question.offset + wire.IMAGE_PART_BYTES]
                answered += 1
                await self.send(
                    wire.ImageData(name=question.name, size=len(whole), offset=question.offset, data=part)
                )
            await asyncio.sleep(0.01)
        return answered

    async def run(self, index=0, new=8, attempt=1, output=(), group_id="r/p", **changes):
        order = {
            "request_id": f"{group_id}#{index}", "group_id": group_id, "attempt": attempt, "key": 10 + index,
            "prompt_len": 3, "max_new_tokens": new, "sampling": SamplingParams(max_tokens=4000, ignore_eos=True),
            "tokens": np.array([1, 2, 3, *output], dtype=np.int32),
        }  # fmt: skip
        await self.send(wire.RunChunk(**(order | changes)))

    def heard(self, kind):
        return [message for message in self.said if isinstance(message, kind)]

    def results(self):
        return {
            (result.request_id[-1], result.attempt): result
            for done in self.heard(wire.ChunksDone)
            for result in done.results
        }


@asynccontextmanager
async def engine(config=REPLAY, backend=None, network=None, shared=None):
    """Yield (buffer, engine, its run task, the network) with the engine registered."""
    network = network or MemoryNetwork()
    buffer = Buffer(network, shared=shared)
    await buffer.start()
    whole = Config(engine=config, shared=shared or SharedConfig())
    server = EngineServer(
        whole, MemoryTransport(network), LoopClock(), backend or ReplayBackend(config, whole.shared)
    )
    assert await server.start() == {}
    running = asyncio.create_task(server.run())
    await eventually(lambda: bool(buffer.said))
    yield buffer, server, running, network
    running.cancel()
    await asyncio.wait([running])
    await buffer.kill()
