"""Whether a system on this machine uses a KV pool, and whether it starts one.

Invariants:
- `pool.kind = auto` is decided here, once for all processes of the system;
- a pool whose master has an address of this machine is started with the system; another one is only used;
- Mooncake is not imported in this process.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys

import msgspec
from msgspec.structs import replace

from seer.common.config import POOL_SHARE, EngineConfig, PoolConfig
from seer.common.errors import InvalidField
from seer.common.process.memory_limit import free_bytes

POOL_SERVICES = ("pool-master", "pool-owner")

TRY_IMPORT = "from seer.common.mooncake import load_cuda_runtime as load; load(); import mooncake.store"

IMPORT_SECONDS = 60.0
"""Deadline of the import; it takes a tenth of a second once its files are in the page cache."""

FIX = "install the extra cpu or cuda13, and Debian's libibverbs1; or choose none"


class PoolPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The decision. `starts`: the system starts the pool; `optional`: it goes on if that fails.

    `note` is a line for the user, empty if there was nothing to decide.
    """

    config: PoolConfig
    starts: bool = False
    optional: bool = False
    note: str = ""


def plan_pool(pool: PoolConfig, engine: EngineConfig, *, private: bool) -> PoolPlan:
    """Decide. With `private`, a pool that is started listens on free loopback ports.

    Raises `InvalidField` when a pool is configured that cannot be used.
    """
    auto = pool.kind == "auto"
    if pool.kind == "none" or (auto and engine.backend != "vllm"):
        return PoolPlan(config=replace(pool, kind="none"))
    if problem := import_problem():
        if auto:
            note = f"KV pool: none, as Mooncake cannot be imported ({problem})"
            return PoolPlan(config=replace(pool, kind="none"), note=note)
        raise InvalidField("pool.kind", "mooncake", f"Mooncake cannot be imported ({problem}): {FIX}")
    pool = replace(pool, kind="mooncake")
    if not _is_here(pool.master):
        return PoolPlan(config=pool, note=f"KV pool: mooncake, joined at {pool.master}")
    if private:
        master, metrics = (f"127.0.0.1:{port}" for port in _free_ports(2))
        pool = replace(pool, master=master, metrics=metrics)
    if pool.dram_gib is None:
        pool = replace(pool, dram_gib=round(free_bytes() * POOL_SHARE / 2**30, 2) or None)
    why = " (Mooncake is installed)" if auto else ""
    memory = f", at most {pool.dram_gib:g} GiB of memory" if pool.dram_gib else ""
    disk = f" and {pool.ssd_gib:g} GiB of disk" if pool.ssd_gib else ""
    at = "" if private else f" at {pool.master}"
    note = f"KV pool: mooncake{at}{why}{memory}{disk}"
    return PoolPlan(config=pool, starts=True, optional=auto, note=note)


def import_problem() -> str:
    """Return why Mooncake cannot be imported; empty: it can be."""
    return problem_of_import(TRY_IMPORT, IMPORT_SECONDS)


def problem_of_import(code: str, seconds: float) -> str:
    """Return the last line of what went wrong when a bare process ran `code`; empty if it ended well."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=seconds, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"not in {seconds:g} s"
    if done.returncode == 0:
        return ""
    return (done.stderr.strip().splitlines() or [f"ended with {done.returncode}"])[-1]


def _is_here(address: str) -> bool:
    """Return whether this is an address of this machine: whether one can listen on it."""
    host, _, _ = address.rpartition(":")
    with contextlib.suppress(OSError), socket.create_server((host, 0)):
        return True
    return False


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:  # open at the same time, so that all differ
        taken = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [int(each.getsockname()[1]) for each in taken]
