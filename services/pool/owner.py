"""Owns the pool's memory and disk, so that KV outlives the engines that computed it.

The memory is a Mooncake segment, which a child process (`memory_process.py`) mounts.

Invariants:
- the service is ready once the master lists its segment; it waits for a master that is not there yet;
- a restarted master gets the segment back within seconds (Mooncake sees to that), with nothing in it;
- when the master does not list it for `MISSING_SECONDS`, or the holder ended, the holder is restarted
  with an empty segment, as often as needed; a stall of this process or of the whole machine does not count;
- a disk folder has one owner; what an earlier owner left in it is removed;
- the folder is emptied when the service ends.
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
from seer.common.pool_metrics import ask_master, port_environment, read_figures
from seer.common.process.log import get_logger
from seer.common.process.memory_limit import free_bytes
from seer.common.process.watchdog import Watchdog
from seer.common.weights.mooncake import own_address
from seer.services.pool.child_program import Program, first_ended
from seer.services.pool.memory_process import READY, SegmentConfig
from seer.services.pool.settings import PoolError
from seer.services.pool.supervisor import MAX_PROBE_SECONDS, PROBE_SECONDS, supervise

START_SECONDS = 50.0
"""Deadline for meeting the master and mounting the segment; shorter than the launcher's own."""

RETRY_SECONDS = 0.5

MISSING_SECONDS = 15.0
"""Mooncake tells a new master of the segment within 5 s."""

_BUFFER_BYTES = 2**28
"""Mooncake's buffer for disk reads. Its default of 1.25 GiB takes seconds to be zeroed."""

_BUCKET_BYTES = 2**24
"""Size of one write to disk. Mooncake writes only full buckets, and evicts nothing from memory before it is
written: its default of 256 MiB would be a quarter of a small pool."""

_BUCKETS = 16
"""Memory holds at least so many buckets: with 4, a pool of 64 MiB stayed full for 8 s."""

_ENVIRONMENT = {"MC_LOG_LEVEL": "ERROR", "MC_RPC_TIMEOUT_MS": "2000", "MC_STORE_CLIENT_SETUP_RETRIES": "1"}
"""Without these, a call to a master that hangs takes 30 s."""


def make(config: Config, transport: Transport, clock: Clock) -> PoolOwner:
    """Build the service for `service.run_process`."""
    return PoolOwner(config.pool, clock)


class PoolOwner:
    """One owner. Raises `ConfigError` for values that cannot be used."""

    def __init__(self, pool: PoolConfig, clock: Clock) -> None:
        self._pool = pool
        self._clock = clock
        self._dram_bytes = _dram_bytes(pool)
        self._folder: Folder | None = None
        self._program: Program | None = None
        self._drained = asyncio.Event()
        self._log = get_logger()

    async def start(self) -> dict[str, str]:
        """Take the disk folder and mount the segment. Raises `SeerError` when either cannot be had."""
        if self._pool.ssd_gib:
            self._folder = Folder(self._pool.ssd_path, int(self._pool.ssd_gib * 2**30))
        try:
            await self._begin()
        except BaseException:
            await self._release()
            raise
        return {"pool_owner": self._name}

    async def run(self) -> None:
        """Keep the segment mounted until drained."""
        try:
            await first_ended(
                self._drained.wait(), supervise("the pool's memory", self._restart, self._lost, self._clock)
            )
        finally:
            await self._release()

    def drain(self) -> None:
        """Give up memory and disk. The master notices within seconds."""
        self._drained.set()

    async def _begin(self) -> None:
        try:
            async with asyncio.timeout(START_SECONDS):
                host = await self._wait_for_master()
                self._name = await self._mount(host)
        except TimeoutError:
            why = f"could not be joined in {START_SECONDS:g} s; is the master there?"
            raise Unreachable(f"pool.master = {self._pool.master!r}: {why}") from None

    async def _restart(self) -> None:
        if self._program:
            await self._program.kill()
            if not self._program.ended:
                raise PoolError("the process that holds the pool's memory was killed, but does not end")
        if self._folder:
            self._folder.empty()
        await self._begin()

    async def _wait_for_master(self) -> str:
        """Wait until the master's port answers; return the address by which this machine reaches it."""
        host, _, port = self._pool.master.rpartition(":")
        while True:
            try:
                _, writer = await asyncio.open_connection(host, int(port))
                writer.close()
                return self._pool.host or await asyncio.to_thread(own_address, self._pool.master)
            except OSError as error:
                self._log.debug("the pool's master is not there yet", error=str(error))
                await asyncio.sleep(RETRY_SECONDS)

    async def _mount(self, host: str) -> str:
        segment = SegmentConfig(
            host=host,
            master=self._pool.master,
            protocol=self._pool.protocol,
            device=self._pool.device,
            dram_bytes=self._dram_bytes,
            ssd_path=str(self._folder.path) if self._folder else "",
        )
        command = [
            sys.executable,
            "-m",
            "seer.services.pool.memory_process",
            msgspec.json.encode(segment).decode(),
        ]
        environment = (
            _ENVIRONMENT
            | port_environment(self._pool.ports)
            | _disk_environment(self._pool, self._dram_bytes)
        )
        program = self._program = await Program.start(command, environment)
        said = await program.line()
        if not said.startswith(READY):
            raise PoolError(said or f"the process that should hold the pool's memory {await program.wait()}")
        return said.removeprefix(READY)

    async def _release(self) -> None:
        if self._program:
            await self._program.kill()
        if self._folder:
            self._folder.close()

    async def _lost(self) -> str:
        return await first_ended(self._end(), self._missing())

    async def _end(self) -> str:
        return f"its holder {await self._program.wait()}" if self._program else "it has no holder"

    async def _missing(self) -> str:
        watchdog, answers = Watchdog(MISSING_SECONDS, MAX_PROBE_SECONDS, self._clock.now()), True
        while True:
            await self._clock.sleep(PROBE_SECONDS)
            try:
                listed = self._name in read_figures(await ask_master(self._pool.metrics)).owners
                if listed and not answers:
                    self._log.info("the pool's master lists this memory again")
                answers = answers or listed
                missing = not listed
            except Unreachable as error:
                if answers:
                    self._log.warning("the pool's master does not answer", error=str(error))
                answers = missing = False  # the master's failure: our segment may be fine
            if watchdog.expired(self._clock.now(), missing=missing):
                return f"the master answers, but did not list it for {MISSING_SECONDS:g} s"


class Folder:
    """A folder in `pool.ssd_path` for one owner alone, empty at first and removed in the end.

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
        self.path.mkdir(0o700, exist_ok=True)
        self.path.chmod(0o700)

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
    if free and wanted > free:  # memory is only taken as it is used: Mooncake would fail too late
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
