"""Work in threads, which cannot be cancelled."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def until_ended(work: Callable[[], T], stop: Callable[[], object] = lambda: None) -> T:
    """Run something in a thread; it has ended when this returns or raises. If cancelled, `stop` is called."""
    job = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(job)
    except asyncio.CancelledError:
        stop()
        while not job.done():  # it may be cancelled again
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([job])
        raise
