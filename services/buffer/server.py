"""The buffer's sockets: messages become its machines' events; what these answer is sent.

Invariants:
- every decision is a machine's, and the `conductor` turns it into messages; this file checks what
  comes in, and sends what goes out in order, per kind of peer;
- a malformed submission is refused by prompt, a malformed engine answer is a lost chunk: neither
  touches anything else;
- a trainer that does not read delays nobody: what it gets waits apart (`Outbox`), or is lost and
  asked for again.
"""

from __future__ import annotations

import asyncio
import functools
from collections import Counter
from pathlib import Path
from typing import Any

from seer import __version__
from seer.common import ids, wire
from seer.common.clock import Clock
from seer.common.config import Config, shared_hash
from seer.common.errors import ConfigError, InvalidField, NotLoaded, RequestRefused, SeerError
from seer.common.net.handshake import Identity
from seer.common.net.hub import MAX_PEERS, Hub
from seer.common.net.outbox import Outbox
from seer.common.net.stream import QUEUE_PAGES, StreamPublisher, StreamSubscriber
from seer.common.net.transport.base import Transport
from seer.common.policy.length import Estimate
from seer.common.policy.schedule import POLICIES
from seer.common.process.log import get_logger
from seer.common.types import InstanceStats
from seer.services.buffer import sleep, submissions, views
from seer.services.buffer.conductor import TICK_SECONDS, Conductor, Ended, Submitted
from seer.services.buffer.log.kept import KeptChunks
from seer.services.buffer.log.rows import Header
from seer.services.buffer.log.writer import LogWriter
from seer.services.buffer.peers import Peers, check_register, life_of
from seer.services.buffer.requests import events, state
from seer.services.buffer.store import TOKEN_BYTES, Store
from seer.services.buffer.weights import events as weight_events
from seer.services.buffer.weights.spool import Spool


def make(config: Config, transport: Transport, clock: Clock) -> BufferServer:
    """Build the service for `service.run_process`."""
    return BufferServer(config, transport, clock)


