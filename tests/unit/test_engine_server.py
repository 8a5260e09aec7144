"""The engine's server against a buffer played by the test, in virtual time mostly."""

import asyncio
import contextlib
import threading

import numpy as np
import pytest
from cluster_harness import folder
from engine_system import REPLAY, Buffer, engine
from memory_transport import MemoryNetwork, MemoryTransport
from msgspec import structs
from virtual_time import VIRTUAL, eventually, virtual

from seer.common import wire
from seer.common.clock import LoopClock
from seer.common.config import Config, EngineConfig, SharedConfig
from seer.common.errors import EngineError, Unreachable, Unsampleable
from seer.common.types import InstanceStats, SamplingParams
from seer.services.dgds import server as dgds
from seer.services.dgds.packing import group_digest, prompt_digest
from seer.services.engine import server as engine_server
from seer.services.engine.backend import ChunkEnd, ChunkFailure, Generated, StepOutput
from seer.services.engine.draft_groups import RETURN_SECONDS, DraftGroups
from seer.services.engine.driver import InlineDriver
from seer.services.engine.replay.backend import ReplayBackend
from seer.services.engine.server import EngineServer, make
from seer.services.engine.weights.manifest import read_manifest

pytestmark = VIRTUAL


async def test_it_registers_what_the_backend_is():
    async with engine() as (buffer, *_):
        (register,) = buffer.said
        assert (register.capacity.kv_blocks, register.capacity.max_num_seqs) == (200, 4)
        assert register.weight_version == 0
        assert register.versions["backend"] == "replay"


async def test_it_says_what_it_has_generated_before_any_chunk_of_the_buffer_adds_to_that():
    async with engine() as (buffer, *_):
        begun = asyncio.get_running_loop().time()
        await buffer.run(new=100)
        await eventually(lambda: buffer.stats)
        assert asyncio.get_running_loop().time() < begun + 0.1
        assert buffer.stats[0].generated_tokens == 0


async def test_a_chunk_comes_back_with_its_tokens_and_goes_on_where_it_stopped():
    async with engine() as (buffer, *_):
        await buffer.run(new=8)
        await eventually(lambda: len(buffer.results()) == 1)
        (done,) = buffer.heard(wire.ChunksDone)
        assert done.results == [wire.ChunkResult("r/p#0", 1, 8, "", "", 0)]
        assert (done.tokens.dtype, done.logprobs.dtype, len(done.logprobs)) == ("int32", "float32", 8)
        await buffer.run(new=4, attempt=2, output=done.tokens)
        await eventually(lambda: len(buffer.results()) == 2)
        again, rest = done.tokens, buffer.heard(wire.ChunksDone)[1].tokens
        await buffer.run(new=12, attempt=3)
        await eventually(lambda: len(buffer.results()) == 3)
        assert buffer.heard(wire.ChunksDone)[2].tokens.tolist() == [*again, *rest]


async def test_chunks_that_end_together_share_a_message_and_are_split_by_count():
    async with engine() as (buffer, *_):
        for index, new in enumerate((5, 5, 3)):
            await buffer.run(index, new)
        await eventually(lambda: len(buffer.results()) == 3)
        first, second = buffer.heard(wire.ChunksDone)
        assert [(r.request_id[-1], r.count) for r in first.results] == [("2", 3)]
        assert [(r.request_id[-1], r.count) for r in second.results] == [("0", 5), ("1", 5)]
        assert (len(first.tokens), len(second.tokens)) == (3, 10)


async def test_tokens_of_streamed_chunks_come_as_they_are_generated():
    async with engine() as (buffer, server, *_):
        await buffer.run(0, new=60, stream=True)
        await buffer.run(1, new=60)
        await eventually(lambda: len(buffer.results()) == 2)
        messages = buffer.heard(wire.ChunksDone)
        parts = [(part, done) for done in messages for part in done.going_on]
        assert len(parts) > 4
        assert {part.request_id for part, _ in parts} == {"r/p#0"}
        assert not server._unsent
        found, last = [], buffer.results()["0", 1]
        for done in messages:
            start = 0
            for each in [*done.results, *done.going_on]:
                if each.request_id == "r/p#0":
                    found += done.tokens[start : start + each.count].tolist()
                start += each.count
            assert start == len(done.tokens) == len(done.logprobs)
        assert (len(found), last.finish) == (60, "")
        assert sum(part.count for part, _ in parts) + last.count == 60
        await buffer.run(2, new=60, attempt=1)
        await eventually(lambda: len(buffer.results()) == 3)
        await buffer.run(0, new=60, attempt=2)
        await eventually(lambda: len(buffer.results()) == 4)
        assert buffer.heard(wire.ChunksDone)[-1].tokens.tolist() == found  # the same when it runs in one go


