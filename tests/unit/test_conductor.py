"""The conductor without sockets: what it sends, and what it tells which machine."""

import numpy as np
import orders
import pytest
import structlog
from msgspec import structs

from seer.common import wire
from seer.common.errors import InvalidField
from seer.common.policy.schedule import POLICIES
from seer.common.types import Capacity, Placed, SamplingParams
from seer.services.buffer import sleep_machine, submissions
from seer.services.buffer.buffer_machine import BufferMachine
from seer.services.buffer.conductor import COLLECT_SECONDS, TICK_SECONDS, Conductor, Ended, Submitted
from seer.services.buffer.events import Tick, Weights
from seer.services.buffer.failed_prompts import FOLD_SECONDS
from seer.services.buffer.images.image_machine import ImageMachine
from seer.services.buffer.log.kept_chunks import KeptChunks
from seer.services.buffer.requests import deliveries, events, state
from seer.services.buffer.requests.request_machine import RequestMachine
from seer.services.buffer.response_store import Store
from seer.services.buffer.weights.weights_machine import WeightsMachine

REGISTER = wire.Register(
    capacity=Capacity(kv_blocks=20, block_size=16, max_num_seqs=8, max_model_len=256), weight_version=0
)
PROMPT = np.arange(5, dtype=np.int32)


class World:
    """A conductor, its machines, and what it sent, in order."""

    def __init__(self):
        self.time = 0.0
        self.sent = []
        self.machine = RequestMachine(POLICIES["divided"], state.Limits(chunk_size=16))
        self.lost = []
        self.weights, self.sleep, self.store = WeightsMachine(9.0), sleep_machine.SleepMachine(9.0), Store()
        self.images = ImageMachine(2**30)
        self.conductor = Conductor(
            self,
            BufferMachine(self.machine, self.weights, self.sleep),
            self.store,
            KeptChunks("", 1.0, 0.0, lambda _: None),
            self.images,
            20.0,
            60.0,
            self,
        )
        self.forget_engine = self.lost.append
        self.reads = True

    def now(self):
        return self.time

    def engine(self, name, message):
        self.sent.append((name, message))

    trainer = engine

    def incarnation(self, address, message):
        self.sent.append((address.decode(), message))

    def keeps_up(self, _):
        return self.reads

    def publish(self, message):
        self.sent.append(("", message))

    def submit(self, prompts=("p",), max_tokens=8, **fields):
        submit = wire.Submit(
            rollout_id="r",
            rollout_number=0,
            seed=0,
            n=1,
            sampling=SamplingParams(max_tokens=max_tokens),
            prompt_ids=list(prompts),
            lengths=[5] * len(prompts),
            tokens=np.concatenate([PROMPT] * len(prompts)),
            **fields,
        )
        tokens = submissions.prompts(submit)
        event = submissions.event(
            "t", b"t", submit, tokens, self.store, KeptChunks("", 1.0, 0.0, lambda _: None), self.images
        )
        self.conductor.apply(event, Submitted("t", submit, tokens))

    def end(self, name, chunk, tokens, finish="stop", start=0):
        ended = orders.ended(name, chunk.request_id, chunk.attempt, len(tokens), finish, "", start=start)
        self.conductor.apply(ended, Ended(np.array(tokens, np.int32), np.zeros(len(tokens), np.float32)))

    def tick_until(self, time, heard=()):
        while self.time < time:
            self.time += TICK_SECONDS
            for name in heard:
                self.conductor.received_from_engine(name)
            self.conductor.tick()

    def take(self, kind):
        """Return what was sent of one kind, with whom to; forget the rest."""
        taken, self.sent = [(name, sent) for name, sent in self.sent if isinstance(sent, kind)], []
        return taken

    def where(self, name):
        return name in self.machine.instances, name in self.weights, name in self.sleep._states


