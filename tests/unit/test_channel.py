"""Handshake, refusals and re-handshake; in virtual time over the memory transport."""

import asyncio

import numpy as np
import pytest
from channel_server import ENDPOINT, Server, channel, identity, opened, status
from faulty_transport import Faults, FaultyTransport
from memory_transport import MemoryNetwork, MemoryTransport
from msgspec import structs
from structlog.testing import capture_logs
from virtual_time import VIRTUAL

from seer.common.clock import LoopClock
from seer.common.errors import ProtocolMismatch, RequestRefused, RolloutFailed, SeerError, Unreachable
from seer.common.net.channel import Channel
from seer.common.net.hub import Hub
from seer.common.net.identity import CHECK_SECONDS, Identity, error_of
from seer.common.net.transport.zmq import ZmqTransport
from seer.common.process.log import _escape, printable
from seer.common.wire import (
    BufferToEngine,
    EngineToBuffer,
    Hello,
    Ping,
    Refused,
    SpoolData,
    Welcome,
    codec,
    version,
)
from seer.common.wire.codec import Limits, encode

pytestmark = VIRTUAL


async def test_a_handshake_then_messages_both_ways():
    network = MemoryNetwork()
    server = await Server(network).start()
    client = channel(network)
    welcome = await client.open(5)
    assert (welcome.name, welcome.incarnation) == ("buffer", 1)
    assert client.peer == welcome
    await client.send(status(3))
    await asyncio.sleep(0.1)
    assert server.names() == ["Hello", "EngineStatus"]
    address, hello = server.got[0]
    assert (hello.role, hello.name, hello.incarnation, hello.config_hash) == ("engine", "e1", 1, "abc")
    assert await server.hub.send(address, Ping())
    assert await client.recv() == Ping()
    assert client.counters == {"sent": 1, "received": 2, "malformed": 0, "hellos": 1}
    assert server.hub.counters["received"] == 2
    assert server.hub.counters["sent"] == 1


async def test_hello_is_repeated_until_the_server_comes():
    network = MemoryNetwork()
    client = channel(network)
    opening = asyncio.create_task(client.open(30))
    await asyncio.sleep(10.5)
    server = await Server(network).start()
    assert (await opening).incarnation == 1
    assert server.names()[0] == "Hello"


async def test_silence_is_unreachable_and_names_the_endpoint():
    client = channel(MemoryNetwork())
    with pytest.raises(Unreachable, match=r"tcp://127.0.0.1:7102 did not answer within 3 s: check"):
        await client.open(3)
    with pytest.raises(Unreachable, match="call open"):
        await client.send(status())


async def test_open_succeeds_after_a_failed_one():
    network = MemoryNetwork()
    client = channel(network)
    with pytest.raises(Unreachable):
        await client.open(3)
    server = await Server(network).start()
    await client.open(3)
    await asyncio.sleep(0.1)
    assert server.names() == ["Hello"], "the Hellos that nobody took were dropped"


async def test_another_major_is_refused_loudly(monkeypatch):
    network = MemoryNetwork()
    server = await Server(network).start()
    client = channel(network)
    newer = Hello(
        major=version.MAJOR + 1,
        minor=0,
        schema_hash="",
        config_hash="abc",
        role="engine",
        name="e1",
        incarnation=1,
    )
    monkeypatch.setattr(Identity, "hello", lambda self, sent: newer)
    with pytest.raises(ProtocolMismatch, match=r"buffer speaks protocol 3\.\d+, e1 speaks 4\.0"):
        await client.open(5)
    assert server.got == []
    assert server.hub.counters["refused"] == 1


@pytest.mark.parametrize(
    ("theirs", "required", "accepted"),
    [("abc", True, True), ("xyz", True, False), ("", True, True), ("xyz", False, True)],
)
async def test_the_shared_configuration_must_agree_where_required(theirs, required, accepted):
    network = MemoryNetwork()
    await Server(network, require_config_hash=required).start()
    client = channel(network, identity(config_hash=theirs))
    if accepted:
        await client.open(5)
    else:
        with pytest.raises(ProtocolMismatch, match=r"\[shared\] settings \(xyz\) than buffer \(abc\)"):
            await client.open(5)


async def test_a_refused_peer_stays_out():
    network = MemoryNetwork()
    server = await Server(network).start()
    client = channel(network, identity(config_hash="xyz"))
    with pytest.raises(ProtocolMismatch):
        await client.open(5)
    await client.send(status())
    await asyncio.sleep(0.1)
    assert server.got == []


