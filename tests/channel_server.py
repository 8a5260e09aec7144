"""A hub whose messages are collected, and channels that lead to it."""

import asyncio

from memory_transport import MemoryNetwork, MemoryTransport

from seer.common.clock import LoopClock
from seer.common.net.channel import Channel
from seer.common.net.hub import Hub
from seer.common.net.identity import Identity
from seer.common.types import InstanceStats
from seer.common.wire import BufferToEngine, EngineStatus, EngineToBuffer

ENDPOINT = "tcp://127.0.0.1:7102"


def identity(role="engine", name="e1", incarnation=1, config_hash="abc"):
    return Identity(role=role, name=name, incarnation=incarnation, config_hash=config_hash)


def status(steps=0):
    return EngineStatus(stats=InstanceStats(steps=steps))


class Server:
    """A hub whose messages are collected; `stop` ends one incarnation of it."""

    def __init__(self, network, incarnation=1, require_config_hash=True):
        self.network = network
        self.me = identity("buffer", "buffer", incarnation)
        self.require = require_config_hash
        self.got = []

    async def start(self):
        self.transport = MemoryTransport(self.network)
        self.hub = Hub(await self.transport.router(ENDPOINT), self.me, EngineToBuffer, self.require)
        self.task = asyncio.create_task(self.serve())
        return self

    async def serve(self):
        while True:
            self.got.append(await self.hub.recv())

    async def stop(self):
        self.task.cancel()
        await self.transport.close()

    def names(self):
        return [type(message).__name__ for _, message in self.got]


def channel(network, me=None, transport=None):
    return Channel(
        transport or MemoryTransport(network), ENDPOINT, me or identity(), BufferToEngine, LoopClock()
    )


async def opened():
    """Return a network, the server in it and a channel that was opened to the server."""
    network = MemoryNetwork()
    server = await Server(network).start()
    client = channel(network)
    await client.open(5)
    return network, server, client
