"""Rollouts on real processes and sockets, of which a seed kills and stops some at random moments.

The processes stay up from rollout to rollout; whoever dies is started again at once. A seed draws the
same faults each time, though not the same interleaving.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import msgspec
from msgspec.structs import asdict, replace

from chaos import trainer
from chaos.expected import Expected
from chaos.outcome import Outcome
from chaos.plan import PROCESSES
from seer.child import Child, LaunchError
from seer.client import SamplingParams
from seer.client.prompts import Prompt
from seer.common.config import BufferConfig, Config, Endpoints, EngineConfig, SharedConfig
from seer.hardware import plan_engines

ENGINES = 2
READY_SECONDS = 300.0
BOUND_SECONDS = 120.0
"""Longest time from a rollout's last fault to its end; generous, since machines that run tests are busy."""

LEAVE_SECONDS = 30.0
"""Longest orderly end; the buffer's includes `result_ttl_seconds` for groups of killed trainers."""

WATCH_SECONDS = 0.01
LONG_STOPS = 0.15
"""Share of the faults that are long, where long ones are wanted."""

OF_VLLM = ("vllm_dist_", "torchinductor_")
"""Temporary folders that vLLM and torch cannot remove when they are killed."""

MAX_FILES = 150
"""Open files of a process; a connection or a pipe that leaks with each fault gets there soon."""


@dataclass(frozen=True, slots=True)
class Load:
    """What every rollout asks for, and how many faults it gets in its first `burst_seconds`."""

    prompts: int = 12
    n: int = 4
    max_tokens: int = 160
    faults: int = 4
    burst_seconds: float = 3.0
    long_stops: bool = False


@dataclass(slots=True)
class _Slot:
    service: str
    config: Config
    environ: dict[str, str]
    child: Child | None = None


