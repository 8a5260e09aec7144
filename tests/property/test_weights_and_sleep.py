"""Weights and sleep together, as the conductor joins their machines, with engines that keep their own books.

Engines join at any time, awake or asleep, with whatever weights, also in the middle of an update; they
obey in order, and lose their weights in sleep of level 2. A second machine that is told the same, made anew of
a snapshot now and then, answers the same. None is told to load while its weights sleep or are about to; none
that sleeps, or has other weights than the live ones, is given work; in the end each one that lives has the live
weights, and is in the state that was asked for last. Weights in place are loaded only by engines that the trainer
hears of, and once; who has none of them waits for the next update. Prompts run ahead now and then: never on an
engine that has a request, a load or sleep before it, and the machines, as those of the second one, know nothing of it.
"""

from collections import deque

import numpy as np
import orders
from hypothesis import example, given, settings
from hypothesis import strategies as st
from snapshots import again

from seer.common import wire
from seer.common.policy.schedule import POLICIES
from seer.common.sleep import SleepState
from seer.common.types import Capacity, SamplingParams
from seer.common.weights.in_place import is_in_place
from seer.services.buffer import sleep_machine, submissions
from seer.services.buffer.buffer_machine import BufferMachine
from seer.services.buffer.conductor import Conductor, Ended, Submitted
from seer.services.buffer.images.image_machine import ImageMachine
from seer.services.buffer.log.kept_chunks import KeptChunks
from seer.services.buffer.requests import events, state
from seer.services.buffer.requests.request_machine import RequestMachine
from seer.services.buffer.response_store import Store
from seer.services.buffer.weights.weights_machine import WeightsMachine

NAMES = ("a", "b", "c")
AWAKE, KV_ASLEEP, ASLEEP = SleepState
KINDS = (
    "join",
    "join asleep",
    "lose",
    "update",
    "update in place",
    "sleep",
    "sleep 2",
    "wake",
    "wake weights",
    "wake kv",
    "answer",
    "fail",
    "submit",
    "name next",
    "work",
    "work ahead",
    "tick",
    "restore",
)
STEPS = st.lists(st.tuples(st.sampled_from(KINDS), st.sampled_from(NAMES), st.integers(0, 9)), max_size=50)
PROMPT = np.arange(5, dtype=np.int32)


TAGS = {"wake": (), "wake weights": ("weights",), "wake kv": ("kv_cache",)}


class Engine:
    """`version`: -1 without weights; `dropped`: the version that it dropped to sleep, None for none."""

    def __init__(self, version, state):
        self.version, self.state, self.dropped = version, state, None
        self.orders = deque()

    @property
    def will_be(self):
        """What sleeps once it has done all it was told."""
        state = self.state
        for order in self.orders:
            if isinstance(order, wire.Sleep):
                state = after(order, state)
        return state


def after(order, state):
    return SleepState.ASLEEP if order.asleep else state.woken(order.tags)