@pytest.mark.parametrize(("parts", "least", "most"), [(3200, 40, 60), (10, 4, 10)])
async def test_the_more_streams_there_are_the_longer_is_the_pause_between_their_messages(
    monkeypatch, parts, least, most
):
    monkeypatch.setattr("seer.services.engine.server.STREAM_PARTS", parts)
    async with engine() as (buffer, *_):
        for index in range(4):
            await buffer.run(index, new=200, stream=True)  # of 10 ms each
        await eventually(lambda: len(buffer.results()) == 4)
        messages = [done for done in buffer.heard(wire.ChunksDone) if done.going_on]
        assert least <= len(messages) <= most


async def test_a_chunk_that_ends_after_all_of_it_was_streamed_has_a_result():
    class Late(ReplayBackend):
        """Says that chunks ended 20 steps after their last token."""

        late, left = (), 0

        def has_work(self):
            return super().has_work() or bool(self.late)

        def step(self):
            out = super().step()
            if out.ended:
                self.late, self.left, out.ended = out.ended, 20, []
            self.left -= 1
            if self.late and self.left == 0:
                out.ended, self.late = self.late, ()
            out.seconds = 0.01
            return out

    async with engine(backend=Late(REPLAY, Config().shared)) as (buffer, *_):
        await buffer.run(0, new=20, stream=True)
        await eventually(lambda: bool(buffer.results()))
        assert sum(part.count for done in buffer.heard(wire.ChunksDone) for part in done.going_on) == 20
        assert buffer.results()["0", 1].count == 0


async def test_an_engine_that_leaves_hands_back_what_it_has_not_streamed():
    async with engine() as (buffer, server, running, _):
        await buffer.run(0, new=4000, stream=True)
        await eventually(lambda: len(buffer.heard(wire.ChunksDone)) > 3)
        streamed = sum(part.count for done in buffer.heard(wire.ChunksDone) for part in done.going_on)
        server.drain()
        await running
        last = buffer.heard(wire.ChunksDone)[-1]
        assert not last.going_on
        assert [result.count for result in last.results] in ([], [len(last.tokens)])
        assert streamed > 0


async def test_finish_and_stop_reason_are_passed_on():
    async with engine() as (buffer, *_):
        await buffer.run(0, new=5, sampling=SamplingParams(max_tokens=5, ignore_eos=True))
        await buffer.run(1, new=4000, sampling=SamplingParams(max_tokens=4000))
        await eventually(lambda: len(buffer.results()) == 2)
        results = buffer.results()
        assert (results["0", 1].finish, results["0", 1].stop_reason) == ("length", "")
        assert results["1", 1].finish == "stop"
        assert results["1", 1].stop_reason == str(buffer.heard(wire.ChunksDone)[1].tokens[-1])


async def test_repeated_orders_change_nothing_newer_ones_replace_older_ones_are_ignored():
    async with engine() as (buffer, server, *_):
        dropped, drop = [], server._driver.drop
        server._driver.drop = lambda *which: dropped.append(which) or drop(*which)
        await buffer.run(new=50, attempt=3)
        await asyncio.sleep(0.2)
        await buffer.run(new=50, attempt=3)
        await buffer.run(new=5, attempt=2)
        await asyncio.sleep(0.1)
        await buffer.run(new=7, attempt=4)
        await asyncio.sleep(10)
        assert {key: result.count for key, result in buffer.results().items()} == {("0", 4): 7}
        assert buffer.stats[-1].prompt_tokens == 2 * 3, "each ran once"
        assert dropped == [("r/p#0", 1)]
        assert server.running == {}


