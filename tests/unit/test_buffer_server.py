"""The buffer's sockets, against trainers, engines and a context service that a test plays word by word."""

import asyncio
import math
from contextlib import asynccontextmanager

import numpy as np
import pytest
from memory_transport import MemoryNetwork, MemoryTransport
from streams import Publisher
from virtual_time import VIRTUAL

from seer.common import wire
from seer.common.clock import LoopClock
from seer.common.config import BufferConfig, Config, shared_hash
from seer.common.errors import NotLoaded
from seer.common.net import outbox
from seer.common.net.identity import HELLO_FIRST, Identity
from seer.common.types import Capacity, InstanceStats, SamplingParams
from seer.common.wire.codec import Decoder, encode
from seer.services.buffer import server as buffer_server
from seer.services.buffer import submissions
from seer.services.buffer.requests.engine_deaths import SUSPECT_DEATHS
from seer.services.buffer.server import BufferServer

pytestmark = VIRTUAL

HASH = shared_hash(Config().shared)
SILENT_SECONDS = BufferConfig().engine_silence_seconds
BRIEF = 2.0
"""Seconds in which a connection that is gone is noticed."""


class Peer:
    """One incarnation of a trainer or an engine. It reads when a test has it read."""

    role, endpoint, incoming = "", "", None

    def __init__(self, network, name, incarnation):
        self.me = Identity(role=self.role, name=name, incarnation=incarnation << 20, config_hash=HASH)
        self.transport = MemoryTransport(network)
        self.decoder = Decoder(self.incoming)

    async def connect(self):
        self.socket = await self.transport.dealer(self.endpoint, self.me.address())
        await self.say(self.me.hello(-1))
        return self

    async def say(self, message):
        """Say something; by the time this returns, it was heard and answered."""
        await self.socket.send(encode(message))
        await asyncio.sleep(0.001)

    async def hear(self, kind):
        """Return what it was told of one kind; forget the rest."""
        told = [self.decoder.decode(await self.socket.recv()) for _ in range(len(self.socket.down))]
        return [message for message in told if isinstance(message, kind)]

    async def greet(self):
        """Say Hello; return the number of this handshake."""
        await self.say(self.me.hello(-1))
        return (await self.hear(wire.Welcome))[-1].session


class Trainer(Peer):
    role, endpoint, incoming = "trainer", Config().endpoints.trainers, wire.BufferToTrainer

    async def submit(self, *prompts, stream=False):
        submit = wire.Submit(
            rollout_id="r", rollout_number=0, seed=0, n=1, sampling=SamplingParams(max_tokens=64),
            prompt_ids=list(prompts), lengths=[3] * len(prompts),
            tokens=np.array([1, 2, 3] * len(prompts), np.int32), stream=stream,
        )  # fmt: skip
        await self.say(submit)

    async def status(self):
        await self.say(wire.StatusRequest())
        (status,) = await self.hear(wire.Status)
        return status

    async def engines(self):
        return [engine.name for engine in (await self.status()).instances]

    async def done(self):
        """Return the tokens of the groups that it got, by prompt."""
        return {done.prompt_id: done.tokens.tolist() for done in await self.hear(wire.GroupDone)}


class Engine(Peer):
    role, endpoint, incoming = "engine", Config().endpoints.engines, wire.BufferToEngine

    async def register(self, seats=8):
        capacity = Capacity(kv_blocks=200, block_size=16, max_num_seqs=seats, max_model_len=256)
        await self.say(wire.Register(capacity=capacity, weight_version=0))
        return self

    async def again(self):
        """Shake hands and register, as one that was given up."""
        await self.say(self.me.hello(-1))
        await self.register()

    async def report(self, steps=0):
        await self.say(wire.EngineStatus(stats=InstanceStats(steps=steps)))

    async def chunks(self):
        return await self.hear(wire.RunChunk)

    async def end(self, chunk, tokens, counts=(), logprobs=None, version=0, beside=(), how=("stop", "")):
        """Answer a chunk, in as many results as there are counts; `beside` are said to come with each."""
        results = [
            wire.ChunkResult(chunk.request_id, chunk.attempt, count, *how, 0, beside=dict(beside))
            for count in counts or [len(tokens)]
        ]
        scores = np.zeros(len(tokens) if logprobs is None else logprobs, np.float32)
        ids = np.array(tokens, np.int32)
        await self.say(wire.ChunksDone(weight_version=version, results=results, tokens=ids, logprobs=scores))