def test_an_event_is_messages_by_the_time_it_is_handled():
    world = World()
    world.conductor.join("a", REGISTER, 1)
    world.submit()
    [(name, chunk)] = world.take(wire.RunChunk)
    assert (name, chunk.request_id, chunk.tokens.tolist()) == ("a", "r/p#0", PROMPT.tolist())
    world.end("a", chunk, [7, 8])
    [(trainer, done)] = world.take(wire.GroupDone)
    assert (trainer, done.tokens.tolist(), done.finish_reasons) == ("t", [7, 8], ["stop"])


def test_a_stream_has_no_gap_however_its_reader_fares():
    """What is not read meanwhile, is lost, or was made before an engine died, comes with the next tokens."""
    world = World()
    world.conductor.join("a", REGISTER, 1)
    world.submit(open=True, groups=["g"], stream=True, submission=1)
    [(_, chunk)] = world.take(wire.RunChunk)
    assert chunk.stream

    def stream(chunk, start, *tokens):
        """A chunk goes on with these tokens; return what its trainer is sent."""
        arrays = Ended(np.array(tokens, np.int32), np.zeros(len(tokens), np.float32))
        told = orders.streamed("a", chunk.request_id, chunk.attempt, len(tokens), start)
        world.conductor.apply(told, arrays)
        world.conductor.send_streamed()
        return [(each.parts[0].start, each.tokens.tolist()) for _, each in world.take(wire.TokensGenerated)]

    assert stream(chunk, 0, 1, 2) == [(0, [1, 2])]
    assert stream(chunk, 2, 3) == [(2, [3])]
    world.reads = False
    assert stream(chunk, 3, 4) == []
    world.reads = True
    assert stream(chunk, 4, 5) == [(3, [4, 5])]
    world.submit(open=True, groups=["g"], stream=True, submission=2)  # it has lost something
    assert stream(chunk, 5, 6) == [(0, [1, 2, 3, 4, 5, 6])]
    world.conductor.give_up(["a"], "silent")
    world.conductor.join("a", REGISTER, 2)
    [(_, again)] = world.take(wire.RunChunk)
    assert (again.tokens.tolist(), again.max_new_tokens) == ([*PROMPT.tolist(), 1, 2, 3, 4, 5, 6], 2)
    assert stream(chunk, 6, 9) == []  # of an earlier attempt
    assert stream(again, 0, 7) == [(6, [7])]
    world.end("a", again, [8], start=1)
    [(_, done)] = world.take(wire.GroupDone)
    assert done.tokens.tolist() == [*range(1, 9)]
    world.conductor.apply(orders.acknowledged("t", "r", ["p"]))
    assert not world.store._sent


def test_streams_of_one_trainer_share_a_message_and_groups_that_are_gone_have_no_part():
    world = World()
    world.conductor.join("a", REGISTER, 1)
    world.submit(("p", "q", "x"), open=True, groups=["g", "h", "i"], stream=True, submission=1)
    chunks = [chunk for _, chunk in world.take(wire.RunChunk)]
    for count, chunk in enumerate(chunks, start=1):
        arrays = Ended(np.arange(count, dtype=np.int32), np.zeros(count, np.float32))
        world.conductor.apply(orders.streamed("a", chunk.request_id, chunk.attempt, count), arrays)
    world.conductor.apply(orders.cancelled("t", "r", ["q"]))
    world.conductor.send_streamed()
    [(_, told)] = world.take(wire.TokensGenerated)
    assert [(part.prompt_id, part.start, part.count) for part in told.parts] == [("p", 0, 1), ("x", 0, 3)]
    assert told.tokens.tolist() == [0, 0, 1, 2]
    world.conductor.send_streamed()
    assert not world.take(wire.TokensGenerated)


def silence(world):
    world.tick_until(21.0)


def oversleep(world):
    world.conductor.apply(orders.sleep("t", True))
    world.time = 10.0
    world.conductor.apply(Tick())


@pytest.mark.parametrize(
    "leave",
    [
        lambda world: world.conductor.engines_left(["a"]),
        lambda world: world.conductor.give_up(["a"], "a test says so"),
        silence,
        oversleep,
    ],
    ids=["left", "given up", "silent", "does not sleep"],
)
def test_an_engine_that_is_gone_is_gone_for_all_three_machines(leave):
    world = World()
    world.conductor.join("a", REGISTER, 1)
    assert world.where("a") == (True, True, True)
    leave(world)
    assert world.where("a") == (False, False, False)


