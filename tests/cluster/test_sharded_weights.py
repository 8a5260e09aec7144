"""Weights that the ranks of a trainer send side by side, in virtual time: all ranks have one outcome."""

import asyncio
import contextlib

import numpy as np
import pytest
from cluster_harness import roll, running
from made_up_ranks import MadeUpRanks, in_one_loop, on_each
from virtual_time import VIRTUAL, eventually

from seer.client import InvalidField, ShardedTensors, WeightsRefused
from seer.client.sharded_update import ShardedUpdate
from seer.client.tensor_stream import TensorStream
from seer.common import wire
from seer.common.config import BufferConfig
from seer.services.engine.weights.holders import Buffer

pytestmark = VIRTUAL

SIZE = wire.SPOOL_BYTES * wire.SPOOL_WINDOW // 4  # float32 elements: a window


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


@pytest.mark.parametrize("here", [True, False], ids=["same machine", "other machines"])
async def test_it_is_as_good_as_one_rank_that_sends_all(monkeypatch, here):
    if not here:
        monkeypatch.setattr(Buffer, "here", lambda self, state: False)
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
        spool, sent = cluster.services["buffer"]._spool, []
        put = spool.put

        def damaging(reply, address, message, *trainer):
            if isinstance(message, wire.SpoolData):
                sent.append((message.name, message.offset))
                if len(sent) in (2, 5, 11):
                    message.checksum ^= 1
                if len(sent) == 7:
                    return
            put(reply, address, message, *trainer)

        spool.put = damaging
        found = await ended(updates(clients, 1, tensors(1.0)))
        assert {each.digest for each in found} == {TensorStream(tensors(1.0)).digest()}
        assert len(sent) > len(set(sent))


async def test_what_arrives_is_sent_once():
    async with running(engines=1) as cluster, trainer(cluster, 2) as clients:
        spool, sent = cluster.services["buffer"]._spool, []
        put = spool.put

        def noting(reply, address, message, *trainer):
            if isinstance(message, wire.SpoolData):
                sent.append((message.name, message.offset))
            put(reply, address, message, *trainer)

        spool.put = noting
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
        await eventually(lambda: sum(part.have for part in spool._streams.values()) >= 5 * wire.SPOOL_BYTES)
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


async def test_tensors_that_are_given_again_are_another_stream():
    """That of the update before is removed at any moment, maybe once one rank has opened it again."""
    ranks = on_each(MadeUpRanks.all_of(2), lambda rank: ShardedTensors(tensors(1.0, "ab", 8), rank))
    first, again = (
        [ShardedUpdate(1, shard, "", "finish").request.source for shard in ranks] for _ in range(2)
    )
    assert first[0] == first[1] != again[0] == again[1]


async def test_options_that_shards_do_not_have_are_refused():
    async with running(engines=1) as cluster, cluster.client() as client:
        [shard] = on_each(MadeUpRanks.all_of(1), lambda rank: ShardedTensors(tensors(1.0, "a", 8), rank))
        with pytest.raises(InvalidField, match="base"):
            await client.update_weights(2, shard, base=1)
        with pytest.raises(InvalidField, match="digest"):
            await client.update_weights(2, shard, digest="0" * 32)
        with pytest.raises(InvalidField, match="in_flight"):
            await client.update_weights(2, shard, in_flight="wait", timeout_seconds=5)
