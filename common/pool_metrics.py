"""Metrics of the KV pool, from its master's HTTP endpoint.

Invariants:
- mooncake is never imported here;
- every request has a deadline; an answer that cannot be read counts as none.
"""

from __future__ import annotations

import asyncio
import re

import msgspec

from seer.common.errors import ConfigError, Unreachable

ANSWER_SECONDS = 3.0
"""Deadline of the master's answer over HTTP; it takes about a millisecond."""

_SAMPLE = re.compile(
    r'^(?P<name>\w+)(?:\{segment="(?P<segment>[^"]*)"\})?'
    r" (?P<value>[0-9]{1,20}(?:\.[0-9]{1,20})?(?:e[+-]?[0-9]{1,2})?)$",
    re.M,
)
"""A line in Prometheus' text format; of labels only `segment` is read."""


class PoolFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Metrics of a pool's master. Sizes in bytes; `owners`: memory in bytes by the owner's name.

    `ssd_reads`: look-ups, since the master started, of blocks that were only on disk.
    """

    keys: int = 0
    dram_used: int = 0
    dram_total: int = 0
    ssd_used: int = 0
    ssd_total: int = 0
    ssd_reads: int = 0
    evicted_keys: int = 0
    owners: dict[str, int] = {}


def port_environment(ports: str) -> dict[str, str]:
    """Return the variables by which Mooncake keeps to `pool.ports`. Raises `ConfigError`."""
    found = re.fullmatch(r"([0-9]{1,5})-([0-9]{1,5})", ports)
    if found is None or not 1024 <= int(found[1]) < int(found[2]) < 2**16:
        raise ConfigError(f"pool.ports = {ports!r}: write FIRST-LAST, of 1024 to 65535, two a process")
    return {"MC_MIN_RPC_PORT": found[1], "MC_MAX_RPC_PORT": found[2]}


async def ask_master(metrics: str, path: str = "/metrics", seconds: float = ANSWER_SECONDS) -> str:
    """Return the body of the master's answer at `metrics` (`host:port`). Raises `Unreachable`."""
    host, _, port = metrics.rpartition(":")
    try:
        async with asyncio.timeout(seconds):
            reader, writer = await asyncio.open_connection(host, int(port))
            try:
                writer.write(f"GET {path} HTTP/1.1\r\nHost: {metrics}\r\nConnection: close\r\n\r\n".encode())
                status = await reader.readline()
                length = 0
                while (line := await reader.readline()).strip():
                    name, _, value = line.decode("latin-1").partition(":")
                    length = int(value) if name.lower() == "content-length" else length
                body = await reader.readexactly(length)
            finally:
                writer.close()
    except TimeoutError:
        raise Unreachable(f"pool.metrics = {metrics!r}: no answer in {seconds:g} s") from None
    except (OSError, ValueError, asyncio.IncompleteReadError) as error:
        raise Unreachable(f"pool.metrics = {metrics!r}: {error}") from error
    if b" 200 " not in status:
        raise Unreachable(f"pool.metrics = {metrics!r}: answers {status.decode('latin-1').strip()!r}")
    return body.decode(errors="replace")


def read_figures(text: str) -> PoolFigures:
    """Read the master's answer at `/metrics`; missing metrics are 0."""
    values: dict[str, float] = {}
    owners: dict[str, int] = {}
    for sample in _SAMPLE.finditer(text):
        if sample["segment"] is None:
            values[sample["name"]] = float(sample["value"])
        elif sample["name"] == "segment_total_capacity_bytes":
            owners[sample["segment"]] = int(float(sample["value"]))

    def value(name: str) -> int:
        return int(values.get(name, 0))

    return PoolFigures(
        keys=value("master_key_count"),
        dram_used=value("master_allocated_bytes"),
        dram_total=value("master_total_capacity_bytes"),
        ssd_used=value("master_allocated_file_size_bytes"),
        ssd_total=value("master_total_file_capacity_bytes"),
        ssd_reads=value("file_cache_hit_nums_"),
        evicted_keys=value("master_evicted_key_count"),
        owners=owners,
    )
