"""A weight update on its trainer's side, with a buffer played by the test."""

import asyncio
import threading

import numpy as np
import pytest
from made_up_ranks import MadeUpRanks, on_each
from virtual_time import VIRTUAL, eventually

from seer.client import SentWeights, ShardedTensors, SharedTensors, WeightsRefused, upload
from seer.client.sharded_update import ShardedUpdate
from seer.client.tensor_stream import TensorStream
from seer.client.weight_update import Update, new_call_id
from seer.common import wire
from seer.common.weights.digest import BLAKE3

pytestmark = VIRTUAL

TENSORS = {"w": np.arange(wire.SHORT_SPOOL_BYTES, dtype=np.float32)}  # four parts and a header


class Buffer:
    """Keeps what it is sent, and tells how far a stream has come as long as `confirms`."""

    def __init__(self, source="/new", version=7, most=wire.SPOOL_BYTES):
        self.update = Update(version, source, "", "finish")
        self.sent, self.have, self.confirms, self.most = [], 0, True, most
        self.task = asyncio.create_task(self.update.run(self.send))

    async def send(self, message):
        self.sent.append(message)
        if isinstance(message, wire.OpenSpool):
            self.state(resend=True)
        if isinstance(message, wire.SpoolData) and message.offset == self.have and self.confirms:
            self.have += len(message.data)
            self.state()

    def state(self, **fields):
        stream = self.update.stream
        state = wire.SpoolState(
            name=self.update._name, size=stream.size, have=self.have, most=self.most, **fields
        )
        self.update.answer(state)

    def live(self, call_id):
        return wire.WeightsLive(version=self.update.request.version, digest="d", call_id=call_id)


@pytest.mark.parametrize(
    "early", [wire.WeightsLive(version=7, digest="x"), wire.WeightsFailed(version=7, reasons={})]
)
async def test_an_answer_to_an_earlier_question_is_not_taken(early):
    buffer = Buffer()
    await asyncio.sleep(1)
    (request,) = buffer.sent
    assert request.call_id > 0
    early.call_id = new_call_id()  # of an update to this version that was given up
    buffer.update.answer(early)
    await asyncio.sleep(1)
    assert not buffer.task.done()
    buffer.update.answer(buffer.live(request.call_id))
    assert (await buffer.task).digest == "d"


async def test_a_question_that_is_asked_again_keeps_its_number():
    buffer = Buffer()
    await asyncio.sleep(1)
    await buffer.update.send_again(buffer.send)
    first, second = buffer.sent
    assert first == second
    buffer.update.answer(wire.WeightsFailed(version=7, reasons={"": "no"}, call_id=first.call_id))
    with pytest.raises(WeightsRefused, match="no"):
        await buffer.task


async def test_a_buffer_that_lost_a_whole_stream_is_sent_all_of_it_again():
    buffer = Buffer(TENSORS)
    size = buffer.update.stream.size
    await eventually(lambda: buffer.have == size)
    await asyncio.sleep(60)  # engines take their time
    buffer.have = 0  # it was restarted
    await buffer.update.send_again(buffer.send)
    await eventually(lambda: buffer.have == size)
    assert not buffer.task.done()
    request = [message for message in buffer.sent if isinstance(message, wire.UpdateWeights)]
    buffer.update.answer(buffer.live(request[0].call_id))
    assert (await buffer.task).version == 7