def test_a_draining_conductor_waits_a_while_for_its_last_results_to_be_collected():
    world = World()
    world.conductor.join("a", REGISTER, 1)
    world.submit()
    world.conductor.drain()
    [(_, chunk)] = world.take(wire.RunChunk)
    world.time = 15.0
    world.end("a", chunk, [7])
    assert not world.conductor.drained.is_set()
    world.time += COLLECT_SECONDS + 1
    world.conductor.tick()
    assert world.conductor.drained.is_set()


def test_a_draining_conductor_waits_for_nothing_that_its_successor_does():
    world = World()
    world.conductor.join("a", REGISTER, 1)
    world.submit()
    [(_, chunk)] = world.take(wire.RunChunk)
    world.conductor.drain()
    world.submit(("p", "later"))
    assert not world.take(wire.RunChunk)
    world.end("a", chunk, [7])
    world.conductor.apply(orders.acknowledged("t", "r", ["p"]))
    assert world.conductor.drained.is_set()
    assert set(world.machine.groups) == {"r/later"}


def test_an_engine_that_is_heard_lives_and_one_that_loads_is_watched_too():
    world = World()
    other = Weights(1, "new", "/new")
    world.weights.live = other
    world.conductor.join("a", REGISTER, 1)  # has old weights: it is told to load
    world.conductor.join("b", REGISTER, 2)
    assert [name for name, _ in world.take(wire.LoadWeights)] == ["a", "b"]
    world.tick_until(21.0, heard=["b"])
    assert world.lost == ["a"]
    assert ("a" in world.weights, "b" in world.weights) == (False, True)


def test_a_reader_that_stops_holds_up_a_window_of_results(monkeypatch):
    monkeypatch.setattr(deliveries, "WINDOW_BYTES", 3 * 8 * 7)  # three groups of 5 + 2 tokens
    world = World()
    world.conductor.join("a", REGISTER, 1)
    world.submit([str(i) for i in range(20)])
    sent = []
    while chunks := world.take(wire.RunChunk | wire.GroupDone):
        sent += [item.prompt_id for _, item in chunks if isinstance(item, wire.GroupDone)]
        for name, chunk in chunks:
            if isinstance(chunk, wire.RunChunk):
                world.end(name, chunk, [1, 2])
    assert len(sent) == 3
    while len(sent) < 20:
        world.conductor.apply(orders.acknowledged("t", "r", [sent[-3]]))
        sent += [item.prompt_id for _, item in world.take(wire.GroupDone)]
    assert sorted(sent, key=int) == [str(i) for i in range(20)]
    world.conductor.received_from_trainer(b"t", 2)  # what was under way is asked for again
    world.submit(sent[-3:])
    assert [item.prompt_id for _, item in world.take(wire.GroupDone)] == sent[-3:]


def test_what_was_under_way_to_a_trainer_that_lost_it_holds_up_nothing_else(monkeypatch):
    monkeypatch.setattr(deliveries, "WINDOW_BYTES", 1)
    world = World()
    world.conductor.join("a", REGISTER, 1)
    world.conductor.received_from_trainer(b"t", 1)
    world.submit(["lost", "next"])
    for name, chunk in world.take(wire.RunChunk):
        world.end(name, chunk, [1, 2])
    assert [done.prompt_id for _, done in world.take(wire.GroupDone)] == ["lost"]
    world.conductor.received_from_trainer(b"t", 2)
    world.submit(["next"])  # the other one is not wanted any more
    assert [done.prompt_id for _, done in world.take(wire.GroupDone)] == ["next"]