class World:
    """A network with a buffer, and whom a test has join it."""

    def __init__(self, queue=None):
        self.network = MemoryNetwork(queue=queue)

    async def trainer(self, incarnation=1):
        return await Trainer(self.network, "t", incarnation).connect()

    async def stranger(self, name="e", incarnation=1):
        return await Engine(self.network, name, incarnation).connect()

    async def engine(self, name="e", incarnation=1, seats=8):
        return await (await self.stranger(name, incarnation)).register(seats)

    async def context(self):
        return await Publisher(MemoryTransport(self.network), config_hash=HASH).start()


@asynccontextmanager
async def buffer(queue=None, **settings):
    world = World(queue)
    config = Config(buffer=BufferConfig(**settings))
    server = BufferServer(config, MemoryTransport(world.network), LoopClock())
    await server.start()
    running = asyncio.create_task(server.run())
    yield world
    assert not running.done()
    running.cancel()
    await asyncio.wait([running])


async def pass_time(seconds, *engines):
    """Let time pass, in which these report."""
    for _ in range(round(seconds / BRIEF)):
        await asyncio.sleep(BRIEF)
        for engine in engines:
            await engine.report()


# --- what engines answer ---------------------------------------------------------------------


async def test_tokens_of_other_weights_than_the_live_ones_are_never_taken():
    async with buffer() as world:
        trainer, engine = await world.trainer(), await world.engine()
        await trainer.submit("p")
        (chunk,) = await engine.chunks()
        await engine.end(chunk, [7], version=1)
        assert (await trainer.done(), await trainer.engines()) == ({}, [])
        await engine.again()
        (chunk,) = await engine.chunks()
        await engine.end(chunk, [8])
        assert await trainer.done() == {"p": [8]}


@pytest.mark.parametrize(
    ("tokens", "counts", "logprobs"),
    [([7, 8], [2], 1), ([7, 8], [1], 2), ([7, 8], [3], 3), ([7], [-1, 2], 1)],
    ids=["few logprobs", "many tokens", "few tokens", "less than none"],
)
async def test_an_answer_whose_counts_disagree_with_its_arrays_is_not_believed(tokens, counts, logprobs):
    async with buffer() as world:
        trainer, engine = await world.trainer(), await world.engine()
        await trainer.submit("p")
        (chunk,) = await engine.chunks()
        await engine.end(chunk, tokens, counts, logprobs)
        assert (await trainer.done(), await trainer.engines()) == ({}, [])
        await engine.again()
        (chunk,) = await engine.chunks()
        await engine.end(chunk, [9])
        assert await trainer.done() == {"p": [9]}


@pytest.mark.parametrize(
    "wrong",
    [
        {"counts": [2]},
        {"beside": {"experts |u1 2": 4}},
        {"how": ("abort", "")},
        {"how": ("stop", "x" * 2**15)},
    ],
)
async def test_results_that_make_no_sense_count_against_the_chunks_that_provoked_them(monkeypatch, wrong):
    monkeypatch.setattr(buffer_server, "MAX_ATTEMPTS", 2)
    async with buffer() as world:
        trainer, engine = await world.trainer(), await world.engine()
        await trainer.submit("p")
        for refused in ([], [["p"]]):
            (chunk,) = await engine.chunks()
            await engine.end(chunk, [7], **wrong)
            assert [answer.prompt_ids for answer in await trainer.hear(wire.Refused)] == refused
            await engine.again()


async def test_an_engine_that_complains_at_length_keeps_no_answer_from_a_trainer():
    async with buffer() as world:
        trainer, engine = await world.trainer(), await world.engine("e" * 300)
        await trainer.say(wire.UpdateWeights(version=1, source="/w"))
        (asked,) = await engine.hear(wire.PrepareWeights)
        problem = "no".ljust(2**24 - 150)  # nearly all that a message may have
        said = wire.WeightsPrepared(version=1, digest="", problem=problem, call_id=asked.call_id)
        await engine.say(said)
        (failed,) = await trainer.hear(wire.WeightsFailed)
        assert [reason.strip() for reason in failed.reasons.values()] == ["no"]


async def test_a_chunk_that_fails_at_length_is_refused_briefly():
    async with buffer() as world:
        trainer, engine = await world.trainer(), await world.engine()
        await trainer.submit("p")
        (chunk,) = await engine.chunks()
        fields = {"request_id": chunk.request_id, "attempt": chunk.attempt, "message": "no" * 2**20}
        await engine.say(wire.ChunkFailed(code="invalid_field", fatal=True, **fields))
        (refused,) = await trainer.hear(wire.Refused)
        assert "nono" in refused.message
        assert len(refused.message) < 2**13


