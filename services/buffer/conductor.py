"""The buffer's three machines as one: each event is applied, and what they instruct is done or sent.

Invariants:
- every decision is a machine's; this file stores, and turns instructions into messages;
- an event is handled and its instructions are turned into messages without a pause in between, so
  no message can speak of a state that is gone;
- an engine that is gone is gone for all three machines.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from seer.common.clock import Clock
from seer.common.log import get_logger
from seer.common.wire import messages as m
from seer.services.buffer import events as e
from seer.services.buffer import sleep as s
from seer.services.buffer import views
from seer.services.buffer import weight_events as w
from seer.services.buffer.deliveries import Deliveries, Sent
from seer.services.buffer.liveness import Liveness
from seer.services.buffer.machine import Machine
from seer.services.buffer.store import TOKEN_BYTES, Store
from seer.services.buffer.weights import WeightsMachine

COLLECT_SECONDS = 10.0
"""How long a draining buffer keeps the last results for their trainers."""

TICK_SECONDS = 0.5
"""How often `tick` is called."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The arrays of a chunk that ended."""

    tokens: m.Tokens
    logprobs: m.Logprobs


@dataclass(frozen=True, slots=True)
class Submitted:
    """A submission, and the tokens of its prompts by id."""

    submit: m.Submit
    prompts: dict[str, m.Tokens]


