"""What one process of a gateway serves: its part of the requests, on both addresses.

Invariants:
- the data address has no control route;
- a connection whose request does not begin in `gateway.client_seconds` is closed;
- idle connections take no file that other work needs: beyond six eighths of the open files on the data
  address, and one eighth on the control address, they get 503;
- a process that is drained accepts no more connections, and answers requests on its open connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import resource
import socket
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from seer.common.config import Config, GatewayConfig
from seer.common.net.keys import Peers
from seer.common.net.transport.base import Transport
from seer.gateway.bearer import CONTROL, DATA, Bearer
from seer.gateway.buffer_client import BufferClient
from seer.gateway.control import obey
from seer.gateway.control_routes import control_routes
from seer.gateway.errors import HttpError
from seer.gateway.generation_routes import GenerationRoutes
from seer.gateway.http import Handler, refusal
from seer.gateway.image_processor import model_of
from seer.gateway.images import Images
from seer.gateway.job_processes import JobProcesses
from seer.gateway.models import Models
from seer.gateway.open_requests import OpenRequests
from seer.gateway.openapi import with_openapi
from seer.gateway.text import ModelText

BACKLOG = 2048
"""Connections that wait to be accepted."""

KEEP_ALIVE_SECONDS = 75
"""How long an idle connection is kept: longer than clients keep theirs, so that they close it."""


class Serving:
    """`buffer` is entered by `run`."""

    def __init__(self, config: Config, transport: Transport) -> None:
        self._config = config
        settings = config.gateway
        self.buffer = BufferClient(config, transport)
        self.requests = OpenRequests(
            self.buffer, most=settings.max_requests, seconds=settings.request_seconds,
            restart=settings.on_update != "abort",
        )  # fmt: skip
        self._models = Models(config.shared.model, settings.model_name, self.buffer)
        self.process = partial(obey, self.requests, self._models)
        self._jobs = JobProcesses(config.shared.model, trust=settings.trust_chat_templates)
        self._servers: dict[str, _Server] = {}
        self._sockets: Mapping[str, socket.socket] = {}

    def load(self, control: Handler, sockets: Mapping[str, socket.socket]) -> None:
        """Read tokenizer and processor, make the routes, and listen. `control`: as in `control_routes`.

        Raises `ConfigError`.
        """
        settings = self._config.gateway
        self._jobs.start()
        text = ModelText.load(self._config.shared.model, trust_templates=settings.trust_chat_templates)
        images = Images(model_of(self._config.shared.model), self._jobs.run, settings.image_bytes)
        data = GenerationRoutes(
            self._config, self.buffer, self.requests, text, images, self._models, self._jobs
        ).routes
        everything = [*data, *control_routes(control, self.requests.counters)]
        routes = {"data": data, "control": everything}
        peers = Peers(Path(self._config.security.peers)) if self._config.security.peers else None
        for name, each in routes.items():
            app: ASGIApp = _app(with_openapi(each))
            if peers is not None:
                app = Bearer(app, peers, DATA if name == "data" else CONTROL)
            self._servers[name] = _Server(_uvicorn_config(app, settings, _connections(name)))
        self._sockets = sockets
        for bound in sockets.values():
            bound.listen(BACKLOG)  # who is told that this is ready may connect before it runs
        gc.collect()
        gc.freeze()  # what was imported stays: full collections would look through it at every burst

    async def run(self) -> None:
        """Serve until drained."""
        with contextlib.closing(self._jobs):
            async with self.buffer, asyncio.TaskGroup() as tasks:
                for name, server in self._servers.items():
                    tasks.create_task(server.serve([self._sockets[name]]))

    def drain(self) -> None:
        """Accept no more connections; let `run` return once requests under way are answered."""
        self.requests.close()
        for server in self._servers.values():
            server.should_exit = True


def _app(routes: Sequence[Route]) -> Starlette:
    async def elsewhere(request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        what = (
            "has no such route here: docs/gateway.md lists them" if status == 404 else "is not to be asked so"
        )
        return refusal(HttpError(status, f"{request.method} {request.url.path} {what}"))

    return Starlette(routes=list(routes), exception_handlers={HTTPException: elsewhere})


def _connections(name: str) -> int:
    """Return how many connections an address may have: of the open files, an eighth is for other things."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return files * 6 // 8 if name == "data" else files // 8


def _uvicorn_config(app: ASGIApp, settings: GatewayConfig, connections: int) -> uvicorn.Config:
    seconds = settings.client_seconds

    class Protocol(_Hurried):
        header_seconds = seconds
        most = connections

    return uvicorn.Config(
        app, http=Protocol, ws="none", lifespan="off", log_config=None, access_log=False, server_header=False,
        backlog=BACKLOG, timeout_keep_alive=KEEP_ALIVE_SECONDS,
        ssl_certfile=settings.tls_certificate or None, ssl_keyfile=settings.tls_key or None,
    )  # fmt: skip


_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 2\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
)
"""What a connection is told for which there is no file to spare."""


class _Hurried(HttpToolsProtocol):
    """Closes a connection whose request's head does not arrive in `header_seconds`, and one beyond `most`."""

    header_seconds = 60.0
    most = 2**20
    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.most:
            transport.write(_FULL)
            transport.close()
            return
        self._hurry()

    def on_message_begin(self) -> None:
        if self._late is None:
            self._hurry()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._relax()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._relax()
        super().connection_lost(exc)

    def _hurry(self) -> None:
        self._late = asyncio.get_running_loop().call_later(self.header_seconds, self.transport.close)

    def _relax(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


class _Server(uvicorn.Server):
    """Leaves signals to `seer.common.process.service`."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
