"""What an engine does for a buffer that changes under it, and with weights; a buffer played by the test."""

import asyncio

import msgspec
import numpy as np
from cluster_harness import folder
from engine_system import REPLAY, Buffer, engine
from msgspec import structs
from virtual_time import VIRTUAL, eventually

from seer.client.tensor_stream import TensorStream
from seer.common import wire
from seer.common.config import Config, ReplayConfig, SharedConfig
from seer.common.errors import EngineBroken, EngineError, Unreachable
from seer.common.sleep import SleepState
from seer.common.types import SamplingParams
from seer.common.weights.in_place import PLAN, Bucket, Plan, PlannedTensor, SharedFile
from seer.services.engine.backend import Chunk
from seer.services.engine.replay.backend import ReplayBackend
from seer.services.engine.weights.checker import CheckedWeights
from seer.services.engine.weights.manifest import read_manifest

pytestmark = VIRTUAL

AWAKE, KV_ASLEEP, ASLEEP = SleepState


class Loading(ReplayBackend):
    """Notes what is loaded, with what happens meanwhile, and when it is put to sleep; fails while `broken`."""

    def __init__(self):
        super().__init__(REPLAY, Config().shared)
        self.loaded, self.rests, self.broken, self.meanwhile = [], [], False, lambda: None
        self.received = []
        self.laid_out = []

    def lay_out_weights(self, folder, digest):
        self.laid_out.append((folder, digest))

    def receive_weights(self, folder, engine, digest):
        self.received.append((folder, engine, digest))
        if self.broken:
            raise EngineBroken("it hangs")

    def load_weights(self, folder, digest, base=None):
        if self.broken:
            raise RuntimeError("device lost")
        self.loaded.append((folder, digest))
        self.meanwhile()

    def sleep(self, state, level):
        self.rests.append(state)


def load(version, source, digest=None):
    return wire.LoadWeights(
        version=version, digest=digest or read_manifest(source).digest, source=str(source)
    )


def prepare(version, source):
    return wire.PrepareWeights(version=version, source=str(source))


async def restarted(buffer, network, shared=None):
    await buffer.kill()
    reborn = Buffer(network, incarnation=2, shared=shared)
    await reborn.start()
    await eventually(lambda: reborn.peer is not None)
    return reborn


async def stuck(message):
    raise Unreachable("stuck")


def kinds(buffer):
    return [type(message) for message in buffer.said]


async def test_nothing_meant_for_a_buffer_that_is_gone_reaches_its_successor():
    async with engine() as (buffer, server, _, network):
        real = server._buffer.send
        server._buffer.send = stuck
        await buffer.run(0, new=5)
        await asyncio.sleep(1)  # its result is under way; what comes now waits behind it
        await buffer.run(1, new=5)
        await buffer.run(2, prompt_len=0)
        await buffer.send(prepare(1, "/nowhere"))
        await asyncio.sleep(1)
        reborn = await restarted(buffer, network)
        await asyncio.sleep(1)
        server._buffer.send = real
        await asyncio.sleep(10)
        assert (kinds(reborn), reborn.first) == ([wire.Register], wire.Register)
        await reborn.kill()


async def test_an_engine_that_leaves_sends_what_the_buffer_had_not_taken_yet():
    async with engine() as (buffer, server, running, _):
        real, server._buffer.send = server._buffer.send, stuck
        await buffer.run(new=5)
        await asyncio.sleep(1)
        server.drain()
        server._buffer.send = real
        await running
        await asyncio.sleep(1)
        assert kinds(buffer) == [wire.Register, wire.ChunksDone, wire.Goodbye]
        assert set(buffer.results()) == {("0", 1)}


async def test_orders_of_a_buffer_that_is_gone_are_neither_answered_nor_begun(tmp_path):
    model = folder(tmp_path / "model", 1.0)
    async with engine(backend=Loading()) as (buffer, server, _, network):
        staged, gate = server._updater.fetcher.folder, asyncio.Event()

        async def slow(source, *_):
            await gate.wait()
            return await staged(source)

        server._updater.fetcher.folder = slow
        await buffer.send(load(1, model))
        await buffer.send(wire.Sleep(asleep=True))
        await asyncio.sleep(1)
        reborn = await restarted(buffer, network)
        await eventually(lambda: bool(reborn.said))
        gate.set()
        await asyncio.sleep(10)
        # What was under way ends before it changes anything: the successor counts on what it heard.
        assert kinds(reborn) == [wire.Register]
        assert [(said.weight_version, said.sleeping) for said in reborn.said] == [(0, [])]
        assert server._driver._backend.rests == []
        await reborn.kill()


