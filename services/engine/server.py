"""One engine: takes chunks from the buffer, returns their tokens, and shares these with others by the dgds.

Invariants (tests/unit/test_engine_server.py asserts them):
- every chunk ends in exactly one of: a result, a `ChunkFailed`, a drop by the buffer; a repeated
  `RunChunk` changes nothing, one of a newer attempt replaces the older one, an older one is ignored;
- results are sent at once; those of chunks that end while a message is being sent share one `ChunksDone`, or
  a few if they are large;
- tokens of streamed chunks are sent at once, too, but further ones after a pause, which many of them lengthen
  (`STREAM_SECONDS`);
- when the buffer forgot this engine (it restarted, or could not reach it for a while), all chunks are
  dropped, and the engine registers again before it sends anything else;
- generation waits for neither the buffer nor the dgds; a chunk whose images are not here yet waits for
  them, alone (`images.py`);
- while weights are read or loaded, or the engine goes to sleep, it still reports its status;
- told to stop, or that its machine goes (`leaving.py`), it hands back what its chunks have so far, with their
  KV, and leaves: a chunk may end anywhere; when the backend fails it says `Goodbye` and ends with that error.

Orders about weights and sleep are `weights/updater.py`'s, other nodes with ranks of it `nodes/leader.py`'s.
"""

from __future__ import annotations

import asyncio
import os

from msgspec import structs

from seer.common import wire
from seer.common.clock import Clock
from seer.common.config import Config
from seer.common.errors import EngineError, InvalidField, NotLoaded, SeerError, Unreachable, Unsampleable
from seer.common.net.channel import Channel
from seer.common.net.identity import this_process
from seer.common.net.keys import load_keys, new_name, own_public
from seer.common.net.transport.base import Transport
from seer.common.pool_metrics import port_environment
from seer.common.process.log import get_logger
from seer.common.process.tasks import serve_until
from seer.services.dgds.client import DgdsClient
from seer.services.engine.backend import Backend, Chunk, ChunkEnd, StepOutput
from seer.services.engine.best_speed import Pace
from seer.services.engine.chunks import Place, RunningChunk, chunk_of, done_message, start_chunk, tell_to_end
from seer.services.engine.driver import BackendInfo, Driver, InlineDriver, ThreadDriver
from seer.services.engine.images import EngineImages
from seer.services.engine.leaving import Leaving
from seer.services.engine.nodes.follower import Follower
from seer.services.engine.nodes.leader import Leader
from seer.services.engine.nodes.same_settings import Meeting, check_nodes, meeting
from seer.services.engine.replay.backend import ReplayBackend
from seer.services.engine.token_sharing import TokenSharing
from seer.services.engine.weights.holders import OFF, Peers
from seer.services.engine.weights.updater import Answer, WeightUpdater

JOIN_SECONDS = 120.0
"""Longest wait for the buffer once the engine is loaded: services start in any order."""

RETRY_SECONDS = 1.0
"""Pause before a message that the buffer did not take is sent again."""

STREAM_SECONDS = 0.04
"""Least time between two messages with tokens of chunks that go on: people read no faster."""

STREAM_PARTS = 3200
"""Most parts of such messages a second: each costs the buffer about 0.1 ms. From 128 streams on they wait."""

NO_ROUTES = "the chunk ended while it was preempted, so its expert ids are gone"

STATUS_SECONDS = 1.0
"""Interval of status reports: neither schedules nor operators need newer ones."""

LEAVE_SECONDS = 2.0
"""Longest wait to hand back results and say goodbye, to the buffer and to the dgds each."""


def make(config: Config, transport: Transport, clock: Clock) -> EngineServer | Follower:
    """Build the service for `service.run_process`: an engine, or further ranks of one on another node."""
    check_nodes(config.engine)
    os.environ |= port_environment(config.pool.ports)  # of ranks, and of who reads weights from trainers
    if config.engine.node_rank:
        from seer.services.engine.vllm.ranks import VllmRanks

        return Follower(config, transport, clock, VllmRanks(config))
    meets = meeting(config.engine) if config.engine.nodes > 1 else None
    return EngineServer(config, transport, clock, _backend(config, meets), meets)


def _backend(config: Config, meets: Meeting | None) -> Backend:
    if config.engine.backend == "replay":
        return ReplayBackend(config.engine, config.shared)
    from seer.services.engine.vllm.data_parallel import vllm_backend  # torch and vllm load only where needed

    return vllm_backend(config, meets)


