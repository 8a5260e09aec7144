"""Streams of weights that go from node to node, in virtual time: whatever happens on the way, the same weights."""

import asyncio
import contextlib
from collections import Counter

import numpy as np
import pytest
from cluster_harness import Cluster, roll
from msgspec.structs import replace
from virtual_time import PROCESS, VIRTUAL, eventually

from seer.client import WeightsRefused
from seer.client.tensor_stream import TensorStream
from seer.common import blobs, wire
from seer.common.blobs import checksum
from seer.common.config import EngineConfig
from seer.common.errors import InvalidField
from seer.services.buffer import conductor
from seer.services.buffer.weights.weights_machine import RETRY_SECONDS
from seer.services.engine.weights import holders, updater

pytestmark = VIRTUAL

PARTS, PART_BYTES = 24, 1024


class Nodes(Cluster):
    """Engines that reach each other, each on the node that `nodes` says; `sent` counts parts by sender."""

    def __init__(self, nodes, **settings):
        super().__init__(engine=EngineConfig(backend="replay", kv_blocks=200, max_num_seqs=16), **settings)
        self.nodes = nodes
        self.sent = Counter()

    def config(self, name):
        config = super().config(name)
        return replace(config, engine=replace(config.engine, weights_endpoint=f"tcp://{name}:0"))

    async def start(self, name):
        before = PROCESS.set(name)  # it registers before it runs
        await super().start(name)
        PROCESS.reset(before)
        server = self.services[name]
        if name == "buffer":
            self._count(name, server._engines.hub)
        elif name.startswith("e"):
            self._count(name, server._peers._hub)

    def _count(self, name, hub):
        reply = hub.reply

        async def counted(address, message):
            self.sent[name] += isinstance(message, wire.SpoolData)
            await reply(address, message)

        hub.reply = counted

    def copies(self):
        return [name for name in self.nodes if self.services[name]._updater.fetcher._copy is not None]


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch):
    """No engine is on the buffer's machine; which nodes engines are on is the process's own business."""
    monkeypatch.setattr(blobs.Asked, "here", staticmethod(lambda state: False))
    monkeypatch.setattr(wire, "SPOOL_BYTES", PART_BYTES)  # small parts: a stream of 24 is enough
    monkeypatch.setattr(conductor, "node_id", lambda: "buffer's")


@contextlib.asynccontextmanager
async def running(monkeypatch, nodes):
    """`nodes`: by engine, its node."""
    monkeypatch.setattr(updater, "node_id", lambda: nodes.get(PROCESS.get(), "none"))
    cluster = Nodes(nodes)
    try:
        for name in ("buffer", "context", "dgds", *nodes):
            await cluster.start(name)
            if name in nodes:
                await eventually(lambda name=name: name in cluster.services["buffer"].weights.admitted)
        yield cluster
    finally:
        await cluster.stop()


def apart(count):
    return {f"e{number}": f"n{number}" for number in range(count)}