@pytest.mark.parametrize("most", [wire.SHORT_SPOOL_BYTES, 2**40])
async def test_messages_have_as_much_as_buffer_and_client_take(most, monkeypatch):
    monkeypatch.setattr(upload, "part_bytes", lambda size: size // 2)
    buffer = Buffer(TENSORS, most=most)
    size = buffer.update.stream.size
    await eventually(lambda: buffer.have == size)
    sent = [len(each.data) for each in buffer.sent if isinstance(each, wire.SpoolData)]
    assert set(sent[:-1]) == {min(most, size // 2)}
    buffer.task.cancel()


async def test_what_is_said_of_other_updates_and_streams_changes_nothing():
    buffer = Buffer(TENSORS)
    await asyncio.sleep(1)
    buffer.update.answer(wire.WeightsLive(version=6, digest="x"))
    buffer.update.answer(wire.SpoolState(name="other", size=1, have=0, problem="disk full"))
    await asyncio.sleep(1)
    assert not buffer.task.done()
    buffer.state(problem="disk full")
    with pytest.raises(WeightsRefused, match="disk full"):
        await buffer.task


async def test_a_stream_is_opened_first_bound_to_its_digest_and_not_asked_for_before():
    sent = []

    async def send(message):
        sent.append(message)

    update = Update(7, TENSORS, "", "finish")
    await update.send_again(send)
    assert sent == []
    buffer = Buffer(TENSORS)
    await asyncio.sleep(1)
    opened, request = buffer.sent[:2]
    assert (opened.name, request.source) == (buffer.update._name, wire.SPOOL_SCHEME + buffer.update._name)
    assert request.digest == buffer.update.stream.digest()
    buffer.task.cancel()


async def test_a_stream_runs_a_window_ahead_repeats_what_was_lost_and_ends_with_its_update(monkeypatch):
    monkeypatch.setattr(wire, "SPOOL_WINDOW", 2)
    buffer = Buffer(TENSORS)
    buffer.confirms = False

    def offsets():
        return [
            message.offset // wire.SHORT_SPOOL_BYTES
            for message in buffer.sent
            if isinstance(message, wire.SpoolData)
        ]

    await asyncio.sleep(1)
    assert offsets() == [0, 1]
    buffer.have = wire.SHORT_SPOOL_BYTES
    buffer.state(resend=True)
    await asyncio.sleep(1)
    assert offsets() == [0, 1, 1, 2]
    failed = wire.WeightsFailed(version=7, reasons={"": "no"}, call_id=buffer.update.request.call_id)
    buffer.update.answer(failed)
    with pytest.raises(WeightsRefused, match="no"):
        await buffer.task
    count = len(buffer.sent)
    await asyncio.sleep(60)
    assert len(buffer.sent) == count


@pytest.mark.real_time
async def test_an_update_that_is_cancelled_changes_nothing_any_more(monkeypatch):
    """Else it could note its tensors as what was sent, after the next update has noted its own."""
    begun, go_on, plan = threading.Event(), threading.Event(), SentWeights.plan

    def slow(self, *args, **options):
        begun.set()
        go_on.wait(10)
        return plan(self, *args, **options)

    monkeypatch.setattr(SentWeights, "plan", slow)
    deltas = SentWeights()
    task = asyncio.create_task(Update(1, TENSORS, "", "finish", deltas).run(None))
    await asyncio.to_thread(begun.wait)
    task.cancel()
    await asyncio.sleep(0.05)
    threading.Timer(0.2, go_on.set).start()
    await asyncio.wait([task])
    assert task.cancelled()
    before = deltas._sent
    await asyncio.sleep(0.5)
    assert deltas._sent is before


@pytest.mark.real_time
async def test_what_an_update_in_place_offers_is_freed_though_it_is_cancelled_meanwhile():
    begun, go_on, calls = threading.Event(), threading.Event(), []

    class Slow(SharedTensors):
        def offer(self, name):
            begun.set()
            go_on.wait(10)
            calls.append("offer")

        def end(self):
            calls.append("end")

    task = asyncio.create_task(Update(1, Slow({}), "", "finish").run(None))
    await asyncio.to_thread(begun.wait)
    task.cancel()
    threading.Timer(0.2, go_on.set).start()
    await asyncio.wait([task])
    assert (task.cancelled(), calls) == (True, ["offer", "end"])


def updates_of_two_ranks():
    ranks = MadeUpRanks.all_of(2)
    for rank in ranks:
        rank.turn = threading.RLock()
    shards = on_each(ranks, lambda rank: ShardedTensors(TENSORS, rank))
    return ranks, [ShardedUpdate(1, shard, "", "finish") for shard in shards]


@pytest.mark.real_time
@pytest.mark.parametrize("cancelled", [0, 1])
async def test_a_rank_whose_update_is_cancelled_makes_all_collective_calls_of_it(cancelled):
    """Else its next ones would meet what the other one makes of this update."""
    (ranks, updates), sent = updates_of_two_ranks(), []

    async def send(message):
        sent.append(message)

    task = asyncio.create_task(updates[cancelled].run(send))
    await asyncio.sleep(0.05)
    task.cancel()
    await asyncio.wait([task])
    other = updates[1 - cancelled]
    task = asyncio.create_task(other.run(send))
    if cancelled:
        async with asyncio.timeout(10):
            while other.request not in sent:
                await asyncio.sleep(0.01)
        other.answer(wire.WeightsFailed(version=1, reasons={"e0": "no"}, call_id=other.request.call_id))
    with pytest.raises(WeightsRefused, match="no" if cancelled else "the first rank ended"):
        await task

    def next_one(rank):
        with rank.turn:
            return rank.gather(rank.rank)

    assert await asyncio.to_thread(on_each, ranks, next_one) == [[0, 1]] * 2


@pytest.mark.real_time
async def test_all_ranks_compute_digests_as_the_first_was_told_to():
    """Another one may have asked the buffer before it heard of an update."""
    _, updates = updates_of_two_ranks()

    async def send(message):
        pass

    tasks = [
        asyncio.create_task(each.run(send, tag)) for each, tag in zip(updates, ["", BLAKE3], strict=True)
    ]
    async with asyncio.timeout(10):
        while not all(each.request.digest for each in updates):
            await asyncio.sleep(0.01)
    assert {each.request.digest for each in updates} == {TensorStream(TENSORS).digest("")}
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
