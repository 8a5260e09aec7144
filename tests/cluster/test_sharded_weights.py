"""Weights that the ranks of a trainer send side by side, in virtual time: all ranks have one outcome."""

import asyncio
import contextlib
from collections import Counter

import numpy as np
import pytest
from cluster_harness import leave_no_room_for_deltas, parts_sent, roll, running
from made_up_ranks import MadeUpRanks, in_one_loop, on_each
from virtual_time import VIRTUAL, eventually

from seer.client import InvalidField, ShardedTensors, WeightsRefused
from seer.client.tensor_stream import TensorStream
from seer.common import wire
from seer.common.config import BufferConfig
from seer.services.buffer.weights import spool_delta

pytestmark = VIRTUAL

SIZE = wire.SHORT_SPOOL_BYTES * wire.SPOOL_WINDOW // 4  # float32 elements: a window


def tensors(fill, names="abcd", size=SIZE):
    return {name: np.full(size, fill + number, np.float32) for number, name in enumerate(names)}


@pytest.fixture(autouse=True)
def _one_loop(monkeypatch):
    in_one_loop(monkeypatch)


@contextlib.asynccontextmanager
async def trainer(cluster, size):
    """Yield a client for each rank."""
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(cluster.client()) for _ in range(size)]


def updates(clients, version, given, **options):
    """Begin an update of all ranks; return their tasks."""
    shards = on_each(MadeUpRanks.all_of(len(clients)), lambda rank: ShardedTensors(given, rank))
    return [
        asyncio.create_task(client.update_weights(version, shard, **options))
        for client, shard in zip(clients, shards, strict=True)
    ]


async def ended(tasks):
    await asyncio.wait(tasks)
    return [task.exception() or task.result() for task in tasks]


async def test_it_is_as_good_as_one_rank_that_sends_all(machines):
    async with running(engines=2) as cluster, trainer(cluster, 3) as clients:
        plain = await clients[0].update_weights(1, tensors(1.0))
        first, second, third = await ended(updates(clients, 2, tensors(1.0)))
        assert first == second == third
        assert (first.version, first.digest, first.quarantined) == (2, plain.digest, {})
        for client in clients:
            assert (await roll(client))[1] == (2, plain.digest)
        (live,) = await ended(updates(clients[:1], 3, tensors(2.0)))
        assert live.digest == TensorStream(tensors(2.0)).digest()
        spool = cluster.services["buffer"]._spool
        await asyncio.sleep(2.0)
        assert all(name.startswith("v3") for name in spool._streams), "parts go with their stream"


async def test_more_ranks_than_tensors(monkeypatch):
    async with running(engines=1) as cluster, trainer(cluster, 4) as clients:
        found = await ended(updates(clients, 1, tensors(1.0, "ab", 8)))
        assert {each.digest for each in found} == {TensorStream(tensors(1.0, "ab", 8)).digest()}


async def test_what_is_lost_or_damaged_is_sent_again():
    async with running(engines=2) as cluster, trainer(cluster, 2) as clients:
        sent = parts_sent(cluster, damaged=True)
        found = await ended(updates(clients, 1, tensors(1.0)))
        assert {each.digest for each in found} == {TensorStream(tensors(1.0)).digest()}
        assert len(sent) > len(set(sent))


async def test_what_arrives_is_sent_once():
    async with running(engines=1) as cluster, trainer(cluster, 2) as clients:
        sent = parts_sent(cluster)
        await ended(updates(clients, 1, tensors(1.0)))
        assert len(sent) == len(set(sent)) > 2 * wire.SPOOL_WINDOW


@pytest.mark.parametrize("configured", [True, False])
async def test_it_survives_a_restart_of_the_buffer(tmp_path, configured):
    settings = BufferConfig(chunk_size=32, spool=str(tmp_path) if configured else "")
    async with running(engines=2, buffer=settings) as cluster, trainer(cluster, 2) as clients:
        tasks = updates(clients, 1, tensors(1.0))
        spool, put, left = cluster.services["buffer"]._spool, None, 5
        put = spool.put

        def cut(*message):
            nonlocal left
            left -= isinstance(message[2], wire.SpoolData)
            if left >= 0:
                put(*message)

        spool.put = cut
        await eventually(
            lambda: sum(part.have for part in spool._streams.values()) >= 5 * wire.SHORT_SPOOL_BYTES
        )
        await cluster.kill("buffer")
        await cluster.start("buffer")
        found = await ended(tasks)
        assert {each.digest for each in found} == {TensorStream(tensors(1.0)).digest()}


@pytest.mark.parametrize("silent", [0, 1, 2])
async def test_without_a_rank_the_update_fails_on_all_and_the_next_one_works(silent):
    async with running(engines=2) as cluster, trainer(cluster, 3) as clients:
        expected = await roll(clients[0])
        tasks = updates(clients, 1, tensors(1.0, size=2 * SIZE), timeout_seconds=300)
        await asyncio.sleep(0)  # they begin
        tasks[silent].cancel()
        others = [task for task in tasks if task is not tasks[silent]]
        found = await ended(others)
        assert all(isinstance(each, WeightsRefused) for each in found), found
        if silent:
            assert all("sent nothing for 30 s" in str(each) for each in found), found
        assert await roll(clients[0]) == expected
        found = await ended(updates(clients, 1, tensors(2.0)))
        assert {each.digest for each in found} == {TensorStream(tensors(2.0)).digest()}


