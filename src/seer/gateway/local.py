"""A desk of this process, as `control.Process`."""

from __future__ import annotations

from seer.gateway.desk import Desk


class LocalProcess:
    """See `control.Process` for the calls."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    async def pause(self, *, abort: bool) -> None:
        """See `Desk.pause`."""
        self._desk.pause(abort=abort)

    async def abort(self) -> None:
        """See `Desk.abort`."""
        self._desk.abort()

    async def idle(self, seconds: float) -> bool:
        """See `Desk.idle`."""
        return await self._desk.idle(seconds)

    async def resume(self) -> None:
        """See `Desk.resume`."""
        self._desk.resume()

    async def counts(self) -> dict[str, int]:
        """Return the counters, and what is there now: `processes`, `open_requests`, `under_way`."""
        now = {"processes": 1, "open_requests": self._desk.open_requests, "under_way": self._desk.under_way}
        return {**self._desk.counters, **now}
