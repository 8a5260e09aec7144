"""The buffer's connections to engines: their messages become events, and messages to them are sent in order.

Invariants (tests/unit/test_buffer_server.py, tests/cluster/test_rejoin.py):
- a message from an earlier incarnation of an engine does not count for the later one;
- an engine that was removed has to register again before its messages count;
- malformed results count as failed attempts of the requests that they name, and remove the engine: nothing
  else is affected.
"""

from __future__ import annotations

from collections import Counter

from seer.common import beside, wire
from seer.common.clock import Clock
from seer.common.errors import InvalidField, NotLoaded
from seer.common.net.hub import MAX_PEERS, Hub
from seer.common.net.identity import Identity
from seer.common.net.outbox import Outbox
from seer.common.net.transport.base import Router
from seer.common.policy.rollout_bound import best_of_incarnations
from seer.common.process.log import get_logger
from seer.common.types import MAX_STOP_CHARACTERS, InstanceStats
from seer.services.buffer.buffer_machine import BufferMachine
from seer.services.buffer.conductor import Conductor, Ended
from seer.services.buffer.events import FromEngine
from seer.services.buffer.images.image_server import ImageServer
from seer.services.buffer.log.kept_chunks import KeptChunks
from seer.services.buffer.outgoing import Outgoing
from seer.services.buffer.peers import check_register, handle_hello, incarnation_of
from seer.services.buffer.requests import events
from seer.services.buffer.weights.spool import Spool

MAX_PROBLEM = 4096
"""Most characters kept of what an engine says is wrong: `Status` and refusals have it, readers bound them."""


