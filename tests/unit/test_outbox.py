"""The outbox: order per peer, nobody waits for a peer that does not read; and who has which name."""

from __future__ import annotations

import asyncio

import pytest
from virtual_time import eventually, virtual

from seer.common import outbox
from seer.common.channel import CHECK_SECONDS, Channel, Hub, Identity
from seer.common.clock import LoopClock
from seer.common.errors import InvalidField
from seer.common.ids import new_incarnation
from seer.common.outbox import Outbox
from seer.common.transport.base import SEND_SECONDS
from seer.common.transport.memory import MemoryNetwork, MemoryTransport
from seer.common.types import Capacity
from seer.common.wire import messages as m
from seer.services.buffer import peers
from seer.services.buffer.peers import MAX_SIZE, MAX_VERSIONS, Peers, check_register

ENDPOINT = "tcp://127.0.0.1:7101"
LATER = 1 << 20
"""One millisecond of incarnations."""


class Buffer:
    """A hub and its outbox; `failed` has the peers that were dismissed."""

    def __init__(self, network: MemoryNetwork) -> None:
        self.network = network
        self.failed: list[bytes] = []
        self.got: list[m.Message] = []

    async def start(self) -> Buffer:
        me = Identity(role="buffer", name="buffer", incarnation=1)
        router = await MemoryTransport(self.network).router(ENDPOINT)
        self.hub: Hub = Hub(router, me, m.TrainerToBuffer, require_config_hash=False)
        self.outbox: Outbox = Outbox(self.hub, self.failed.append)
        self.tasks = [asyncio.create_task(work) for work in (self.outbox.run(), self.serve())]
        return self

    async def serve(self) -> None:
        while True:
            self.got.append((await self.hub.recv())[1])


async def joined(network: MemoryNetwork, name: str) -> tuple[bytes, Channel]:
    me = Identity(role="trainer", name=name, incarnation=1)
    channel: Channel = Channel(MemoryTransport(network), ENDPOINT, me, m.BufferToTrainer, LoopClock())
    await channel.open(5)
    return me.address(), channel


def accepted(number: int) -> m.Accepted:
    return m.Accepted(rollout_id=str(number), prompt_ids=[])


async def numbers(channel: Channel, count: int) -> list[int]:
    return [int((await channel.recv()).rollout_id) for _ in range(count)]


@virtual
async def test_a_peer_that_does_not_read_delays_no_other_and_gets_all_in_order():
    network = MemoryNetwork()
    buffer = await Buffer(network).start()
    deaf, late = await joined(network, "deaf")
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
@virtual
async def test_one_that_never_reads_is_dismissed_and_hears_of_it_later(most):
    if most is not None:
        outbox.MAX_LATE, before = most, outbox.MAX_LATE
    network = MemoryNetwork()
    buffer = await Buffer(network).start()
    deaf, channel = await joined(network, "deaf")
    for number in range(3000):
        buffer.outbox.put(deaf, accepted(number))
    await asyncio.sleep(SEND_SECONDS + 1)
    if most is not None:
        outbox.MAX_LATE = before
    assert buffer.failed == [deaf]
    while not isinstance(message := await channel.recv(), m.Welcome):
        assert isinstance(message, m.Accepted)
    assert message.lost
    buffer.outbox.put(deaf, accepted(1))
    assert await numbers(channel, 1) == [1]


@virtual
async def test_answers_wait_for_nobody():
    network = MemoryNetwork()
    buffer = await Buffer(network).start()
    deaf, channel = await joined(network, "deaf")
    now = asyncio.get_running_loop().time()
    for _ in range(5000):
        await buffer.hub.reply(deaf, accepted(0))
    assert asyncio.get_running_loop().time() == now
    assert buffer.hub.counters["undeliverable"] > 0
    async with asyncio.timeout(3 * CHECK_SECONDS):
        while not isinstance(await channel.recv(), m.Welcome):
            pass  # and then a Welcome says that some were lost


@virtual
async def test_after_goodbye_one_is_a_stranger():
    network = MemoryNetwork()
    buffer = await Buffer(network).start()
    _, channel = await joined(network, "t")
    for message in (m.Goodbye(), m.StatusRequest()):
        await channel.send(message)
    await eventually(lambda: buffer.hub.counters["strangers"] == 1)
    assert [type(message) for message in buffer.got] == [m.Hello, m.Goodbye]


# --- names -----------------------------------------------------------------------------------


def hello(name: str, incarnation: int) -> tuple[bytes, m.Hello]:
    me = Identity(role="engine", name=name, incarnation=incarnation)
    return me.address(), me.hello()


def test_a_name_is_its_latest_lifes():
    known, first = Peers(), new_incarnation()
    (old, its), (new, their) = hello("e", first), hello("e", first + LATER)
    known.greet(old, its)
    known.greet(new, their)
    known.greet(old, its)
    assert (known.at("e"), known.name(old), known.name(new)) == (new, "e", "e")
    earlier, its = hello("e", first - LATER)
    known.greet(earlier, its)
    assert known.at("e") == new
    known.leave(new)
    assert (known.at("e"), known.name(new)) == (None, None)
    known.greet(old, hello("e", first)[1])
    assert known.at("e") == old
    known.take("e", earlier)
    assert known.at("e") == earlier


def test_lives_of_one_millisecond_are_taken_as_they_come():
    known, first = Peers(), LATER * 1000
    for incarnation in (first + 5, first + 3):
        known.greet(*hello("e", incarnation))
    assert known.at("e") == hello("e", first + 3)[0]


def test_peers_are_bounded_and_the_silent_go_first(monkeypatch):
    monkeypatch.setattr(peers, "MAX_PEERS", 3)
    known = Peers()
    for name in ("a", "b", "c", "a", "d"):
        known.greet(*hello(name, 1))
    assert [known.at(name) is not None for name in "abcd"] == [True, False, True, True]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"capacity": {"block_size": 0}}, "capacity.block_size = 0: must be in"),
        ({"capacity": {"kv_blocks": -1}}, "capacity.kv_blocks = -1"),
        ({"capacity": {"max_model_len": MAX_SIZE + 1}}, "capacity.max_model_len = "),
        ({"capacity": {"draft_tokens": -1}}, "capacity.draft_tokens = -1"),
        ({"versions": {str(i): "" for i in range(MAX_VERSIONS + 1)}}, "versions = '65 entries'"),
        ({"versions": {"x": "y" * 513}}, "of 512 characters"),
    ],
)
def test_an_engine_whose_books_cannot_be_kept_is_refused(changes, told):
    sound = {"kv_blocks": 1, "block_size": 1, "max_num_seqs": 1, "max_model_len": 1}
    capacity = Capacity(**sound | changes.pop("capacity", {}))
    check_register(m.Register(capacity=Capacity(**sound), weight_version=0, vocab_size=1))
    with pytest.raises(InvalidField, match=r" = ") as info:
        check_register(m.Register(capacity=capacity, weight_version=0, vocab_size=1, **changes))
    assert told in str(info.value)
