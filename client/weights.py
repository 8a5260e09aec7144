"""One weight update as its trainer asks for it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Literal

from seer.common.errors import InvalidField, WeightsRefused
from seer.common.wire.messages import UpdateWeights, WeightsFailed, WeightsLive

InFlight = Literal["finish", "abort", "error"]


class Update:
    """What was asked, and the answer once it is there. Raises `InvalidField` for what cannot be asked."""

    def __init__(self, version: int, source: str | Path, digest: str, in_flight: InFlight) -> None:
        if not 0 <= version < 2**63:
            raise InvalidField("version", version, "must be in [0, 2^63)")
        if in_flight not in ("finish", "abort", "error"):
            raise InvalidField("in_flight", in_flight, "choose finish, abort or error")
        where = str(Path(source).absolute())
        self.asked = UpdateWeights(version=version, source=where, digest=digest, in_flight=in_flight)
        self._answer: asyncio.Future[WeightsLive | WeightsFailed] = asyncio.get_running_loop().create_future()

    def answer(self, message: WeightsLive | WeightsFailed) -> None:
        """Take an answer; one to another version, or a second one, changes nothing."""
        if message.version == self.asked.version and not self._answer.done():
            self._answer.set_result(message)

    def fail(self, error: Exception) -> None:
        """There will be no answer."""
        if not self._answer.done():
            self._answer.set_exception(error)

    async def outcome(self) -> WeightsLive:
        """Wait for the answer. Raises `WeightsRefused`, or what it failed with."""
        message = await self._answer
        if isinstance(message, WeightsFailed):
            raise WeightsRefused(message.version, message.reasons)
        return message