@pytest.mark.parametrize("kind", ["top_logprobs", "top_logprobs <f4 x", "top_logprobs <f4 -1", "x |u1 3"])
async def test_what_is_beside_streamed_tokens_and_cannot_be_read_ends_its_engine_alone(kind):
    async with buffer() as world:
        trainer, engine = await world.trainer(), await world.engine()
        await trainer.submit("p", stream=True)
        (chunk,) = await engine.chunks()
        part = wire.ChunkTokens(chunk.request_id, chunk.attempt, 1, 0, {kind: 4})
        one = np.zeros(1, np.int32), np.zeros(1, np.float32), np.zeros(4, np.uint8)
        said = dict(zip(("tokens", "logprobs", "beside"), one, strict=True))
        await engine.say(wire.ChunksDone(weight_version=0, results=[], going_on=[part], **said))
        assert await trainer.engines() == []
        await engine.again()
        (chunk,) = await engine.chunks()
        await engine.end(chunk, [9])
        assert await trainer.done() == {"p": [9]}


async def test_an_engine_without_weights_to_trust_is_given_up_and_not_its_requests(monkeypatch):
    monkeypatch.setattr(buffer_server, "MAX_ATTEMPTS", 1)
    async with buffer() as world:
        trainer, engine = await world.trainer(), await world.engine()
        await trainer.submit("p")
        (chunk,) = await engine.chunks()
        other = await world.engine("other")
        fields = {"request_id": chunk.request_id, "attempt": chunk.attempt, "message": "no weights"}
        await engine.say(wire.ChunkFailed(code=NotLoaded.code, fatal=False, **fields))
        (chunk,) = await other.chunks()
        await other.end(chunk, [7])
        assert await trainer.done() == {"p": [7]}
        assert await trainer.engines() == ["other"]


# --- engines that come and go ----------------------------------------------------------------


async def test_what_an_earlier_incarnation_of_an_engine_says_does_not_count_for_the_later_one():
    async with buffer() as world:
        trainer, old, new = await world.trainer(), await world.engine(), await world.engine(incarnation=2)
        await new.report(steps=2)
        await trainer.submit("p")
        (chunk,) = await new.chunks()
        await old.report(steps=1)
        await old.end(chunk, [7])
        await old.say(wire.Goodbye())
        (engine,) = (await trainer.status()).instances
        assert engine.stats.steps == 2
        await new.end(chunk, [8])
        assert await trainer.done() == {"p": [8]}


async def test_that_an_earlier_incarnation_of_an_engine_is_gone_does_not_end_the_later_one():
    async with buffer(queue=8) as world:
        trainer = await world.trainer()
        await world.engine(incarnation=1)  # takes nothing, until there is no room for more
        await asyncio.sleep(10)
        new = await world.engine(incarnation=2)
        await trainer.submit("p")
        (chunk,) = await new.chunks()
        for _ in range(20):
            await pass_time(BRIEF, new)
            await asyncio.gather(new.hear(wire.Ping), trainer.hear(wire.Progress))
        assert await trainer.engines() == ["e"]
        await new.end(chunk, [7])
        assert await trainer.done() == {"p": [7]}


async def test_an_engine_that_registers_again_has_not_been_restarted():
    async with buffer() as world:
        trainer, engine = await world.trainer(), await world.engine()
        await engine.register()
        await engine.again()
        assert [engine.restarts for engine in (await trainer.status()).instances] == [0]
        await world.engine(incarnation=2)
        assert [engine.restarts for engine in (await trainer.status()).instances] == [1]


async def test_an_engine_that_is_gone_is_noticed_though_nothing_is_to_be_sent_to_it():
    async with buffer() as world:
        trainer, gone = await world.trainer(), await world.engine("gone")
        await world.engine("here")
        gone.socket.close()
        await asyncio.sleep(BRIEF)
        assert await trainer.engines() == ["here"]


async def test_whatever_an_engine_says_is_a_sign_of_life():
    async with buffer() as world:
        trainer, engines = await world.trainer(), [await world.engine(name) for name in ("a", "b", "c")]
        for _ in range(10):
            await asyncio.sleep(SILENT_SECONDS / 5)
            await engines[0].report()
            await engines[1].say(wire.WeightsLoaded(version=0))
        assert await trainer.engines() == ["a", "b"]


def fail(engine):
    return engine.say(wire.Goodbye(problem="CUDA error"))


async def vanish(engine):
    engine.socket.close()
    await asyncio.sleep(BRIEF)


def leave(engine):
    return engine.say(wire.Goodbye())


