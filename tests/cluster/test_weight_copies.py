"""Copies that engines make of streams, in virtual time: none outlives its update, however that ends."""

import asyncio
import errno
import shutil
import tempfile

import numpy as np
import pytest
from cluster_harness import folder, roll, running
from virtual_time import VIRTUAL, eventually

from seer.client import WeightsRefused
from seer.common import wire
from seer.common.blobs import NOTES
from seer.common.config import EngineConfig
from seer.common.errors import ConfigError, InvalidField, Unreachable
from seer.services.engine.weights import fetcher
from seer.services.engine.weights.checker import CheckedWeights
from seer.services.engine.weights.holders import Buffer, Copy

pytestmark = VIRTUAL

LARGE = {"w": np.ones(wire.SHORT_SPOOL_BYTES * 6, dtype=np.float32)}  # three windows
SMALL = {"w": np.ones(6, dtype=np.float32)}


@pytest.fixture(autouse=True)
def copies(tmp_path, monkeypatch):
    """Have engines copy, into a folder of the test's; return what lies there."""
    place = tmp_path / "tmp"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    monkeypatch.setattr(Buffer, "here", staticmethod(lambda state: False))
    spools = ("spare", "v*")
    return lambda: [each for each in place.iterdir() if not any(list(each.glob(name)) for name in spools)]


def stall(cluster, after=10):
    """Let no more than so many parts of a stream reach the buffer."""
    spool, left = cluster.services["buffer"]._spool, after
    put = spool.put

    def cut(reply, address, message, *trainer):
        nonlocal left
        left -= isinstance(message, wire.SpoolData)
        if left >= 0 or not isinstance(message, wire.SpoolData):
            put(reply, address, message, *trainer)

    spool.put = cut


def copying(cluster):
    return [cluster.services[name]._updater.fetcher._copy is not None for name in ("e0", "e1")]


async def test_an_update_that_another_engine_refuses_leaves_nothing(copies):
    async with running(engines=2) as cluster, cluster.client() as client:

        async def fail(source, *_):
            await eventually(lambda: cluster.services["e0"]._updater.checker.checked.digest != "")
            raise InvalidField("source", source, "this node cannot read it")

        cluster.services["e1"]._updater.checker.check = fail
        with pytest.raises(WeightsRefused, match="this node cannot read it"):
            await client.update_weights(1, SMALL)
        await eventually(lambda: not any(copying(cluster)))
        assert cluster.services["e0"]._updater.checker.checked == CheckedWeights()
        assert not copies()


async def test_a_trainer_that_stops_or_asks_anew_leaves_nothing(tmp_path, copies):
    async with running(engines=2) as cluster, cluster.client() as client:
        stall(cluster)
        update = asyncio.create_task(client.update_weights(1, LARGE))
        await eventually(lambda: all(copying(cluster)))
        update.cancel()
        await asyncio.wait([update])
        live = await client.update_weights(1, folder(tmp_path / "one", 1.0))  # at once
        assert live.version == 1
        await eventually(lambda: not any(copying(cluster)))
        await asyncio.sleep(2 * wire.SPOOL_STALL_SECONDS)
        assert not copies()


@pytest.mark.parametrize("end", ["the buffer is killed", "the engine is killed", "the engine drains"])
async def test_whoever_ends_while_it_copies_leaves_nothing(copies, end):
    async with running(engines=2) as cluster, cluster.client(deltas=False) as client:
        stall(cluster)
        update = asyncio.create_task(client.update_weights(1, LARGE))
        await eventually(lambda: all(copying(cluster)))
        if end == "the buffer is killed":
            await cluster.kill("buffer")
            await cluster.start("buffer")
            assert (await update).version == 1  # it is sent all again
            await roll(client)
        else:
            await (cluster.kill("e1") if "killed" in end else cluster.drain("e1"))
            await eventually(lambda: copying(cluster)[1] is False)
            with pytest.raises(WeightsRefused, match="the trainer sent nothing"):
                await update
        await eventually(lambda: not any(copying(cluster)))
        assert not copies()


@pytest.mark.parametrize("full", ["at a part", "from the start"])
async def test_a_full_disk_refuses_the_update_by_name(copies, monkeypatch, full):
    async with running(engines=2) as cluster, cluster.client() as client:
        expected = await roll(client)

        async def fail(self, part):
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            if full == "at a part":
                patch.setattr(Copy, "write", fail)
            else:
                usage, there = type("usage", (), {"free": 10}), shutil.disk_usage

                def for_engines(path):  # streams in the spool have folders named v...
                    return there(path) if path.name.startswith("v") else usage

                patch.setattr(shutil, "disk_usage", for_engines)
            with pytest.raises(WeightsRefused, match=r"e\d: .*(No space left|do not fit into .*set TMPDIR)"):
                await client.update_weights(1, SMALL)
        await eventually(lambda: not any(copying(cluster)))
        assert not copies()
        assert await roll(client) == expected
        assert (await client.update_weights(1, SMALL)).version == 1


async def test_a_buffer_that_reads_nothing_for_a_while_is_asked_again(tmp_path):
    asked = []

    async def send(question):
        asked.append(question)
        if len(asked) == 1:
            raise Unreachable("peer reads nothing for 30 s")
        stage.arrived(wire.SpoolState(name="v1", size=4, have=4, folder=str(tmp_path), token="here"))

    stage = fetcher.WeightFetcher(send)
    (tmp_path / NOTES).write_text("here")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Buffer, "here", staticmethod(lambda state: True))
        assert await stage.folder(wire.SPOOL_SCHEME + "v1") == tmp_path
    assert len(asked) == 2
    stage.arrived(wire.SpoolState(name="v1", size=4, have=4))  # nobody waits for it any more


@pytest.mark.real_time
async def test_a_place_in_memory_of_another_size_is_not_read():
    stage = fetcher.WeightFetcher(None)
    stage.model_bytes = 100
    memory = '{"name":"v","session":"127.0.0.1:1","protocol":"tcp","pointer":1,"size":1000000000000}'
    with pytest.raises(InvalidField, match="the model's tensors have 100"):
        await stage.folder(f"mooncake:{memory}")


async def test_folders_lie_beneath_the_root(tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    settings = EngineConfig(backend="replay", kv_blocks=200, weights_root=str(root))
    async with running(engines=1, engine=settings) as cluster, cluster.client() as client:
        with pytest.raises(WeightsRefused, match=r"engine\.weights_root"):
            await client.update_weights(1, folder(tmp_path / "one", 1.0))
        assert (await client.update_weights(1, folder(root / "one", 1.0))).version == 1
        assert (await client.update_weights(2, SMALL)).version == 2
    missing = EngineConfig(backend="replay", weights_root=str(tmp_path / "missing"))
    with pytest.raises(ConfigError, match=r"engine\.weights_root = .*is not a folder"):
        async with running(engines=1, engine=missing):
            pass
