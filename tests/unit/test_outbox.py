"""The outbox: order per peer, nobody waits for a peer that does not read; and who has which name."""

from __future__ import annotations

import asyncio
import tracemalloc

import pytest
from memory_transport import MemoryNetwork, MemoryTransport
from virtual_time import VIRTUAL, eventually

from seer.common import wire
from seer.common.clock import LoopClock
from seer.common.errors import InvalidField
from seer.common.ids import new_incarnation
from seer.common.net import outbox
from seer.common.net.channel import Channel
from seer.common.net.hub import Hub
from seer.common.net.identity import CHECK_SECONDS, Identity
from seer.common.net.outbox import Outbox
from seer.common.net.transport.base import FAIR_EVERY, SEND_SECONDS
from seer.common.types import Capacity
from seer.services.buffer import peers
from seer.services.buffer.peers import MAX_SIZE, MAX_VERSIONS, Peers, check_register

pytestmark = VIRTUAL

ENDPOINT = "tcp://127.0.0.1:7101"
LATER = 1 << 20
"""One millisecond of incarnations."""


class Buffer:
    """A hub and its outbox; `failed` has the peers that were dismissed."""

    def __init__(self, network: MemoryNetwork) -> None:
        self.network = network
        self.failed: list[bytes] = []
        self.got: list[wire.Message] = []

    async def start(self) -> Buffer:
        me = Identity(role="buffer", name="buffer", incarnation=1)
        router = await MemoryTransport(self.network).router(ENDPOINT)
        self.hub: Hub = Hub(router, me, wire.TrainerToBuffer, require_config_hash=False)
        self.outbox: Outbox = Outbox(self.hub, self.failed.append)
        self.tasks = [asyncio.create_task(work) for work in (self.outbox.run(), self.serve())]
        return self

    async def serve(self) -> None:
        while True:
            self.got.append((await self.hub.recv())[1])


async def joined(network: MemoryNetwork, name: str) -> tuple[bytes, Channel]:
    me = Identity(role="trainer", name=name, incarnation=1)
    channel: Channel = Channel(MemoryTransport(network), ENDPOINT, me, wire.BufferToTrainer, LoopClock())
    await channel.open(5)
    return me.address(), channel


async def buffer_and(name: str) -> tuple[Buffer, bytes, Channel]:
    """Start a buffer, and have one peer join it."""
    buffer = await Buffer(MemoryNetwork()).start()
    return buffer, *await joined(buffer.network, name)


def accepted(number: int) -> wire.Accepted:
    return wire.Accepted(rollout_id=str(number), prompt_ids=[])


async def numbers(channel: Channel, count: int) -> list[int]:
    return [int((await channel.recv()).rollout_id) for _ in range(count)]


async def test_a_peer_that_does_not_read_delays_no_other_and_gets_all_in_order():
    buffer, deaf, late = await buffer_and("deaf")
    network = buffer.network
    good, reading = await joined(network, "good")
    now = asyncio.get_running_loop().time()
    for number in range(3000):
        buffer.outbox.put(deaf, accepted(number))
    buffer.outbox.put(good, accepted(7))
    assert await numbers(reading, 1) == [7]
    assert asyncio.get_running_loop().time() - now < 0.1
    assert buffer.outbox.idle
    assert (buffer.outbox.keeps_up(good), buffer.outbox.keeps_up(deaf)) == (True, False)
    assert await numbers(late, 3000) == list(range(3000))
    assert buffer.failed == []


@pytest.mark.parametrize("most", [None, 10])
async def test_one_that_never_reads_is_dismissed_and_hears_of_it_later(most):
    if most is not None:
        outbox.MAX_QUEUED, before = most, outbox.MAX_QUEUED
    buffer, deaf, channel = await buffer_and("deaf")
    for number in range(3000):
        buffer.outbox.put(deaf, accepted(number))
    await asyncio.sleep(SEND_SECONDS + 1)
    if most is not None:
        outbox.MAX_QUEUED = before
    assert buffer.failed == [deaf]
    while not isinstance(message := await channel.recv(), wire.Welcome):
        assert isinstance(message, wire.Accepted)
    assert message.session > 1
    buffer.outbox.put(deaf, accepted(1))
    assert await numbers(channel, 1) == [1]