@pytest.mark.parametrize(("parts", "died"), [(fail, True), (vanish, True), (leave, False)])
async def test_an_engine_that_failed_or_whose_connection_is_gone_died(parts, died):
    """What ran on several that died is tried alone from then on."""
    async with buffer() as world:
        trainer = await world.trainer()
        await trainer.submit("p", "q")
        for incarnation in range(SUSPECT_DEATHS):
            engine = await world.engine(incarnation=incarnation)
            assert len(await engine.chunks()) == 2
            await parts(engine)
        engine = await world.engine(incarnation=SUSPECT_DEATHS)
        assert len(await engine.chunks()) == (1 if died else 2)


# --- who has to shake hands, and when --------------------------------------------------------


async def test_an_engine_that_is_given_up_shakes_hands_again_before_anything_of_it_counts():
    async with buffer() as world:
        trainer, engine = await world.trainer(), await world.engine()
        await trainer.submit("p")
        (chunk,) = await engine.chunks()
        await engine.end(chunk, [7], version=1)
        await engine.register()
        assert [refused.code for refused in await engine.hear(wire.Refused)] == [HELLO_FIRST]
        assert await trainer.engines() == []
        await engine.again()
        assert await trainer.engines() == ["e"]


async def test_an_engine_whose_name_is_free_again_registers_again_once_however_much_it_says():
    async with buffer() as world:
        trainer, old, new = await world.trainer(), await world.engine(), await world.engine(incarnation=2)
        await new.say(wire.Goodbye())
        for _ in range(5):
            await old.report()
        assert [refused.code for refused in await old.hear(wire.Refused)] == [HELLO_FIRST]
        await old.again()
        assert await trainer.engines() == ["e"]


async def test_an_engine_that_has_not_registered_yet_is_not_asked_to_do_so_again():
    async with buffer() as world:
        engine = await world.stranger()
        for _ in range(5):
            await engine.report()
        assert await engine.hear(wire.Refused) == []


async def test_an_incarnation_that_gets_its_name_late_begins_anew():
    async with buffer() as world:
        engine, holder, late = await world.engine(), await world.trainer(incarnation=2), await world.trainer()
        await late.submit("p")
        await holder.say(wire.Goodbye())
        await late.greet()
        await late.say(wire.StatusRequest())
        assert [refused.code for refused in await late.hear(wire.Refused)] == [HELLO_FIRST]
        await late.greet()
        await late.submit("p")
        (chunk,) = await engine.chunks()
        await engine.end(chunk, [7])
        assert await late.done() == {"p": [7]}


async def test_an_incarnation_that_lost_its_name_while_it_was_away_begins_anew():
    async with buffer() as world:
        engine, away = await world.engine(), await world.trainer(incarnation=2)
        session = await away.greet()
        await away.submit("p")
        away.transport.disconnect()
        await world.trainer(incarnation=1)
        (chunk,) = await engine.chunks()
        await engine.end(chunk, [7])
        away.transport.reconnect()
        assert await away.greet() != session
        await away.submit("p")
        assert await away.done() == {"p": [7]}


async def test_an_engine_that_lost_its_name_while_it_was_away_registers_again():
    async with buffer() as world:
        trainer, away = await world.trainer(), await world.engine(incarnation=2)
        session = await away.greet()
        away.transport.disconnect()
        other = await world.engine(incarnation=1)
        await trainer.submit("p")
        assert len(await other.chunks()) == 1
        away.transport.reconnect()
        assert await away.greet() != session
        await away.register()
        assert len(await away.chunks()) == 1


# --- trainers --------------------------------------------------------------------------------


async def test_whatever_a_trainer_says_is_a_sign_of_life_and_silence_ends_its_work():
    async with buffer(trainer_lease_seconds=10.0) as world:
        trainer, engine = await world.trainer(), await world.engine()
        await trainer.submit("p")
        for says in (
            wire.StatusRequest(),
            trainer.me.hello(-1),
            wire.Acknowledge(rollout_id="x", prompt_ids=[]),
        ):
            for _ in range(5):
                await pass_time(4, engine)
                await trainer.say(says)
        assert not await engine.hear(wire.DropChunk)
        await pass_time(14, engine)
        assert len(await engine.hear(wire.DropChunk)) == 1