class System:
    """Use as `async with System() as system`; with `model`, its engines are vLLM's."""

    def __init__(self, load: Load, model: Path | None = None) -> None:
        self.load = load
        self.deaths: list[str] = []
        self.folder = Path(tempfile.mkdtemp(prefix="chaos-", dir="/tmp"))  # short: socket paths are
        (self.folder / "tmp").mkdir()
        names = {name: f"ipc://{self.folder}/{name}" for name in asdict(Endpoints()) if name != "bind_host"}
        engine = EngineConfig(
            backend="replay", replay_step_seconds=0.015, replay_mean_tokens=50, max_num_seqs=8,
            max_model_len=512, kv_blocks=64,
        )  # fmt: skip
        if model is not None:
            engine = replace(engine, backend="vllm", kv_blocks=64)
        self.config = Config(
            shared=SharedConfig(model=str(model or "")),
            endpoints=Endpoints(**names),
            buffer=BufferConfig(chunk_size=16, engine_silence_seconds=4.0, result_ttl_seconds=8.0),
            engine=engine,
        )
        self._slots: dict[str, _Slot] = {}
        self._keepers: list[asyncio.Task[None]] = []
        self._trainer: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Self:
        light = {"TMPDIR": str(self.folder / "tmp")}
        for name in ("buffer", "context", "dgds"):
            self._slots[name] = _Slot(name, self.config, light)
        for plan in plan_engines(self.config.engine, ENGINES):
            config = replace(self.config, engine=plan.config)
            self._slots[plan.config.name] = _Slot("engine", config, light | plan.environ)
        await asyncio.gather(*(self._start(name) for name in self._slots))
        self._keepers = [asyncio.create_task(self._keep(name)) for name in self._slots]
        return self

    async def __aexit__(self, *_: object) -> None:
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        # The buffer first, with engines for what a killed trainer left unfinished.
        for services in (("buffer",), ("engine",), ("context", "dgds")):
            slots = [slot for slot in self._slots.values() if slot.service in services]
            children = [slot.child for slot in slots if slot.child]
            for child in children:
                child.terminate()
            await asyncio.gather(*(child.gone(LEAVE_SECONDS) for child in children))
            for child in children:
                if child.alive:
                    self.deaths.append(f"{child.name} did not leave in {LEAVE_SECONDS:g} s")
                child.kill_group()

    def leftovers(self) -> list[str]:
        """Return what the system left after its end, and remove its folder."""
        left = [*self.deaths, *(f"process {pid}: {words}" for pid, words in self.processes().items())]
        ours = {f"{name}.{kind}" for name in self._slots for kind in ("toml", "log")}
        ours |= {"tmp", "job.json", "trainer.log"}
        left += [path.name for path in self.folder.iterdir() if path.name not in ours]
        temporary = [path.name for path in (self.folder / "tmp").iterdir()]
        left += [f"tmp/{name}" for name in temporary if not name.startswith(OF_VLLM)]
        if not left:
            shutil.rmtree(self.folder)
        return left

    def processes(self) -> dict[int, str]:
        """Return the living processes that were started with a file in our folder."""
        found = {}
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                words = (entry / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
                if entry.name.isdecimal() and str(self.folder) in words:
                    found[int(entry.name)] = words
        return found

    # --- keeping up ----------------------------------------------------------------------

    async def _start(self, name: str) -> None:
        slot = self._slots[name]
        slot.child = await Child.spawn(
            slot.service, name, slot.config, slot.environ, self.folder, logged=True
        )
        await slot.child.ready(READY_SECONDS)

    async def _keep(self, name: str) -> None:
        while True:
            await self._slots[name].child.process.wait()
            self._note_death(name, self._slots[name].child.process.returncode)
            with contextlib.suppress(LaunchError):  # killed while it started
                await self._start(name)

    def _note_death(self, name: str, code: int | None) -> None:
        if code != -signal.SIGKILL:  # nobody did this to it
            self.deaths.append(f"{name} ended with {code}; its log is in {self.folder}")

    # --- rollouts ------------------------------------------------------------------------

    def job(self, number: int) -> trainer.Job:
        """Return what rollout `number` asks for; each has noise of its own."""
        prompts = {f"p{i}": [3 + i, *range(3, 4 + i)] for i in range(self.load.prompts)}
        return trainer.Job(
            endpoint=self.config.endpoints.trainers, prompts=prompts, n=self.load.n,
            max_tokens=self.load.max_tokens, number=number,
        )  # fmt: skip

    def expected(self, number: int) -> Expected:
        """Compute what replay engines answer to rollout `number`."""
        job = self.job(number)
        prompts = [Prompt(key, token_ids=tokens) for key, tokens in job.prompts.items()]
        sampling = SamplingParams(max_tokens=job.max_tokens)
        return Expected.of_replay(prompts, job.n, sampling, self.config.engine, number)

    async def undisturbed(self, number: int) -> Expected:
        """Have rollout `number` made without faults, for an engine whose answers nobody can compute."""
        lines = await self._roll(number, Outcome(0), faults=0)
        return Expected({line.id: line.answers for line in lines})

    async def rollout(self, seed: int, number: int, expected: Expected) -> Outcome:
        """Run rollout `number` under the faults of `seed` and judge it."""
        outcome = Outcome(seed)
        lines = await self._roll(number, outcome, self.load.faults)
        groups = {line.id: line.answers for line in lines}
        outcome.responses = self.load.n * self.load.prompts
        outcome.lost = self.load.n * (self.load.prompts - len(groups))
        outcome.doubled = self.load.n * (len(lines) - len(groups))
        outcome.changed = sum(expected.changed(key, answers) for key, answers in groups.items())
        outcome.count()
        outcome.problems += self._leaks()
        self.deaths.clear()
        return outcome

    async def _roll(self, number: int, outcome: Outcome, faults: int) -> list[trainer.Line]:
        out, job = self.folder / "rollout.out", self.folder / "job.json"
        job.write_bytes(msgspec.json.encode(self.job(number)))
        clock = asyncio.get_running_loop().time
        began = clock()
        arrivals: list[float] = []
        rand = random.Random(f"processes {outcome.seed}")
        watching = asyncio.create_task(_watch(out, arrivals))
        client = asyncio.create_task(self._train(job, out))
        try:
            ends = await asyncio.gather(*(self._inflict(rand.randbytes(8), outcome) for _ in range(faults)))
            try:
                await asyncio.wait_for(client, BOUND_SECONDS)
            except TimeoutError:
                outcome.problems.append(f"not finished {BOUND_SECONDS:g} s after the last fault")
            await asyncio.sleep(2 * WATCH_SECONDS)
        finally:
            for task in (watching, client):
                task.cancel()
            await asyncio.wait([watching, client])
        outcome.seconds = clock() - began
        outcome.recovered([end for end in ends if end is not None], arrivals)
        lines = trainer.lines(out)
        out.unlink(missing_ok=True)
        return lines

    async def _train(self, job: Path, out: Path) -> None:
        """Run the trainer, life after life, until one is done."""
        command = (sys.executable, trainer.__file__, str(os.getpid()), str(job), str(out))
        while True:
            with (self.folder / "trainer.log").open("ab") as log:
                self._trainer = await asyncio.create_subprocess_exec(*command, stdout=log, stderr=log)
            try:
                code = await self._trainer.wait()
            except asyncio.CancelledError:
                self._trainer.kill()
                raise
            if code == 0:
                return
            self._note_death("trainer", code)

    async def _inflict(self, seed: bytes, outcome: Outcome) -> float | None:
        """Kill or stop somebody at some moment; return when it was over, None when nobody was there."""
        rand = random.Random(seed)
        await asyncio.sleep(rand.uniform(0.2, self.load.burst_seconds))
        what, kind = rand.choice(("kill", "stop")), rand.choice(PROCESSES)
        pid = self._victim(kind, rand)
        if pid is None:
            return None
        seconds = rand.uniform(0.05, 1.5)
        if self.load.long_stops and rand.random() < LONG_STOPS:
            seconds = rand.uniform(4.5, 13.0)  # past silence and heartbeats
        outcome.faults.append(f"{what} {kind}")
        os.kill(pid, signal.SIGKILL if what == "kill" else signal.SIGSTOP)
        if what == "stop":
            await asyncio.sleep(seconds)
            with contextlib.suppress(ProcessLookupError):  # killed meanwhile
                os.kill(pid, signal.SIGCONT)
        return asyncio.get_running_loop().time()

    def _victim(self, kind: str, rand: random.Random) -> int | None:
        name = f"engine-{rand.randrange(ENGINES)}" if kind == "engine" else kind
        process = self._trainer if kind == "client" else self._slots[name].child.process
        return None if process is None or process.returncode is not None else process.pid

    def _leaks(self) -> list[str]:
        problems, self.deaths = self.deaths, []
        living = self.processes()
        lives = Counter(file for words in living.values() for file in words.split() if file.endswith(".toml"))
        problems += [f"{count} processes of {file}" for file, count in lives.items() if count > 1]
        problems += [f"a trainer lives on: {words}" for words in living.values() if trainer.__file__ in words]
        for pid, words in living.items():
            with contextlib.suppress(OSError):
                if (files := len(list(Path(f"/proc/{pid}/fd").iterdir()))) > MAX_FILES:
                    problems.append(f"{files} open files in {words}")
        return problems


async def _watch(out: Path, arrivals: list[float]) -> None:
    seen = 0
    while True:
        size = _size(out)
        if size > seen:
            seen = size
            arrivals.append(asyncio.get_running_loop().time())
        await asyncio.sleep(WATCH_SECONDS)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


async def campaign(seeds: Iterable[int], load: Load, model: Path | None = None) -> list[Outcome]:
    """Run a rollout per seed on one system; with `model`, on vLLM engines.

    What is wrong with the system as a whole is a problem of the last seed.
    """
    outcomes: list[Outcome] = []
    system = System(load, model)
    async with system:
        undisturbed = None if model is None else await system.undisturbed(0)
        for number, seed in enumerate(seeds):
            expected = undisturbed or system.expected(number)
            outcomes.append(await system.rollout(seed, 0 if undisturbed else number, expected))
    left = system.leftovers()
    if left and outcomes:
        outcomes[-1].problems += [f"left over: {what}" for what in left]
    return outcomes
