"""Any number of dgds that can be killed and started again, and their clients, in one process."""

import asyncio
from contextlib import asynccontextmanager

import numpy as np
from memory_transport import MemoryNetwork, MemoryTransport
from msgspec.structs import replace

from seer.common import wire
from seer.common.clock import LoopClock
from seer.common.config import Config, SharedConfig, shared_hash
from seer.common.endpoints import shards
from seer.common.net.channel import Channel
from seer.common.net.identity import Identity
from seer.services.dgds.client import DgdsClient
from seer.services.dgds.packing import group_digest
from seer.services.dgds.server import DgdsServer, make

CONFIG = Config()
GROUP = "r/a"


def array(*tokens):
    return np.array(tokens, dtype=np.int32)


def client_of(transport, name="one", max_retained_tokens=10**6, endpoint=CONFIG.endpoints.dgds, **settings):
    me = Identity(role="engine", name=name, incarnation=1, config_hash=shared_hash(CONFIG.shared))
    return DgdsClient(transport, endpoint, me, LoopClock(), max_retained_tokens, **settings)


class Dgds:
    """One of them."""

    def __init__(self, network, config):
        self.network = network
        self.config = config

    async def start(self):
        self.transport = MemoryTransport(self.network)
        self.server: DgdsServer = make(self.config, self.transport, LoopClock())
        endpoint = shards(self.config.endpoints.dgds)[self.config.dgds.shard]
        assert await self.server.start() == {"dgds": endpoint}
        self.serving = asyncio.create_task(self.server.run())

    async def kill(self):
        self.serving.cancel()
        await self.transport.close()


class System:
    """All of them; `start`, `kill` and `server` are the first one's."""

    def __init__(self, config=CONFIG):
        self.network = MemoryNetwork()
        self.endpoint = config.endpoints.dgds
        each = range(len(shards(self.endpoint)))
        self.shards = [
            Dgds(self.network, replace(config, dgds=replace(config.dgds, shard=shard))) for shard in each
        ]
        self.tasks = []

    @property
    def server(self):
        return self.shards[0].server

    async def start(self, shard=0):
        await self.shards[shard].start()

    async def kill(self, shard=0):
        await self.shards[shard].kill()

    def client(self, **settings):
        transport = settings.pop("transport", None) or MemoryTransport(self.network)
        made = client_of(transport, endpoint=self.endpoint, **settings)
        self.tasks.append(asyncio.create_task(made.run()))
        return made

    async def channel(self, name="raw"):
        """Return a connection to the first one, for messages that no client sends."""
        me = Identity(role="engine", name=name, incarnation=9, config_hash=shared_hash(SharedConfig()))
        endpoint = shards(self.endpoint)[0]
        made = Channel(MemoryTransport(self.network), endpoint, me, wire.DgdsToEngine, LoopClock())
        await made.open(5.0)
        return made

    def held(self, index=0, group_id=GROUP):
        """Return one stream, of whichever holds it."""
        group = group_digest(group_id)
        found = [each.server.store.tokens(group, index) for each in self.shards if hasattr(each, "server")]
        return next((stream for stream in found if stream is not None), None)


@asynccontextmanager
async def system(started=True, config=CONFIG):
    made = System(config)
    if started:
        for shard in made.shards:
            await shard.start()
    yield made
    for task in made.tasks:
        task.cancel()
    for shard in made.shards:
        if hasattr(shard, "serving"):
            await shard.kill()
