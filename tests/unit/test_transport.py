"""One suite for every transport, then what only ZeroMQ or only faults have."""

import asyncio
import socket
import subprocess
import sys

import memory_pipes
import memory_transport
import numpy as np
import pytest
from faulty_transport import Faults, FaultyTransport
from memory_transport import MemoryNetwork, MemoryTransport
from virtual_time import virtual

from seer.common.clock import LoopClock
from seer.common.errors import ConfigError, Unreachable
from seer.common.net.transport import zmq
from seer.common.net.transport.zmq import ZmqTransport
from seer.common.wire import ChunksDone
from seer.common.wire.codec import Decoder, encode

DEADLINE = 20.0


@pytest.fixture(params=["tcp", "ipc", "memory"])
def kind(request):
    return request.param


@pytest.fixture
async def make(kind, monkeypatch):
    """Return a factory of transports, one per pretended process."""
    monkeypatch.setattr(zmq, "LINGER_MS", 50)
    network = MemoryNetwork()
    made = []

    def one():
        made.append(MemoryTransport(network) if kind == "memory" else ZmqTransport())
        return made[-1]

    async with asyncio.timeout(DEADLINE):
        yield one
        for transport in made:
            await transport.close()


@pytest.fixture
def endpoint(kind, tmp_path):
    return f"ipc://{tmp_path}/s" if kind == "ipc" else "tcp://127.0.0.1:0"


async def when_known(router, identity, frames):
    """Send as soon as the peer is connected."""
    async with asyncio.timeout(DEADLINE):
        while True:
            try:
                return await router.send(identity, frames)
            except Unreachable:
                await asyncio.sleep(0.01)


async def published_until(publisher, subscriber, frames):
    """Publish until the subscription is in place; return what arrived first."""
    arriving = asyncio.ensure_future(subscriber.recv())
    async with asyncio.timeout(DEADLINE):
        while not arriving.done():
            await publisher.send(frames)
            await asyncio.sleep(0.01)
    return arriving.result()


async def test_messages_arrive_whole_in_order_and_both_ways(make, endpoint):
    router = await make().router(endpoint)
    dealer = await make().dealer(router.endpoint, b"one")
    big = bytes(range(256)) * 1024
    for number in range(50):
        await dealer.send([b"%d" % number, b"", memoryview(big)])
    for number in range(50):
        identity, frames, _ = await router.recv()
        assert identity == b"one"
        assert [bytes(frame) for frame in frames] == [b"%d" % number, b"", big]
    await router.send(b"one", [b"answer", big])
    assert [bytes(frame) for frame in await dealer.recv()] == [b"answer", big]


async def test_arrays_survive(make, endpoint):
    router = await make().router(endpoint)
    dealer = await make().dealer(router.endpoint, b"one")
    tokens = np.arange(100_003, dtype=np.int32)
    logprobs = np.zeros(0, np.float32)
    await dealer.send(encode(ChunksDone(weight_version=0, results=[], tokens=tokens, logprobs=logprobs)))
    _, frames, _ = await router.recv()
    received = Decoder(ChunksDone).decode(frames).tokens
    np.testing.assert_array_equal(received, tokens)
    assert not received.flags.writeable
    assert np.shares_memory(received, np.frombuffer(frames[1], np.uint8))


async def test_a_router_tells_its_peers_apart(make, endpoint):
    router = await make().router(endpoint)
    peers = {name: await make().dealer(router.endpoint, name) for name in (b"a", b"b", b"c")}
    for name, dealer in peers.items():
        await dealer.send([name])
    assert {(await router.recv())[0] for _ in peers} == set(peers)
    for name in peers:
        await router.send(name, [b"for " + name])
    for name, dealer in peers.items():
        assert [bytes(frame) for frame in await dealer.recv()] == [b"for " + name]


async def test_an_unknown_peer_is_unreachable(make, endpoint):
    router = await make().router(endpoint)
    with pytest.raises(Unreachable):
        await router.send(b"nobody", [b"x"])