async def test_a_load_that_a_gone_buffer_began_is_told_to_its_successor(tmp_path):
    model = folder(tmp_path / "model", 1.0)
    async with engine(backend=Loading()) as (buffer, server, _, network):
        gate = asyncio.Event()

        async def slow(*_):
            await gate.wait()

        server._driver.load_weights = slow
        await buffer.send(load(1, model))
        await asyncio.sleep(1)
        reborn = await restarted(buffer, network)
        await eventually(lambda: bool(reborn.said))
        gate.set()
        await asyncio.sleep(10)
        assert kinds(reborn) == [wire.Register] * 2
        assert [said.weight_version for said in reborn.said] == [-1, 1]
        await reborn.kill()


async def test_no_chunk_starts_in_an_engine_that_goes_to_sleep_for_a_buffer_that_is_gone():
    async with engine(backend=Loading()) as (buffer, server, _, network):
        real, gate = server._driver.sleep, asyncio.Event()

        async def slow(state, level):
            await gate.wait()
            await real(state, level)

        server._driver.sleep = slow
        await buffer.send(wire.Sleep(asleep=True, level=2))
        await asyncio.sleep(1)
        reborn = await restarted(buffer, network)
        await eventually(lambda: bool(reborn.said))
        assert (reborn.said[0].sleeping, reborn.said[0].dropped_version) == (["kv_cache", "weights"], 0)
        await reborn.run()
        await eventually(lambda: bool(reborn.heard(wire.ChunkFailed)))
        assert "it sleeps" in reborn.heard(wire.ChunkFailed)[0].message
        gate.set()
        await asyncio.sleep(1)
        assert server._driver._backend.rests == [ASLEEP]
        await reborn.kill()


async def test_no_chunk_runs_while_weights_are_loaded_for_a_buffer_that_is_gone(tmp_path):
    model, backend = folder(tmp_path / "model", 1.0), Loading()
    async with engine(backend=backend) as (buffer, server, _, network):
        gate = asyncio.Event()

        async def slow(*_):
            await gate.wait()

        server._updater._laid_out = CheckedWeights("another")
        server._driver.lay_out_weights = slow
        await buffer.send(load(1, model))
        await asyncio.sleep(1)
        reborn = await restarted(buffer, network)
        await eventually(lambda: bool(reborn.said))
        await reborn.run(new=50)
        await eventually(lambda: bool(server.running))
        gate.set()
        await eventually(lambda: bool(reborn.results()))
        assert (backend.loaded, server._updater.live.version) == ([], 0)
        await reborn.kill()


async def test_answers_come_in_the_order_of_their_questions():
    async with engine(backend=Loading()) as (buffer, server, *_):
        real, gate = server._buffer.send, asyncio.Event()

        async def held(message):
            await gate.wait()
            await real(message)

        server._buffer.send = held
        for asleep in (True, False, True, True):
            await buffer.send(wire.Sleep(asleep=asleep))
        await asyncio.sleep(1)
        gate.set()
        await eventually(lambda: len(buffer.heard(wire.Slept)) == 4)
        assert [said.asleep for said in buffer.heard(wire.Slept)] == [True, False, True, True]
        assert server._driver._backend.rests == [ASLEEP, AWAKE, ASLEEP]


async def test_after_a_failed_load_nothing_runs_until_another_succeeds(tmp_path):
    model = folder(tmp_path / "model", 1.0)
    backend = Loading()
    async with engine(backend=backend) as (buffer, _, _, network):
        backend.broken = True
        await buffer.send(load(1, model))
        await eventually(lambda: bool(buffer.heard(wire.WeightsLoaded)))
        assert "device lost" in buffer.heard(wire.WeightsLoaded)[0].problem
        await buffer.run()
        await eventually(lambda: bool(buffer.heard(wire.ChunkFailed)))
        assert not buffer.heard(wire.ChunkFailed)[0].fatal
        reborn = await restarted(buffer, network)
        await eventually(lambda: bool(reborn.said))
        assert reborn.said[0].weight_version < 0
        backend.broken = False
        await reborn.send(load(2, model))
        await reborn.run()
        await asyncio.sleep(0)
        await eventually(lambda: bool(reborn.heard(wire.WeightsLoaded)))
        await reborn.run(attempt=2)
        await eventually(lambda: ("0", 2) in reborn.results())
        assert reborn.heard(wire.ChunksDone)[-1].weight_version == 2
        await reborn.kill()


