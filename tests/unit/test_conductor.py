"""The conductor without sockets: what it sends, and what it tells which machine."""

import numpy as np
import pytest

from seer.common.policy.schedule import POLICIES
from seer.common.types import Capacity, SamplingParams
from seer.common.wire import messages as m
from seer.services.buffer import events as e
from seer.services.buffer import sleep as s
from seer.services.buffer import weights as w
from seer.services.buffer.conductor import COLLECT_SECONDS, Conductor
from seer.services.buffer.machine import Machine
from seer.services.buffer.store import Store

REGISTER = m.Register(
    capacity=Capacity(kv_blocks=20, block_size=16, max_num_seqs=8, max_model_len=256),
    weight_version=0,
    vocab_size=100,
)
PROMPT = np.arange(5, dtype=np.int32)


class World:
    """A conductor, its machines, and what it sent, in order."""

    def __init__(self):
        self.time = 0.0
        self.sent = []
        self.machine = Machine(POLICIES["divided"], e.Limits(chunk_size=16, engine_silence_seconds=20.0))
        self.weights, self.sleep, self.store = w.WeightsMachine(9.0), s.SleepMachine(9.0), Store()
        self.conductor = Conductor(
            self,
            self.machine,
            self.weights,
            self.sleep,
            self.store,
            to_engine=lambda name, message: self.sent.append((name, message)),
            to_trainer=lambda name, message: self.sent.append((name, message)),
            publish=lambda message: self.sent.append(("", message)),
        )

    def now(self):
        return self.time

    def submit(self):
        sampling = SamplingParams(max_tokens=8)
        submit = m.Submit(
            rollout_id="r",
            rollout_number=0,
            seed=0,
            n=1,
            sampling=sampling,
            prompt_ids=["p"],
            lengths=[5],
            tokens=PROMPT,
        )
        self.store.open(submit, "p", PROMPT)
        self.conductor.handle(e.GroupsSubmitted("t", "r", 1, 8, [e.GroupSpec("p", 5)]))

    def take(self, kind):
        """Return what was sent of one kind, with whom to; forget the rest."""
        taken, self.sent = [(name, sent) for name, sent in self.sent if isinstance(sent, kind)], []
        return taken

    def where(self, name):
        return name in self.machine.instances, name in self.weights, name in self.sleep._asleep


def test_an_event_is_messages_by_the_time_it_is_handled():
    world = World()
    world.conductor.join("a", REGISTER)
    world.submit()
    [(name, chunk)] = world.take(m.RunChunk)
    assert (name, chunk.request_id, chunk.tokens.tolist()) == ("a", "r/p#0", PROMPT.tolist())
    ended = e.ChunkEnded("a", chunk.request_id, chunk.attempt, 2, "stop", "")
    world.conductor.handle(ended, np.array([7, 8], np.int32), np.zeros(2, np.float32))
    [(trainer, done)] = world.take(m.GroupDone)
    assert (trainer, done.tokens.tolist(), done.finish_reasons) == ("t", [7, 8], ["stop"])


def silence(world):
    world.time = 60.0
    world.conductor.tick()


def oversleep(world):
    world.conductor.rest(s.Asked("t", True))
    world.time = 10.0
    world.conductor.rest(s.Tick())


@pytest.mark.parametrize(
    "leave",
    [
        lambda world: world.conductor.drop("a"),
        lambda world: world.conductor.give_up("a", "a test says so"),
        silence,
        oversleep,
    ],
    ids=["left", "given up", "silent", "does not sleep"],
)
def test_an_engine_that_is_gone_is_gone_for_all_three_machines(leave):
    world = World()
    world.conductor.join("a", REGISTER)
    assert world.where("a") == (True, True, True)
    leave(world)
    assert world.where("a") == (False, False, False)


def test_submissions_wait_while_either_machine_holds_them():
    world = World()
    world.conductor.join("a", REGISTER)
    world.conductor.rest(s.Asked("t", True))
    world.submit()
    assert not world.take(m.RunChunk)
    world.conductor.rest(s.Answered("a", True))
    world.conductor.rest(s.Asked("t", False))
    world.conductor.rest(s.Answered("a", False))
    assert [name for name, _ in world.take(m.RunChunk)] == ["a"]


def test_a_draining_conductor_waits_a_while_for_its_last_results_to_be_collected():
    world = World()
    world.conductor.join("a", REGISTER)
    world.submit()
    world.conductor.drain()
    [(_, chunk)] = world.take(m.RunChunk)
    world.time = 15.0
    world.conductor.handle(e.EngineReported("a", 0))
    ended = e.ChunkEnded("a", chunk.request_id, chunk.attempt, 1, "stop", "")
    world.conductor.handle(ended, np.array([7], np.int32), np.zeros(1, np.float32))
    assert not world.conductor.drained.is_set()
    world.time += COLLECT_SECONDS + 1
    world.conductor.tick()
    assert world.conductor.drained.is_set()
