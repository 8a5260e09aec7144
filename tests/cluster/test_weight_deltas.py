"""SentWeights of weights, in virtual time: the same weights as by whole streams, whatever goes wrong on the way."""

import asyncio
from collections import Counter

import numpy as np
import pytest
from cluster_harness import leave_no_room_for_deltas, roll, running
from virtual_time import VIRTUAL, eventually

from seer.client import InvalidField, SentWeights, WeightsRefused, sent_weights
from seer.client.tensor_stream import TensorStream
from seer.common import wire
from seer.common.config import BufferConfig
from seer.services.buffer.weights import spool_delta
from seer.services.engine.weights import delta_source
from seer.services.engine.weights.holders import Copy

pytestmark = VIRTUAL

SIZE = 100_000
FEW = 0.04
"""Bytes of a delta are at most this share of the whole."""


def first(size=SIZE):
    return {
        "w": np.random.default_rng(0).integers(0, 2**16, size, np.uint16).view(np.float16),
        "still": np.arange(1000, dtype=np.float16),
    }


def stepped(tensors, step):
    """Change one element in a hundred, as a step of training does; their exponents stay finite."""
    at = np.random.default_rng(step).integers(0, len(tensors["w"]), len(tensors["w"]) // 100)
    tensors["w"].view(np.uint16)[at] ^= 1
    return tensors


@pytest.fixture(autouse=True)
def any_bits(monkeypatch):
    """Random halves are NaN at times, which engines would refuse."""
    monkeypatch.setattr("seer.common.weights.digest.is_finite", lambda data, dtype: True)


def counting(cluster):
    """Count bytes that the trainer sent to the spool, and bytes that it sent to engines."""
    server, counts = cluster.services["buffer"], Counter()
    put, reply = server._spool.put, server._engines.hub.reply

    def counted(answer, address, message, *trainer):
        counts["in"] += len(message.data) if isinstance(message, wire.SpoolData) else 0
        put(answer, address, message, *trainer)

    async def replied(address, message):
        counts["out"] += len(message.data) if isinstance(message, wire.SpoolData) else 0
        await reply(address, message)

    server._spool.put, server._engines.hub.reply = counted, replied
    return counts


async def test_fifty_deltas_give_the_weights_and_tokens_of_one_whole_stream(machines):
    tensors = first()
    async with running(engines=2) as cluster, cluster.client() as client:
        await client.update_weights(1, tensors)
        counts = counting(cluster)
        for step in range(2, 52):
            live = await client.update_weights(step, stepped(tensors, step))
            assert (live.digest, live.quarantined) == (TensorStream(tensors).digest(), {})
            await asyncio.sleep(0.1)
        whole = TensorStream(tensors).size
        assert counts["in"] < 50 * FEW * whole
        assert counts["out"] < (0 if machines == "same machine" else 2 * 50 * FEW * whole) + 1
        tokens = await roll(client)
        spool = cluster.services["buffer"]._spool
        assert len(spool._streams) == 2
    async with running(engines=2) as cluster, cluster.client(deltas=False) as client:
        assert (await client.update_weights(51, tensors)).digest == live.digest
        assert await roll(client) == tokens


async def test_a_lost_base_brings_the_whole_stream(machines):
    tensors = first()
    async with running(engines=2) as cluster, cluster.client() as client:
        await client.update_weights(1, tensors)
        await cluster.kill("buffer")  # its spool was temporary
        await cluster.start("buffer")
        counts = counting(cluster)
        live = await client.update_weights(2, stepped(tensors, 2))
        assert live.digest == TensorStream(tensors).digest()
        assert counts["in"] >= TensorStream(tensors).size
        counts.clear()
        assert (await client.update_weights(3, stepped(tensors, 3))).digest == TensorStream(tensors).digest()
        assert counts["in"] < FEW * TensorStream(tensors).size


async def test_a_buffer_that_ends_amid_a_delta_finds_its_base_again(tmp_path, machines):
    tensors, settings = first(), BufferConfig(chunk_size=32, spool=str(tmp_path / "spool"))
    async with running(engines=2, buffer=settings) as cluster, cluster.client() as client:
        await client.update_weights(1, tensors)
        cluster.services["buffer"]._spool.put = lambda *message: None
        update = asyncio.create_task(client.update_weights(2, stepped(tensors, 2)))
        await asyncio.sleep(1)
        await cluster.kill("buffer")
        await cluster.start("buffer")
        counts = counting(cluster)
        assert (await update).digest == TensorStream(tensors).digest()
        assert counts["in"] < FEW * TensorStream(tensors).size
        await cluster.kill("buffer")
        await cluster.start("buffer")
        expected = await roll(client)
        await cluster.start("e2")  # it lacks the base, and gets the result
        server = cluster.services["buffer"]
        await eventually(lambda: server.weights.admitted == {"e0", "e1", "e2"})
        for name in ("e0", "e1"):
            await cluster.kill(name)
        assert await roll(client) == expected


async def test_an_engine_that_comes_later_or_anew_gets_the_whole(machines):
    tensors = first()
    async with running(engines=2) as cluster, cluster.client() as client:
        await client.update_weights(1, tensors)
        await client.update_weights(2, stepped(tensors, 2))
        await cluster.kill("e1")
        await cluster.start("e1")
        await cluster.start("e2")
        server = cluster.services["buffer"]
        await eventually(lambda: server.weights.admitted == {"e0", "e1", "e2"})
        live = await client.update_weights(3, stepped(tensors, 3))
        assert (live.digest, live.quarantined) == (TensorStream(tensors).digest(), {})
        counts = counting(cluster)
        live = await client.update_weights(4, stepped(tensors, 4))
        assert (live.digest, live.quarantined) == (TensorStream(tensors).digest(), {})
        assert counts["out"] < 3 * FEW * TensorStream(tensors).size


@pytest.mark.parametrize("where", ["in the spool", "on an engine's disk"])
async def test_a_flipped_bit_of_the_base_is_noticed_and_healed(request, where):
    if "engine" in where:
        request.getfixturevalue("elsewhere")
    tensors = first()
    async with running(engines=2) as cluster, cluster.client() as client:
        await client.update_weights(1, tensors)
        (live,) = cluster.services["buffer"]._spool._streams.values()
        kept = cluster.services["e1"]._updater.fetcher._kept
        flip(live.file if where == "in the spool" else kept.file)
        counts = counting(cluster)
        live = await client.update_weights(2, stepped(tensors, 2))
        whole = TensorStream(tensors)
        assert (live.digest, live.quarantined) == (whole.digest(), {})
        # The trainer sends all for the one, the buffer for the other.
        assert (counts["in"] > whole.size) is (where == "in the spool")
        assert (counts["out"] > whole.size) is (where != "in the spool")
        counts.clear()
        live = await client.update_weights(3, stepped(tensors, 3))
        assert live.digest == TensorStream(tensors).digest()
        assert sum(counts.values()) < 0.1 * whole.size


def flip(file):
    data = bytearray(file.read_bytes())
    data[5000] ^= 4
    file.unlink()
    file.write_bytes(data)


async def test_a_bit_that_flips_on_the_way_is_sent_again(machines):
    tensors = first()
    async with running(engines=1) as cluster, cluster.client() as client:
        await client.update_weights(1, tensors)
        spool, flipped = cluster.services["buffer"]._spool, []
        put = spool.put

        def damaging(reply, address, message, *trainer):
            if isinstance(message, wire.SpoolData) and not flipped:
                message.data = message.data.copy()
                message.data[len(message.data) // 2] ^= 1
                flipped.append(message.offset)
            put(reply, address, message, *trainer)

        spool.put = damaging
        assert (await client.update_weights(2, stepped(tensors, 2))).digest == TensorStream(tensors).digest()
        assert flipped


@pytest.mark.parametrize(
    "fault", ["another base", "a damaged part", "a disk that fails", "a delta without room"]
)
async def test_a_delta_that_cannot_be_applied_is_replaced_by_the_whole(monkeypatch, machines, fault):
    tensors = first()
    async with running(engines=2) as cluster, cluster.client() as client:
        await client.update_weights(1, tensors)
        break_next(monkeypatch, cluster, fault)
        counts = counting(cluster)
        live = await client.update_weights(2, stepped(tensors, 2))
        assert (live.digest, live.quarantined) == (TensorStream(tensors).digest(), {})
        assert counts["in"] >= TensorStream(tensors).size
        monkeypatch.undo()
        await roll(client)


def break_next(monkeypatch, cluster, fault):
    made = sent_weights._stream_of

    def failing(*args):
        raise OSError("the disk failed")

    if fault == "another base":
        monkeypatch.setattr(
            sent_weights, "_stream_of", lambda stream, found, base: made(stream, found, "v9-b")
        )
    elif fault == "a damaged part":
        monkeypatch.setattr(
            sent_weights, "_stream_of",
            lambda *args: TensorStream({"gaps:w": np.zeros(1, np.uint8), "values:w": np.zeros(1, np.uint16)},
                                       {"base": args[2]}),
        )  # fmt: skip
    elif fault == "a disk that fails":
        monkeypatch.setattr(spool_delta, "apply", failing)
    else:
        leave_no_room_for_deltas(cluster)


@pytest.mark.parametrize("fault", ["apply fails", "no room"])
async def test_an_engine_that_cannot_apply_a_delta_fetches_the_whole(monkeypatch, elsewhere, fault):
    tensors = first()
    async with running(engines=2) as cluster, cluster.client() as client:
        await client.update_weights(1, tensors)
        break_engines(monkeypatch, fault)
        counts = counting(cluster)
        live = await client.update_weights(2, stepped(tensors, 2))
        assert (live.digest, live.quarantined) == (TensorStream(tensors).digest(), {})
        assert counts["in"] < FEW * TensorStream(tensors).size
        assert counts["out"] >= 2 * TensorStream(tensors).size


def break_engines(monkeypatch, fault):
    def failing(*args):
        raise OSError("the disk failed")

    if fault == "apply fails":
        monkeypatch.setattr(delta_source, "apply", failing)
        return
    begin, there = Copy.begin, []

    def begun(self, fix):
        if self not in there:
            there.append(self)
            raise ValueError(f"{self.size} bytes do not fit: {fix}")
        begin(self, fix)

    monkeypatch.setattr(Copy, "begin", begun)


async def test_another_trainer_in_between(machines):
    tensors = first()
    async with running(engines=2) as cluster, cluster.client() as client, cluster.client() as other:
        await client.update_weights(1, tensors)
        await other.update_weights(2, {name: each.copy() for name, each in tensors.items()})
        await asyncio.sleep(5)
        counts = counting(cluster)
        assert (await client.update_weights(3, stepped(tensors, 3))).digest == TensorStream(tensors).digest()
        assert counts["in"] == TensorStream(tensors).size
        counts.clear()
        assert (await client.update_weights(4, stepped(tensors, 4))).digest == TensorStream(tensors).digest()
        assert counts["in"] < FEW * TensorStream(tensors).size


async def test_a_later_client_goes_on_from_what_an_earlier_one_sent():
    tensors, kept = first(), SentWeights()
    async with running(engines=1) as cluster:
        for step in range(1, 4):
            async with cluster.client(deltas=kept) as client:
                live = await client.update_weights(step, stepped(tensors, step))
                assert live.digest == TensorStream(tensors).digest()
                assert (kept.last.sent < FEW * kept.last.of) is (step > 1)


async def test_a_base_that_the_trainer_names(machines, capsys):
    rng = np.random.default_rng(1)
    tensors = first()
    async with running(engines=1) as cluster, cluster.client() as client:
        counts = counting(cluster)
        await client.update_weights(1, tensors, base=0)  # nothing is there: all is sent
        tensors["w"].view(np.uint16)[:] ^= rng.integers(1, 2, SIZE, np.uint16)
        counts.clear()
        assert "sent" not in capsys.readouterr().err
        await client.update_weights(2, tensors)
        assert "does not pay" in client.deltas.last.why
        await client.update_weights(3, stepped(tensors, 3), base=2)
        assert "no earlier tensors" in client.deltas.last.why
        assert (
            capsys.readouterr().err.count("sent whole") == 1
        )  # not with each update: trainers show progress
        await client.update_weights(5, stepped(tensors, 5), base=4)
        assert "base 4 is not what this client sent last, version 3" in client.deltas.last.why
        counts.clear()
        await client.update_weights(6, stepped(tensors, 6), base=5)
        assert counts["in"] < FEW * TensorStream(tensors).size
        for base in (6, 7, -1):
            with pytest.raises(InvalidField, match="base"):
                await client.update_weights(6, tensors, base=base)
        with pytest.raises(InvalidField, match="no version is before 0"):
            await client.update_weights(0, tensors, base=0)
        with pytest.raises(InvalidField, match="only tensors"):
            await client.update_weights(7, "/folder", base=6)


async def test_a_refused_update_leaves_the_base(machines):
    tensors = first()
    async with running(engines=1) as cluster, cluster.client() as client:
        await client.update_weights(5, tensors)
        with pytest.raises(WeightsRefused, match="must be above"):
            await client.update_weights(4, stepped(tensors, 1))
        counts = counting(cluster)
        live = await client.update_weights(6, stepped(tensors, 2))
        assert live.digest == TensorStream(tensors).digest()
        assert counts["in"] < 2 * FEW * TensorStream(tensors).size


async def test_a_trainer_that_dies_amid_a_delta_changes_nothing(machines):
    tensors = first()
    async with running(engines=2) as cluster:
        async with cluster.client() as client:
            await client.update_weights(1, tensors)
            expected = await roll(client)
            server = cluster.services["buffer"]
            put = server._spool.put

            def cut(reply, address, message, *trainer):
                if not isinstance(message, wire.SpoolData):
                    put(reply, address, message, *trainer)

            server._spool.put = cut
            update = asyncio.create_task(client.update_weights(2, stepped(tensors, 2)))
            await eventually(lambda: len(server._spool._streams) == 3)
            update.cancel()
            await asyncio.wait([update])
        server._spool.put = put
        await eventually(lambda: not server.weights.updating)
        await eventually(lambda: len(server._spool._streams) == 1)
        async with cluster.client() as client:
            assert await roll(client) == expected