class World:
    """A conductor with engines and trainers; what the server keeps apart (sleep and updates), this does."""

    def __init__(self):
        self.time = 0.0
        self.engines: dict[str, Engine] = {}
        self.chunks: dict[str, tuple[str, wire.RunChunk]] = {}
        self.ahead: dict[str, tuple[str, wire.RunChunk]] = {}
        self.answers: list[object] = []
        self.submitted = self.joined = self.asked = 0
        self.receivers: set[tuple[str, str]] = set()
        self.loads_in_place: set[tuple[str, str]] = set()
        self.wanted = None
        self.machine = RequestMachine(POLICIES["divided"], state.Limits(chunk_size=16))
        self.weights, self.sleep, self.store = WeightsMachine(50.0), sleep_machine.SleepMachine(50.0), Store()
        self.conductor = Conductor(
            self, BufferMachine(self.machine, self.weights, self.sleep), self.store, KeptChunks("", 1.0, 0.0, lambda _: None),
            ImageMachine(0), 1e9, 1e9, self, [self],
        )  # fmt: skip
        twin = RequestMachine(self.machine.policy, self.machine.limits)
        self.twin = BufferMachine(twin, WeightsMachine(50.0), sleep_machine.SleepMachine(50.0))

    def record(self, now, event, answered):
        assert self.twin.apply(event, now) == answered
        for loading in orders.pick(answered, wire.WeightsLoading):
            self.receivers |= {(name, self.weights.live.source) for name in loading.engines}

    def now(self):
        return self.time

    def incarnation(self, address, message):
        self.answers.append(message)

    trainer = incarnation

    def publish(self, message):
        """Nobody listens."""

    forget_engine = publish

    def engine(self, name, message):
        engine = self.engines[name]
        if isinstance(message, wire.LoadWeights | wire.PrepareWeights | wire.Sleep):
            held = self.machine.registry.holding
            assert not (held and self.ahead), "an update, or sleep, would wait for what runs ahead"
        match message:
            case wire.LoadWeights():
                assert engine.will_be is not SleepState.ASLEEP, f"{message} to one that sleeps"
                assert message.source or message.version == 0, "only the model of the start needs no source"
                if is_in_place(message.source):
                    load = (name, message.source)
                    assert load not in self.loads_in_place, "once"
                    self.loads_in_place.add(load)
                engine.orders.append(message)
            case wire.PrepareWeights():  # which it may, asleep
                engine.orders.append(message)
            case wire.Sleep(asleep=False) if not engine.will_be:
                pass  # it is awake, and learns by which wish
            case wire.Sleep():
                assert name not in self.weights.loading
                engine.orders.append(message)
            case wire.DropChunk() if message.request_id in self.ahead:
                at, chunk = self.ahead.pop(message.request_id)
                assert (at, chunk.attempt) == (name, message.attempt)
            case wire.RunChunk(ahead=True):
                assert not engine.state
                assert not engine.orders
                assert engine.version == self.weights.live.version
                assert name not in {at for at, _ in self.chunks.values()}, "a request runs there"
                assert message.request_id not in self.ahead, "once"
                self.ahead[message.request_id] = name, message
            case wire.RunChunk():
                assert not engine.state
                assert name not in {at for at, _ in self.ahead.values()}, "it would wait for what runs ahead"
                assert all(isinstance(order, wire.PrepareWeights) for order in engine.orders)
                assert engine.version == self.weights.live.version
                self.chunks[message.request_id] = name, message

    def step(self, kind, name, number):
        engine = self.engines.get(name)
        match kind:
            case "join" | "join asleep":
                self.lose(name, say=False)
                self.engines[name] = engine = Engine(number // 3 - 1, ASLEEP if kind != "join" else AWAKE)
                self.joined += 1
                self.conductor.join(name, register(engine), self.joined)
            case "lose":
                self.lose(name)
            case "update" if self.sleep.wanted is not ASLEEP:
                self.conductor.apply(orders.update("t", number, f"/w{number}", call_id=number))
            case "update in place" if self.sleep.wanted is not ASLEEP:
                self.asked += 1
                source = f"inplace:spool:{self.asked}"
                self.conductor.apply(orders.update("t", number, source, source, call_id=self.asked))
            case "sleep" | "sleep 2" | "wake" | "wake weights" | "wake kv" if not self.weights.updating:
                level = 2 if kind == "sleep 2" else 1
                asked = orders.sleep("t", kind not in TAGS, 0, level, TAGS.get(kind, ()))
                self.conductor.apply(asked)
            case "answer" | "fail" if engine is not None and engine.orders:
                self.obey(name, engine, "broken" if kind == "fail" else "")
            case "submit" if self.submitted < 5:
                self.submit()
            case "name next":
                self.name_next(number)
            case "work" | "work ahead":
                self.work() if kind == "work" else self.work_ahead()
            case "tick":
                self.time += number
                self.conductor.tick()
            case "restore":
                self.twin = again(self.twin)

    def lose(self, name, say=True):
        if self.engines.pop(name, None) is not None:
            self.loads_in_place = {load for load in self.loads_in_place if load[0] != name}
            self.chunks = {key: (at, chunk) for key, (at, chunk) in self.chunks.items() if at != name}
            self.ahead = {key: (at, chunk) for key, (at, chunk) in self.ahead.items() if at != name}
            if say:
                self.conductor.give_up([name], "a test says so")

    def obey(self, name, engine, problem=""):
        match order := engine.orders.popleft():
            case wire.Sleep():
                engine.state = after(order, engine.state)
                if order.asleep and order.level == 2 and engine.version >= 0:
                    engine.version, engine.dropped = -1, engine.version
                state, dropped = engine.state, engine.dropped is not None
                answered = orders.slept(name, bool(state), tuple(state.tags), dropped)
                self.conductor.apply(answered)
            case wire.PrepareWeights():
                digest = order.source if is_in_place(order.source) else f"d{order.version}"
                self.conductor.apply(orders.prepared(name, order.version, digest, problem, order.call_id))
            case wire.LoadWeights():
                assert engine.state is not ASLEEP
                engine.version, engine.dropped = -1 if problem else order.version, None
                self.conductor.apply(orders.loaded(name, order.version, problem, order.call_id))

    def submit(self):
        self.submitted += 1
        rollout = f"r{self.submitted}"
        submit = wire.Submit(
            rollout_id=rollout, rollout_number=0, seed=0, n=1, sampling=SamplingParams(max_tokens=8),
            prompt_ids=["p"], lengths=[5], tokens=PROMPT,
        )  # fmt: skip
        event = events.GroupsSubmitted("t", rollout, 1, 8, [events.GroupSpec("p", 5)])
        self.conductor.apply(event, Submitted("t", submit, submissions.prompts(submit)))

    def name_next(self, number):
        asked = wire.NextPrompts(
            rollout_id=f"n{number % 2}", rollout_number=0, seed=0, n=number + 1, sampling=SamplingParams(max_tokens=80),
            prompt_ids=["p"], lengths=[5], tokens=PROMPT,
        )  # fmt: skip
        trainer = "tu"[number % 2]
        self.conductor.name_next(trainer, trainer.encode(), asked, submissions.prompts(asked))

    def work_ahead(self):
        for key, (name, chunk) in list(self.ahead.items()):
            if key in self.ahead:
                del self.ahead[key]
                finish = "" if chunk.attempt % 2 else "stop"
                result = orders.ended(name, key, chunk.attempt, 1, finish).result
                assert self.conductor.ended_ahead(name, result, np.array([7], np.int32))

    def work(self):
        for key, (name, chunk) in list(self.chunks.items()):
            del self.chunks[key]
            ended = orders.ended(name, key, chunk.attempt, 1, "stop", "")
            self.conductor.apply(ended, Ended(np.array([7], np.int32), np.zeros(1, np.float32)))

    def settle(self):
        """Let everybody do all that they were told, with success."""
        self.conductor.tick()
        while self.chunks or any(engine.orders for engine in self.engines.values()):
            self.work()
            for name, engine in list(self.engines.items()):
                if engine.orders:
                    self.obey(name, engine)
            self.conductor.tick()
        if self.machine.requests:  # no engine may run them: they fail in time
            self.time += self.machine.limits.engine_wait_seconds + 1
            self.settle()


def register(engine):
    version = engine.version if engine.dropped is None else engine.dropped
    return wire.Register(
        capacity=Capacity(kv_blocks=20, block_size=16, max_num_seqs=8, max_model_len=256),
        weight_version=engine.version,
        weights_digest=f"d{version}" if version >= 0 else "",
        weights_source=f"/w{version}" if version > 0 else "",
        sleeping=engine.state.tags,
        dropped_version=-1 if engine.dropped is None else engine.dropped,
    )


@settings(max_examples=400)
@given(STEPS)
@example([("join", "a", 6), ("sleep", "a", 0), ("answer", "a", 0), ("join", "b", 3)])
@example([("join", "a", 6), ("sleep", "a", 0), ("answer", "a", 0), ("join asleep", "b", 3)])
@example([("join", "a", 6), ("submit", "a", 0), ("join asleep", "b", 6), ("submit", "a", 0)])
@example([("join", "a", 3), ("sleep 2", "a", 0), ("answer", "a", 0), ("wake", "a", 0), ("answer", "a", 0)])
@example([("join", "a", 6), ("sleep 2", "a", 0), ("answer", "a", 0), ("wake weights", "a", 0)])
@example([("join", "a", 3), ("name next", "a", 1), ("tick", "a", 1), ("submit", "a", 0)])
@example([("join", "a", 3), ("submit", "a", 0), ("name next", "a", 1), ("tick", "a", 1), ("work", "a", 0)])
@example(
    [  # what came in place is dropped, and the next comes while KV sleeps
        ("join", "a", 3), ("update in place", "a", 5), ("answer", "a", 0), ("answer", "a", 0), ("sleep 2", "a", 0),
        ("answer", "a", 0), ("wake weights", "a", 0), ("answer", "a", 0), ("update in place", "a", 6),
        ("answer", "a", 0), ("answer", "a", 0), ("wake kv", "a", 0),
    ]
)  # fmt: skip
@example(
    [  # the second one fails while KV sleeps: the model of the start is loaded again once it is awake
        ("join", "a", 3), ("join", "b", 3), ("sleep", "a", 0), ("answer", "a", 0), ("answer", "b", 0),
        ("wake weights", "a", 0), ("answer", "a", 0), ("answer", "b", 0), ("update in place", "a", 6),
        ("answer", "a", 0), ("answer", "b", 0), ("fail", "a", 0), ("fail", "b", 0), ("wake kv", "a", 0),
    ]
)  # fmt: skip
def test_none_loads_asleep_and_all_end_as_was_asked_last(steps):
    world = World()
    for step in steps:
        world.step(*step)
        assert world.weights.known == world.engines.keys()
        assert world.loads_in_place <= world.receivers
    world.settle()
    if not world.engines:  # an update waits for an engine
        world.time += 901
        world.conductor.tick()
    assert not world.weights.updating
    assert not world.weights.loading
    assert {engine.state for engine in world.engines.values()} <= {world.sleep.wanted}
    assert world.sleep.held == bool(world.sleep.wanted)
    # Who has to load does so once it is awake, from what it was started with or where the trainer said.
    world.time += (
        sleep_machine.GRACE_SECONDS + 1
    )  # where no engine is there, a request for sleep is answered now
    world.conductor.tick()
    world.step("wake", "", 0)
    world.settle()
    assert not world.machine.registry.holding
    for name, engine in world.engines.items():
        if name not in world.weights.quarantined:
            assert engine.version == world.weights.live.version
    assert world.weights.admitted == world.engines.keys() - world.weights.quarantined.keys()
    # Whatever failed before, a later version heals.
    world.step("update", "", 12)
    world.settle()
    if world.weights.admitted and world.weights.live.version == 12:
        assert {engine.version for engine in world.engines.values()} == {12}
        assert not any(engine.state for engine in world.engines.values())
        assert world.weights.admitted == world.engines.keys()
