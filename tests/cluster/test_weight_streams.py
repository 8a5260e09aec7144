"""Weights streamed from a trainer, in virtual time: each byte once, however the way there breaks."""

import asyncio

import numpy as np
import pytest
from cluster_harness import folder, parts_sent, roll, running
from virtual_time import VIRTUAL, eventually

from seer.client import WeightsRefused
from seer.client.tensor_stream import TensorStream
from seer.common import wire
from seer.common.config import BufferConfig
from seer.services.engine.weights.holders import Copy

pytestmark = VIRTUAL

LARGE = (
    wire.SHORT_SPOOL_BYTES * 2 * wire.SPOOL_WINDOW // 4
)  # float32 elements: two windows, and a bit with the header


def tensors(fill, size=6):
    return {"w": np.full(size, fill, dtype=np.float32)}


async def test_a_stream_is_as_good_as_a_folder(tmp_path, machines):
    async with running(engines=2) as cluster, cluster.client() as client:
        live = await client.update_weights(1, folder(tmp_path / "one", 1.0))
        expected, _ = await roll(client)
        arrays = {"w": np.full((2, 3), 1.0, dtype=np.float32)}
        streamed = await client.update_weights(2, arrays)
        assert streamed.digest == live.digest == TensorStream(arrays).digest()
        assert (await roll(client))[0] == expected
        large = await client.update_weights(3, tensors(3.0, LARGE))
        assert large.digest == TensorStream(tensors(3.0, LARGE)).digest()
        assert (await roll(client))[1] == (3, large.digest)
        assert all(cluster.services[name]._updater.fetcher._copy is None for name in ("e0", "e1"))


async def test_an_engine_that_joins_after_the_trainer_went_on_loads_the_stream(machines):
    async with running(engines=1) as cluster, cluster.client() as client:
        array = tensors(1.0)
        await client.update_weights(1, array)
        array["w"][:] = 2.0  # as the next step of training would
        expected = await roll(client)
        await asyncio.sleep(10 * wire.SPOOL_STALL_SECONDS)
        await cluster.start("e1")
        server = cluster.services["buffer"]
        await eventually(lambda: set(server.machine.instances) == {"e0", "e1"})
        await cluster.kill("e0")
        assert await roll(client) == expected


async def test_what_is_not_needed_any_more_is_deleted():
    async with running(engines=1) as cluster, cluster.client() as client:
        spool = cluster.services["buffer"]._spool
        files = set()
        for version in range(1, 30):
            await client.update_weights(version, tensors(version))
            await asyncio.sleep(1.0)
            (live,) = spool._streams.values()
            assert {each.name for each in spool._folder.root.iterdir()} <= {live.name, "spare"}
            files.add((live.folder / "model.safetensors").stat().st_ino)
        assert len(files) == 2  # written over in turns


async def test_damage_is_sent_again(monkeypatch, machines):
    monkeypatch.setattr(Copy, "write", _damaging(Copy.write))
    async with running(engines=2) as cluster, cluster.client() as client:
        sent = parts_sent(cluster, damaged=True)
        live = await client.update_weights(1, tensors(1.0, LARGE))
        assert live.digest == TensorStream(tensors(1.0, LARGE)).digest()
        assert len(sent) > len(set(sent))


async def test_what_arrives_is_sent_once():
    async with running(engines=1) as cluster, cluster.client() as client:
        sent = parts_sent(cluster)
        for version in (1, 2):  # the second as a delta
            large = tensors(1.0, LARGE)
            large["w"][: LARGE // 3] = version
            await client.update_weights(version, large)
        assert len(sent) == len(set(sent)) > 2 * wire.SPOOL_WINDOW
        assert any(name.endswith(".delta") for name, _ in sent)


def _damaging(write):
    count = 0

    async def damaged(copy, part):
        nonlocal count
        count += 1
        return count % 4 != 0 and await write(copy, part)

    return damaged


def _cut_after(parts, cluster):
    """Lose what comes after the first parts of a stream."""
    spool = cluster.services["buffer"]._spool
    put, left = spool.put, parts

    def cut(reply, address, message, *trainer):
        nonlocal left
        left -= isinstance(message, wire.SpoolData)
        if left >= 0:
            put(reply, address, message, *trainer)

    spool.put = cut
    return spool


async def test_a_stream_survives_its_buffer(tmp_path):
    settings = BufferConfig(chunk_size=32, spool=str(tmp_path / "spool"))
    async with running(engines=2, buffer=settings) as cluster, cluster.client() as client:
        update = asyncio.create_task(client.update_weights(1, tensors(1.0, LARGE)))
        spool = _cut_after(3, cluster)
        await eventually(lambda: [s.have for s in spool._streams.values()] == [3 * wire.SHORT_SPOOL_BYTES])
        await cluster.kill("buffer")
        assert not update.done()
        await cluster.start("buffer")
        assert (await update).version == 1
        expected = await roll(client)
        await cluster.kill("buffer")
        await cluster.start("buffer")
        await cluster.start("e2")
        server = cluster.services["buffer"]
        await eventually(lambda: server.weights.admitted == {"e0", "e1", "e2"})
        assert server.weights.live.version == 1
        for name in ("e0", "e1"):
            await cluster.kill(name)
        assert await roll(client) == expected


async def test_a_trainer_that_dies_while_it_sends_changes_nothing():
    async with running(engines=2) as cluster, cluster.client() as client:
        expected = await roll(client)
        async with cluster.client() as other:
            update = asyncio.create_task(other.update_weights(1, tensors(1.0, LARGE)))
            spool = _cut_after(3, cluster)
            await eventually(
                lambda: [s.have for s in spool._streams.values()] == [3 * wire.SHORT_SPOOL_BYTES]
            )
            update.cancel()
        server = cluster.services["buffer"]
        assert server.weights.updating
        await eventually(lambda: not server.weights.updating, 90)  # engines wait a minute
        assert await roll(client) == expected
        assert not server._spool._streams


async def test_a_trainer_that_comes_back_may_ask_for_what_is_live():
    async with running(engines=1) as cluster:
        async with cluster.client() as client:
            live = await client.update_weights(5, tensors(1.0))
        async with cluster.client() as client:
            assert await client.update_weights(5, tensors(1.0)) == live
            with pytest.raises(WeightsRefused, match="must be above the live one"):
                await client.update_weights(5, tensors(2.0))


async def test_a_stream_that_does_not_fit_is_refused(monkeypatch):
    async with running(engines=1) as cluster, cluster.client() as client:
        expected = await roll(client)
        usage = type("usage", (), {"free": 10})
        monkeypatch.setattr("seer.common.blobs.shutil.disk_usage", lambda path: usage)
        with pytest.raises(WeightsRefused, match=r"do not fit .*set buffer\.spool"):
            await client.update_weights(1, tensors(1.0))
        assert await roll(client) == expected
