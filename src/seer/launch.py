"""A whole system on this machine: buffer, context, dgds and engines as child processes.

Invariants:
- no child outlives this process: each dies with it (on Linux), and on the way out the whole process
  group of each is killed;
- a child that ends before it is told to is noticed at once, with the last lines it logged;
- a lost engine is survived while another one lives; the buffer or the last engine is not;
- starting and stopping have deadlines.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from msgspec.structs import asdict, replace

from seer.child import Child, LaunchError
from seer.common.config import Config, Endpoints
from seer.common.errors import ConfigError
from seer.hardware import EnginePlan, plan_engines

T = TypeVar("T")

SERVICES = ("buffer", "context", "dgds")

SERVICE_START_SECONDS = 60.0
"""Deadline for a light service to be ready; generous, since engines load at the same time."""

ENGINE_START_SLACK_SECONDS = 60.0
"""An engine gets this beyond `engine.load_seconds`, for importing its libraries."""

DRAIN_SECONDS = 3600.0
"""Longest that a buffer told to drain may have its engines go on."""

LEAVE_SECONDS = 10.0
"""Longest orderly end of a child that has nothing left to do."""

STOP_SECONDS = 5.0
"""After a second SIGTERM; then the process group is killed."""

_MAX_IPC_DIR = 60
"""Unix socket paths are at most 107 bytes long."""


def run(work: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` in which SIGTERM, too, cancels the work; the exit code then is a shell's 143."""
    terminated = False

    async def guarded() -> T:
        task = asyncio.current_task()

        def terminate() -> None:
            nonlocal terminated
            terminated = True
            if task is not None:
                task.cancel()

        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, terminate)
        return await work

    try:
        return asyncio.run(guarded())
    except asyncio.CancelledError:
        sys.exit(128 + (signal.SIGTERM if terminated else signal.SIGINT))


class LocalSystem:
    """Use as `async with LocalSystem(config, instances) as system`; then `system.endpoint`.

    With `private`, endpoints are ipc sockets in a directory of the run, and children log into files
    there, which are kept when something went wrong. Otherwise the configured endpoints are used and
    children log to stderr. With `drain`, leaving waits until all accepted work was collected. `say`
    gets one line per thing worth knowing.
    """

    def __init__(
        self,
        config: Config,
        instances: int,
        *,
        private: bool = True,
        drain: bool = False,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.config = config
        self._plans = plan_engines(config.engine, instances)
        self._private = private
        self._drain = drain
        self._say = say
        self._services: dict[str, Child] = {}
        self._engines: list[Child] = []
        self._watchers: list[asyncio.Task[None]] = []
        self._stopping = False
        self._lost = False
        if not private:
            _refuse_free_ports(config.endpoints)

    @property
    def endpoint(self) -> str:
        """Where trainers connect."""
        return self.config.endpoints.trainers

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of the children by name."""
        return {child.name: child.process.pid for child in self._children}

    async def __aenter__(self) -> Self:
        self._failure: asyncio.Future[LaunchError] = asyncio.get_running_loop().create_future()
        self._dir = Path(tempfile.mkdtemp(prefix="seer-", dir=_short_temporary_folder()))
        if self._private:
            names = {name: f"ipc://{self._dir}/{name}" for name in asdict(Endpoints()) if name != "bind_host"}
            self.config = replace(self.config, endpoints=Endpoints(**names))
        try:
            await self._start()
        except BaseException:
            self._lost = True
            await self._stop(orderly=False)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stop(orderly=error is None)

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work`; raises `LaunchError`, and cancels it, when the system cannot go on."""
        task = asyncio.create_task(work)
        try:
            either: list[asyncio.Future[Any]] = [task, self._failure]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise self._failure.result()
        finally:
            task.cancel()
            await asyncio.wait([task])
        return task.result()

    # --- starting ------------------------------------------------------------------------

    @property
    def _children(self) -> list[Child]:
        return [*self._services.values(), *self._engines]

    async def _start(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                for name in SERVICES:
                    tasks.create_task(self._start_service(name))
                shared = asyncio.Lock()
                for plan in self._plans:
                    tasks.create_task(self._start_engine(plan, shared))
        except ExceptionGroup as group:
            raise group.exceptions[0] from None

    async def _start_service(self, name: str) -> None:
        child = self._services[name] = await self._spawn(name, name, self.config, {})
        await child.ready(SERVICE_START_SECONDS)

    async def _start_engine(self, plan: EnginePlan, shared: asyncio.Lock) -> None:
        # Engines on one device measure its free memory as they start: one after the other.
        async with shared if plan.shares_device else contextlib.AsyncExitStack():
            config = replace(self.config, engine=plan.config)
            child = await self._spawn("engine", plan.config.name, config, plan.environ)
            self._engines.append(child)
            await child.ready(plan.config.load_seconds + ENGINE_START_SLACK_SECONDS)

    async def _spawn(self, service: str, name: str, config: Config, environ: dict[str, str]) -> Child:
        child = await Child.spawn(service, name, config, environ, self._dir, logged=self._private)
        self._watchers.append(asyncio.create_task(self._watch(child)))
        return child

    # --- watching and stopping -----------------------------------------------------------

    async def _watch(self, child: Child) -> None:
        await child.process.wait()
        if self._stopping or self._failure.done():
            return
        self._lost = True
        alive = sum(engine.alive for engine in self._engines)
        if child.name in ("context", "dgds"):
            self._say(f"{child.obituary()}\nrollouts go on without it")
        elif child.name != "buffer" and alive:
            self._say(f"{child.obituary()}\nrollouts go on with {alive} of {len(self._engines)} engines")
        else:
            self._failure.set_result(LaunchError(child.obituary()))

    async def _stop(self, *, orderly: bool) -> None:
        self._stopping = True
        try:
            if self._drain and orderly:
                await self._end([self._services["buffer"]], DRAIN_SECONDS)
            # Engines next: they say goodbye to services that are still there.
            for children in (self._engines, list(self._services.values())):
                await self._end(children, LEAVE_SECONDS if orderly else 0.0)
        finally:
            for child in self._children:
                child.kill_group()
            for watcher in self._watchers:
                watcher.cancel()
            self._clean_up()

    async def _end(self, children: list[Child], seconds: float) -> None:
        """Have children drain for so long, then stop, then kill them."""
        for patience in (seconds, STOP_SECONDS):
            for child in children:
                child.terminate()
            await asyncio.gather(*(child.gone(patience) for child in children))
        stuck = [child.name for child in children if child.alive]
        if stuck:
            self._lost = True
            self._say(f"{', '.join(stuck)} did not end {seconds + STOP_SECONDS:g} s after SIGTERM: killed")
        for child in children:
            child.kill_group()
        await asyncio.gather(*(child.gone(STOP_SECONDS) for child in children))

    def _clean_up(self) -> None:
        if self._lost and self._private:
            self._say(f"logs are kept in {self._dir}")
        else:
            shutil.rmtree(self._dir, ignore_errors=True)


def _short_temporary_folder() -> str:
    folder = tempfile.gettempdir()
    return folder if len(folder.encode()) <= _MAX_IPC_DIR else "/tmp"  # noqa: S108 - mkdtemp makes it private


def _refuse_free_ports(endpoints: Endpoints) -> None:
    for name, endpoint in asdict(endpoints).items():
        if endpoint.startswith("tcp://") and endpoint.endswith(":0"):
            raise ConfigError(
                f"endpoints.{name} = {endpoint!r}: the other processes must know the port; name one, or use ipc://"
            )