async def test_what_runs_is_dropped_before_new_weights_are_loaded(tmp_path):
    model = folder(tmp_path / "model", 1.0)
    async with engine(backend=Loading()) as (buffer, server, *_):
        await buffer.run(new=50)
        await buffer.send(load(1, model))
        await eventually(lambda: bool(buffer.heard(wire.WeightsLoaded)))
        assert server.running == {}
        await asyncio.sleep(5)
        assert buffer.results() == {}


async def test_what_is_loaded_was_checked_for_this_load_and_in_this_place(tmp_path):
    first, other = folder(tmp_path / "first", 1.0), folder(tmp_path / "other", 2.0)
    digest = read_manifest(first).digest
    backend = Loading()
    async with engine(backend=backend) as (buffer, *_):
        await buffer.send(prepare(1, first))
        await buffer.send(load(1, other, digest))
        await buffer.send(load(2, first))
        await eventually(lambda: len(buffer.heard(wire.WeightsLoaded)) == 2)
        await buffer.send(prepare(3, first))
        await eventually(lambda: len(buffer.heard(wire.WeightsPrepared)) == 2)
        folder(first, 3.0)
        await buffer.send(load(3, first, digest))
        await eventually(lambda: len(buffer.heard(wire.WeightsLoaded)) == 3)
        assert [bool(said.problem) for said in buffer.heard(wire.WeightsLoaded)] == [True, False, True]
        assert backend.loaded == [(first, digest)]


async def test_what_was_checked_is_laid_out_while_chunks_run_for_its_load_and_for_no_other(tmp_path):
    first, other = folder(tmp_path / "first", 1.0), folder(tmp_path / "other", 2.0)
    digests = [read_manifest(each).digest for each in (first, other)]
    forgotten, backend = (None, ""), Loading()
    async with engine(backend=backend) as (buffer, server, *_):

        async def laid_out(*orders, chunks=1):
            for number in range(chunks):
                await buffer.run(number, new=500)
            await eventually(lambda: len(server.running) == chunks)
            said, backend.laid_out = len(buffer.said), []
            for order in orders:
                await buffer.send(order)
            await eventually(lambda: len(buffer.said) == said + len(orders))
            await asyncio.sleep(1)
            return backend.laid_out

        backend.meanwhile = lambda: backend.laid_out.append("loaded")
        assert await laid_out(prepare(1, other), load(1, other), chunks=0) == ["loaded"]
        expected = [(first, digests[0]), "loaded", forgotten]
        assert await laid_out(prepare(2, first), load(2, first)) == expected
        assert await laid_out(load(3, other)) == ["loaded"]  # it was never prepared
        assert await laid_out(prepare(4, first)) == [(first, digests[0])]
        (first / "model.safetensors").touch()
        assert await laid_out(load(4, first)) == [forgotten, "loaded"]
        assert await laid_out(prepare(5, other), prepare(6, folder(tmp_path / "wide", 1.0, (9, 9)))) == [
            (other, digests[1]), (tmp_path / "wide", read_manifest(tmp_path / "wide").digest)
        ]  # fmt: skip
        await buffer.send(wire.DiscardWeights(version=6, call_id=6))
        await eventually(lambda: backend.laid_out[-1] == forgotten)


async def test_what_cannot_be_laid_out_is_loaded_all_the_same(tmp_path):
    model, backend = folder(tmp_path / "model", 1.0), Loading()

    def failing(*_):
        raise RuntimeError("can't start new thread")

    backend.lay_out_weights = failing
    async with engine(backend=backend) as (buffer, server, *_):
        await buffer.run(0, new=500)
        await eventually(lambda: bool(server.running))
        await buffer.send(prepare(1, model))
        await buffer.send(load(1, model))
        await eventually(lambda: bool(buffer.heard(wire.WeightsLoaded)))
        assert not buffer.heard(wire.WeightsPrepared)[0].problem
        assert not buffer.heard(wire.WeightsLoaded)[0].problem
        assert len(backend.loaded) == 1