class Conductor:
    """`to_engine` and `to_trainer` send to a name, `to_life` to an address, `publish` to the context service.

    All of them soon, never waiting. `parted(name)` is told of each engine that was given up.
    `drained` is set once `drain` was called and everything accepted is finished and collected;
    `registered` has what each engine said of itself last.
    """

    def __init__(
        self,
        clock: Clock,
        machine: Machine,
        weights: WeightsMachine,
        sleep: s.SleepMachine,
        store: Store,
        silence_seconds: float,
        lease_seconds: float,
        *,
        to_engine: Callable[[str, m.BufferToEngine], None],
        to_trainer: Callable[[str, m.BufferToTrainer], None],
        to_life: Callable[[bytes, m.BufferToTrainer], None],
        publish: Callable[[m.BufferPublished], None],
        parted: Callable[[str], None],
    ) -> None:
        self._clock = clock
        self._machine, self._weights, self._sleep = machine, weights, sleep
        self._store = store
        self._to_engine, self._to_trainer, self._publish = to_engine, to_trainer, publish
        self._to_life, self._parted = to_life, parted
        self._deliveries = Deliveries()
        self._engines: Liveness[str] = Liveness(silence_seconds, TICK_SECONDS)
        self._trainers: Liveness[bytes] = Liveness(lease_seconds, TICK_SECONDS)
        self._sessions: dict[bytes, int] = {}
        self._lives: dict[str, int] = {}
        self._log = get_logger()
        self.registered: dict[str, m.Register] = {}
        self._weights_held = False
        self.drained = asyncio.Event()
        self.draining = False
        self._collect_until: float | None = None

    def drain(self) -> None:
        """Get ready to end; trainers have `COLLECT_SECONDS` to collect: one that died never will."""
        self.draining = True
        self.handle(e.Drained())
        self.weigh(w.Drained())
        self._check_drained()

    def _check_drained(self) -> None:
        if not self.draining or self._weights.updating:  # engines load: they read what ends with us
            return
        if self._machine.requests:
            self._collect_until = None
        elif self._collect_until is None:
            self._collect_until = self._clock.now() + COLLECT_SECONDS
        if not self._machine.groups or (self._collect_until or math.inf) < self._clock.now():
            self.drained.set()

    # --- what concerns all three machines --------------------------------------------------

    def join(self, name: str, register: m.Register, life: int) -> None:
        """Take in an engine, a new `life` of a known one, or the same again, which lost what it ran."""
        if name in self._lives:  # whatever life it is, it holds nothing of before
            self._part([name], died=self._lives[name] != life)
        self.registered[name] = register
        self._lives[name] = life
        self._engines.heard(name)
        theirs = w.Weights(register.weight_version, register.weights_digest, register.weights_source)
        self.rest(s.Joined(name, register.asleep))
        self.weigh(w.Registered(name, theirs))
        self.rest(s.Tick())  # it sleeps, if it has to, once it has loaded

    def heard(self, name: str) -> None:
        """Note a sign of life of an engine."""
        if name in self._lives:
            self._engines.heard(name)

    def heard_trainer(self, life: bytes, session: int) -> None:
        """Note a sign of life of a trainer; in another `session` of the hub, messages have been lost."""
        self._trainers.heard(life)
        if self._sessions.get(life) != session:
            self._sessions[life] = session
            self._deliveries.reset(life)

    def give_up(self, names: Sequence[str], why: str, *, died: bool = False) -> None:
        """Log the loss of engines and go on without them; those that are not here are ignored."""
        here = [name for name in names if name in self._lives]
        for name in here:
            self._log.warning("engine lost", engine=name, why=why)
            self._parted(name)
        self._part(here, died=died)

    def drop(self, name: str, *, died: bool = False) -> None:
        """Go on without an engine that said goodbye; `died`: it did not mean to."""
        self._part([name], died=died)

    def _part(self, names: Sequence[str], *, died: bool) -> None:
        for name in names:
            self._engines.forget(name)
            self._lives.pop(name, None)
        self.handle(e.EnginesLeft(names, died))
        for name in names:
            self.rest(s.Lost(name))
            self.weigh(w.Lost(name))

    def tick(self) -> None:
        """Look at all deadlines."""
        now = self._clock.now()
        self.give_up(self._engines.tick(now), "silent")
        for life in self._trainers.tick(now):
            self.handle(e.TrainerLost(life))
        owners = {rollout.life for rollout in self._machine.rollouts.values()}
        for life in self._sessions.keys() - owners:  # nothing can be lost to it, nor by it
            del self._sessions[life]
            self._trainers.forget(life)
        self.handle(e.Tick())
        self.rest(s.Tick())
        self.weigh(w.Tick())

    # --- one machine each ------------------------------------------------------------------

    def handle(self, event: e.Event, news: Ended | Submitted | None = None) -> None:
        """Apply an event of requests, with the arrays that it is about."""
        for item in self._machine.handle(event, self._clock.now()):
            match item:
                case e.Keep() if isinstance(news, Ended):
                    where = _locate(item.request_id)
                    self._store.keep(*where, news.tokens, news.logprobs, self._live())
                case e.Take() if isinstance(news, Submitted):
                    self._store.open(news.submit, item.prompt_id, news.prompts[item.prompt_id])
                case e.Dispatch():
                    wait = self._machine.policy.admission
                    chunk = self._store.chunk(item, *_locate(item.request_id), wait_for_room=wait)
                    self._to_engine(item.instance, chunk)
                case e.Drop():
                    drop = m.DropChunk(request_id=item.request_id, attempt=item.attempt)
                    self._to_engine(item.instance, drop)
                case e.Deliver():
                    size = self._machine.groups[item.group_id].tokens * TOKEN_BYTES
                    self._deliver(self._deliveries.add(item.life, item.group_id, size))
                case e.Accept() | e.Refuse():
                    self._to_life(item.life, views.answer(item))
                case e.Forget():
                    self._store.forget(item.group_id)
                    self._deliver(self._deliveries.forget(item.group_id))
                case e.PublishOpened() | e.PublishProgress() | e.PublishClosed():
                    self._publish(views.published(item))
        if self._weights.updating and not self._machine.requests:
            self.weigh(w.Tick())
        if self._sleep.held and not self._machine.requests:
            self.rest(s.Tick())
        self._check_drained()

    def _live(self) -> w.Weights:
        return self._weights.live or w.Weights(0, "")

    def _deliver(self, ready: Sequence[Sent]) -> None:
        for life, group_id in ready:
            group = self._machine.groups.get(group_id)
            if group is not None:  # else it is forgotten with one of the next instructions
                self._to_life(life, views.progress(self._machine, group.rollout))
                self._to_life(life, self._store.result(group))

    def weigh(self, event: w.Event) -> None:
        """Apply an event of weights."""
        loading, idle = self._weights.loading, not self._machine.requests
        for item in self._weights.handle(event, self._clock.now(), idle=idle, awake=self._sleep.awake):
            match item:
                case w.Prepare() | w.Discard() | w.Load():
                    self._to_engine(item.instance, views.order(item))
                case w.Admit():
                    self.handle(e.WeightsChanged(self._live().version))
                    capacity, life = self.registered[item.instance].capacity, self._lives[item.instance]
                    self.handle(e.EngineJoined(item.instance, capacity, life))
                case w.Expel():
                    self.handle(e.EnginesLeft([item.instance]))
                case w.Hold() | w.Release():
                    self._weights_held = isinstance(item, w.Hold)
                    self._hold()
                case w.Abort():
                    self.handle(e.RolloutsAborted("aborted by a weight update"))
                case w.Report() | w.Fail():
                    self._log.info("weight update ended", outcome=item)
                    self._to_trainer(item.trainer, views.outcome(item))
        if loading != self._weights.loading:  # to load, engines are woken
            self.rest(s.Tick())

    def rest(self, event: s.Event) -> None:
        """Apply an event of sleep."""
        held, awake, idle = self._sleep.held, self._sleep.awake, not self._machine.requests
        loading = self._weights.loading
        for item in self._sleep.handle(event, self._clock.now(), idle=idle, loading=loading):
            match item:
                case s.Order():
                    self._to_engine(item.instance, m.Sleep(asleep=item.asleep))
                case s.GiveUp():
                    self.give_up([item.instance], "it was told to sleep or wake, and does not answer")
                case s.Tell():
                    self._to_trainer(
                        item.trainer, m.Slept(asleep=item.asleep, problem=item.problem, ask=item.ask)
                    )
        if held != self._sleep.held:
            self._hold()
        if awake != self._sleep.awake:  # who is awake may load, and work
            self.weigh(w.Tick())

    def _hold(self) -> None:
        self.handle(e.SubmissionsHeld(self._weights_held or self._sleep.held))


def _locate(request_id: str) -> tuple[str, int]:
    group_id, _, index = request_id.rpartition("#")
    return group_id, int(index)
