"""The client's side of one weight update, with the upload of tensors if there is one.

Invariants:
- of a stream that differs little from the last one a delta is sent; all of it, if the buffer cannot apply
  that, or if an engine refuses the result;
- an update ends with one answer or one error; the upload ends with it and not before, since a restarted
  buffer may need all of it again;
- the tensors of an update in place are sent once, to the engines that the buffer names, and what was opened
  for them is closed when the update ends;
- an answer counts only if it repeats the call's id: an earlier call may have had the same version.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

from msgspec import structs

from seer.client.in_place import Broadcast, InPlace, SharedTensors, Transfer
from seer.client.lora_adapter import LoraAdapter
from seer.client.mooncake_source import MooncakeSource
from seer.client.sent_weights import Plan, SentWeights
from seer.client.sharded_tensors import ShardedTensors
from seer.client.tensor_stream import TensorStream
from seer.client.upload import Send, Upload, UploadFailed
from seer.common.bounds import INT64, check_whole
from seer.common.errors import InvalidField, WeightsRefused
from seer.common.process.log import get_logger
from seer.common.process.threads import until_ended
from seer.common.weights.digest import BLAKE3, tag_of
from seer.common.weights.in_place import SCHEME as IN_PLACE_SCHEME
from seer.common.weights.lora import source_of
from seer.common.wire import (
    SPOOL_SCHEME,
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
`LoraAdapter`, which engines merge; or `SharedTensors`, a `Broadcast` or a `VllmTransfer`, which engines copy
straight into their live weights."""

_log = get_logger()


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
            if version == 0:
                raise InvalidField("base", base, "no version is before 0: leave it out")
            check_whole("base", base, 0, version - 1)
            if not isinstance(source, Mapping | ShardedTensors):
                raise InvalidField("base", base, "only tensors are sent as a delta: leave it out")
        self.adapter = source if isinstance(source, LoraAdapter) else None
        self._mooncake = source if isinstance(source, MooncakeSource) else None
        self.in_place: InPlace | None = source if isinstance(source, SharedTensors | Broadcast) else None
        self.stream = self.adapter.stream if self.adapter is not None else None
        self._rank = 0
        if isinstance(source, Mapping):
            self.stream = TensorStream(source)
        elif isinstance(source, ShardedTensors):
            self.stream, self._rank = source.stream, source.rank
        self._deltas, self._base = deltas or SentWeights(enabled=False), base
        self._plan: Plan | None = None
        self._upload: Upload | None = None
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
        self._requested, self._tag = False, BLAKE3
        self._transfer: Transfer | None = None
        self._answer: asyncio.Future[WeightsLive | WeightsFailed] = asyncio.get_running_loop().create_future()

    async def send_again(self, send: Send) -> None:
        """Send the request again, if it was sent: the buffer may not have it."""
        if self._requested:
            await self._send_request(send)

    async def run(self, send: Send, tag: str = BLAKE3) -> WeightsLive:
        """Send the request, and the tensors if there are any, and wait for the answer.

        `tag`: of the digest that is named, unless the caller named one. Raises `WeightsRefused`, or the error
        of the connection.
        """
        self._tag = tag_of(self.request.digest or tag)
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
            if self._plan is None or not any(error.reasons) or self._sent_whole():
                raise
            _log.warning("weights are sent whole: a delta's result was refused", reasons=error.reasons)
            self._name += "-whole"
            self._upload = Upload(self._name, replace(self._plan, delta=None), self._rank)
            self.request = structs.replace(
                self.request, source=SPOOL_SCHEME + self._name, call_id=new_call_id()
            )
            self._answer = asyncio.get_running_loop().create_future()
            live = await self._run(send)
        if self._plan is None:
            self._deltas.forget()
        else:
            whole = self._sent_whole()
            await until_ended(self._deltas.live, self._plan, self._name, live.version, whole=whole)
        return live

    def _sent_whole(self) -> bool:
        return self._upload is None or self._upload.delta is None

    async def _prepare(self) -> None:
        """Find out what is sent, and its digest."""
        if self.adapter is not None:
            base = await asyncio.to_thread(self.adapter.base_digest, self._tag)
            self.request.source = source_of(self.request.source, base)
            if digest := await asyncio.to_thread(self.adapter.digest, self._tag):
                self._set_digest(digest)
        elif self.in_place is not None and self.stream is not None:
            self._set_digest(await asyncio.to_thread(self.stream.digest, self._tag))
        elif self.stream is not None:
            # The next update may begin once this one is cancelled: two plans must not run at once.
            self._plan = await self._planned(self.stream)
            self._set_digest(self._plan.digest)
        if self._mooncake is not None:
            self.request.source, found = await until_ended(self._mooncake.offer, self._name, self._tag)
            self._set_digest(found)
        if self.stream is not None:
            self._upload = Upload(self._name, self._plan or Plan(self.stream), self._rank)

    async def _planned(self, stream: TensorStream) -> Plan:
        return await until_ended(self._deltas.plan, stream, self._base, tag=self._tag)

    async def _run(self, send: Send) -> WeightsLive:
        upload = None
        self._requested = True
        await self._send_request(send)
        if self._upload is not None:
            upload = asyncio.create_task(self._upload.run(send))
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
            if self._upload is not None:
                self._upload.hear(message)
        elif not self._answer.done() and message.call_id == self.request.call_id:
            self._answer.set_result(message)

    def fail(self, error: BaseException) -> None:
        """End the update with an error."""
        if not self._answer.done():
            self._answer.set_exception(error)

    async def _send_request(self, send: Send) -> None:
        if self._upload is not None:
            await self._upload.open(send)
        if self._rank == 0:
            await send(self.request)

    def _set_digest(self, found: str) -> None:
        """Have engines accept only weights with this digest."""
        if self.request.digest not in ("", found):
            raise InvalidField("digest", self.request.digest, f"the tensors have digest {found}")
        self.request.digest = found

    def _uploaded(self, upload: asyncio.Task[None]) -> None:
        if upload.cancelled() or (error := upload.exception()) is None:
            return
        if isinstance(error, UploadFailed):
            error = WeightsRefused(self.request.version, {"": f"the upload failed: {error}"})
        self.fail(error)


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
