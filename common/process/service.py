"""Runs one service as a process.

Invariants:
- the first SIGTERM or SIGINT drains; the second stops at once, and so does the first while the service
  still starts; one within `SAME_SECONDS` of the first is the same, told twice;
- an expected failure (`SeerError`) is one log line and exit code 2, never a traceback;
- a supervisor (`--ready-fd`, systemd) is told when it is ready, or why it cannot start; systemd also gets
  watchdog messages;
- temporary files of it and its libraries are removed when it ends, or when the next service starts;
- a service that has an object per request, `MANY_OBJECTS`, is not stopped by full garbage collections;
- uvloop is chosen here and nowhere else, so everything also runs on a plain or virtual-time loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import resource
import signal
from collections.abc import Callable
from typing import Protocol

import uvloop

from seer.common.clock import Clock, LoopClock
from seer.common.config import Config
from seer.common.errors import SeerError
from seer.common.net.keys import load_keys
from seer.common.net.transport.base import Transport
from seer.common.net.transport.zmq import ZmqTransport
from seer.common.process.collector import collect
from seer.common.process.log import configure, get_logger
from seer.common.process.notify import Notifier
from seer.common.process.scratch import private_temporary_folder

EXIT_OK = 0
EXIT_REFUSED = 2
EXIT_SIGNAL = 128
"""Plus the signal's number, as shells report it."""

SAME_SECONDS = 0.5
"""Supervisors such as SLURM may tell a process and its parent, which tells the process again."""

MANY_OBJECTS = frozenset({"buffer", "context"})

_log = get_logger()


class Service(Protocol):
    """What a process runs."""

    async def start(self) -> dict[str, str]:
        """Bind, load, connect; return the bound endpoints by their name in `[endpoints]`."""

    async def run(self) -> None:
        """Serve; return once drained."""

    def drain(self) -> None:
        """Take no new work and let `run` return when the rest is done."""


Make = Callable[[Config, Transport, Clock], Service]


def run_process(name: str, make: Make, config: Config, ready_fd: int | None = None) -> int:
    """Run the service until it is drained and return the process's exit code.

    When the service is ready, one JSON line `{"service", "pid", "endpoints"}` is written to `ready_fd`, when
    it cannot start, `{"service", "pid", "error", "code"}`; then `ready_fd` is closed.
    """
    configure(config.log, name)
    _allow_connections()
    try:
        with private_temporary_folder(), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_Process(name).run(make, config, ready_fd))
    except SeerError as error:
        return _refused(error)
    except ExceptionGroup as group:
        expected, rest = group.split(SeerError)
        if expected is None or rest is not None:
            raise
        return _refused(_first(expected))


def _allow_connections() -> None:
    """Raise the limit of open files as far as it goes: a connection that never speaks is one, too."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # macOS calls its limit infinite, and refuses that
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def transport_of(config: Config) -> ZmqTransport:
    """Return the transport that the configuration asks for. Raises `ConfigError`."""
    return ZmqTransport(
        config.endpoints.bind_host, keys=load_keys(config.security), insecure=config.security.insecure
    )


def _refused(error: BaseException) -> int:
    code = error.code if isinstance(error, SeerError) else SeerError.code
    _log.error("stopped", error=str(error), code=code)
    return EXIT_REFUSED


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


class _Process:
    def __init__(self, name: str) -> None:
        self._name = name
        self._service: Service | None = None
        self._systemd = Notifier(os.environ)
        self._signals: list[signal.Signals] = []
        self._closing = False

    async def run(self, make: Make, config: Config, ready_fd: int | None) -> int:
        self._catch_signals()
        beside = [asyncio.create_task(self._systemd.beat())]
        transport = transport_of(config)
        try:
            await asyncio.sleep(0)  # lets the first beat be sent: what follows may import torch, which blocks
            try:
                service = make(config, transport, LoopClock())
                endpoints = await service.start()
            except SeerError as error:
                self._report({"error": str(error), "code": error.code}, ready_fd)
                raise
            self._service = service
            if self._name in MANY_OBJECTS:
                beside.append(asyncio.create_task(collect(LoopClock())))
            _log.info("ready", **endpoints)
            self._report({"endpoints": endpoints}, ready_fd)
            self._systemd.ready()
            await service.run()
        except asyncio.CancelledError:
            if not self._signals:
                raise
            return EXIT_SIGNAL + self._signals[-1]
        finally:
            self._closing = True  # ends within a bounded time; a signal would only add a traceback
            self._systemd.stopping()
            await transport.close()
            for task in beside:
                task.cancel()
            self._systemd.close()
        _log.info("drained")
        return EXIT_OK

    def _catch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        drained_at = -math.inf

        def caught(number: signal.Signals) -> None:
            nonlocal drained_at
            if loop.time() - drained_at < SAME_SECONDS:
                return
            self._signals.append(number)
            if self._service is not None and len(self._signals) == 1:
                drained_at = loop.time()
                _log.info("draining", signal=number.name)
                self._systemd.stopping()
                self._service.drain()
            elif task is not None and not self._closing:
                _log.warning("stopping at once", signal=number.name)
                task.cancel()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, caught, number)

    def _report(self, outcome: dict[str, object], ready_fd: int | None) -> None:
        if ready_fd is None:
            return
        line = json.dumps({"service": self._name, "pid": os.getpid(), **outcome})
        try:
            os.write(ready_fd, line.encode() + b"\n")
            os.close(ready_fd)
        except OSError as error:
            _log.warning("nobody reads --ready-fd", error=str(error))
