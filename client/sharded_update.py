"""One rank's side of a weight update that all ranks of a trainer make together.

Invariants (tests/cluster/test_sharded_weights.py):
- each rank sends its parts of the stream, at most `SPOOL_WINDOW` messages ahead of what the buffer confirmed,
  and again from where the buffer lacks them;
- the first rank asks for the update; its outcome, an answer or an error, is every rank's. Until then all
  ranks stay, since a restarted buffer needs all parts again;
- a rank that ends early ends the update on all: the buffer gives the stream up once it does not grow.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar, cast

from msgspec import structs

from seer.client.sent_weights import SentWeights
from seer.client.sharded_tensors import ShardedTensors
from seer.client.tensor_stream import TensorStream
from seer.client.weight_update import InFlight, Source, Update, check_request, new_call_id
from seer.common.blobs import checksum
from seer.common.errors import InvalidField, SeerError, Unreachable, WeightsRefused
from seer.common.process.log import get_logger
from seer.common.wire import (
    SPOOL_BYTES,
    SPOOL_PART,
    SPOOL_SCHEME,
    SPOOL_WINDOW,
    OpenSpool,
    SpoolData,
    SpoolState,
    UpdateWeights,
    WeightsFailed,
    WeightsLive,
    WeightsLoading,
)

POLL_SECONDS = 5.0
"""Silence after which the buffer is asked how much of a part it has."""

TELL_SECONDS = 60.0
"""How long the first rank waits for the others to hear how an update ended."""

T = TypeVar("T")

Send = Callable[[UpdateWeights | OpenSpool | SpoolData], Awaitable[None]]

_log = get_logger()


@dataclass(slots=True)
class _Part:
    """The stream's bytes from `start` on, sent as a stream of their own, and what the buffer said of them."""

    opening: OpenSpool
    states: asyncio.Queue[SpoolState] = field(default_factory=lambda: asyncio.Queue(4 * SPOOL_WINDOW))


