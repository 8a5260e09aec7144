"""A whole system on this machine: buffer, context, dgds, engines and a KV pool as child processes.

Invariants:
- no child outlives this process: each is killed with it (on Linux), and when the system stops, the whole
  process group of each is killed;
- a child that ends unexpectedly is noticed at once, reported with the end of its log, and started again as
  `restarts` allows; if one cannot start at first, the whole system stops;
- after too many restarts a child is given up, and the system goes on without it, except without the buffer or
  any engine;
- a KV pool that was chosen by `pool.kind = auto` is not waited for, and may fail to start;
- starting and stopping have deadlines;
- a system that is ready can be found by other commands of its user (`seer.common.process.running`);
- all temporary files of children are in one folder of the run (`seer.common.process.scratch`), which is
  removed with the run, or, if that was killed, when the next one starts.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self, TypeVar

from msgspec.structs import asdict, replace

from seer.common.config import BufferConfig, Config, Endpoints
from seer.common.endpoints import shards
from seer.common.errors import ConfigError
from seer.common.process.extras import ENGINE_FIX, missing_for_engines
from seer.common.process.running import Running, announce
from seer.common.process.scratch import Scratch, sweep
from seer.local.child import Child, LaunchError, StartError
from seer.local.hardware import plan_engines
from seer.local.pool_plan import POOL_SERVICES, plan_pool
from seer.local.restarts import Restarts

T = TypeVar("T")

SERVICES = ("buffer", "context", "dgds")

SERVICE_START_SECONDS = 60.0
"""Deadline for a service other than an engine to be ready; generous, as engines load at the same time."""

ENGINE_START_SLACK_SECONDS = 60.0
"""Time beyond `engine.load_seconds` for an engine to import its libraries."""

DRAIN_SECONDS = 3600.0
"""Longest time that a draining buffer may keep its engines running."""

LEAVE_SECONDS = 10.0
"""Longest time for a child without work to end after SIGTERM."""

STOP_SECONDS = 10.0
"""Time to end after a second SIGTERM, on a busy machine, too; then the process group is killed."""

FAILED_SECONDS = 1.0
"""Time between both when nothing is waited for: services take two within `service.SAME_SECONDS` for one."""

LOG = "log"
FOLDERS = {"spool": "weights", "images": "images", "log": LOG}
"""Default folders of the buffer in the folder of the run, by setting; one started again finds its streams."""

POOL_DISK = "pool"
"""Default folder of the KV pool's disk tier, likewise."""

_MAX_IPC_DIR = 60
"""Unix socket paths are at most 107 bytes long."""