async def test_a_peer_that_closed_becomes_unreachable(make, endpoint):
    router = await make().router(endpoint)
    dealer = await make().dealer(router.endpoint, b"one")
    await when_known(router, b"one", [b"x"])
    await dealer.recv()
    await dealer.send([b"last"])
    dealer.close()
    assert (await router.recv())[0] == b"one"
    with pytest.raises(Unreachable):
        while True:
            await router.send(b"one", [b"x"])
            await asyncio.sleep(0.01)


async def test_the_newer_connection_takes_the_identity(make, endpoint):
    router = await make().router(endpoint)
    old = await make().dealer(router.endpoint, b"same")
    await when_known(router, b"same", [b"1"])
    await old.recv()
    new = await make().dealer(router.endpoint, b"same")
    await new.send([b"here"])
    await router.recv()
    await router.send(b"same", [b"2"])
    assert [bytes(frame) for frame in await new.recv()] == [b"2"]


async def test_a_dealer_may_come_before_its_router(make, endpoint, kind, tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    endpoint = endpoint if kind == "ipc" else f"tcp://127.0.0.1:{port}"
    dealer = await make().dealer(endpoint, b"early")
    await dealer.send([b"waited"])
    router = await make().router(endpoint)
    identity, frames, _ = await router.recv()
    assert (identity, bytes(frames[0])) == (b"early", b"waited")


async def test_a_restarted_router_is_found_again(make, endpoint):
    first = make()
    router = await first.router(endpoint)
    dealer = await make().dealer(router.endpoint, b"one")
    await dealer.send([b"1"])
    await router.recv()
    await first.close()
    router = await make().router(router.endpoint)
    await when_known(router, b"one", [b"back"])
    assert bytes((await dealer.recv())[0]) == b"back"


async def test_a_full_queue_makes_the_sender_wait_then_fail(make, endpoint, monkeypatch):
    for module in (zmq, memory_transport):
        monkeypatch.setattr(module, "QUEUE_MESSAGES", 4)
    for module in (zmq, memory_pipes):
        monkeypatch.setattr(module, "SEND_SECONDS", 0.5)
    router = await make().router(endpoint)
    stuck = await make().dealer(router.endpoint, b"stuck")
    fine = await make().dealer(router.endpoint, b"fine")
    await when_known(router, b"stuck", [b"x"])
    await when_known(router, b"fine", [b"x"])
    frame = bytes(2**20)
    with pytest.raises(Unreachable, match="reads nothing"):
        for _ in range(1000):
            await router.send(b"stuck", [frame])
    await router.send(b"fine", [b"not blocked by the other"])
    await fine.recv()
    assert bytes((await fine.recv())[0]) == b"not blocked by the other"
    stuck.close()


async def test_a_router_may_bound_its_queues_itself(make, endpoint, monkeypatch):
    router = await make().router(endpoint, 3)
    for module in (zmq, memory_pipes):
        monkeypatch.setattr(module, "SEND_SECONDS", 0.2)
    for module in (zmq, memory_transport):
        monkeypatch.setattr(module, "QUEUE_MESSAGES", 1)  # the reader's
    stuck = await make().dealer(router.endpoint, b"stuck")
    await when_known(router, b"stuck", [b"x"])
    sent = 0
    with pytest.raises(Unreachable, match="reads nothing"):
        while sent < 100:
            await router.send(b"stuck", [bytes(2**22)])
            sent += 1
    assert sent < 20  # and not 1,000: those that the kernel and the reader took, and 3
    stuck.close()


async def test_a_sender_that_waits_goes_on_when_there_is_room(make, endpoint, monkeypatch):
    for module in (zmq, memory_transport):
        monkeypatch.setattr(module, "QUEUE_MESSAGES", 4)
    router = await make().router(endpoint)
    dealer = await make().dealer(router.endpoint, b"one")
    frame = bytes(2**20)

    async def send():
        for number in range(60):
            await dealer.send([b"%d" % number, frame])

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(send())
        await asyncio.sleep(0.1)
        for number in range(60):
            assert bytes((await router.recv())[1][0]) == b"%d" % number


async def test_publishing_reaches_every_subscriber_and_needs_none(make, endpoint):
    publisher = await make().publisher(endpoint)
    await publisher.send([b"nobody listens"])
    subscribers = [await make().subscriber(publisher.endpoint) for _ in range(2)]
    for subscriber in subscribers:
        frames = await published_until(publisher, subscriber, [b"head", b"body"])
        assert [bytes(frame) for frame in frames] == [b"head", b"body"]


async def test_publishing_never_waits_for_a_slow_subscriber(make, endpoint, monkeypatch):
    for module in (zmq, memory_transport):
        monkeypatch.setattr(module, "STREAM_MESSAGES", 8)
    publisher = await make().publisher(endpoint)
    subscriber = await make().subscriber(publisher.endpoint)
    await published_until(publisher, subscriber, [b"go"])
    frame = bytes(2**20)
    for _ in range(200):
        await publisher.send([frame])
    arrived = 0
    with pytest.raises(TimeoutError):
        while True:
            await asyncio.wait_for(subscriber.recv(), 1.0)
            arrived += 1
    assert 0 < arrived < 200


async def test_an_endpoint_in_use_is_refused(make, endpoint):
    router = await make().router(endpoint)
    with pytest.raises(ConfigError, match="another process listens there"):
        await make().router(router.endpoint)
    with pytest.raises(ConfigError, match="another process listens there"):
        await make().publisher(router.endpoint)
    dealer = await make().dealer(router.endpoint, b"still works")
    await dealer.send([b"x"])
    await router.recv()


async def test_a_closed_socket_raises_unreachable(make, endpoint):
    transport = make()
    router = await transport.router(endpoint)
    dealer = await transport.dealer(router.endpoint, b"one")
    receiving = [asyncio.ensure_future(socket.recv()) for socket in (router, dealer)]
    await asyncio.sleep(0.05)
    await transport.close()
    await transport.close()
    for task in receiving:
        with pytest.raises(Unreachable):
            await task
    with pytest.raises(Unreachable):
        await dealer.send([b"x"])
    with pytest.raises(Unreachable):
        await router.send(b"one", [b"x"])


async def test_cancelling_a_recv_loses_nothing(make, endpoint):
    router = await make().router(endpoint)
    dealer = await make().dealer(router.endpoint, b"one")
    received = []

    async def receive():
        while True:
            received.append(int(bytes((await router.recv())[1][0])))

    for number in range(300):
        task = asyncio.ensure_future(receive())
        await dealer.send([b"%d" % number])
        for _ in range(number % 7):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    while len(received) < 300:
        received.append(int(bytes((await router.recv())[1][0])))
    assert received == list(range(300))


async def test_a_busy_socket_lets_others_run(make, endpoint):
    router = await make().router(endpoint)
    dealer = await make().dealer(router.endpoint, b"one")
    for _ in range(500):
        await dealer.send([b"x"])
    turns = 0

    async def other():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.ensure_future(other())
    for _ in range(500):
        await router.recv()
    task.cancel()
    assert turns >= 5


# --- ZeroMQ alone ----------------------------------------------------------------------------


async def test_a_stale_ipc_socket_is_replaced(tmp_path):
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    assert path.exists()
    transport = ZmqTransport()
    router = await transport.router(f"ipc://{path}")
    dealer = await transport.dealer(f"ipc://{path}", b"one")
    await dealer.send([b"x"])
    await asyncio.wait_for(router.recv(), DEADLINE)
    await transport.close()
    assert not path.exists()


async def test_a_file_in_the_way_of_ipc_is_kept(tmp_path):
    path = tmp_path / "precious"
    path.write_text("data")
    transport = ZmqTransport()
    with pytest.raises(ConfigError, match="no socket"):
        await transport.router(f"ipc://{path}")
    assert path.read_text() == "data"
    await transport.close()


async def test_the_bind_host_replaces_the_host_alone():
    transport = ZmqTransport(bind_host="127.0.0.1")
    router = await transport.router("tcp://buffer.example:0")
    host, port = router.endpoint.removeprefix("tcp://").split(":")
    assert host == "buffer.example"
    dealer = await transport.dealer(f"tcp://127.0.0.1:{port}", b"one")
    await dealer.send([b"x"])
    await asyncio.wait_for(router.recv(), DEADLINE)
    await transport.close()


@pytest.mark.parametrize(
    ("endpoint", "says"),
    [
        ("http://x:1", "write tcp://host:port or ipc://path"),
        ("tcp://192.0.2.1:0", "bind_host"),
        ("tcp://buffer.example:0", "bind_host"),
        ("tcp://127.0.0.1:port", "a port below 65536"),
        ("tcp://127.0.0.1:65536", "a port below 65536"),
        ("tcp://:80", "write tcp://host:port"),
        ("ipc:///nonexistent/folder/s", "cannot bind"),
        ("ipc:///" + "x" * 200, "cannot bind"),
    ],
)
async def test_an_endpoint_that_cannot_be_bound_is_named(endpoint, says):
    transport = ZmqTransport(insecure=True)
    with pytest.raises(ConfigError, match=says) as caught:
        await transport.router(endpoint)
    assert endpoint in str(caught.value)
    await transport.close()


async def test_a_malformed_address_to_connect_to_is_named():
    transport = ZmqTransport()
    with pytest.raises(ConfigError, match="tcp://nowhere"):
        await transport.dealer("tcp://nowhere", b"one")
    await transport.close()


_FLOODED = """
import asyncio, zmq
from seer.common.net.transport.zmq import ZmqTransport
async def main():
    transport = ZmqTransport()
    router = await transport.router("tcp://127.0.0.1:0")
    context = zmq.Context()
    for _ in range(3):
        peer = context.socket(zmq.DEALER)
        peer.linger = 0
        peer.connect(router.endpoint)
        sent = 0
        while sent < 4000 and peer.poll(200, zmq.POLLOUT):
            peer.send(b"x" * 50)
            sent += 1
        peer.close()
    await asyncio.sleep(3)
    await router.recv()
    print("alive")
asyncio.run(main())
"""


def test_a_peer_that_floods_an_unread_socket_and_dies_harms_nobody():
    done = subprocess.run(
        [sys.executable, "-c", _FLOODED], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr


async def test_tcp_itself_watches_every_connection():
    transport = ZmqTransport()
    sockets = [await transport.router("tcp://127.0.0.1:0"), await transport.dealer("tcp://127.0.0.1:1", b"d")]
    for each in sockets:
        options = {
            name: each._socket.getsockopt(getattr(zmq.zmq, name))
            for name in (
                "TCP_KEEPALIVE",
                "TCP_KEEPALIVE_IDLE",
                "TCP_KEEPALIVE_INTVL",
                "TCP_KEEPALIVE_CNT",
                "TCP_MAXRT",
                "HEARTBEAT_IVL",
            )
        }
        assert options["TCP_KEEPALIVE"] == 1
        probes = options["TCP_KEEPALIVE_INTVL"] * options["TCP_KEEPALIVE_CNT"]
        assert options["TCP_KEEPALIVE_IDLE"] + probes <= zmq.GONE_SECONDS
        assert options["TCP_MAXRT"] == zmq.GONE_SECONDS * 1000
        assert options["HEARTBEAT_IVL"] == 0, "libzmq 4.3.5 aborts the process over it"
    await transport.close()


# --- faults ----------------------------------------------------------------------------------


@virtual
async def test_a_partition_lets_nothing_pass_until_it_heals():
    network = MemoryNetwork()
    router = await MemoryTransport(network).router("tcp://127.0.0.1:1")
    publisher = await MemoryTransport(network).publisher("tcp://127.0.0.1:2")
    node = FaultyTransport(MemoryTransport(network), 1, Faults(), LoopClock())
    dealer = await node.dealer(router.endpoint, b"one")
    subscriber = await node.subscriber(publisher.endpoint)
    receiving = [asyncio.ensure_future(each.recv()) for each in (router, dealer, subscriber)]
    for endpoint in (router.endpoint, publisher.endpoint):
        node.partition(endpoint, on=True)
    for word in (b"lost", b"arrives"):
        await dealer.send([word])
        await router.send(b"one", [word])
        await publisher.send([word])
        await asyncio.sleep(1)
        assert [task.done() for task in receiving] == [word == b"arrives"] * 3
        for endpoint in (router.endpoint, publisher.endpoint):
            node.partition(endpoint, on=False)
    assert receiving[0].result()[:2] == (b"one", [b"arrives"])
    assert receiving[1].result() == receiving[2].result() == [b"arrives"]


@pytest.mark.parametrize("kind", ["tcp", "ipc"], indirect=True)
async def test_bytes_bound_what_is_queued_for_a_peer_that_does_not_read(make, endpoint, monkeypatch):
    router = await make().router(endpoint)
    good = await make().dealer(router.endpoint, b"good")
    with monkeypatch.context() as patch:
        patch.setattr(zmq, "QUEUE_MESSAGES", 1)  # else its own libzmq reads a thousand for it
        deaf = await make().dealer(router.endpoint, b"deaf")
    size = 4 * 2**20
    for name, dealer in ((b"deaf", deaf), (b"good", good)):
        await when_known(router, name, [b"x"])
        await dealer.recv()
    queued = 0
    with pytest.raises(TimeoutError):
        while True:
            async with asyncio.timeout(0.5):  # in which the kernel takes what it has room for
                await router.send(b"deaf", [b"h", bytes(size)])
            queued += 1
    assert zmq.QUEUE_BYTES // size <= queued <= 3 * zmq.QUEUE_BYTES // size, "some are the kernel's"
    assert router._queued(b"deaf") + size > zmq.QUEUE_BYTES
    large = [bytes(size)] * (2 * zmq.QUEUE_BYTES // size)
    await router.send(b"good", [b"h", *large])  # one may always wait
    assert [len(frame) for frame in (await good.recv())[1:]] == [size] * len(large)
    sending = asyncio.create_task(router.send(b"deaf", [b"last", bytes(size)]))
    for _ in range(queued):
        assert len((await deaf.recv())[1]) == size
    await sending
    assert bytes((await deaf.recv())[0]) == b"last"
    deaf.close()
    with pytest.raises(Unreachable):
        while True:
            await router.send(b"deaf", [b"x", bytes(size)])
            await asyncio.sleep(0.01)
    good.close()


OUT_OF_FILES = """
import asyncio, os, resource
from seer.common.errors import Unreachable
from seer.common.net.transport.zmq import ZmqTransport

async def main():
    transport = ZmqTransport()
    (await transport.dealer("tcp://127.0.0.1:9", b"a")).close()  # starts ZeroMQ's threads
    await asyncio.sleep(0.2)
    last = max(os.dup(0) for _ in range(60))  # no number below is free
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    for free in range(8):
        before = len(os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (last + 1 + free, limits[1]))
        try:
            (await transport.dealer("tcp://127.0.0.1:9", b"b")).close()
            print("made", end=" ")
        except Unreachable as error:
            assert "Too many open files" in str(error)
            print("refused", end=" ")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        while len(os.listdir("/proc/self/fd")) > before:
            await asyncio.sleep(0.01)
    await transport.close()

asyncio.run(main())
"""


def test_a_connection_for_which_no_file_is_left_fails_by_name_and_keeps_none():
    done = subprocess.run(
        [sys.executable, "-c", OUT_OF_FILES], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stderr == ""
    assert done.stdout.split() == ["refused"] * 3 + ["made"] * 5
