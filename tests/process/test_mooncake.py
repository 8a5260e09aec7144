"""Weights that engines read from a trainer's memory, by the real Mooncake over TCP; no vLLM.

`test_the_whole_way` has the trainer in this process and a reader in each engine's; the other tests
read from a trainer in another process, which may die, stop, or change its mind.
"""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import msgspec
import numpy as np
import pytest
from cluster_harness import folder, roll, running

from seer.client import InvalidField, MooncakeSource, WeightsRefused
from seer.client.tensor_stream import TensorStream
from seer.common.weights.mooncake import RegisteredMemory, open_engine
from seer.services.engine.weights import fetcher, mooncake_reader
from seer.services.engine.weights.fetcher import WeightFetcher
from seer.services.engine.weights.manifest import read_manifest
from seer.services.engine.weights.mooncake_reader import TrainerMemory

pytest.importorskip("mooncake.engine", reason="needs Mooncake and libibverbs1", exc_type=ImportError)

TRAINER = """
import json, sys
import numpy as np
from seer.client import MooncakeSource

source = MooncakeSource({"w": np.arange(int(sys.argv[1]), dtype=np.float32)})
print(json.dumps(source.offer("first")), flush=True)
for line in sys.stdin:
    source.tensors["w"] += 1
    print(json.dumps(source.offer(line.strip())), flush=True)
"""

ELEMENTS = 3 * mooncake_reader.PART_BYTES // 4 // 2  # one part and a half, and a header


