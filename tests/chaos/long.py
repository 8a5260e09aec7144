"""Rollouts for hours on real processes, under faults all the time, with what every process holds measured.

Two trainers go on at once, each job after job: `trainer` with updates of weights (the first of a process is
whole, the others are deltas), images, agents and uses that are cut short; `second` with one long job after the
other, for a client that lives long. A seed draws the jobs and the faults.

In the first half anybody is killed or stopped. In the second half only trainers, the second engine and the
pool's holder are killed, and nobody stops the buffer: so the others live long enough for a slope, and the
lag of the buffer's loop is its own.
"""

from __future__ import annotations

import asyncio
import random
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from msgspec.structs import replace

from chaos import trainer
from chaos.measure import Sample, folder_mib, sample
from chaos.outcome import Outcome
from chaos.processes import BOUND_SECONDS, PROCESSES, REAL_BOUND_SECONDS, TRAINERS, quick
from chaos.rollouts import Judge, Roll, job
from chaos.system import CHILD_OF, POOL, System
from chaos.trainer import CONTENTS, Job, Use
from seer.client import RolloutClient
from seer.common.errors import SeerError

FOLDERS = ("log", "spool", "images", "tmp")

SAMPLE_SECONDS, STATUS_SECONDS = 5.0, 1.0
LAG_WINDOW_SECONDS = 60.0
"""A buffer tells its largest lag within so long."""

IMAGE_BYTES = 2**26
"""Bound on images in a buffer's folder and in an engine's memory: soon reached, so that what grows on is seen."""

KERNELS = "64"
"""Kernels that oneDNN keeps in an engine, of up to 0.5 MiB each; 1,024 by default, which takes hours."""

LONG_STOPS = 0.05
"""Share of the stops that last past silence and heartbeats."""

OBSERVER = "observer"
PROMPTS, TURNS = 12, 3


@dataclass(frozen=True, slots=True)
class Pace:
    """How much a system is asked for: real engines on few cores bear less."""

    pause: float
    """Mean seconds from one fault to the next."""
    heal: float
    """Longest start of whoever has weights: until then nobody else who has them is killed."""
    long_uses: int
    use_seconds: float
    """Longest mean time of a use of a rollout id."""
    n: int = 4
    max_tokens: int = 160


REPLAY = Pace(pause=5.0, heal=15.0, long_uses=150, use_seconds=10.0)
REAL = Pace(pause=12.0, heal=90.0, long_uses=12, use_seconds=60.0, max_tokens=100)


@dataclass(slots=True)
class Seen:
    """What was measured: `lag` and `answers` are of the second half, in seconds."""

    outcome: Outcome
    samples: list[Sample] = field(default_factory=list)
    folders: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    lag: list[float] = field(default_factory=list)
    answers: list[float] = field(default_factory=list)
    jobs: Counter[str] = field(default_factory=Counter)


