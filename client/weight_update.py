"""One weight update as its trainer asks for it, and the upload of tensors that it may take.

Invariants:
- a stream is sent once, in order, `SPOOL_WINDOW` parts ahead of what the buffer confirmed;
- what was lost, damaged, or forgotten by a restarted buffer is sent again from there on;
- an update ends in one answer, or one error; an upload ends with it, and not before: a buffer that is
  restarted may need all of it again;
- an answer counts only if it says the number of the question: an earlier one may have had this version.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from msgspec import structs

from seer.client.mooncake_source import MooncakeSource
from seer.client.tensor_stream import TensorStream
from seer.common.errors import InvalidField, WeightsRefused
from seer.common.weights.digest import checksum
from seer.common.wire import (
    SPOOL_BYTES,
    SPOOL_SCHEME,
    SPOOL_WINDOW,
    Bytes,
    OpenSpool,
    Sleep,
    Slept,
    SpoolData,
    SpoolState,
    UpdateWeights,
    WeightsFailed,
    WeightsLive,
)

InFlight = Literal["finish", "abort", "error"]

Source = str | Path | Mapping[str, Any] | MooncakeSource
"""A folder that all nodes see; tensors (numpy or torch) by name, as `model.state_dict()` gives them, to
be streamed; or tensors that engines read from this process."""

Send = Callable[[UpdateWeights | OpenSpool | SpoolData], Awaitable[None]]

ASK_SECONDS = 5.0
"""Silence after which the buffer is asked how far a stream has come."""


class Update:
    """What was asked, and the answer once it is there. Raises `InvalidField` for what cannot be asked."""

    def __init__(self, version: int, source: Source, digest: str, in_flight: InFlight) -> None:
        if not 0 <= version < 2**63:
            raise InvalidField("version", version, "must be in [0, 2^63)")
        if in_flight not in ("finish", "abort", "error"):
            raise InvalidField("in_flight", in_flight, "choose finish, abort or error")
        self.stream = TensorStream(source) if isinstance(source, Mapping) else None
        self._held = source if isinstance(source, MooncakeSource) else None
        self._name = f"v{version}-{secrets.token_hex(6)}"
        where = SPOOL_SCHEME + self._name
        if self._held is not None:
            where = ""  # known once the tensors are laid out
        elif self.stream is None:
            where = str(Path(str(source)).absolute())
        self.asked = UpdateWeights(
            version=version, source=where, digest=digest, in_flight=in_flight, call_id=new_call_id()
        )
        self._asked = False
        self._answer: asyncio.Future[WeightsLive | WeightsFailed] = asyncio.get_running_loop().create_future()
        # An answer per part under way, and to each opening.
        self._states: asyncio.Queue[SpoolState] = asyncio.Queue(4 * SPOOL_WINDOW)

    async def ask_again(self, send: Send) -> None:
        """Ask a buffer that may not have heard it."""
        if self._asked:
            await self._ask(send)

    async def run(self, send: Send) -> WeightsLive:
        """Ask, send the tensors if there are any, and wait for the answer.

        Raises `WeightsRefused`, or what the connection failed with.
        """
        upload = None
        if self.stream is not None:
            self._bind(await asyncio.to_thread(self.stream.digest))
        if self._held is not None:
            self.asked.source, found = await asyncio.to_thread(self._held.offer, self._name)
            self._bind(found)
        self._asked = True
        await self._ask(send)
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

    def answer(self, message: WeightsLive | WeightsFailed | SpoolState) -> None:
        """Take an answer; one to another update, or a second one, changes nothing."""
        if isinstance(message, SpoolState):
            if message.name == self._name:
                with contextlib.suppress(asyncio.QueueFull):
                    self._states.put_nowait(message)
        elif (
            message.version == self.asked.version and answers(self.asked, message) and not self._answer.done()
        ):
            self._answer.set_result(message)

    def fail(self, error: BaseException) -> None:
        """There will be no answer."""
        if not self._answer.done():
            self._answer.set_exception(error)

    async def _ask(self, send: Send) -> None:
        if self.stream is not None:
            await send(OpenSpool(name=self._name, size=self.stream.size))
        await send(self.asked)

    def _bind(self, found: str) -> None:
        """Have engines take weights of this digest alone."""
        if self.asked.digest not in ("", found):
            raise InvalidField("digest", self.asked.digest, f"the tensors have digest {found}")
        self.asked.digest = found

    def _uploaded(self, upload: asyncio.Task[None]) -> None:
        if not upload.cancelled() and (error := upload.exception()) is not None:
            self.fail(error)

    async def _upload(self, stream: TensorStream, send: Send) -> None:
        confirmed = sent = 0
        while True:
            while sent < min(stream.size, confirmed + SPOOL_WINDOW * SPOOL_BYTES):
                data, checksum = await asyncio.to_thread(_part, stream, sent)
                await send(SpoolData(name=self._name, offset=sent, checksum=checksum, data=data))
                sent += len(data)
            try:
                async with asyncio.timeout(ASK_SECONDS if confirmed < stream.size else None):
                    state = await self._states.get()
            except TimeoutError:
                await send(OpenSpool(name=self._name, size=stream.size))
                continue
            if state.problem:
                raise WeightsRefused(self.asked.version, {"": f"the upload failed: {state.problem}"})
            confirmed = state.have
            if state.resend:
                sent = confirmed


def new_call_id() -> int:
    """Return what a question goes by: no earlier one does, also of another life of this trainer."""
    return secrets.randbits(62) + 1


def answers(asked: UpdateWeights | Sleep, message: WeightsLive | WeightsFailed | Slept) -> bool:
    """Say whether a message is the answer to a question; a buffer of an earlier release does not tell."""
    return message.call_id in (0, asked.call_id)


def _part(stream: TensorStream, offset: int) -> tuple[Bytes, int]:
    data = stream.read(offset, SPOOL_BYTES)
    return data, checksum(data)
