"""What keys cost a connection: messages/s, MB/s, round trips and CPU time, with CURVE and without, in turns.

A client in this process and a server in another one, over loopback, with the transport of the services. Each
turn has a connection without keys and one with. Prints JSON: medians over the turns, and the median of the
ratios with over without.

    python bench/services/curve.py
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from lib.hardware import machine
from lib.processes import cpu_seconds

from seer.cli.keys import add, init
from seer.common.config import SecurityConfig
from seer.common.net.keys import load_keys
from seer.common.net.transport.base import Socket
from seer.common.net.transport.zmq import ZmqTransport

SIZES = {"1 KB": 1024, "64 KB": 64 * 1024, "2 MB": 2 * 2**20}
MOST_BYTES, MOST_MESSAGES, ROUND_TRIPS = 256 * 2**20, 20_000, 300
ECHO, COUNT = b"echo", b"count"


def serve(link: Connection, security: SecurityConfig) -> None:
    """Echo what asks for it, and swallow the rest."""
    asyncio.run(_serve(link, security))


async def _serve(link: Connection, security: SecurityConfig) -> None:
    transport = ZmqTransport(keys=load_keys(security))
    router = await transport.router("tcp://127.0.0.1:0")
    link.send(router.endpoint)
    while True:
        identity, frames, _ = await router.recv()
        if frames[0] == ECHO or frames[0] == COUNT:
            await router.send(identity, [bytes(frame) for frame in frames])


async def throughput(socket: Socket, size: int) -> tuple[float, int]:
    """Return the seconds that it takes to send many messages of a size, and how many."""
    count = max(20, min(MOST_MESSAGES, MOST_BYTES // size))
    body, begun = bytes(size), time.perf_counter()
    for _ in range(count):
        await socket.send([b"", body])
    await socket.send([COUNT])
    await socket.recv()
    return time.perf_counter() - begun, count


async def round_trip(socket: Socket, size: int) -> float:
    """Return the median seconds of a round trip."""
    body, times = bytes(size), []
    for _ in range(ROUND_TRIPS):
        begun = time.perf_counter()
        await socket.send([ECHO, body])
        await socket.recv()
        times.append(time.perf_counter() - begun)
    return statistics.median(times)


async def turn(client: SecurityConfig, server: SecurityConfig) -> dict[str, dict[str, float]]:
    """Return the figures of one connection, by size."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs, server), daemon=True)
    process.start()
    transport = ZmqTransport(keys=load_keys(client))
    try:
        socket = await transport.dealer(ours.recv(), b"client")
        await round_trip(socket, 1)
        found = {}
        assert process.pid is not None
        for name, size in SIZES.items():
            cpu = cpu_seconds(process.pid) + time.process_time()
            seconds, count = await throughput(socket, size)
            cpu = cpu_seconds(process.pid) + time.process_time() - cpu
            found[name] = {
                "messages_per_s": count / seconds,
                "mb_per_s": count * size / seconds / 1e6,
                "cpu_s_per_gb": cpu / (count * size / 1e9),
                "round_trip_ms": 1e3 * await round_trip(socket, size),
            }
        return found
    finally:
        process.kill()
        process.join()
        await transport.close()


def report(turns: list[dict[str, dict[str, dict[str, float]]]]) -> dict[str, Any]:
    """Return medians by size, of both and of their ratios."""
    return {
        size: {
            figure: {
                **{
                    way: round(statistics.median(each[way][size][figure] for each in turns), 3)
                    for way in ("plain", "curve")
                },
                "ratio": round(
                    statistics.median(
                        each["curve"][size][figure] / each["plain"][size][figure] for each in turns
                    ),
                    3,
                ),
            }
            for figure in turns[0]["plain"][size]
        }
        for size in SIZES
    }


async def measure(turns: int) -> list[dict[str, dict[str, dict[str, float]]]]:
    """Return the figures of all turns."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "keys"
        init(folder)
        add(folder, ["trainer:bench"], "")
        server = SecurityConfig(key=str(folder / "server.key"), peers=str(folder / "public" / "peers"))
        client = SecurityConfig(
            key=str(folder / "trainer-bench.key"), server=str(folder / "public" / "server.pub")
        )
        ways = {"plain": (SecurityConfig(), SecurityConfig()), "curve": (client, server)}
        found = []
        for number in range(turns):
            order = list(ways)[:: -1 if number % 2 else 1]
            found.append({way: await turn(*ways[way]) for way in order})
        return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    turns = asyncio.run(measure(options.turns))
    print(json.dumps({"machine": machine("pyzmq"), "turns": options.turns, **report(turns)}, indent=1))


if __name__ == "__main__":
    main()
