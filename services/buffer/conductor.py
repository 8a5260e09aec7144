"""Carries out the instructions of the buffer's machines: stores arrays, makes messages and passes them on.

Invariants:
- the machines decide everything; this file stores arrays and turns instructions into messages;
- nothing runs between applying an event and turning its instructions into messages, so no message is about an
  outdated state.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from msgspec import structs

from seer.common import beside, receipt, wire
from seer.common.clock import Clock
from seer.common.net.node import node_id
from seer.common.process.log import get_logger
from seer.services.buffer import sleep_machine, views
from seer.services.buffer.buffer_machine import BufferMachine, Event, Instruction
from seer.services.buffer.conversations import Conversations
from seer.services.buffer.events import (
    Drained,
    FromTrainer,
    Joined,
    Left,
    Tick,
    ToEngine,
    ToIncarnation,
    ToTrainer,
    Weights,
)
from seer.services.buffer.failed_prompts import FailedPrompts
from seer.services.buffer.images.image_machine import ImageMachine
from seer.services.buffer.liveness import Liveness
from seer.services.buffer.log.chunk_file import Output
from seer.services.buffer.log.kept_chunks import KeptChunks
from seer.services.buffer.log.writer import LogWriter
from seer.services.buffer.outgoing import Outgoing
from seer.services.buffer.requests import events, instructions
from seer.services.buffer.requests.deliveries import Deliveries, Sent
from seer.services.buffer.response_store import Store, SubmittedPrompt
from seer.services.buffer.run_ahead import RunAhead
from seer.services.buffer.statistics import Statistics

COLLECT_SECONDS = 10.0
"""How long a draining buffer waits for trainers to acknowledge the last results."""

TICK_SECONDS = 0.5
"""How often `tick` is called."""


ChunkPart = wire.ChunkResult | wire.ChunkTokens


@dataclass(frozen=True, slots=True)
class Ended:
    """The arrays of an ended chunk, and what comes `beside` its tokens, by kind."""

    tokens: wire.Tokens
    logprobs: wire.Logprobs
    beside: Mapping[str, wire.Bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Submitted:
    """A submission of a trainer, its prompts by id, and by whose `share` it runs; by default its own."""

    trainer: str
    submit: wire.Submit
    prompts: Mapping[str, SubmittedPrompt]
    share: str = ""


class Conductor:
    """Messages go to `out`; `observers` are told of every event, and what the machines answered it with.

    `log_position` returns where the log's next row will be (`LogWriter.position`).
    `drained` is set once `drain` was called and all groups that were begun are finished and acknowledged.
    """

    def __init__(
        self,
        clock: Clock,
        machine: BufferMachine,
        store: Store,
        kept: KeptChunks,
        images: ImageMachine,
        silence_seconds: float,
        lease_seconds: float,
        out: Outgoing,
        observers: Sequence[LogWriter | Statistics] = (),
        log_position: Callable[[], str] = str,
    ) -> None:
        self._clock = clock
        self.machine, self._requests, self._weights = machine, machine.requests, machine.weights
        self._store, self._kept, self._images = store, kept, images
        self._out, self._observers, self._log_position = out, observers, log_position
        self._deliveries = Deliveries()
        self.conversations = Conversations()
        self._ahead = RunAhead(self._requests)
        self.refusals = FailedPrompts()
        self._engines: Liveness[str] = Liveness(silence_seconds, TICK_SECONDS)
        self._trainers: Liveness[bytes] = Liveness(lease_seconds, TICK_SECONDS)
        self._sessions: dict[bytes, int] = {}
        self._log = get_logger()
        self.drained = asyncio.Event()
        self.draining = False
        self._collect_until: float | None = None
        self._streams: dict[bytes, list[instructions.Stream]] = {}  # since `send_streamed`

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
        if not self._requests.registry.finished or self._collect_until < self._clock.now():
            self.drained.set()

    # --- engines and trainers --------------------------------------------------------------

    def join(self, name: str, register: wire.Register, incarnation: int) -> None:
        """Register an engine, or register it again: then it no longer runs what was dispatched to it."""
        self._engines.received(name)
        if register.node == node_id():  # it reads the spool's files itself, and would send over this network
            register = structs.replace(register, weights_endpoint="")
        self.apply(Joined(name, register, incarnation))

    def received_from_engine(self, name: str) -> None:
        """Note that an engine sent a message, so it is not silent."""
        if name in self.machine.engines:
            self._engines.received(name)

    def received_from_trainer(self, address: bytes, session: int) -> None:
        """Note that a trainer sent a message. In a new `session` of the hub, earlier messages were lost."""
        self._trainers.received(address)
        if self._sessions.get(address) != session:
            self._sessions[address] = session
            self._deliveries.reset(address)

    def renounce(self, trainer: str, address: bytes) -> None:
        """End the trajectories that are away in rollouts which only earlier incarnations of a trainer had.

        An update that this trainer asked for would wait for them, each for its `idle_seconds`: for those that
        are away when it asks, and for those whose turn ends later.
        """
        registry, left = self._requests.registry, defaultdict[str, list[str]](list)
        for away in registry.trajectories.away.values():
            rollout_id, _, prompt_id = away.group_id.partition("/")
            rollout = registry.rollouts.get(rollout_id)
            taken_up = rollout is not None and rollout.address == address
            if away.key[0] == trainer and away.address != address and not taken_up:
                left[rollout_id].append(prompt_id)
        for rollout_id, prompt_ids in left.items():
            self.apply(FromTrainer(trainer, wire.Cancel(rollout_id, prompt_ids)))

    def give_up(self, names: Sequence[str], why: str, *, died: bool = False) -> None:
        """Log the loss of engines and remove them; unknown ones are ignored."""
        here = [name for name in names if name in self.machine.engines]
        for name in here:
            self._log_loss(name, why)
        self.engines_left(here, died=died)

    def _log_loss(self, name: str, why: str) -> None:
        self._log.warning("engine lost", engine=name, why=why)
        self._out.forget_engine(name)

    def engines_left(self, names: Sequence[str], *, died: bool = False) -> None:
        """Remove engines, as one that sent `Goodbye`; `died`: because they failed."""
        for name in names:
            self._engines.forget(name)
        if names:
            self.apply(Left(names, died))

    def tick(self) -> None:
        """Check all deadlines."""
        now = self._clock.now()
        self.give_up(self._engines.tick(now), "silent")
        for address in self._trainers.tick(now):
            self.apply(events.TrainerLost(address))
        registry = self._requests.registry
        owners = {rollout.address for rollout in registry.rollouts.values()}
        owners.update(away.address for away in registry.trajectories.away.values())
        owners.update(self._ahead.addresses)
        for address in self._sessions.keys() - owners:  # it has no groups, so no messages that could be lost
            del self._sessions[address]
            self._trainers.forget(address)
        self.apply(Tick())
        self._ahead.fill(self._requests.instances)
        self._order_ahead()
        self.log_refusals()

    # --- run-ahead ---------------------------------------------------------------------------

    def name_next(
        self, trainer: str, address: bytes, asked: wire.NextPrompts, prompts: Mapping[str, SubmittedPrompt]
    ) -> None:
        """Have prompts run ahead while engines idle. Raises `InvalidField`."""
        self._ahead.name(trainer, address, asked, prompts)
        self._order_ahead()

    def ended_ahead(
        self, engine: str, part: wire.ChunkResult | wire.ChunkFailed, tokens: wire.Tokens | None = None
    ) -> bool:
        """Return whether this is the end of a chunk that ran ahead; then there is no more to do about it."""
        goes_on = isinstance(part, wire.ChunkResult) and not (part.finish or part.start)
        ended = self._ahead.ended(engine, part.request_id, part.attempt, tokens if goes_on else None)
        self._order_ahead()
        return ended

    def _order_ahead(self) -> None:
        for name, order in self._ahead.take():
            self._out.engine(name, order)

    # --- instructions to messages ------------------------------------------------------------

    def apply(self, event: Event, arrays: Ended | Submitted | None = None) -> None:
        """Apply an event and carry out its instructions; `arrays`: those that the event is about."""
        live = self._live()  # the weights that generated a chunk that ends now
        now = self._clock.now()
        out: Sequence[Instruction] = ()
        try:
            out = self.machine.apply(event, now)
        finally:
            for observer in self._observers:
                observer.record(now, event, out)  # also if a machine raises, so that a replay does, too
        self._ahead.before(event, out)
        self._order_ahead()
        for item in out:
            match arrays:
                case Ended() if isinstance(item, instructions.Keep):
                    self._keep(item, arrays, live)
                case Submitted() if isinstance(item, instructions.Take):
                    self._take(item, arrays, now)
                case _:
                    self._perform(item)
        self._check_drained()

    def _live(self) -> Weights:
        return self._weights.live or Weights(0, "")

    def _keep(self, item: instructions.Keep, ended: Ended, live: Weights) -> None:
        group_id, index = _locate(item.request_id)
        chunk = Output(ended.tokens, ended.logprobs, (item.finish, item.stop_reason), ended.beside)
        self._store.keep(group_id, index, chunk, live)
        self._kept.keep(group_id, index, chunk)

    def send_streamed(self) -> None:
        """Send each trainer, in one message, what came since the last call for the responses it streams."""
        streams, self._streams = self._streams, {}
        for address, items in streams.items():
            here = [item for item in items if _locate(item.request_id)[0] in self._store]
            if here and self._out.keeps_up(address):
                self._out.incarnation(address, self._generated(address, here))

    def _generated(self, address: bytes, items: Sequence[instructions.Stream]) -> wire.TokensGenerated:
        parts, outputs = [], []
        for item in items:
            group_id, index = _locate(item.request_id)
            to = address, item.submission
            start, unsent = self._store.unsent(group_id, index, to)
            self._store.sent(group_id, index, to)
            rollout_id, _, prompt_id = group_id.partition("/")
            count, extra = len(unsent.tokens), beside.sizes(unsent.beside)
            parts.append(
                wire.StreamedPart(rollout_id, prompt_id, index, start, count, item.submission, extra)
            )
            outputs.append(unsent)
        return wire.TokensGenerated(
            parts=parts,
            tokens=np.concatenate([each.tokens for each in outputs]),
            logprobs=np.concatenate([each.logprobs for each in outputs]),
            weight_version=self._live().version,
            beside=beside.flat([each.beside for each in outputs]),
        )

    def with_record(
        self, engine: str, part: ChunkPart, extras: dict[str, wire.Bytes]
    ) -> tuple[ChunkPart, dict[str, wire.Bytes]]:
        """Return a part of a chunk, with the record of it beside its tokens if its response has a receipt."""
        if not self._store.asks_receipts(part.request_id.rpartition("#")[0]):
            return part, extras
        record = receipt.ChunkRecord(count=part.count)
        if part.start == 0:
            known = self.machine.engines.get(engine)
            record = structs.replace(
                record, engine=engine, weight_version=self._live().version,
                versions=known.register.versions if known else {}, log=self._log_position(),
            )  # fmt: skip
        if isinstance(part, wire.ChunkResult) and len(part.verified) == 2:
            record = structs.replace(record, drafted=part.verified[0], accepted=part.verified[1])
        line = np.frombuffer(receipt.line(record), np.uint8)[:, None]
        extras = extras | beside.packed({receipt.WORD: line})
        return structs.replace(part, beside=beside.sizes(extras)), extras

    def _take(self, item: instructions.Take, of: Submitted, now: float) -> None:
        prompt = of.prompts[item.prompt_id]
        self._store.open(item.group_id, prompt)
        images = [each.name for each in prompt.images]
        self._images.refer(item.group_id, of.trainer, of.share or of.trainer, images, now)
        self._kept.open(of.submit.rollout_id, item.prompt_id)

    def _perform(self, item: Instruction) -> None:
        match item:
            case ToEngine(name, order):
                self._out.engine(name, order)
            case ToTrainer(name, answer):
                if isinstance(answer, wire.WeightsLive | wire.WeightsFailed):
                    self._log.info("weight update ended", outcome=item)
                self._out.trainer(name, answer)
            case ToIncarnation(address, answer):
                if isinstance(answer, wire.Refused):
                    self.refusals.add(answer)
                self._out.incarnation(address, answer)
            case wire.GroupOpened() | wire.RequestProgress() | wire.GroupClosed():
                self._out.publish(item)
            case instructions.Stream(_, address):
                self._streams.setdefault(address, []).append(item)
            case sleep_machine.GiveUp(name):
                self._engines.forget(name)
                self._log_loss(name, "it did not sleep or wake in time")
            case _:
                self._perform_with_store(item)

    def _perform_with_store(self, item: Instruction) -> None:
        """Carry out what is about stored tokens."""
        match item:
            case instructions.Dispatch():
                wait = self._requests.policy.admission
                chunk = self._store.chunk(item, *_locate(item.request_id), wait_for_room=wait)
                self._out.engine(item.instance, chunk)
            case instructions.Restore(group_id):
                self._store.restore(group_id, self._kept.restore(group_id), self._live())
            case instructions.Deliver(address, group_id):
                size = self._store.size(group_id)
                self._deliver(self._deliveries.add(address, group_id, size))
                self.conversations.answered(group_id, self._store.output(group_id))
            case instructions.Forget(group_id):
                self._store.forget(group_id)
                self.conversations.failed(group_id)
                self._kept.forget(group_id)
                self._images.release(group_id)
                self._deliver(self._deliveries.forget(group_id))

    def log_refusals(self, *, last: bool = False) -> None:
        """Log which prompts were refused or failed, in few lines; `last`: all that are not logged yet."""
        for fold in self.refusals.due(self._clock.now(), last=last):
            log = self._log.info if fold.expected else self._log.warning
            log(
                "prompts cancelled" if fold.expected else "prompts failed",
                rollout=fold.rollout_id,
                prompts=fold.prompts,
                ids=fold.first,
                code=fold.code,
                why=fold.why,
            )

    def _deliver(self, ready: Sequence[Sent]) -> None:
        for address, group_id in ready:
            group = self._requests.groups.get(group_id)
            if group is not None:  # else one of the next instructions is to forget it
                self._out.incarnation(address, views.progress(self._requests, group.rollout))
                self._out.incarnation(address, self._store.result(group))


def _locate(request_id: str) -> tuple[str, int]:
    group_id, _, index = request_id.rpartition("#")
    return group_id, int(index)