class EngineServer:
    """See the module's docstring. The replay backend is stepped inline, others on a thread.

    `meets`: where its ranks meet if other nodes have some.
    """

    def __init__(
        self,
        config: Config,
        transport: Transport,
        clock: Clock,
        backend: Backend,
        meets: Meeting | None = None,
    ) -> None:
        settings = config.engine
        self._settings, self._security = settings, config.security
        self._model = config.shared.model
        self._clock = clock
        self._log = get_logger()
        me = this_process("engine", settings.name or new_name(load_keys(config.security)), config)
        inline = settings.backend == "replay"
        self._driver: Driver = InlineDriver(backend, self, clock) if inline else ThreadDriver(backend, self)
        self._buffer: Channel[wire.EngineToBuffer, wire.BufferToEngine] = Channel(
            transport, config.endpoints.engines, me, wire.BufferToEngine, clock
        )
        self._head = "" if inline else config.drafts.head
        self.dgds = DgdsClient(transport, config.endpoints.dgds, me, clock)
        self._pace, self._ahead_tokens = Pace(), 0
        self.running: dict[str, RunningChunk] = {}
        self.sharing: TokenSharing | None = None
        if config.drafts.source in ("grouped", "late"):
            self.sharing = TokenSharing(self.dgds, self.running, self._driver, clock, drafts=not inline)
        self._held: dict[str, wire.RunChunk] = {}  # running chunks that wait for images
        self._images = EngineImages(settings.image_bytes, clock, self._give, self._lack, self._wake)
        self._places: set[Place] = set()  # of running chunks
        # Bounded by the chunks placed here: each leaves one entry, sent as soon as the buffer takes it.
        self._ended: list[tuple[ChunkEnd, RunningChunk]] = []
        self._failed: list[wire.ChunkFailed] = []
        self._delivering: list[wire.EngineToBuffer] = []  # what was taken from these; one at most
        self._unsent: dict[str, RunningChunk] = {}  # streamed chunks that have generated since
        self._stream_due = False
        self._transport, self._endpoint = transport, config.endpoints.engines
        self._peers = Peers(transport, me, clock)
        self._weights_endpoint = ""
        self._nodes = Leader(config, clock, me, meets) if meets is not None else None
        self._updater = WeightUpdater(
            self._driver, self, self._buffer.send, settings.weights_root, self._peers,
            me.name, settings.in_place_seconds if settings.in_place_updates else None, self._nodes,
            finite=settings.finite_weights,
        )  # fmt: skip
        self._answers: list[Answer] = []
        self._serial = 0
        self._register_due = self._status_due = False
        self._sendable, self._streaming = asyncio.Event(), asyncio.Event()
        self._leaving = Leaving(settings.leave_notice, self._driver, clock)

    async def start(self) -> dict[str, str]:
        """Load the model, join the buffer and register. Raises `EngineError` or `Unreachable`."""
        if self._nodes is None:
            await self._join()
            return {}
        await self._nodes.start(self._transport, self.drain, self._driver.give_up)
        try:
            await self._nodes.gather()
            await self._nodes.during(self._join())
        except BaseException as error:
            await self._nodes.close(str(error) or "it was stopped")
            await self._driver.close()
            raise
        return {}

    async def _join(self) -> None:
        self._info: BackendInfo = await self._driver.start(self._settings.load_seconds)
        try:
            buffer = await self._buffer.open(JOIN_SECONDS)
            await self._updater.start(self._model, self._head, buffer.digests)
            self._weights_endpoint = await self._peers.start(
                self._copies_at(), self._endpoint, own_public(self._security)
            )
            await self._buffer.send(self._registration())
        except BaseException:
            await self._driver.close()
            raise

    async def run(self) -> None:
        """Serve until drained. Raises the error that made the engine fail."""
        others = [each.run() for each in (self.sharing, self._nodes) if each is not None]
        try:
            await serve_until(
                self._left(),
                self._receive(),
                self._send(),
                self._report(),
                self._pace_streams(),
                self._images.run(),
                self._updater.run(),
                self._peers.run(),
                self._driver.run(),
                self.dgds.run(),
                *others,
            )
        finally:
            await self._leave()

    async def _left(self) -> None:
        await self._leaving.wait()
        await self._leaving.hand_back(self.running, self._drop_chunk)

    def drain(self) -> None:
        """Hand back what the chunks have so far, and let `run` return."""
        self._leaving.begin()

    # --- from the buffer -----------------------------------------------------------------

    async def _receive(self) -> None:
        while True:
            match await self._buffer.recv():
                case wire.RunChunk() as order:
                    self._start_chunk(order)
                case wire.DropChunk() as drop:
                    self._drop_chunk(drop.request_id, drop.attempt)
                case wire.EndChunks() as asked:
                    tell_to_end(self.running, asked, self._driver.end)
                case (wire.PrepareWeights() | wire.LoadWeights() | wire.Sleep()) as asked:
                    self._updater.order(asked)
                case wire.DiscardWeights() as order:
                    self._updater.cancel(order)
                case (wire.SpoolState() | wire.SpoolData()) as part:
                    self._updater.fetcher.arrived(part)
                case (wire.ImageState() | wire.ImageData()) as part:
                    self._images.arrived(part)
                case wire.Welcome():
                    self._rejoin()
                case wire.Refused() as refused:
                    self._log.warning("the buffer refused something", why=refused.message)
                case wire.Ping():
                    pass

    def _start_chunk(self, order: wire.RunChunk) -> None:
        if self._leaving.begun:
            return  # others run it once this engine has said goodbye
        current = self.running.get(order.request_id)
        if current is not None:
            if current.attempt >= order.attempt:
                return
            self._drop_chunk(order.request_id, current.attempt)
        self._serial += 1
        try:
            if problem := self._updater.not_ready:
                raise NotLoaded(problem)
            run = start_chunk(order, self._serial, self._places)
        except (InvalidField, NotLoaded) as error:
            self._reject(order.request_id, order.attempt, error)
            return
        self.running[order.request_id] = run
        self._places.add(run.place)
        if self.sharing is not None:
            self.sharing.begin(run, order)
        self._held[order.request_id] = order
        if order.images:
            self._images.hold(order.request_id, [place.name for place in order.images])
        else:
            self._give(order.request_id)

    def _give(self, request_id: str) -> None:
        """Give a chunk to the backend: all its images are here."""
        order = self._held.pop(request_id)
        self._driver.add(chunk_of(order, self.running[request_id], self._images.get))

    def _lack(self, request_id: str, error: SeerError) -> None:
        """Tell the buffer that a chunk's images cannot be had."""
        self._fail(request_id, self.running[request_id].serial, error)

    def _copies_at(self) -> str:
        """Return where other engines are to read copies of weights; with keys, only with a list of them."""
        configured, security = self._settings.weights_endpoint, self._security
        return OFF if security.key and not security.peers and not configured else configured

    def _drop_chunk(self, request_id: str, attempt: int) -> None:
        run = self.running.get(request_id)
        if run is not None and run.attempt == attempt:
            self._chunk_left(request_id, run, finished=False)
            del self.running[request_id]
            self._driver.drop(request_id, run.serial)

    def _rejoin(self) -> None:
        self._log.warning("the buffer forgot this engine: registering again", dropped=len(self.running))
        self.drop_chunks()
        self._ended.clear()
        self._failed.clear()
        self._answers.clear()
        self._updater.rejoined()
        self.register_again()

    def _chunk_left(self, request_id: str, run: RunningChunk, *, finished: bool) -> None:
        self._places.discard(run.place)
        self._held.pop(request_id, None)
        self._unsent.pop(request_id, None)
        self._images.release(request_id)
        if self.sharing is not None:
            self.sharing.leave(run, finished=finished)

    # --- for the weight updater: nothing here blocks --------------------------------------

    def drop_chunks(self) -> None:
        """Stop all chunks: new weights are about to be loaded."""
        for request_id, run in list(self.running.items()):
            self._drop_chunk(request_id, run.attempt)

    def weights_loaded(self) -> None:
        """Forget what followed from the old weights: drafts of their tokens would seldom be accepted."""
        if self.sharing is not None:
            self.sharing.forget_all()

    def answer(self, message: Answer) -> None:
        """Send an answer to the buffer."""
        self._answers.append(message)
        self._wake()

    def register_again(self) -> None:
        """Tell the buffer which weights are live and what sleeps, as the buffer did not order the change."""
        self._register_due = self._status_due = True
        self._wake()

    # --- from the backend: nothing here blocks --------------------------------------------

    def output(self, out: StepOutput) -> None:
        """Take one step's output."""
        tokens = sum(len(generated.token_ids) for generated in out.generated)
        self._pace.add(len(out.generated), tokens, out.seconds)
        for generated in out.generated:
            run = self.running.get(generated.request_id)
            if run is None or run.serial != generated.attempt:
                continue
            run.add(generated)
            self._ahead_tokens += len(generated.token_ids) if run.ahead else 0
            if run.told or (run.stream and generated.token_ids):
                self._came(generated.request_id, run)
        for end in out.ended:
            run = self.running.get(end.request_id)
            if run is not None and run.serial == end.attempt:
                del self.running[end.request_id]
                lacks = run.routes_from is not None and end.routes is None
                self._chunk_left(end.request_id, run, finished=bool(end.finish) and not (run.parks or lacks))
                if lacks:
                    self._reject(end.request_id, run.attempt, EngineError(NO_ROUTES))
                elif len(run.tokens) > run.sent or not self._leaving.begun:  # else all of it was streamed
                    self._ended.append((end, run))
        for failure in out.failed:
            self._fail(failure.request_id, failure.attempt, failure.error)
        if out.ended:
            self._wake()

    def _came(self, request_id: str, run: RunningChunk) -> None:
        if run.told:
            self._driver.end(request_id, run.serial)
            return
        self._unsent[request_id] = run
        self._streaming.set()
        if not run.sent:  # somebody waits for the first token
            self._stream_due = True
            self._wake()

    def rejected(self, chunk: Chunk, error: SeerError) -> None:
        """Tell the buffer that the backend refused a chunk."""
        self._fail(chunk.request_id, chunk.attempt, error)

    def _fail(self, request_id: str, serial: int, error: SeerError) -> None:
        """End a running chunk without a result."""
        run = self.running.get(request_id)
        if run is not None and run.serial == serial:
            del self.running[request_id]
            self._chunk_left(request_id, run, finished=False)
            self._reject(request_id, run.attempt, error)

    def _reject(self, request_id: str, attempt: int, error: SeerError) -> None:
        self._failed.append(
            wire.ChunkFailed(
                request_id=request_id,
                attempt=attempt,
                code=error.code,
                message=self._explained(error),
                fatal=isinstance(error, InvalidField | Unsampleable),
            )
        )
        self._wake()

    def _explained(self, error: SeerError) -> str:
        if isinstance(error, Unsampleable):
            return f"{error}; this is under weight version {self._updater.live.version}"
        return str(error)

    # --- to the buffer -------------------------------------------------------------------

    def _wake(self) -> None:
        self._sendable.set()

    async def _send(self) -> None:
        while True:
            await self._sendable.wait()
            self._sendable.clear()
            while (message := self._next()) is not None:
                await self._deliver(message)

    def _next(self) -> wire.EngineToBuffer | None:
        if self._register_due:
            self._register_due = False
            return self._registration()
        if self._answers:
            return self._answers.pop(0)
        if self._failed:
            return self._failed.pop(0)
        if (question := self._images.question()) is not None:
            return question
        if not self._leaving.begun and (self._ended or (self._stream_due and self._unsent)):
            message = done_message(self._ended, self._updater.live.version, self._unsent)
            self._stream_due = bool(self._unsent)
            return message
        if self._status_due:
            self._status_due = False
            best = {"best_rate": self._pace.rate, "token_seconds_alone": self._pace.alone}
            stats = structs.replace(self._driver.stats, **best, ahead_tokens=self._ahead_tokens)
            return wire.EngineStatus(stats=stats)
        return None

    async def _deliver(self, message: wire.EngineToBuffer) -> None:
        """Send until the buffer takes it, or forgot this engine: then only a registration counts."""
        self._delivering, sent = [message], False
        while not sent and (isinstance(message, wire.Register) or not self._register_due):
            try:
                await self._buffer.send(message)
                sent = True
            except Unreachable as error:
                self._log.warning("the buffer does not take messages; trying again", error=str(error))
                await self._clock.sleep(RETRY_SECONDS)
        self._delivering = []

    def _registration(self) -> wire.Register:
        return self._updater.registration(self._info.capacity, self._info.versions, self._weights_endpoint)

    async def _pace_streams(self) -> None:
        while True:
            await self._streaming.wait()
            self._streaming.clear()
            self._stream_due = True
            self._wake()
            streams = sum(run.stream for run in self.running.values())
            await self._clock.sleep(max(STREAM_SECONDS, streams / STREAM_PARTS))

    async def _report(self) -> None:
        while True:  # at once: what it has generated by then is of no chunk that it gets
            self._status_due = True
            self._images.tick()
            self._wake()
            await self._clock.sleep(STATUS_SECONDS)

    async def _leave(self) -> None:
        """Send the results there are, say goodbye, close the backend."""
        for request_id, run in self.running.items():
            if self.sharing is not None:
                self.sharing.leave(run, finished=False)
            # Else the backend failed: only complete chunks count.
            if len(run.tokens) > run.sent and self._leaving.begun:
                self._ended.append((ChunkEnd(request_id=request_id, attempt=run.serial, finish=""), run))
        self.running.clear()
        try:
            async with asyncio.timeout(LEAVE_SECONDS):
                for message in self._delivering + self._answers:  # one may say why this engine ends
                    await self._buffer.send(message)
                while self._ended:
                    await self._buffer.send(done_message(self._ended, self._updater.live.version, {}))
                await self._buffer.send(wire.Goodbye(problem="" if self._leaving.begun else "it failed"))
        except (TimeoutError, Unreachable) as error:
            self._log.warning("left without saying goodbye to the buffer", error=str(error))
        self._buffer.close()
        self._peers.close()
        await self._updater.close()
        await self.dgds.close(LEAVE_SECONDS)
        if self._nodes is not None:
            await self._nodes.close("" if self._leaving.begun else "it failed")
        await self._driver.close()
