"""Owns the pool's memory and disk, so that KV outlives the engines that computed it.

Invariants:
- it is ready once the master counts on its memory; a master that is not there yet is waited for;
- a master that is started again gets the memory back within seconds: Mooncake's own doing, and what
  was in memory is forgotten;
- memory that the master does not list for `MISSING_SECONDS`, or whose holder ended, is held anew in
  place, empty, as often as that takes; a stall of this process or of the whole machine is no absence;
- nothing is held twice: a disk folder has one owner, and what an earlier one left there is removed;
- nothing is left behind: the folder is emptied on the way out.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import sys
import tempfile
from pathlib import Path

import msgspec

from seer.common.clock import Clock
from seer.common.config import POOL_SHARE, Config, PoolConfig
from seer.common.errors import ConfigError, Unreachable
from seer.common.net.transport.base import Transport
from seer.common.pool import ask_master, read_figures
from seer.common.process.log import get_logger
from seer.common.process.memory import free_bytes
from seer.common.weights.mooncake import own_address
from seer.services.pool.holder import READY, Holding
from seer.services.pool.keeping import PROBE_SECONDS, Absence, keep
from seer.services.pool.program import Program, first_ended
from seer.services.pool.settings import PoolError, check

START_SECONDS = 50.0
"""Deadline for the master to be there and the memory to be held; under the launcher's own."""

RETRY_SECONDS = 0.5

MISSING_SECONDS = 15.0
"""Mooncake gives a new master the memory within 5 s."""

_BUFFER_BYTES = 2**28
"""Mooncake's buffer for what is read of the disk. Its own 1.25 GiB takes seconds to be zeroed."""

_BUCKET_BYTES = 2**24
"""What is written at once, at most; nothing is written before so much is there, and nothing leaves
memory before it is written. Mooncake's own 256 MiB is a quarter of a small pool."""

_BUCKETS = 16
"""Memory holds at least so many: with 4, a pool of 64 MiB stayed full for 8 s."""

_ENVIRONMENT = {"MC_LOG_LEVEL": "ERROR", "MC_RPC_TIMEOUT_MS": "2000", "MC_STORE_CLIENT_SETUP_RETRIES": "1"}
"""A master that hangs holds a call for 30 s otherwise."""


def make(config: Config, transport: Transport, clock: Clock) -> PoolOwner:
    """Build the service for `service.run_process`."""
    return PoolOwner(config.pool, clock)


class PoolOwner:
    """One owner. Raises `ConfigError` for values that cannot be used."""

    def __init__(self, pool: PoolConfig, clock: Clock) -> None:
        check(pool)
        self._pool = pool
        self._clock = clock
        self._dram_bytes = _dram_bytes(pool)
        self._folder: Folder | None = None
        self._program: Program | None = None
        self._drained = asyncio.Event()
        self._log = get_logger()

    async def start(self) -> dict[str, str]:
        """Hold the memory and the disk. Raises `SeerError` when either cannot be had."""
        if self._pool.ssd_gib:
            self._folder = Folder(self._pool.ssd_path, int(self._pool.ssd_gib * 2**30))
        try:
            await self._begin()
        except BaseException:
            await self._release()
            raise
        return {"pool_owner": self._name}

    async def run(self) -> None:
        """Keep what is held until drained."""
        try:
            await first_ended(
                self._drained.wait(), keep("the pool's memory", self._begin_anew, self._lost, self._clock)
            )
        finally:
            await self._release()

    def drain(self) -> None:
        """Let go of all that is held. The pool notices within seconds."""
        self._drained.set()

    async def _begin(self) -> None:
        try:
            async with asyncio.timeout(START_SECONDS):
                host = await self._meet_master()
                self._name = await self._hold(host)
        except TimeoutError:
            why = f"could not be joined in {START_SECONDS:g} s; is the master there?"
            raise Unreachable(f"pool.master = {self._pool.master!r}: {why}") from None

    async def _begin_anew(self) -> None:
        if self._program:
            await self._program.kill()
            if not self._program.ended:
                raise PoolError("what held the pool's memory was killed and does not end")
        if self._folder:
            self._folder.empty()
        await self._begin()

    async def _meet_master(self) -> str:
        """Wait until the master's port answers; return this machine's address on the way there."""
        host, _, port = self._pool.master.rpartition(":")
        while True:
            try:
                _, writer = await asyncio.open_connection(host, int(port))
                writer.close()
                return self._pool.host or await asyncio.to_thread(own_address, self._pool.master)
            except OSError as error:
                self._log.debug("the pool's master is not there yet", error=str(error))
                await asyncio.sleep(RETRY_SECONDS)

    async def _hold(self, host: str) -> str:
        holding = Holding(
            host=host,
            master=self._pool.master,
            protocol=self._pool.protocol,
            device=self._pool.device,
            dram_bytes=self._dram_bytes,
            ssd_path=str(self._folder.path) if self._folder else "",
        )
        command = [sys.executable, "-m", "seer.services.pool.holder", msgspec.json.encode(holding).decode()]
        environment = _ENVIRONMENT | _disk_environment(self._pool, self._dram_bytes)
        program = self._program = await Program.start(command, environment)
        said = await program.line()
        if not said.startswith(READY):
            raise PoolError(said or f"what was to hold the pool's memory {await program.wait()}")
        return said.removeprefix(READY)

    async def _release(self) -> None:
        if self._program:
            await self._program.kill()
        if self._folder:
            self._folder.close()

    async def _lost(self) -> str:
        return await first_ended(self._end(), self._missing())

    async def _end(self) -> str:
        return f"what held it {await self._program.wait()}" if self._program else "nothing holds it"

    async def _missing(self) -> str:
        absence, answers = Absence(MISSING_SECONDS, self._clock.now()), True
        while True:
            await self._clock.sleep(PROBE_SECONDS)
            try:
                listed = self._name in read_figures(await ask_master(self._pool.metrics)).owners
                if listed and not answers:
                    self._log.info("the pool's master counts on this memory again")
                answers = answers or listed
                missing = not listed
            except Unreachable as error:
                if answers:
                    self._log.warning("the pool's master does not tell what it counts on", error=str(error))
                answers = missing = False  # nothing is known: that is not our end
            if absence.gone(self._clock.now(), missing=missing):
                return f"the master answers, but did not count on it for {MISSING_SECONDS:g} s"