class EngineConnections:
    """`stats` and `incarnations` (how many so far) are by engine name. Call `bind` before all else."""

    def __init__(
        self,
        me: Identity,
        clock: Clock,
        machine: BufferMachine,
        conductor: Conductor,
        kept: KeptChunks,
        spool: Spool,
        images: ImageServer,
        out: Outgoing,
    ) -> None:
        self._me, self._clock = me, clock
        self._requests, self._weights = machine.requests, machine.weights
        self._conductor, self._kept, self._spool, self._images = conductor, kept, spool, images
        self._log = get_logger()
        self._out, self._peers = out, out.engines
        self.stats: dict[str, InstanceStats] = {}
        self.incarnations: Counter[str] = Counter()

    def bind(self, router: Router) -> None:
        """Use this socket."""
        self.hub: Hub[wire.BufferToEngine, wire.EngineToBuffer] = Hub(
            router,
            self._me,
            wire.EngineToBuffer,
            require_config_hash=True,
            roles=frozenset({"engine"}),
            digests=lambda: self._weights.digests,
        )
        self.outbox = Outbox(self.hub, self._unreachable)
        self._out.bind_engines(self.hub, self.outbox)

    async def serve(self) -> None:
        """Receive messages until cancelled."""
        while True:
            address, message = await self.hub.recv()
            if isinstance(message, wire.Hello):
                await handle_hello(self.hub, self._peers, address, message, self._clock)
                continue
            name = self._peers.name_of(address)
            if name is None:
                self.hub.dismiss(address)
                continue
            if name not in self._weights:
                self._peers.assign(name, address)  # the later incarnation that held the name is gone again
            session = self.hub.session(address)
            if isinstance(message, wire.Register):
                self._peers.registered[address] = session
            elif name not in self._weights:
                if self._peers.registered.get(address) == session:
                    # The engine was removed since it registered: it must register again, and is asked once.
                    self.hub.dismiss(address)
                continue
            if self._peers.address_of(name) == address:  # else: an earlier incarnation of this engine
                self._conductor.received_from_engine(name)
                self._handle(name, address, message)

    def _handle(self, name: str, address: bytes, message: wire.EngineToBuffer) -> None:
        match message:
            case wire.Register():
                self._register(name, address, message)
            case wire.ChunksDone():
                self._chunks_done(name, address, message)
            case wire.ChunkFailed():
                message.message = message.message[:MAX_PROBLEM]
                self._chunk_failed(name, message)
            case wire.EngineStatus():
                best = self.stats[name] = best_of_incarnations(message.stats, self.stats.get(name))
                self._conductor.apply(_reported(name, best))
            case wire.WeightsPrepared() | wire.WeightsLoaded() | wire.Slept():
                message.problem = message.problem[:MAX_PROBLEM]
                self._conductor.apply(FromEngine(name, message))
            case wire.OpenSpool() | wire.ReadSpool():
                self._spool.put(self.hub.reply, address, message)
            case wire.ReadImage():
                self._images.put(self.hub.reply, address, message)
            case wire.Goodbye():
                self._log.info("engine left", engine=name, problem=message.problem)
                self._conductor.engines_left([name], died=bool(message.problem))

    def _register(self, name: str, address: bytes, register: wire.Register) -> None:
        try:
            check_register(register)
        except InvalidField as error:
            self.hub.refuse(address, error)
            return
        if self._out.registered_at.get(name) != address:  # each incarnation has an address of its own
            self._out.registered_at[name] = address
            self.incarnations[name] += 1
        if name not in self._weights:
            self._log.info("engine joined", engine=name, kv_blocks=register.capacity.kv_blocks)
        self._conductor.join(name, register, incarnation_of(address))
        gone = [other for other in self.incarnations if other not in self._weights]
        for other in gone[: max(0, len(self.incarnations) - MAX_PEERS)]:
            for table in (self.incarnations, self._out.registered_at, self.stats):
                table.pop(other, None)

    def _chunk_failed(self, name: str, failed: wire.ChunkFailed) -> None:
        if self._conductor.ended_ahead(name, failed):
            return
        request = self._requests.requests.get(failed.request_id)
        if request is not None and (request.instance, request.attempt) == (name, failed.attempt):
            # A fatal failure is caused by the request itself: its trainer gets the error.
            log = self._log.info if failed.fatal else self._log.warning
            log(
                "chunk failed", engine=name, rollout=request.group.rollout.rollout_id,
                request=failed.request_id, attempt=failed.attempt, why=failed.message,
            )  # fmt: skip
            if failed.code == NotLoaded.code:
                self._conductor.give_up([name], failed.message)
                return
        self._conductor.apply(FromEngine(name, failed))

    def _chunks_done(self, engine: str, address: bytes, done: wire.ChunksDone) -> None:
        parts: list[wire.ChunkResult | wire.ChunkTokens] = [*done.results, *done.going_on]
        counts, sizes = [part.count for part in parts], [part.beside for part in parts]
        extra = 0 if done.beside is None else len(done.beside)
        if (
            min(counts, default=0) < 0
            or not sum(counts) == len(done.tokens) == len(done.logprobs)
            or beside.total(sizes) != extra
            or not beside.readable(sizes)
            or not all(map(_is_end, done.results))
        ):
            fix = (
                f"must add up to the {len(done.tokens)} tokens, {len(done.logprobs)} logprobs and {extra} "
                "bytes sent, which are whole entries of their kinds, and end by stop, length or neither"
            )
            error = InvalidField("results", counts, fix)
            self.hub.refuse(address, error)
            for result in parts:  # these requests may be the cause, so it counts against them
                failed = wire.ChunkFailed(
                    request_id=result.request_id,
                    attempt=result.attempt,
                    code=error.code,
                    message=str(error),
                    fatal=False,
                )
                self._conductor.apply(FromEngine(engine, failed))
            self._conductor.give_up([engine], "it sent malformed results")
            return
        if done.weight_version != self._requests.weight_version and engine in self._requests.instances:
            self._conductor.give_up([engine], f"it sent tokens of weight version {done.weight_version}")
            return
        start = 0
        for part, extras in zip(parts, beside.split(done.beside, sizes), strict=True):
            end = start + part.count
            tokens = done.tokens[start:end]
            if isinstance(part, wire.ChunkResult) and self._conductor.ended_ahead(engine, part, tokens):
                start = end
                continue
            part, extras = self._conductor.with_record(engine, part, extras)
            happened = (
                events.TokensArrived(engine, part)
                if isinstance(part, wire.ChunkTokens)
                else events.ChunkEnded(engine, part)
            )
            self._conductor.apply(happened, Ended(tokens, done.logprobs[start:end], extras))
            start = end
        self._conductor.send_streamed()
        self._kept.flush()

    def _unreachable(self, address: bytes) -> None:
        name = self._peers.name_of(address)
        if name is not None and self._peers.address_of(name) == address:
            self._conductor.give_up([name], "its connection is gone", died=True)


def _is_end(result: wire.ChunkResult) -> bool:
    """Return whether a chunk can have ended so: trainers read no other messages."""
    return result.finish in ("", "stop", "length") and len(result.stop_reason) <= MAX_STOP_CHARACTERS


def _reported(name: str, stats: InstanceStats) -> events.EngineReported:
    """Return the row of an engine's report in the log."""
    computed = max(0, stats.prompt_tokens - stats.cached_tokens)
    return events.EngineReported(
        name, stats.pinned_blocks, stats.generated_tokens, stats.best_rate, stats.token_seconds_alone,
        stats.steps, stats.drafted_tokens, stats.accepted_tokens, computed, stats.pool_tokens,
    )  # fmt: skip
