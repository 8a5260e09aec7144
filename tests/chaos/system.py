"""A system of real processes that can be killed, stopped and cut off, and that is looked after meanwhile.

Invariants:
- whoever dies is started again at once, in the same place; an end that nobody brought about is noted;
- every process ends with this one;
- what is left behind at the end (processes, files) is told.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Self

import psutil
from msgspec.structs import replace

from chaos import trainer
from chaos.network import Network
from seer.cli.keys import add, init
from seer.client import RolloutClient
from seer.common.config import Config, Endpoints, EngineConfig, ReplayConfig, SecurityConfig, SharedConfig
from seer.local.child import Child, LaunchError
from seer.local.hardware import plan_engines

READY_SECONDS = 600.0
LEAVE_SECONDS = 60.0
"""Longest orderly end: the buffer's includes `result_ttl_seconds` for groups of killed trainers, and vLLM and
Mooncake need half of it to say goodbye on a busy machine."""

SPAWN_SECONDS = 10.0
"""For so long nobody may know a process yet that another task starts on a busy machine."""

MAX_FILES = 150
"""Open files of a process; a connection or a pipe that leaks with each fault gets there soon."""

OF_VLLM = ("vllm_dist_", "torchinductor_")
"""Temporary folders that vLLM and torch cannot remove when they are killed."""

PORTS = {
    "buffer": ("trainers", "engines", "events", "event_snapshots"),
    "context": ("estimates", "estimate_snapshots"),
    "dgds": ("dgds",),
}
"""Who binds what."""

PROGRAM_LOST = 2
"""Exit code of a pool's service whose program is lost or hangs."""

REJOINED = "the buffer forgot this engine: registering again"
"""What an engine logs when it registers again."""

POOL = ("pool-master", "pool-owner")
CHILD_OF = {"pool-program": "pool-master", "pool-holder": "pool-owner"}
"""What the pool's services run: Mooncake's master, and the process that holds the memory."""


def replay(step_seconds: float = 0.1) -> Config:
    """Return a configuration with small replay engines and, else, what users get."""
    return Config(
        engine=EngineConfig(
            backend="replay", max_num_seqs=8, max_model_len=512, kv_blocks=64,
            replay=ReplayConfig(step_seconds=step_seconds, mean_tokens=50),
        )
    )  # fmt: skip


@dataclass(slots=True)
class Use:
    """What a process holds: resident MiB and open files."""

    mib: float
    files: int


@dataclass(slots=True)
class _Slot:
    service: str
    config: Config
    environ: dict[str, str]
    child: Child | None = None
    incarnations: int = 0


@dataclass(slots=True)
class _Trained:
    """A trainer's process, if it runs, and where it writes."""

    job: Path
    out: Path
    process: asyncio.subprocess.Process | None = None
    deaths: list[int] = field(default_factory=list)