async def test_a_refusal_is_every_rank_s():
    async with running(engines=1) as cluster, trainer(cluster, 2) as clients:
        given = tensors(1.0, "ab", 8)
        given["b"][3] = np.nan
        found = await ended(updates(clients, 1, given))
        assert all(isinstance(each, WeightsRefused) and "tensor b has" in str(each) for each in found), found


async def test_wrong_options_are_refused():
    async with running(engines=1) as cluster, cluster.client() as client:
        [shard] = on_each(MadeUpRanks.all_of(1), lambda rank: ShardedTensors(tensors(1.0, "a", 8), rank))
        with pytest.raises(InvalidField, match="base"):
            await client.update_weights(2, shard, base=2)
        with pytest.raises(InvalidField, match="digest"):
            await client.update_weights(2, shard, digest="0" * 32)
        with pytest.raises(InvalidField, match="in_flight"):
            await client.update_weights(2, shard, in_flight="wait", timeout_seconds=5)


def first():
    rng = np.random.default_rng(0)
    return {name: rng.integers(0, 2**14, 30_000, np.uint16).view(np.float16) for name in "abcde"}


def stepped(given, step, share=0.01):
    """Change some elements of all tensors but two."""
    rng = np.random.default_rng(step)
    for name in "abd":
        given[name].view(np.uint16)[rng.random(30_000) < share] ^= 1
    return given


WHOLE = TensorStream(first()).size
FEW = 0.03 * WHOLE
"""More than a delta's bytes."""


def counting(cluster, damage=lambda message, count: True):
    """Count bytes that ranks send; `damage` returns whether a message arrives."""
    spool, counts = cluster.services["buffer"]._spool, Counter()
    put = spool.put

    def counted(reply, address, message, *trainer):
        if isinstance(message, wire.SpoolData):
            counts["bytes"] += len(message.data)
            counts["messages"] += 1
            if not damage(message, counts["messages"]):
                return
        put(reply, address, message, *trainer)

    spool.put = counted
    return counts


async def agreed(clients, tasks, given):
    """Wait until an update is live on all ranks, by the digest of one client; return how it was sent."""
    found = await ended(tasks)
    assert {each if isinstance(each, Exception) else each.digest for each in found} == {
        TensorStream(given).digest()
    }
    [last] = {client.deltas.last for client in clients}
    return last


async def test_ranks_send_what_differs_from_what_they_sent_last():
    given = first()
    async with running(engines=2) as cluster, trainer(cluster, 3) as clients:
        counts = counting(cluster)
        for step in range(1, 12):
            last = await agreed(clients, updates(clients, step, stepped(given, step)), given)
            assert (last.sent < FEW, not last.why) == (step > 1, step > 1)
            await asyncio.sleep(1)
        assert WHOLE < counts["bytes"] < WHOLE + 10 * FEW
        assert counts["messages"] == 3 + 10 * 4, "two ranks have gaps and values, and send each once"
        assert (await roll(clients[0]))[1] == (11, TensorStream(given).digest())
        assert {name.partition(".")[0] for name in cluster.services["buffer"]._spool._streams} == {
            clients[0].deltas._sent.name
        }
        last = await agreed(clients, updates(clients, 12, given), given)
        assert last.sent < 2000, "nothing differs"
        assert all(sum(map(len, each.deltas._sent.data.values())) <= 2 * 60_000 for each in clients)


async def test_a_delta_that_does_not_pay_and_a_base_that_the_trainer_names():
    given = first()
    async with running(engines=1) as cluster, trainer(cluster, 2) as clients:
        await agreed(clients, updates(clients, 1, given), given)
        last = await agreed(clients, updates(clients, 2, stepped(given, 2, share=1.0)), given)
        assert "does not pay" in last.why
        last = await agreed(clients, updates(clients, 3, stepped(given, 3), base=2), given)
        assert "no earlier tensors" in last.why
        last = await agreed(clients, updates(clients, 4, stepped(given, 4, share=1.0), base=3), given)
        assert (last.why, last.sent > WHOLE / 2) == ("", True)
        last = await agreed(clients, updates(clients, 5, stepped(given, 5), base=3), given)
        assert "base 3 is not what this client sent last, version 4" in last.why
        shards = on_each(MadeUpRanks.all_of(2), lambda rank: ShardedTensors(given, rank))
        tasks = [
            asyncio.create_task(client.update_weights(6, shard, base=base))
            for client, shard, base in zip(clients, shards, (5, None), strict=True)
        ]
        found = await ended(tasks)
        assert all(isinstance(each, InvalidField) for each in found), found
        assert "base" in str(found[0])
        assert str(found[0]) == str(found[1])