async def test_an_idle_peer_notices_a_restart_by_itself():
    network = MemoryNetwork()
    first = await Server(network, incarnation=1).start()
    client = channel(network)
    await client.open(5)
    await first.stop()
    await Server(network, incarnation=2).start()
    start = asyncio.get_running_loop().time()
    async with asyncio.timeout(60):
        while True:  # polling with short waits must not keep it from saying Hello
            try:
                async with asyncio.timeout(0.3):
                    welcome = await client.recv()
                    break
            except TimeoutError:
                continue
    assert welcome.incarnation == 2
    assert asyncio.get_running_loop().time() - start <= CHECK_SECONDS + 1


async def test_idle_waiting_ends_at_any_time_of_a_float_clock():
    network = MemoryNetwork()
    server = await Server(network).start()
    client = channel(network)
    for start in (0.1, 12_345.678_9, 50_000 / 3):
        await asyncio.sleep(start)
        await client.open(5)
        await asyncio.sleep(1 / 3)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1_000 + 1 / 7):
                await client.recv()
    assert 600 <= server.names().count("Hello") <= 620


async def test_malformed_messages_are_counted_and_stop_nothing():
    network, server, client = await opened()
    raw = await MemoryTransport(network).dealer(ENDPOINT, identity(name="raw").address())
    await raw.send(encode(identity(name="raw").hello()))
    for frames in ([b"\xc1"], [], [*encode(status()), b"extra"]):
        await raw.send(frames)
        await server.hub._router.send(identity().address(), frames)
    await raw.send(encode(Ping()))
    await raw.send(encode(status(5)))
    await server.hub.send(identity().address(), Ping())
    assert await client.recv() == Ping()
    assert client.counters["malformed"] == 3
    await asyncio.sleep(0.1)
    assert server.names() == ["Hello", "Hello", "EngineStatus"]
    assert server.hub.counters["malformed"] == 4


async def test_a_complaint_is_logged_once_per_peer():
    network = MemoryNetwork()
    await Server(network).start()
    raw = await MemoryTransport(network).dealer(ENDPOINT, identity(name="raw").address())
    with capture_logs() as lines:
        for _ in range(10):
            await raw.send([b"\xc1"])
        await asyncio.sleep(1)
    assert [line["event"] for line in lines] == ["message dropped"]


async def test_a_lost_message_is_logged_with_its_peer_also_after_another_problem():
    network = MemoryNetwork()
    await Server(network).start()
    raw = await MemoryTransport(network).dealer(ENDPOINT, identity(name="raw").address())
    with capture_logs() as lines:
        await raw.send(encode(structs.replace(identity(name="raw").hello(), schema_hash="another")))
        await raw.send([b"\xc1"])
        await asyncio.sleep(1)
    warned = [line for line in lines if line["log_level"] == "warning"]
    assert [line["event"] for line in warned] == [
        "peer has another schema of the same protocol",
        "message dropped",
    ]
    assert all("raw" in line["peer"] for line in warned)


async def test_a_refusal_of_the_connection_is_raised_and_one_of_a_request_is_not():
    _, server, client = await opened()
    for prompts in (["p"], []):
        about = Refused(code="refused", message="no", rollout_id="r", prompt_ids=prompts)
        await server.hub.send(identity().address(), about)
        assert await client.recv() == about
    await server.hub.send(identity().address(), Refused(code="engine", message="model differs"))
    with pytest.raises(SeerError, match="model differs") as caught:
        await client.recv()
    assert type(caught.value).code == "engine"


def test_errors_keep_their_class_over_the_wire():
    failed = error_of(Refused(code="failed", message="m", prompt_ids=["a", "b"]))
    assert type(failed) is RolloutFailed
    assert failed.prompt_ids == ("a", "b")
    assert type(error_of(Refused(code="refused", message="m"))) is RequestRefused
    assert str(error_of(Refused(code="invalid_field", message="x = 1: must be 2"))) == "x = 1: must be 2"
    assert type(error_of(Refused(code="of the future", message="m"))) is SeerError


async def test_sending_to_a_peer_that_is_gone_says_so():
    _, server, client = await opened()
    client.close()
    client.close()
    assert not await server.hub.send(identity().address(), Ping())
    assert server.hub.counters["undeliverable"] == 1
    with pytest.raises(Unreachable):
        await client.recv()


