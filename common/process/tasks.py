"""Tasks that a service runs side by side for as long as it serves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine
from typing import Any


async def serve_until(ended: Awaitable[object], *serving: Coroutine[Any, Any, None]) -> None:
    """Run all of `serving` until `ended` is done, then cancel them. An error of one ends all, in a group."""
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(each) for each in serving]
        await ended
        for task in running:
            task.cancel()