def run(work: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` in which SIGTERM, too, cancels the work; the exit code is then 143, as in a shell."""
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


@dataclass(slots=True, eq=False)
class _Slot:
    """One service of the system: its current child process, and its restarts."""

    service: str
    name: str
    config: Config
    environ: Mapping[str, str]
    start_seconds: float
    optional: bool = False
    gate: contextlib.AbstractAsyncContextManager[object] = field(default_factory=contextlib.nullcontext)
    child: Child | None = None
    ready_at: float | None = None
    restarts: Restarts = field(default_factory=Restarts)
    given_up: bool = False
    watcher: asyncio.Task[None] | None = None


class LocalSystem:
    """Use as `async with LocalSystem(config, instances) as system`; then `system.endpoint`.

    `instances` is the number of engines; None for the machine's default (`plan_engines`).
    With `private`, endpoints are ipc sockets in a folder of the run, and children log into files there, which
    are kept if something failed. Otherwise the configured endpoints are used and children log to stderr.
    With `drain`, leaving waits until trainers have all accepted work. `say` is called with lines for the
    user. `environ` is added to the environment of engines.
    """

    def __init__(
        self,
        config: Config,
        instances: int | None,
        *,
        private: bool = True,
        drain: bool = False,
        say: Callable[[str], None] = lambda line: None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        if config.engine.backend == "vllm" and (missing := missing_for_engines()):
            raise ConfigError(f"engine.backend = 'vllm': {missing} is not installed; {ENGINE_FIX}")
        self._given = environ or {}
        self._pool = plan_pool(config.pool, config.engine, private=private)
        self.config = replace(config, pool=self._pool.config)
        self._plans = plan_engines(config.engine, instances)
        self._private = private
        self._drain = drain
        self._say = say
        self._slots: list[_Slot] = []
        self._keep_logs = False
        self._announced: Scratch | None = None
        if not private:
            _refuse_free_ports(config.endpoints)

    @property
    def endpoint(self) -> str:
        """Where trainers connect."""
        return self.config.endpoints.trainers

    @property
    def instances(self) -> int:
        """How many engines are to run."""
        return len(self._plans)

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of the children by name."""
        return {slot.name: slot.child.process.pid for slot in self._slots if slot.child}

    @property
    def restarts(self) -> dict[str, int]:
        """How often each child was restarted, by name."""
        return {slot.name: slot.restarts.total for slot in self._slots}

    async def __aenter__(self) -> Self:
        self._failure: asyncio.Future[LaunchError] = asyncio.get_running_loop().create_future()
        try:
            parents = tempfile.gettempdir(), _short_temporary_folder()
            for parent in dict.fromkeys(parents):
                await asyncio.to_thread(sweep, parent)
            self._scratch = Scratch("run", parents[1])
        except OSError as error:
            raise ConfigError(f"TMPDIR: {error}; set it to a folder that can be written to") from error
        self._dir = self._scratch.path
        self._environ = {"TMPDIR": str(self._dir)} if parents[0] == parents[1] else {}
        if self._private:
            names = {name: f"ipc://{self._dir}/{name}" for name in asdict(Endpoints()) if name != "bind_host"}
            names["dgds"] = ",".join(f"ipc://{self._dir}/{name}" for name, _ in _dgds(self.config))
            self.config = replace(self.config, endpoints=Endpoints(**names))
        buffer = self.config.buffer
        folders = {name: getattr(buffer, name) or str(self._dir / folder) for name, folder in FOLDERS.items()}
        self.config = replace(self.config, buffer=replace(buffer, **folders))
        if self._pool.starts and self.config.pool.ssd_gib and not self.config.pool.ssd_path:
            disk = replace(self.config.pool, ssd_path=str(self._dir / POOL_DISK))
            self.config = replace(self.config, pool=disk)
        if self._pool.note:
            self._say(self._pool.note)
        try:
            await self._start()
        except BaseException as error:
            self._keep_logs = not isinstance(error, StartError)
            await self._stop(orderly=False)
            raise
        self._announce()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stop(orderly=error is None)

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work`; when the system cannot go on, cancel it and raise `LaunchError`."""
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

    async def restart_buffer(self, settings: BufferConfig) -> None:
        """End the buffer and start one with these settings; everything else stays.

        Engines notice within seconds, drop what they run and register again. Raises `LaunchError`.
        """
        (slot,) = (slot for slot in self._slots if slot.service == "buffer")
        await self._end_watchers("buffer")
        await self._end(self._children("buffer"), LEAVE_SECONDS)
        now = self.config.buffer
        kept = {name: getattr(settings, name) or getattr(now, name) for name in FOLDERS}
        settings = replace(settings, **kept)
        slot.config = self.config = replace(self.config, buffer=settings)
        await self._bring_up(slot)
        slot.watcher = asyncio.create_task(self._watch(slot))

    # --- starting ------------------------------------------------------------------------

    async def _start(self) -> None:
        light = [("buffer", "buffer", self.config), ("context", "context", self.config)]
        light += [("dgds", *shard) for shard in _dgds(self.config)]
        self._slots = [_Slot(*each, {}, SERVICE_START_SECONDS) for each in light]
        shared = asyncio.Lock()
        for plan in self._plans:
            config = replace(self.config, engine=plan.config)
            seconds = plan.config.load_seconds + ENGINE_START_SLACK_SECONDS
            slot = _Slot("engine", plan.config.name, config, {**plan.environ, **self._given}, seconds)
            if plan.shares_device:  # one after the other: engines measure free memory as they start
                slot.gate = shared
            self._slots.append(slot)
        for name in POOL_SERVICES if self._pool.starts else ():
            optional = self._pool.optional
            self._slots.append(_Slot(name, name, self.config, {}, SERVICE_START_SECONDS, optional=optional))
        required = [slot for slot in self._slots if not slot.optional]
        for slot in self._slots:
            if slot.optional:
                slot.watcher = asyncio.create_task(self._start_and_watch(slot))
        try:
            async with asyncio.TaskGroup() as tasks:
                for slot in required:
                    tasks.create_task(self._bring_up(slot))
        except ExceptionGroup as group:
            raise group.exceptions[0] from None
        for slot in required:
            slot.watcher = asyncio.create_task(self._watch(slot))

    def _announce(self) -> None:
        folders = (self.config.shared.model, self.config.buffer.log)
        model, log = (os.path.abspath(each) if each else "" for each in folders)  # noqa: PTH100 - no links
        me = Running(pid=os.getpid(), endpoint=self.endpoint, model=model, log=log, stays=not self._private)
        try:
            self._announced = announce(me)
        except OSError as error:
            self._say(f"note: other commands need --connect {self.endpoint}: {error}")

    async def _bring_up(self, slot: _Slot) -> None:
        slot.ready_at = None
        async with slot.gate:
            environ = self._environ | dict(slot.environ)
            slot.child = await Child.spawn(
                slot.service, slot.name, slot.config, environ, self._dir, logged=self._private
            )
            await slot.child.ready(slot.start_seconds)
        slot.ready_at = asyncio.get_running_loop().time()

    # --- watching ------------------------------------------------------------------------

    async def _start_and_watch(self, slot: _Slot) -> None:
        await self._try(slot)
        await self._watch(slot)

    async def _try(self, slot: _Slot) -> bool:
        try:
            await self._bring_up(slot)
        except LaunchError as error:
            self._say(str(error))
            if slot.child is not None:
                slot.child.kill_group()  # it may still be starting
            return False
        return True

    async def _watch(self, slot: _Slot) -> None:
        while slot.child is not None:
            await slot.child.process.wait()
            self._keep_logs = True
            slot.child.kill_group()  # its own children must not outlive it
            now = asyncio.get_running_loop().time()
            lived = now - slot.ready_at if slot.ready_at else 0.0
            # An engine is ready once it has sampled a request through all of it, and registered.
            pause = slot.restarts.pause(lived, proved=slot.service == "engine" and lived > 0.0)
            if pause is None:
                self._give_up(slot, slot.child)
                return
            self._say(f"{slot.child.exit_report()}\n{slot.name} starts again in {pause:g} s")
            await asyncio.sleep(pause)
            if await self._try(slot):
                self._say(f"{slot.name} is back")

    def _give_up(self, slot: _Slot, child: Child) -> None:
        slot.given_up = True
        failures = slot.restarts.failures
        end = f"{child.exit_report()}\n{slot.name} is given up after {failures} failures in a row"
        engines = [each for each in self._slots if each.service == "engine"]
        left = sum(not each.given_up for each in engines)
        if slot.service in ("context", "dgds", *POOL_SERVICES):
            self._say(f"{end}; rollouts go on without it")
        elif slot.service == "engine" and left:
            self._say(f"{end}; rollouts go on with {left} of {len(engines)} engines")
        elif not self._failure.done():
            self._failure.set_result(LaunchError(end))

    # --- stopping ------------------------------------------------------------------------

    def _children(self, *services: str) -> list[Child]:
        return [slot.child for slot in self._slots if slot.child and slot.service in services]

    async def _stop(self, *, orderly: bool) -> None:
        try:
            if self._drain and orderly:  # engines that end meanwhile are still restarted
                await self._end_watchers("buffer")
                try:
                    await self.run(self._end(self._children("buffer"), DRAIN_SECONDS))
                except LaunchError as error:  # no engine is left to do the work
                    self._say(str(error))
            await self._end_watchers(*SERVICES, *POOL_SERVICES, "engine")
            # Engines next: they send `Goodbye` to the services.
            for services in (("engine",), (*SERVICES, *POOL_SERVICES)):
                await self._end(self._children(*services), LEAVE_SECONDS if orderly else FAILED_SECONDS)
        finally:
            for slot in self._slots:
                if slot.watcher is not None:
                    slot.watcher.cancel()
                if slot.child is not None:
                    slot.child.kill_group()
            self._clean_up()

    async def _end_watchers(self, *services: str) -> None:
        ending = [slot.watcher for slot in self._slots if slot.watcher and slot.service in services]
        for watcher in ending:
            watcher.cancel()
        await asyncio.gather(*ending, return_exceptions=True)

    async def _end(self, children: list[Child], seconds: float) -> None:
        """Give children `seconds` to drain, then stop them, then kill them."""
        for patience in (seconds, STOP_SECONDS):
            for child in children:
                child.terminate()
            await asyncio.gather(*(child.gone(patience) for child in children))
        stuck = [child.name for child in children if child.alive]
        if stuck:
            self._keep_logs = True
            self._say(f"{', '.join(stuck)} did not end {seconds + STOP_SECONDS:g} s after SIGTERM: killed")
        for child in children:
            child.kill_group()
        await asyncio.gather(*(child.gone(STOP_SECONDS) for child in children))

    def _clean_up(self) -> None:
        if self._announced is not None:
            self._announced.close()
        if not (self._keep_logs and self._private):
            self._scratch.close()
            return
        self._say(f"logs are kept in {self._dir}")
        for part in self._dir.iterdir():
            if part.name == LOG:
                continue
            if part.is_dir():
                shutil.rmtree(part, ignore_errors=True)
            elif part.suffix not in (".log", ".toml"):
                part.unlink(missing_ok=True)
        self._scratch.keep()


def _short_temporary_folder() -> str:
    folder = tempfile.gettempdir()
    return folder if len(folder.encode()) <= _MAX_IPC_DIR else "/tmp"  # noqa: S108 - mkdtemp makes it private


def _dgds(config: Config) -> list[tuple[str, Config]]:
    """Return a name and a configuration for each dgds: one per endpoint."""
    count = len(shards(config.endpoints.dgds))
    if count == 1:
        return [("dgds", config)]
    each = (replace(config, dgds=replace(config.dgds, shard=shard)) for shard in range(count))
    return [(f"dgds-{shard}", own) for shard, own in enumerate(each)]


def _refuse_free_ports(endpoints: Endpoints) -> None:
    for name, endpoint in asdict(endpoints).items():
        for each in shards(endpoint):
            if each.startswith("tcp://") and each.endswith(":0"):
                raise ConfigError(
                    f"endpoints.{name} = {each!r}: the other processes must know the port;"
                    " name one, or use ipc://"
                )