@pytest.mark.parametrize("seed", range(10))
async def test_a_handshake_gets_through_a_bad_network(seed):
    network = MemoryNetwork()
    await Server(network).start()
    plan = Faults(drop=0.5, duplicate=0.3, reorder=0.3, delay_seconds=2.0)
    faulty = FaultyTransport(MemoryTransport(network), seed, plan, LoopClock())
    client = channel(network, transport=faulty)
    await client.open(120)
    await faulty.close()


def test_long_names_give_valid_and_distinct_addresses():
    one, two = (identity(name="é" * 500, incarnation=n).address() for n in (2**63 - 1, 2**63 - 2))
    assert one != two
    assert len(one) <= 255


async def test_a_client_takes_an_array_of_more_frames_than_a_server_does(monkeypatch):
    """Results of long responses with their routed experts may have gigabytes."""
    monkeypatch.setattr(codec, "SPLIT_BYTES", 4)
    _, server, client = await opened()
    large = SpoolData(name="", offset=0, checksum=0, data=np.zeros(4 * Limits().max_frames, np.uint8))
    [(address, _)] = server.got
    assert await server.hub.send(address, large)
    assert (await client.recv()).data.size == large.data.size
    await client.send(large)
    await asyncio.sleep(0.1)
    assert server.hub.counters["malformed"] == 1


@pytest.mark.real_time
async def test_a_handshake_over_tcp():
    async with asyncio.timeout(30):
        transport = ZmqTransport()
        router = await transport.router("tcp://127.0.0.1:0")
        hub = Hub(router, identity("buffer", "buffer"), EngineToBuffer, True)
        client = Channel(transport, router.endpoint, identity(), BufferToEngine, LoopClock())
        opening = asyncio.create_task(client.open(20))
        address, hello = await hub.recv()
        assert isinstance(hello, Hello)
        await opening
        await client.send(status(9))
        assert await hub.recv() == (address, status(9))
        assert await hub.send(address, Ping())
        assert await client.recv() == Ping()
        client.close()
        hub.close()
        await transport.close()


async def _lossy(kind):
    """Break the connection of an open channel with one message under way."""
    network = MemoryNetwork()
    server = await Server(network).start()
    transport = MemoryTransport(network)
    client = channel(network, transport=transport)
    await client.open(5)
    if kind == "up":
        await client.send(status())
    elif kind == "down":
        await server.hub.send(identity().address(), Ping())
    transport.disconnect()
    if kind == "refused":
        assert not await server.hub.send(identity().address(), Ping())
    transport.reconnect()
    return client


@pytest.mark.parametrize("kind", ["up", "down", "refused"])
async def test_a_message_lost_with_its_connection_is_revealed(kind):
    client = await _lossy(kind)
    async with asyncio.timeout(CHECK_SECONDS + 1):
        assert isinstance(await client.recv(), Welcome)
    with pytest.raises(TimeoutError):  # once
        async with asyncio.timeout(3 * CHECK_SECONDS):
            await client.recv()


async def test_a_broken_connection_that_lost_nothing_goes_unnoticed():
    client = await _lossy("nothing")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(3 * CHECK_SECONDS):
            await client.recv()


async def test_a_server_that_stood_still_is_no_loss():
    network = MemoryNetwork(queue=3)
    server = await Server(network).start()
    client = channel(network)
    await client.open(5)
    server.task.cancel()
    sending = [
        asyncio.create_task(client.send(status(each))) for each in range(5)
    ]  # two of them wait for room
    receiving = asyncio.create_task(client.recv())  # says Hello meanwhile
    await asyncio.sleep(2 * CHECK_SECONDS)
    assert [task.done() for task in sending] == [True, True, True, False, False]
    server.task = asyncio.create_task(server.serve())
    await asyncio.sleep(3 * CHECK_SECONDS)
    assert server.names().count("EngineStatus") == 5
    assert not receiving.done(), "every message arrived, in order"
    receiving.cancel()


async def test_a_socket_takes_the_roles_it_is_for():
    network = MemoryNetwork()
    server = await Server(network).start()
    server.hub._roles = frozenset({"trainer"})
    with pytest.raises(ProtocolMismatch, match="e1 comes as 'engine': this socket of buffer is for trainer"):
        await channel(network).open(5)
    assert server.got == []


def test_control_characters_of_peers_are_escaped():
    hostile = "\x1b]0;owned\x07 \x9b31m é\u202e\r"
    shown = str(printable({"names": [hostile, (hostile,)], hostile: ValueError(hostile)}))
    shown += str(_escape(None, "", {"event": "x\ny", "peer": hostile}))
    assert not any(ord(c) < 32 or 127 <= ord(c) < 160 or c == "\u202e" for c in shown)
    assert "é" in shown
