"""One engine on the buffer: chunks in, tokens out; tokens to the dgds as they come.

Invariants (tests/unit/test_engine_server.py asserts them):
- every chunk taken ends in exactly one of: a result, a `ChunkFailed`, a drop by the buffer; a
  repeated `RunChunk` changes nothing, one of a newer attempt replaces the older, an older is ignored;
- results leave at once; all chunks that ended meanwhile share one `ChunksDone`;
- a buffer that forgot us (restarted, or lost us for a while) counts on nothing we run: all chunks
  are dropped and the engine registers again, before anything else is sent;
- generation waits for neither the buffer nor the dgds;
- new weights are checked beside the live ones, and loaded while nothing runs; after a failed load
  nothing runs until another one succeeded; what was copied for them is deleted however that ends;
- neither reading, loading nor sleeping keeps it from reporting that it lives;
- told to stop, it hands back what its chunks have so far (a chunk may end anywhere) and leaves; told
  by the buffer to drain, it finishes them first; a failing backend says `Goodbye` and ends loudly.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from pathlib import Path

from msgspec import structs

from seer.common import ids, wire
from seer.common.clock import Clock
from seer.common.config import Config, shared_hash
from seer.common.errors import (
    ConfigError,
    EngineError,
    InvalidField,
    NotLoaded,
    SeerError,
    Unreachable,
)
from seer.common.net.channel import Channel
from seer.common.net.handshake import Identity
from seer.common.net.transport.base import Transport
from seer.common.process.log import get_logger
from seer.common.weights.safetensors import stamps
from seer.services.dgds.client import DgdsClient
from seer.services.engine.backend import Backend, Chunk, ChunkEnd, StepOutput
from seer.services.engine.chunks import Running, begin, chunk_of, done_message
from seer.services.engine.draft_groups import DraftGroups
from seer.services.engine.driver import Driver, Facts, InlineDriver, ThreadDriver
from seer.services.engine.pace import Pace
from seer.services.engine.replay.backend import ReplayBackend
from seer.services.engine.weights.fetcher import WeightFetcher
from seer.services.engine.weights.manifest import Manifest, differences, inspect

UNDEFINED = -1
"""Weight version of an engine whose last load failed: it must not generate."""

Order = wire.PrepareWeights | wire.DiscardWeights | wire.LoadWeights | wire.Sleep

_NOTHING = ("", "", ())
"""No source, digest and files: nothing was checked."""

MAX_ORDERS = 64
"""Bound on weight orders that wait: a buffer gives one or two per update."""

JOIN_SECONDS = 120.0
"""How long a loaded engine waits for its buffer to appear: services start in any order."""

RETRY_SECONDS = 1.0
"""Pause before a message that the buffer did not take is sent again."""

LEAVE_SECONDS = 2.0
"""Longest wait to hand back results and say goodbye, to the buffer and to the dgds each."""


def make(config: Config, transport: Transport, clock: Clock) -> EngineServer:
    """Build the service for `service.run_process`."""
    return EngineServer(config, transport, clock, _backend(config))


def _backend(config: Config) -> Backend:
    if config.engine.backend == "replay":
        return ReplayBackend(config.engine, config.shared)
    from seer.services.engine.vllm.backend import VllmBackend  # torch and vllm load only where needed

    return VllmBackend(config.engine, config.shared, config.pool, config.drafts)


class EngineServer:
    """See the module's docstring. The replay backend is stepped inline, others on a thread."""

    def __init__(self, config: Config, transport: Transport, clock: Clock, backend: Backend) -> None:
        settings = config.engine
        if not settings.status_seconds > 0:
            raise ConfigError(f"engine.status_seconds = {settings.status_seconds}: must be positive")
        if settings.weights_root and not Path(settings.weights_root).is_dir():
            fix = "is no folder here; give the one that all weights lie beneath, or none"
            raise ConfigError(f"engine.weights_root = {settings.weights_root!r}: {fix}")
        self._settings = settings
        self._model = config.shared.model
        self._clock = clock
        self._log = get_logger()
        me = Identity(
            role="engine",
            name=settings.name or f"{socket.gethostname()}-{os.getpid()}",
            incarnation=ids.new_incarnation(),
            config_hash=shared_hash(config.shared),
        )
        inline = settings.backend == "replay"
        self._driver: Driver = InlineDriver(backend, self, clock) if inline else ThreadDriver(backend, self)
        self._buffer: Channel[wire.EngineToBuffer, wire.BufferToEngine] = Channel(
            transport, config.endpoints.engines, me, wire.BufferToEngine, clock
        )
        self._shares = config.drafts.source == "grouped"
        drafts = settings.backend != "replay"
        self._draft_groups = DraftGroups() if self._shares and drafts else None
        self.dgds = DgdsClient(transport, config.endpoints.dgds, me, clock, settings)
        self._pace = Pace()
        self.running: dict[str, Running] = {}
        # Bounded by the chunks placed here: each leaves one entry, sent as soon as the buffer takes it.
        self._ended: list[tuple[ChunkEnd, Running]] = []
        self._failed: list[wire.ChunkFailed] = []
        self._staging = WeightFetcher(self._buffer.send, settings.weights_root)
        self._checked: tuple[str, str, tuple[object, ...]] = _NOTHING
        self._preparing: asyncio.Task[wire.WeightsPrepared] | None = None
        self._called_off = 0
        self._weights = wire.LoadWeights(version=0, digest="", source="")
        self._live_manifest: Manifest | None = None
        self._orders: asyncio.Queue[Order] = asyncio.Queue(MAX_ORDERS)
        self._answers: list[wire.WeightsPrepared | wire.WeightsLoaded | wire.Slept] = []
        self._asleep = False
        self._rejoins = 0
        self._serial = 0
        self._register_due = self._status_due = False
        self._sendable, self._finished = asyncio.Event(), asyncio.Event()
        self._draining = False

    async def start(self) -> dict[str, str]:
        """Load the model, join the buffer and register. Raises `EngineError` or `Unreachable`."""
        self._facts: Facts = await self._driver.start(self._settings.load_seconds)
        try:
            if self._model:
                self._live_manifest = await asyncio.to_thread(inspect, Path(self._model))
                self._weights.digest = self._live_manifest.digest
                self._staging.model_bytes = self._live_manifest.size
                await self._driver.bind_weights(self._weights.digest)
            await self._buffer.open(JOIN_SECONDS)
            await self._buffer.send(self._registration())
        except BaseException:
            await self._driver.close()
            raise
        return {}

    async def run(self) -> None:
        """Serve until drained. Raises the error that made the engine fail."""
        try:
            async with asyncio.TaskGroup() as tasks:
                serving = [
                    tasks.create_task(task)
                    for task in (
                        self._receive(),
                        self._send(),
                        self._report(),
                        self._change_weights(),
                        self._driver.run(),
                        self.dgds.run(),
                        self._follow_siblings(),
                    )
                ]
                await self._finished.wait()
                for task in serving:
                    task.cancel()
        finally:
            await self._leave()

    def drain(self) -> None:
        """Hand back what the chunks have so far, and let `run` return."""
        self._finished.set()

    # --- from the buffer -----------------------------------------------------------------

    async def _receive(self) -> None:
        while True:
            match await self._buffer.recv():
                case wire.RunChunk() as order:
                    self._take(order)
                case wire.DropChunk() as drop:
                    self._drop(drop.request_id, drop.attempt)
                case (wire.PrepareWeights() | wire.LoadWeights() | wire.Sleep()) as asked:
                    if not self._orders.full():  # else asked for again when its deadline is over
                        self._orders.put_nowait(asked)
                case wire.DiscardWeights() as order:
                    self._call_off(order)
                case (wire.SpoolState() | wire.SpoolData()) as part:
                    self._staging.arrived(part)
                case wire.Welcome():
                    self._rejoin()
                case wire.Drain():
                    self._draining = True
                    self._wake()
                case wire.Refused() as refused:
                    self._log.warning("the buffer refused something", why=refused.message)
                case wire.Ping():
                    pass

    def _take(self, order: wire.RunChunk) -> None:
        known = self.running.get(order.request_id)
        if known is not None:
            if known.attempt >= order.attempt:
                return
            self._drop(order.request_id, known.attempt)
        self._serial += 1
        try:
            if self._weights.version == UNDEFINED:
                raise NotLoaded("it has no weights to trust")
            run = begin(order, self._serial)
        except (InvalidField, NotLoaded) as error:
            self._reject(order.request_id, order.attempt, error)
            return
        self.running[order.request_id] = run
        if self._draft_groups is not None:
            self._draft_groups.began(run.group_id, run.index)
        if self._shares:
            self.dgds.register(run.group_id, order.tokens[: order.prompt_len])
            self.dgds.begin(run.group_id, run.index, run.attempt, order.tokens[order.prompt_len :])
        self._driver.add(chunk_of(order, run))

    def _drop(self, request_id: str, attempt: int) -> None:
        known = self.running.get(request_id)
        if known is not None and known.attempt == attempt:
            self._gone(known, finished=False)
            del self.running[request_id]
            self._driver.drop(request_id, known.serial)
            self._wake()

    def _rejoin(self) -> None:
        self._log.warning("the buffer forgot this engine: registering again", dropped=len(self.running))
        for request_id, known in list(self.running.items()):
            self._drop(request_id, known.attempt)
        self._ended.clear()
        self._failed.clear()
        self._answers.clear()
        self._rejoins += 1
        while not self._orders.empty():
            self._orders.get_nowait()
        self._call_off(wire.DiscardWeights(version=0, call_id=0))
        self._register_due = True
        self._wake()

    def _gone(self, run: Running, *, finished: bool) -> None:
        if self._draft_groups is not None:
            self._draft_groups.ended(run.group_id, run.index, finished, self._clock.now())

    async def _follow_siblings(self) -> None:
        """Bring what siblings said elsewhere to the drafts of all that run here."""
        siblings = self._draft_groups
        while siblings is not None:
            await self._clock.sleep(self._settings.flush_seconds)
            if gone := siblings.forget():
                self.dgds.forget(gone)
                self._driver.forget(gone)
            own = siblings.wanted(self._clock.now())
            deltas = await self.dgds.fetch(own, own) if own else []
            for delta in deltas:
                siblings.learnt(delta.group_id, len(delta.tokens))
            if deltas:
                self._driver.feed(deltas)

    # --- weights -------------------------------------------------------------------------

    async def _change_weights(self) -> None:
        while True:
            order = await self._orders.get()
            life, before = self._rejoins, (self._weights, self._asleep)
            answer: wire.WeightsPrepared | wire.WeightsLoaded | wire.Slept | None = None
            match order:
                case wire.PrepareWeights():
                    answer = await self._prepare_unless_off(order)
                case wire.DiscardWeights():
                    await self._discard()
                case wire.LoadWeights():
                    answer = await self._load_weights(order, life)
                case wire.Sleep():
                    answer = await self._sleep(order)
            if answer is not None and life == self._rejoins:
                self._answers.append(answer)
            elif life != self._rejoins and before != (self._weights, self._asleep):
                self._register_due = True  # who asked is no more; its successor must know what changed
            self._wake()

    def _call_off(self, order: wire.DiscardWeights) -> None:
        """Stop what an update that is off, or all that a buffer that is gone, had checked here."""
        self._called_off = order.call_id
        if self._preparing is not None:
            self._preparing.cancel()
        if not self._orders.full():
            self._orders.put_nowait(order)

    async def _prepare_unless_off(self, order: wire.PrepareWeights) -> wire.WeightsPrepared | None:
        if 0 < order.call_id <= self._called_off:
            return None
        self._preparing = asyncio.create_task(self._prepare_weights(order))
        try:
            await asyncio.wait([self._preparing])
            if not self._preparing.cancelled():
                return self._preparing.result()
            await self._discard()
            return None
        finally:
            self._preparing.cancel()
            self._preparing = None

    async def _prepare_weights(self, order: wire.PrepareWeights) -> wire.WeightsPrepared:
        answer = wire.WeightsPrepared(version=order.version, digest="", call_id=order.call_id)
        try:
            found = await self._inspect(order.source)
            answer.digest = found.digest
            answer.problem = differences(self._live_manifest, found) if self._live_manifest else ""
        except SeerError as error:
            answer.problem = str(error)
        if answer.problem:
            await self._discard()
        return answer

    async def _discard(self) -> None:
        """Forget what was checked, and delete what was copied for it."""
        self._checked = _NOTHING
        await self._staging.discard()

    async def _sleep(self, order: wire.Sleep) -> wire.Slept:
        """Free or take the memory of KV. Raises `EngineError`: this engine is of no use any more."""
        if order.asleep != self._asleep:
            await self._driver.sleep(order.asleep)
            self._asleep = order.asleep
        return wire.Slept(asleep=order.asleep)

    async def _inspect(self, source: str) -> Manifest:
        folder = await self._staging.folder(source)
        over = threading.Event()
        try:
            found = await asyncio.to_thread(inspect, folder, over.is_set)
        finally:
            over.set()  # a thread cannot be cancelled
        self._checked = (source, found.digest, found.stamps)
        return found

    async def _load_weights(self, order: wire.LoadWeights, life: int) -> wire.WeightsLoaded:
        try:
            if (self._weights.version, self._weights.digest) == (order.version, order.digest):
                return wire.WeightsLoaded(version=order.version)  # as an earlier buffer ordered, too
            for request_id, known in list(self.running.items()):  # the buffer waits for none of them
                self._drop(request_id, known.attempt)
            if self._asleep:
                raise EngineError("it sleeps: wake it first")
            folder = await self._checked_folder(order)
            if life != self._rejoins:  # what runs by now is that successor's, under the weights that are live
                raise EngineError("the buffer that gave this order is gone")
            self._weights = wire.LoadWeights(version=UNDEFINED, digest="", source="")
            await self._driver.load_weights(folder, order.digest)
            if await asyncio.to_thread(stamps, folder) != self._checked[2]:
                raise EngineError(f"{order.source} changed while it was loaded")
            if self._draft_groups is not None:
                self.dgds.forget(self._draft_groups.clear())
            self._weights = order
        except SeerError as error:
            return wire.WeightsLoaded(version=order.version, problem=str(error))
        finally:
            await self._discard()
        return wire.WeightsLoaded(version=order.version)

    async def _checked_folder(self, order: wire.LoadWeights) -> Path:
        """Return the folder with these very weights. Raises `SeerError`; the live ones are untouched then."""
        folder = await self._staging.folder(order.source)
        if self._checked != (order.source, order.digest, await asyncio.to_thread(stamps, folder)):
            await self._inspect(order.source)  # it was not there to prepare, or files changed since
        if self._checked[1] != order.digest:
            raise EngineError(f"{order.source} now has digest {self._checked[1]}, not {order.digest}")
        return folder

    # --- from the backend ----------------------------------------------------------------

    def output(self, out: StepOutput) -> None:
        """Take one step's output (see `driver.Sink`)."""
        tokens = sum(len(news.token_ids) for news in out.generated)
        self._pace.add(len(out.generated), tokens, out.seconds)
        for news in out.generated:
            known = self.running.get(news.request_id)
            if known is None or known.serial != news.attempt:
                continue
            known.tokens += news.token_ids
            known.logprobs += news.logprobs
            if self._shares:
                self.dgds.append(known.group_id, known.index, known.attempt, known.length, news.token_ids)
            known.length += len(news.token_ids)
            if self._draft_groups is not None:
                self._draft_groups.learnt(known.group_id, len(news.token_ids))
        for end in out.ended:
            known = self.running.get(end.request_id)
            if known is not None and known.serial == end.attempt:
                del self.running[end.request_id]
                self._gone(known, finished=bool(end.finish))
                self._ended.append((end, known))
        if out.ended:
            self._wake()

    def rejected(self, chunk: Chunk, error: SeerError) -> None:
        """Tell the buffer that the backend will not run a chunk (see `driver.Sink`)."""
        known = self.running.get(chunk.request_id)
        if known is not None and known.serial == chunk.attempt:
            del self.running[chunk.request_id]
            self._gone(known, finished=False)
            self._reject(chunk.request_id, known.attempt, error)

    def _reject(self, request_id: str, attempt: int, error: SeerError) -> None:
        self._failed.append(
            wire.ChunkFailed(
                request_id=request_id,
                attempt=attempt,
                code=error.code,
                message=str(error),
                fatal=isinstance(error, InvalidField),
            )
        )
        self._wake()

    # --- to the buffer -------------------------------------------------------------------

    def _wake(self) -> None:
        self._sendable.set()

    async def _send(self) -> None:
        while True:
            await self._sendable.wait()
            self._sendable.clear()
            while (message := self._next()) is not None:
                await self._deliver(message)
            if self._draining and not self.running:
                self._finished.set()

    def _next(self) -> wire.EngineToBuffer | None:
        if self._register_due:
            self._register_due = False
            return self._registration()
        if self._answers:
            return self._answers.pop(0)
        if self._failed:
            return self._failed.pop(0)
        if self._ended:
            ended, self._ended = self._ended, []
            return done_message(ended, self._weights.version)
        if self._status_due:
            self._status_due = False
            best = {"best_rate": self._pace.rate, "token_seconds_alone": self._pace.alone}
            return wire.EngineStatus(stats=structs.replace(self._driver.stats, **best))
        return None

    async def _deliver(self, message: wire.EngineToBuffer) -> None:
        """Send until the buffer takes it; given up only when a rejoin makes it worthless."""
        sent = False
        while not sent and (isinstance(message, wire.Register) or not self._register_due):
            try:
                await self._buffer.send(message)
                sent = True
            except Unreachable as error:
                self._log.warning("the buffer takes nothing; trying on", error=str(error))
                await self._clock.sleep(RETRY_SECONDS)

    def _registration(self) -> wire.Register:
        facts = self._facts
        return wire.Register(
            capacity=facts.capacity,
            weight_version=self._weights.version,
            vocab_size=facts.vocab_size,
            versions=facts.versions,
            weights_digest=self._weights.digest,
            weights_source=self._weights.source,
            asleep=self._asleep,
        )

    async def _report(self) -> None:
        while True:
            await self._clock.sleep(self._settings.status_seconds)
            self._status_due = True
            self._wake()

    async def _leave(self) -> None:
        """Hand back what there is, say goodbye, free the backend."""
        for request_id, known in self.running.items():
            if known.tokens and self._finished.is_set():  # else something broke: trust only whole chunks
                self._ended.append((ChunkEnd(request_id=request_id, attempt=known.serial, finish=""), known))
        self.running.clear()
        try:
            async with asyncio.timeout(LEAVE_SECONDS):
                if self._ended:
                    await self._buffer.send(done_message(self._ended, self._weights.version))
                await self._buffer.send(wire.Goodbye(problem="" if self._finished.is_set() else "it failed"))
        except (TimeoutError, Unreachable) as error:
            self._log.warning("left without a goodbye", error=str(error))
        self._buffer.close()
        await self._staging.discard()
        await self.dgds.close(LEAVE_SECONDS)
        await self._driver.close()
