"""Rollouts on real processes and sockets, of which a seed kills and stops some at random moments.

The processes stay up from rollout to rollout. Trainers come back under their name and rollout id, use ids
again for other seeds, are cut short by deadlines and cancels, and update weights in between. A seed draws
the same faults each time, though not the same interleaving.
"""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from msgspec.structs import replace

from chaos.outcome import Outcome
from chaos.rollouts import Judge, Roll, job
from chaos.system import System, replay
from chaos.trainer import IMAGE_NUMBERS, Job, Use
from seer.common.config import BufferConfig, Config

PROCESSES = ("buffer", "context", "dgds", "engine", "trainer")
BOUND_SECONDS = 120.0
"""Longest time from a rollout's last fault to its end; generous, since machines that run tests are busy."""

REAL_BOUND_SECONDS = 600.0
"""The same for vLLM engines: both may have been killed, and a busy machine needs minutes to start them."""

LONG_STOPS = 0.15
"""Share of the faults that are long, where long ones are wanted."""

UPDATE_SHARE, SECOND_SHARE, CUT_SHARE = 0.3, 0.4, 0.4
"""Of the rollouts: with other weights first, with a second trainer, with a use of the id that is cut short."""

IMAGES_SHARE, SPOILT_SHARE = 0.4, 0.3
"""Of the rollouts: with images, and, of these, with damage to the file of one on the buffer's disk."""

DIVERGED_SHARE = 0.6
"""Of the rollouts with vLLM: with weights first that have NaN in a tensor, and are to be refused."""

TRAINERS = ("trainer", "second")


@dataclass(frozen=True, slots=True)
class Load:
    """What every rollout asks for, and how many faults it gets in its first `burst_seconds`."""

    prompts: int = 12
    n: int = 4
    max_tokens: int = 160
    faults: int = 4
    burst_seconds: float = 3.0
    long_stops: bool = False
    kinds: tuple[str, ...] = PROCESSES


@dataclass(slots=True)
class Result:
    """The seeds' outcomes; `use` has, by service, resident MiB and open files before and after, a pair a process."""

    outcomes: list[Outcome] = field(default_factory=list)
    use: dict[str, dict[str, list[list[float]]]] = field(default_factory=dict)


def quick(backend: Literal["vllm", "replay"] = "replay") -> Config:
    """Return a configuration that notices losses sooner than the default: there are many to notice."""
    config = replay(step_seconds=0.015)
    buffer = BufferConfig(chunk_size=16, engine_silence_seconds=4.0, result_ttl_seconds=8.0)
    return replace(config, buffer=buffer, engine=replace(config.engine, backend=backend))