def large(kilobytes: int) -> wire.Accepted:
    return wire.Accepted(rollout_id="large", prompt_ids=["x" * 500] * (2 * kilobytes))


@pytest.mark.parametrize("running", [True, False])
async def test_bytes_bound_what_waits_for_a_peer(running, monkeypatch):
    monkeypatch.setattr(outbox, "MAX_BYTES", 10_000_000)
    buffer, deaf, channel = await buffer_and("deaf")
    if running:  # it has no room, and is waited for
        for number in range(3000):
            buffer.outbox.put(deaf, accepted(number))
        await asyncio.sleep(1)
    tracemalloc.start()
    for _ in range(100):
        buffer.outbox.put(deaf, large(1000))
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 12_000_000
    assert not buffer.outbox.keeps_up(deaf)
    async with asyncio.timeout(SEND_SECONDS + 1):
        while not buffer.failed:
            await asyncio.sleep(0.1)
    assert buffer.failed == [deaf]
    while not isinstance(message := await channel.recv(), wire.Welcome):
        pass
    assert message.session > 1


async def test_one_message_may_always_wait_however_large(monkeypatch):
    monkeypatch.setattr(outbox, "MAX_BYTES", 1000)
    buffer, address, channel = await buffer_and("t")
    for _ in range(3):
        buffer.outbox.put(address, large(10))
        assert await channel.recv() == large(10)
    assert buffer.failed == []


@pytest.mark.parametrize("late", [True, False])
async def test_what_was_put_before_a_dismissal_does_not_leave_after_it(late):
    buffer, address, channel = await buffer_and("t")
    for number in range(3000 if late else 10):
        buffer.outbox.put(address, accepted(number))
    if late:
        await asyncio.sleep(1)
    buffer.hub.dismiss(address)
    buffer.outbox.put(address, accepted(-1))
    await channel.send(wire.StatusRequest())
    old = 0
    while not isinstance(await channel.recv(), wire.Welcome):
        old += 1
    assert old < 3000
    buffer.outbox.put(address, accepted(7))
    assert await numbers(channel, 1) == [7]
    assert buffer.failed == []


async def test_what_waits_in_the_queue_over_a_new_handshake_does_not_leave():
    buffer, address, channel = await buffer_and("t")
    buffer.tasks[0].cancel()
    buffer.outbox.put(b"a stranger", accepted(1))
    buffer.outbox.put(address, accepted(1))
    buffer.hub.dismiss(address)
    await channel.open(5)
    buffer.outbox.put(address, accepted(2))
    buffer.tasks[0] = asyncio.create_task(buffer.outbox.run())
    assert await numbers(channel, 1) == [2]
    await asyncio.sleep(1)
    assert (buffer.failed, buffer.outbox.idle) == ([], True)


async def test_one_that_reads_in_time_may_be_sent_any_amount_in_order(monkeypatch):
    monkeypatch.setattr(outbox, "MAX_BYTES", 400_000)
    buffer, address, channel = await buffer_and("t")
    sent = read = 0
    for count in [4000] + 30 * [500]:
        for number in range(sent, sent + count):
            buffer.outbox.put(address, accepted(number))
        await asyncio.sleep(0.1)
        assert not buffer.outbox.keeps_up(address)
        assert await numbers(channel, 500) == list(range(read, read + 500))
        sent, read = sent + count, read + 500
    assert buffer.failed == []


async def test_one_that_is_too_many_messages_behind_is_dismissed_though_it_reads(monkeypatch):
    monkeypatch.setattr(outbox, "MAX_QUEUED", 100)
    buffer, address, channel = await buffer_and("t")
    for number in range(3000):
        buffer.outbox.put(address, accepted(number))
    async with asyncio.timeout(2 * CHECK_SECONDS):
        while not isinstance(await channel.recv(), wire.Welcome):
            pass
    assert buffer.failed == [address]


