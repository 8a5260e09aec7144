"""A gateway of several processes: the first starts the others, which serve, and tells the others of pauses.

Invariants:
- every process that serves is told of a pause, abort or resume before the call that asked for the change
  returns; a process that does not answer is killed; a process that starts is paused until it was told the
  present state;
- a process that ends is replaced, with growing pauses; the gateway ends when none is left;
- the addresses are the gateway's own: its processes share the addresses, no other program may have them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys

from msgspec import to_builtins
from msgspec.structs import replace
from starlette.requests import Request
from starlette.types import Message

from seer.common.config import Config
from seer.common.errors import ConfigError, SeerError
from seer.common.net.transport.base import Transport
from seer.common.process.log import get_logger
from seer.gateway.buffer_client import BufferClient
from seer.gateway.control import Control, Idle, Loaded, Order, Resume
from seer.gateway.control_routes import ControlRoutes
from seer.gateway.process_calls import Link, LinkLost
from seer.gateway.sockets import listen_on_both, url_of
from seer.gateway.worker import CALL_SECONDS
from seer.local.restarts import Restarts

START_SECONDS = 120.0
"""Deadline for a process to import its libraries and read the tokenizer."""

STOP_SECONDS = 10.0
"""Time that a draining process may take beyond the deadline of its requests."""

_log = get_logger()


class RemoteProcess:
    """A process that serves, as a `control.Process`. An ended process has done all that is asked."""

    def __init__(self, link: Link, process: asyncio.subprocess.Process) -> None:
        self._link = link
        self._process = process

    async def __call__(self, order: Order) -> object:
        """Have it do what is asked; return the answer."""
        seconds = CALL_SECONDS + (order.seconds if isinstance(order, Idle) else 0.0)
        return await self._call("order", to_builtins(order), seconds=seconds)

    async def drain(self) -> None:
        """Have it accept no more connections."""
        await self._call("drain")

    async def _call(self, name: str, *arguments: object, seconds: float = CALL_SECONDS) -> object:
        try:
            return await self._link.call(name, *arguments, seconds=seconds)
        except LinkLost:
            return None
        except TimeoutError:
            _log.error("a process of the gateway does not answer: killed", pid=self._process.pid, call=name)
            kill(self._process)
            return None


class WorkerSupervisor:
    """The service with several processes."""

    def __init__(self, config: Config, transport: Transport) -> None:
        self._config = config
        self._buffer = BufferClient(config, transport)
        self._serving: set[RemoteProcess] = set()
        self._control = Control(config, self._buffer, self._serving)
        self._routes = ControlRoutes(config, self._control)
        self._reserved: dict[str, socket.socket] = {}
        self._keepers: list[asyncio.Task[None]] = []
        self._draining = asyncio.Event()
        self._left = config.gateway.workers

    async def start(self) -> dict[str, str]:
        """Reserve the addresses, and start the processes."""
        addresses = {}
        for name, alone in listen_on_both(self._config).items():  # fails if anything else has them
            addresses[name] = url_of(alone, self._config.gateway).partition("://")[2]
            alone.close()
        self._config = replace(self._config, gateway=replace(self._config.gateway, **addresses))
        self._reserved = listen_on_both(self._config, shared=True)
        ready = [asyncio.get_running_loop().create_future() for _ in range(self._config.gateway.workers)]
        self._keepers = [asyncio.create_task(self._keep(each)) for each in ready]
        try:
            async with asyncio.timeout(START_SECONDS):
                await asyncio.gather(*ready)
        except BaseException as error:
            await self._stop()
            if isinstance(error, TimeoutError):
                raise SeerError(f"the gateway's processes were not ready in {START_SECONDS:g} s") from error
            raise
        scheme = "https" if self._config.gateway.tls_certificate else "http"
        return {f"gateway.{name}": f"{scheme}://{address}" for name, address in addresses.items()}

    async def run(self) -> None:
        """Serve until drained. Raises `SeerError` when no process can be kept running."""
        try:
            async with self._buffer:
                await asyncio.gather(*self._keepers)
        finally:
            await self._stop()

    def drain(self) -> None:
        """Have all processes answer what they have."""
        self._draining.set()
        self._drains = [asyncio.create_task(each.drain()) for each in self._serving]

    async def _stop(self) -> None:
        for keeper in self._keepers:
            keeper.cancel()
        if self._keepers:
            await asyncio.wait(self._keepers)

    # --- one process ---------------------------------------------------------------------

    async def _keep(self, ready: asyncio.Future[None]) -> None:
        """Run a process, and another one when it ends, until the gateway is drained."""
        loop = asyncio.get_running_loop()
        restarts = Restarts()
        while not self._draining.is_set():
            began: list[float] = []
            problem = await self._run_one(ready, began)
            if self._draining.is_set():
                return
            if not ready.done():
                ready.set_exception(ConfigError(problem) if problem else SeerError("a process of it ended"))
                return
            pause = restarts.pause(loop.time() - began[0] if began else 0.0)
            if pause is None:
                self._left -= 1
                if not self._left:
                    raise SeerError("no process of the gateway can be kept running")
                return
            _log.error("a process of the gateway ended, and starts again", seconds=pause, problem=problem)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._draining.wait(), pause)

    async def _run_one(self, ready: asyncio.Future[None], began: list[float]) -> str:
        """Run one process to its end. Appends the time of its readiness to `began`; returns its problem."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "seer.gateway.worker", str(theirs.fileno()),
                pass_fds=(theirs.fileno(),), start_new_session=True,
            )  # fmt: skip
        problem = ""
        admitted = asyncio.Event()

        async def serve(name: str, arguments: list[str]) -> object:
            nonlocal problem
            if name == "control":
                return await self._answered(*arguments)
            if name == "configuration":
                return to_builtins(self._config)
            if name == "failed":
                problem = arguments[0]
            if name == "ready":
                began.append(asyncio.get_running_loop().time())
                admitted.set()
            return None

        link = await Link.over(ours, serve)
        remote = RemoteProcess(link, process)
        admission = asyncio.create_task(self._admit(remote, admitted, ready))
        try:
            await link.run()
            async with asyncio.timeout(STOP_SECONDS):
                await process.wait()
        except TimeoutError:
            pass
        finally:
            admission.cancel()
            self._serving.discard(remote)
            kill(process)
            await process.wait()
        return problem

    async def _admit(
        self, remote: RemoteProcess, admitted: asyncio.Event, ready: asyncio.Future[None]
    ) -> None:
        await admitted.wait()
        self._serving.add(remote)
        await remote(Loaded(self._control.adapter, self._control.loading))
        if not self._control.paused:
            await remote(Resume())
        if self._draining.is_set():
            await remote.drain()
        if not ready.done():
            ready.set_result(None)

    async def _answered(self, method: str, path: str, query: str, body: str) -> tuple[str | None, str]:
        """Answer a control request of a process; return the answer's media type and text."""

        async def receive() -> Message:
            return {"type": "http.request", "body": body.encode("latin-1")}

        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "query_string": query.encode(),
            "headers": [],
        }
        response = await self._routes.handle(Request(scope, receive))
        return response.media_type, bytes(response.body).decode()


def kill(process: asyncio.subprocess.Process) -> None:
    """Kill a process, if it still runs."""
    if process.returncode is None:
        os.kill(process.pid, signal.SIGKILL)
