"""What the light services bear, without a model: hundreds of replay engines.

Everything runs as real processes over real sockets; only the engines' steps take no time, so that
the services are what is measured. Engines have connections and identities of their own and share
processes. Prints JSON.

    python bench/services/many_engines.py scale --engines 64 512 --requests 20000

`probe_ms` is the round trip of a `Hello` to a service's event loop, from a process beside it: an
upper bound of the loop's lag. `dispatch_ms` runs from an engine's result to its next order.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import uvloop
from lib.machine import machine
from lib.processes import cpu_seconds, rss_bytes
from msgspec.structs import asdict, replace

from seer.client import RolloutClient, SamplingParams
from seer.common import wire
from seer.common.clock import Clock, LoopClock
from seer.common.config import BufferConfig, Config, Endpoints, EngineConfig, LogConfig
from seer.common.ids import new_incarnation
from seer.common.net.channel import Channel
from seer.common.net.handshake import Identity
from seer.common.net.transport.base import Transport
from seer.common.net.transport.zmq import ZmqTransport
from seer.local.child import Child
from seer.services.engine.replay.backend import ReplayBackend
from seer.services.engine.server import EngineServer

SERVICES = ("buffer", "context", "dgds")
UNIONS = {"buffer": wire.BufferToTrainer, "context": wire.ContextSnapshotReply, "dgds": wire.DgdsToEngine}
N = 8
PROBE_SECONDS = 0.02
ENGINES_A_CONTEXT = 256
"""Two sockets each; a ZeroMQ context has 1023."""


def config_in(folder: Path, chunk_size: int) -> Config:
    names = {name: f"ipc://{folder}/{name}" for name in asdict(Endpoints()) if name != "bind_host"}
    engine = EngineConfig(
        backend="replay",
        kv_blocks=512,
        max_num_seqs=16,
        replay_step_seconds=0.0,
        replay_row_seconds=0.0,
        replay_mean_tokens=48,
    )
    return Config(
        endpoints=Endpoints(**names),
        buffer=BufferConfig(chunk_size=chunk_size),
        engine=engine,
        log=LogConfig(level="warning"),
    )


def quantiles(values: list[float], scale: float = 1e3) -> dict[str, float]:
    ordered = sorted(values)
    return {
        name: round(scale * ordered[int(q * (len(ordered) - 1))], 3)
        for name, q in (("p50", 0.5), ("p99", 0.99))
    }


# --- the engines' side -----------------------------------------------------------------------


class Engine(EngineServer):
    """Notes how long its results wait for the next order."""

    def __init__(self, config: Config, transport: Transport, clock: Clock) -> None:
        super().__init__(config, transport, clock, ReplayBackend(config.engine, config.shared))
        self.waits: list[float] = []
        self._answered = 0.0

    async def _deliver(self, message: wire.EngineToBuffer) -> None:
        if isinstance(message, wire.ChunksDone):
            self._answered = time.perf_counter()
        await super()._deliver(message)

    def _start_chunk(self, order: wire.RunChunk) -> None:
        if self._answered:
            self.waits.append(time.perf_counter() - self._answered)
            self._answered = 0.0
        super()._start_chunk(order)


async def host(config: Config, first: int, count: int) -> None:
    """Run engines until stdin closes, then print their waits."""
    clock = LoopClock()
    engines: list[Engine] = []
    for number in range(first, first + count):
        if len(engines) % ENGINES_A_CONTEXT == 0:
            transport = ZmqTransport()
        named = replace(config, engine=replace(config.engine, name=f"e{number}"))
        engines.append(Engine(named, transport, clock))
        await engines[-1].start()
    running = [asyncio.create_task(engine.run()) for engine in engines]
    print("ready", flush=True)
    done = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
    await asyncio.wait([done, *running], return_when=asyncio.FIRST_COMPLETED)
    assert done.done(), "an engine ended"
    print(json.dumps([wait for engine in engines for wait in engine.waits]), flush=True)
    for task in running:
        task.cancel()
    await asyncio.wait(running)


async def start_hosts(file: Path, engines: int, hosts: int) -> list[asyncio.subprocess.Process]:
    each = -(-engines // hosts)
    processes = []
    for first in range(0, engines, each):
        count = min(each, engines - first)
        command = [sys.executable, __file__, "host", str(file), str(first), str(count)]
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, limit=2**28)
        processes.append(process)
    for process in processes:
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), 300)
        assert line == b"ready\n", line
    return processes


# --- scale -----------------------------------------------------------------------------------


async def probe(name: str, endpoint: str, seen: list[float]) -> None:
    role = "trainer" if name == "buffer" else "status"  # each socket admits its own roles
    me = Identity(role=role, name=f"probe-{name}", incarnation=new_incarnation())
    transport = ZmqTransport()
    channel: Channel[wire.Message, wire.Message] = Channel(transport, endpoint, me, UNIONS[name], LoopClock())
    try:
        while True:
            started = time.perf_counter()
            await channel.open(60.0)
            seen.append(time.perf_counter() - started)
            await asyncio.sleep(PROBE_SECONDS)
    finally:
        channel.close()
        await transport.close()


async def scale(engines: int, requests: int, chunk_size: int, hosts: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="b") as name:
        folder = Path(name)
        config = config_in(folder, chunk_size)
        file = folder / "bench.json"
        file.write_bytes(msgspec.json.encode(config))
        children = {s: await Child.spawn(s, s, config, {}, folder, logged=False) for s in SERVICES}
        try:
            for child in children.values():
                await child.ready(60)
            processes = await start_hosts(file, engines, hosts)
            return await measure(config, engines, requests, children, processes)
        finally:
            for child in children.values():
                child.kill_group()
                await child.gone(10)


async def measure(
    config: Config,
    engines: int,
    requests: int,
    children: dict[str, Child],
    processes: list[asyncio.subprocess.Process],
) -> dict[str, Any]:
    at = {
        "buffer": config.endpoints.trainers,
        "context": config.endpoints.estimate_snapshots,
        "dgds": config.endpoints.dgds,
    }
    lags: dict[str, list[float]] = {name: [] for name in SERVICES}
    pids = {name: child.process.pid for name, child in children.items()}
    prompts = [[1 + i % 100] * 32 for i in range(requests // N)]
    async with RolloutClient(at["buffer"]) as client:
        probes = [asyncio.create_task(probe(name, at[name], lags[name])) for name in SERVICES]
        before = {name: (cpu_seconds(pid), rss_bytes(pid)) for name, pid in pids.items()}
        started = time.perf_counter()
        rollout = await client.submit(prompts, n=N, sampling=SamplingParams(max_tokens=64))
        peak = before["buffer"][1]
        async for _ in rollout:
            peak = max(peak, rss_bytes(pids["buffer"]))
        seconds = time.perf_counter() - started
        status = await client.status()
        for task in probes:
            task.cancel()
    waits: list[float] = []
    host_cpu = sum(cpu_seconds(process.pid) for process in processes)
    for process in processes:
        waits += json.loads((await process.communicate(b""))[0])
    chunks = status.counters["chunks"]
    cpu = {name: cpu_seconds(pid) - before[name][0] for name, pid in pids.items()}
    return {
        "engines": engines,
        "requests": requests,
        "chunks": chunks,
        "seconds": round(seconds, 2),
        "chunks_per_s": round(chunks / seconds),
        "chunks_per_buffer_cpu_s": round(chunks / cpu["buffer"]),
        "dispatch_ms": quantiles(waits),
        "probe_ms": {name: quantiles(values) for name, values in lags.items()},
        "cpu_share": {name: round(used / seconds, 3) for name, used in cpu.items()},
        "engine_hosts_cpu_s": round(host_cpu, 1),
        "buffer_bytes_per_request": round((peak - before["buffer"][1]) / requests),
        "lost": status.counters["lost"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    scaling = commands.add_parser("scale")
    scaling.add_argument("--engines", type=int, nargs="+", default=[64, 512])
    scaling.add_argument("--requests", type=int, default=20_000)
    scaling.add_argument("--chunk-size", type=int, default=16)
    scaling.add_argument("--hosts", type=int, default=1, help="processes that the engines share")
    hosting = commands.add_parser("host")
    hosting.add_argument("file", type=Path)
    hosting.add_argument("first", type=int)
    hosting.add_argument("count", type=int)
    options = parser.parse_args()
    if options.command == "host":
        config = msgspec.json.decode(options.file.read_bytes(), type=Config)
        uvloop.run(host(config, options.first, options.count))
        return
    runs = [
        uvloop.run(scale(engines, options.requests, options.chunk_size, options.hosts))
        for engines in options.engines
    ]
    here = machine("zmq", "msgspec", "uvloop")
    print(json.dumps({"machine": here, "chunk_size": options.chunk_size, "runs": runs}, indent=1))


if __name__ == "__main__":
    main()
