"""One event, one rejoin: whatever is queued at the time, whatever the latency, whatever gets lost."""

import asyncio
import itertools

import channel_server
import pytest
from channel_server import ENDPOINT, identity, status
from lag import LaggedTransport, first
from memory_transport import MemoryNetwork, MemoryTransport
from virtual_time import VIRTUAL, virtual

from seer.common import wire
from seer.common.clock import LoopClock
from seer.common.net import hub
from seer.common.net.channel import Channel
from seer.common.net.identity import CHECK_SECONDS, HELLO_FIRST, HELLO_SECONDS, Identity
from seer.common.wire.codec import encode

pytestmark = VIRTUAL

ME = identity()
LAGS = [(0.0, 0.0), (0.04, 0.04), (0.5, 0.5), (3.0, 3.0), (0.0, 3.0), (3.0, 0.0), (0.5, 0.04)]


class Server(channel_server.Server):
    """A hub that stops reading on demand, and answers every report with a ping."""

    def __init__(self, network: MemoryNetwork, incarnation: int = 1) -> None:
        super().__init__(network, incarnation, require_config_hash=False)
        self.reads = asyncio.Event()
        self.reads.set()
        self.nags = 0

    async def serve(self) -> None:
        while True:
            await self.reads.wait()
            address, message = await self.hub.recv()
            self.got.append(message)
            if isinstance(message, wire.EngineStatus):
                await self.hub.reply(address, self.answer())

    def answer(self) -> wire.Message:
        self.nags -= 1
        return wire.Refused(code=HELLO_FIRST, message="given up") if self.nags >= 0 else wire.Ping()


class Peer:
    """A client that reports twice a second, if it is not idle, and counts what it is told."""

    def __init__(self, transport: MemoryTransport, *, idle: bool = False) -> None:
        self.idle = idle
        self.channel: Channel = Channel(transport, ENDPOINT, ME, wire.BufferToEngine, LoopClock())
        self.rejoins: list[wire.Welcome] = []

    async def start(self) -> "Peer":
        await self.channel.open(60)
        self.tasks = [asyncio.create_task(self.receive()), asyncio.create_task(self.report())]
        return self

    async def receive(self) -> None:
        while True:
            message = await self.channel.recv()
            if isinstance(message, wire.Welcome):
                self.rejoins.append(message)

    async def report(self) -> None:
        for number in itertools.count() if not self.idle else ():
            await self.channel.send(status(number))
            await asyncio.sleep(0.5)


async def stall(server: Server) -> Server:
    """Stand still for 45 s, give the peer up, and only then read what it sent."""
    server.reads.clear()
    await asyncio.sleep(45)
    server.hub.dismiss(ME.address())
    server.reads.set()
    return server


async def nag(server: Server) -> Server:
    """Likewise, and tell it for each of its messages, also those that come after its Hello."""
    server.nags = 100
    return await stall(server)


async def dismiss(server: Server) -> Server:
    for _ in range(20):
        await server.hub.reply(ME.address(), wire.Ping())
    server.hub.dismiss(ME.address())
    server.hub.dismiss(ME.address())
    return server


async def restart(server: Server) -> Server:
    await server.stop()
    await asyncio.sleep(12)
    return await Server(server.network, server.me.incarnation + 1).start()


async def forget(server: Server) -> Server:
    server.hub._peers.clear()
    return server


EVENTS = [stall, nag, dismiss, restart, forget]
LOSSES = [(), ("Refused",), ("Welcome",), ("Refused", "Welcome")]


@pytest.mark.parametrize(
    ("event", "losses"),
    # A message that is lost after the rejoin is an event of its own.
    [(event, losses) for event in EVENTS for losses in LOSSES if event is not nag or "Refused" not in losses],
)
@pytest.mark.parametrize("idle", [False, True])
def test_one_event_one_rejoin(idle, event, losses):
    @virtual
    async def check(up, down):
        network = MemoryNetwork()
        server = await Server(network).start()
        transport = LaggedTransport(network, up, down)
        peer = await Peer(transport, idle=idle).start()
        await asyncio.sleep(12)
        assert peer.rejoins == []
        server = await event(server)
        kinds = [first(kind) for kind in losses]
        transport.lose_down = lambda frames: any(loses(frames) for loses in kinds)
        await asyncio.sleep(40)
        assert len(peer.rejoins) == 1
        server.got.clear()
        await peer.channel.send(status())
        await asyncio.sleep(5)
        assert any(isinstance(message, wire.EngineStatus) for message in server.got)

    for up, down in LAGS:
        check(up, down)


@pytest.mark.parametrize("lags", LAGS, ids=str)
@pytest.mark.parametrize("way", ["up", "down", "both"])
async def test_one_loss_one_rejoin(way, lags):
    network = MemoryNetwork()
    await Server(network).start()
    transport = LaggedTransport(network, *lags)
    peer = await Peer(transport).start()
    await asyncio.sleep(10)
    transport.lose_up, transport.lose_down = lambda _: way != "down", lambda _: way != "up"
    await asyncio.sleep(0.7)
    transport.lose_up = transport.lose_down = lambda _: False
    await asyncio.sleep(3 * CHECK_SECONDS + sum(lags))
    assert len(peer.rejoins) == 1


async def test_a_stranger_is_told_once_and_again_after_a_while():
    network = MemoryNetwork()
    server = await Server(network).start()
    raw = await MemoryTransport(network).dealer(ENDPOINT, ME.address())
    for _ in range(3):
        for _ in range(50):
            await raw.send(encode(status()))
        await asyncio.sleep(HELLO_SECONDS)
    assert server.hub.counters["strangers"] == 150
    assert len(raw.down) == 3
    await raw.send(encode(ME.hello(150)))
    await asyncio.sleep(0.1)
    server.hub.dismiss(ME.address())
    await raw.send(encode(status()))
    await asyncio.sleep(0.1)
    assert len(raw.down) == 5, "a Welcome, and at once that it counts no more"


async def test_sessions_are_never_given_twice(monkeypatch):
    monkeypatch.setattr(hub, "MAX_PEERS", 1)
    network = MemoryNetwork()
    server = await Server(network).start()
    seen = []
    for name in "abab":
        me = Identity(role="engine", name=name, incarnation=1)
        client: Channel = Channel(MemoryTransport(network), ENDPOINT, me, wire.BufferToEngine, LoopClock())
        seen.append((await client.open(5)).session)
        client.close()
    assert seen == [1, 2, 3, 4]
    assert server.hub.session(b"nobody") == 0
