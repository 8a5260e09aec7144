"""Who counts as known to whom: other incarnations, strangers, refusals, and what does not decode."""

import asyncio

import pytest
from channel_server import ENDPOINT, Server, channel, identity, opened, status
from memory_transport import MemoryNetwork, MemoryTransport
from virtual_time import VIRTUAL

from seer.common.errors import Unreachable
from seer.common.net.identity import CHECK_SECONDS, HELLO_FIRST, HELLO_SECONDS
from seer.common.wire import EngineToBuffer, Hello, Ping, Refused, Welcome, version
from seer.common.wire.codec import Decoder, encode

pytestmark = VIRTUAL


class Scripted:
    """A server that answers each Hello with the next of `welcomes`, if it is one; counts them in `hellos`."""

    def __init__(self, *welcomes):
        self.welcomes, self.hellos = list(welcomes), 0

    async def start(self, network):
        self.router = await MemoryTransport(network).router(ENDPOINT)
        self.task = asyncio.create_task(self.serve())
        return self

    async def serve(self):
        hellos = Decoder(EngineToBuffer)
        while True:
            address, frames, _ = await self.router.recv()
            if isinstance(hellos.decode(frames), Hello):
                self.hellos += 1
                if answer := self.welcomes.pop(0) if self.welcomes else None:
                    await self.router.send(address, encode(answer))


def welcome(incarnation=1, sent=0, session=1):
    return Welcome(
        major=version.MAJOR, minor=0, schema_hash="", name="buffer", incarnation=incarnation,
        uptime_seconds=0.0, sent=sent, session=session,
    )  # fmt: skip


async def quiet(client, seconds=3 * CHECK_SECONDS):
    """Wait; fail if anything is told meanwhile."""
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(seconds):
            pytest.fail(f"told of {await client.recv()}")


async def test_opening_again_asks_again():
    network = MemoryNetwork()
    server = await Scripted(welcome()).start(network)
    client = channel(network)
    await client.open(5)
    with pytest.raises(Unreachable):
        await client.open(3)
    assert server.hellos == 4


async def test_a_peer_that_was_forgotten_says_so_once_and_until_it_is_answered():
    network = MemoryNetwork()
    server = await Scripted(welcome()).start(network)
    client = channel(network)
    await client.open(5)
    await asyncio.sleep(2)
    for _ in range(20):
        await server.router.send(identity().address(), encode(Refused(code=HELLO_FIRST, message="")))
    await quiet(client, 0.5 * HELLO_SECONDS)
    assert server.hellos == 2
    server.welcomes = [None, welcome(session=2)]
    async with asyncio.timeout(2.5 * HELLO_SECONDS):
        assert (await client.recv()).session == 2


async def test_what_does_not_decode_is_no_lost_message():
    _, server, client = await opened()
    await client.send(Ping())
    await server.hub.send(identity().address(), status())
    await quiet(client)
    assert (client.counters["malformed"], server.hub.counters["malformed"]) == (1, 1)


async def test_a_hello_counts_only_at_its_own_address_and_a_refused_one_ends_a_handshake():
    network = MemoryNetwork()
    server = await Server(network).start()
    raw = await MemoryTransport(network).dealer(ENDPOINT, identity().address())
    for hello, heard in ((identity(), 1), (identity(name="e2"), 0)):
        await raw.send(encode(hello.hello()))
        await raw.send(encode(status()))
        await asyncio.sleep(0.1)
        assert server.names().count("EngineStatus") == heard
        server.got.clear()
    assert server.hub.counters["refused"] == 1


async def test_of_too_many_peers_the_longest_silent_one_is_forgotten(monkeypatch):
    monkeypatch.setattr("seer.common.net.hub.MAX_PEERS", 2)
    network = MemoryNetwork()
    server = await Server(network).start()
    busy, silent, new = (channel(network, identity(name=name)) for name in ("busy", "silent", "new"))
    for client in (busy, silent, busy, new):
        if client.peer is None:
            await client.open(1)
        await client.send(status())
    for client in (busy, new, silent):
        await client.send(status(1))
    await asyncio.sleep(0.1)
    assert [(address, message) for address, message in server.got if message == status(1)] == [
        (identity(name=name).address(), status(1)) for name in ("busy", "new")
    ]


async def test_who_was_told_that_it_is_unknown_and_is_dismissed_soon_after_is_told_at_once():
    network = MemoryNetwork()
    server = await Server(network).start()
    raw = await MemoryTransport(network).dealer(ENDPOINT, identity().address())
    for message in (status(), identity().hello(1)):
        await raw.send(encode(message))
        await asyncio.sleep(0.1)
    server.hub.dismiss(identity().address())
    await raw.send(encode(status()))
    await asyncio.sleep(0.1)
    assert len(raw.down) == 3


async def test_to_ask_whether_a_peer_is_there_tells_it_of_no_loss():
    _, server, client = await opened()
    assert await server.hub.is_connected(identity().address())
    await quiet(client)
    client.close()
    assert not await server.hub.is_connected(identity().address())
