"""A stream of weights that is made from an earlier one and a delta to it, beside both.

Invariants (tests/cluster/test_weight_deltas.py):
- the thread that writes the stream's file has ended when `stop` returns;
- the event loop hears of each tensor that is written, in their order in the file, so readers follow.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable

from seer.common.blobs import Blob
from seer.common.process.threads import until_ended
from seer.common.weights.delta import apply


class Making:
    """Makes `stream`; `grew` hears how many of its first bytes are there, `ended` the problem, if any."""

    def __init__(
        self,
        base: Blob,
        delta: Blob,
        stream: Blob,
        grew: Callable[[int], None],
        ended: Callable[[str], Awaitable[None]],
    ) -> None:
        self._base, self._delta, self._stream = base, delta, stream
        self._grew, self._ended = grew, ended
        self._stopped = threading.Event()
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """End it, unless it has ended."""
        self._stopped.set()
        if self._task is not asyncio.current_task():
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()

        def progress(have: int) -> None:
            loop.call_soon_threadsafe(self._grew, have)

        problem = ""
        try:
            await until_ended(self._write, progress)
            self._grew(self._stream.size)
        except (OSError, ValueError) as error:
            problem = str(error)
        await self._ended(problem)

    def _write(self, progress: Callable[[int], None]) -> None:
        base, stream = self._base, self._stream
        apply(base.file, self._delta.file, stream.file, base.name, self._stopped.is_set, progress)
        self._stream.note(whole=True)
