"""Whether a local system has a KV pool, what its master tells, and what is said of it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import pytest

from seer.common.config import EngineConfig, PoolConfig, load
from seer.common.errors import ConfigError, InvalidField, Unreachable
from seer.common.pool_metrics import PoolFigures, ask_master, read_figures
from seer.common.types import InstanceStats
from seer.local import pool_plan
from seer.local.pool_plan import PoolPlan, plan_pool
from seer.report.engine_use import figures_text, pool_text, pool_used, total

VLLM, REPLAY = EngineConfig(), EngineConfig(backend="replay")
ELSEWHERE = "203.0.113.1:7108"  # kept free for documentation
BROKEN = "ImportError: libibverbs.so.1: cannot open shared object file"


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_plan, "import_problem", lambda: "")


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_plan, "import_problem", lambda: BROKEN)


def none(said: str = "") -> PoolPlan:
    return PoolPlan(config=PoolConfig(kind="none"), note=said)


@pytest.mark.parametrize(("kind", "engine"), [("none", VLLM), ("none", REPLAY), ("auto", REPLAY)])
def test_no_pool_where_none_is_wanted_or_of_use(
    monkeypatch: pytest.MonkeyPatch, kind: str, engine: EngineConfig
) -> None:
    monkeypatch.delattr(pool_plan, "import_problem")  # nothing is tried
    assert plan_pool(PoolConfig(kind=kind), engine, private=True) == none()


@pytest.mark.usefixtures("broken")
def test_auto_does_without_what_cannot_be_imported() -> None:
    said = f"KV pool: none, as Mooncake cannot be imported ({BROKEN})"
    assert plan_pool(PoolConfig(), VLLM, private=True) == none(said)


@pytest.mark.usefixtures("broken")
def test_what_is_asked_for_and_cannot_be_imported_is_refused() -> None:
    with pytest.raises(InvalidField, match=r"pool\.kind = 'mooncake': .*libibverbs\.so\.1.*libibverbs1"):
        plan_pool(PoolConfig(kind="mooncake"), VLLM, private=False)


@pytest.mark.parametrize(("kind", "optional"), [("auto", True), ("mooncake", False)])
def test_a_pool_of_this_machine_is_started(kind: str, optional: bool) -> None:
    plan = plan_pool(PoolConfig(kind=kind, dram_gib=2), VLLM, private=False)
    assert plan.config == PoolConfig(kind="mooncake", dram_gib=2)
    assert (plan.starts, plan.optional) == (True, optional)
    assert plan.note.startswith(f"KV pool: mooncake at {PoolConfig().master}")
    assert plan.note.endswith(", at most 2 GiB of memory")


def test_a_private_one_has_free_ports_of_its_own() -> None:
    plan = plan_pool(PoolConfig(kind="mooncake"), REPLAY, private=True)
    addresses = {plan.config.master, plan.config.metrics, PoolConfig().master, PoolConfig().metrics}
    assert len(addresses) == 4
    for address in (plan.config.master, plan.config.metrics):
        host, _, port = address.rpartition(":")
        socket.create_server((host, int(port))).close()


def test_its_memory_is_a_share_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_plan, "free_bytes", lambda: 20 * 2**30)
    assert plan_pool(PoolConfig(), VLLM, private=False).config.dram_gib == 2.0
    monkeypatch.setattr(pool_plan, "free_bytes", lambda: 0)
    assert plan_pool(PoolConfig(), VLLM, private=False).config.dram_gib is None  # the owner says so


@pytest.mark.parametrize("private", [True, False])
def test_one_elsewhere_is_joined(private: bool) -> None:
    pool = PoolConfig(master=ELSEWHERE)
    plan = plan_pool(pool, VLLM, private=private)
    assert (plan.config.kind, plan.config.master, plan.starts) == ("mooncake", ELSEWHERE, False)
    assert plan.note == f"KV pool: mooncake, joined at {ELSEWHERE}"


def test_what_python_says_of_the_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(pool_plan.sys, "executable", "/bin/false")
    assert pool_plan.import_problem() == "ended with 1"


@pytest.mark.parametrize(
    "address", ["", "head", "head:", ":7108", "head:0", "head:65536", "head:x", "head:\uff17"]
)
def test_an_address_is_host_and_port(address: str) -> None:
    with pytest.raises(ConfigError, match=r"pool\.master = .*: write host:port"):
        load(None, {}, [f"pool.master={address}"])


# --- what a master tells ---------------------------------------------------------------------


def test_what_a_pool_was_good_for() -> None:
    assert not pool_used(total([]))
    assert not pool_used(InstanceStats(prompt_tokens=10, cached_tokens=5))
    each = InstanceStats(prompt_tokens=500, cached_tokens=300, pool_tokens=200, pool_saved_blocks=7)
    bad = InstanceStats(pool_dropped_blocks=1, pool_failures=2, pool_corrupt=3, pool_away=True)
    assert pool_used(total([each, each]))
    assert pool_text(total([each, each, bad])) == (
        "40.0% of 1000 prompt tokens from the pool, 20.0% from engines' own caches; "
        "14 blocks saved, 1 dropped, 2 failures, 3 corrupt, LEFT ALONE for now: saves are dropped"
    )
    assert pool_text(InstanceStats()).startswith("0.0% of 0 prompt tokens")


def test_what_a_pool_holds() -> None:
    assert figures_text(FIGURES) == (
        "700 keys, 0.23 of 0.25 GiB of memory, 0.50 of 1.00 GiB of disk, 464 evicted; owned by 127.0.0.1:13775"
    )
    assert figures_text(PoolFigures()) == (
        "0 keys, 0.00 of 0.00 GiB of memory, 0 evicted; owned by NOBODY: saves are dropped until an owner "
        "holds memory again, which it does by itself"
    )


METRICS = """\
# HELP master_allocated_bytes Total memory bytes currently allocated across all segments
# TYPE master_allocated_bytes gauge
master_allocated_bytes 247463936
master_total_capacity_bytes 268435456
segment_allocated_bytes{segment="127.0.0.1:13775"} 247463936
segment_total_capacity_bytes{segment="127.0.0.1:13775"} 268435456
master_allocated_file_size_bytes 5.36870912e+08
master_total_file_capacity_bytes 1073741824
master_key_count 700
master_evicted_key_count 464
file_cache_hit_nums_ 12
master_value_size_bytes_bucket{le="4096"} 1
master_key_count{tenant="other"} 5
"""

FIGURES = PoolFigures(
    keys=700,
    dram_used=247463936,
    dram_total=268435456,
    ssd_used=536870912,
    ssd_total=1073741824,
    ssd_reads=12,
    evicted_keys=464,
    owners={"127.0.0.1:13775": 268435456},
)


def test_figures_are_read() -> None:
    assert read_figures(METRICS) == FIGURES
    for none in ("<html>", *(f"master_key_count {value}" for value in ("1.2.3", "e", "1e+999", "9" * 400))):
        assert read_figures(none) == PoolFigures()


@contextlib.asynccontextmanager
async def answering(answer: bytes | None) -> AsyncIterator[str]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if answer is None:
            await reader.read()
        else:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
            await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_a_master_is_asked() -> None:
    body = METRICS.encode()
    head = f"HTTP/1.1 200 OK\r\nServer: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    async with answering(head + body) as address:
        assert await ask_master(address) == METRICS


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", "answers 'HTTP/1.1 404 Not Found'"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n", "invalid literal"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc", "3 bytes"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", "less than zero"),
        (b"x" * 200_000, "limit"),
        (b"", "answers ''"),
        (None, "no answer in 0.2 s"),
    ],
)
async def test_what_makes_no_sense_is_no_answer(answer: bytes | None, said: str) -> None:
    async with answering(answer) as address:
        with pytest.raises(Unreachable, match=rf"pool\.metrics = '{address}'.*{said}"):
            await ask_master(address, seconds=0.2)


async def test_nobody_there_is_no_answer() -> None:
    (port,) = pool_plan._free_ports(1)
    with pytest.raises(Unreachable, match=f"127.0.0.1:{port}"):
        await ask_master(f"127.0.0.1:{port}")
