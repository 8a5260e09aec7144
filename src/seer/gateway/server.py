"""The gateway as a service: a buffer's client, the routes, and the sockets that they are served on.

Invariants:
- the data address has no control route;
- on SIGTERM no connection is accepted any more, requests under way are answered, and those that wait for the
  end of a pause are told to go elsewhere;
- a client that vanished, or reads nothing, is disconnected after `gateway.client_seconds`.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator, Sequence

from seer.common.clock import Clock
from seer.common.config import Config, GatewayConfig
from seer.common.errors import ConfigError
from seer.common.net.transport.base import Transport
from seer.gateway.buffer import Buffer
from seer.gateway.control import Control
from seer.gateway.desk import Desk
from seer.gateway.errors import HttpError
from seer.gateway.local import LocalProcess
from seer.gateway.text import ModelText

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

    from seer.gateway.control_routes import ControlRoutes
    from seer.gateway.data_routes import DataRoutes
    from seer.gateway.http import refusal
except ImportError as missing:
    raise ConfigError(f"the gateway needs an extra: pip install '.[gateway]' ({missing})") from missing

BACKLOG = 2048
"""Connections that wait to be accepted."""

KEEP_ALIVE_SECONDS = 75
"""How long an idle connection is kept: longer than clients keep theirs, so that they close it."""


class Gateway:
    """The service with one process."""

    def __init__(self, config: Config, transport: Transport) -> None:
        self._config = config
        settings = config.gateway
        self._buffer = Buffer(config.endpoints.trainers, transport)
        self._desk = Desk(
            self._buffer, most=settings.max_requests, seconds=settings.request_seconds,
            restart=settings.on_update != "abort",
        )  # fmt: skip
        self._control = Control(settings, self._buffer, [LocalProcess(self._desk)])
        self._servers: list[_Server] = []
        self._sockets: list[socket.socket] = []

    async def start(self) -> dict[str, str]:
        """Bind, and read the tokenizer; the buffer may come later."""
        settings = self._config.gateway
        for name in ("data", "control"):
            self._sockets.append(listen(f"gateway.{name}", getattr(settings, name), settings.client_seconds))
        text = ModelText.load(self._config.shared.model, trust_templates=settings.trust_chat_templates)
        data = DataRoutes(self._config, self._buffer, self._desk, text).routes
        control = ControlRoutes(self._config, self._control, self._desk.counters).routes
        self._servers = [_Server(_uvicorn_config(_app(each), settings)) for each in (data, [*data, *control])]
        return {
            f"gateway.{name}": url_of(each)
            for name, each in zip(("data", "control"), self._sockets, strict=True)
        }

    async def run(self) -> None:
        """Serve until drained."""
        async with self._buffer, asyncio.TaskGroup() as tasks:
            for server, each in zip(self._servers, self._sockets, strict=True):
                tasks.create_task(server.serve([each]))

    def drain(self) -> None:
        """Accept no more connections; let `run` return once requests under way are answered."""
        self._desk.close()
        for server in self._servers:
            server.should_exit = True


def make(config: Config, transport: Transport, clock: Clock) -> Gateway:
    """Return the service of `seer gateway`."""
    return Gateway(config, transport)


def listen(setting: str, address: str, client_seconds: float) -> socket.socket:
    """Bind `host:port`. Raises `ConfigError` that names the setting."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Connections inherit these. The kernel ends one whose peer answers, or reads, nothing for as long.
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        seconds = max(1, round(client_seconds))
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * seconds)
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, seconds)
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, seconds // 3))
    try:
        bound.bind((host, int(port)))
    except OSError as error:
        bound.close()
        raise ConfigError(f"{setting} = {address!r}: cannot be bound: {error.strerror or error}") from error
    return bound


def url_of(bound: socket.socket) -> str:
    """Return the URL of a bound socket."""
    host, port = bound.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def _app(routes: Sequence[Route]) -> Starlette:
    async def elsewhere(request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        what = (
            "has no such route here: docs/gateway.md lists them" if status == 404 else "is not to be asked so"
        )
        return refusal(HttpError(status, f"{request.method} {request.url.path} {what}"))

    return Starlette(routes=list(routes), exception_handlers={HTTPException: elsewhere})


def _uvicorn_config(app: Starlette, settings: GatewayConfig) -> uvicorn.Config:
    seconds = settings.client_seconds

    class Protocol(_Hurried):
        header_seconds = seconds

    return uvicorn.Config(
        app, http=Protocol, ws="none", lifespan="off", log_config=None, access_log=False, server_header=False,
        backlog=BACKLOG, timeout_keep_alive=KEEP_ALIVE_SECONDS,
    )  # fmt: skip


class _Hurried(HttpToolsProtocol):
    """Closes a connection whose request's head does not arrive in `header_seconds`."""

    header_seconds = 60.0
    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
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