@pytest.mark.parametrize("peers", [1, 900])
async def test_one_with_much_to_get_and_many_with_little_let_others_have_their_turns(peers):
    network = MemoryNetwork()
    buffer = await Buffer(network).start()
    addresses = [(await joined(network, f"t{number}"))[0] for number in range(peers)]
    for number in range(900):
        buffer.outbox.put(addresses[number % peers], accepted(number))
    turns = 0
    while buffer.hub.counters["sent"] < 900:
        await asyncio.sleep(0)
        turns += 1
    assert turns > 900 / FAIR_EVERY / 2


async def test_one_that_came_back_is_not_dismissed_for_what_it_did_not_take_before():
    buffer, address, channel = await buffer_and("t")
    for number in range(3000):
        buffer.outbox.put(address, accepted(number))
    await asyncio.sleep(SEND_SECONDS - 1)
    buffer.hub.dismiss(address)
    for message in (wire.StatusRequest(), Identity(role="trainer", name="t", incarnation=1).hello()):
        await channel.send(message)
    await asyncio.sleep(3)
    assert buffer.hub.session(address) == 2
    assert buffer.failed == []


async def test_answers_wait_for_nobody():
    buffer, deaf, channel = await buffer_and("deaf")
    now = asyncio.get_running_loop().time()
    for _ in range(5000):
        await buffer.hub.reply(deaf, accepted(0))
    assert asyncio.get_running_loop().time() == now
    assert buffer.hub.counters["undeliverable"] > 0
    async with asyncio.timeout(3 * CHECK_SECONDS):
        while not isinstance(await channel.recv(), wire.Welcome):
            pass  # and then a Welcome says that some were lost


async def test_after_goodbye_one_is_a_stranger():
    buffer, _, channel = await buffer_and("t")
    for message in (wire.Goodbye(), wire.StatusRequest()):
        await channel.send(message)
    await eventually(lambda: buffer.hub.counters["strangers"] == 1)
    assert [type(message) for message in buffer.got] == [wire.Hello, wire.Goodbye]


# --- names -----------------------------------------------------------------------------------


def hello(name: str, incarnation: int) -> tuple[bytes, wire.Hello]:
    me = Identity(role="engine", name=name, incarnation=incarnation)
    return me.address(), me.hello()


def test_a_name_is_its_latest_incarnations():
    known, first = Peers(), new_incarnation()
    (old, its), (new, their) = hello("e", first), hello("e", first + LATER)
    known.hello(old, its, 0.0)
    known.hello(new, their, 1.0)
    assert known.hello(old, its, 2.0) == new
    assert (known.address_of("e"), known.name_of(old), known.name_of(new)) == (new, "e", "e")
    earlier, its = hello("e", first - LATER)
    assert known.hello(earlier, its, 3.0) == new
    assert known.address_of("e") == new
    known.remove(new)
    assert (known.address_of("e"), known.name_of(new)) == (None, None)
    assert known.hello(old, hello("e", first)[1], 4.0) is None
    assert known.address_of("e") == old
    known.assign("e", earlier)
    assert known.address_of("e") == earlier


def test_a_silent_incarnation_loses_its_name_to_an_earlier_one_that_talks():
    known = Peers()
    (holder, its), (other, their) = hello("e", 2 * LATER), hello("e", LATER)
    known.hello(holder, its, 0.0)
    assert [known.hello(other, their, now) for now in (1.0, 6.0, 11.0, 16.0)] == [holder] * 3 + [None]
    assert known.address_of("e") == other
    assert known.hello(holder, its, 60.0) == other, "an incarnation that wakes up does not get its name back"


