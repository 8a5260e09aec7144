"""What the buffer bears: 1,000 engines, 10^6 requests in one rollout, half of the engines lost at once.

Buffer and context service are real processes, and every engine has connections of its own over TCP on
loopback. Engines are replay engines that share processes (`--hosts`); a step of theirs lasts
`--step-seconds`, which sets how many chunks end a second. When `LOSE_AT` of all requests have finished, half
of these processes are killed, and started again once the buffer has noticed. Prints JSON:

- `chunks_a_second` between the first and the last tenth of the responses, and by second of CPU time;
- `lag_ms` of the event loops of buffer and context, by phase: how long something that is due waits, as a
  timer of `WATCH_SECONDS` in the loop sees it. A stall counts for all that would have been due in it;
- `bytes_a_request`: the most memory that the buffer took for the rollout, 8 bytes a kept token aside;
- `lost`: how long until the buffer has given up all killed engines, and until all are back; chunks run again;
- `submitted_seconds`, until the buffer has accepted all prompts; `groups_a_second`, results that arrived.

It is an error if a response is missing, comes twice, or if one in `CHECKED` is not what its key says.

    python bench/services/thousand_engines.py
    python bench/services/thousand_engines.py --engines 50 --prompts 1000 --step-seconds 0.05
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import socket
import sys
import tempfile
import time
from array import array
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import uvloop
from lib.hardware import machine
from lib.processes import cpu_seconds, rss_bytes
from msgspec.structs import asdict, replace

from seer.client import Group, Rollout, RolloutClient, SamplingParams
from seer.common import ids
from seer.common.clock import LoopClock
from seer.common.config import (
    BufferConfig,
    Config,
    DraftsConfig,
    Endpoints,
    EngineConfig,
    LogConfig,
    ReplayConfig,
)
from seer.common.net.transport.zmq import ZmqTransport
from seer.common.process.log import configure
from seer.local import child
from seer.services.buffer.response_store import TOKEN_BYTES
from seer.services.engine.backend import Chunk
from seer.services.engine.replay.backend import ReplayBackend
from seer.services.engine.replay.responses import SyntheticResponses
from seer.services.engine.server import EngineServer

N = 10
PROMPT_TOKENS, CHUNK, MAX_TOKENS, MEAN_TOKENS = 32, 16, 64, 8
SEATS, BLOCKS = 16, 256
LOSE_AT = 0.5
CHECKED = 100
WATCH_SECONDS = 0.01
ENGINES_A_CONTEXT = 256
"""Two sockets each; a ZeroMQ context has 1023."""

STARTED_SECONDS = 300.0
SILENCE_SECONDS = 120.0
"""As many engines share a process, and all processes two cores, a busy machine makes them silent for long."""

SAMPLING = SamplingParams(max_tokens=MAX_TOKENS)


def config_of(step_seconds: float, log: str) -> Config:
    """Return the configuration of all processes; every service gets a free port."""
    with contextlib.ExitStack() as held:
        names = [name for name in asdict(Endpoints()) if name != "bind_host"]
        sockets = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in names]
        ports = [each.getsockname()[1] for each in sockets]
    at = {name: f"tcp://127.0.0.1:{port}" for name, port in zip(names, ports, strict=True)}
    return Config(
        endpoints=Endpoints(**at),
        buffer=BufferConfig(
            chunk_size=CHUNK, max_requests=2**31, log=log, engine_silence_seconds=SILENCE_SECONDS
        ),
        drafts=DraftsConfig(source="off"),
        engine=EngineConfig(
            backend="replay", kv_blocks=BLOCKS, max_num_seqs=SEATS,
            replay=ReplayConfig(step_seconds=step_seconds, row_seconds=0.0, mean_tokens=MEAN_TOKENS),
        ),
        log=LogConfig(level="error"),
    )  # fmt: skip


# --- a service that watches its event loop ---------------------------------------------------


async def watch(path: Path) -> None:
    """Append pairs to a file: the monotonic time, and how late a timer was, both in seconds."""
    seen = array("d")
    with path.open("ab") as file:
        while True:
            began = time.monotonic()
            await asyncio.sleep(WATCH_SECONDS)
            now = time.monotonic()
            seen.extend((now, max(0.0, now - began - WATCH_SECONDS)))
            if len(seen) >= 200:
                seen.tofile(file)
                file.flush()
                del seen[:]


def serve(arguments: list[str]) -> None:
    """Be `seer`, and watch the event loop of the service that runs."""
    from seer.cli.main import main as seer
    from seer.common.process import service

    run = service._Process.run

    async def run_and_watch(self: service._Process, *given: Any) -> int:  # noqa: ANN401 - as `run` takes it
        watching = asyncio.create_task(watch(Path(os.environ["WATCH"]) / f"{arguments[0]}.lag"))
        try:
            return await run(self, *given)
        finally:
            watching.cancel()

    service._Process.run = run_and_watch  # type: ignore[method-assign]
    sys.argv = ["seer", *arguments]
    seer()


def lags(path: Path, since: float, until: float) -> dict[str, float]:
    """Return quantiles, in milliseconds, of how long what was due between two times waited."""
    seen = array("d")
    seen.frombytes(path.read_bytes())
    waited: list[float] = []
    for now, late in zip(seen[::2], seen[1::2], strict=True):
        if since <= now <= until:
            waited += [late - number * WATCH_SECONDS for number in range(1 + int(late / WATCH_SECONDS))]
    ordered = sorted(waited) or [0.0]
    places = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    return {name: round(1e3 * ordered[int(q * (len(ordered) - 1))], 1) for name, q in places.items()}


# --- engines ---------------------------------------------------------------------------------


async def host(config: Config, first: int, count: int) -> None:
    """Run engines until this process is killed, or stdin closes."""
    configure(config.log, "engines")
    clock = LoopClock()
    engines: list[EngineServer] = []
    for number in range(first, first + count):
        if len(engines) % ENGINES_A_CONTEXT == 0:
            transport = ZmqTransport()
        named = replace(config, engine=replace(config.engine, name=f"e{number:04}"))
        engines.append(EngineServer(named, transport, clock, ReplayBackend(named.engine, named.shared)))
        await engines[-1].start()
    running = [asyncio.create_task(engine.run()) for engine in engines]
    print("ready", flush=True)
    done = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
    await asyncio.wait([done, *running], return_when=asyncio.FIRST_COMPLETED)
    os._exit(0 if done.done() else 1)


async def start_hosts(file: Path, spans: list[tuple[int, int]]) -> list[asyncio.subprocess.Process]:
    """Start processes with these engines, (first, count) each, and wait until all have registered."""
    pipe = asyncio.subprocess.PIPE
    processes = [
        await asyncio.create_subprocess_exec(
            sys.executable, __file__, "host", str(file), str(first), str(count), stdin=pipe, stdout=pipe
        )
        for first, count in spans
    ]
    for process in processes:
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), STARTED_SECONDS)
        if line != b"ready\n":
            raise RuntimeError(f"engines did not start: {line!r}")
    return processes


def spans_of(engines: int, hosts: int) -> list[tuple[int, int]]:
    """Return (first, count) of the engines of each process."""
    each = -(-engines // hosts)
    return [(first, min(each, engines - first)) for first in range(0, engines, each)]


# --- the run ---------------------------------------------------------------------------------


class Watched:
    """What is seen of the rollout while it runs. All times are monotonic seconds."""

    def __init__(self, rollout: Rollout, pid: int, rss: int) -> None:
        self.rollout = rollout
        self.groups = self.tokens = self.checked = 0
        self.most_bytes = 0.0
        self.marks: dict[str, float] = {}
        self._pid, self._rss = pid, rss
        self._of = SyntheticResponses(ReplayConfig().vocab_size, MEAN_TOKENS)

    def mark(self, name: str) -> None:
        """Remember when something happened for the first time."""
        self.marks.setdefault(name, time.monotonic())

    @property
    def finished(self) -> float:
        """Share of all responses that have finished."""
        progress = self.rollout.progress
        return 0.0 if progress is None else progress.finished / (len(self.rollout.prompts) * self.rollout.n)

    async def has_half(self) -> bool:
        """Return whether `LOSE_AT` of all responses have finished."""
        return self.finished >= LOSE_AT

    async def sample(self) -> None:
        """Follow the buffer's memory, and the first and the last tenth, until cancelled."""
        total = len(self.rollout.prompts) * self.rollout.n
        while True:
            if (progress := self.rollout.progress) is not None:
                if progress.requests == total:
                    self.mark("accepted")
                kept = TOKEN_BYTES * (progress.tokens - self.tokens)
                self.most_bytes = max(self.most_bytes, rss_bytes(self._pid) - self._rss - kept)
                for name, share in (("first tenth", 0.1), ("last tenth", 0.9)):
                    if self.finished >= share and name not in self.marks:
                        self.mark(name)
                        self.marks[f"chunks at {name}"] = progress.chunks
                        self.marks[f"cpu at {name}"] = cpu_seconds(self._pid)
            await asyncio.sleep(0.1)

    def take(self, group: Group) -> None:
        """Count a group; check one in `CHECKED`, token by token."""
        self.groups += 1
        if len(group.responses) != self.rollout.n:
            raise RuntimeError(f"prompt {group.prompt_id} has {len(group.responses)} responses")
        self.tokens += sum(len(each.token_ids) for each in group.responses)
        if self.groups % CHECKED == 0:
            for index, each in enumerate(group.responses):
                self._check(group, index, list(map(int, each.token_ids)))

    def _check(self, group: Group, index: int, got: list[int]) -> None:
        key = ids.request_key(self.rollout.seed, self.rollout.rollout_number, group.prompt_id, index)
        prompt = list(map(int, self.rollout.prompts[group.prompt_id].token_ids))
        chunk = Chunk(
            request_id="", group_id="", attempt=0, key=key, prompt_len=len(prompt), max_new_tokens=MAX_TOKENS,
            sampling=SAMPLING, tokens=prompt,
        )  # fmt: skip
        count = min(self._of.length(chunk), MAX_TOKENS)
        if got != self._of.part(chunk, 0, count)[0]:
            raise RuntimeError(f"prompt {group.prompt_id}, response {index}: not the tokens of its key")
        self.checked += 1