async def test_a_part_of_a_delta_that_is_lost_or_damaged_is_sent_again():
    given = first()

    def damage(message, count):
        message.checksum ^= count == 1
        return count != 3

    async with running(engines=2) as cluster, trainer(cluster, 3) as clients:
        await agreed(clients, updates(clients, 1, given), given)
        counts = counting(cluster, damage)
        last = await agreed(clients, updates(clients, 2, stepped(given, 2)), given)
        assert not last.why
        assert counts["messages"] == 4 + 2
        assert counts["bytes"] < FEW


@pytest.mark.parametrize("configured", [True, False])
async def test_a_buffer_that_ends_amid_a_delta(tmp_path, configured):
    given, settings = first(), BufferConfig(chunk_size=32, spool=str(tmp_path) if configured else "")
    async with running(engines=2, buffer=settings) as cluster, trainer(cluster, 3) as clients:
        await agreed(clients, updates(clients, 1, given), given)
        counts = counting(cluster, lambda message, count: count == 1)
        tasks = updates(clients, 2, stepped(given, 2))
        await eventually(lambda: counts["messages"] > 2)
        await cluster.kill("buffer")
        await cluster.start("buffer")
        counts = counting(cluster)
        last = await agreed(clients, tasks, given)
        assert ((counts["bytes"] < FEW), not last.why) == (configured, configured)
        last = await agreed(clients, updates(clients, 3, stepped(given, 3)), given)
        assert last.sent < FEW


async def lose_the_base(cluster, monkeypatch):
    await cluster.kill("buffer")
    await cluster.start("buffer")


async def be_of_an_earlier_release(cluster, monkeypatch):
    spool = cluster.services["buffer"]._spool
    begin = spool._begin_part

    async def refusing(message, trainer):
        if ".delta" in message.name:
            raise ValueError("is a part of what has no parts: give one of a whole stream")
        return await begin(message, trainer)

    spool._begin_part = refusing


async def lack_room(cluster, monkeypatch):
    leave_no_room_for_deltas(cluster)


async def fail_to_apply_it(cluster, monkeypatch):
    def failing(*args):
        raise OSError("the disk failed")

    monkeypatch.setattr(spool_delta, "apply", failing)


async def make_what_engines_refuse(cluster, monkeypatch):
    spool = cluster.services["buffer"]._spool
    [live] = {spool._whole(each) for each in spool._streams.values()}
    data = bytearray(live.file.read_bytes())
    data[5000] ^= 4
    live.file.unlink()
    live.file.write_bytes(data)


@pytest.mark.parametrize(
    "fault", [lose_the_base, be_of_an_earlier_release, lack_room, fail_to_apply_it, make_what_engines_refuse]
)
async def test_a_delta_that_cannot_be_applied_is_replaced_by_the_whole_of_all_ranks(monkeypatch, fault):
    given = first()
    async with running(engines=2) as cluster, trainer(cluster, 3) as clients:
        await agreed(clients, updates(clients, 1, given), given)
        await fault(cluster, monkeypatch)
        counts = counting(cluster)
        last = await agreed(clients, updates(clients, 2, stepped(given, 2)), given)
        assert (last.sent, "could not apply the delta" in last.why) == (WHOLE, True)
        assert WHOLE <= counts["bytes"] < WHOLE + FEW + 1000
        await lose_the_base(cluster, monkeypatch)  # whatever is broken ends with it
        monkeypatch.undo()
        in_one_loop(monkeypatch)
        await agreed(clients, updates(clients, 3, stepped(given, 3)), given)
        last = await agreed(clients, updates(clients, 4, stepped(given, 4)), given)
        assert last.sent < FEW


@pytest.mark.parametrize("silent", [0, 1])
async def test_without_a_rank_a_delta_changes_nothing_and_the_next_one_is_to_the_same_base(silent):
    given = first()
    async with running(engines=2) as cluster, trainer(cluster, 2) as clients:
        await agreed(clients, updates(clients, 1, given), given)
        expected = await roll(clients[0])
        silence = []
        counts = counting(cluster, lambda message, count: bool(silence))
        tasks = updates(clients, 2, stepped(given, 2), timeout_seconds=300)
        await eventually(lambda: counts["messages"] > 1)
        tasks[silent].cancel()
        async with asyncio.timeout(wire.SPOOL_STALL_SECONDS + 5):  # and not once more for the whole
            [found] = await ended([task for task in tasks if task is not tasks[silent]])
        assert isinstance(found, WeightsRefused), found
        assert await roll(clients[0]) == expected
        silence.append("is over")
        last = await agreed(clients, updates(clients, 3, stepped(given, 3)), given)
        assert last.sent < 2 * FEW


async def test_a_rank_that_does_not_hear_that_a_delta_is_live_makes_the_next_one_whole(monkeypatch):
    given = first()
    async with running(engines=1) as cluster, trainer(cluster, 2) as clients:
        await agreed(clients, updates(clients, 1, given), given)
        tasks = updates(clients, 2, stepped(given, 2))
        monkeypatch.setattr(clients[1].deltas, "live", lambda *args, **options: None)
        await ended(tasks)
        monkeypatch.delattr(clients[1].deltas, "live")
        last = await agreed(clients, updates(clients, 3, stepped(given, 3)), given)
        assert "not all ranks sent the same" in last.why
