"""Time as a dependency: services take a `Clock`, machines take `now`.

`LoopClock` is the running event loop's clock, so a loop with virtual time runs a whole in-process cluster
with the same code.
"""

from __future__ import annotations

import asyncio
from typing import Protocol


class Clock(Protocol):
    """Monotonic seconds and a way to wait."""

    def now(self) -> float:
        """Return monotonic seconds; only differences mean anything."""

    async def sleep(self, seconds: float) -> None:
        """Wait for `seconds` of this clock."""


class LoopClock:
    """The running event loop's own clock."""

    def now(self) -> float:
        """Return the loop's monotonic seconds."""
        return asyncio.get_running_loop().time()

    async def sleep(self, seconds: float) -> None:
        """Wait for `seconds` of loop time."""
        await asyncio.sleep(seconds)
