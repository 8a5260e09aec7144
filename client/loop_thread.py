"""An event loop in a thread of its own: what clients without asyncio run their calls in.

Invariant: an interrupt of the thread that waits for a call cancels its work.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from typing import TypeVar

T = TypeVar("T")


class LoopThread:
    """An event loop that runs until `stop`."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="seer-client", daemon=True)
        self._thread.start()

    def call(self, work: Coroutine[object, object, T]) -> T:
        """Run in the loop and wait; an interrupt of the waiting thread cancels the work."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def stop(self) -> None:
        """End the loop and its thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def iterate(thread: LoopThread, items: AsyncIterator[T]) -> Iterator[T]:
    """Yield what an async iterator yields in the thread's loop."""

    async def following() -> T | None:
        return await anext(items, None)

    while (item := thread.call(following())) is not None:
        yield item