class Campaign:
    """One system, and what its rollouts have in common."""

    def __init__(self, system: System, load: Load, model: Path | None) -> None:
        self.system, self.load, self.model, self.real = system, load, model, model is not None
        self.judge = Judge(system)
        self._bound = REAL_BOUND_SECONDS if self.real else BOUND_SECONDS
        self._version = 0

    async def begin(self) -> None:
        """Have a rollout made without faults, for engines whose answers nobody can compute."""
        if self.real:
            roll = Roll(self.system, job(self.system, self.load.prompts, max_tokens=self.load.max_tokens))
            await asyncio.wait_for(roll.run(), self._bound)
            self.judge = Judge(self.system, roll.lines())

    async def rollout(self, seed: int) -> Outcome:
        """Run the rollouts of a seed under its faults and judge them."""
        outcome, rand = Outcome(seed), random.Random(f"processes {seed}")
        rolls = [Roll(self.system, each) for each in self._jobs(random.Random(f"trainers {seed}"))]
        clock = asyncio.get_running_loop().time
        outcome.faults += ["diverged weights" for roll in rolls if roll.job.diverged]
        began = clock()
        # Weights are lost with the buffer and every engine that has them: not both are killed, once any came.
        spared = rand.choice(("buffer", "engine")) if self._version else ""
        running = asyncio.gather(*(roll.run() for roll in rolls))
        spoilt = random.Random(f"spoilt {seed}")
        try:
            faults = [self._inflict(rand.randbytes(8), outcome, spared) for _ in range(self.load.faults)]
            if any(roll.job.images >= 0 for roll in rolls) and spoilt.random() < SPOILT_SHARE:
                faults.append(self._spoil(spoilt, outcome))
            ends = await asyncio.gather(*faults)
            await asyncio.wait_for(running, self._bound)
        except TimeoutError:
            outcome.problems.append(f"not finished {self._bound:g} s after the last fault")
        finally:
            running.cancel()
            await asyncio.wait([running])
        outcome.seconds = clock() - began
        arrivals = [at for roll in rolls for at in roll.arrivals]
        outcome.recovered([end for end in ends if end is not None], arrivals)
        for roll in rolls:
            roll.judge(outcome, self.judge)
        outcome.count()
        outcome.problems += self.system.leaks()
        return outcome

    def _jobs(self, rand: random.Random) -> Iterator[Job]:
        for name in TRAINERS[: 1 + (rand.random() < SECOND_SHARE)]:
            asked = job(
                self.system, self.load.prompts, n=self.load.n, max_tokens=self.load.max_tokens, name=name
            )
            asked.rollout_id = f"{name}-{rand.randrange(2)}"
            asked.everything = rand.random() < 0.5
            asked.updates = name == TRAINERS[0]
            # Two uses never share noise: the second one would be refused what the first one has had.
            seeds = [0, 0] if self.real else [rand.randrange(100), rand.randrange(100, 200)]
            if rand.random() < CUT_SHARE:
                cut, seconds = rand.choice(("deadline", "cancel")), rand.uniform(0.05, 1.5)
                asked.uses = [Use(seeds[0], 0, cut, seconds), Use(seeds[1], 0)]
            else:
                asked.uses = [Use(seeds[1], 0)]
            if name == TRAINERS[0] and not self.real and rand.random() < UPDATE_SHARE:
                self._version += 1
                asked.uses[-1].version = self._version
                self.judge.asked(self._version)
            if name == TRAINERS[0] and self.model is not None and rand.random() < DIVERGED_SHARE:
                asked.diverged = str(self.model)
            images = random.Random(f"images {asked.rollout_id} {seeds}")
            if not self.real and images.random() < IMAGES_SHARE:
                asked.images = images.randrange(40)
            yield asked

    async def _spoil(self, rand: random.Random, outcome: Outcome) -> None:
        """Damage the file of an image that the buffer keeps, at some moment."""
        await asyncio.sleep(rand.uniform(0.2, self.load.burst_seconds))
        folder = Path(self.system.config.buffer.images) / "seer-images"
        files = sorted(file for file in folder.glob("*") if file.stat().st_size > IMAGE_NUMBERS)
        if files:
            with rand.choice(files).open("r+b") as opened:
                opened.seek(IMAGE_NUMBERS)
                opened.write(b"damage")
            outcome.faults.append("spoil image")

    async def _inflict(self, seed: bytes, outcome: Outcome, spared: str) -> float | None:
        """Kill or stop somebody at some moment; return when it was over, None when nobody was there.

        Who is `spared` is not killed.
        """
        rand = random.Random(seed)
        await asyncio.sleep(rand.uniform(0.2, self.load.burst_seconds))
        what, kind = rand.choice(("kill", "stop")), rand.choice(self.load.kinds)
        what = "stop" if kind == spared else what
        seconds = rand.uniform(0.05, 1.5)
        if self.load.long_stops and rand.random() < LONG_STOPS:
            seconds = rand.uniform(4.5, 13.0)  # past silence and heartbeats
        name = rand.choice({"engine": self.system.engines, "trainer": TRAINERS}.get(kind, [kind]))
        if not self.system.signal(name, signal.SIGKILL if what == "kill" else signal.SIGSTOP):
            return None
        outcome.faults.append(f"{what} {kind}")
        if what == "stop":
            pid = self.system.pid(name)
            await asyncio.sleep(seconds)
            if self.system.pid(name) == pid:  # else killed meanwhile
                self.system.signal(name, signal.SIGCONT)
        return asyncio.get_running_loop().time()


async def _run(system: System, load: Load, seeds: Iterator[int], result: Result, model: Path | None) -> None:
    last: Outcome | None = None
    async with system:
        campaign = Campaign(system, load, model)
        await campaign.begin()
        before = system.use()
        for seed in seeds:
            last = await campaign.rollout(seed)
            result.outcomes.append(last)
        after = system.use()
    for name in before.keys() & after.keys():
        mine, later = before[name], after[name]
        of_kind = result.use.setdefault(name.partition("-")[0], {"mib": [], "files": []})
        of_kind["mib"].append([round(mine.mib, 1), round(later.mib, 1)])
        of_kind["files"].append([mine.files, later.files])
    left = system.leftovers()
    if left and last is not None:
        last.problems += [f"left over: {what}" for what in left]


async def campaign(seeds: Iterable[int], load: Load, model: Path | None = None, systems: int = 1) -> Result:
    """Run the rollouts of each seed on one of so many systems; with `model`, on vLLM engines.

    What is wrong with a system as a whole is a problem of its last seed.
    """
    result, shared = Result(), iter(seeds)
    made = []
    for number in range(systems):
        config = quick() if model is None else quick("vllm")
        system = System(config, model=model, tcp=number % 2 == 1, trainers=TRAINERS)
        # Both outlive a killed buffer; of images there is room for 28, fewer than rollouts use at once, and
        # for 21 of a trainer, as many as a rollout uses.
        folders = {"spool": str(system.folder / "spool"), "images": str(system.folder / "images")}
        buffer = replace(system.config.buffer, image_bytes=80_000_000, **folders)
        system.config = replace(system.config, buffer=buffer)
        made.append(_run(system, load, shared, result, model))
    await asyncio.gather(*made)
    return result
