"""The buffer's sockets: received messages become events of its machines, and their instructions are sent.

Invariants:
- the machines decide everything, and the `conductor` turns their instructions into messages; this file
  validates what is received from trainers and other services (`engines.py`: from engines), and sends messages
  in order, per kind of peer;
- a malformed submission is refused, prompt by prompt, and affects nothing else;
- a trainer that does not read delays nobody: messages to it wait in a queue of their own (`Outbox`), or are
  lost and requested again.
"""

from __future__ import annotations

import asyncio
import functools
from collections import ChainMap
from pathlib import Path

from msgspec import structs

from seer import __version__
from seer.common import ids, wire
from seer.common.clock import Clock
from seer.common.config import Config
from seer.common.errors import ConfigError, InvalidField, RequestRefused, SeerError
from seer.common.net.hub import Hub
from seer.common.net.identity import this_process
from seer.common.net.stream import QUEUE_PAGES, StreamPublisher, StreamSubscriber
from seer.common.net.transport.base import Transport
from seer.common.policy.length import Estimate
from seer.common.policy.schedule import POLICIES
from seer.common.process.log import get_logger
from seer.common.process.memory_bounds import buffer_bounds
from seer.common.process.memory_limit import bounds, limit_bytes
from seer.common.process.tasks import serve_until
from seer.services.buffer import rights, submissions, views
from seer.services.buffer.conductor import TICK_SECONDS, Conductor, Submitted
from seer.services.buffer.engines import EngineConnections
from seer.services.buffer.events import FromTrainer, SleeperLost
from seer.services.buffer.images.image_server import ImageServer
from seer.services.buffer.log.kept_chunks import KeptChunks
from seer.services.buffer.log.rows import Header
from seer.services.buffer.log.writer import LogWriter
from seer.services.buffer.outgoing import Outgoing
from seer.services.buffer.peers import handle_hello
from seer.services.buffer.requests import events, state
from seer.services.buffer.response_store import TOKEN_BYTES, Store
from seer.services.buffer.rollout_ids import RolloutIds
from seer.services.buffer.sleep_leases import SleepLeases
from seer.services.buffer.statistics import Statistics
from seer.services.buffer.status import Sources, StatusDesk
from seer.services.buffer.weights.spool import Spool

MAX_ATTEMPTS = 8
"""A request whose chunk failed so often in a row is failed: who loses eight engines in a row kills them."""

NOT_REMEMBERED = (
    "nothing is remembered for coming prompts: raise it for the dgds and the buffer, or leave it out"
)
"""Why nothing runs ahead."""


def make(config: Config, transport: Transport, clock: Clock) -> BufferServer:
    """Build the service for `service.run_process`."""
    return BufferServer(config, transport, clock)


