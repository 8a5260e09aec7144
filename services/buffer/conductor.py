"""Carries out the instructions of the buffer's machines: stores arrays, makes messages and passes them on.

Invariants:
- the machines decide everything; this file stores arrays and turns instructions into messages;
- nothing runs between applying an event and turning its instructions into messages, so no message is about an
  outdated state.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from seer.common import ids, wire
from seer.common.clock import Clock
from seer.common.group_events import GroupClosed, GroupOpened, RequestProgress
from seer.common.net.node import node_id
from seer.common.process.log import get_logger
from seer.services.buffer import sleep, views
from seer.services.buffer.events import Drained, Joined, Left, Tick, Weights
from seer.services.buffer.liveness import Liveness
from seer.services.buffer.log.kept import KeptChunks, SoFar
from seer.services.buffer.machine import BufferMachine, Event, Instruction
from seer.services.buffer.media.machine import MediaMachine
from seer.services.buffer.requests import events, instructions
from seer.services.buffer.requests.deliveries import Deliveries, Sent
from seer.services.buffer.requests.state import RequestState
from seer.services.buffer.store import TOKEN_BYTES, Store, SubmittedPrompt
from seer.services.buffer.weights import instructions as weight_instructions

COLLECT_SECONDS = 10.0
"""How long a draining buffer waits for trainers to acknowledge the last results."""

TICK_SECONDS = 0.5
"""How often `tick` is called."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The arrays of an ended chunk."""

    tokens: wire.Tokens
    logprobs: wire.Logprobs


@dataclass(frozen=True, slots=True)
class Submitted:
    """A submission of a trainer, and its prompts by id."""

    trainer: str
    submit: wire.Submit
    prompts: Mapping[str, SubmittedPrompt]