async def test_a_trainer_that_is_blocked_while_it_trains_has_engines_sleep_as_long_as_it_is_connected():
    async with buffer(trainer_lease_seconds=10.0) as world:
        trainer, engine = await world.trainer(), await world.engine()
        await trainer.say(wire.Sleep(asleep=True))
        assert [order.asleep for order in await engine.hear(wire.Sleep)] == [True]
        await engine.say(wire.Slept(asleep=True))
        await pass_time(100, engine)
        assert not await engine.hear(wire.Sleep)
        trainer.transport.disconnect()
        await pass_time(14, engine)
        assert [order.asleep for order in await engine.hear(wire.Sleep)] == [False]


async def test_nothing_is_sent_to_a_trainer_that_said_goodbye():
    async with buffer() as world:
        trainer, engine = await world.trainer(), await world.engine()
        await trainer.submit("p")
        await trainer.say(wire.Goodbye())
        await trainer.hear(wire.Message)
        (chunk,) = await engine.chunks()
        await engine.end(chunk, [7])
        await asyncio.sleep(BRIEF)
        assert await trainer.hear(wire.Message) == []


async def test_a_buffer_that_has_drained_tells_everyone_what_its_last_event_led_to(monkeypatch):
    monkeypatch.setattr(outbox, "FAIR_EVERY", 1)
    world = World()
    config = Config(buffer=BufferConfig(engine_wait_seconds=5.0))
    server = BufferServer(config, MemoryTransport(world.network), LoopClock())
    await server.start()
    running = asyncio.create_task(server.run())
    trainers = [await Trainer(world.network, name, 1).connect() for name in ("t", "u", "v")]
    engine = await world.engine()
    for trainer in trainers:
        await trainer.submit("p")
    server.drain()
    await engine.say(wire.Goodbye())
    await asyncio.wait_for(running, 10)
    assert [[said.code for said in await each.hear(wire.Refused)] for each in trainers] == [["failed"]] * 3


# --- estimates -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "spread"), [(math.inf, 0.0), (-5.0, 0.5), (0.0, 0.5), (5.0, math.inf), (5.0, math.nan)]
)
async def test_an_estimate_that_makes_no_sense_changes_nothing(tokens, spread):
    async with buffer() as world:
        trainer, engine = await world.trainer(), await world.engine(seats=1)
        context = await world.context()
        await asyncio.sleep(BRIEF)
        await trainer.submit("first", "short", "long")
        await context.put("r/short", 10.0)
        await context.put("r/long", 20.0)
        news = wire.Estimates(estimates={"r/short": tokens}, spreads={"r/short": spread})
        await context.stream.publish(news)
        ran = []
        for _ in range(3):
            await asyncio.sleep(0.001)
            (chunk,) = await engine.chunks()
            ran.append(chunk.group_id)
            await engine.end(chunk, [7])
        assert ran == ["r/first", "r/long", "r/short"]


async def test_a_large_submission_lets_others_have_their_turns_and_is_judged_as_a_whole_when_repeated(
    monkeypatch,
):
    monkeypatch.setattr(submissions, "PART_REQUESTS", 2)
    async with buffer() as world:
        trainer = await world.trainer()
        await world.engine()
        await trainer.submit(*"abcde")
        parts = [accepted.prompt_ids for accepted in await trainer.hear(wire.Accepted)]
        assert parts == [["a", "b"], ["c", "d"], ["e"]]
        await trainer.submit(*"abcdef")
        parts = [accepted.prompt_ids for accepted in await trainer.hear(wire.Accepted)]
        assert [sorted(part) for part in parts] == [list("abcdef")]
        status = await trainer.status()
        assert status.requests_waiting + status.requests_running == 6


async def test_a_long_list_of_prompts_that_a_trainer_cancels_is_handled_in_parts(monkeypatch):
    monkeypatch.setattr(buffer_server.wire, "MAX_PROMPTS", 2)
    async with buffer() as world:
        trainer = await world.trainer()
        await world.engine()
        await trainer.submit("a", "b")
        await trainer.submit("c", "d")
        await trainer.say(wire.Cancel(rollout_id="r", prompt_ids=["x", "y", "a", "z", "b"]))
        await trainer.say(wire.Cancel(rollout_id="r"))
        refused = [each.prompt_ids for each in await trainer.hear(wire.Refused)]
        assert refused == [["a"], ["b"], ["c", "d"]]


async def test_an_engine_without_a_name_is_not_let_in():
    """The empty name stands for no engine."""
    async with buffer() as world:
        trainer, engine = await world.trainer(), await world.stranger("")
        (refused,) = await engine.hear(wire.Refused)
        assert "without a name" in refused.message
        await engine.register()
        await trainer.submit("p")
        await trainer.say(wire.Cancel(rollout_id="r"))
        await engine.say(wire.Goodbye())
        assert await trainer.engines() == []
