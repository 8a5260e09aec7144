"""What it costs to be looked at: scrapes and `seer top` beside a buffer with 4, 64 and 512 engines.

Buffer, context service, exporter and `seer top` are real processes, and every engine has connections of its
own; they are replay engines that share processes (`thousand_engines.py`), and a rollout keeps them busy. In
turns nobody looks, the exporter is scraped once a second, and `seer top` runs in a pseudo-terminal of
200 x 50. Prints JSON by number of engines: seconds, bytes and lines of a scrape; by turn, the buffer's CPU
time a second and its event loop's lag; CPU time a second of exporter and `seer top`.

    python bench/services/observers.py
    python bench/services/observers.py --engines 4 --seconds 5
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import json
import os
import pty
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
import time
import urllib.request
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import uvloop
from lib.hardware import machine
from lib.processes import cpu_seconds
from thousand_engines import SAMPLING, Engines, config_of, lags, registered

from seer.client import Rollout, RolloutClient
from seer.common.config import Config
from seer.local import child

PERIOD = 1.0
SEER = (sys.executable, "-m", "seer.cli.main")
THOUSAND = str(Path(__file__).with_name("thousand_engines.py"))
STEP_SECONDS = 1.0
"""Each engine ends 16 chunks in 16 s: 512 of them end 512 chunks a second."""


def scrape(url: str) -> tuple[float, str]:
    """Return how long a scrape took, and its text."""
    began = time.perf_counter()
    with urllib.request.urlopen(url, timeout=60) as answer:  # noqa: S310 - our own process
        text = answer.read().decode()
    return time.perf_counter() - began, text


class Exporter:
    """A process that is scraped once a second."""

    def __init__(self, endpoint: str) -> None:
        reading, writing = os.pipe()
        command = [*SEER, "exporter", "--connect", endpoint, "--listen", "127.0.0.1:0", "--ready-fd"]
        self.process = subprocess.Popen([*command, str(writing)], pass_fds=[writing])
        os.close(writing)
        with os.fdopen(reading) as pipe:
            self.url = json.loads(pipe.readline())["endpoints"]["metrics"]

    async def measure(self, seconds: float) -> dict[str, Any]:
        """Scrape for some time."""
        took, text = [], ""
        until, before = time.monotonic() + seconds, cpu_seconds(self.process.pid)
        while time.monotonic() < until:
            one, text = await asyncio.to_thread(scrape, self.url)
            if "seer_up 1.0" not in text:
                raise RuntimeError("the buffer did not answer a scrape")
            took.append(one)
            await asyncio.sleep(max(0.0, PERIOD - one))
        return {
            "scrape_ms": {
                "p50": round(1e3 * statistics.median(took), 1),
                "max": round(1e3 * max(took), 1),
            },
            "bytes": len(text),
            "lines": text.count("\n"),
            "cpu": round((cpu_seconds(self.process.pid) - before) / seconds, 3),
        }


def start_top(endpoint: str, terminal: int) -> subprocess.Popen[bytes]:
    """Start `seer top` in a terminal."""
    return subprocess.Popen(
        [*SEER, "top", "--connect", endpoint], stdin=terminal, stdout=terminal, stderr=terminal,
        env=os.environ | {"TERM": "xterm-256color"},
    )  # fmt: skip


async def watch_top(endpoint: str, seconds: float) -> dict[str, Any]:
    """Run `seer top` for some time."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 200, 0, 0))
    process = start_top(endpoint, slave)
    os.close(slave)
    loop, drawn = asyncio.get_running_loop(), bytearray()
    loop.add_reader(master, lambda: drawn.extend(os.read(master, 2**16)))
    try:
        while b"tokens/s" not in drawn:  # noqa: ASYNC110 - it is another process that draws
            await asyncio.sleep(0.1)
        before = cpu_seconds(process.pid)
        await asyncio.sleep(seconds)
        if process.poll() is not None:
            raise RuntimeError(f"seer top has ended: {bytes(drawn[-2000:])!r}")
        return {"cpu": round((cpu_seconds(process.pid) - before) / seconds, 3)}
    finally:
        loop.remove_reader(master)
        process.kill()
        process.wait()
        os.close(master)


async def drain(rollout: Rollout) -> None:
    """Take groups as they come."""
    async for _ in rollout:
        pass


async def measured(engines: int, seconds: float) -> dict[str, Any]:
    """Measure at one number of engines."""
    with tempfile.TemporaryDirectory(prefix="seer-bench-") as name:
        folder = Path(name)
        config: Config = config_of(STEP_SECONDS, "")
        file = folder / "config.json"
        file.write_bytes(msgspec.json.encode(config))
        child.COMMAND = (sys.executable, THOUSAND, "service")  # type: ignore[assignment]
        spawn, here = child.Child.spawn, {"WATCH": name}
        children = {s: await spawn(s, s, config, here, folder, logged=False) for s in ("buffer", "context")}
        hosts = Engines(file, engines, min(4, engines))
        exporter: Exporter | None = None
        try:
            for each in children.values():
                await each.ready(60)
            await hosts.start()
            at = config.endpoints.trainers
            exporter = Exporter(at)
            async with RolloutClient(at, silence_seconds=120.0) as client:
                await registered(client, engines)
                prompts = [[1 + number % 1000, 1 + number // 1000, 7] for number in range(8 * engines)]
                rolling = asyncio.create_task(drain(await client.submit(prompts, n=10, sampling=SAMPLING)))
                await asyncio.sleep(5.0)
                turns: dict[str, Callable[[], Awaitable[dict[str, Any]]]] = {
                    "nobody": lambda: asyncio.sleep(seconds, {}),
                    "exporter": lambda: exporter.measure(seconds),
                    "top": lambda: watch_top(at, seconds),
                }
                figures = {}
                for who, turn in turns.items():
                    began, before = time.monotonic(), cpu_seconds(children["buffer"].process.pid)
                    figures[who] = dict(await turn())
                    ended = time.monotonic()
                    used = cpu_seconds(children["buffer"].process.pid) - before
                    figures[who]["buffer_cpu"] = round(used / (ended - began), 3)
                    figures[who]["buffer_lag_ms"] = lags(folder / "buffer.lag", began, ended)
                figures["still_busy"] = {"rollout": not rolling.done()}
                rolling.cancel()
            return figures
        finally:
            hosts.stop()
            if exporter is not None:
                exporter.process.kill()
                exporter.process.wait()
            for each in children.values():
                each.kill_group()
                await each.gone(10)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engines", type=int, nargs="+", default=[4, 64, 512])
    parser.add_argument("--seconds", type=float, default=15.0, help="of each turn")
    options = parser.parse_args()
    figures = {str(count): uvloop.run(measured(count, options.seconds)) for count in options.engines}
    print(
        json.dumps({"machine": machine("zmq", "msgspec", "prometheus_client", "rich"), **figures}, indent=1)
    )


if __name__ == "__main__":
    main()