class BufferServer:
    """One buffer. Raises `ConfigError` for an unknown policy."""

    def __init__(self, config: Config, transport: Transport, clock: Clock) -> None:
        settings = config.buffer
        if settings.policy not in POLICIES:
            raise ConfigError(f"buffer.policy = {settings.policy!r}: choose one of {', '.join(POLICIES)}")
        if settings.chunk_size is not None and settings.chunk_size < 1:
            raise ConfigError(f"buffer.chunk_size = {settings.chunk_size}: give at least 1 token")
        self._config = config
        self._transport = transport
        self._clock = clock
        self._log = get_logger()
        limits = state.Limits(
            chunk_size=settings.chunk_size,
            max_requests=settings.max_requests,
            engine_wait_seconds=settings.engine_wait_seconds,
            max_attempts=settings.max_attempts,
            result_ttl_seconds=settings.result_ttl_seconds,
            result_tokens=settings.result_bytes // TOKEN_BYTES,
            unfinished_tokens=settings.unfinished_bytes // TOKEN_BYTES,
        )
        self.me = Identity(
            role="buffer",
            name="buffer",
            incarnation=ids.new_incarnation(),
            config_hash=shared_hash(config.shared),
        )
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
        self.machine, self.weights, self._sleep = machines.requests, machines.weights, machines.sleep
        self._rows = LogWriter(settings.log, header, machines)
        self.store = Store()
        chunks = str(Path(settings.log) / "chunks") if settings.log and settings.keep_chunks else ""
        self._kept = KeptChunks(chunks, settings.result_ttl_seconds, clock.now())
        # Bounded by open work, as the outboxes are: a request has one chunk out, a group one result, and
        # ticks add only to idle ones.
        self._to_publish: asyncio.Queue[wire.BufferPublished] = asyncio.Queue()
        self.conductor = Conductor(
            clock,
            machines,
            self.store,
            self._kept,
            settings.engine_silence_seconds,
            settings.trainer_lease_seconds,
            to_engine=self._tell_engine,
            to_trainer=self._tell_trainer,
            to_life=self._tell_life,
            publish=self._to_publish.put_nowait,
            parted=self._part,
            record=self._rows.write,
        )
        self._spool = Spool(settings.spool, clock)
        self._trainers, self._engines = Peers(), Peers()
        self._registered_at: dict[str, bytes] = {}
        self._stats: dict[str, InstanceStats] = {}
        self._lives: Counter[str] = Counter()

    async def start(self) -> dict[str, str]:
        """Bind everything; return the endpoints bound."""
        self._spool.start()
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
        )
        self._engine_hub: Hub[wire.BufferToEngine, wire.EngineToBuffer] = Hub(
            engines, self.me, wire.EngineToBuffer, require_config_hash=True, roles=frozenset({"engine"})
        )
        self._to_trainers = Outbox(self._trainer_hub, self._trainers.leave)
        self._to_engines = Outbox(self._engine_hub, self._engine_unreachable)
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
        return {
            "trainers": trainers.endpoint,
            "engines": engines.endpoint,
            "events": published.endpoint,
            "event_snapshots": snapshots.endpoint,
        }

    async def run(self) -> None:
        """Serve until drained."""
        try:
            await self._serve()
        except ExceptionGroup as group:
            if group.split(SeerError)[1] is not None:  # else it is an expected end, and no crash
                self._rows.dump()
            raise
        finally:
            self._rows.close()
            self._kept.close()

    async def _serve(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            serving = [
                tasks.create_task(task)
                for task in (
                    self._serve_trainers(),
                    self._serve_engines(),
                    self._serve_estimates(),
                    self._events.serve(),
                    self._to_engines.run(),
                    self._to_trainers.run(),
                    self._publish(),
                    self._tick(),
                    self._spool.run(),
                )
            ]
            await self.conductor.drained.wait()
            for task in serving:
                task.cancel()
        counters = {
            "trainers": self._trainer_hub.counters,
            "engines": self._engine_hub.counters,
            "events": self._events.counters,
        }
        self._log.info("served", **counters)

    def drain(self) -> None:
        """Take no more submissions; `run` returns once everything accepted is finished and collected."""
        self.conductor.drain()

    # --- sockets to events ---------------------------------------------------------------

    async def _serve_trainers(self) -> None:
        while True:
            address, message = await self._trainer_hub.recv()
            if isinstance(message, wire.Hello):
                await self._greet(self._trainer_hub, self._trainers, address, message)
            name = self._trainers.name(address)
            if name is None:
                self._trainer_hub.dismiss(address)
                continue
            if self._trainers.at(name) != address and not isinstance(message, wire.Hello | wire.Goodbye):
                if not self._trainers.doubtful(address):  # else it hears of this when it is known
                    other = f"another life of trainer {name} is connected: give each client a name of its own"
                    await self._trainer_hub.reply(
                        address, wire.Refused(code=RequestRefused.code, message=other)
                    )
                continue
            self.conductor.heard_trainer(address, self._trainer_hub.session(address))
            if (reply := self._from_trainer(name, address, message)) is not None:
                await self._trainer_hub.reply(address, reply)

    async def _greet(self, hub: Hub[Any, Any], peers: Peers, address: bytes, hello: wire.Hello) -> None:
        waited = peers.name(address) is not None and peers.at(hello.name) != address
        holder = peers.greet(address, hello, self._clock.now())
        if holder is not None and not await hub.is_connected(holder):
            peers.leave(holder)
            hub.dismiss(holder)  # it misses what is said from now on: if it comes back, it has to hear so
            holder = peers.greet(address, hello, self._clock.now())
        if waited and holder is None:
            hub.dismiss(address)  # what it said so far was not heard: have it begin anew

    def _from_trainer(
        self, name: str, address: bytes, message: wire.TrainerToBuffer
    ) -> wire.BufferToTrainer | None:
        """Take a message; return what is to be answered at once."""
        match message:
            case wire.Submit():
                return self._submit(name, address, message)
            case wire.Acknowledge(rollout_id=rollout_id, prompt_ids=prompt_ids, submission=submission):
                self.conductor.apply(events.GroupsAcknowledged(name, rollout_id, prompt_ids, submission))
            case wire.Cancel(rollout_id=rollout_id, prompt_ids=prompt_ids, submission=submission):
                self.conductor.apply(events.RolloutCancelled(name, rollout_id, prompt_ids, submission))
            case wire.StatusRequest():
                return self._status()
            case wire.Sleep() if self.weights.updating:
                busy = "a weight update is under way: wait for that"
                return wire.Slept(asleep=message.asleep, problem=busy, call_id=message.call_id)
            case wire.Sleep():
                self.conductor.apply(sleep.SleepAsked(name, message.asleep, message.call_id))
            case wire.UpdateWeights():
                return self._update(name, address, message)
            case wire.OpenSpool() | wire.SpoolData():
                self._spool.put(self._trainer_hub.reply, address, message)
            case wire.Goodbye():
                self._trainers.leave(address)
        return None

    def _update(self, name: str, address: bytes, message: wire.UpdateWeights) -> wire.WeightsFailed | None:
        """Begin an update; return why engines that sleep cannot."""
        self._spool.name(message.source)
        if self._sleep.wanted:
            reasons = {"": "engines sleep: wake them first"}
            return wire.WeightsFailed(version=message.version, reasons=reasons, call_id=message.call_id)
        mode = weight_events.InFlight(message.in_flight)
        asked = weight_events.UpdateAsked(
            name, message.version, message.source, message.digest, mode, message.call_id
        )
        self.conductor.apply(asked)
        return None

    def _status(self) -> wire.Status:
        at, pool = self._config.endpoints, self._config.pool
        services = {"context": at.estimate_snapshots, "dgds": at.dgds}
        if pool.kind == "mooncake":
            services["pool"] = pool.metrics
        return views.status(
            self.machine,
            self.weights,
            self.me,
            self.conductor.registered,
            self._stats,
            self._lives,
            self._trainer_hub.uptime_seconds,
            services,
            self._sleep.held,
        )

    def _submit(self, trainer: str, address: bytes, submit: wire.Submit) -> wire.Refused | None:
        """Return the refusal of a submission that makes no sense."""
        try:
            prompts = submissions.prompts(submit)
        except InvalidField as error:
            return wire.Refused(
                code=RequestRefused.code,
                message=str(error),
                rollout_id=submit.rollout_id,
                prompt_ids=submit.prompt_ids,
                submission=submit.submission,
            )
        event = submissions.event(trainer, address, submit, prompts, self.store, self._kept)
        self.conductor.apply(event, Submitted(submit, prompts))
        return None

    async def _serve_engines(self) -> None:
        while True:
            address, message = await self._engine_hub.recv()
            if isinstance(message, wire.Hello):
                await self._greet(self._engine_hub, self._engines, address, message)
                continue
            name = self._engines.name(address)
            if name is None:
                self._engine_hub.dismiss(address)
                continue
            if name not in self.weights:
                self._engines.take(name, address)  # the later life that took the name is gone again
            session = self._engine_hub.session(address)
            if isinstance(message, wire.Register):
                self._engines.registered[address] = session
            elif name not in self.weights:
                if self._engines.registered.get(address) == session:
                    # It was given up since it registered: have it do so again, once however much it says.
                    self._engine_hub.dismiss(address)
                continue
            if self._engines.at(name) == address:  # else: an earlier life of this engine
                self.conductor.heard(name)
                self._from_engine(name, address, message)

    def _from_engine(self, name: str, address: bytes, message: wire.EngineToBuffer) -> None:
        match message:
            case wire.Register():
                self._register(name, address, message)
            case wire.ChunksDone():
                self._chunks_done(name, address, message)
            case wire.ChunkFailed():
                self._chunk_failed(name, message)
            case wire.EngineStatus():
                self._stats[name] = message.stats
                self.conductor.apply(events.EngineReported(name, message.stats.pinned_blocks))
            case wire.WeightsPrepared():
                self.conductor.apply(
                    weight_events.Prepared(
                        name, message.version, message.digest, message.problem, message.call_id
                    )
                )
            case wire.WeightsLoaded():
                self.conductor.apply(weight_events.Loaded(name, message.version, message.problem))
            case wire.Slept():
                self.conductor.apply(sleep.SleepAnswered(name, message.asleep))
            case wire.OpenSpool() | wire.ReadSpool():
                self._spool.put(self._engine_hub.reply, address, message)
            case wire.Goodbye():
                self._log.info("engine left", engine=name, problem=message.problem)
                self.conductor.drop(name, died=bool(message.problem))

    def _register(self, name: str, address: bytes, register: wire.Register) -> None:
        try:
            check_register(register)
        except InvalidField as error:
            self._engine_hub.refuse(address, error)
            return
        if self._registered_at.get(name) != address:  # an address names one life
            self._registered_at[name] = address
            self._lives[name] += 1
        if name not in self.weights:
            self._log.info("engine joined", engine=name, kv_blocks=register.capacity.kv_blocks)
        self.conductor.join(name, register, life_of(address))
        gone = [other for other in self._lives if other not in self.weights]
        for other in gone[: max(0, len(self._lives) - MAX_PEERS)]:
            for table in (self._lives, self.conductor.registered, self._registered_at, self._stats):
                table.pop(other, None)

    def _chunk_failed(self, name: str, failed: wire.ChunkFailed) -> None:
        request = self.machine.requests.get(failed.request_id)
        if request is not None and (request.instance, request.attempt) == (name, failed.attempt):
            # A fatal one is the request's own fault, and its trainer's to hear.
            log = self._log.info if failed.fatal else self._log.warning
            log("chunk failed", engine=name, request=failed.request_id, why=failed.message)
            if failed.code == NotLoaded.code:
                self.conductor.give_up([name], failed.message)
                return
        rejected = events.ChunkRejected(name, failed.request_id, failed.attempt, failed.fatal, failed.message)
        self.conductor.apply(rejected)

    def _chunks_done(self, engine: str, address: bytes, done: wire.ChunksDone) -> None:
        counts = [result.count for result in done.results]
        if min(counts, default=0) < 0 or not sum(counts) == len(done.tokens) == len(done.logprobs):
            fix = f"must add up to the {len(done.tokens)} tokens and {len(done.logprobs)} logprobs sent"
            error = InvalidField("results", counts, fix)
            self._engine_hub.refuse(address, error)
            for result in done.results:  # these provoked it, so it counts against them
                rejected = events.ChunkRejected(engine, result.request_id, result.attempt, False, str(error))
                self.conductor.apply(rejected)
            self.conductor.give_up([engine], "it sent results that make no sense")
            return
        if done.weight_version != self.machine.weight_version and engine in self.machine.instances:
            self.conductor.give_up([engine], f"sent tokens of weight version {done.weight_version}")
            return
        start = 0
        for result in done.results:
            end = start + result.count
            event = events.ChunkEnded(
                engine,
                result.request_id,
                result.attempt,
                result.count,
                result.finish,
                result.stop_reason,
                result.preemptions,
                result.drafted,
                result.accepted,
            )
            self.conductor.apply(event, Ended(done.tokens[start:end], done.logprobs[start:end]))
            start = end
        self._kept.flush()

    def _engine_unreachable(self, address: bytes) -> None:
        name = self._engines.name(address)
        if name is not None and self._engines.at(name) == address:
            self.conductor.give_up([name], "its connection is gone", died=True)

    async def _serve_estimates(self) -> None:
        while True:
            news = await self._estimates.recv()
            estimates = {
                group_id: Estimate(tokens, news.spreads.get(group_id, 0.0))
                for group_id, tokens in news.estimates.items()
            }
            sound = {group_id: told for group_id, told in estimates.items() if told.valid}
            self.conductor.apply(events.EstimatesChanged(sound, news.acceptance))

    async def _tick(self) -> None:
        while True:
            await self._clock.sleep(TICK_SECONDS)
            self.conductor.tick()
            self._rows.flush()
            self._kept.flush()
            self._kept.tick(self._clock.now())
            self._spool.remove_unneeded(self.weights.sources)
            if self._to_engines.idle:
                for name in sorted(self.weights.known):
                    self._tell_engine(name, wire.Ping())
            if self._to_trainers.idle:
                for rollout in self.machine.rollouts.values():
                    if self._to_trainers.keeps_up(rollout.life):
                        self._tell_life(rollout.life, views.progress(self.machine, rollout))

    # --- messages to sockets -------------------------------------------------------------

    def _tell_engine(self, name: str, message: wire.BufferToEngine) -> None:
        address = self._engines.at(name)
        if address is not None:
            self._to_engines.put(address, message)

    def _tell_trainer(self, name: str, message: wire.BufferToTrainer) -> None:
        address = self._trainers.at(name)
        if address is not None:
            self._to_trainers.put(address, message)

    def _tell_life(self, address: bytes, message: wire.BufferToTrainer) -> None:
        # Another life of a trainer gets its finished groups when it submits them again under its name.
        if self._trainers.name(address) is not None:
            self._to_trainers.put(address, message)

    def _part(self, name: str) -> None:
        """Have an engine that was given up shake hands, and register, before anything of it counts."""
        address = self._registered_at.get(name)  # a later life may have its name by now
        if address is not None:
            self._engine_hub.dismiss(address)

    async def _publish(self) -> None:
        while True:
            await self._events.publish(await self._to_publish.get())