async def test_dropped_chunks_say_nothing_more():
    async with engine() as (buffer, server, *_):
        await buffer.run(0, new=50)
        await buffer.run(1, new=50)
        await asyncio.sleep(0.1)
        await buffer.send(wire.DropChunk(request_id="r/p#0", attempt=1))
        await buffer.send(wire.DropChunk(request_id="r/p#1", attempt=9))
        await asyncio.sleep(10)
        assert set(buffer.results()) == {("1", 1)}
        assert server.running == {}
        assert buffer.stats[-1].free_blocks == 200


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"max_new_tokens": 10**6, "sampling": SamplingParams(max_tokens=10**6)}, "max_model_len"),
        ({"sampling": SamplingParams(temperature=-1.0)}, "sampling.temperature"),
        ({"prompt_len": 0}, "prompt_len"),
        ({"turn_start": 2}, "turn_start"),
        ({"request_id": "r/q#0"}, "request_id"),
        ({"request_id": "r/p#-1"}, "request_id"),
        ({"tokens": np.array([1, 2, 10**6], dtype=np.int32)}, "tokens"),
    ],
)
async def test_an_order_that_no_engine_could_run_fails_for_good(changes, problem):
    async with engine() as (buffer, server, *_):
        await buffer.run(**changes)
        await buffer.run(1, new=2)
        await eventually(lambda: len(buffer.said) == 3)
        (failed,) = buffer.heard(wire.ChunkFailed)
        assert (failed.code, failed.fatal, failed.attempt) == ("invalid_field", True, 1)
        assert problem in failed.message
        assert set(buffer.results()) == {("1", 1)}
        assert server.running == {}


@pytest.mark.parametrize("kind", ["routed_experts |u1 x", "routed_experts |u1 0", "routed_experts |V9 2"])
async def test_what_is_beside_tokens_and_cannot_be_read_fails_by_its_name(kind):
    sampling = SamplingParams(routed_experts_from=0)
    async with engine() as (buffer, *_):
        await buffer.run(sampling=sampling, have={kind: 8})
        await eventually(lambda: bool(buffer.heard(wire.ChunkFailed)))
        (failed,) = buffer.heard(wire.ChunkFailed)
        assert failed.fatal
        assert failed.message.startswith("have = ")


async def test_a_chunk_whose_experts_are_lost_may_run_again():
    class Forgetful(ReplayBackend):
        def step(self):
            out = super().step()
            for end in out.ended:
                end.routes = None
            return out

    async with engine(backend=Forgetful(REPLAY, Config().shared)) as (buffer, *_):
        await buffer.run(0, sampling=SamplingParams(routed_experts_from=0))
        await buffer.run(1)
        await eventually(lambda: bool(buffer.heard(wire.ChunkFailed) and buffer.results()))
        (failed,) = buffer.heard(wire.ChunkFailed)
        assert (failed.request_id, failed.fatal) == ("r/p#0", False)


async def test_another_failure_to_add_is_not_for_good():
    class Picky(ReplayBackend):
        def add(self, chunk):
            raise EngineError("out of adapters")

    async with engine(backend=Picky(REPLAY, Config().shared)) as (buffer, *_):
        await buffer.run()
        await eventually(lambda: bool(buffer.heard(wire.ChunkFailed)))
        failed = buffer.heard(wire.ChunkFailed)[0]
        assert (failed.code, failed.fatal, failed.message) == ("engine", False, "out of adapters")


async def test_a_row_that_cannot_be_sampled_fails_its_chunk_for_good_and_no_other():
    class Overflowing(ReplayBackend):
        def step(self):
            out = super().step()
            bad = [each for each in out.generated if each.request_id == "r/p#1"]
            for each in bad:
                self.drop(each.request_id, each.attempt)
                error = Unsampleable("request r/p#1: no token")
                out.failed.append(ChunkFailure(request_id=each.request_id, attempt=each.attempt, error=error))
            out.generated = [each for each in out.generated if each not in bad]
            return out

    async with engine(backend=Overflowing(REPLAY, Config().shared)) as (buffer, server, *_):
        for index in range(3):
            await buffer.run(index, new=8)
        await eventually(lambda: len(buffer.results()) == 2)
        (failed,) = buffer.heard(wire.ChunkFailed)
        assert (failed.request_id, failed.code, failed.fatal) == ("r/p#1", "unsampleable", True)
        assert failed.message == "request r/p#1: no token; this is under weight version 0"
        assert {index for index, _ in buffer.results()} == {"0", "2"}
        assert server.running == {}