async def test_an_engine_that_breaks_while_weights_are_laid_out_ends(tmp_path):
    model, backend = folder(tmp_path / "model", 1.0), Loading()

    def late(*_):
        raise EngineBroken("a rank is late")

    backend.lay_out_weights = late
    async with engine(backend=backend) as (buffer, server, running, _):
        await buffer.run(0, new=500)
        await eventually(lambda: bool(server.running))
        await buffer.send(prepare(1, model))
        await asyncio.wait([running])
        assert kinds(buffer)[-1] == wire.Goodbye
        assert isinstance(running.exception(), ExceptionGroup)


async def test_what_changes_while_it_is_loaded_is_not_believed_and_who_sleeps_does_not_load(tmp_path):
    model = folder(tmp_path / "model", 1.0)
    backend = Loading()
    async with engine(backend=backend) as (buffer, *_):
        backend.meanwhile = lambda: folder(model, 2.0)
        await buffer.send(load(1, model))
        await eventually(lambda: bool(buffer.heard(wire.WeightsLoaded)))
        assert "changed while it was loaded" in buffer.heard(wire.WeightsLoaded)[0].problem
        await buffer.send(wire.Sleep(asleep=True))
        await buffer.send(load(2, model))
        await eventually(lambda: len(buffer.heard(wire.WeightsLoaded)) == 2)
        assert "it sleeps" in buffer.heard(wire.WeightsLoaded)[1].problem
        assert len(backend.loaded) == 1


async def test_what_is_loaded_is_not_loaded_again_and_other_weights_of_its_version_are(tmp_path):
    model, other = folder(tmp_path / "model", 1.0), folder(tmp_path / "other", 2.0)
    backend = Loading()
    async with engine(backend=backend) as (buffer, *_):
        for number, source in enumerate((model, model, other), start=1):
            await buffer.send(load(1, source))
            await eventually(lambda number=number: len(buffer.heard(wire.WeightsLoaded)) == number)
        assert [where for where, _ in backend.loaded] == [model, other]


async def test_a_new_buffer_counts_its_updates_anew(tmp_path):
    model = folder(tmp_path / "model", 1.0)
    async with engine() as (buffer, _, _, network):
        await buffer.send(wire.DiscardWeights(version=1, call_id=5))
        reborn = await restarted(buffer, network)
        await eventually(lambda: bool(reborn.said))
        await reborn.send(wire.PrepareWeights(version=1, source=str(model), call_id=1))
        await eventually(lambda: bool(reborn.heard(wire.WeightsPrepared)))
        await reborn.kill()


async def test_a_chunk_without_a_token_is_not_handed_back():
    async with engine(structs.replace(REPLAY, replay=ReplayConfig(step_seconds=5.0))) as (
        buffer,
        server,
        running,
        _,
    ):
        await buffer.run(new=1000)
        await eventually(lambda: bool(server.running))
        server.drain()
        await running
        assert buffer.results() == {}


class Prefilling(ReplayBackend):
    """Has no token yet when it is told for the first time that a chunk is to end."""

    told = 0

    def end(self, request_id, attempt):
        self.told += 1
        if self.told > 1:
            super().end(request_id, attempt)


async def test_a_chunk_that_is_told_to_end_before_it_has_a_token_ends_once_it_has_one():
    config = structs.replace(REPLAY, replay=ReplayConfig(step_seconds=1.0))
    async with engine(config, Prefilling(config, Config().shared)) as (buffer, server, *_):
        await buffer.run(new=1000)
        await eventually(lambda: bool(server.running))
        (name,) = server.running
        assert not server.running[name].tokens
        late = wire.EndChunks(request_ids=[name, "r/p#9"], attempts=[0, 1])
        await buffer.send(late)  # of an earlier attempt, and of a chunk that is not here
        await buffer.send(wire.EndChunks(request_ids=[name], attempts=[1]))
        await eventually(lambda: bool(buffer.results()))
        (result,) = [result for done in buffer.heard(wire.ChunksDone) for result in done.results]
        assert (1 <= result.count <= 4, result.finish) == (True, "")


async def test_a_late_rejection_or_drop_leaves_the_newer_attempt_alone():
    async with engine() as (buffer, server, *_):
        await buffer.run(new=500)
        await eventually(lambda: bool(server.running))
        old = server.running["r/p#0"].serial
        await buffer.run(new=6, attempt=2)
        await buffer.send(wire.DropChunk(request_id="r/p#0", attempt=1))
        await eventually(lambda: server.running["r/p#0"].attempt == 2)
        late = Chunk(
            request_id="r/p#0", group_id="r/p", index=0, attempt=old, key=1, prompt_len=1, max_new_tokens=1,
            sampling=SamplingParams(), tokens=[1],
        )  # fmt: skip
        server.rejected(late, EngineError("no"))
        await asyncio.sleep(5)
        assert kinds(buffer) == [wire.Register, wire.ChunksDone]
        assert set(buffer.results()) == {("0", 2)}


