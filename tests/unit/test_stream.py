"""Sequenced streams: whatever is lost, a subscriber's state ends equal to the publisher's."""

import asyncio
import functools
from types import SimpleNamespace

import pytest
from faulty_transport import Faults, FaultyTransport
from lag import LaggedTransport
from memory_transport import MemoryNetwork, MemoryTransport
from streams import PUB, SNAPSHOTS, Follower, Publisher
from virtual_time import VIRTUAL, eventually, virtual

from seer.common.clock import LoopClock
from seer.common.errors import ProtocolMismatch
from seer.common.net import stream as streams
from seer.common.net.identity import Identity
from seer.common.net.stream import BEACON_SECONDS, StreamPublisher, StreamSubscriber
from seer.common.net.transport.zmq import ZmqTransport
from seer.common.wire import BufferPublished, BufferSnapshotReply, ContextSnapshot, Sequenced, SnapshotRequest
from seer.common.wire.codec import Decoder, encode
from seer.services.buffer import views
from seer.services.buffer.requests import state
from seer.services.buffer.requests.holdings import Holdings
from seer.services.buffer.requests.turn_placement import Trajectories

pytestmark = VIRTUAL


async def test_deltas_follow_a_snapshot():
    network = MemoryNetwork()
    publisher = await Publisher(MemoryTransport(network)).start()
    await publisher.put("before", 1.0)
    follower = Follower(MemoryTransport(network))
    await asyncio.sleep(1)
    for n in range(5):
        await publisher.put(f"g{n}", float(n))
    await asyncio.sleep(1)
    assert follower.state == publisher.state
    assert follower.kinds == ["ContextSnapshot"] + ["Estimates"] * 5
    assert follower.stream.counters["gaps"] == 0
    assert publisher.stream.counters["published"] == 6


async def test_a_lost_message_brings_a_snapshot():
    network = MemoryNetwork()
    publisher = await Publisher(MemoryTransport(network)).start()
    node = FaultyTransport(MemoryTransport(network), 1, Faults(), LoopClock())
    follower = Follower(node)
    await asyncio.sleep(1)
    node.partition(PUB, on=True)
    await publisher.put("lost", 1.0)
    await asyncio.sleep(0.01)
    node.partition(PUB, on=False)
    await publisher.put("seen", 2.0)
    await asyncio.sleep(0.1)
    assert follower.state == {"lost": 1.0, "seen": 2.0}
    assert follower.kinds == ["ContextSnapshot"] * 2
    assert follower.stream.counters["gaps"] == 1


async def test_a_lost_last_message_is_noticed_by_the_beacon():
    network = MemoryNetwork()
    publisher = await Publisher(MemoryTransport(network)).start()
    node = FaultyTransport(MemoryTransport(network), 1, Faults(), LoopClock())
    follower = Follower(node)
    await asyncio.sleep(1.5)
    node.partition(PUB, on=True)
    await publisher.put("lost", 1.0)
    await asyncio.sleep(0.01)
    node.partition(PUB, on=False)
    await asyncio.sleep(BEACON_SECONDS + 0.1)
    assert follower.state == {"lost": 1.0}


async def test_an_absent_publisher_is_waited_for():
    network = MemoryNetwork()
    follower = Follower(MemoryTransport(network))
    await asyncio.sleep(600)
    assert not follower.task.done()
    publisher = await Publisher(MemoryTransport(network)).start()
    await publisher.put("g", 1.0)
    await asyncio.sleep(12)
    assert follower.state == {"g": 1.0}
    assert 10 < follower.stream.counters["retries"] < 200


async def test_a_restart_replaces_the_state():
    network = MemoryNetwork()
    publisher = await Publisher(MemoryTransport(network), incarnation=1).start()
    follower = Follower(MemoryTransport(network))
    await asyncio.sleep(1)
    for n in range(10):
        await publisher.put(f"old{n}", 1.0)
    await asyncio.sleep(1)
    await publisher.stop()
    await asyncio.sleep(60)
    publisher = await Publisher(MemoryTransport(network), incarnation=2).start()
    await asyncio.sleep(BEACON_SECONDS + 0.1)
    assert follower.state == {}, "an idle new incarnation is noticed by its beacon"
    await publisher.put("new", 2.0)
    await asyncio.sleep(0.1)
    assert follower.state == {"new": 2.0}
    assert follower.stream.counters["restarts"] == 1


