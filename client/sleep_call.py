"""One call of a client that has engines sleep or wake, until its answer is there."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from seer.common.errors import SeerError
from seer.common.wire import Sleep, Slept


class SleepCall:
    """A request, and its answer once it is there."""

    def __init__(self, request: Sleep) -> None:
        self.request = request
        self._answer: asyncio.Future[Slept] = asyncio.get_running_loop().create_future()

    async def run(self, send: Callable[[Sleep], Awaitable[None]]) -> Sleep:
        """Ask, and wait for the answer; return what says it again to another incarnation of the buffer.

        Raises `SeerError` if nothing was done, or what `fail` got.
        """
        await send(self.request)
        slept = await self._answer
        if slept.problem:
            raise SeerError(slept.problem)
        level = self.request.level
        return Sleep(asleep=bool(slept.tags), level=level, tags=slept.tags, wish=slept.wish)

    def answer(self, slept: Slept) -> None:
        """Take an answer; one to another call, or a second one, changes nothing."""
        if slept.call_id == self.request.call_id and not self._answer.done():
            self._answer.set_result(slept)

    def fail(self, error: SeerError) -> None:
        """End the call with an error."""
        if not self._answer.done():
            self._answer.set_exception(error)