def test_silence_and_another_registration_of_the_same_incarnation_speak_against_nothing():
    world = World()
    world.conductor.join("a", REGISTER, 1)
    world.submit()
    for incarnation in (2, 3, 4):
        world.conductor.join("a", REGISTER, incarnation)
    request = world.machine.requests["r/p#0"]
    for _ in range(2):
        assert request.alone
        world.conductor.join("a", REGISTER, 4)
    world.tick_until(21.0)
    assert (world.lost, request.deaths) == (["a"], {1, 2, 3})
    assert world.machine.requests


def test_what_ends_last_lets_an_update_and_sleep_go_on_at_once():
    world = World()
    world.conductor.join("a", REGISTER, 1)
    world.submit()
    [(_, chunk)] = world.take(wire.RunChunk)
    world.conductor.apply(orders.update("t", 1, "/new"))
    world.conductor.apply(orders.prepared("a", 1, "d"))
    assert not world.take(wire.LoadWeights)
    world.end("a", chunk, [7])
    assert [name for name, _ in world.take(wire.LoadWeights)] == ["a"]
    world.conductor.apply(orders.loaded("a", 1))
    world.submit(["q"], weight_version=1, submission=1)
    [(_, chunk)] = world.take(wire.RunChunk)
    world.conductor.apply(orders.sleep("t", True))
    world.end("a", chunk, [7])
    assert [name for name, _ in world.take(wire.Sleep)] == ["a"]


def test_two_trainers_cannot_make_the_store_lose_a_prompt():
    world = World()
    world.conductor.join("a", REGISTER, 1)
    world.submit(["p"])
    world.conductor.apply(events.SubmissionsHeld(True))
    world.submit(["h"])
    other = wire.Submit(
        rollout_id="r", rollout_number=0, seed=0, n=1, sampling=SamplingParams(max_tokens=8),
        prompt_ids=["p", "h"], lengths=[5, 5], tokens=np.concatenate([PROMPT, PROMPT]),
    )  # fmt: skip
    tokens = submissions.prompts(other)
    event = submissions.event(
        "u", b"u", other, tokens, world.store, KeptChunks("", 1.0, 0.0, lambda _: None), world.images
    )
    world.conductor.apply(event, Submitted("u", other, tokens))
    assert [(name, item.prompt_ids) for name, item in world.sent if isinstance(item, wire.Refused)] == [
        ("u", ["p", "h"])
    ]
    assert len(world.store) == 2
    world.conductor.apply(events.SubmissionsHeld(False))
    assert {item.request_id for _, item in world.take(wire.RunChunk)} == {"r/p#0", "r/h#0"}


def test_a_group_that_waited_for_its_reader_has_the_weights_that_made_it(monkeypatch):
    monkeypatch.setattr(deliveries, "WINDOW_BYTES", 1)
    world = World()
    world.conductor.join("a", structs.replace(REGISTER, weights_digest="begun"), 1)
    world.conductor.received_from_trainer(b"t", 1)
    world.submit(("p", "q"))
    for _, chunk in world.take(wire.RunChunk):
        world.end("a", chunk, [1])
    assert [done.prompt_id for _, done in world.take(wire.GroupDone)] == ["p"]
    world.conductor.apply(orders.update("t", 1, "/w"))
    world.conductor.apply(orders.prepared("a", 1, "d"))
    world.conductor.apply(orders.loaded("a", 1))
    assert world.machine.weight_version == 1
    world.sent.clear()
    world.conductor.apply(orders.acknowledged("t", "r", ["p"]))
    ((_, done),) = world.take(wire.GroupDone)
    assert (done.prompt_id, done.weight_version, done.weights_digest) == ("q", 0, "begun")


@pytest.mark.parametrize(("incarnation", "deaths"), [(1, 0), (2, 1)])
def test_an_incarnation_that_registers_again_has_not_died(incarnation, deaths):
    world = World()
    world.conductor.join("a", REGISTER, 1)
    world.submit()
    without = structs.replace(REGISTER, weight_version=-1)  # so it gets no work, which would clear it, too
    world.conductor.join("a", without, incarnation)
    assert len(world.machine.requests["r/p#0"].deaths) == deaths