async def test_what_was_checked_for_weights_that_are_live_already_is_forgotten(tmp_path):
    model = folder(tmp_path / "model", 1.0)
    backend = Loading()
    async with engine(backend=backend) as (buffer, server, _, _):
        for version in (1, 1):  # its answer came too late for the buffer, which asks for all once more
            await buffer.send(prepare(version, model))
            await buffer.send(load(version, model))
            await asyncio.sleep(1)
        assert kinds(buffer)[-4:] == [wire.WeightsPrepared, wire.WeightsLoaded] * 2
        assert len(backend.loaded) == 1
        assert server._updater.checker.checked == CheckedWeights()


async def test_what_is_dropped_is_said_and_loaded_again_from_where_it_was(tmp_path):
    model, one = folder(tmp_path / "model", 1.0), folder(tmp_path / "one", 2.0)
    shared = SharedConfig(model=str(model))
    backend = Loading()
    async with engine(backend=backend, shared=shared) as (buffer, server, _, network):
        own = read_manifest(model).digest
        await buffer.send(wire.Sleep(asleep=True, level=2))
        await buffer.send(wire.Sleep(asleep=False, tags=["kv_cache"]))  # no buffer says so
        await buffer.send(wire.Sleep(asleep=False, tags=["weights"]))
        await eventually(lambda: len(buffer.heard(wire.Slept)) == 3)
        down, refused, up = buffer.heard(wire.Slept)
        assert (down.asleep, down.tags, down.dropped) == (True, ["kv_cache", "weights"], True)
        assert (refused.tags, refused.problem != "") == (down.tags, True)
        assert (up.asleep, up.tags, up.dropped) == (True, ["kv_cache"], True)
        assert backend.rests == [ASLEEP, KV_ASLEEP]
        await buffer.run()
        await eventually(lambda: bool(buffer.heard(wire.ChunkFailed)))
        assert "it sleeps" in buffer.heard(wire.ChunkFailed)[0].message
        reborn = await restarted(buffer, network, shared)
        await eventually(lambda: bool(reborn.said))
        said = reborn.said[0]
        assert (said.weight_version, said.dropped_version, said.weights_digest) == (-1, 0, own)
        assert said.sleeping == ["kv_cache"]
        await reborn.send(wire.LoadWeights(version=0, digest="another", source=""))
        await reborn.send(wire.LoadWeights(version=0, digest=own, source=""))
        await eventually(lambda: len(reborn.heard(wire.WeightsLoaded)) == 2)
        assert [bool(loaded.problem) for loaded in reborn.heard(wire.WeightsLoaded)] == [True, False]
        assert "model now has digest" in reborn.heard(wire.WeightsLoaded)[0].problem
        assert backend.loaded == [(model, own)]
        await reborn.send(wire.Sleep(asleep=False))
        await reborn.send(load(1, one))
        await reborn.send(wire.Sleep(asleep=True, level=1))
        await eventually(lambda: len(reborn.heard(wire.Slept)) == 2)
        assert [slept.dropped for slept in reborn.heard(wire.Slept)] == [False, False]
        assert server._updater.live.version == 1
        await reborn.kill()


async def test_an_engine_without_a_model_folder_says_what_it_lacks_and_what_it_dropped():
    backend = Loading()
    async with engine(backend=backend) as (buffer, server, *_):
        await buffer.send(wire.Sleep(asleep=True, level=2))
        await buffer.send(wire.Sleep(asleep=False))
        await buffer.send(wire.LoadWeights(version=0, digest="", source=""))
        await eventually(lambda: bool(buffer.heard(wire.WeightsLoaded)))
        assert (
            "started without a model folder: set shared.model" in buffer.heard(wire.WeightsLoaded)[0].problem
        )
        assert server._updater.not_ready == "it has no weights: it dropped them"
        assert server._registration().dropped_version == 0


# --- in place -------------------------------------------------------------------------------------

IN_PLACE = structs.replace(REPLAY, in_place_updates=True)