class System:
    """Use as `async with System(config) as system`; with `model`, its engines are vLLM's.

    Sockets are ipc files; with `tcp`, on a loopback address of its own; with `net`, each process is in a
    namespace of that network. Over TCP each process has a key. `environ` is what services get beside their folder for temporary files.
    """

    _made = 0

    def __init__(
        self,
        config: Config,
        engines: int = 2,
        *,
        model: Path | None = None,
        tcp: bool = False,
        net: Network | None = None,
        trainers: tuple[str, ...] = ("trainer",),
        environ: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        System._made += 1
        self.net, self._environ = net, environ
        self.deaths: list[str] = []
        self.folder = Path(tempfile.mkdtemp(prefix="chaos-", dir="/tmp"))  # short: socket paths are
        self.temporary = self.folder / "tmp"
        self.temporary.mkdir()
        self.engines = [f"engine-{i}" for i in range(engines)]
        self.trainers = {
            name: _Trained(self.folder / f"{name}.json", self.folder / f"{name}.out") for name in trainers
        }
        host = f"127.{1 + os.getpid() % 250}.{1 + System._made % 250}.1"
        at = self._endpoints(host if tcp else "")
        self.config = replace(config, endpoints=at, shared=SharedConfig(model=str(model or "")))
        self._keys = self.folder / "keys" if tcp or net is not None else None
        if self._keys is not None:
            init(self._keys)
            users = [f"trainer:{name}" for name in trainers] + [f"engine:{name}" for name in self.engines]
            add(self._keys, users, "")
        if config.pool.kind == "mooncake":
            if net is not None:
                for name in POOL:
                    net.add(name)
                host = net.address("pool-master")
            ports = {"master": f"{host}:7108", "metrics": f"{host}:7109"}
            self.config = replace(self.config, pool=replace(config.pool, **ports))
        self._slots: dict[str, _Slot] = {}
        self._keepers: list[asyncio.Task[None]] = []
        self._closing = False

    def security(self, key: str) -> SecurityConfig:
        """Return what the holder of a key, by its file's name, configures."""
        if self._keys is None:
            return SecurityConfig()
        public = self._keys / "public"
        return SecurityConfig(
            key=str(self._keys / f"{key}.key"), peers=str(public / "peers"), server=str(public / "server.pub")
        )

    def client(self, name: str) -> RolloutClient:
        """Return a client of this process, which is one of the trainers."""
        security = self.security(f"trainer-{name}")
        return RolloutClient(self.config.endpoints.trainers, name=name, security=security)

    def _endpoints(self, host: str) -> Endpoints:
        found = {}
        if self.net is not None:
            for name in (*PORTS, *self.engines, *self.trainers):
                self.net.add(name)
        number = 7101
        for owner, names in PORTS.items():
            for name in names:
                where = self.net.address(owner) if self.net else host
                found[name] = f"tcp://{where}:{number}" if where else f"ipc://{self.folder}/{name}"
                number += 1
        return Endpoints(**found)

    async def __aenter__(self) -> Self:
        light = {"TMPDIR": str(self.temporary), **self._environ}
        services = replace(self.config, security=self.security("server"))
        for name in PORTS:
            self._slots[name] = _Slot(name, services, light)
        for plan in plan_engines(self.config.engine, len(self.engines)):
            security = self.security(f"engine-{plan.config.name}")
            config = replace(self.config, engine=plan.config, security=security)
            self._slots[plan.config.name] = _Slot("engine", config, light | plan.environ)
        for name in POOL if self.config.pool.kind == "mooncake" else ():
            self._slots[name] = _Slot(name, self.config, light)
        try:
            await asyncio.gather(*(self._start(name) for name in self._slots))
        except BaseException:
            await self._end()
            raise
        self._keepers = [asyncio.create_task(self._keep(name)) for name in self._slots]
        return self

    async def __aexit__(self, *_: object) -> None:
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        await self._end()

    async def _end(self) -> None:
        # The buffer first, with engines for what a killed trainer left unfinished.
        for services in (("buffer",), ("engine",), ("context", "dgds", *POOL)):
            slots = [slot for slot in self._slots.values() if slot.service in services]
            children = [slot.child for slot in slots if slot.child]
            for child in children:
                child.terminate()
            await asyncio.gather(*(child.gone(LEAVE_SECONDS) for child in children))
            for child in children:
                if child.alive:
                    self.deaths.append(f"{child.name} did not leave in {LEAVE_SECONDS:g} s")
                child.kill_group()
                await child.gone(LEAVE_SECONDS)

    def leftovers(self) -> list[str]:
        """Return what the system left after its end, and remove its folder if that is nothing."""
        left = [*self.deaths, *(f"process {pid}: {words}" for pid, words in self.processes().items())]
        ours = {f"{name}.{kind}" for name in self._slots for kind in ("toml", "log")}
        ours |= {f"{name}.{kind}" for name in self.trainers for kind in ("json", "out", "log")}
        ours |= {"tmp", "spool", "keys", "images", "log"}
        left += [path.name for path in self.folder.iterdir() if path.name not in ours]
        temporary = [path.name for path in self.temporary.iterdir()]
        left += [f"tmp/{name}" for name in temporary if not name.startswith(OF_VLLM)]
        if not left:
            shutil.rmtree(self.folder)
        return left

    def processes(self) -> dict[int, str]:
        """Return the living processes that were started with a file in our folder."""
        found = {}
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                words = (entry / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
                if entry.name.isdecimal() and str(self.folder) in words:
                    found[int(entry.name)] = words
        return found

    # --- looking at it -------------------------------------------------------------------

    def pid(self, name: str) -> int | None:
        """Return the process that is `name` now; None when nobody is."""
        if name in CHILD_OF:
            parent = self.pid(CHILD_OF[name])
            children = Path(f"/proc/{parent}/task/{parent}/children")
            found = children.read_text().split() if children.exists() else []
            return int(found[0]) if found else None
        trained = self.trainers.get(name)
        process = trained.process if trained else self._slots[name].child.process
        return None if process is None or process.returncode is not None else process.pid

    def signal(self, name: str, number: int) -> bool:
        """Send a signal; return whether there was anybody to get it."""
        pid = self.pid(name)
        if pid is None:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
            return True
        return False

    def log(self, name: str) -> str:
        """Return what a process logged."""
        path = self.folder / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def rejoins(self) -> dict[str, int]:
        """Count, by engine, how often this incarnation of it registered again."""
        return {name: self.log(name).count(REJOINED) for name in self.engines}

    def incarnations(self) -> dict[str, int]:
        """Count the incarnations of each service."""
        return {name: slot.incarnations for name, slot in self._slots.items()}

    def use(self) -> dict[str, Use]:
        """Measure each service's process."""
        found = {}
        for name in self._slots:
            with contextlib.suppress(OSError, IndexError):  # it is gone, or ends just now
                here = Path(f"/proc/{self.pid(name)}")
                kib = (here / "status").read_text().partition("VmRSS:")[2].split()[0]
                found[name] = Use(int(kib) / 1024, len(list((here / "fd").iterdir())))
        return found

    def leaks(self) -> list[str]:
        """Return ends that nobody brought about, processes that are there twice, files that pile up."""
        problems = list(self.deaths)
        self.deaths.clear()
        living = self.processes()
        files = Counter(file for words in living.values() for file in words.split() if file.endswith(".toml"))
        problems += [f"{count} processes of {file}" for file, count in files.items() if count > 1]
        busy = {self.pid(name) for name in self.trainers}
        lost = {pid: words for pid, words in living.items() if trainer.__file__ in words and pid not in busy}
        problems += [f"a trainer lives on: {words}" for pid, words in lost.items() if not _is_new(pid)]
        for name, use in self.use().items():
            if use.files > MAX_FILES:
                problems.append(f"{use.files} open files in {name}")
        return problems

    # --- keeping up ----------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def place(self, name: str) -> AsyncIterator[None]:
        """Have what is started meanwhile be where `name` is."""
        if self.net is None:
            yield
            return
        async with self.net.entering:
            with self.net.inside(name):
                yield

    async def _start(self, name: str) -> None:
        slot = self._slots[name]
        slot.incarnations += 1
        async with self.place(name):
            slot.child = await Child.spawn(
                slot.service, name, slot.config, slot.environ, self.folder, logged=True
            )
        await slot.child.ready(READY_SECONDS)

    async def _keep(self, name: str) -> None:
        while True:
            await self._slots[name].child.process.wait()
            self.note_death(name, self._slots[name].child.process.returncode)
            with contextlib.suppress(LaunchError):  # killed while it started
                await self._start(name)

    def note_death(self, name: str, code: int | None) -> None:
        """Note an end that was not a kill; the pool's services may end by themselves to be started again."""
        if code != -signal.SIGKILL and (name not in POOL or code != PROGRAM_LOST):
            self.deaths.append(f"{name} ended with {code}; its log is in {self.folder}")


def _is_new(pid: int) -> bool:
    try:
        return time.time() - psutil.Process(pid).create_time() < SPAWN_SECONDS
    except psutil.NoSuchProcess:
        return True  # it ended meanwhile
