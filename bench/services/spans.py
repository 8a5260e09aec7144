"""What spans cost: the buffer's CPU time a chunk with `seer spans` beside it and without, in turns.

Buffer and context service are real processes; replay engines share processes (`thousand_engines.py`), and a
rollout keeps them busy. In turns nobody reads the buffer's log, and `seer spans` follows the log and sends to
a collector that counts bytes. Prints JSON: of each turn the buffer's CPU time and chunks, the ratio of the
medians with and without, and what `seer spans` itself took a span.

    python bench/services/spans.py
    python bench/services/spans.py --engines 8 --turns 2 --seconds 5
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import uvloop
from lib.hardware import machine
from lib.processes import cpu_seconds, rss_bytes
from observers import SEER, THOUSAND, drain
from thousand_engines import SAMPLING, Engines, config_of, registered

from seer.client import RolloutClient
from seer.local import child

STEP_SECONDS = 1.0


class _Takes(BaseHTTPRequestHandler):
    """A collector that takes everything, and counts."""

    protocol_version = "HTTP/1.1"
    bytes = 0

    def do_POST(self) -> None:
        """Take a message."""
        _Takes.bytes += len(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


async def turn(client: RolloutClient, buffer: int, seconds: float) -> dict[str, float]:
    """Return the buffer's CPU time and chunks during some seconds."""
    chunks, cpu, began = (await client.status()).counters["chunks"], cpu_seconds(buffer), time.monotonic()
    await asyncio.sleep(seconds)
    done = (await client.status()).counters["chunks"] - chunks
    used = cpu_seconds(buffer) - cpu
    took = time.monotonic() - began
    return {
        "cpu": round(used / took, 4),
        "chunks_a_second": round(done / took, 1),
        "us_a_chunk": 1e6 * used / done,
    }


def spans(log: Path, url: str) -> subprocess.Popen[str]:
    """Start `seer spans`, which sends what ends from now on."""
    command = [*SEER, "spans", str(log), "--otlp", url, "--oldest", "5"]
    return subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env=os.environ | {"SEER_LOG__FORMAT": "json"}
    )


async def measured(options: argparse.Namespace, url: str) -> dict[str, Any]:
    """Measure in turns."""
    with tempfile.TemporaryDirectory(prefix="seer-bench-") as name:
        folder = Path(name)
        config = config_of(STEP_SECONDS, str(folder / "log"))
        file = folder / "config.json"
        file.write_bytes(msgspec.json.encode(config))
        child.COMMAND = (sys.executable, THOUSAND, "service")
        spawn, here = child.Child.spawn, {"WATCH": name}
        children = {s: await spawn(s, s, config, here, folder, logged=False) for s in ("buffer", "context")}
        hosts = Engines(file, options.engines, min(4, options.engines))
        process: subprocess.Popen[str] | None = None
        found: dict[str, list[dict[str, float]]] = {"without": [], "with": []}
        own = {"cpu": 0.0, "spans": 0, "rss": 0, "bytes": 0}
        try:
            for each in children.values():
                await each.ready(60)
            await hosts.start()
            buffer = children["buffer"].process.pid
            async with RolloutClient(config.endpoints.trainers, silence_seconds=120.0) as client:
                await registered(client, options.engines)
                prompts = [[1 + n % 1000, 1 + n // 1000, 7] for n in range(options.prompts * options.engines)]
                rolling = asyncio.create_task(drain(await client.submit(prompts, n=10, sampling=SAMPLING)))
                await asyncio.sleep(5.0)
                for _ in range(options.turns):
                    found["without"].append(await turn(client, buffer, options.seconds))
                    process = spans(folder / "log", url)
                    await asyncio.sleep(4.0)  # it starts
                    before, at = cpu_seconds(process.pid), _Takes.bytes
                    found["with"].append(await turn(client, buffer, options.seconds))
                    own["cpu"] += cpu_seconds(process.pid) - before
                    own["bytes"] += _Takes.bytes - at
                    own["rss"] = max(own["rss"], rss_bytes(process.pid))
                    process.terminate()
                    said = await asyncio.to_thread(process.communicate, timeout=30)
                    own["spans"] += next(
                        json.loads(line)["sent"] for line in said[1].splitlines() if '"sent"' in line
                    )
                busy = not rolling.done()
                rolling.cancel()
        finally:
            hosts.stop()
            if process is not None and process.poll() is None:
                process.kill()
            for each in children.values():
                each.kill_group()
                await each.gone(10)
    medians = {who: statistics.median(each["us_a_chunk"] for each in turns) for who, turns in found.items()}
    size = _Takes.bytes / max(1, own["spans"])
    return {
        "engines": options.engines, "turns": found, "still_busy": busy,
        "buffer_us_a_chunk": {who: round(value, 1) for who, value in medians.items()},
        "ratio": round(medians["with"] / medians["without"], 4),
        "spans": {
            "sent": own["spans"],
            "us_of_cpu_a_span": round(1e6 * own["cpu"] * size / max(1, own["bytes"]), 1),
            "rss_mb": own["rss"] >> 20, "bytes_a_span": round(size),
        },
    }  # fmt: skip


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engines", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=60, help="an engine")
    parser.add_argument("--turns", type=int, default=6, help="with and without, each")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each turn")
    options = parser.parse_args()
    collector = ThreadingHTTPServer(("127.0.0.1", 0), _Takes)
    threading.Thread(target=collector.serve_forever, daemon=True).start()
    figures = uvloop.run(measured(options, f"http://127.0.0.1:{collector.server_port}"))
    versions = machine("zmq", "msgspec", "opentelemetry.sdk")
    print(json.dumps({"machine": versions, **figures}, indent=1))


if __name__ == "__main__":
    main()