def test_a_draining_conductor_stays_until_engines_have_loaded():
    world = World()
    world.conductor.join("a", REGISTER, 1)
    world.conductor.apply(orders.update("t", 1, "/new"))
    world.conductor.apply(orders.prepared("a", 1, "d"))
    world.conductor.drain()
    assert not world.conductor.drained.is_set(), "the engine may read what ends with this buffer"
    world.conductor.apply(orders.loaded("a", 1))
    assert world.conductor.drained.is_set()


def test_an_engine_that_was_dropped_is_lost_once():
    world = World()
    world.conductor.join("a", REGISTER, 1)
    world.conductor.engines_left(["a"])
    world.conductor.received_from_engine("a")
    world.conductor.give_up(["a"], "silent")
    assert world.lost == []


def test_what_an_update_aborts_has_ended_before_engines_hear_of_it():
    world = World()
    world.conductor.join("a", REGISTER, 1)
    world.submit()
    world.sent.clear()
    world.conductor.apply(orders.update("t", 1, "/w", in_flight="abort"))
    kinds = [type(message) for _, message in world.sent]
    assert kinds.index(wire.DropChunk) < kinds.index(wire.PrepareWeights)


# --- prompts with images ----------------------------------------------------------------------------

X, Y = "a" * 64, "b" * 64
PLACED = [Placed(X, 1, 2), Placed(Y, 3, 1)]
WITH_IMAGES = structs.replace(REGISTER, capacity=structs.replace(REGISTER.capacity, image_tokens=4))


def arrive(world, name):
    kept = world.images.get(name)
    if kept is None:
        world.images.begin(name, 5, world.time)
        kept = world.images.get(name)
    kept.have, kept.checked = 5, True
    world.conductor.apply(events.ImageArrived(name))


def test_a_prompt_waits_for_all_its_images_and_every_chunk_names_all_of_them():
    world = World()
    world.conductor.join("a", WITH_IMAGES, 1)
    world.submit(max_tokens=40, images=[PLACED])
    arrive(world, X)
    assert not world.take(wire.RunChunk | wire.Refused)
    arrive(world, Y)
    for _ in range(3):
        [(_, chunk)] = world.take(wire.RunChunk)
        assert chunk.images == PLACED
        assert chunk.tokens[:5].tolist() == PROMPT.tolist()
        tokens = list(range(chunk.max_new_tokens))
        world.end("a", chunk, tokens, "" if chunk.max_new_tokens == 16 else "length")


def test_images_of_a_group_stay_until_it_is_forgotten():
    world = World()
    world.conductor.join("a", WITH_IMAGES, 1)
    world.submit(images=[PLACED])
    for name in (X, Y):
        arrive(world, name)
    [(_, chunk)] = world.take(wire.RunChunk)
    filling = world.images._max_bytes - 9
    with pytest.raises(ValueError, match="images in use have 10"):
        world.images.begin("c" * 64, filling, 0.0)
    world.end("a", chunk, [7])
    world.conductor.apply(orders.acknowledged("t", "r", ["p"]))
    assert world.images.begin("c" * 64, filling, 0.0) == [X]


def test_engines_without_images_get_no_chunk_with_one():
    world = World()
    world.conductor.join("old", REGISTER, 1)
    world.submit(images=[PLACED])
    [(_, refused)] = world.take(wire.Refused)
    assert refused.message.startswith("images: no engine takes images")
    world.conductor.join("new", WITH_IMAGES, 2)
    for name in (X, Y):
        arrive(world, name)
    world.submit(("p", "q", "r"), images=[PLACED] * 3)
    assert {name for name, _ in world.take(wire.RunChunk)} == {"new"}
    world.submit(("large",), images=[[Placed(X, 0, 5)]])
    [(_, refused)] = world.take(wire.Refused)
    assert "an image of 5 tokens fits no instance, 4 is the most" in refused.message