async def test_status_is_reported_at_its_interval_busy_or_not():
    async with engine() as (buffer, *_):
        await buffer.run(new=1000)
        await asyncio.sleep(5.5)
        assert len(buffer.stats) == 6, "one as it registers, and one each second"
        assert buffer.stats[-1].running == 1
        assert [s.steps for s in buffer.stats] == sorted(s.steps for s in buffer.stats)
        await asyncio.sleep(20)
        last = buffer.stats[-1]
        step = REPLAY.replay.step_seconds + REPLAY.replay.row_seconds
        assert last.token_seconds_alone == pytest.approx(step)
        assert last.best_rate == pytest.approx(1 / step)
        assert structs.replace(last, best_rate=0.0, token_seconds_alone=0.0) == InstanceStats(
            steps=1000, free_blocks=200, generated_tokens=1000, prompt_tokens=3
        )


@contextlib.asynccontextmanager
async def dgds_alone():
    """Yield a dgds, and the network that it is in."""
    network = MemoryNetwork()
    server = dgds.make(Config(), MemoryTransport(network), LoopClock())
    await server.start()
    serving = asyncio.create_task(server.run())
    yield server, network
    serving.cancel()


@contextlib.asynccontextmanager
async def engine_and_dgds():
    """Yield the buffer of an engine, and the dgds that it knows."""
    async with dgds_alone() as (server, network), engine(network=network) as (buffer, *_):
        yield buffer, server


async def test_tokens_reach_the_dgds_as_they_come():
    async with engine_and_dgds() as (buffer, server):
        await asyncio.sleep(1)
        await buffer.run(new=100)
        await asyncio.sleep(0.5)
        early = server.store.tokens(group_digest("r/p"), 0)
        assert 0 < len(early) < 100
        await eventually(lambda: len(buffer.results()) == 1)
        tokens = buffer.heard(wire.ChunksDone)[0].tokens
        await eventually(lambda: server.store.tokens(group_digest("r/p"), 0) == tokens.tolist())
        assert early == tokens[: len(early)].tolist()
        await buffer.run(new=10, attempt=2, output=tokens)
        await eventually(lambda: len(server.store.tokens(group_digest("r/p"), 0)) == 110)


async def test_a_named_group_is_remembered_by_the_prompt_that_the_buffer_says_and_another_by_its_own():
    async with engine_and_dgds() as (buffer, server):
        await asyncio.sleep(1)
        await buffer.run(0)
        await buffer.run(1, group_id="r/q", draft_group="r/g", draft_prompt=77)
        await buffer.run(2, group_id="r/s", draft_group="r/old")  # from a buffer that says nothing
        await eventually(lambda: len(buffer.results()) == 3)
        await eventually(lambda: len(server.store) == 3)
        own = prompt_digest(np.array([1, 2, 3]))
        prompts = {name: server.store._groups[group_digest(name)].prompt for name in ("r/p", "r/g", "r/old")}
        assert prompts == {"r/p": own, "r/g": 77, "r/old": 0}


async def test_what_an_environment_said_reaches_the_dgds_from_whatever_engine_runs_the_next_turn():
    async with dgds_alone() as (server, network):

        async def run_turn(name, attempt, context):
            """Run a turn in an engine of its own; return the context with what came, once the dgds has it."""
            async with engine(structs.replace(REPLAY, name=name), network=network) as (buffer, *_):
                await asyncio.sleep(1)
                start = 3 + len(context) if context else 0
                await buffer.run(new=40, attempt=attempt, output=context, turn_start=start, parks=True)
                await eventually(lambda: len(buffer.results()) == 1)
                context = [*context, *buffer.heard(wire.ChunksDone)[0].tokens.tolist()]
                await eventually(lambda: server.store.tokens(group_digest("r/p"), 0) == context)
                return context

        first = await run_turn("e0", 1, [])
        second = await run_turn("e1", 2, [*first, 7, 8, 9])
        third = await run_turn("e0", 3, [*second, 5])
        assert len(third) == 40 + 3 + 40 + 1 + 40
        assert server.store.counters["gaps"] == 2


