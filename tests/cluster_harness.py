"""A whole Seer system inside one event loop: every server, memory transport, replay engines, virtual time."""

import asyncio
import contextlib
import contextvars
import json
import struct
from collections.abc import AsyncIterator

import numpy as np
from memory_transport import MemoryNetwork, MemoryTransport
from virtual_time import PROCESS

from seer.client import RolloutClient, SamplingParams
from seer.common import wire
from seer.common.clock import LoopClock
from seer.common.config import BufferConfig, Config, EngineConfig, ReplayConfig, SharedConfig
from seer.common.net.keys import ANYONE, User
from seer.common.net.transport.base import Transport
from seer.common.process.service import Service
from seer.services.buffer import server as buffer
from seer.services.context import server as context
from seer.services.dgds import server as dgds
from seer.services.engine import server as engine
from seer.services.engine.replay.backend import made_up_alternatives, made_up_routes

VOCAB = ReplayConfig().vocab_size
PROMPTS = [list(range(1, 2 + i)) for i in range(8)]

SERVERS = {"buffer": buffer.make, "context": context.make, "dgds": dgds.make}


class Cluster:
    """Starts, kills and drains services by name; engines are called e0, e1, …"""

    def __init__(
        self,
        *,
        engine: EngineConfig | None = None,
        buffer: BufferConfig | None = None,
        shared: SharedConfig | None = None,
    ) -> None:
        self.network = MemoryNetwork()
        self.engine = engine or EngineConfig(backend="replay", kv_blocks=200, max_num_seqs=16)
        self.buffer = buffer or BufferConfig(chunk_size=32)
        self.shared = shared or SharedConfig()
        self.services: dict[str, Service] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._transports: dict[str, Transport] = {}

    def config(self, name: str) -> Config:
        from msgspec.structs import replace

        return Config(engine=replace(self.engine, name=name), buffer=self.buffer, shared=self.shared)

    async def start(self, name: str) -> None:
        make = SERVERS.get(name, engine_make)
        transport = self._transports[name] = MemoryTransport(self.network)
        service = self.services[name] = make(self.config(name), transport, LoopClock())
        await service.start()
        scope = contextvars.copy_context()
        scope.run(PROCESS.set, name)
        self._tasks[name] = asyncio.create_task(service.run(), name=name, context=scope)

    async def stand_still(self, name: str, seconds: float) -> None:
        """Stop a service as SIGSTOP would, and let it go on: what it was sent meanwhile waits for it."""
        loop = asyncio.get_running_loop()
        loop.freeze(name)
        await asyncio.sleep(seconds)
        loop.thaw(name)

    async def kill(self, name: str) -> None:
        """End a service as SIGKILL would: its sockets vanish, nothing more is sent."""
        await self._transports.pop(name).close()
        task = self._tasks.pop(name)
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            task.exception()

    async def drain(self, name: str, seconds: float = 60.0) -> None:
        self.services[name].drain()
        await asyncio.wait_for(self._tasks.pop(name), seconds)
        await self._transports.pop(name).close()

    def client(
        self, transport: Transport | None = None, user: User = ANYONE, **options: object
    ) -> RolloutClient:
        """A trainer with the key of `user`."""
        transport = transport or MemoryTransport(self.network, user=user)
        options = {"name": user.name} | options if user.name else options
        return RolloutClient(Config().endpoints.trainers, transport=transport, **options)

    async def stop(self) -> None:
        for name in list(self._tasks):
            await self.kill(name)


def engine_make(config, transport, clock):
    return engine.make(config, transport, clock)


@contextlib.asynccontextmanager
async def running(engines: int = 2, **settings: object) -> AsyncIterator[Cluster]:
    cluster = Cluster(**settings)
    try:
        for name in [*SERVERS, *(f"e{i}" for i in range(engines))]:
            await cluster.start(name)
        yield cluster
    finally:
        await cluster.stop()


def folder(path, fill, shape=(2, 3)):
    """A model of one float32 tensor."""
    path.mkdir(exist_ok=True)
    data = struct.pack("<f", fill) * (shape[0] * shape[1])
    head = {"w": {"dtype": "F32", "shape": list(shape), "data_offsets": [0, len(data)]}}
    text = json.dumps(head).encode()
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def check_routes(group, first=0):
    """Each response has the expert ids of prompt and response from `first` on, but of its last token."""
    for response in group.responses:
        read = [*group.prompt_token_ids.tolist(), *response.token_ids.tolist()][first:-1]
        assert np.array_equal(response.routed_experts, made_up_routes(read))


def check_alternatives(group, top, of_prompt):
    """Each token of each response has so many alternatives, and each of the prompt but its first has, once."""
    for response in group.responses:
        made_up = made_up_alternatives(response.token_ids.tolist(), response.logprobs.tolist(), top, VOCAB)
        check_tops(response.top_logprobs, made_up)
    prompt = group.prompt_token_ids.tolist()[1:]
    if not prompt:
        assert group.prompt_logprobs is None
        return
    own = group.prompt_logprobs.logprobs.tolist()
    assert own == [-(token % 64) / 32 for token in prompt]
    check_tops(group.prompt_logprobs, made_up_alternatives(prompt, own, of_prompt, VOCAB))


def check_tops(found, made_up):
    assert np.array_equal(found.ranks, made_up[:, 0, 0])
    assert np.array_equal(found.logprobs, made_up[:, 1, 0])
    assert np.array_equal(found.top_ids, made_up[:, 0, 1:])
    assert np.array_equal(found.top_logprobs, made_up[:, 1, 1:])


async def roll(client, number=0, **options):
    """Run one rollout, again and again; return its tokens, and the weight version and digest of its groups."""
    sampling = SamplingParams(max_tokens=60)
    rollout = await client.submit(
        PROMPTS, n=2, sampling=sampling, rollout_number=number, repeat=True, **options
    )
    groups = await rollout.result()
    versions = {(group.weight_version, group.weights_digest) for group in groups}
    assert len(versions) == 1
    return [r.token_ids.tolist() for group in groups for r in group.responses], versions.pop()


def parts_sent(cluster, *, damaged=False):
    """Note which parts of streams reach the spool, as (name, offset); of `damaged` ones, one is lost instead."""
    spool, sent = cluster.services["buffer"]._spool, []
    put = spool.put

    def noting(reply, address, message, *trainer):
        if isinstance(message, wire.SpoolData):
            sent.append((message.name, message.offset))
            if damaged and len(sent) in (2, 5, 11):
                message.checksum ^= 1
            if damaged and len(sent) == 7:
                return
        put(reply, address, message, *trainer)

    spool.put = noting
    return sent


def leave_no_room_for_deltas(cluster):
    """Have the buffer's disk have no room for the files of deltas."""
    files = cluster.services["buffer"]._spool._folder
    begin = files.begin

    def begun(stream):
        if stream.name.endswith(".delta"):
            raise ValueError("no room")
        begin(stream)

    files.begin = begun