class Long:
    """One system under work and faults for so many seconds; with `model`, on vLLM engines with a KV pool."""

    def __init__(self, name: str, seconds: float, seed: int, model: Path | None = None) -> None:
        self.name, self._seconds, self._model, self._seed = name, seconds, model, seed
        self._pace = REPLAY if model is None else REAL
        self._bound = BOUND_SECONDS if model is None else REAL_BOUND_SECONDS
        config = quick("replay" if model is None else "vllm")
        engine = replace(config.engine, image_bytes=IMAGE_BYTES)
        if model is not None:
            engine = replace(engine, max_num_seqs=64, max_model_len=512)
            config = replace(config, pool=replace(config.pool, kind="mooncake", dram_gib=0.2))
        config = replace(config, engine=engine)
        self.system = System(
            config,
            model=model,
            tcp=model is None,
            trainers=(*TRAINERS, OBSERVER),
            environ={"ONEDNN_PRIMITIVE_CACHE_CAPACITY": KERNELS},
        )
        at = {name: str(self.system.folder / name) for name in ("log", "spool", "images")}
        buffer = replace(self.system.config.buffer, image_bytes=IMAGE_BYTES, **at)
        self.system.config = replace(self.system.config, buffer=buffer)
        self.seen = Seen(Outcome(seed))
        self._version, self._began, self._said = 0, 0.0, 0
        self._killed: dict[str, float] = {}

    async def run(self) -> Seen:
        """Return what was seen; what went wrong stands in its outcome."""
        async with self.system:
            self._judge = Judge(self.system)
            if self._model is not None:
                await self._undisturbed()
            self._began = _now()
            aside = [
                asyncio.create_task(each) for each in (self._measure(), self._observe(), self._trouble())
            ]
            try:
                await asyncio.gather(*(self._train(name) for name in TRAINERS))
            finally:
                for task in aside:
                    task.cancel()
                ends = await asyncio.gather(*aside, return_exceptions=True)
        problems = self.seen.outcome.problems
        problems += [repr(end) for end in ends if not isinstance(end, asyncio.CancelledError | None)]
        problems += [f"left over: {what}" for what in self.system.leftovers()]
        self.seen.outcome.count()
        return self.seen

    @property
    def _later(self) -> bool:
        return _now() - self._began > self._seconds / 2

    @property
    def _over(self) -> bool:
        return _now() - self._began > self._seconds

    # --- work --------------------------------------------------------------------------------

    async def _undisturbed(self) -> None:
        """Learn what engines answer that nobody can compute, with each content of the weights."""
        for _ in range(CONTENTS):
            version = self._next()
            for turns in (0, TURNS):
                asked = self._job(TRAINERS[0], turns)
                asked.uses = [Use(0, 0, version=version)]
                roll = Roll(self.system, asked)
                await asyncio.wait_for(roll.run(), self._bound)
                if roll.failed:
                    raise RuntimeError(roll.failed)
                self._judge.knows(roll.lines(), agents=turns > 0)

    async def _train(self, name: str) -> None:
        rand, number = random.Random(f"long {name} {self._seed}"), 0
        while not self._over:
            number += 1
            asked = self._drawn(name, rand, number)
            roll = Roll(self.system, asked)
            patience = self._bound + self._pace.use_seconds * len(asked.uses)
            left = self._began + self._seconds - _now()
            try:
                await asyncio.wait_for(roll.run(), min(patience, left) if name == TRAINERS[1] else patience)
            except TimeoutError:
                if not self._over:
                    self.seen.outcome.problems.append(f"job {number} of {name} did not end: {asked.uses[:3]}")
                _end_with(asked, roll)
            await asyncio.to_thread(roll.judge, self.seen.outcome, self._judge)
            self.seen.outcome.problems += self.system.leaks() if name == TRAINERS[0] else []
            self._say()

    def _say(self) -> None:
        """Print the problems that are new: the run goes on for hours."""
        problems = self.seen.outcome.problems
        for problem in problems[self._said :]:
            print(f"{self.name}, after {_now() - self._began:.0f} s: {problem}", file=sys.stderr, flush=True)
        self._said = len(problems)

    def _job(self, name: str, turns: int = 0) -> Job:
        pace = self._pace
        asked = job(self.system, PROMPTS, n=pace.n, max_tokens=pace.max_tokens, name=name)
        asked.model, asked.updates, asked.turns = str(self._model or ""), name == TRAINERS[0], turns
        if turns:
            asked.prompts = dict(list(asked.prompts.items())[:4])
            asked.max_tokens = 40
        return asked

    def _next(self) -> int:
        self._version += 1
        self._judge.asked(self._version, str(self._model or ""))
        return self._version

    def _drawn(self, name: str, rand: random.Random, number: int) -> Job:
        """Return a job: of `second` a long one, of the other one of one to three uses."""
        updates, drawn = name == TRAINERS[0], rand.random()
        kind = ("agents" if drawn < 0.3 else "images" if drawn < 0.6 else "plain") if updates else "long"
        asked = self._job(name, TURNS if kind == "agents" else 0)
        asked.rollout_id, asked.everything = f"{name}-{number % 7}", rand.random() < 0.5
        if kind == "images" and self._model is None:
            asked.images = rand.randrange(40)
        elif kind == "images":
            kind = "plain"
        uses = rand.randint(1, 3) if updates else self._pace.long_uses
        asked.uses = [self._use(rand, asked, number * 1_000 + place) for place in range(uses)]
        asked.uses[-1].cut = ""
        if updates:
            for use in asked.uses:
                use.version = self._next() if rand.random() < 0.6 else 0
        self.seen.jobs[kind] += 1
        self.seen.jobs["updates"] += sum(use.version > 0 for use in asked.uses)
        return asked

    def _use(self, rand: random.Random, asked: Job, seed: int) -> Use:
        use = Use(0 if self._model is not None else seed, 0)
        if rand.random() < 0.1 and not asked.turns:
            use.cut, use.seconds = rand.choice(("deadline", "cancel")), rand.uniform(0.05, 1.5)
        return use

    # --- faults ------------------------------------------------------------------------------

    async def _trouble(self) -> None:
        rand = random.Random(f"long faults {self._seed}")
        names = ["trainer", "second", *PROCESSES[:3], *self.system.engines]
        names += [] if self._model is None else [*POOL, *CHILD_OF]
        while not self._over:
            await asyncio.sleep(rand.uniform(0.2, 2 * self._pace.pause))
            name, what = rand.choice(names), rand.choice(("kill", "stop"))
            if what == "kill" and not self._may_die(name):
                what = "stop"
            if what == "stop" and name == "buffer" and self._later:
                continue
            seconds = rand.uniform(4.5, 13.0) if rand.random() < LONG_STOPS else rand.uniform(0.05, 1.5)
            pid = self.system.pid(name)
            if not self.system.signal(name, signal.SIGKILL if what == "kill" else signal.SIGSTOP):
                continue
            self.seen.outcome.faults.append(f"{what} {name}")
            if what == "kill":
                self._killed[name] = _now()
                continue
            await asyncio.sleep(seconds)
            if self.system.pid(name) == pid:
                self.system.signal(name, signal.SIGCONT)

    def _may_die(self, name: str) -> bool:
        """Say whether a kill leaves somebody who has the weights, and those alone that are to live on."""
        if self._later and name not in (*TRAINERS, self.system.engines[-1], "pool-owner", "pool-holder"):
            return False
        holders = {"buffer", *self.system.engines}
        others = [at for who, at in self._killed.items() if who in holders and who != name]
        return name not in holders or all(_now() - at > self._pace.heal for at in others)

    # --- measuring ---------------------------------------------------------------------------

    async def _measure(self) -> None:
        while True:
            await asyncio.to_thread(self._sample, _now() - self._began)
            await asyncio.sleep(SAMPLE_SECONDS)

    def _sample(self, at: float) -> None:
        pids = {name: self.system.pid(name) for name in (*self.system._slots, *TRAINERS)}
        self.seen.samples += sample(at, {name: pid for name, pid in pids.items() if pid is not None})
        for name in FOLDERS:
            size = folder_mib(self.system.folder / name)
            self.seen.folders.setdefault(name, []).append((at, size))

    async def _observe(self) -> None:
        """Ask for the status all the time; a buffer that was killed is asked again."""
        while True:
            try:
                async with self.system.client(OBSERVER) as client:
                    await self._ask(client)
            except SeerError:
                await asyncio.sleep(STATUS_SECONDS)

    async def _ask(self, client: RolloutClient) -> None:
        while True:
            began = time.monotonic()
            status = await client.status(30.0)
            took = time.monotonic() - began
            if _now() - self._began > self._seconds / 2 + LAG_WINDOW_SECONDS:
                self.seen.answers.append(took)
                self.seen.lag.append(status.loop_lag_seconds)
            await asyncio.sleep(STATUS_SECONDS)


def _end_with(asked: Job, roll: Roll) -> None:
    """Have a job that was ended owe nothing of the uses that had not ended."""
    ended = {line.use for line in trainer.lines(roll.place.out) if not line.id}
    for number, use in enumerate(asked.uses):
        use.cut = use.cut if number in ended else "end"


def _now() -> float:
    return asyncio.get_running_loop().time()