async def test_a_response_whose_turn_ended_here_may_go_on_elsewhere_and_is_fetched_then():
    async with engine() as (buffer, server, *_):
        server.sharing.groups = groups = DraftGroups()
        short = {"sampling": SamplingParams(max_tokens=5, ignore_eos=True)}
        await buffer.run(0, 500)
        await buffer.run(1, 5, parks=True, **short)
        await buffer.run(2, 5, **short)
        await eventually(lambda: len(buffer.results()) == 2)
        now = asyncio.get_running_loop().time()
        assert groups.to_fetch(now) == {"r/p": {0, 1, 2}}
        assert groups.to_fetch(now + 2 * RETURN_SECONDS) == {"r/p": {0, 2}}


async def test_a_restarted_buffer_finds_nothing_running_and_a_registration_first():
    async with engine() as (buffer, server, _, network):
        await buffer.run(new=1000)
        await asyncio.sleep(1)
        await buffer.kill()
        reborn = Buffer(network, incarnation=2)
        await reborn.start()
        await eventually(lambda: bool(reborn.said))
        assert isinstance(reborn.said[0], wire.Register)
        assert server.running == {}
        assert server._driver.stats.running == 0
        # The same attempt number again, in the buffer's new incarnation: nothing of the old run may show.
        await reborn.run(new=5)
        await eventually(lambda: bool(reborn.results()))
        assert {key: result.count for key, result in reborn.results().items()} == {("0", 1): 5}
        await asyncio.sleep(20)
        assert len(reborn.said) == 2
        await reborn.kill()


async def test_nothing_of_before_a_rejoin_is_sent_after_it():
    async with engine() as (buffer, server, *_):
        await buffer.run(new=1000)
        await eventually(lambda: "r/p#0" in server.running)
        known = server.running["r/p#0"]
        # All in one turn of the loop: it ends, it failed, and the buffer says that it forgot us.
        server.output(
            StepOutput(
                generated=[], ended=[ChunkEnd(request_id="r/p#0", attempt=known.serial, finish="stop")]
            )
        )
        server._reject("r/p#1", 1, EngineError("no"))
        server._answers.append(wire.Slept(asleep=True))
        server._rejoin()
        await asyncio.sleep(5)
        assert [type(message) for message in buffer.said] == [wire.Register, wire.Register]


@pytest.mark.parametrize("order", ["prepare", "load", "sleep"])
def test_an_answer_to_a_buffer_that_is_gone_is_not_sent(order, tmp_path):
    orders = {
        "prepare": wire.PrepareWeights(version=1, source=str(tmp_path)),
        "load": wire.LoadWeights(version=1, source=str(tmp_path), digest="d"),
        "sleep": wire.Sleep(asleep=True),
    }

    @virtual
    async def check():
        async with engine() as (buffer, server, _, network):
            release = asyncio.Event()

            async def slowly(*_):
                await release.wait()
                raise EngineError("too late")

            for name in ("_check", "_checked_folder"):
                setattr(server._updater, name, slowly)
            server._driver.sleep = lambda *_: release.wait()
            await buffer.send(orders[order])
            await asyncio.sleep(1)
            await buffer.kill()
            reborn = Buffer(network, incarnation=2)
            await reborn.start()
            await eventually(lambda: bool(reborn.said))
            release.set()
            await asyncio.sleep(10)
            # Its successor hears of what changed meanwhile, and of nothing else.
            assert {type(message) for message in reborn.said} == {wire.Register}
            falls_asleep = order == "sleep"  # which is said at once, as no chunk may start any more
            assert [bool(message.sleeping) for message in reborn.said] == [falls_asleep] * (1 + falls_asleep)
            await reborn.kill()

    check()


