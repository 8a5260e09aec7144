"""Runs Mooncake's master: which blocks the pool holds, and where.

Invariants:
- the service is ready once the master answers on its RPC port and on its HTTP port;
- when the master ends, or does not answer for `SILENCE_SECONDS`, it is restarted, as often as needed, with an
  empty pool; a stall of this process or of the whole machine does not count as silence;
- the master never outlives the service.
"""

from __future__ import annotations

import asyncio

from seer.common.clock import Clock
from seer.common.config import Config
from seer.common.errors import ConfigError, Unreachable
from seer.common.net.transport.base import Transport
from seer.common.pool_metrics import ask_master, port_environment
from seer.common.process.log import get_logger
from seer.common.process.watchdog import Watchdog
from seer.services.pool.child_program import Program, first_ended
from seer.services.pool.settings import CLIENT_SECONDS, PoolError, listen_address, master_program
from seer.services.pool.supervisor import MAX_PROBE_SECONDS, PROBE_SECONDS, supervise

START_SECONDS = 20.0
"""Deadline for the master to answer; it takes a tenth of a second on an idle machine."""

SILENCE_SECONDS = 10.0
"""A master that does not answer for this long hangs."""


def make(config: Config, transport: Transport, clock: Clock) -> PoolMaster:
    """Build the service for `service.run_process`."""
    return PoolMaster(config, clock)


class PoolMaster:
    """One pool's master. Raises `ConfigError` for values that cannot be used."""

    def __init__(self, config: Config, clock: Clock) -> None:
        port_environment(config.pool.ports)
        self._config = config
        self._pool = config.pool
        self._clock = clock
        self._drained = asyncio.Event()
        self._log = get_logger()

    async def start(self) -> dict[str, str]:
        """Start the master and wait until it answers. Raises `ConfigError` when a port is taken."""
        rpc = listen_address(self._config, "pool.master", self._pool.master)
        http = listen_address(self._config, "pool.metrics", self._pool.metrics)
        self._probed = f"{'127.0.0.1' if http[0] == '0.0.0.0' else http[0]}:{http[1]}"  # noqa: S104 - compared
        try:
            self._program = await Program.start([master_program(), *self._flags(rpc, http)], {})
        except OSError as error:
            raise ConfigError(f"{master_program()} cannot be started: {error.strerror}") from error
        try:
            async with asyncio.timeout(START_SECONDS):
                while not await self._answers(rpc):
                    await self._clock.sleep(0.02)
        except BaseException as error:
            await self._program.kill()
            if isinstance(error, TimeoutError):
                raise PoolError(f"Mooncake's master did not answer in {START_SECONDS:g} s") from None
            raise
        return {"pool_master": f"{rpc[0]}:{rpc[1]}", "pool_metrics": f"{http[0]}:{http[1]}"}

    async def run(self) -> None:
        """Keep the master running until drained."""
        try:
            await first_ended(
                self._drained.wait(), supervise("Mooncake's master", self._restart, self._lost, self._clock)
            )
        finally:
            await self._program.kill()

    def drain(self) -> None:
        """Stop the master; the pool's contents are lost with the master."""
        self._drained.set()

    def _flags(self, rpc: tuple[str, int], http: tuple[str, int]) -> list[str]:
        flags = {
            "rpc_address": rpc[0],
            "rpc_port": rpc[1],
            "metrics_host": http[0],
            "metrics_port": http[1],
            "client_ttl": CLIENT_SECONDS,
            "default_kv_lease_ttl": round(self._pool.lease_seconds * 1000),
            "logtostderr": "true",
            "minloglevel": 2,  # errors
            "enable_metric_reporting": "false",  # into its log
        }
        if self._pool.ssd_gib:
            # What is evicted goes to disk; without the second flag it is lost when its memory is needed.
            flags |= {"enable_offload": "true", "offload_on_evict": "true", "promotion_on_hit": "true"}
        return [f"--{name}={value}" for name, value in flags.items()]

    async def _answers(self, rpc: tuple[str, int]) -> bool:
        if self._program.ended:
            raise PoolError(f"Mooncake's master {await self._program.wait()}: its log says why")
        try:
            await ask_master(self._probed, "/health")
            _, writer = await asyncio.open_connection(*rpc)
        except (Unreachable, OSError):
            return False
        writer.close()
        return True

    async def _restart(self) -> None:
        await self._program.kill()  # one that hangs still holds the ports
        await self.start()

    async def _lost(self) -> str:
        return await first_ended(self._end(), self._silence())

    async def _end(self) -> str:
        return f"it {await self._program.wait()}"

    async def _silence(self) -> str:
        watchdog = Watchdog(SILENCE_SECONDS, MAX_PROBE_SECONDS, self._clock.now())
        while True:
            await self._clock.sleep(PROBE_SECONDS)
            try:
                await ask_master(self._probed, "/health")
                silent = False
            except Unreachable as error:
                self._log.warning("the pool's master does not answer", error=str(error))
                silent = True
            if watchdog.expired(self._clock.now(), missing=silent):
                return f"it did not answer for {SILENCE_SECONDS:g} s"