async def test_a_message_of_a_newer_publisher_is_dropped_without_a_gap():
    network = MemoryNetwork()
    publisher = await Publisher(MemoryTransport(network)).start()
    follower = Follower(MemoryTransport(network))
    await asyncio.sleep(1)
    await publisher.stream.publish(Sequenced(incarnation=0, sequence=0))
    await publisher.publisher.send([b"\xc1"])
    await publisher.publisher.send([])
    await publisher.put("g", 1.0)
    await asyncio.sleep(1)
    assert follower.kinds == ["ContextSnapshot", "Estimates"]
    assert follower.stream.counters["malformed"] == 3
    assert follower.stream.counters["gaps"] == 0


async def test_a_publisher_that_refuses_us_is_an_error():
    network = MemoryNetwork()
    await Publisher(MemoryTransport(network)).start()
    follower = Follower(MemoryTransport(network), config_hash="xyz")
    await asyncio.sleep(1)
    assert isinstance(follower.task.exception(), ProtocolMismatch)


@pytest.mark.parametrize("seed", range(20))
async def test_any_faults_and_restarts_end_in_the_same_state(seed):
    network = MemoryNetwork()
    plan = Faults(drop=0.1, duplicate=0.1, reorder=0.2, delay_seconds=0.2)

    def node(salt):
        return FaultyTransport(MemoryTransport(network), 100 * seed + salt, plan, LoopClock())

    follower = Follower(node(9))
    for incarnation in range(1, 4):
        publisher = await Publisher(node(incarnation), incarnation=incarnation).start()
        for n in range(200):
            await publisher.put(f"{incarnation}.{n % 20}", float(n))
            await asyncio.sleep(0.05)
        if incarnation < 3:
            await publisher.stop()
    await eventually(lambda: follower.state == publisher.state, seconds=120)
    assert follower.stream.counters["snapshots"] > 1
    follower.task.cancel()
    await publisher.stop()


@pytest.mark.real_time
async def test_a_stream_over_tcp_survives_a_restart():
    async with asyncio.timeout(60):
        publisher = await Publisher(ZmqTransport(), 1).start("tcp://127.0.0.1:0", "tcp://127.0.0.1:0")
        endpoints = publisher.publisher.endpoint, publisher.router.endpoint
        transport = ZmqTransport()
        follower = Follower(transport, *endpoints)
        await eventually(lambda: follower.kinds)
        for n in range(3000):
            await publisher.put(f"g{n}", float(n))
        await eventually(lambda: follower.state == publisher.state)
        await publisher.stop()
        publisher = await Publisher(ZmqTransport(), 2).start(*endpoints)
        await publisher.put("new", 1.0)
        await eventually(lambda: follower.state == {"new": 1.0})
        follower.task.cancel()
        await publisher.stop()
        await transport.close()


def is_page(number, frames):
    return b"ContextSnapshot" in bytes(frames[0]) and Decoder(ContextSnapshot).decode(frames).page == number


@pytest.mark.parametrize("lost", [None, 0, 3, 9])
def test_a_snapshot_of_many_pages_is_one_state_whatever_is_lost(lost, monkeypatch):
    monkeypatch.setattr(streams, "PAGE_ROWS", 10)

    @virtual
    async def check():
        network = MemoryNetwork()
        publisher = await Publisher(MemoryTransport(network)).start()
        publisher.state = {f"g{n}": float(n) for n in range(95)}
        node = LaggedTransport(network, 0.05, 0.05)
        left = [1]

        def loses(frames):
            hit = lost is not None and left[0] and is_page(lost, frames)
            left[0] -= bool(hit)
            return hit

        node.lose_down = loses
        follower = Follower(node)
        for n in range(200):  # while pages are under way, deltas go on
            await publisher.put(f"g{n}", -float(n))
            await asyncio.sleep(0.05)
        await asyncio.sleep(1)
        assert follower.state == publisher.state
        assert follower.kinds.count("ContextSnapshot") == 1
        assert follower.stream.counters["retries"] == (lost in (0, 3)), (
            "of a lost last page the next Hello tells"
        )

    check()