class BufferServer:
    """One buffer. Raises `ConfigError` for an unknown policy, or bounds beyond its memory limit."""

    def __init__(self, config: Config, transport: Transport, clock: Clock) -> None:
        settings = config.buffer
        if settings.policy not in POLICIES:
            raise ConfigError(f"buffer.policy = {settings.policy!r}: choose one of {', '.join(POLICIES)}")
        self._config = config
        self._transport = transport
        self._clock = clock
        self._log = get_logger()
        unfinished_bytes, result_bytes = bounds(buffer_bounds(settings), limit_bytes())
        limits = state.Limits(
            chunk_size=settings.chunk_size,
            max_requests=settings.max_requests,
            engine_wait_seconds=settings.engine_wait_seconds,
            max_attempts=MAX_ATTEMPTS,
            result_ttl_seconds=settings.result_ttl_seconds,
            result_tokens=result_bytes // TOKEN_BYTES,
            unfinished_tokens=unfinished_bytes // TOKEN_BYTES,
            shares=settings.shares,
        )
        self.me = this_process("buffer", "buffer", config)
        header = Header(
            version=__version__,
            incarnation=self.me.incarnation,
            policy=settings.policy,
            limits=limits,
            update_seconds=settings.update_seconds,
            attempt=self.me.incarnation,
            clock=clock.now(),
        )
        machines = header.machine()
        self.machine, self.weights = machines.requests, machines.weights
        self._rows = LogWriter(settings.log, header, machines)
        self._statistics = Statistics(machines)
        self.store = Store()
        chunks = str(Path(settings.log) / "chunks") if settings.log and settings.keep_chunks else ""
        self._kept = KeptChunks(chunks, settings.result_ttl_seconds, clock.now(), self.store.so_far)
        self._images = ImageServer(
            settings.images,
            settings.image_bytes,
            clock,
            arrived=lambda name: self.conductor.apply(events.ImageArrived(name)),
            stalled=lambda groups, why: self.conductor.apply(events.ImagesStalled(groups, why)),
        )
        self._out = Outgoing()
        self.conductor = Conductor(
            clock,
            machines,
            self.store,
            self._kept,
            self._images.machine,
            settings.engine_silence_seconds,
            settings.trainer_lease_seconds,
            self._out,
            (self._rows, self._statistics),
            self._rows.position,
        )
        self._ids = RolloutIds(self.machine.rollouts, self.machine.registry.trajectories.away)
        self._leases = SleepLeases(settings.trainer_lease_seconds, TICK_SECONDS)
        self._spool = Spool(settings.spool, clock)
        self._trainers = self._out.trainers
        self._machines = machines
        self._engines = EngineConnections(
            self.me, clock, machines, self.conductor, self._kept, self._spool, self._images, self._out
        )

    async def start(self) -> dict[str, str]:
        """Bind everything; return the endpoints bound."""
        self._spool.start()
        self._images.start()
        at = self._config.endpoints
        trainers = await self._transport.router(at.trainers)
        engines = await self._transport.router(at.engines)
        published = await self._transport.publisher(at.events)
        snapshots = await self._transport.router(at.event_snapshots, QUEUE_PAGES)
        self._trainer_hub: Hub[wire.BufferToTrainer, wire.TrainerToBuffer] = Hub(
            trainers,
            self.me,
            wire.TrainerToBuffer,
            require_config_hash=False,
            roles=frozenset({"trainer"}),
            weight_version=lambda: self.weights.live.version if self.weights.live else 0,
            digests=lambda: self.weights.digests,
        )
        self._out.bind_trainers(self._trainer_hub)
        self._engines.bind(engines)
        self._events: StreamPublisher[wire.BufferPublished, wire.BufferSnapshot] = StreamPublisher(
            published, snapshots, self.me, functools.partial(views.snapshot, self.machine)
        )
        self._estimates: StreamSubscriber[wire.Estimates, wire.ContextSnapshot] = StreamSubscriber(
            self._transport,
            at.estimates,
            at.estimate_snapshots,
            self.me,
            wire.ContextPublished,
            wire.ContextSnapshotReply,
            self._clock,
        )
        self._desk = self._status_desk()
        return {
            "trainers": trainers.endpoint,
            "engines": engines.endpoint,
            "events": published.endpoint,
            "event_snapshots": snapshots.endpoint,
        }

    def _status_desk(self) -> StatusDesk:
        sources = Sources(
            me=self.me,
            services=self._services(),
            stats=self._engines.stats,
            incarnations=self._engines.incarnations,
            counters=ChainMap(self._images.counters, self.conductor.conversations.counters),
            uptime=lambda: self._trainer_hub.uptime_seconds,
            sockets=self._sockets,
            outages=lambda: {"log": self._rows.outage, "chunks": self._kept.outage},
        )
        return StatusDesk(self._clock, self._machines, self._statistics, sources, self._trainer_hub.reply)

    def _sockets(self) -> dict[str, dict[str, int]]:
        """Return the counters of all sockets by name."""
        return {
            "trainers": self._trainer_hub.counters,
            "engines": self._engines.hub.counters,
            "events": self._events.counters,
        }

    async def run(self) -> None:
        """Serve until drained."""
        try:
            await self._serve()
        except ExceptionGroup as group:
            if group.split(SeerError)[1] is not None:  # else all are expected errors, and this is no crash
                self._rows.dump()
            raise
        finally:
            self.conductor.log_refusals(last=True)
            self._rows.close()
            self._kept.close()

    async def _serve(self) -> None:
        await serve_until(
            self._drained(),
            self._serve_trainers(),
            self._engines.serve(),
            self._serve_estimates(),
            self._events.serve(),
            self._engines.outbox.run(),
            self._out.to_trainers.run(),
            self._publish(),
            self._tick(),
            self._spool.run(),
            self._images.run(),
            self._desk.run(),
            self._desk.watch_lag(),
        )
        self._log.info("served", **self._sockets())

    async def _drained(self) -> None:
        """Wait for the end, and until all who read have been told what led to it."""
        await self.conductor.drained.wait()
        await self._out.to_trainers.flush()
        await self._engines.outbox.flush()

    def drain(self) -> None:
        """Begin nothing new; `run` returns once all groups that were begun are finished and acknowledged."""
        self.conductor.drain()

    # --- sockets to events ---------------------------------------------------------------

    async def _serve_trainers(self) -> None:
        while True:
            address, message = await self._trainer_hub.recv()
            if isinstance(message, wire.Hello):
                await handle_hello(self._trainer_hub, self._trainers, address, message, self._clock)
            name = self._trainers.name_of(address)
            if name is None:
                self._trainer_hub.dismiss(address)
                continue
            holds_name = self._trainers.address_of(name) == address
            if not holds_name and not isinstance(message, wire.Hello | wire.Goodbye):
                if not self._trainers.holder_may_be_dead(address):  # else it is refused once that is known
                    fix = "give each client a name of its own"
                    other = f"another incarnation of trainer {name} is connected: {fix}"
                    await self._trainer_hub.reply(
                        address, wire.Refused(code=RequestRefused.code, message=other)
                    )
                continue
            self.conductor.received_from_trainer(address, self._trainer_hub.session(address))
            self._leases.heard(self._share(address, name))
            user = self._trainer_hub.user(address)
            if isinstance(message, rights.CHANGING) and user.lacks:
                reply = rights.refusal(user, message)
            elif isinstance(message, wire.NextPrompts):
                reply = self._next_prompts(name, address, message)
            elif isinstance(message, wire.Submit):
                reply = await self._submit(name, address, message)
            elif isinstance(message, wire.Cancel | wire.Acknowledge):
                await self._take_named(name, message)
                continue
            else:
                reply = self._from_trainer(name, address, message)
            if reply is not None:
                await self._trainer_hub.reply(address, reply)

    def _from_trainer(
        self, name: str, address: bytes, message: wire.TrainerToBuffer
    ) -> wire.BufferToTrainer | None:
        """Handle a message; return the answer if there is one at once."""
        match message:
            case wire.StatusRequest():
                self._desk.ask(address)
            case wire.ReportMismatch():
                self._desk.mismatch = message.mismatch
            case wire.Sleep(wish=0) if self.weights.updating:
                busy = "a weight update is under way: wait for that"
                return wire.Slept(asleep=message.asleep, problem=busy, call_id=message.call_id)
            case wire.UpdateWeights():
                if not self.conductor.draining:
                    self._spool.name(message.source)
                self.conductor.apply(FromTrainer(name, message))
            case wire.OpenSpool() | wire.SpoolData() if self.conductor.draining:
                pass  # the successor takes it: its trainer sends again what is not confirmed
            case wire.Sleep():
                self.conductor.apply(FromTrainer(name, message, self._share(address, name)))
            case wire.OpenSpool() | wire.SpoolData():
                self._spool.put(self._trainer_hub.reply, address, message, self._share(address, name))
            case wire.OpenImage() | wire.ImageData():
                self._images.put(self._trainer_hub.reply, address, message, name)
            case wire.Goodbye():
                self._trainers.remove(address)
                self.conductor.apply(events.TrainerLost(address))
        return None

    async def _take_named(self, trainer: str, message: wire.Cancel | wire.Acknowledge) -> None:
        """Handle what names prompts, and others' messages in between if it names many."""
        try:
            named = self._ids.here(trainer, message)
        except InvalidField:  # no rollout has such an id
            return
        for start in range(0, len(named.prompt_ids) or 1, wire.MAX_PROMPTS):
            if start:
                await asyncio.sleep(0)
            part = named.prompt_ids[start : start + wire.MAX_PROMPTS]
            self.conductor.apply(FromTrainer(trainer, structs.replace(named, prompt_ids=part)))

    def _share(self, address: bytes, name: str, client: str = "") -> str:
        """Return whom what a trainer of this name has counts to, or the `client` that it submits for."""
        return self._trainer_hub.user(address).share(name, self._config.buffer.shares, client)

    def _services(self) -> dict[str, str]:
        at, pool = self._config.endpoints, self._config.pool
        services = {"context": at.estimate_snapshots, "dgds": at.dgds}
        return services | ({"pool": pool.metrics} if pool.kind == "mooncake" else {})

    async def _submit(self, trainer: str, address: bytes, asked: wire.Submit) -> wire.BufferToTrainer | None:
        """Handle a submission, and others' messages in between; return the refusal of a malformed one."""
        try:
            submit = self._ids.here(trainer, asked)
            prompts = submissions.prompts(submit)
        except InvalidField as error:
            return self._refused(asked, error)
        share = self._share(address, trainer, submit.client)
        for part in submissions.parts(submit, prompts, self.store):
            part = submissions.with_turns(submit.rollout_id, part, self.store, self.conductor.conversations)
            event = submissions.event(
                trainer, address, submit, part, self.store, self._kept, self._images.machine, share
            )
            self.conductor.apply(event, Submitted(trainer, submit, part, share))
            for prompt_id in part:
                group_id = ids.group_id(submit.rollout_id, prompt_id)
                if group_id not in self.store:  # it was refused
                    self.conductor.conversations.failed(group_id)
            await asyncio.sleep(0)
        return None

    def _next_prompts(
        self, trainer: str, address: bytes, asked: wire.NextPrompts
    ) -> wire.Accepted | wire.Refused:
        """Take prompts that run ahead: neither the machines nor the log have anything of them."""
        try:
            if self._config.dgds.remember_tokens == 0:
                raise InvalidField("dgds.remember_tokens", 0, NOT_REMEMBERED)
            self.conductor.name_next(trainer, address, asked, submissions.prompts(asked))
        except InvalidField as error:
            return self._refused(asked, error)
        live = self.weights.live.version if self.weights.live else 0
        return wire.Accepted(
            rollout_id=asked.rollout_id, prompt_ids=asked.prompt_ids, submission=asked.submission,
            weight_version=live,
        )  # fmt: skip

    def _refused(self, asked: wire.Submit, error: InvalidField) -> wire.Refused:
        refused = wire.Refused(
            code=RequestRefused.code,
            message=str(error),
            rollout_id=asked.rollout_id,
            prompt_ids=asked.prompt_ids,
            submission=asked.submission,
        )
        self.conductor.refusals.add(refused)
        return refused

    async def _serve_estimates(self) -> None:
        while True:
            message = await self._estimates.recv()
            estimates = {
                group_id: Estimate(tokens, message.spreads.get(group_id, 0.0))
                for group_id, tokens in message.estimates.items()
            }
            valid = {group_id: estimate for group_id, estimate in estimates.items() if estimate.valid}
            self.conductor.apply(events.EstimatesChanged(valid, message.acceptance))
            await asyncio.sleep(0)  # one of many messages at once: each sorts thousands of requests again

    async def _tick(self) -> None:
        while True:
            await self._clock.sleep(TICK_SECONDS)
            name = self.weights.awaiting
            if (address := self._trainers.address_of(name)) is not None:
                self.conductor.renounce(name, address)
            self.conductor.tick()
            await self._end_sleep()
            self._rows.tick(self._clock.now())
            self._kept.tick(self._clock.now())
            self._spool.remove_unneeded(self.weights.sources)
            self._images.tick()
            if self._engines.outbox.idle:
                for name in sorted(self.weights.known):
                    self._out.engine(name, wire.Ping())
            if self._out.to_trainers.idle:
                for rollout in self.machine.rollouts.values():
                    if self._out.to_trainers.keeps_up(rollout.address):
                        self._out.incarnation(rollout.address, views.progress(self.machine, rollout))

    async def _end_sleep(self) -> None:
        """Have engines wake that sleep for trainers of whom nobody is there any more."""
        if self.weights.updating:
            return  # waking waits for that
        for share in self._leases.tick(self._machines.sleep.sleepers, self._clock.now()):
            for address in self._trainers.addresses:
                its = (
                    self._trainer_hub.session(address)
                    and self._share(address, self._trainers.name_of(address) or "") == share
                )
                if its and await self._trainer_hub.is_connected(address):
                    break
            else:
                self._log.warning("a trainer that had engines sleep is gone", trainer=share)
                self.conductor.apply(SleeperLost(share))

    async def _publish(self) -> None:
        while True:
            await self._events.publish(await self._out.published.get())