async def test_late_output_of_a_replaced_chunk_is_ignored():
    async with engine() as (buffer, server, *_):
        await buffer.run(new=50)
        await eventually(lambda: "r/p#0" in server.running)
        old = server.running["r/p#0"].serial
        await buffer.run(new=6, attempt=2)
        await eventually(lambda: server.running["r/p#0"].attempt == 2)
        late = Generated(request_id="r/p#0", attempt=old, token_ids=[9], logprobs=[0.0])
        end = ChunkEnd(request_id="r/p#0", attempt=old, finish="stop")
        server.output(StepOutput(generated=[late], ended=[end]))
        await asyncio.sleep(5)
        assert {key: (r.count, r.finish) for key, r in buffer.results().items()} == {("0", 2): (6, "")}


async def test_results_wait_for_a_buffer_that_takes_nothing_and_generation_does_not():
    async with engine() as (buffer, server, *_):
        real, stuck = server._buffer.send, asyncio.Event()

        async def send(message):
            if not stuck.is_set():
                await asyncio.sleep(5)
                raise Unreachable("stuck")
            await real(message)

        server._buffer.send = send
        for index in range(3):
            await buffer.run(index, new=5 + index)
        await asyncio.sleep(30)
        assert server._driver.stats.generated_tokens == 5 + 6 + 7
        stuck.set()
        await eventually(lambda: len(buffer.results()) == 3)


async def test_told_to_stop_it_hands_back_what_it_has_and_says_goodbye():
    async with engine() as (buffer, server, running, _):
        await buffer.run(0, new=1000)
        await asyncio.sleep(0.5)
        await buffer.run(1, new=1000, output=[7])
        await asyncio.sleep(0.5)
        server.drain()
        await running
        assert [type(message) for message in buffer.said] == [wire.Register, wire.ChunksDone, wire.Goodbye]
        counts = {key: (result.count, result.finish) for key, result in buffer.results().items()}
        assert 90 <= counts["0", 1][0] <= 101
        assert 40 <= counts["1", 1][0] <= 51
        assert {finish for _, finish in counts.values()} == {""}


async def test_a_failing_backend_says_goodbye_and_ends_loudly():
    class Failing(ReplayBackend):
        def step(self):
            if self.stats().steps == 3:
                raise RuntimeError("device lost")
            return super().step()

    async with engine(backend=Failing(REPLAY, Config().shared)) as (buffer, _, running, _):
        await buffer.run(new=100)
        with pytest.raises(ExceptionGroup) as caught:
            await running
        assert caught.group_contains(EngineError, match="device lost")
        await eventually(lambda: bool(buffer.heard(wire.Goodbye)))
        assert buffer.results() == {}


async def test_without_a_buffer_it_gives_up_with_the_endpoint_named():
    closed = []

    class Watched(ReplayBackend):
        def close(self):
            closed.append(True)

    server = EngineServer(
        Config(engine=REPLAY), MemoryTransport(MemoryNetwork()), LoopClock(), Watched(REPLAY, Config().shared)
    )
    with pytest.raises(Unreachable, match="7102"):
        await server.start()
    assert closed


class Binding(ReplayBackend):
    """Notes what is bound, and whether the buffer knew of this engine by then; fails if told to."""

    def __init__(self, buffer, fail=False):
        super().__init__(REPLAY, Config().shared)
        self.buffer, self.fail = buffer, fail
        self.bound, self.closed = [], False

    def bind_weights(self, digest):
        if self.fail:
            raise RuntimeError("no rank answers")
        self.bound.append((digest, list(self.buffer.said)))

    def close(self):
        self.closed = True
        super().close()


@pytest.mark.parametrize("fail", [False, True])
@pytest.mark.real_time
async def test_it_binds_the_weights_it_loaded_before_it_registers_or_fails(tmp_path, fail):
    model = folder(tmp_path / "model", 1.0)
    network, config = MemoryNetwork(), Config(engine=REPLAY, shared=SharedConfig(model=str(model)))
    buffer = Buffer(network, shared=config.shared)
    await buffer.start()
    backend = Binding(buffer, fail)
    server = EngineServer(config, MemoryTransport(network), LoopClock(), backend)
    if fail:
        with pytest.raises(EngineError, match="no rank answers"):
            await server.start()
        assert backend.closed
    else:
        await server.start()
        await eventually(lambda: bool(buffer.said))
        assert backend.bound == [(read_manifest(model).digest, [])]
    await buffer.kill()


