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

from seer.common import wire
from seer.common.clock import Clock
from seer.common.group_events import GroupClosed, GroupOpened, RequestProgress
from seer.common.process.log import get_logger
from seer.services.buffer import sleep, views
from seer.services.buffer.liveness import Liveness
from seer.services.buffer.requests import events, instructions
from seer.services.buffer.requests.deliveries import Deliveries, Sent
from seer.services.buffer.requests.machine import RequestMachine
from seer.services.buffer.store import TOKEN_BYTES, Store
from seer.services.buffer.weights import events as weight_events
from seer.services.buffer.weights import instructions as weight_instructions
from seer.services.buffer.weights.machine import WeightsMachine

COLLECT_SECONDS = 10.0
"""How long a draining buffer keeps the last results for their trainers."""

TICK_SECONDS = 0.5
"""How often `tick` is called."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The arrays of a chunk that ended."""

    tokens: wire.Tokens
    logprobs: wire.Logprobs


@dataclass(frozen=True, slots=True)
class Submitted:
    """A submission, and the tokens of its prompts by id."""

    submit: wire.Submit
    prompts: dict[str, wire.Tokens]


class Conductor:
    """`to_engine` and `to_trainer` send to a name, `to_life` to an address, `publish` to the context service.

    All of them soon, never waiting. `parted(name)` is told of each engine that was given up.
    `drained` is set once `drain` was called and everything accepted is finished and collected;
    `registered` has what each engine said of itself last.
    """

    def __init__(
        self,
        clock: Clock,
        machine: RequestMachine,
        weights: WeightsMachine,
        sleep: sleep.SleepMachine,
        store: Store,
        silence_seconds: float,
        lease_seconds: float,
        *,
        to_engine: Callable[[str, wire.BufferToEngine], None],
        to_trainer: Callable[[str, wire.BufferToTrainer], None],
        to_life: Callable[[bytes, wire.BufferToTrainer], None],
        publish: Callable[[wire.BufferPublished], None],
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
        self.registered: dict[str, wire.Register] = {}
        self._weights_held = False
        self.drained = asyncio.Event()
        self.draining = False
        self._collect_until: float | None = None

    def drain(self) -> None:
        """Get ready to end; trainers have `COLLECT_SECONDS` to collect: one that died never will."""
        self.draining = True
        self.handle(events.Drained())
        self.weigh(weight_events.Drained())
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

    def join(self, name: str, register: wire.Register, life: int) -> None:
        """Take in an engine, a new `life` of a known one, or the same again, which lost what it ran."""
        if name in self._lives:  # whatever life it is, it holds nothing of before
            self._part([name], died=self._lives[name] != life)
        self.registered[name] = register
        self._lives[name] = life
        self._engines.heard(name)
        theirs = weight_events.Weights(
            register.weight_version, register.weights_digest, register.weights_source
        )
        self.rest(sleep.Joined(name, register.asleep))
        self.weigh(weight_events.Registered(name, theirs))
        self.rest(sleep.Tick())  # it sleeps, if it has to, once it has loaded

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
        self.handle(events.EnginesLeft(names, died))
        for name in names:
            self.rest(sleep.Lost(name))
            self.weigh(weight_events.Lost(name))

    def tick(self) -> None:
        """Look at all deadlines."""
        now = self._clock.now()
        self.give_up(self._engines.tick(now), "silent")
        for life in self._trainers.tick(now):
            self.handle(events.TrainerLost(life))
        owners = {rollout.life for rollout in self._machine.rollouts.values()}
        for life in self._sessions.keys() - owners:  # nothing can be lost to it, nor by it
            del self._sessions[life]
            self._trainers.forget(life)
        self.handle(events.Tick())
        self.rest(sleep.Tick())
        self.weigh(weight_events.Tick())

    # --- one machine each ------------------------------------------------------------------

    def handle(self, event: events.Event, news: Ended | Submitted | None = None) -> None:
        """Apply an event of requests, with the arrays that it is about."""
        for item in self._machine.handle(event, self._clock.now()):
            match item:
                case instructions.Keep() if isinstance(news, Ended):
                    where = _locate(item.request_id)
                    self._store.keep(*where, news.tokens, news.logprobs, self._live())
                case instructions.Take() if isinstance(news, Submitted):
                    self._store.open(news.submit, item.prompt_id, news.prompts[item.prompt_id])
                case instructions.Dispatch():
                    wait = self._machine.policy.admission
                    chunk = self._store.chunk(item, *_locate(item.request_id), wait_for_room=wait)
                    self._to_engine(item.instance, chunk)
                case instructions.Drop():
                    drop = wire.DropChunk(request_id=item.request_id, attempt=item.attempt)
                    self._to_engine(item.instance, drop)
                case instructions.Deliver():
                    size = self._machine.groups[item.group_id].tokens * TOKEN_BYTES
                    self._deliver(self._deliveries.add(item.life, item.group_id, size))
                case instructions.Accept() | instructions.Refuse():
                    self._to_life(item.life, views.answer(item))
                case instructions.Forget():
                    self._store.forget(item.group_id)
                    self._deliver(self._deliveries.forget(item.group_id))
                case GroupOpened() | RequestProgress() | GroupClosed():
                    self._publish(views.published(item))
        if self._weights.updating and not self._machine.requests:
            self.weigh(weight_events.Tick())
        if self._sleep.held and not self._machine.requests:
            self.rest(sleep.Tick())
        self._check_drained()

    def _live(self) -> weight_events.Weights:
        return self._weights.live or weight_events.Weights(0, "")

    def _deliver(self, ready: Sequence[Sent]) -> None:
        for life, group_id in ready:
            group = self._machine.groups.get(group_id)
            if group is not None:  # else it is forgotten with one of the next instructions
                self._to_life(life, views.progress(self._machine, group.rollout))
                self._to_life(life, self._store.result(group))

    def weigh(self, event: weight_events.Event) -> None:
        """Apply an event of weights."""
        loading, idle = self._weights.loading, not self._machine.requests
        for item in self._weights.handle(event, self._clock.now(), idle=idle, awake=self._sleep.awake):
            match item:
                case (
                    weight_instructions.Prepare() | weight_instructions.Discard() | weight_instructions.Load()
                ):
                    self._to_engine(item.instance, views.order(item))
                case weight_instructions.Admit():
                    self.handle(events.WeightsChanged(self._live().version))
                    capacity, life = self.registered[item.instance].capacity, self._lives[item.instance]
                    self.handle(events.EngineJoined(item.instance, capacity, life))
                case weight_instructions.Expel():
                    self.handle(events.EnginesLeft([item.instance]))
                case weight_instructions.Hold() | weight_instructions.Release():
                    self._weights_held = isinstance(item, weight_instructions.Hold)
                    self._hold()
                case weight_instructions.Abort():
                    self.handle(events.RolloutsAborted("aborted by a weight update"))
                case weight_instructions.Report() | weight_instructions.Fail():
                    self._log.info("weight update ended", outcome=item)
                    self._to_trainer(item.trainer, views.outcome(item))
        if loading != self._weights.loading:  # to load, engines are woken
            self.rest(sleep.Tick())

    def rest(self, event: sleep.Event) -> None:
        """Apply an event of sleep."""
        held, awake, idle = self._sleep.held, self._sleep.awake, not self._machine.requests
        loading = self._weights.loading
        for item in self._sleep.handle(event, self._clock.now(), idle=idle, loading=loading):
            match item:
                case sleep.Order():
                    self._to_engine(item.instance, wire.Sleep(asleep=item.asleep))
                case sleep.GiveUp():
                    self.give_up([item.instance], "it was told to sleep or wake, and does not answer")
                case sleep.Tell():
                    slept = wire.Slept(asleep=item.asleep, problem=item.problem, call_id=item.call_id)
                    self._to_trainer(item.trainer, slept)
        if held != self._sleep.held:
            self._hold()
        if awake != self._sleep.awake:  # who is awake may load, and work
            self.weigh(weight_events.Tick())

    def _hold(self) -> None:
        self.handle(events.SubmissionsHeld(self._weights_held or self._sleep.held))


def _locate(request_id: str) -> tuple[str, int]:
    group_id, _, index = request_id.rpartition("#")
    return group_id, int(index)
