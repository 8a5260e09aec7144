"""A process that serves requests for a gateway of several: `python -m seer.gateway.worker FD`.

Invariants:
- it begins paused, so none of its requests slips through a pause that began before it;
- control requests are answered by the process that started it, which tells all processes;
- it ends with that process.
"""

from __future__ import annotations

import asyncio
import socket
import sys

import msgspec
import uvloop
from starlette.requests import Request
from starlette.responses import Response

from seer.common.config import Config
from seer.common.errors import ConfigError, SeerError
from seer.common.process.log import configure, get_logger
from seer.common.process.service import transport_of
from seer.gateway.control import Order
from seer.gateway.errors import HttpError
from seer.gateway.http import body_of
from seer.gateway.process_calls import Link, LinkLost
from seer.gateway.serving import Serving
from seer.gateway.sockets import listen_on_both

CALL_SECONDS = 30.0
"""Deadline of a call to another process of the gateway, beside the time of what it asks for."""


CONTROL_BYTES = 2**17
"""Longest body of a control request: a line of a `Link` has room for it, however it is escaped."""


class ControlRelay:
    """Has the process that started this one answer control requests (`ControlRoutes`)."""

    def __init__(self, link: Link, config: Config) -> None:
        self._link = link
        self._seconds = config.buffer.update_seconds + CALL_SECONDS
        self._most = min(config.gateway.max_body_bytes, CONTROL_BYTES)
        self._body_seconds = config.gateway.client_seconds

    async def handle(self, request: Request) -> Response:
        """Answer a request of one of `control_routes.HANDLERS`."""
        body = (await body_of(request, self._most, self._body_seconds)).decode("latin-1")
        asked = request.method, request.url.path, request.url.query, body
        seconds = self._seconds if request.method == "POST" else 2 * CALL_SECONDS  # to ask takes no longer
        try:
            kind, told = await self._link.call("control", *asked, seconds=seconds)
        except LinkLost as error:
            raise HttpError(503, "the gateway's first process has ended") from error
        except TimeoutError as error:
            raise HttpError(
                504, f"the gateway's first process did not answer within {seconds:g} s"
            ) from error
        return Response(told, media_type=kind)


async def work(end: socket.socket) -> None:
    """Serve until drained, or until the other process ends."""
    serving: Serving | None = None

    async def serve(name: str, arguments: list[object]) -> object:
        """Do what the process that started this one calls for."""
        if serving is None:
            raise SeerError("not ready")
        match name, arguments:
            case "order", [order]:
                return await serving.process(msgspec.convert(order, Order))
            case "drain", []:
                serving.drain()
            case _:
                raise SeerError(f"unknown call {name} {arguments}")
        return None

    link = await Link.over(end, serve)
    listening = asyncio.create_task(link.run())
    config = msgspec.convert(await link.call("configuration", seconds=CALL_SECONDS), Config)
    configure(config.log, "gateway-worker")
    transport = transport_of(config)
    try:
        serving = Serving(config, transport)
        serving.requests.pause(abort=False)
        try:
            relay = ControlRelay(link, config).handle
            serving.load(relay, listen_on_both(config, shared=True))
        except ConfigError as error:
            await link.call("failed", str(error), seconds=CALL_SECONDS)
            return
        await link.call("ready", seconds=CALL_SECONDS)
        running = asyncio.create_task(serving.run())
        await asyncio.wait([running, listening], return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            get_logger().error("stopped: the gateway's first process has ended")
            running.cancel()
        await asyncio.wait([running])
    finally:
        listening.cancel()
        await transport.close()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(work(socket.socket(fileno=int(sys.argv[1]))))
