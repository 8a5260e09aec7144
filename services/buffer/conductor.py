"""What the buffer's machines instruct, done: arrays are stored, messages made and handed on.

Invariants:
- every decision is a machine's; this file stores, and turns instructions into messages;
- an event is applied and its instructions are turned into messages without a pause in between, so
  no message can speak of a state that is gone.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from seer.common import wire
from seer.common.clock import Clock
from seer.common.group_events import GroupClosed, GroupOpened, RequestProgress
from seer.common.process.log import get_logger
from seer.services.buffer import sleep, views
from seer.services.buffer.events import Drained, Joined, Left, Tick, Weights
from seer.services.buffer.liveness import Liveness
from seer.services.buffer.log.kept import KeptChunks
from seer.services.buffer.machine import BufferMachine, Event, Instruction
from seer.services.buffer.requests import events, instructions
from seer.services.buffer.requests.deliveries import Deliveries, Sent
from seer.services.buffer.store import TOKEN_BYTES, Store
from seer.services.buffer.weights import instructions as weight_instructions

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

    All of them soon, never waiting. `parted(name)` is told of each engine that was given up,
    `record` of every event, and what the machines answered.
    `drained` is set once `drain` was called and everything accepted is finished and collected;
    `registered` has what each engine said of itself last.
    """

    def __init__(
        self,
        clock: Clock,
        machine: BufferMachine,
        store: Store,
        kept: KeptChunks,
        silence_seconds: float,
        lease_seconds: float,
        *,
        to_engine: Callable[[str, wire.BufferToEngine], None],
        to_trainer: Callable[[str, wire.BufferToTrainer], None],
        to_life: Callable[[bytes, wire.BufferToTrainer], None],
        publish: Callable[[wire.BufferPublished], None],
        parted: Callable[[str], None],
        record: Callable[[float, Event, Sequence[Instruction]], None],
    ) -> None:
        self._clock = clock
        self._machine, self._requests, self._weights = machine, machine.requests, machine.weights
        self._store, self._kept = store, kept
        self._to_engine, self._to_trainer, self._publish = to_engine, to_trainer, publish
        self._to_life, self._parted, self._record = to_life, parted, record
        self._deliveries = Deliveries()
        self._engines: Liveness[str] = Liveness(silence_seconds, TICK_SECONDS)
        self._trainers: Liveness[bytes] = Liveness(lease_seconds, TICK_SECONDS)
        self._sessions: dict[bytes, int] = {}
        self._log = get_logger()
        self.registered: dict[str, wire.Register] = {}
        self.drained = asyncio.Event()
        self.draining = False
        self._collect_until: float | None = None

    def drain(self) -> None:
        """Get ready to end; trainers have `COLLECT_SECONDS` to collect: one that died never will."""
        self.draining = True
        self.apply(Drained())

    def _check_drained(self) -> None:
        if not self.draining or self._weights.updating:  # engines load: they read what ends with us
            return
        if self._requests.requests:
            self._collect_until = None
        elif self._collect_until is None:
            self._collect_until = self._clock.now() + COLLECT_SECONDS
        if not self._requests.groups or (self._collect_until or math.inf) < self._clock.now():
            self.drained.set()

    # --- who is there ----------------------------------------------------------------------

    def join(self, name: str, register: wire.Register, life: int) -> None:
        """Take in an engine, a new `life` of a known one, or the same again, which lost what it ran."""
        self.registered[name] = register
        self._engines.heard(name)
        theirs = Weights(register.weight_version, register.weights_digest, register.weights_source)
        self.apply(Joined(name, register.capacity, life, theirs, register.asleep))

    def heard(self, name: str) -> None:
        """Note a sign of life of an engine."""
        if name in self._machine.engines:
            self._engines.heard(name)

    def heard_trainer(self, life: bytes, session: int) -> None:
        """Note a sign of life of a trainer; in another `session` of the hub, messages have been lost."""
        self._trainers.heard(life)
        if self._sessions.get(life) != session:
            self._sessions[life] = session
            self._deliveries.reset(life)

    def give_up(self, names: Sequence[str], why: str, *, died: bool = False) -> None:
        """Log the loss of engines and go on without them; those that are not here are ignored."""
        here = [name for name in names if name in self._machine.engines]
        for name in here:
            self._log_loss(name, why)
        self._part(here, died=died)

    def _log_loss(self, name: str, why: str) -> None:
        self._log.warning("engine lost", engine=name, why=why)
        self._parted(name)

    def drop(self, name: str, *, died: bool = False) -> None:
        """Go on without an engine that said goodbye; `died`: it did not mean to."""
        self._part([name], died=died)

    def _part(self, names: Sequence[str], *, died: bool) -> None:
        for name in names:
            self._engines.forget(name)
        if names:
            self.apply(Left(names, died))

    def tick(self) -> None:
        """Look at all deadlines."""
        now = self._clock.now()
        self.give_up(self._engines.tick(now), "silent")
        for life in self._trainers.tick(now):
            self.apply(events.TrainerLost(life))
        owners = {rollout.life for rollout in self._requests.rollouts.values()}
        for life in self._sessions.keys() - owners:  # nothing can be lost to it, nor by it
            del self._sessions[life]
            self._trainers.forget(life)
        self.apply(Tick())

    # --- instructions to messages ------------------------------------------------------------

    def apply(self, event: Event, news: Ended | Submitted | None = None) -> None:
        """Apply an event, with the arrays that it is about."""
        live = self._live()  # what a chunk that ends now was made by
        now = self._clock.now()
        out: Sequence[Instruction] = ()
        try:
            out = self._machine.apply(event, now)
        finally:
            self._record(now, event, out)  # also what the machines fail at: so does then a replay
        for item in out:
            match item:
                case instructions.Keep() if isinstance(news, Ended):
                    self._keep(item, news, live)
                case instructions.Take() if isinstance(news, Submitted):
                    self._store.open(news.submit, item.prompt_id, news.prompts[item.prompt_id])
                    self._kept.open(news.submit.rollout_id, item.prompt_id)
                case _:
                    self._perform(item)
        self._check_drained()

    def _live(self) -> Weights:
        return self._weights.live or Weights(0, "")

    def _keep(self, item: instructions.Keep, ended: Ended, live: Weights) -> None:
        group_id, index = _locate(item.request_id)
        self._store.keep(group_id, index, ended.tokens, ended.logprobs, live)
        self._kept.keep(
            group_id, index, ended.tokens, ended.logprobs, (item.finish, item.stop_reason),
            partial(self._store.identity, group_id), live,
        )  # fmt: skip

    def _perform(self, item: Instruction) -> None:
        match item:
            case instructions.Restore():
                self._store.restore(item.group_id, self._kept.restore(item.group_id), self._live())
            case instructions.Dispatch():
                wait = self._requests.policy.admission
                chunk = self._store.chunk(item, *_locate(item.request_id), wait_for_room=wait)
                self._to_engine(item.instance, chunk)
            case instructions.Drop():
                drop = wire.DropChunk(request_id=item.request_id, attempt=item.attempt)
                self._to_engine(item.instance, drop)
            case instructions.Deliver():
                group = self._requests.groups.get(item.group_id)
                if group is not None:  # else it is forgotten with one of the next instructions
                    size = group.tokens * TOKEN_BYTES
                    self._deliver(self._deliveries.add(item.life, item.group_id, size))
            case instructions.Forget():
                self._store.forget(item.group_id)
                self._kept.forget(item.group_id)
                self._deliver(self._deliveries.forget(item.group_id))
            case instructions.Accept() | instructions.Refuse():
                self._to_life(item.life, views.answer(item))
            case GroupOpened() | RequestProgress() | GroupClosed():
                self._publish(views.published(item))
            case _:
                self._perform_for_all(item)

    def _perform_for_all(self, item: Instruction) -> None:
        """Do what weights and sleep take: it concerns engines as a whole."""
        match item:
            case weight_instructions.Prepare() | weight_instructions.Discard() | weight_instructions.Load():
                self._to_engine(item.instance, views.order(item))
            case weight_instructions.Report() | weight_instructions.Fail():
                self._log.info("weight update ended", outcome=item)
                self._to_trainer(item.trainer, views.outcome(item))
            case sleep.Order():
                self._to_engine(item.instance, wire.Sleep(asleep=item.asleep))
            case sleep.GiveUp():
                self._engines.forget(item.instance)
                self._log_loss(item.instance, "it was told to sleep or wake, and does not answer")
            case sleep.Tell():
                told = wire.Slept(asleep=item.asleep, problem=item.problem, call_id=item.call_id)
                self._to_trainer(item.trainer, told)

    def _deliver(self, ready: Sequence[Sent]) -> None:
        for life, group_id in ready:
            group = self._requests.groups.get(group_id)
            if group is not None:  # else it is forgotten with one of the next instructions
                self._to_life(life, views.progress(self._requests, group.rollout))
                self._to_life(life, self._store.result(group))


def _locate(request_id: str) -> tuple[str, int]:
    group_id, _, index = request_id.rpartition("#")
    return group_id, int(index)