def tensors(fill):
    return {"w": np.full(PARTS * PART_BYTES // 4, fill, dtype=np.float32)}


async def test_the_buffer_sends_a_stream_twice_whatever_the_number_of_nodes(monkeypatch):
    async with running(monkeypatch, apart(8)) as cluster, cluster.client() as client:
        live = await client.update_weights(1, tensors(1.0))
        assert (live.digest, live.quarantined) == (TensorStream(tensors(1.0)).digest(), {})
        parts = PARTS + 1  # the header makes one more
        assert cluster.sent["buffer"] == 2 * parts
        assert max(cluster.sent.values()) == 2 * parts
        assert sum(cluster.sent.values()) == 8 * parts
        await roll(client)
        assert not cluster.copies()


async def test_a_delta_goes_the_same_way_and_who_lacks_its_base_gets_the_whole(monkeypatch):
    async with running(monkeypatch, apart(7)) as cluster, cluster.client() as client:
        weights = tensors(1.0)
        await client.update_weights(1, weights)
        await cluster.services["e3"]._updater.fetcher._forget()
        for step, parts in ((2, 6 + PARTS + 1), (3, 7)):
            cluster.sent.clear()
            weights["w"][step] = step
            live = await client.update_weights(step, weights)
            assert (live.digest, live.quarantined) == (TensorStream(weights).digest(), {})
            assert sum(cluster.sent.values()) == parts
            assert step == 2 or cluster.sent["buffer"] == 2


async def test_engines_of_one_node_take_one_copy(monkeypatch):
    monkeypatch.setattr(holders.Holder, "here", staticmethod(lambda state: "seer-weights" in state.folder))
    nodes = dict.fromkeys(("e0", "e1", "e2"), "n0")
    async with running(monkeypatch, nodes) as cluster, cluster.client() as client:
        live = await client.update_weights(1, tensors(1.0))
        assert (live.digest, live.quarantined) == (TensorStream(tensors(1.0)).digest(), {})
        assert +cluster.sent == {"buffer": PARTS + 1}
        await roll(client)


@pytest.mark.parametrize("what", ["dies", "hangs", "sends damaged parts", "sends other bytes"])
async def test_a_holder_that_fails_is_replaced(monkeypatch, what):
    async with running(monkeypatch, apart(6)) as cluster, cluster.client() as client:
        broken = fail(cluster, what, ["e0"], after=5)
        update = asyncio.create_task(client.update_weights(1, tensors(1.0)))
        if what in ("dies", "hangs"):
            await broken.get()
            if what == "dies":
                await cluster.kill("e0")
            elif what == "hangs":
                asyncio.get_running_loop().freeze("e0")
        live = await update
        assert (live.digest, live.quarantined) == (TensorStream(tensors(1.0)).digest(), {})
        if what == "hangs":
            asyncio.get_running_loop().thaw("e0")
        admitted = cluster.services["buffer"].weights.admitted
        assert {"e1", "e2", "e3", "e4", "e5"} <= admitted
        assert not set(cluster.copies()) - {"e0"}
        await roll(client)


async def test_a_trainer_that_stalls_does_not_send_all_to_the_buffer(monkeypatch):
    async with running(monkeypatch, apart(6)) as cluster, cluster.client() as client:
        spool = cluster.services["buffer"]._spool
        put, left, late = spool.put, 10, []

        def stalling(reply, address, message, *trainer):
            nonlocal left
            left -= isinstance(message, wire.SpoolData)
            if left < 0 and isinstance(message, wire.SpoolData):
                late.append((reply, address, message))
            else:
                put(reply, address, message, *trainer)

        spool.put = stalling
        update = asyncio.create_task(client.update_weights(1, tensors(1.0)))
        await eventually(lambda: left < 0)
        await asyncio.sleep(wire.SPOOL_STALL_SECONDS - 5)
        spool.put = put
        for message in late:
            put(*message)
        live = await update
        assert live.quarantined == {}
        assert cluster.sent["buffer"] == 2 * (PARTS + 1)


async def join(cluster, *names):
    """Have engines join, each on a node of its own; return when they are admitted."""
    for name in names:
        cluster.nodes[name] = f"n{name}"
        await cluster.start(name)
    await eventually(lambda: set(names) <= cluster.services["buffer"].weights.admitted, 600.0)


async def lose_the_spool(cluster):
    """Restart the buffer, whose spool goes with it, and wait for its engines."""
    engines = set(cluster.services["buffer"].weights.admitted)
    await cluster.kill("buffer")
    await cluster.start("buffer")
    await eventually(lambda: engines == cluster.services["buffer"].weights.admitted)
    cluster.sent.clear()


@pytest.mark.parametrize("deltas", [True, False])
async def test_engines_that_join_later_copy_from_engines_and_not_from_the_buffer(monkeypatch, deltas):
    async with running(monkeypatch, apart(4)) as cluster, cluster.client(deltas=deltas) as client:
        await client.update_weights(1, tensors(1.0))
        expected = await roll(client)
        cluster.sent.clear()
        await join(cluster, "e5", "e6", "e7", "e8")
        assert sum(cluster.sent.values()) == 4 * (PARTS + 1)
        assert cluster.sent["buffer"] == 0
        assert max(cluster.sent.values()) <= 2 * (PARTS + 1)
        assert not cluster.copies()
        assert await roll(client) == expected


async def test_an_engine_that_joins_needs_no_spool_and_a_version_that_is_no_more_live_no_disk(monkeypatch):
    async with running(monkeypatch, apart(3)) as cluster, cluster.client() as client:
        await client.update_weights(1, tensors(1.0))
        await lose_the_spool(cluster)
        await join(cluster, "e8", "e9")
        assert cluster.sent["buffer"] == 0
        digests = {cluster.services[name]._updater.live.digest for name in cluster.nodes}
        assert digests == {TensorStream(tensors(1.0)).digest()}
        kept = {name: cluster.services[name]._updater.fetcher._kept.folder for name in cluster.nodes}
        await client.update_weights(2, tensors(2.0))
        assert not [folder for folder in kept.values() if folder.exists()]
        for name in cluster.nodes:
            assert len(cluster.services[name]._peers._copies) == 1


@pytest.mark.parametrize(
    "what", ["dies", "hangs", "sends damaged parts", "sends other bytes", "has other bytes", "has none"]
)
@pytest.mark.parametrize("spool", ["there", "lost"])
async def test_a_source_that_fails_costs_who_joins_only_time(monkeypatch, what, spool):
    async with running(monkeypatch, apart(4)) as cluster, cluster.client() as client:
        await client.update_weights(1, tensors(1.0))
        if spool == "lost":
            await lose_the_spool(cluster)
        copies = [cluster.services[name]._updater.fetcher._kept for name in cluster.nodes]
        if what == "has other bytes":
            for copy in copies[:3]:  # the last one may be asked third, once these are avoided
                with copy.file.open("r+b") as file:
                    file.seek(-4, 2)
                    file.write(b"\7\7\7\7")
        elif what == "has none":
            for name in ("e0", "e1", "e2"):
                await cluster.services[name]._updater.fetcher._forget()
        else:
            broken = fail(cluster, what, ["e0", "e1"], after=PARTS // 2)  # whom it asks first
        began = asyncio.get_running_loop().time()
        joining = asyncio.create_task(join(cluster, "e9"))
        if what in ("dies", "hangs"):
            name = await broken.get()
            if what == "dies":
                await cluster.kill(name)
            else:
                asyncio.get_running_loop().freeze(name)
        await joining
        if what == "sends other bytes":  # who joins asks others at once
            assert asyncio.get_running_loop().time() - began < RETRY_SECONDS
        if what == "hangs":
            asyncio.get_running_loop().thaw(name)
        digest = TensorStream(tensors(1.0)).digest()
        assert cluster.services["e9"]._updater.live.digest == digest
        assert (cluster.sent["buffer"] > 0) <= (spool == "there")
        assert not cluster.copies()
        await roll(client)


def fail(cluster, what, names, after):
    """Have engines fail, each once it has given so many parts; return a queue of those that break off."""
    broken, reads = asyncio.Queue(), Counter()
    for name in names:
        readers = cluster.services[name]._peers.readers

        async def failing(reply, address, copy, offset, name=name, before=readers._read):
            reads[name] += 1
            if reads[name] <= after:
                await before(reply, address, copy, offset)
            elif what == "sends damaged parts":
                part = await copy.part(offset, asyncio.Semaphore())
                await reply(address, replace(part, checksum=part.checksum ^ 1))
            elif what == "sends other bytes":
                part = await copy.part(offset, asyncio.Semaphore())
                part.data = part.data ^ 1
                await reply(address, replace(part, checksum=checksum(part.data)))
            else:
                broken.put_nowait(name)

        readers._read = failing
    return broken


async def test_an_engine_that_dropped_its_values_loads_its_own_copy(monkeypatch):
    async with running(monkeypatch, apart(2)) as cluster, cluster.client() as client:
        await client.update_weights(1, tensors(1.0))
        expected = await roll(client)
        await lose_the_spool(cluster)
        await client.sleep(level=2)
        await client.wake()
        await eventually(lambda: {"e0", "e1"} <= cluster.services["buffer"].weights.admitted)
        assert not +cluster.sent
        assert await roll(client) == expected
        await join(cluster, "e9")


async def test_an_update_that_is_refused_leaves_no_copy_at_any_node(monkeypatch):
    async with running(monkeypatch, apart(5)) as cluster, cluster.client() as client:
        cluster.services["e4"]._updater.fetcher.model_bytes = 10**9
        with pytest.raises(WeightsRefused, match="the model's tensors have 1000000000"):
            await client.update_weights(1, tensors(1.0))
        await eventually(lambda: not cluster.copies())
        cluster.services["e4"]._updater.fetcher.model_bytes = 0
        assert (await client.update_weights(1, tensors(1.0))).quarantined == {}


async def test_a_holder_out_of_reach_costs_one_update_some_seconds_and_the_next_ones_none(monkeypatch):
    async with running(monkeypatch, apart(4)) as cluster, cluster.client() as client:
        for name in ("e2", "e3"):
            peers = cluster.services[name]._peers
            connect = peers.connect
            peers.connect = lambda endpoint, connect=connect: connect("tcp://nobody:1")
        loop = asyncio.get_running_loop()
        seconds = []
        for version in (1, 2):
            began = loop.time()
            assert (await client.update_weights(version, tensors(version))).quarantined == {}
            seconds.append(loop.time() - began)
        assert seconds[0] >= holders.HOLDER_SECONDS
        assert seconds[1] < 1.0


async def test_a_stream_that_is_no_more_is_not_awaited_from_a_holder_that_never_begins(monkeypatch):
    async with running(monkeypatch, apart(3)) as cluster, cluster.client() as client:
        await client.update_weights(1, tensors(1.0))
        await client.update_weights(2, tensors(2.0))
        source = cluster.services["e0"]._updater.live.source.replace("v2", "v0")
        stage = cluster.services["e2"]._updater.fetcher
        state = holders.Buffer.state

        async def as_it_was(buffer):
            monkeypatch.setattr(holders.Buffer, "state", state)
            buffer.size, buffer.had = 100, 0
            return wire.SpoolState(name=buffer.name, size=100, have=0)

        monkeypatch.setattr(holders.Buffer, "state", as_it_was)
        with pytest.raises(InvalidField, match="is not in this buffer's spool"):
            await stage.folder(source, [cluster.services["e0"]._weights_endpoint])