class ShardedUpdate:
    """See `Update`, which it stands in for. Raises `InvalidField` for an invalid request."""

    def __init__(self, version: int, source: ShardedTensors, digest: str, in_flight: InFlight) -> None:
        check_request(version, in_flight)
        if digest not in ("", source.digest):
            raise InvalidField("digest", digest, f"the tensors have digest {source.digest}")
        self._stream, self._ranks = source.stream, source.ranks
        source.updates += 1
        name = f"v{version}-{source.token}-{source.updates}"  # the one before may be removed meanwhile
        self.request = UpdateWeights(
            version=version, source=SPOOL_SCHEME + name, digest=source.digest, in_flight=in_flight,
            call_id=new_call_id(),
        )  # fmt: skip
        self._parts = {
            part.name: _Part(part) for rank, part in _parts(self._stream, name) if rank == self._ranks.rank
        }
        self._answer: asyncio.Future[WeightsLive | WeightsFailed] = asyncio.get_running_loop().create_future()
        self._requested = False

    async def send_again(self, send: Send) -> None:
        """Send the request again, if it was sent: the buffer may not have it."""
        for part in self._parts.values():
            await send(part.opening)
        if self._requested:
            await send(self.request)

    def answer(self, message: WeightsLive | WeightsFailed | WeightsLoading | SpoolState) -> None:
        """Handle an answer; one to another update, or a second one, changes nothing."""
        if isinstance(message, SpoolState):
            if (part := self._parts.get(message.name)) is not None:
                with contextlib.suppress(asyncio.QueueFull):
                    part.states.put_nowait(message)
        elif not isinstance(message, WeightsLoading) and message.call_id == self.request.call_id:
            self._settle(message)

    def _settle(self, message: WeightsLive | WeightsFailed) -> None:
        if not self._answer.done():
            self._answer.set_result(message)

    def fail(self, error: BaseException) -> None:
        """End the update with an error."""
        if not self._answer.done():
            self._answer.set_exception(error)

    async def run(self, send: Send) -> WeightsLive:
        """Send this rank's parts and, on the first rank, the request; return the answer.

        Raises `WeightsRefused`, or the error of the connection.
        """
        uploads = [asyncio.create_task(self._upload(part, send)) for part in self._parts.values()]
        for upload in uploads:
            upload.add_done_callback(self._uploaded)
        try:
            return await (self._lead(send) if self._ranks.rank == 0 else self._follow())
        finally:
            for upload in uploads:
                upload.cancel()
            await asyncio.gather(*uploads, return_exceptions=True)

    async def _lead(self, send: Send) -> WeightsLive:
        outcome: WeightsLive | dict[str, str] = {"": "the first rank ended the update"}
        try:
            for part in self._parts.values():
                await send(part.opening)  # before the request, whose stream has to be there
            self._requested = True
            await send(self.request)
            message = await self._answer
            if isinstance(message, WeightsFailed):
                outcome = message.reasons
                raise WeightsRefused(message.version, message.reasons)
            outcome = live = structs.replace(message, call_id=0)
        except SeerError as error:
            outcome = error.reasons if isinstance(error, WeightsRefused) else {"": str(error)}
            raise
        finally:
            told = _on_a_thread(self._ranks.tell, outcome)
            try:
                await asyncio.wait_for(told, TELL_SECONDS)
            except Exception as error:  # noqa: BLE001 - a rank that has ended: torch's may be any
                _log.warning("not all ranks heard how the update ended", error=repr(error))
        return live

    async def _follow(self) -> WeightsLive:
        told = _on_a_thread(self._ranks.tell)
        await asyncio.wait({told, self._answer}, return_when=asyncio.FIRST_COMPLETED)
        if not told.done():
            self._answer.result()  # this rank's own error
        if (error := told.exception()) is not None:
            raise Unreachable(f"the first rank told no outcome of the update: {error}") from error
        outcome = told.result()
        if isinstance(outcome, WeightsLive):
            return outcome
        raise WeightsRefused(self.request.version, outcome)

    def _uploaded(self, upload: asyncio.Task[None]) -> None:
        if not upload.cancelled() and (error := upload.exception()) is not None:
            self.fail(error)

    async def _upload(self, part: _Part, send: Send) -> None:
        # What is sent before the buffer answers would be sent again, and so would all that follows it.
        opening, confirmed, sent = part.opening, 0, part.opening.size
        if self._ranks.rank:  # the first one's are opened before the request
            await send(opening)
        while True:
            while sent < min(opening.size, confirmed + SPOOL_WINDOW * SPOOL_BYTES):
                length = min(SPOOL_BYTES, opening.size - sent)
                data = await asyncio.to_thread(self._stream.read, opening.start + sent, length)
                await send(SpoolData(name=opening.name, offset=sent, checksum=checksum(data), data=data))
                sent += length
            try:
                async with asyncio.timeout(POLL_SECONDS if confirmed < opening.size else None):
                    state = await part.states.get()
            except TimeoutError:
                await send(opening)
                continue
            if state.problem:
                raise WeightsRefused(self.request.version, {"": f"the upload failed: {state.problem}"})
            confirmed = state.have
            sent = confirmed if state.resend else sent


def _parts(stream: TensorStream, name: str) -> list[tuple[int, OpenSpool]]:
    """Return which parts of a stream of this name there are, and the rank that sends each."""
    return [
        (
            rank,
            OpenSpool(
                name=f"{name}{SPOOL_PART}{number}", size=end - start, start=start, whole_size=stream.size
            ),
        )
        for number, (rank, start, end) in enumerate(stream.ranges())
    ]


def _on_a_thread(call: Callable[..., T], *args: object) -> asyncio.Future[T]:
    """Return what a call will return. It may block for ever: then its thread ends with the process."""
    loop = asyncio.get_running_loop()
    found: asyncio.Future[T] = loop.create_future()

    def settle(value: T | None, error: Exception | None) -> None:
        if not found.done():
            found.set_exception(error) if error else found.set_result(cast("T", value))

    def run() -> None:
        value, error = None, None
        try:
            value = call(*args)
        except Exception as failed:  # noqa: BLE001 - whoever awaits it gets it
            error = failed
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle, value, error)

    threading.Thread(target=run, name="ranks", daemon=True).start()
    return found


AnyUpdate = Update | ShardedUpdate


def update_of(
    version: int, source: Source, digest: str, in_flight: InFlight, deltas: SentWeights, base: int | None
) -> AnyUpdate:
    """Return an update from a source of any kind. Raises `InvalidField`."""
    if not isinstance(source, ShardedTensors):
        return Update(version, source, digest, in_flight, deltas, base)
    if base is not None:
        raise InvalidField("base", base, "sharded tensors are sent whole: leave it out")
    deltas.forget()
    return ShardedUpdate(version, source, digest, in_flight)
