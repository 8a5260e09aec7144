"""Past incarnations of a publisher, messages that come twice, and who asks for snapshots when."""

import asyncio

from memory_transport import MemoryNetwork, MemoryTransport
from streams import PUB, SNAPSHOTS, Follower, Publisher
from virtual_time import VIRTUAL

from seer.common.net.hub import Hub
from seer.common.net.identity import Identity
from seer.common.net.stream import BEACON_SECONDS, FETCH_SECONDS, RETIRED_SECONDS, SNAPSHOT_SECONDS
from seer.common.wire import ContextSnapshot, Estimates, Sequenced, SnapshotAsked, SnapshotRequest
from seer.common.wire.codec import encode

pytestmark = VIRTUAL


def delta(incarnation, sequence, **estimates):
    return [
        *encode(Sequenced(incarnation=incarnation, sequence=sequence)),
        *encode(Estimates(estimates=estimates)),
    ]


async def following(network, incarnation=1):
    publisher = await Publisher(MemoryTransport(network), incarnation).start()
    follower = Follower(MemoryTransport(network))
    await asyncio.sleep(1)
    return publisher, follower


async def test_a_message_that_comes_twice_is_applied_once():
    publisher, follower = await following(MemoryNetwork())
    for _ in range(2):
        await publisher.publisher.send(delta(1, 1, g=1.0))
    await asyncio.sleep(0.1)
    assert follower.deltas == [{"g": 1.0}]
    assert follower.stream.counters["snapshots"] == 1


async def test_mail_of_the_incarnation_that_was_followed_before_leads_nowhere():
    network = MemoryNetwork()
    first, follower = await following(network, 1)
    await first.stop()
    second = await Publisher(MemoryTransport(network), 2).start()
    await asyncio.sleep(BEACON_SECONDS + 0.1)
    await second.publisher.send(delta(1, 1, g=1.0))
    await asyncio.sleep(1)
    assert follower.state == {}
    assert (follower.stream.counters["restarts"], follower.stream.counters["snapshots"]) == (1, 2)


async def test_an_incarnation_taken_for_past_is_looked_at_again_after_a_while():
    publisher, follower = await following(MemoryNetwork())
    for pause, restarts in ((0.0, 1), (1.0, 1), (RETIRED_SECONDS, 2)):
        await asyncio.sleep(pause)
        await publisher.publisher.send(encode(Sequenced(incarnation=7, sequence=0)))
        await asyncio.sleep(0.5)
        assert follower.stream.counters["restarts"] == restarts


async def test_each_who_asks_gets_one_snapshot_and_leaves_nothing_behind():
    network = MemoryNetwork()
    publisher, _ = await following(network)
    asked = Follower(MemoryTransport(network), incarnation=10)
    await asyncio.sleep(SNAPSHOT_SECONDS / 2)
    late = Follower(MemoryTransport(network), incarnation=11)
    await asyncio.sleep(1)
    assert (asked.kinds, late.kinds) == (["ContextSnapshot"], ["ContextSnapshot"])
    counters = publisher.stream.counters
    assert (counters["sent"], counters["undeliverable"]) == (3, 0)
    assert not network.dealers.get(SNAPSHOTS)


async def answering(network, *answers):
    """Answer each request for a snapshot with the next pages: (sequence, page, pages, group)."""
    me = Identity(role="context", name="context", incarnation=1)
    hub = Hub(await MemoryTransport(network).router(SNAPSHOTS), me, SnapshotAsked, False)
    await MemoryTransport(network).publisher(PUB)
    for pages in answers:
        while not isinstance((message := await hub.recv())[1], SnapshotRequest):
            pass
        for sequence, page, count, group in pages:
            told = ContextSnapshot(
                incarnation=1, sequence=sequence, estimates={group: 1.0}, page=page, pages=count
            )
            await hub.send(message[0], told)
    await asyncio.sleep(1000)


async def test_pages_of_two_states_are_no_snapshot_and_one_that_does_not_come_is_asked_for_again():
    network = MemoryNetwork()
    whole = [(3, 0, 2, "a"), (3, 1, 2, "b")]
    serving = asyncio.create_task(answering(network, [(1, 0, 2, "old"), (2, 1, 2, "new")], [], whole))
    follower = Follower(MemoryTransport(network))
    await asyncio.sleep(3 * FETCH_SECONDS)
    assert follower.state == {"a": 1.0, "b": 1.0}
    assert follower.stream.counters["retries"] == 2
    serving.cancel()