class Folder:
    """A part of `pool.ssd_path` that one owner has to itself, empty at first and removed in the end.

    Raises `ConfigError` when the folder cannot be used. An empty `path`: a temporary folder.
    """

    def __init__(self, path: str, size: int) -> None:
        self._temporary = not path
        try:
            self._root = Path(path or tempfile.mkdtemp(prefix="seer-pool-"))
            self._root.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self._root, os.O_RDONLY)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.path = self._root / "kv"
            self.empty()
            free = shutil.disk_usage(self.path).free
        except BlockingIOError:
            raise ConfigError(
                f"pool.ssd_path = {path!r}: another owner uses it; give another folder"
            ) from None
        except OSError as error:
            why = f"{error.strerror}; give a folder that can be written to"
            raise ConfigError(f"pool.ssd_path = {path!r}: {why}") from error
        if size > free:
            self.close()
            fits = f"only {free / 2**30:.1f} GiB are free in {self._root}; give less"
            raise ConfigError(f"pool.ssd_gib = {size / 2**30:g}: {fits}")

    def empty(self) -> None:
        """Remove what was written. Raises `OSError`."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.path.mkdir(exist_ok=True)

    def close(self) -> None:
        """Remove what was written, and let go of the folder."""
        shutil.rmtree(self._root if self._temporary else self.path, ignore_errors=True)
        os.close(self._lock)


def _dram_bytes(pool: PoolConfig) -> int:
    free = free_bytes()
    if pool.dram_gib is None:
        if not free:
            raise ConfigError("pool.dram_gib: this machine does not tell its free memory: give a number")
        return int(free * POOL_SHARE)
    wanted = int(pool.dram_gib * 2**30)
    if free and wanted > free:  # it is only taken as it is used: Mooncake would notice when it is too late
        fits = f"only {free / 2**30:.1f} GiB are free here; give less"
        raise ConfigError(f"pool.dram_gib = {pool.dram_gib:g}: {fits}")
    return wanted


def _disk_environment(pool: PoolConfig, dram_bytes: int) -> dict[str, str]:
    if not pool.ssd_gib:
        return {}
    size = str(int(pool.ssd_gib * 2**30))
    return {
        "MOONCAKE_OFFLOAD_TOTAL_SIZE_LIMIT_BYTES": size,  # what the master is told
        "MOONCAKE_OFFLOAD_BUCKET_MAX_TOTAL_SIZE": size,  # what is kept to
        "MOONCAKE_OFFLOAD_BUCKET_EVICTION_POLICY": "lru",
        "MOONCAKE_OFFLOAD_BUCKET_SIZE_LIMIT_BYTES": str(min(_BUCKET_BYTES, dram_bytes // _BUCKETS)),
        "MOONCAKE_OFFLOAD_LOCAL_BUFFER_SIZE_BYTES": str(_BUFFER_BYTES),
        "MOONCAKE_OFFLOAD_HEARTBEAT_INTERVAL_SECONDS": "1",
    }