async def test_make_chooses_the_backend():
    made = make(Config(engine=REPLAY), MemoryTransport(MemoryNetwork()), LoopClock())
    assert isinstance(made._driver, InlineDriver)


@pytest.mark.real_time
async def test_an_engine_on_a_thread_serves_the_buffer():
    config = EngineConfig(backend="vllm", name="e0", kv_blocks=200)
    async with engine(config, ReplayBackend(config, Config().shared)) as (buffer, server, running, _):
        for index in range(5):
            await buffer.run(index, new=20 + index)
        await eventually(lambda: len(buffer.results()) == 5)
        assert {result.count for result in buffer.results().values()} == {20, 21, 22, 23, 24}
        server.drain()
        await asyncio.wait_for(running, 10)
        assert isinstance(buffer.said[-1], wire.Goodbye)


class Hanging(ReplayBackend):
    """Loads weights, and sleeps, for as long as a test wants."""

    def __init__(self, config):
        super().__init__(config, Config().shared)
        self.going_on = threading.Event()

    def load_weights(self, folder, digest, base=None):
        self.going_on.wait(60)

    def sleep(self, state, level):
        self.going_on.wait(60)


@pytest.mark.real_time
async def test_an_engine_reports_while_it_loads_and_while_it_goes_to_sleep(tmp_path, monkeypatch):
    monkeypatch.setattr(engine_server, "STATUS_SECONDS", 0.01)
    model = folder(tmp_path / "model", 1.0)
    digest = read_manifest(model).digest
    config = EngineConfig(backend="vllm", name="e0", kv_blocks=200)
    backend = Hanging(config)
    async with engine(config, backend) as (buffer, *_):
        for order, answer in (
            (wire.LoadWeights(version=1, digest=digest, source=str(model)), wire.WeightsLoaded(version=1)),
            (wire.Sleep(asleep=True), wire.Slept(asleep=True, tags=["kv_cache", "weights"])),
        ):
            backend.going_on.clear()
            await buffer.send(order)
            for _ in range(2):
                before = len(buffer.stats)
                await eventually(lambda before=before: len(buffer.stats) > before + 2)
            assert answer not in buffer.said
            backend.going_on.set()
            await eventually(lambda answer=answer: answer in buffer.said)


async def test_an_update_that_is_off_is_not_checked_and_its_answer_says_which_it_was(tmp_path):
    async with engine() as (buffer, server, *_):
        checked = []

        async def slow(source, *_):
            checked.append(source)
            await asyncio.sleep(5)
            raise EngineError(f"no {source}")

        server._updater.checker.check = slow
        for call_id in (1, 2):
            await buffer.send(wire.PrepareWeights(version=1, source=f"/{call_id}", call_id=call_id))
        await asyncio.sleep(1)
        for call_id in (1, 2):  # 1 is checked, 2 waits
            await buffer.send(wire.DiscardWeights(version=1, call_id=call_id))
        await buffer.send(wire.PrepareWeights(version=1, source="/3", call_id=3))
        await eventually(lambda: buffer.heard(wire.WeightsPrepared) != [])
        assert buffer.heard(wire.WeightsPrepared) == [
            wire.WeightsPrepared(version=1, digest="", problem="no /3", call_id=3)
        ]
        assert checked == ["/1", "/3"]


async def test_two_responses_that_were_given_one_place_never_write_to_one_stream():
    async with engine() as (buffer, server, *_):
        where = {"draft_group": "/g", "draft_index": 4}
        await buffer.run(0, 50, **where)
        await buffer.run(1, 5, **where)
        await buffer.run(2, 50, draft_group="/g", draft_index=5)
        await eventually(lambda: len(server.running) == 3)
        places = [run.place for run in server.running.values()]
        assert places == [("/g", 4), ("r/p#1", 0), ("/g", 5)]
        await eventually(lambda: len(buffer.results()) == 3)
        assert not server._places
        await buffer.run(1, 5, attempt=2, **where)
        await eventually(lambda: [run.place for run in server.running.values()] == [("/g", 4)])
