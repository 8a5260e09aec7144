"""What a client asked a buffer, until the answers are there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

from seer.common.bounds import check_seconds
from seer.common.errors import SeerError, Unreachable

T = TypeVar("T")


class Calls(Generic[T]):
    """Questions that wait for an answer; true while there are any. `call` tells one's answer from others."""

    def __init__(self) -> None:
        self._waiting: list[tuple[object, asyncio.Future[T]]] = []

    def __bool__(self) -> bool:
        return bool(self._waiting)

    async def ask(self, call: object, sent: Awaitable[None]) -> T:
        """Await `sent`, which sends the question; return the first answer. Raises what `fail` gets."""
        waiter: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting.append((call, waiter))
        try:
            await sent
            return await waiter
        finally:
            self._waiting.remove((call, waiter))

    def answer(self, call: object, answer: T) -> None:
        """Give it to all who asked this; one that nobody waits for, or a second one, changes nothing."""
        for asked, waiter in self._waiting:
            if asked == call and not waiter.done():
                waiter.set_result(answer)

    def fail(self, error: SeerError) -> None:
        """End all with an error."""
        for _, waiter in self._waiting:
            if not waiter.done():
                waiter.set_exception(error)


@asynccontextmanager
async def answered_within(seconds: float, what: str) -> AsyncIterator[None]:
    """Raise `Unreachable`, which says `what`, after so many seconds; `InvalidField` for invalid ones."""
    try:
        async with asyncio.timeout(check_seconds("timeout_seconds", seconds)):
            yield
    except TimeoutError as error:
        raise Unreachable(f"{what} within {seconds:g} s") from error