class Trainer:
    def __init__(self, elements=ELEMENTS):
        self.process = subprocess.Popen(
            [sys.executable, "-c", TRAINER, str(elements)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
        )  # fmt: skip
        self.source, self.digest = json.loads(self.process.stdout.readline())

    def offer(self, name):
        self.process.stdin.write(name + "\n")
        return json.loads(self.process.stdout.readline())


@contextlib.contextmanager
def trainer(**options):
    started = Trainer(**options)
    try:
        yield started
    finally:
        started.process.kill()
        started.process.wait(10)


@pytest.fixture
def stage():
    async def send(message):
        raise AssertionError("the buffer has no part in this")

    made = WeightFetcher(send)
    yield made
    if made._copy is not None:
        made._copy._temporary.cleanup()


async def test_another_process_reads_the_very_bytes(stage):
    with trainer() as other:
        expected = {"w": np.arange(ELEMENTS, dtype=np.float32)}
        assert other.digest == TensorStream(expected).digest()
        copied = await stage.folder(other.source)
        assert read_manifest(copied).digest == other.digest
        assert await stage.folder(other.source) == copied
        source, digest = other.offer("second")  # into the same memory
        assert digest != other.digest
        assert read_manifest(await stage.folder(source)).digest == digest
        assert not copied.exists()
        # What was offered before is no more: whoever still asks for it learns of it by the digest.
        assert read_manifest(await stage.folder(other.source)).digest == digest


async def test_a_trainer_that_died_is_named(stage):
    with trainer(elements=10) as other:
        other.process.kill()
        other.process.wait(10)
        session = json.loads(other.source.removeprefix("mooncake:"))["session"]
        with pytest.raises(InvalidField, match=f"the trainer at {session} sent no bytes 0 to"):
            await stage.folder(other.source)
    assert stage._copy is None


def test_a_trainer_that_dies_while_it_is_read_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(mooncake_reader, "PART_BYTES", 4096)
    monkeypatch.setattr(mooncake_reader.signal, "alarm", lambda seconds: None)
    written, write = [], os.write
    with trainer(elements=100_000) as other:

        def killing(opened, data):
            written.append(len(data))
            if len(written) == 6:
                other.process.kill()
                other.process.wait(10)
            return write(opened, data)

        monkeypatch.setattr(mooncake_reader.os, "write", killing)
        memory = msgspec.json.decode(other.source.removeprefix("mooncake:"), type=RegisteredMemory)
        with pytest.raises(OSError, match=f"the trainer at {memory.session} sent no bytes"):
            mooncake_reader.read(open_engine("127.0.0.1", "tcp"), memory, tmp_path / "copy")
    assert written == [4096, len(mooncake_reader._PART)] * 3


async def test_memory_that_was_not_offered_is_out_of_reach(stage):
    with trainer(elements=10) as other:
        memory = json.loads(other.source.removeprefix("mooncake:"))
        for beyond in ({"size": memory["size"] + 1}, {"pointer": memory["pointer"] - 1}):
            with pytest.raises(InvalidField, match="sent no bytes"):
                await stage.folder("mooncake:" + json.dumps(memory | beyond))


async def test_a_trainer_that_was_stopped_is_not_waited_for_ever(stage, monkeypatch):
    monkeypatch.setattr(mooncake_reader, "SILENCE_SECONDS", 3.0)
    with trainer(elements=10) as other:
        other.process.send_signal(signal.SIGSTOP)
        before = time.monotonic()
        with pytest.raises(InvalidField, match=r"sent nothing for 3 s"):
            await stage.folder(other.source)
        assert time.monotonic() - before < 60  # Mooncake's own call does not return


async def test_a_reader_that_crashes_is_an_error(stage, monkeypatch):
    monkeypatch.setattr(mooncake_reader, "__name__", "seer.no_such_module")
    memory = RegisteredMemory(name="v1", session="127.0.0.1:1", protocol="tcp", pointer=1, size=1)
    with pytest.raises(InvalidField, match="the process that read the trainer's memory died"):
        await stage.folder("mooncake:" + msgspec.json.encode(memory).decode())


@pytest.mark.parametrize(
    "text", ["", "{}", '{"name": 1}', '{"name":"a","session":"x:1","protocol":"ib","pointer":1,"size":1}']
)
async def test_what_is_no_place_in_memory_is_refused(stage, text):
    with pytest.raises(InvalidField, match="is not an address in a trainer's memory"):
        await stage.folder("mooncake:" + text)


async def test_the_whole_way(tmp_path):
    arrays = {"w": np.full((2, 3), 1.0, dtype=np.float32)}
    source = MooncakeSource(arrays)
    async with running(engines=2) as cluster, cluster.client() as client:
        live = await client.update_weights(1, folder(tmp_path / "one", 1.0))
        expected, _ = await roll(client)
        held = await client.update_weights(2, source)
        assert held.digest == live.digest
        assert await roll(client) == (expected, (2, live.digest))
        pointer = source._room.ctypes.data
        arrays["w"] += 1
        changed = await client.update_weights(3, source)
        assert changed.digest == TensorStream(arrays).digest() != live.digest
        assert source._room.ctypes.data == pointer
        assert all(cluster.services[name]._updater.fetcher._copy is None for name in ("e0", "e1"))

        arrays["w"] += 1  # the live version is what was laid out, and there for who comes later
        await cluster.start("e2")
        await _until(lambda: "e2" in cluster.services["buffer"].weights.admitted)

        with pytest.raises(InvalidField, match=f"the tensors have digest {TensorStream(arrays).digest()}"):
            await client.update_weights(4, source, digest=live.digest)
        # That copy was laid out all the same: version 3 can be had no more.
        await cluster.start("e3")
        weights = cluster.services["buffer"].weights
        await _until(lambda: "e3" in weights.quarantined)
        assert f"not {changed.digest}" in weights.quarantined["e3"]
        assert (await client.update_weights(4, source)).version == 4
        assert weights.admitted == {"e0", "e1", "e2", "e3"}
        source.close()
        await cluster.start("e4")
        await _until(lambda: "e4" in weights.quarantined)
        assert "sent no bytes" in weights.quarantined["e4"]
        assert (await roll(client))[1][0] == 4


async def test_bytes_damaged_on_the_way_change_nothing(monkeypatch):
    class Damaging(TrainerMemory):
        async def fetch(self, blob):
            await super().fetch(blob)
            with blob.file.open("r+b") as opened:
                opened.seek(-1, os.SEEK_END)
                opened.write(b"\x3e")

    monkeypatch.setitem(fetcher.SOURCES, "mooncake:", Damaging)
    async with running(engines=1) as cluster, cluster.client() as client:
        expected = await roll(client)
        with pytest.raises(WeightsRefused, match=r"e0: reads weights with digest [\w-]+, not"):
            await client.update_weights(1, MooncakeSource({"w": np.ones(5, np.float32)}))
        assert await roll(client) == expected


async def test_a_source_that_is_gone_changes_nothing(monkeypatch):
    source = MooncakeSource({"w": np.ones(5, np.float32)})
    offer = source.offer

    def closing(*given):
        try:
            return offer(*given)
        finally:
            source.close()

    async with running(engines=2) as cluster, cluster.client() as client:
        expected = await roll(client)
        monkeypatch.setattr(source, "offer", closing)
        with pytest.raises(WeightsRefused, match=r"e[01]: source = .*sent no bytes"):
            await client.update_weights(1, source)
        assert await roll(client) == expected
        monkeypatch.undo()
        assert (await client.update_weights(1, source)).version == 1


async def _until(true):
    async with asyncio.timeout(60):
        while not true():
            await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"protocol": "ib"}, "choose tcp or rdma"),
        ({"protocol": "rdma", "device": "none9"}, "no RDMA device none9"),
    ],
)
def test_what_cannot_be_had_is_said(options, said):
    with pytest.raises(InvalidField, match=said):
        MooncakeSource({"w": np.ones(5, np.float32)}, **options).offer("x")
