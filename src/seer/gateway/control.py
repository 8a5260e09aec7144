"""Pause, weight updates and sleep, for all processes of a gateway.

Invariants:
- pause and resume return once every process has done it;
- an update never waits for what is paused: what is not submitted is not waited for, and what is under way is
  ended by the update, or refuses it (`gateway.on_update`);
- one update runs at a time; a second one is refused while it does, and changes nothing;
- an update goes on when who asked for it disconnects;
- every wait has a deadline.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection
from pathlib import PurePosixPath
from typing import Literal, Protocol

from seer.common.config import GatewayConfig
from seer.common.errors import SeerError, WeightsRefused
from seer.gateway.buffer_client import BufferClient
from seer.gateway.errors import HttpError, bad

PauseMode = Literal["abort", "wait", "keep"]

_IN_FLIGHT: dict[str, Literal["abort", "error"]] = {"restart": "abort", "abort": "abort", "refuse": "error"}


class Process(Protocol):
    """One process that serves requests; each call returns once it is done."""

    async def pause(self, *, abort: bool) -> None:
        """See `OpenRequests.pause`."""
        ...

    async def abort(self) -> None:
        """See `OpenRequests.abort`."""
        ...

    async def idle(self, seconds: float) -> bool:
        """See `OpenRequests.idle`."""
        ...

    async def resume(self) -> None:
        """See `OpenRequests.resume`."""
        ...

    async def counts(self) -> dict[str, int]:
        """Return the counters, and what is there now: `processes` (1), `open_requests`, `under_way`."""
        ...


class Control:
    """`processes` may grow and shrink; one that joins while generation is paused must be paused first."""

    def __init__(self, config: GatewayConfig, buffer: BufferClient, processes: Collection[Process]) -> None:
        self._config = config
        self._buffer = buffer
        self._processes = processes
        self._update: asyncio.Task[str] | None = None
        self.paused = False

    async def pause(self, mode: PauseMode) -> None:
        """Submit nothing; end what is under way (`abort`), wait for it (`wait`) or let it go on (`keep`)."""
        self.paused = True
        await asyncio.gather(*(each.pause(abort=mode == "abort") for each in self._processes))
        if mode == "wait" and not await self._idle():
            limit = f"{self._config.update_seconds:g} s (gateway.update_seconds)"
            raise HttpError(504, f"paused, but requests are still under way after {limit}")

    async def resume(self) -> None:
        """Submit what waited, and what comes."""
        self.paused = False
        await asyncio.gather(*(each.resume() for each in self._processes))

    async def is_paused(self) -> bool:
        """Return whether requests wait for `resume`."""
        return self.paused

    async def update(self, folder: str, field: str) -> str:
        """Have the engines load a folder; return its version, the one after the live one.

        `field` is the folder's name in errors.
        """
        if not PurePosixPath(folder).is_absolute():
            raise bad(field, folder, "give an absolute path that every engine can read")
        if self._update is not None and not self._update.done():
            raise HttpError(409, "another weight update is under way: wait for it")
        self._update = asyncio.create_task(self._load(folder, field))
        self._update.add_done_callback(
            lambda done: done.cancelled() or done.exception()
        )  # the asker may be gone
        return await asyncio.shield(self._update)

    async def _load(self, folder: str, field: str) -> str:
        if self._config.on_update == "refuse" and (busy := (await self.counts())["under_way"]):
            raise HttpError(409, f"{busy} requests are under way (gateway.on_update = refuse): wait for them")
        status = await self._buffer.fresh_status()
        try:
            live = await self._buffer.client.update_weights(
                status.weight_version + 1,
                folder,
                in_flight=_IN_FLIGHT[self._config.on_update],
                timeout_seconds=self._config.update_seconds,
            )
        except WeightsRefused as error:
            raise HttpError(400, f"{field} = {folder!r}: {error}", field) from error
        return str(live.version)

    async def sleep(self, mode: PauseMode) -> None:
        """Have engines free their memory, once what is under way is finished or (`abort`) ended."""
        if mode == "abort":
            await asyncio.gather(*(each.abort() for each in self._processes))
        await self._call_sleep(asleep=True)

    async def wake(self) -> None:
        """Have engines allocate their memory again."""
        await self._call_sleep(asleep=False)

    async def _call_sleep(self, *, asleep: bool) -> None:
        client = self._buffer.client
        try:
            await (client.sleep if asleep else client.wake)(self._config.update_seconds)
        except HttpError:
            raise
        except SeerError as error:
            if type(error) is SeerError:  # another trainer, or an update, prevents it
                raise HttpError(409, str(error)) from error
            raise

    async def weight_version(self) -> int:
        """Return the live version."""
        _ = self._buffer.client
        return (await self._buffer.fresh_status()).weight_version

    async def counts(self) -> dict[str, int]:
        """Return the sums over all processes."""
        total: Counter[str] = Counter()
        for counts in await asyncio.gather(*(each.counts() for each in self._processes)):
            total.update(counts)
        return dict(total)

    async def _idle(self) -> bool:
        seconds = self._config.update_seconds
        return all(await asyncio.gather(*(each.idle(seconds) for each in self._processes)))

    async def instances(self) -> int:
        """Return how many engines there are. Raises a 503 while there is none."""
        return self._buffer.engines()