class Conductor:
    """`to_engine` and `to_trainer` send to a name, `to_address` to an address, `publish` to the context
    service.

    All of them queue the message and never wait. `on_loss(name)` is called for each engine that is given up,
    `record` with every event and the instructions that the machines returned.
    `drained` is set once `drain` was called and all accepted groups are finished and acknowledged.
    `registered`: by name, the last `Register` of each engine.
    """

    def __init__(
        self,
        clock: Clock,
        machine: BufferMachine,
        store: Store,
        kept: KeptChunks,
        media: MediaMachine,
        silence_seconds: float,
        lease_seconds: float,
        *,
        to_engine: Callable[[str, wire.BufferToEngine], None],
        to_trainer: Callable[[str, wire.BufferToTrainer], None],
        to_address: Callable[[bytes, wire.BufferToTrainer], None],
        publish: Callable[[wire.BufferPublished], None],
        on_loss: Callable[[str], None],
        record: Callable[[float, Event, Sequence[Instruction]], None],
    ) -> None:
        self._clock = clock
        self.machine, self._requests, self._weights = machine, machine.requests, machine.weights
        self._store, self._kept, self._media = store, kept, media
        self._to_engine, self._to_trainer, self._publish = to_engine, to_trainer, publish
        self._to_address, self._on_loss, self._record = to_address, on_loss, record
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
        """Prepare to end. Trainers have `COLLECT_SECONDS` to acknowledge results: a dead one never does."""
        self.draining = True
        self.apply(Drained())

    def _check_drained(self) -> None:
        if not self.draining or self._weights.updating:  # engines still read streams of this process
            return
        if not self._requests.idle:
            self._collect_until = None
            return
        if self._collect_until is None:
            self._collect_until = self._clock.now() + COLLECT_SECONDS
        if not self._requests.groups or self._collect_until < self._clock.now():
            self.drained.set()

    # --- engines and trainers --------------------------------------------------------------

    def join(self, name: str, register: wire.Register, life: int) -> None:
        """Register an engine, or register it again: then it no longer runs what was dispatched to it."""
        self.registered[name] = register
        self._engines.received(name)
        dropped = register.weight_version < 0 <= register.dropped_version
        version = register.dropped_version if dropped else register.weight_version
        weights = Weights(version, register.weights_digest, register.weights_source)
        # An engine on this machine reads the spool's files itself, and would send copies over this network.
        endpoint = "" if register.node == node_id() else register.weights_endpoint
        joined = Joined(
            name,
            register.capacity,
            life,
            weights,
            register.asleep,
            node=register.node,
            weights_endpoint=endpoint,
            sleeping=tuple(register.sleeping),
            sleep_levels=register.sleep_levels,
            dropped=dropped,
            wish=register.wish,
        )
        self.apply(joined)

    def received_from_engine(self, name: str) -> None:
        """Note that an engine sent a message, so it is not silent."""
        if name in self.machine.engines:
            self._engines.received(name)

    def received_from_trainer(self, life: bytes, session: int) -> None:
        """Note that a trainer sent a message. In a new `session` of the hub, earlier messages were lost."""
        self._trainers.received(life)
        if self._sessions.get(life) != session:
            self._sessions[life] = session
            self._deliveries.reset(life)

    def give_up(self, names: Sequence[str], why: str, *, died: bool = False) -> None:
        """Log the loss of engines and remove them; unknown ones are ignored."""
        here = [name for name in names if name in self.machine.engines]
        for name in here:
            self._log_loss(name, why)
        self._remove(here, died=died)

    def _log_loss(self, name: str, why: str) -> None:
        self._log.warning("engine lost", engine=name, why=why)
        self._on_loss(name)

    def engine_left(self, name: str, *, died: bool = False) -> None:
        """Remove an engine that sent `Goodbye`; `died`: because it failed."""
        self._remove([name], died=died)

    def _remove(self, names: Sequence[str], *, died: bool) -> None:
        for name in names:
            self._engines.forget(name)
        if names:
            self.apply(Left(names, died))

    def tick(self) -> None:
        """Check all deadlines."""
        now = self._clock.now()
        self.give_up(self._engines.tick(now), "silent")
        for life in self._trainers.tick(now):
            self.apply(events.TrainerLost(life))
        registry = self._requests.registry
        owners = {rollout.life for rollout in registry.rollouts.values()}
        owners.update(away.life for away in registry.trajectories.away.values())
        for life in self._sessions.keys() - owners:  # it has no groups, so no messages that could be lost
            del self._sessions[life]
            self._trainers.forget(life)
        self.apply(Tick())

    # --- instructions to messages ------------------------------------------------------------

    def apply(self, event: Event, arrays: Ended | Submitted | None = None) -> None:
        """Apply an event and carry out its instructions; `arrays`: those that the event is about."""
        live = self._live()  # the weights that generated a chunk that ends now
        now = self._clock.now()
        out: Sequence[Instruction] = ()
        try:
            out = self.machine.apply(event, now)
        finally:
            self._record(now, event, out)  # also if a machine raises, so that a replay does, too
        for item in out:
            match item:
                case instructions.Keep() if isinstance(arrays, Ended):
                    self._keep(item, arrays, live)
                case instructions.Take() if isinstance(arrays, Submitted):
                    prompt = arrays.prompts[item.prompt_id]
                    self._store.open(item.group_id, prompt)
                    names = [each.name for each in prompt.media]
                    self._media.refer(item.group_id, arrays.trainer, names, now)
                    self._kept.open(arrays.submit.rollout_id, item.prompt_id)
                case _:
                    self._perform(item)
        self._check_drained()

    def _live(self) -> Weights:
        return self._weights.live or Weights(0, "")

    def _keep(self, item: instructions.Keep, ended: Ended, live: Weights) -> None:
        group_id, index = _locate(item.request_id)
        self._store.keep(group_id, index, ended.tokens, ended.logprobs, live)
        self._kept.keep(group_id, index, ended.tokens, ended.logprobs, (item.finish, item.stop_reason))
        if self._store.streams(group_id):
            self._send_tokens(group_id, index, ended, live.version)

    def so_far(self, group_id: str) -> SoFar | None:
        """Return what a group has, to be kept; None: it is about to be forgotten."""
        group = self._requests.groups.get(group_id)
        if group is None or group_id not in self._store:
            return None
        known: Mapping[int, RequestState | None] = dict(enumerate(group.results)) or {
            index: self._requests.requests.get(ids.request_id(group_id, index)) for index in range(group.size)
        }
        finishes = {index: (each.finish, each.stop_reason) for index, each in known.items() if each}
        return self._store.so_far(group_id, finishes)

    def _send_tokens(self, group_id: str, index: int, ended: Ended, version: int) -> None:
        """Send the tokens of a chunk to a trainer that wants them before its group has finished."""
        request = self._requests.requests.get(ids.request_id(group_id, index))
        if request is None:  # its group has finished, and is sent as a whole
            return
        group = request.group
        self._to_address(
            group.rollout.life,
            wire.TokensGenerated(
                rollout_id=group.rollout.rollout_id,
                prompt_id=group.prompt_id,
                index=index,
                start=request.view.generated - len(ended.tokens),
                tokens=ended.tokens,
                logprobs=ended.logprobs,
                submission=group.submission,
                weight_version=version,
            ),
        )

    def _perform(self, item: Instruction) -> None:
        match item:
            case instructions.Restore():
                self._store.restore(item.group_id, self._kept.restore(item.group_id), self._live())
            case instructions.Dispatch():
                wait = self._requests.policy.admission
                turns = self.registered[item.instance].turns
                chunk = self._store.chunk(item, *_locate(item.request_id), wait_for_room=wait, turns=turns)
                self._to_engine(item.instance, chunk)
            case instructions.Drop():
                drop = wire.DropChunk(request_id=item.request_id, attempt=item.attempt)
                self._to_engine(item.instance, drop)
            case instructions.Deliver():
                group = self._requests.groups.get(item.group_id)
                if group is not None:  # else one of the next instructions is to forget it
                    size = group.tokens * TOKEN_BYTES
                    self._deliver(self._deliveries.add(item.life, item.group_id, size))
            case instructions.Forget():
                self._store.forget(item.group_id)
                self._kept.forget(item.group_id)
                self._media.release(item.group_id)
                self._deliver(self._deliveries.forget(item.group_id))
            case instructions.Accept():
                self._to_address(item.life, views.answer(item))
            case instructions.Refuse():
                prompts = len(item.prompt_ids)
                self._log.info(
                    "prompts refused",
                    rollout=item.rollout_id,
                    prompts=prompts,
                    code=item.code,
                    why=item.message,
                )
                self._to_address(item.life, views.answer(item))
            case GroupOpened() | RequestProgress() | GroupClosed():
                self._publish(views.published(item))
            case _:
                self._perform_for_engines(item)

    def _perform_for_engines(self, item: Instruction) -> None:
        """Carry out the instructions about weights and sleep."""
        match item:
            case weight_instructions.Prepare() | weight_instructions.Discard() | weight_instructions.Load():
                self._to_engine(item.instance, views.order(item))
            case weight_instructions.Receivers():
                self._to_trainer(item.trainer, views.outcome(item))
            case weight_instructions.Report() | weight_instructions.Fail():
                self._log.info("weight update ended", outcome=item)
                self._to_trainer(item.trainer, views.outcome(item))
            case sleep.Order():
                self._to_engine(item.instance, views.sleep_order(item))
            case sleep.GiveUp():
                self._engines.forget(item.instance)
                self._log_loss(item.instance, "it did not sleep or wake in time")
            case sleep.Tell():
                self._to_trainer(item.trainer, views.slept(item))

    def _deliver(self, ready: Sequence[Sent]) -> None:
        for life, group_id in ready:
            group = self._requests.groups.get(group_id)
            if group is not None:  # else one of the next instructions is to forget it
                self._to_address(life, views.progress(self._requests, group.rollout))
                self._to_address(life, self._store.result(group))


def _locate(request_id: str) -> tuple[str, int]:
    group_id, _, index = request_id.rpartition("#")
    return group_id, int(index)