def plan(path, shape=(2, 3), name="w"):
    """Write a plan of one float32 tensor into a folder; return its source, and its digest."""
    path.mkdir()
    bucket = Bucket(1024, [PlannedTensor(name, "F32", shape, 0)], SharedFile("psm_x"))
    encoded = msgspec.json.encode(Plan("v1", "shared", [bucket]))
    stream = TensorStream({PLAN: np.frombuffer(encoded, dtype=np.uint8)})
    (path / "model.safetensors").write_bytes(stream.read(0, stream.size).tobytes())
    return f"inplace:{path}", stream.digest()


def started_with(server, model):
    server._updater.checker.model, server._updater.checker.base = read_manifest(model), model


async def test_weights_in_place_are_refused_unless_they_are_allowed(tmp_path):
    source, digest = plan(tmp_path / "plan")
    async with engine(backend=Loading()) as (buffer, server, *_):
        started_with(server, folder(tmp_path / "model", 1.0))
        await buffer.send(prepare(1, source))
        await buffer.send(load(1, source, digest))
        await eventually(lambda: bool(buffer.heard(wire.WeightsLoaded)))
        for said in (*buffer.heard(wire.WeightsPrepared), *buffer.heard(wire.WeightsLoaded)):
            assert "set engine.in_place_updates = true" in said.problem
        assert not server._updater.not_ready
        assert not server._driver._backend.received


async def test_a_plan_of_other_tensors_is_refused_before_anything_is_received(tmp_path):
    backend = Loading()
    async with engine(IN_PLACE, backend) as (buffer, server, *_):
        started_with(server, folder(tmp_path / "model", 1.0))
        for number, fields in enumerate(({"shape": (3, 2)}, {"name": "v"})):
            source, digest = plan(tmp_path / str(number), **fields)
            await buffer.send(prepare(number, source))
            await buffer.send(load(number, source, digest))
        source = f"inplace:{folder(tmp_path / 'no plan', 1.0)}"
        await buffer.send(prepare(2, source))
        await eventually(lambda: len(buffer.heard(wire.WeightsPrepared)) == 3)
        problems = [said.problem for said in buffer.heard(wire.WeightsPrepared)]
        assert "tensor w has shape [3, 2], the model's has [2, 3]" in problems[0]
        assert "has a tensor v that the model lacks" in problems[1]
        assert "a plan is one" in problems[2]
        assert all(said.problem for said in buffer.heard(wire.WeightsLoaded))
        assert not server._updater.not_ready
        assert not backend.received


async def test_weights_in_place_are_received_by_the_plan_that_was_checked(tmp_path):
    backend, (source, digest) = Loading(), plan(tmp_path / "plan")
    model = folder(tmp_path / "model", 1.0)
    async with engine(IN_PLACE, backend) as (buffer, server, *_):
        started_with(server, model)
        await buffer.send(prepare(1, source))
        await buffer.send(load(1, source, digest))
        await eventually(lambda: bool(buffer.heard(wire.WeightsLoaded)))
        assert buffer.heard(wire.WeightsPrepared)[0].digest == digest
        assert not buffer.heard(wire.WeightsLoaded)[0].problem
        assert backend.received == [(tmp_path / "plan", "e0", digest)]
        assert not backend.loaded
        # And back to the model that it was started with, which has no source.
        await buffer.send(wire.LoadWeights(version=0, digest=read_manifest(model).digest, source=""))
        await eventually(lambda: len(buffer.heard(wire.WeightsLoaded)) == 2)
        assert not buffer.heard(wire.WeightsLoaded)[1].problem
        assert backend.loaded == [(model, read_manifest(model).digest)]
        await buffer.send(wire.LoadWeights(version=0, digest="another model's", source=""))
        await eventually(lambda: len(buffer.heard(wire.WeightsLoaded)) == 3)
        assert "not another model's" in buffer.heard(wire.WeightsLoaded)[2].problem


async def test_an_engine_that_hangs_says_so_and_ends(tmp_path):
    backend, (source, digest) = Loading(), plan(tmp_path / "plan")
    async with engine(IN_PLACE, backend) as (buffer, server, running, _):
        started_with(server, folder(tmp_path / "model", 1.0))
        backend.broken = True
        await buffer.send(load(1, source, digest))
        await asyncio.wait([running])
        assert [said.problem for said in buffer.heard(wire.WeightsLoaded)] == ["it hangs"]
        assert kinds(buffer)[-1] == wire.Goodbye
        assert buffer.heard(wire.Goodbye)[0].problem
        assert isinstance(running.exception(), ExceptionGroup)