def test_a_prompt_with_images_waits_for_its_engine_to_come_back():
    world = World()
    world.conductor.join("old", REGISTER, 1)
    world.conductor.join("new", WITH_IMAGES, 2)
    for name in (X, Y):
        arrive(world, name)
    world.submit(images=[PLACED])
    [(name, _)] = world.take(wire.RunChunk)
    assert name == "new"
    world.conductor.engines_left(["new"])
    assert not world.take(wire.RunChunk | wire.Refused)
    world.conductor.join("new", WITH_IMAGES, 3)
    assert [name for name, _ in world.take(wire.RunChunk)] == ["new"]


def test_other_images_under_an_id_are_refused_as_other_tokens_are():
    world = World()
    world.conductor.join("a", WITH_IMAGES, 1)
    world.submit(submission=1, images=[PLACED])
    world.submit(submission=1, images=[[Placed(X, 1, 2)]])
    [(_, refused)] = world.take(wire.Refused)
    assert "already submitted with other tokens" in refused.message
    world.submit(submission=2, images=[[Placed(X, 1, 2)]])
    assert world.store._groups["r/p"].prompt.images == [Placed(X, 1, 2)]
    assert world.images._users == {X: {"t": 1}}


@pytest.mark.parametrize(
    ("images", "field"),
    [
        ([[], []], "images"),
        ([[Placed("x", 0, 1)]], "images[0][0].name"),
        ([[Placed(X, -1, 2)]], "images[0][0].offset"),
        ([[Placed(X, 0, 2), Placed(X, 1, 2)]], "images[0][1].offset"),
        ([[Placed(X, 3, 1), Placed(X, 0, 1)]], "images[0][1].offset"),
        ([[Placed(X, 0, 0)]], "images[0][0].length"),
        ([[Placed(X, 0, -(2**62))]], "images[0][0].length"),
        ([[Placed(X, 4, 2)]], "images[0][0].length"),
        ([[Placed(X, 100, 1)]], "images[0][0].offset"),
        ([[Placed(X, 2**62, 1)]], "images[0][0].offset"),
        ([[Placed(X, 0, 2**63)]], "images[0][0].length"),
    ],
)
def test_images_that_cannot_stand_where_they_are_said_to_are_refused_by_name(images, field):
    world = World()
    with pytest.raises(InvalidField) as refused:
        world.submit(images=images)
    assert refused.value.field == field


def test_a_buffer_warns_of_prompts_that_fail_and_not_of_those_that_are_cancelled():
    world = World()
    world.conductor.join("a", REGISTER, 1)
    world.submit(("long", "longer"), max_tokens=10_000)
    with structlog.testing.capture_logs() as logs:
        world.conductor.tick()
    [line] = [each for each in logs if each["event"] == "prompts failed"]
    assert line["log_level"] == "warning"
    assert (line["prompts"], line["rollout"]) == (2, "r")
    assert line["ids"] == ["r/long", "r/longer"]
    assert "10000" in line["why"]
    world.time += FOLD_SECONDS
    world.submit()
    world.conductor.apply(orders.cancelled("t", "r", []))
    with structlog.testing.capture_logs() as logs:
        world.conductor.tick()
    assert [(each["event"], each["log_level"]) for each in logs] == [("prompts cancelled", "info")]


def test_prompts_of_a_trainer_that_gives_no_sign_of_life_run_ahead_no_longer():
    world = World()
    world.conductor.join("a", REGISTER, 1)
    asked = wire.NextPrompts(
        rollout_id="n", rollout_number=0, seed=0, n=1, sampling=SamplingParams(max_tokens=8), prompt_ids=["p"],
        lengths=[5], tokens=PROMPT,
    )  # fmt: skip
    world.conductor.received_from_trainer(b"t", 1)
    world.conductor.name_next("t", b"t", asked, submissions.prompts(asked))
    world.tick_until(59.0, heard=["a"])
    [(name, chunk)] = world.take(wire.RunChunk)
    assert (name, chunk.ahead) == ("a", True)
    world.tick_until(70.0, heard=["a"])
    [(name, drop)] = world.take(wire.DropChunk)
    assert (name, drop.request_id, drop.attempt) == ("a", chunk.request_id, chunk.attempt)
