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
import ctypes
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from msgspec.structs import asdict, replace

from seer.common.config import ENV_PREFIX, Config, Endpoints, dump
from seer.common.errors import ConfigError, SeerError
from seer.hardware import EnginePlan, plan_engines

T = TypeVar("T")

COMMAND = (sys.executable, "-m", "seer.cli")
"""What a child runs: its service's subcommand follows."""

SERVICES = ("buffer", "context", "dgds")

SERVICE_START_SECONDS = 60.0
"""Deadline for a light service to be ready; generous, since engines load at the same time."""

ENGINE_START_SLACK_SECONDS = 60.0
"""An engine gets this beyond `engine.load_seconds`, for importing its libraries."""

DRAIN_SECONDS = 10.0
"""Longest orderly end of a child, unless told otherwise."""

STOP_SECONDS = 3.0
"""After a second SIGTERM; then the process group is killed."""

TAIL_BYTES, TAIL_LINES = 16_384, 15
"""How much of a lost child's log is shown."""

_MAX_IPC_DIR = 60
"""Unix socket paths are at most 107 bytes long."""

_PR_SET_PDEATHSIG = 1


class LaunchError(SeerError):
    """A local system cannot start, or cannot go on."""

    code = "launch"


def die_with(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent ends (Linux; elsewhere a no-op)."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it ended before the request was made
        sys.exit(1)


def run(work: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` in which SIGTERM ends the work as Ctrl-C does, with exit code 143."""
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
        if terminated:
            sys.exit(128 + signal.SIGTERM)
        raise


class _Child:
    """One process; `log` is None when it writes to our stderr."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: Path | None) -> None:
        self.name = name
        self.process = process
        self.log = log

    @property
    def alive(self) -> bool:
        return self.process.returncode is None

    def obituary(self) -> str:
        code = self.process.returncode or 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"{self.name} {how}{self.last_lines()}"

    def last_lines(self) -> str:
        if self.log is None:
            return ""
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()[-TAIL_LINES:]
        return f"; the end of {self.log}:\n" + "\n".join(f"  {line}" for line in lines) if lines else ""

    def terminate(self) -> None:
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                self.process.terminate()

    async def gone(self, seconds: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.process.wait()
        return not self.alive

    def kill_group(self) -> None:
        """Kill what is left, the process's own children included."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


class LocalSystem:
    """Use as `async with LocalSystem(config, instances) as system`; then `system.endpoint`.

    With `private`, endpoints are ipc sockets in a directory of the run, and children log into files
    there, which are kept when something went wrong. Otherwise the configured endpoints are used and
    children log to stderr. `say` gets one line per thing worth knowing.
    """

    def __init__(
        self,
        config: Config,
        instances: int,
        *,
        private: bool = True,
        drain_seconds: float = DRAIN_SECONDS,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.config = config
        self._plans = plan_engines(config.engine, instances)
        self._private = private
        self._drain_seconds = drain_seconds
        self._say = say
        self._services: dict[str, _Child] = {}
        self._engines: list[_Child] = []
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
            await self._stop(0.0)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stop(self._drain_seconds if error is None else 0.0)

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
    def _children(self) -> list[_Child]:
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
        self._services[name], ready = await self._spawn(name, name, self.config, {})
        await self._ready(self._services[name], ready, SERVICE_START_SECONDS)

    async def _start_engine(self, plan: EnginePlan, shared: asyncio.Lock) -> None:
        # Engines on one device measure its free memory as they start: one after the other.
        async with shared if plan.shares_device else contextlib.AsyncExitStack():
            config = replace(self.config, engine=plan.config)
            child, ready = await self._spawn("engine", plan.config.name, config, plan.environ)
            self._engines.append(child)
            await self._ready(child, ready, plan.config.load_seconds + ENGINE_START_SLACK_SECONDS)

    async def _spawn(
        self, service: str, name: str, config: Config, environ: dict[str, str]
    ) -> tuple[_Child, int]:
        file = self._dir / f"{name}.toml"
        file.write_text(dump(config))
        log = self._dir / f"{name}.log" if self._private else None
        # The file holds what the environment said: it must not be said again.
        inherited = {key: value for key, value in os.environ.items() if not _is_setting(key)}
        ready, write = os.pipe()
        sink = os.open(log, os.O_WRONLY | os.O_CREAT, 0o600) if log else os.dup(2)
        options = ("--config", str(file), "--ready-fd", str(write), "--parent-pid", str(os.getpid()))
        try:
            process = await asyncio.create_subprocess_exec(
                *COMMAND, service, *options,
                stdin=asyncio.subprocess.DEVNULL, stdout=sink, stderr=sink, pass_fds=(write,),
                env=inherited | environ, process_group=0,
            )  # fmt: skip
        except BaseException:
            os.close(ready)
            raise
        finally:
            os.close(write)
            os.close(sink)
        child = _Child(name, process, log)
        self._watchers.append(asyncio.create_task(self._watch(child)))
        return child, ready

    async def _ready(self, child: _Child, ready: int, seconds: float) -> None:
        reader = asyncio.StreamReader()
        pipe, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(ready, "rb", buffering=0)
        )
        try:
            async with asyncio.timeout(seconds):
                line = await reader.readline()
                if not line:
                    await child.process.wait()
                    raise LaunchError(child.obituary())
        except TimeoutError:
            raise LaunchError(f"{child.name} was not ready in {seconds:.0f} s{child.last_lines()}") from None
        finally:
            pipe.close()

    # --- watching and stopping -----------------------------------------------------------

    async def _watch(self, child: _Child) -> None:
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

    async def _stop(self, drain_seconds: float) -> None:
        self._stopping = True
        try:
            # The buffer first: it drains by having the engines finish what was accepted.
            buffer = [child for child in self._children if child.name == "buffer"]
            await self._end(buffer, drain_seconds)
            rest = [child for child in self._children if child.name != "buffer"]
            await self._end(rest, min(drain_seconds, DRAIN_SECONDS))
        finally:
            for child in self._children:
                child.kill_group()
            for watcher in self._watchers:
                watcher.cancel()
            self._clean_up()

    async def _end(self, children: list[_Child], drain_seconds: float) -> None:
        """Have children drain, then stop, then kill them."""
        for patience in (drain_seconds, STOP_SECONDS):
            for child in children:
                child.terminate()
            gone = await asyncio.gather(*(child.gone(patience) for child in children))
            late = [child.name for child, ended in zip(children, gone, strict=True) if not ended]
            if late and patience:
                self._lost = True
                self._say(f"{', '.join(late)} still ran {patience:g} s after SIGTERM")
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


def _is_setting(name: str) -> bool:
    return name.startswith(ENV_PREFIX) and "__" in name
