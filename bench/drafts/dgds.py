"""What one dgds process bears, what a token costs on the wire and in memory, and how fresh drafts can be.

    python bench/drafts/dgds.py

A real dgds process and real sockets; no engine. Prints JSON:
- `ingest`: 64 producers, each with a connection of its own, send batches as fast as they are taken, to
  the answer that follows the last; `per_cpu_s` is per second of the dgds's CPU;
- `wire`: lengths of all frames of the messages that carry tokens, over their tokens, by requests in a
  flush and tokens of each; the client's own batches and the answers to its fetches;
- `memory`: growth of the dgds's resident memory;
- `freshness`: from `append` on one client to the end of the `fetch` on another that returns the token,
  where both flush and fetch at this interval and every request appends a token each 20 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import uvloop
from lib.hardware import machine
from lib.processes import cpu_seconds, rss_bytes

from seer.common import wire
from seer.common.clock import LoopClock
from seer.common.config import Config, DgdsConfig, Endpoints, LogConfig
from seer.common.ids import new_incarnation
from seer.common.net.channel import Channel
from seer.common.net.identity import Identity
from seer.common.net.transport.base import Frame, Socket
from seer.common.net.transport.zmq import ZmqTransport
from seer.local.child import Child
from seer.services.dgds.client import DgdsClient
from seer.services.dgds.packing import group_digest, pack

PRODUCERS = 64
N = 16
VOCABULARY = 151_936
STEP_SECONDS = 0.02
ATTEMPT = 1 << 60
"""As large as the buffer's are: it counts from its incarnation."""


class Dgds:
    """A running dgds process."""

    def __init__(self, config: Config, child: Child, transport: ZmqTransport) -> None:
        self.at = config.endpoints.dgds
        self.transport = transport
        self._pid = child.process.pid

    @property
    def cpu_seconds(self) -> float:
        """What its process used so far, all threads together."""
        return cpu_seconds(self._pid)

    @property
    def rss_bytes(self) -> int:
        """Its resident memory."""
        return rss_bytes(self._pid)

    async def channel(self, name: str) -> Channel[wire.EngineToDgds, wire.DgdsToEngine]:
        """Return an open connection of its own."""
        me = Identity(role="engine", name=name, incarnation=new_incarnation())
        made: Channel[wire.EngineToDgds, wire.DgdsToEngine] = Channel(
            self.transport, self.at, me, wire.DgdsToEngine, LoopClock()
        )
        await made.open(10)
        return made

    def client(self, transport: ZmqTransport, **settings: float) -> DgdsClient:
        """Return a client that sends that often; see `DgdsClient`."""
        me = Identity(role="engine", name=f"c{new_incarnation()}", incarnation=new_incarnation())
        return DgdsClient(transport, self.at, me, LoopClock(), **settings)


@contextlib.asynccontextmanager
async def dgds() -> AsyncIterator[Dgds]:
    with tempfile.TemporaryDirectory(prefix="b") as name:
        config = Config(
            endpoints=Endpoints(dgds=f"ipc://{name}/dgds"),
            dgds=DgdsConfig(max_tokens=400_000_000),
            log=LogConfig(level="warning"),
        )
        child = await Child.spawn("dgds", "dgds", config, {}, Path(name), logged=False)
        transport = ZmqTransport()
        try:
            await child.ready(60)
            yield Dgds(config, child, transport)
        finally:
            await transport.close()
            child.kill_group()
            await child.gone(10)


def tokens_of(count: int) -> wire.Tokens:
    return np.random.default_rng(1).integers(0, VOCABULARY, count, dtype=np.int32)


