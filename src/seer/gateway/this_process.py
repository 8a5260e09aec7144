"""The requests of this process, as `control.Process`."""

from __future__ import annotations

from seer.gateway.open_requests import OpenRequests


class ThisProcess:
    """See `control.Process` for the calls."""

    def __init__(self, requests: OpenRequests) -> None:
        self._requests = requests

    async def pause(self, *, abort: bool) -> None:
        """See `OpenRequests.pause`."""
        self._requests.pause(abort=abort)

    async def abort(self) -> None:
        """See `OpenRequests.abort`."""
        self._requests.abort()

    async def idle(self, seconds: float) -> bool:
        """See `OpenRequests.idle`."""
        return await self._requests.idle(seconds)

    async def resume(self) -> None:
        """See `OpenRequests.resume`."""
        self._requests.resume()

    async def counts(self) -> dict[str, int]:
        """Return the counters, and what is there now: `processes`, `open_requests`, `under_way`."""
        now = {
            "processes": 1,
            "open_requests": self._requests.open_requests,
            "under_way": self._requests.under_way,
        }
        return {**self._requests.counters, **now}
