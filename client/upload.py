"""The upload of a stream of weights, or of a delta in its place, by one client or one rank of a trainer.

Invariants (tests/unit/test_client_weights.py, tests/cluster/test_weight_deltas.py):
- each byte is sent once, at most a window ahead of what the buffer confirmed; what was lost or damaged, or is
  missing in a restarted buffer, is sent again from there on;
- all of the stream is sent once the buffer cannot apply the delta. Every rank hears that, as each asks for
  the stream until the buffer has it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from seer.client.sent_weights import Plan
from seer.client.tensor_stream import TensorStream
from seer.common.blobs import checksum, part_bytes, window
from seer.common.process.log import get_logger
from seer.common.weights.delta import SUFFIX as DELTA
from seer.common.wire import (
    SHORT_SPOOL_BYTES,
    SPOOL_PART,
    SPOOL_WINDOW,
    Bytes,
    OpenSpool,
    SpoolData,
    SpoolState,
    UpdateWeights,
)

POLL_SECONDS = 5.0
"""Silence after which the buffer is asked how much of a stream it has."""

Send = Callable[[UpdateWeights | OpenSpool | SpoolData], Awaitable[None]]

_log = get_logger()


class UploadFailed(Exception):  # noqa: N818 - reads as what it says
    """The buffer has given the stream up."""


@dataclass(slots=True)
class _Part:
    """The bytes of `stream` that are sent by the name in `opening`, and how far; `most` in a message."""

    opening: OpenSpool
    stream: TensorStream
    sent: int
    confirmed: int = 0
    most: int = SHORT_SPOOL_BYTES


class Upload:
    """`name`: the stream's, in the spool. `rank`: what that one owns is sent from here."""

    def __init__(self, name: str, plan: Plan, rank: int = 0) -> None:
        self.delta = plan.delta
        self._name, self._plan, self._rank = name, plan, rank
        self._states: asyncio.Queue[SpoolState] = asyncio.Queue(4 * SPOOL_WINDOW)
        self._parts = self._all_parts()

    def _all_parts(self) -> dict[str, _Part]:
        stream, name = self._plan.stream, self._name
        if self.delta is not None:
            stream, name = self.delta, self._name + DELTA
        ranges = stream.ranges()
        found = {}
        for number, (rank, start, end) in enumerate(ranges):
            opening = OpenSpool(name=name, size=stream.size)
            if len(ranges) > 1:
                opening = OpenSpool(
                    name=f"{name}{SPOOL_PART}{number}", size=end - start, start=start, whole_size=stream.size
                )
            if rank == self._rank:
                # Until the buffer says what it has: what is sent before would be sent again, with all behind.
                found[opening.name] = _Part(opening, stream, sent=opening.size)
        return found

    async def open(self, send: Send) -> None:
        """Say what is going to be sent, and ask how much of that is there."""
        base, size = "" if self.delta is None else self._plan.base, self._plan.stream.size
        await send(OpenSpool(name=self._name, size=size, base=base, keep=self._plan.keep))
        if self.delta is not None:
            await send(OpenSpool(name=self._name + DELTA, size=self.delta.size))
        for part in self._parts.values():
            if part.opening.whole_size:
                await send(part.opening)

    def hear(self, state: SpoolState) -> None:
        """Take an answer to what was sent or opened."""
        if state.name.partition(SPOOL_PART)[0].removesuffix(DELTA) != self._name:
            return
        with contextlib.suppress(asyncio.QueueFull):
            self._states.put_nowait(state)

    async def run(self, send: Send) -> None:
        """Send, once it was opened, until cancelled. Raises `UploadFailed`."""
        made = False  # the buffer has the whole stream
        while True:
            await self._send_window(send)
            done = all(part.confirmed == part.opening.size for part in self._parts.values())
            try:
                async with asyncio.timeout(None if made or (done and self.delta is None) else POLL_SECONDS):
                    state = await self._states.get()
            except TimeoutError:
                await self.open(send)
                continue
            if refused := self._refuses_delta(state):
                self.delta = None
                self._parts = self._all_parts()
                if state.name not in self._parts:
                    await self.open(send)
            part = self._parts.get(state.name)
            if state.name == self._name:
                made = state.have >= state.size
            if state.problem and (part is not None or state.name == self._name):
                raise UploadFailed(state.problem)
            if part is not None:
                part.confirmed, part.most = state.have, min(part_bytes(part.opening.size), state.most)
                part.sent = state.have if state.resend or refused else part.sent

    async def _send_window(self, send: Send) -> None:
        for name, part in self._parts.items():
            while part.sent < min(part.opening.size, part.confirmed + window(part.most) * part.most):
                length = min(part.most, part.opening.size - part.sent)
                data, check = await asyncio.to_thread(
                    _read, part.stream, part.opening.start + part.sent, length
                )
                await send(SpoolData(name=name, offset=part.sent, checksum=check, data=data))
                part.sent += length

    def _refuses_delta(self, state: SpoolState) -> bool:
        """Return whether the buffer cannot make the stream from the delta that is sent."""
        if self.delta is None:
            return False
        about_delta = state.name != self._name
        refused = bool(state.problem) if about_delta else not (state.base or state.problem)
        if refused and not state.have >= state.size > 0:
            _log.warning(
                "weights are sent whole: the buffer cannot apply the delta", stream=self._name,
                base=self._plan.base, why=state.problem or "it lacks the base",
            )  # fmt: skip
        return refused


def _read(stream: TensorStream, offset: int, length: int) -> tuple[Bytes, int]:
    data = stream.read(offset, length)
    return data, checksum(data)