async def produce(
    channel: Channel[wire.EngineToDgds, wire.DgdsToEngine], groups: Sequence[int], batches: int, tokens: int
) -> None:
    keys = [(group, index) for group in groups for index in range(N)]
    new = pack(tokens_of(len(keys) * tokens))
    for batch in range(batches):
        appends = [wire.Append(*key, ATTEMPT, batch * tokens, tokens) for key in keys]
        await channel.send(wire.AppendBatch(appends=appends, tokens=new))
    await channel.send(wire.Fetch(groups=[wire.FetchGroup(groups[-1], {})]))
    answer = await asyncio.wait_for(channel.recv(), 120)
    assert isinstance(answer, wire.Deltas), answer
    assert answer.deltas, "nothing was taken"


async def ingest(requests: int, tokens: int, total: int) -> dict[str, Any]:
    async with dgds() as server:
        channels = [await server.channel(f"p{number}") for number in range(PRODUCERS)]
        groups = [
            [group_digest(f"r/{number}/{g}") for g in range(requests // N)] for number in range(PRODUCERS)
        ]
        batches = total // (PRODUCERS * requests * tokens)
        used, started = server.cpu_seconds, time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for channel, own in zip(channels, groups, strict=True):
                tasks.create_task(produce(channel, own, batches, tokens))
        seconds, used = time.perf_counter() - started, server.cpu_seconds - used
        taken = batches * PRODUCERS * requests * tokens
        return {
            "requests_a_message": requests,
            "tokens_a_request": tokens,
            "tokens": taken,
            "per_s": round(taken / seconds),
            "per_cpu_s": round(taken / used),
        }


# --- bytes -----------------------------------------------------------------------------------


class Counting(ZmqTransport):
    """Counts the bytes of messages that carry tokens, by their type."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()

    async def dealer(self, endpoint: str, identity: bytes) -> CountingSocket:  # type: ignore[override]
        """Connect a DEALER."""  # it is used as one, and is none by type
        return CountingSocket(await super().dealer(endpoint, identity), self.bytes)


class CountingSocket:
    """See `Counting`."""

    problem = ""

    def __init__(self, inner: Socket, counted: Counter[str]) -> None:
        self._inner = inner
        self._counted = counted

    async def send(self, frames: Sequence[Frame]) -> None:
        """Count and send."""
        self._count(frames)
        await self._inner.send(frames)

    async def recv(self) -> list[Frame]:
        """Receive and count."""
        frames = await self._inner.recv()
        self._count(frames)
        return frames

    def close(self) -> None:
        """Close the inner socket."""
        self._inner.close()

    def _count(self, frames: Sequence[Frame]) -> None:
        kind = msgspec.msgpack.decode(frames[0], type=dict[str, msgspec.Raw])["type"]
        self._counted[msgspec.msgpack.decode(kind, type=str)] += sum(map(len, frames))


async def over_the_wire(server: Dgds, requests: int, tokens: int, flushes: int = 20) -> dict[str, Any]:
    """Each flush carries `tokens` of each of `requests`; the reader fetches after each."""
    sending, reading = Counting(), Counting()
    writer = server.client(sending, flush_seconds=0.0)
    reader = server.client(reading)
    new = tokens_of(tokens * flushes).tolist()
    groups = [f"{new_incarnation():x}/prompt-{number:06}" for number in range(-(-requests // N))]
    read = 0
    async with running(writer, reader):
        for group in groups:
            writer.register(group, tokens_of(100))
            reader.register(group, tokens_of(100))
        for flush in range(flushes):
            for number in range(requests):
                start = flush * tokens
                writer.append(groups[number // N], number % N, ATTEMPT, start, new[start : start + tokens])
            while read < (flush + 1) * requests * tokens:
                read += sum(len(delta.tokens) for delta in await reader.fetch(groups))
    return {
        "requests": requests,
        "tokens_a_request": tokens,
        "AppendBatch": round(sending.bytes["AppendBatch"] / read, 2),
        "Deltas": round(reading.bytes["Deltas"] / read, 2),
        "Fetch": round(reading.bytes["Fetch"] / read, 2),
    }


@contextlib.asynccontextmanager
async def running(*clients: DgdsClient) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(client.run()) for client in clients]
    await asyncio.sleep(0.3)  # to connect
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for client in clients:
            await client.close(1.0)


# --- memory and freshness --------------------------------------------------------------------


async def memory(groups: int = 2_000, length: int = 20_000) -> dict[str, Any]:
    async with dgds() as server:
        channel = await server.channel("p")
        names = [group_digest(f"m/{number}") for number in range(groups)]

        async def grown(messages: Iterable[wire.EngineToDgds]) -> int:
            before = server.rss_bytes
            for message in messages:
                await channel.send(message)
                await channel.send(wire.Fetch(groups=[]))
                await channel.recv()
            return server.rss_bytes - before

        def appends_of(name: int, previous: int, count: int) -> wire.AppendBatch:
            appends = [wire.Append(name, i, ATTEMPT, previous, count) for i in range(N)]
            return wire.AppendBatch(appends=appends, tokens=pack(tokens_of(N * count)))

        registered = await grown([wire.RegisterGroups(groups=[wire.GroupEntry(name, 1) for name in names])])
        streams = await grown(appends_of(name, 0, 1) for name in names)
        long = names[:64]
        tokens = await grown(appends_of(name, at, 64) for at in range(1, length, 64) for name in long)
        channel.close()
        return {
            "bytes_a_group": round(registered / groups),
            "bytes_a_stream_of_one_token": round(streams / groups / N),
            "bytes_a_token": round(tokens / len(long) / N / length, 2),
        }


async def freshness(server: Dgds, interval: float, requests: int, seconds: float) -> dict[str, Any]:
    first, second = ZmqTransport(), ZmqTransport()
    writer, reader = server.client(first, flush_seconds=interval), server.client(second)
    groups = [f"f{interval}/{number}" for number in range(-(-requests // N))]
    appended_at: list[float] = []
    waits: list[float] = []

    async def write() -> None:
        for step in range(int(seconds / STEP_SECONDS)):
            appended_at.append(time.perf_counter())
            for number in range(requests):
                writer.append(groups[number // N], number % N, ATTEMPT, step, [step])
            await asyncio.sleep(STEP_SECONDS)

    async with running(writer, reader):
        writing = asyncio.create_task(write())
        while not writing.done():
            await asyncio.sleep(interval)
            deltas = await reader.fetch(groups)
            now = time.perf_counter()
            waits += [now - appended_at[int(token)] for delta in deltas for token in delta.tokens]
        await writing
    waits.sort()
    return {
        "interval_ms": round(interval * 1e3),
        "requests": requests,
        "tokens": len(waits),
        "p50_ms": round(waits[len(waits) // 2] * 1e3, 1),
        "p99_ms": round(waits[len(waits) * 99 // 100] * 1e3, 1),
    }


async def measure(total: int, runs: int) -> dict[str, Any]:
    flushes = ((64, 64), (64, 16), (16, 64))
    taken = [[await ingest(*flush, total) for _ in range(runs)] for flush in flushes]
    async with dgds() as server:
        sizes = [(64, 64), (16, 64), (4, 64), (1, 64), (64, 16), (64, 3)]
        carried = [await over_the_wire(server, *size) for size in sizes]
        fresh = [await freshness(server, interval, 32, 10.0) for interval in (0.05, 0.01)]
    return {
        "ingest": [sorted(each, key=lambda run: run["per_s"])[len(each) // 2] for each in taken],
        "wire_bytes_a_token": carried,
        "memory": await memory(),
        "freshness": fresh,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=40_000_000, help="tokens of one ingest run")
    parser.add_argument("--runs", type=int, default=3, help="ingest runs; the median one is shown")
    options = parser.parse_args()
    report = {"machine": machine("zmq", "msgspec", "numpy", "uvloop")}
    print(json.dumps(report | uvloop.run(measure(options.tokens, options.runs)), indent=1))


if __name__ == "__main__":
    main()
