"""One workload on one set of live engines, run after run: what `bench/live.py` compares policies by.

Engines and the dgds stay up; every run has a buffer and a context service of its own. On vLLM it begins
with weights loaded anew, which empties prefix caches and draft trees: the tokens are those of the
run before, and nothing of it may help.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from msgspec.structs import asdict, replace

from seer.child import Child
from seer.client import RolloutClient, SamplingParams
from seer.client.prompts import Prompt
from seer.common.config import Config, Endpoints
from seer.common.types import InstanceStats
from seer.hardware import plan_engines
from seer.rollout_job import tail_seconds
from seer.sim.bound import lower_bound

START_SECONDS = 300.0
JOIN_PAUSE_SECONDS = 0.1
TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pids: Iterable[int]) -> float:
    """Return the CPU time that processes have used."""
    total = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total / TICKS


def cpu_share(used: float, seconds: float) -> float:
    """Return CPU seconds as a share of what all cores of this process could give."""
    return used / seconds / len(os.sched_getaffinity(0))


@dataclass(frozen=True)
class Mode:
    """A fixed workload and the engines for it."""

    instances: int
    groups: int
    n: int
    max_tokens: int
    settings: tuple[str, ...]


@dataclass
class Run:
    """What one run of a contestant took; `hashes` by response, of Seer alone."""

    name: str
    lengths: list[int]
    finish_times: list[float]
    preemptions: int
    cpu_share: float
    chunks: int = 0
    migrations: int = 0
    hashes: dict[str, str] = field(default_factory=dict)

    def figures(self, capacity: float, alone: float) -> dict[str, float]:
        """Return what is reported, by name."""
        tokens, seconds = sum(self.lengths), max(self.finish_times)
        bound = lower_bound(tokens, max(self.lengths), capacity, alone)
        return {
            "seconds": round(seconds, 2),
            "tokens": tokens,
            "tokens_per_s": round(tokens / seconds, 1),
            "tail_seconds": round(tail_seconds(self.finish_times), 2),
            "bound_seconds": round(bound, 2),
            "efficiency": round(bound / seconds, 3),
            "preemptions_per_request": round(self.preemptions / len(self.lengths), 2),
            "chunks": self.chunks,
            "migrations": self.migrations,
            "cpu_share": round(self.cpu_share, 3),
        }


class System:
    """Engines and a dgds that stay up, under a buffer and a context service that come and go."""

    def __init__(self, mode: Mode, config: Config, folder: Path) -> None:
        names = {name: f"ipc://{folder}/{name}" for name in asdict(Endpoints()) if name != "bind_host"}
        self.mode = mode
        self.config = replace(config, endpoints=Endpoints(**names))
        self.stats: list[InstanceStats] = []
        self.versions: dict[str, str] = {}
        self._folder = folder
        self._staying: list[Child] = []
        self._coming: list[Child] = []
        self._version = 0

    @property
    def pids(self) -> list[int]:
        """Process ids of what runs now, and of this process: it is the trainer."""
        return [os.getpid(), *(child.process.pid for child in (*self._staying, *self._coming))]

    async def start(self) -> None:
        """Start what stays; done when every engine has loaded."""
        plans = plan_engines(self.config.engine, self.mode.instances)
        wanted = [("dgds", "dgds", self.config, {})]
        wanted += [
            ("engine", plan.config.name, replace(self.config, engine=plan.config), plan.environ)
            for plan in plans
        ]
        for each in wanted:
            self._staying.append(await Child.spawn(*each, self._folder, logged=True))
        async with self._serving("divided"):  # an engine is ready once it has a buffer
            for child in self._staying:
                await child.ready(START_SECONDS)

    async def close(self) -> None:
        """End it."""
        await _end(self._staying)

    @contextlib.asynccontextmanager
    async def _serving(self, policy: str) -> AsyncIterator[None]:
        config = replace(self.config, buffer=replace(self.config.buffer, policy=policy))
        try:
            for name in ("buffer", "context"):
                self._coming.append(await Child.spawn(name, name, config, {}, self._folder, logged=True))
            for child in self._coming:
                await child.ready(START_SECONDS)
            yield
        finally:
            await _end(self._coming)
            self._coming.clear()

    @contextlib.asynccontextmanager
    async def client(self, policy: str) -> AsyncIterator[RolloutClient]:
        """Serve with a policy; all engines are there, their caches empty."""
        async with self._serving(policy), RolloutClient(self.config.endpoints.trainers) as client:
            async with asyncio.timeout(START_SECONDS):
                while len((await client.status()).instances) < self.mode.instances:  # noqa: ASYNC110 - remote
                    await asyncio.sleep(JOIN_PAUSE_SECONDS)
            if self.config.engine.backend == "vllm":
                self._version += 1
                await client.update_weights(self._version, Path(self.config.shared.model))
            yield client
            await asyncio.sleep(2 * self.config.engine.status_seconds)  # engines report what they did
            instances = (await client.status()).instances
            self.stats = [instance.stats for instance in instances]
            self.versions = instances[0].versions

    async def run(self, policy: str, prompts: Sequence[list[int]], seed: int) -> Run:
        """Run the workload once. Tokens follow from the seed."""
        async with self.client(policy) as client:
            used, begun = cpu_seconds(self.pids), time.monotonic()
            named = [Prompt(f"p{number}", token_ids=tokens) for number, tokens in enumerate(prompts)]
            rollout = await client.submit(
                named, n=self.mode.n, sampling=SamplingParams(max_tokens=self.mode.max_tokens),
                seed=seed, rollout_number=0,
            )  # fmt: skip
            groups = await rollout.result()
            seconds = time.monotonic() - begun
            share = cpu_share(cpu_seconds(self.pids) - used, seconds)
        responses = [(f"{g.prompt_id}#{r.index}", r.token_ids) for g in groups for r in g.responses]
        return Run(
            name=policy,
            lengths=[tokens.size for _, tokens in responses],
            finish_times=[*sorted(rollout.finish_times)[:-1], seconds],
            preemptions=sum(group.preemptions for group in groups),
            cpu_share=share,
            chunks=sum(group.chunks for group in groups),
            migrations=sum(group.migrations for group in groups),
            hashes={name: hashlib.blake2b(tokens.tobytes()).hexdigest() for name, tokens in responses},
        )

    async def warm_up(self, prompts: Sequence[list[int]], seed: int) -> None:
        """Run the workload to half its length, then one response at a time."""
        async with self.client("divided") as client:
            sampling = SamplingParams(max_tokens=self.mode.max_tokens // 2)
            await (await client.submit(prompts, n=self.mode.n, sampling=sampling, seed=seed)).result()
            for prompt in prompts:
                await (await client.submit([prompt], n=1, sampling=sampling, seed=seed)).result()


async def _end(children: Sequence[Child]) -> None:
    for child in children:
        child.kill_group()
    await asyncio.gather(*(child.gone(10.0) for child in children))
