"""Work in threads, which cannot be cancelled, and the end of a process whose parent is gone."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

PARENT_SECONDS = 1.0
"""How often `end_with_parent` looks whether the parent is still there."""


async def until_ended(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run something in a thread; it has ended when this returns or raises, also if this is cancelled."""
    return await until_stopped(lambda: None, work, *args, **kwargs)


async def until_stopped(
    stop: Callable[[], object], work: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """Do as `until_ended`; if this is cancelled, `stop` is called, for the work to end soon."""
    job = asyncio.ensure_future(asyncio.to_thread(work, *args, **kwargs))
    try:
        return await asyncio.shield(job)
    except asyncio.CancelledError:
        stop()
        while not job.done():  # it may be cancelled again
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([job])
        raise


@functools.cache  # one watch is enough
def end_with_parent() -> None:
    """End this process soon after the one that made it by multiprocessing, also within a collective.

    That one may be gone by now. The kernel's way (PR_SET_PDEATHSIG) would follow the thread that started this
    process, which may end before. A process that was not made so goes on.
    """
    if (parent := multiprocessing.parent_process()) is None:
        return

    def watch() -> None:
        while os.getppid() == parent.pid:
            time.sleep(PARENT_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