async def until(true: Callable[[], Awaitable[bool]], seconds: float = STARTED_SECONDS) -> None:
    """Wait until a condition holds."""
    async with asyncio.timeout(seconds):
        while not await true():  # noqa: ASYNC110 - it is another process that changes
            await asyncio.sleep(0.1)


async def registered(client: RolloutClient, count: int) -> None:
    """Wait until the buffer has so many engines."""

    async def has() -> bool:
        return (await client.status()).engines == count

    await until(has)


class Engines:
    """The processes that engines share."""

    def __init__(self, file: Path, engines: int, hosts: int) -> None:
        self.count = engines
        self._file, self._spans = file, spans_of(engines, hosts)
        self.processes: list[asyncio.subprocess.Process] = []
        self.lost = sum(count for _, count in self._spans[: len(self._spans) // 2])

    async def start(self) -> None:
        """Start all."""
        self.processes = await start_hosts(self._file, self._spans)

    async def lose_half(self, watched: Watched, client: RolloutClient) -> None:
        """Kill half of the processes; start them again once the buffer has given up their engines."""
        half = len(self._spans) // 2
        await until(watched.has_half, 3600.0)
        watched.mark("killed")
        for process in self.processes[:half]:
            process.kill()
        await registered(client, self.count - self.lost)
        watched.mark("given up")
        self.processes[:half] = await start_hosts(self._file, self._spans[:half])
        await registered(client, self.count)
        watched.mark("back")

    def stop(self) -> None:
        """Kill all."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()


async def rollout(
    config: Config, engines: Engines, prompts: int, services: dict[str, int]
) -> tuple[Watched, dict[str, int]]:
    """Run the rollout; return what was seen, and the buffer's counters."""
    tokens = [
        [1 + number % 1000, 1 + number // 1000] + [7] * (PROMPT_TOKENS - 2) for number in range(prompts)
    ]
    async with RolloutClient(config.endpoints.trainers, silence_seconds=120.0) as client:
        await registered(client, engines.count)
        began = time.monotonic()
        rss = rss_bytes(services["buffer"])
        running = await client.submit(tokens, n=N, sampling=SAMPLING)
        watched = Watched(running, services["buffer"], rss)
        watched.marks["submitted"] = began
        async with asyncio.TaskGroup() as tasks:
            sampling = tasks.create_task(watched.sample())
            losing = tasks.create_task(engines.lose_half(watched, client))
            async for group in running:
                watched.take(group)
            watched.mark("over")
            await losing
            sampling.cancel()
        return watched, (await client.status()).counters


def report(watched: Watched, counters: dict[str, int], folder: Path, prompts: int) -> dict[str, Any]:
    """Return the figures. Raises `RuntimeError` if a response is missing, or was kept twice."""
    at = watched.marks
    if watched.groups != prompts or counters["tokens"] != watched.tokens:
        raise RuntimeError(f"{watched.groups} groups, {watched.tokens} tokens of {counters['tokens']} kept")
    chunks = at["chunks at last tenth"] - at["chunks at first tenth"]
    phases = {
        "submission": (at["submitted"], at["accepted"]),
        "rollout": (at["accepted"], at["over"]),
        "loss": (at["killed"], at["given up"]),
        "return": (at["given up"], at["back"]),
    }
    services = ("buffer", "context")
    return {
        "chunks": counters["chunks"],
        "seconds": round(at["over"] - at["submitted"], 1),
        "chunks_a_second": round(chunks / (at["last tenth"] - at["first tenth"])),
        "chunks_a_cpu_second": round(chunks / (at["cpu at last tenth"] - at["cpu at first tenth"])),
        "lag_ms": {
            phase: {name: lags(folder / f"{name}.lag", *span) for name in services}
            for phase, span in phases.items()
        },
        "bytes_a_request": round(watched.most_bytes / (prompts * N)),
        "lost": {
            "chunks": counters["lost"],
            "given_up_seconds": round(at["given up"] - at["killed"], 1),
            "back_seconds": round(at["back"] - at["given up"], 1),
        },
        "submitted_seconds": round(at["accepted"] - at["submitted"], 1),
        "groups_a_second": round(prompts / (at["over"] - at["accepted"])),
        "responses": watched.groups * N,
        "tokens": watched.tokens,
        "checked": watched.checked,
    }


async def measured(options: argparse.Namespace) -> dict[str, Any]:
    """Start everything, run the rollout, stop everything."""
    with tempfile.TemporaryDirectory(prefix="seer-bench-") as name:
        folder = Path(name)
        config = config_of(options.step_seconds, str(folder / "log") if options.log else "")
        file = folder / "config.json"
        file.write_bytes(msgspec.json.encode(config))
        child.COMMAND = (sys.executable, __file__, "service")  # type: ignore[assignment]
        spawn, here = child.Child.spawn, {"WATCH": name}
        children = {s: await spawn(s, s, config, here, folder, logged=False) for s in ("buffer", "context")}
        engines = Engines(file, options.engines, options.hosts)
        try:
            for each in children.values():
                await each.ready(60)
            began = time.monotonic()
            await engines.start()
            started = time.monotonic() - began
            pids = {name: each.process.pid for name, each in children.items()}
            watched, counters = await rollout(config, engines, options.prompts, pids)
            cpu = {name: round(cpu_seconds(pid), 1) for name, pid in pids.items()}
            figures = report(watched, counters, folder, options.prompts)
            return figures | {"cpu_seconds": cpu, "engines_started_seconds": round(started, 1)}
        finally:
            engines.stop()
            for each in children.values():
                each.kill_group()
                await each.gone(10)


def main() -> None:
    """Measure and print; or be a part of the run."""
    if sys.argv[1:2] == ["service"]:
        serve(sys.argv[2:])
        return
    if sys.argv[1:2] == ["host"]:
        file, first, count = sys.argv[2:]
        config = msgspec.json.decode(Path(file).read_bytes(), type=Config)
        uvloop.run(host(config, int(first), int(count)))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engines", type=int, default=1000)
    parser.add_argument("--prompts", type=int, default=100_000, help=f"with {N} responses each")
    parser.add_argument("--step-seconds", type=float, default=0.8)
    parser.add_argument("--hosts", type=int, default=4, help="processes that the engines share; two at least")
    parser.add_argument("--log", action="store_true", help="have the buffer write its log to files")
    options = parser.parse_args()
    figures = uvloop.run(measured(options))
    print(json.dumps({"machine": machine("zmq", "msgspec", "uvloop"), **vars(options), **figures}, indent=1))


if __name__ == "__main__":
    main()
