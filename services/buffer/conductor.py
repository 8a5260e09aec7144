"""The buffer's three machines as one: each event is applied, and what they instruct is done or sent.

Invariants:
- every decision is a machine's; this file stores, and turns instructions into messages;
- an event is handled and its instructions are turned into messages without a pause in between, so
  no message can speak of a state that is gone;
- an engine that is gone is gone for all three machines.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from seer.common import ids
from seer.common.clock import Clock
from seer.common.log import get_logger
from seer.common.wire import messages as m
from seer.services.buffer import events as e
from seer.services.buffer import sleep as s
from seer.services.buffer import views
from seer.services.buffer import weights as w
from seer.services.buffer.machine import Machine
from seer.services.buffer.store import Store

COLLECT_SECONDS = 10.0
"""How long a draining buffer keeps the last results for their trainers."""


class Conductor:
    """`to_engine` and `to_trainer` send to a name, `publish` to the context service: soon, never waiting.

    `drained` is set once `drain` was called and everything accepted is finished and collected;
    `registered` has what each engine said of itself last.
    """

    def __init__(
        self,
        clock: Clock,
        machine: Machine,
        weights: w.WeightsMachine,
        sleep: s.SleepMachine,
        store: Store,
        *,
        to_engine: Callable[[str, m.BufferToEngine], None],
        to_trainer: Callable[[str, m.BufferToTrainer], None],
        publish: Callable[[m.BufferPublished], None],
    ) -> None:
        self._clock = clock
        self._machine, self._weights, self._sleep = machine, weights, sleep
        self._store = store
        self._to_engine, self._to_trainer, self._publish = to_engine, to_trainer, publish
        self._log = get_logger()
        self.registered: dict[str, m.Register] = {}
        self._weights_held = False
        self.drained = asyncio.Event()
        self.draining = False
        self._collect_until = 0.0

    def drain(self) -> None:
        """Get ready to end; trainers have `COLLECT_SECONDS` to collect: one that died never will."""
        self.draining = True
        self._collect_until = self._clock.now() + COLLECT_SECONDS
        self._check_drained()

    def _check_drained(self) -> None:
        if not self.draining:
            return
        if self._machine.requests:
            self._collect_until = self._clock.now() + COLLECT_SECONDS
        if not self._machine.groups or self._clock.now() > self._collect_until:
            self.drained.set()

    # --- what concerns all three machines --------------------------------------------------

    def join(self, name: str, register: m.Register) -> None:
        """Take in an engine, or a new life of a known one."""
        self.registered[name] = register
        theirs = w.Weights(register.weight_version, register.weights_digest, register.weights_source)
        self.handle(e.EngineLeft(name))  # a new life of a known name holds nothing of the old
        self.rest(s.Joined(name, register.asleep))
        self.weigh(w.Registered(name, theirs))

    def give_up(self, name: str, why: str) -> None:
        """Log the loss of an engine and go on without it; one that is not here is ignored."""
        if name in self._weights:
            self._log.warning("engine lost", engine=name, why=why)
            self.drop(name)

    def drop(self, name: str) -> None:
        """Go on without an engine."""
        self.handle(e.EngineLeft(name))
        self.rest(s.Lost(name))
        self.weigh(w.Lost(name))

    def tick(self) -> None:
        """Look at all deadlines."""
        before = set(self._machine.instances)
        self.handle(e.Tick())
        for name in before - set(self._machine.instances):
            self._log.warning("engine lost", engine=name, why="silent")
            self.rest(s.Lost(name))
            self.weigh(w.Lost(name))
        self.rest(s.Tick())
        self.weigh(w.Tick())

    # --- one machine each ------------------------------------------------------------------

    def handle(
        self, event: e.Event, tokens: m.Tokens | None = None, logprobs: m.Logprobs | None = None
    ) -> None:
        """Apply an event of requests; an ended chunk comes with its `tokens` and `logprobs`."""
        for item in self._machine.handle(event, self._clock.now()):
            match item:
                case e.Keep() if tokens is not None and logprobs is not None:
                    self._store.keep(*_locate(item.request_id), tokens, logprobs)
                case e.Dispatch():
                    wait = self._machine.policy.admission
                    chunk = self._store.chunk(item, *_locate(item.request_id), wait_for_room=wait)
                    self._to_engine(item.instance, chunk)
                case e.Drop():
                    drop = m.DropChunk(request_id=item.request_id, attempt=item.attempt)
                    self._to_engine(item.instance, drop)
                case e.Deliver():
                    group = self._machine.groups[item.group_id]
                    self._to_trainer(item.trainer, views.progress(self._machine, group.rollout))
                    self._to_trainer(item.trainer, self._store.result(group, self._live()))
                case e.Accept():
                    accepted = m.Accepted(rollout_id=item.rollout_id, prompt_ids=item.prompt_ids)
                    self._to_trainer(item.trainer, accepted)
                case e.Refuse():
                    self._refuse(item)
                case e.Forget():
                    self._store.forget(item.group_id)
                case e.PublishOpened() | e.PublishProgress() | e.PublishClosed():
                    self._publish(views.published(item))
        if self._weights.updating and not self._machine.requests:
            self.weigh(w.Tick())
        if self._sleep.held and not self._machine.requests:
            self.rest(s.Tick())
        self._check_drained()

    def _live(self) -> w.Weights:
        return self._weights.live or w.Weights(0, "")

    def _refuse(self, item: e.Refuse) -> None:
        for prompt_id in item.prompt_ids:
            if ids.group_id(item.rollout_id, prompt_id) not in self._machine.groups:
                self._store.forget(ids.group_id(item.rollout_id, prompt_id))
        refused = m.Refused(
            code=item.code, message=item.message, rollout_id=item.rollout_id, prompt_ids=item.prompt_ids
        )
        self._to_trainer(item.trainer, refused)

    def weigh(self, event: w.Event) -> None:
        """Apply an event of weights."""
        instructions = self._weights.handle(event, self._clock.now(), idle=not self._machine.requests)
        for item in instructions:
            match item:
                case w.Prepare() | w.Load():
                    self._to_engine(item.instance, views.order(item))
                case w.Admit():
                    self.handle(e.WeightsChanged(self._live().version))
                    self.handle(e.EngineJoined(item.instance, self.registered[item.instance].capacity))
                case w.Expel():
                    self.handle(e.EngineLeft(item.instance))
                case w.Hold() | w.Release():
                    self._weights_held = isinstance(item, w.Hold)
                    self._hold()
                case w.Abort():
                    self.handle(e.RolloutsAborted("aborted by a weight update"))
                case w.Report() | w.Fail():
                    self._log.info("weight update ended", outcome=item)
                    self._to_trainer(item.trainer, views.outcome(item))

    def rest(self, event: s.Event) -> None:
        """Apply an event of sleep."""
        held = self._sleep.held
        for item in self._sleep.handle(event, self._clock.now(), idle=not self._machine.requests):
            match item:
                case s.Order():
                    self._to_engine(item.instance, m.Sleep(asleep=item.asleep))
                case s.GiveUp():
                    self.give_up(item.instance, "it was told to sleep or wake, and does not answer")
                case s.Tell():
                    self._to_trainer(item.trainer, m.Slept(asleep=item.asleep, problem=item.problem))
        if held != self._sleep.held:
            self._hold()

    def _hold(self) -> None:
        self.handle(e.SubmissionsHeld(self._weights_held or self._sleep.held))


def _locate(request_id: str) -> tuple[str, int]:
    group_id, _, index = request_id.rpartition("#")
    return group_id, int(index)
