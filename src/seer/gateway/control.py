"""Pause, weight updates and sleep, for all processes of a gateway.

Invariants:
- pause and resume return once every process has done it;
- an update never waits for what is paused: what is not submitted is not waited for, and what is under way is
  ended by the update, or refuses it (`gateway.on_update`);
- one update runs at a time, of whole weights or of an adapter; a second one is refused while it does, and
  changes nothing;
- every process knows of an adapter before the call that loaded it returns;
- an update goes on when who asked for it disconnects;
- every wait has a deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from pathlib import PurePosixPath
from typing import Literal, cast

import msgspec

from seer.client import LoraAdapter
from seer.common.config import Config
from seer.common.errors import SeerError, WeightsRefused
from seer.common.sleep import SleepLevel, SleepTag
from seer.gateway.buffer_client import BufferClient
from seer.gateway.errors import HttpError, bad
from seer.gateway.models import Adapter, Models
from seer.gateway.open_requests import OpenRequests

PauseMode = Literal["abort", "wait", "keep"]

TURNS = ("later_turns", "segments")
"""Counters of the buffer (`services/buffer/conversations.py`)."""

_IN_FLIGHT: dict[str, Literal["abort", "error"]] = {"restart": "abort", "abort": "abort", "refuse": "error"}


class Pause(msgspec.Struct, frozen=True, tag=True):
    """See `OpenRequests.pause`."""

    abort: bool


class Abort(msgspec.Struct, frozen=True, tag=True):
    """See `OpenRequests.abort`."""


class Idle(msgspec.Struct, frozen=True, tag=True):
    """See `OpenRequests.idle`; the answer is false if it is not idle in time."""

    seconds: float


class Resume(msgspec.Struct, frozen=True, tag=True):
    """See `OpenRequests.resume`."""


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """See `Models.loaded`."""

    adapter: Adapter | None
    loading: Adapter | None


class Counts(msgspec.Struct, frozen=True, tag=True):
    """The answer: the counters, and what is there now: `processes` (1), `open_requests`, `under_way`."""


Order = Pause | Abort | Idle | Resume | Loaded | Counts

Process = Callable[[Order], Awaitable[object]]
"""One process that serves requests: returns once an order is done. One that has ended answers None."""


async def obey(requests: OpenRequests, models: Models, order: Order) -> object:
    """Do what is asked of the process with these requests, which name these models; return the answer."""
    match order:
        case Pause():
            requests.pause(abort=order.abort)
        case Abort():
            requests.abort()
        case Idle():
            return await requests.idle(order.seconds)
        case Resume():
            requests.resume()
        case Loaded():
            models.loaded(order.adapter, order.loading)
        case Counts():
            now = {"open_requests": requests.open_requests, "under_way": requests.under_way}
            return {**requests.counters, "processes": 1, **now}
    return None


class Control:
    """`processes` may grow and shrink; one that joins while generation is paused must be paused first."""

    def __init__(self, config: Config, buffer: BufferClient, processes: Collection[Process]) -> None:
        self._model = config.shared.model
        self._models = (self._model, config.gateway.model_name or PurePosixPath(self._model).name)
        self._on_update, self._seconds = config.gateway.on_update, config.buffer.update_seconds
        self.buffer = buffer
        self._processes = processes
        self._update: asyncio.Task[str] | None = None
        self.paused = False
        """Whether requests wait for `resume`."""
        self.adapter: Adapter | None = None
        """The last adapter that was loaded here, unless other weights were since."""
        self.loading: Adapter | None = None

    async def pause(self, mode: PauseMode) -> None:
        """Submit nothing; end what is under way (`abort`), wait for it (`wait`) or let it go on (`keep`)."""
        self.paused = True
        await self._all(Pause(mode == "abort"))
        if mode == "wait" and False in await self._all(Idle(self._seconds)):
            limit = f"{self._seconds:g} s (buffer.update_seconds)"
            raise HttpError(504, f"paused, but requests are still under way after {limit}")

    async def resume(self) -> None:
        """Submit what waited, and what comes."""
        self.paused = False
        await self._all(Resume())

    async def update(self, folder: str, field: str) -> str:
        """Have the engines load a folder; return its version, the one after the live one.

        `field` is the folder's name in errors.
        """
        _check_absolute(folder, field)
        return await self._shielded(self._load(folder, folder, field))

    async def load_adapter(self, name: str, path: str, *, in_place: bool) -> None:
        """Have the engines load the adapter in a folder; from then on requests may name it, and no other.

        `in_place`: an adapter of this name may be live.
        """
        _check_absolute(path, "lora_path")
        if not name or name in self._models:
            raise bad("lora_name", name, "give a name that is not the model's own")
        if not in_place and await self._is_live(name):
            raise bad("lora_name", name, "is loaded: set load_inplace, or unload it first")
        await self._shielded(self._load(LoraAdapter(path), path, "lora_path", name))

    async def unload_adapter(self, name: str) -> None:
        """Have the engines load the model that they were started with, in place of the live adapter."""
        if not await self._is_live(name):
            raise HttpError(404, f"lora_name = {name!r}: no such adapter is live", "lora_name")
        await self._shielded(self._load(self._model, self._model, "shared.model"))

    async def _is_live(self, name: str) -> bool:
        live = (await self.buffer.fresh_status()).weight_version
        return self.adapter is not None and (self.adapter.name, self.adapter.version) == (name, live)

    async def _shielded(self, load: Coroutine[None, None, str]) -> str:
        """Run an update to its end, also if who asked for it leaves. Raises a 409 during another one."""
        if self._update is not None and not self._update.done():
            load.close()
            raise HttpError(409, "another weight update is under way: wait for it")
        self._update = asyncio.create_task(load)
        self._update.add_done_callback(
            lambda done: done.cancelled() or done.exception()
        )  # the asker may be gone
        return await asyncio.shield(self._update)

    async def _load(self, source: str | LoraAdapter, folder: str, field: str, adapter: str = "") -> str:
        if self._on_update == "refuse" and (busy := (await self.counts())["under_way"]):
            raise HttpError(409, f"{busy} requests are under way (gateway.on_update = refuse): wait for them")
        status = await self.buffer.fresh_status()
        self.loading = Adapter(adapter, folder, status.weight_version + 1) if adapter else None
        try:
            await self._tell_of_adapters()
            live = await self.buffer.client.update_weights(
                status.weight_version + 1,
                source,
                in_flight=_IN_FLIGHT[self._on_update],
                timeout_seconds=self._seconds,
            )
        except WeightsRefused as error:
            raise HttpError(400, f"{field} = {folder!r}: {error}", field) from error
        else:
            self.adapter = self.loading
            return str(live.version)
        finally:
            self.loading = None
            await self._tell_of_adapters()

    async def _tell_of_adapters(self) -> None:
        await self._all(Loaded(self.adapter, self.loading))

    async def sleep(self, mode: PauseMode, level: SleepLevel) -> None:
        """Have engines free their memory, once what is under way is finished or (`abort`) ended."""
        if mode == "abort":
            await self._all(Abort())
        await self._prevented(self.buffer.client.sleep(self._seconds, level=level))

    async def wake(self, tags: Sequence[SleepTag]) -> None:
        """Have engines take memory again: all, or that with these names."""
        await self._prevented(self.buffer.client.wake(self._seconds, tags=tags or None))

    async def _prevented(self, call: Coroutine[None, None, None]) -> None:
        """Do it. Raises a 409 if another trainer, an update or the order of calls prevents it."""
        try:
            await call
        except SeerError as error:
            if type(error) is SeerError:
                raise HttpError(409, str(error)) from error
            raise

    async def counts(self) -> dict[str, int]:
        """Return the sums over all processes, and what the buffer has counted of turns."""
        total: Counter[str] = Counter()
        for counts in await self._all(Counts()):
            total.update(cast("dict[str, int] | None", counts) or {})
        with contextlib.suppress(SeerError):  # a buffer that is away
            counters = (await self.buffer.fresh_status()).counters
            total.update({name: counters[name] for name in TURNS if name in counters})
        return dict(total)

    async def _all(self, order: Order) -> list[object]:
        """Have all processes do something; return their answers."""
        return await asyncio.gather(*(each(order) for each in self._processes))


def _check_absolute(folder: str, field: str) -> None:
    if not PurePosixPath(folder).is_absolute():
        raise bad(field, folder, "give an absolute path that every engine can read")