def test_an_incarnation_that_talks_keeps_its_name_from_earlier_ones():
    known = Peers()
    (holder, its), (other, their) = hello("e", 2 * LATER), hello("e", LATER)
    for now in range(0, 200, 5):
        known.hello(holder, its, float(now))
        assert known.hello(other, their, now + 1.0) == holder
        assert known.holder_may_be_dead(other) == (now < 10), (
            "what is heard at first may have been said long before"
        )


def test_only_what_was_said_since_its_holder_spoke_last_counts_for_a_name():
    known = Peers()
    (holder, its), (other, their) = hello("e", 2 * LATER), hello("e", LATER)
    known.hello(holder, its, 0.0)
    assert not known.holder_may_be_dead(holder)
    for now in (1.0, 2.0):
        known.hello(other, their, now)
    known.hello(holder, its, 3.0)
    assert known.hello(other, their, 19.0) == holder
    known.registered[other] = 1
    known.remove(other)
    assert known.address_of("e") == holder
    assert not known.registered


def test_a_stall_of_ones_own_is_not_the_silence_of_others():
    known = Peers()
    (holder, its), (other, their) = hello("e", 2 * LATER), hello("e", LATER)
    known.hello(holder, its, 0.0)
    known.hello(other, their, 1.0)
    for _ in range(9):  # what queued up in 45 s is read in turns, at one time
        assert known.hello(other, their, 46.0) == holder
        known.hello(holder, its, 46.0)
    assert known.address_of("e") == holder


def test_incarnations_of_one_millisecond_are_taken_as_they_come():
    known, first = Peers(), LATER * 1000
    for incarnation in (first + 5, first + 3):
        known.hello(*hello("e", incarnation), 0.0)
    assert known.address_of("e") == hello("e", first + 3)[0]


def test_names_that_begin_alike_and_share_an_address_take_turns_there():
    known = Peers()
    (address, its), (same, other) = hello("e" * 300, 1), hello("e" * 300 + "x", 1)
    assert address == same, "an address has the beginning of a name"
    known.hello(address, its, 0.0)
    known.hello(address, other, 1.0)
    assert (known.name_of(address), known.address_of(its.name)) == (other.name, None)
    known.remove(address)
    later, again = hello(other.name, LATER)
    assert known.hello(later, again, 2.0) is None


def test_peers_are_bounded_and_the_silent_go_first(monkeypatch):
    monkeypatch.setattr(peers, "MAX_PEERS", 3)
    known = Peers()
    for name in ("a", "b", "c", "a", "d"):
        known.hello(*hello(name, 1), 0.0)
    assert [known.address_of(name) is not None for name in "abcd"] == [True, False, True, True]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"capacity": {"block_size": 0}}, "capacity.block_size = 0: must be in"),
        ({"capacity": {"kv_blocks": -1}}, "capacity.kv_blocks = -1"),
        ({"capacity": {"max_model_len": MAX_SIZE + 1}}, "capacity.max_model_len = "),
        ({"capacity": {"draft_tokens": -1}}, "capacity.draft_tokens = -1"),
        ({"capacity": {"parts": 2}}, "capacity.parts = 2: must be at most kv_blocks"),
        ({"capacity": {"kv_blocks": MAX_SIZE, "parts": MAX_SIZE}}, "capacity.parts = "),
        ({"versions": {str(i): "" for i in range(MAX_VERSIONS + 1)}}, "versions = '65 entries'"),
        ({"versions": {"x": "y" * 513}}, "of 512 characters"),
    ],
)
def test_an_engine_whose_books_cannot_be_kept_is_refused(changes, told):
    sound = {"kv_blocks": 1, "block_size": 1, "max_num_seqs": 1, "max_model_len": 1}
    capacity = Capacity(**sound | changes.pop("capacity", {}))
    check_register(wire.Register(capacity=Capacity(**sound), weight_version=0))
    with pytest.raises(InvalidField, match=r" = ") as info:
        check_register(wire.Register(capacity=capacity, weight_version=0, **changes))
    assert told in str(info.value)