def test_a_publisher_restarted_between_pages_is_asked_anew(monkeypatch):
    monkeypatch.setattr(streams, "PAGE_ROWS", 10)

    @virtual
    async def check():
        network = MemoryNetwork()
        first = await Publisher(MemoryTransport(network), incarnation=1).start()
        first.state = {f"old{n}": float(n) for n in range(95)}
        node = LaggedTransport(network, 0.0, 0.0)
        node.lose_down = lambda frames: any(is_page(number, frames) for number in range(5, 10))
        follower = Follower(node)
        await asyncio.sleep(2)
        await first.stop()
        second = await Publisher(MemoryTransport(network), incarnation=2).start()
        second.state = {f"new{n}": float(n) for n in range(45)}
        await asyncio.sleep(20)
        assert follower.state == second.state
        assert set(follower.kinds) == {"ContextSnapshot"}

    check()


def test_a_reader_that_stops_holds_up_no_other_and_little_memory(monkeypatch):
    monkeypatch.setattr(streams, "PAGE_ROWS", 1)

    @virtual
    async def check():
        network = MemoryNetwork()
        transport = MemoryTransport(network)
        publisher = Publisher(transport)
        publisher.publisher = await transport.publisher(PUB)
        publisher.router = await transport.router(SNAPSHOTS, streams.QUEUE_PAGES)
        publisher.stream = StreamPublisher(
            publisher.publisher, publisher.router, publisher.me, publisher.snapshot
        )
        publisher.task = asyncio.create_task(publisher.stream.serve())
        publisher.state = {f"g{n}": float(n) for n in range(500)}
        deaf = []
        for number in range(5):
            me = Identity(role="buffer", name=f"deaf{number}", incarnation=1, config_hash="abc")
            deaf.append(await MemoryTransport(network).dealer(SNAPSHOTS, me.address()))
            await deaf[-1].send(encode(me.hello()))
            await deaf[-1].send(encode(SnapshotRequest()))
        follower = Follower(MemoryTransport(network))
        await asyncio.sleep(3)
        assert follower.state == publisher.state
        assert [len(each.down) <= streams.QUEUE_PAGES for each in deaf] == [True] * 5

    check()


def machine_of(requests):
    """A stand-in for the buffer's machine: groups of 8, all requests with progress."""
    groups, rows = {}, {}
    for number in range(requests // 8):
        name = f"rollout-0123456789/prompt-{number:08d}"
        groups[name] = state.GroupState(name, "", None, 8, 100, 32768)
        for index in range(8):
            view = groups[name].view(number, index)
            view.generated = 1000 + index
            rows[view.request_id] = state.RequestState(view, groups[name])
    registry = SimpleNamespace(trajectories=Trajectories(Holdings(state.Limits(None))))
    return SimpleNamespace(groups=groups, requests=rows, registry=registry)


async def test_a_buffer_of_two_hundred_thousand_requests_can_be_followed():
    network = MemoryNetwork()
    transport, machine = MemoryTransport(network), machine_of(200_000)
    publisher = await transport.publisher(PUB)
    router = await transport.router(SNAPSHOTS, streams.QUEUE_PAGES)
    me = Identity(role="buffer", name="buffer", incarnation=1)
    stream = StreamPublisher(publisher, router, me, functools.partial(views.snapshot, machine))
    serving = asyncio.create_task(stream.serve())
    reader = StreamSubscriber(
        MemoryTransport(network), PUB, SNAPSHOTS, me, BufferPublished, BufferSnapshotReply, LoopClock()
    )
    snapshot = await reader.recv()
    assert len(snapshot.progress) == 200_000
    assert len({row.group_id for row in snapshot.opened}) == 25_000
    assert reader.counters["retries"] == 0
    assert stream.counters["sent"] == 50, "made once, of pages far below the bound of a header"
    serving.cancel()
