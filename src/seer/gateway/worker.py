"""A process that serves requests for a gateway of several: `python -m seer.gateway.worker FD`.

Invariants:
- it begins paused, so none of its requests slips through a pause that began before it;
- control calls go to the process that started it, which tells all processes;
- it ends with that process.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Sequence

import msgspec
import uvloop

from seer.common.config import Config
from seer.common.errors import ConfigError, SeerError
from seer.common.net.transport.base import Transport
from seer.common.process.log import configure, get_logger
from seer.common.process.service import transport_of
from seer.common.sleep import SleepLevel, SleepTag
from seer.gateway.control import PauseMode
from seer.gateway.models import Adapter
from seer.gateway.process_calls import Link
from seer.gateway.serving import Serving
from seer.gateway.sockets import listen_on_both

CALL_SECONDS = 30.0
"""Deadline of a call to another process of the gateway, beside the time of what it asks for."""


class RemoteControl:
    """`Control` in the process that started this one: see there."""

    def __init__(self, link: Link, update_seconds: float) -> None:
        self._link = link
        self._long = update_seconds + CALL_SECONDS

    async def pause(self, mode: PauseMode) -> None:
        """See `Control.pause`."""
        await self._link.call("pause", mode, seconds=self._long)

    async def resume(self) -> None:
        """See `Control.resume`."""
        await self._link.call("resume", seconds=2 * CALL_SECONDS)

    async def is_paused(self) -> bool:
        """See `Control.is_paused`."""
        return bool(await self._link.call("is_paused", seconds=CALL_SECONDS))

    async def update(self, folder: str, field: str) -> str:
        """See `Control.update`."""
        return str(await self._link.call("update", folder, field, seconds=self._long))

    async def load_adapter(self, name: str, path: str, *, in_place: bool) -> None:
        """See `Control.load_adapter`."""
        await self._link.call("load_adapter", name, path, in_place, seconds=self._long)

    async def unload_adapter(self, name: str) -> None:
        """See `Control.unload_adapter`."""
        await self._link.call("unload_adapter", name, seconds=self._long)

    async def sleep(self, mode: PauseMode, level: SleepLevel) -> None:
        """See `Control.sleep`."""
        await self._link.call("sleep", mode, level, seconds=self._long)

    async def wake(self, tags: Sequence[SleepTag]) -> None:
        """See `Control.wake`."""
        await self._link.call("wake", list(tags), seconds=self._long)

    async def weight_version(self) -> int:
        """See `Control.weight_version`."""
        return int(await self._link.call("weight_version", seconds=CALL_SECONDS))

    async def instances(self) -> int:
        """See `Control.instances`."""
        return int(await self._link.call("instances", seconds=CALL_SECONDS))

    async def counts(self) -> dict[str, int]:
        """See `Control.counts`."""
        return dict(await self._link.call("counts", seconds=2 * CALL_SECONDS))


class Worker:
    """Serves once it was told its configuration."""

    def __init__(self, config: Config, transport: Transport) -> None:
        self.config = config
        self.serving = Serving(config, transport)
        self.serving.requests.pause(abort=False)

    async def serve(self, name: str, arguments: list[object]) -> object:
        """Do what the process that started this one calls for."""
        process = self.serving.process
        match name, arguments:
            case "pause", [bool() as abort]:
                await process.pause(abort=abort)
            case "abort", []:
                await process.abort()
            case "idle", [float() | int() as seconds]:
                return await process.idle(seconds)
            case "resume", []:
                await process.resume()
            case "loaded", [adapter, loading]:
                await process.loaded(*msgspec.convert([adapter, loading], list[Adapter | None]))
            case "counts", []:
                return await process.counts()
            case "drain", []:
                self.serving.drain()
            case _:
                raise SeerError(f"unknown call {name} {arguments}")
        return None


async def work(end: socket.socket) -> None:
    """Serve until drained, or until the other process ends."""
    loading: Worker | None = None

    async def serve(name: str, arguments: list[object]) -> object:
        if loading is None:
            raise SeerError("not ready")
        return await loading.serve(name, arguments)

    link = await Link.over(end, serve)
    listening = asyncio.create_task(link.run())
    config = msgspec.convert(await link.call("configuration", seconds=CALL_SECONDS), Config)
    configure(config.log, "gateway-worker")
    transport = transport_of(config)
    try:
        loading = Worker(config, transport)
        try:
            control = RemoteControl(link, config.buffer.update_seconds)
            loading.serving.load(control, listen_on_both(config, shared=True))
        except ConfigError as error:
            await link.call("failed", str(error), seconds=CALL_SECONDS)
            return
        await link.call("ready", seconds=CALL_SECONDS)
        serving = asyncio.create_task(loading.serving.run())
        await asyncio.wait([serving, listening], return_when=asyncio.FIRST_COMPLETED)
        if not serving.done():
            get_logger().error("stopped: the gateway's first process has ended")
            serving.cancel()
        await asyncio.wait([serving])
    finally:
        listening.cancel()
        await transport.close()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(work(socket.socket(fileno=int(sys.argv[1]))))
