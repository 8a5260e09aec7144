"""Asks a buffer for its status: several may ask at a time, and an answer is for all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from seer.common.bounds import check_seconds
from seer.common.errors import Unreachable
from seer.common.wire import Status, StatusRequest


class StatusCalls:
    """`waiting`: calls that have no answer yet."""

    def __init__(self) -> None:
        self.waiting: list[asyncio.Future[Status]] = []

    async def ask(
        self, send: Callable[[StatusRequest], Awaitable[None]], endpoint: str, seconds: float
    ) -> Status:
        """Return the next status. Raises `Unreachable` when none comes in time, or `fail` is called."""
        waiter: asyncio.Future[Status] = asyncio.get_running_loop().create_future()
        self.waiting.append(waiter)
        try:
            async with asyncio.timeout(check_seconds("timeout_seconds", seconds)):
                await send(StatusRequest())
                return await waiter
        except TimeoutError as error:
            raise Unreachable(f"{endpoint} did not answer within {seconds:g} s") from error
        finally:
            self.waiting.remove(waiter)

    def answer(self, status: Status) -> None:
        """Give all who wait their answer."""
        for waiter in self.waiting:
            if not waiter.done():
                waiter.set_result(status)

    def fail(self, error: Unreachable) -> None:
        """End all calls that wait with this error."""
        for waiter in self.waiting:
            if not waiter.done():
                waiter.set_exception(error)
