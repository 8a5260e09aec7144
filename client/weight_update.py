"""The client's side of one weight update, with the upload of tensors if there is one.

Invariants:
- a stream is sent once, in order, at most `SPOOL_WINDOW` parts ahead of what the buffer confirmed;
- of a stream that differs little from the last one a delta is sent; all of it, if the buffer cannot apply
  that, or if an engine refuses the result;
- what was lost or damaged, or is missing in a restarted buffer, is sent again from there on;
- an update ends with one answer or one error; the upload ends with it and not before, since a restarted
  buffer may need all of it again;
- the tensors of an update in place are sent once, to the engines that the buffer names, and what was opened
  for them is closed when the update ends;
- an answer counts only if it repeats the call's id: an earlier call may have had the same version.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from msgspec import structs

from seer.client.in_place import Broadcast, InPlace, SharedTensors, Transfer
from seer.client.lora_adapter import LoraAdapter
from seer.client.mooncake_source import MooncakeSource
from seer.client.sent_weights import Plan, SentWeights
from seer.client.sharded_tensors import ShardedTensors
from seer.client.tensor_stream import TensorStream
from seer.common.blobs import checksum
from seer.common.bounds import INT64, check_whole
from seer.common.errors import InvalidField, WeightsRefused
from seer.common.process.log import get_logger
from seer.common.process.threads import until_ended
from seer.common.weights.delta import SUFFIX as DELTA
from seer.common.weights.in_place import SCHEME as IN_PLACE_SCHEME
from seer.common.weights.lora import source_of
from seer.common.wire import (
    SPOOL_BYTES,
    SPOOL_SCHEME,
    SPOOL_WINDOW,
    Bytes,
    OpenSpool,
    SpoolData,
    SpoolState,
    UpdateWeights,
    WeightsFailed,
    WeightsLive,
    WeightsLoading,
)

InFlight = Literal["finish", "abort", "error"]

Source = (
    str | Path | Mapping[str, Any] | ShardedTensors | MooncakeSource | LoraAdapter | SharedTensors | Broadcast
)
"""A folder that all nodes can read; tensors (numpy or torch) by name, as in `model.state_dict()`, which are
streamed, by all ranks if they are `ShardedTensors`; a `MooncakeSource`, from which engines read; a
`LoraAdapter`, which engines merge; or `SharedTensors` or a `Broadcast`, which engines copy straight into
their live weights."""

Send = Callable[[UpdateWeights | OpenSpool | SpoolData], Awaitable[None]]

_log = get_logger()

POLL_SECONDS = 5.0
"""Silence after which the buffer is asked how much of a stream it has."""


class Update:
    """A request, and its answer once it is there. Raises `InvalidField` for an invalid request."""

    def __init__(
        self,
        version: int,
        source: Source,
        digest: str,
        in_flight: InFlight,
        deltas: SentWeights | None = None,
        base: int | None = None,
    ) -> None:
        check_request(version, in_flight)
        if base is not None:
            check_whole("base", base, 0, version - 1)
            if not isinstance(source, Mapping):
                raise InvalidField("base", base, "only tensors are sent as a delta: leave it out")
        self.adapter = source if isinstance(source, LoraAdapter) else None
        self._mooncake = source if isinstance(source, MooncakeSource) else None
        self.in_place: InPlace | None = source if isinstance(source, SharedTensors | Broadcast) else None
        self.stream = self.adapter.stream if self.adapter is not None else None
        if isinstance(source, Mapping):
            self.stream = TensorStream(source)
        self._deltas, self._base = deltas or SentWeights(enabled=False), base
        self._plan: Plan | None = None
        self._delta: TensorStream | None = None
        self._name = new_name(version)
        where = SPOOL_SCHEME + self._name
        if self.in_place is not None:
            where = IN_PLACE_SCHEME + where
        elif self._mooncake is not None:
            where = ""  # known once the tensors are copied
        elif self.stream is None:
            where = self.adapter.folder if self.adapter else str(Path(str(source)).absolute())
        self.request = UpdateWeights(
            version=version, source=where, digest=digest, in_flight=in_flight, call_id=new_call_id()
        )
        self._requested = False
        self._transfer: Transfer | None = None
        self._answer: asyncio.Future[WeightsLive | WeightsFailed] = asyncio.get_running_loop().create_future()
        # Answers to parts in flight, and to `OpenSpool`.
        self._states: asyncio.Queue[SpoolState] = asyncio.Queue(4 * SPOOL_WINDOW)

    async def send_again(self, send: Send) -> None:
        """Send the request again, if it was sent: the buffer may not have it."""
        if self._requested:
            await self._send_request(send)

    async def run(self, send: Send) -> WeightsLive:
        """Send the request, and the tensors if there are any, and wait for the answer.

        Raises `WeightsRefused`, or the error of the connection.
        """
        if self.in_place is None:
            return await self._run_checked(send)
        self._deltas.forget()
        self._transfer = transfer = Transfer(self.in_place)
        try:
            self.stream = await until_ended(self.in_place.offer, self._name)
            await self._prepare()
            return await self._run(send)
        except WeightsRefused as error:
            if problem := await transfer.end():
                raise WeightsRefused(self.request.version, error.reasons | {"": problem}) from error
            raise
        finally:
            await transfer.end()

    async def _run_checked(self, send: Send) -> WeightsLive:
        """Run an update that is not in place; if engines refuse what a delta makes, send all tensors."""
        await self._prepare()
        try:
            live = await self._run(send)
        except WeightsRefused as error:
            if self._delta is None or not any(error.reasons):
                raise
            _log.warning("weights are sent whole: a delta's result was refused", reasons=error.reasons)
            self._delta, self._name = None, new_name(self.request.version)
            self.request = structs.replace(
                self.request, source=SPOOL_SCHEME + self._name, call_id=new_call_id()
            )
            self._answer = asyncio.get_running_loop().create_future()
            live = await self._run(send)
        if self._plan is None:
            self._deltas.forget()
        else:
            whole = self._delta is None
            await until_ended(self._deltas.live, self._plan, self._name, live.version, whole=whole)
        return live

    async def _prepare(self) -> None:
        """Find out what is sent, and its digest."""
        if self.adapter is not None:
            base = await asyncio.to_thread(self.adapter.base_digest)
            self.request.source = source_of(self.request.source, base)
            if digest := await asyncio.to_thread(self.adapter.digest):
                self._set_digest(digest)
        elif self.in_place is not None and self.stream is not None:
            self._set_digest(await asyncio.to_thread(self.stream.digest))
        elif self.stream is not None:
            # The next update may begin once this one is cancelled: two plans must not run at once.
            self._plan = await until_ended(self._deltas.plan, self.stream, self._base)
            self._delta = self._plan.delta
            self._set_digest(self._plan.digest)
        if self._mooncake is not None:
            self.request.source, found = await until_ended(self._mooncake.offer, self._name)
            self._set_digest(found)

    async def _run(self, send: Send) -> WeightsLive:
        upload = None
        self._requested = True
        await self._send_request(send)
        if self.stream is not None:
            upload = asyncio.create_task(self._upload(self.stream, send))
            upload.add_done_callback(self._uploaded)
        try:
            message = await self._answer
        finally:
            if upload is not None:
                upload.cancel()
                await asyncio.wait([upload])
        if isinstance(message, WeightsFailed):
            raise WeightsRefused(message.version, message.reasons)
        return structs.replace(message, call_id=0)

    def answer(self, message: WeightsLive | WeightsFailed | WeightsLoading | SpoolState) -> None:
        """Handle an answer; one to another update, or a second one, changes nothing."""
        if isinstance(message, WeightsLoading):
            if message.call_id == self.request.call_id and self._transfer is not None:
                self._transfer.begin(message.engines)
        elif isinstance(message, SpoolState):
            if message.name.removesuffix(DELTA) == self._name:
                with contextlib.suppress(asyncio.QueueFull):
                    self._states.put_nowait(message)
        elif not self._answer.done() and message.call_id == self.request.call_id:
            self._answer.set_result(message)

    def fail(self, error: BaseException) -> None:
        """End the update with an error."""
        if not self._answer.done():
            self._answer.set_exception(error)

    async def _send_request(self, send: Send) -> None:
        await self._open(send)
        await send(self.request)

    async def _open(self, send: Send) -> None:
        if self.stream is None:
            return
        plan, delta = self._plan, self._delta
        base = plan.base if plan is not None and delta is not None else ""
        keep = plan is not None and plan.keep
        await send(OpenSpool(name=self._name, size=self.stream.size, base=base, keep=keep))
        if delta is not None:
            await send(OpenSpool(name=self._name + DELTA, size=delta.size))

    def _set_digest(self, found: str) -> None:
        """Have engines accept only weights with this digest."""
        if self.request.digest not in ("", found):
            raise InvalidField("digest", self.request.digest, f"the tensors have digest {found}")
        self.request.digest = found

    def _uploaded(self, upload: asyncio.Task[None]) -> None:
        if not upload.cancelled() and (error := upload.exception()) is not None:
            self.fail(error)

    async def _upload(self, stream: TensorStream, send: Send) -> None:
        # Until the buffer says what it has: what is sent before would be sent again, with all that follows.
        confirmed, sent = 0, stream.size
        made = False  # the buffer has the whole stream
        while True:
            name, data = (self._name, stream) if self._delta is None else (self._name + DELTA, self._delta)
            while sent < min(data.size, confirmed + SPOOL_WINDOW * SPOOL_BYTES):
                part, checksum = await asyncio.to_thread(_part, data, sent)
                await send(SpoolData(name=name, offset=sent, checksum=checksum, data=part))
                sent += len(part)
            try:
                async with asyncio.timeout(None if made else POLL_SECONDS):
                    state = await self._states.get()
            except TimeoutError:
                await self._open(send)
                continue
            if refused := self._refuses_delta(state):
                self._delta, name, confirmed, sent = None, self._name, 0, stream.size
                if state.name != name:
                    await self._open(send)
            if state.name == self._name:
                made = state.have >= state.size
                if state.problem:
                    raise WeightsRefused(self.request.version, {"": f"the upload failed: {state.problem}"})
            if state.name == name:
                confirmed = state.have
                sent = confirmed if state.resend or refused else sent

    def _refuses_delta(self, state: SpoolState) -> bool:
        """Return whether the buffer cannot make the stream from the delta that is sent."""
        if self._delta is None:
            return False
        about_delta = state.name != self._name
        refused = bool(state.problem) if about_delta else not (state.base or state.problem)
        if refused and not state.have >= state.size > 0:
            _log.warning(
                "weights are sent whole: the buffer cannot apply the delta", version=self.request.version,
                base=self._plan.base if self._plan else "", why=state.problem or "it lacks the base",
            )  # fmt: skip
        return refused


def check_request(version: int, in_flight: str) -> None:
    """Raise `InvalidField` for what no update may have."""
    check_whole("version", version, 0, INT64[1])
    if in_flight not in get_args(InFlight):
        raise InvalidField("in_flight", in_flight, "choose finish, abort or error")


def new_name(version: int) -> str:
    """Return a name for a stream of this version: no earlier one has it."""
    return f"v{version}-{secrets.token_hex(6)}"


def new_call_id() -> int:
    """Return a random id for a call: no earlier one has it, of this process or another."""
    return secrets.randbits(62) + 1


def _part(stream: TensorStream, offset: int) -> tuple[Bytes, int]:
    data = stream.read(offset, SPOOL_BYTES)
    return data, checksum(data)
