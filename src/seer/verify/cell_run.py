"""The cells of `seer verify`: for each one a system, and the prompts through it.

Invariants:
- every cell draws from the same keys: same seed, same rollout number, same prompt ids;
- one system is there at a time; cells that differ in the buffer alone follow each other on the same engines,
  each with a buffer of its own;
- engines that go on to the next cell have slept in between: they keep no KV, so each cell computes all of
  its prompts and prefixes itself;
- the counters of a cell that runs twice are of both runs;
- what an engine counted before it was killed is not in the counters: what they say of the pool, the
  engine that came back did.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Self

import msgspec
from msgspec.structs import replace

from seer.client import Group, Prompt, RolloutClient
from seer.common.config import BufferConfig, Config, SecurityConfig
from seer.common.errors import SeerError
from seer.common.pool_metrics import ask_master, read_figures
from seer.common.types import SamplingParams
from seer.common.wire import InstanceStatus, Progress
from seer.local.system import LocalSystem
from seer.report.engine_use import total
from seer.rollout.progress import Show, showing
from seer.services.engine.planted_fault import PLANTED
from seer.verify import turns
from seer.verify.cells import Cell
from seer.verify.turns import Shown

ROLLOUT_NUMBER = 0

REGISTER_SECONDS = 60.0
"""How long engines may take to notice that their buffer is another one."""

STATUS_WAIT_SECONDS = 10.0
"""How long the engines' last counters may take to reach the buffer."""

Say = Callable[[str], None]


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What to verify.

    `matrix` names cells, comma-separated; empty: all that can run here. `logprob_tolerance` is in
    raw logits; None: by the model's dtype. `cell_seconds` is the deadline of one cell's rollout.
    `turns`: cells are those whose responses have turns. `trainer`: with whose forward pass the reference's
    logprobs are compared; None: with none.
    """

    prompts: Path
    n: int
    sampling: SamplingParams
    seed: int
    config: Config
    matrix: str = ""
    min_tokens: int = 10_000
    logprob_tolerance: float | None = None
    plant_fault: bool = False
    cell_seconds: float = 3600.0
    turns: bool = False
    trainer: str | None = None


class CellRun(msgspec.Struct, frozen=True, kw_only=True):
    """What a cell produced. `kv_blocks` are an engine's; `seconds` from submission to the end.

    `images`: what each response saw. `generated`: tokens that each engine has generated since it started, by
    name.
    """

    groups: list[Group]
    counters: dict[str, int]
    versions: dict[str, str]
    seconds: float
    kv_blocks: int = 0
    images: Shown = {}
    generated: dict[str, int] = {}


class Runner:
    """Runs cells one after the other; use as `async with Runner(job, prompts, say) as runner`."""

    def __init__(self, job: Job, prompts: list[Prompt], say: Say) -> None:
        self.job, self.say = job, say
        self._prompts = prompts
        self._started = AsyncExitStack()
        self._system: LocalSystem | None = None
        self._engines: tuple[int, Config, int | None] | None = None
        self._generated: dict[str, int] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._end()

    async def run(
        self,
        cell: Cell,
        config: Config,
        n: int,
        halfway: int = 0,
        sampling: SamplingParams | None = None,
        fault: int | None = None,
    ) -> CellRun:
        """Run the prompts, with n responses each; `halfway` in tokens is when an engine is killed.

        `sampling`: None for the job's; `fault`: the position that its engines draw wrongly. Raises
        `SeerError`s when the system cannot start or go on, or the rollout fails; the next cell then has new
        engines.
        """
        self.say(f"{cell.name}: {cell.about}")
        try:
            sampling = sampling or self.job.sampling
            if config.engine.routed_experts:
                sampling = replace(sampling, routed_experts_from=0)
            job = replace(self.job, n=n, sampling=sampling)
            found = await self._run(await self._ready(cell, config, fault), cell, job, halfway)
        except BaseException as error:
            await self._end(error)
            raise
        self.say(f"{cell.name}: {found.counters['tokens']} tokens in {found.seconds:.1f} s")
        return found

    async def _ready(self, cell: Cell, config: Config, fault: int | None) -> LocalSystem:
        """Return a system whose engines hold no KV: the one that is there if only its buffer differs."""
        asked = cell.instances, replace(config, buffer=BufferConfig()), fault
        engines = asked if cell.shares_engines else None
        if self._system is not None and engines is not None and engines == self._engines:
            await self._system.restart_buffer(config.buffer)
            await self._system.run(_forget_kv(self._system.endpoint, cell.instances))
            return self._system
        await self._end()
        planted = {} if fault is None else {PLANTED: str(fault)}
        system = LocalSystem(config, cell.instances, say=self.say, environ=planted)
        self._system = await self._started.enter_async_context(system)
        self._engines, self._generated = engines, {}
        return self._system

    async def _end(self, error: BaseException | None = None) -> None:
        """Stop the system that is there; in order, unless there was an error."""
        self._system = None
        started, self._started = self._started, AsyncExitStack()
        await started.__aexit__(type(error) if error else None, error, None)

    async def _run(self, system: LocalSystem, cell: Cell, job: Job, halfway: int) -> CellRun:
        def kill() -> None:
            self.say(f"{cell.name}: killing engine-0")
            with contextlib.suppress(ProcessLookupError):  # it was lost just now
                os.kill(system.pids["engine-0"], signal.SIGKILL)

        if cell.again:
            await system.run(_roll(system.endpoint, cell, job, self._prompts, {}))
        watch = partial(_and_once, act=kill, tokens=halfway) if cell.killed else None
        found = await system.run(_roll(system.endpoint, cell, job, self._prompts, self._generated, watch))
        self._generated = found.generated
        if cell.disk:
            figures = read_figures(await ask_master(system.config.pool.metrics))
            found.counters["pool_ssd_reads"] = figures.ssd_reads
        return found


async def _forget_kv(endpoint: str, instances: int) -> None:
    """Wait until so many engines registered, and have them drop all the KV that they keep.

    Raises `SeerError` when they are not there in time, or fail.
    """
    async with RolloutClient(endpoint, security=SecurityConfig()) as client:
        deadline = time.monotonic() + REGISTER_SECONDS
        while len((await client.status()).instances) < instances:
            if time.monotonic() > deadline:
                raise SeerError(f"not all engines registered within {REGISTER_SECONDS:g} s of a new buffer")
            await asyncio.sleep(0.1)
        await client.sleep()
        await client.wake()


async def _roll(
    endpoint: str,
    cell: Cell,
    job: Job,
    prompts: list[Prompt],
    before: Mapping[str, int],
    watch: Callable[[Show], Show] | None = None,
) -> CellRun:
    """Run the prompts; `before`: tokens that each engine had generated, by name."""
    async with RolloutClient(endpoint, security=SecurityConfig()) as client:
        started = time.monotonic()
        if cell.turns:
            groups, images = await turns.run(client, prompts, job, resent=cell.resent)
        else:
            images = {(prompt.id, index): prompt.images for prompt in prompts for index in range(job.n)}
            groups = await _respond(client, job, prompts, watch)
        seconds = time.monotonic() - started
        tokens = sum(response.token_ids.size for group in groups for response in group.responses)
        counted = {"tokens": tokens} | _stops(groups, job.sampling)
        if cell.turns:  # what tools added was not generated, and groups know nothing of their turns' chunks
            buffer = (await client.status()).counters
            counted |= {name: buffer[name] for name in ("tokens", "chunks", "migrations", "preemptions")}
            counted["context_tokens"] = tokens + sum(g.prompt_token_ids.size * job.n for g in groups)
        instances = await _final_status(client, counted["tokens"] + sum(before.values()))
    generated = {instance.name: instance.stats.generated_tokens for instance in instances}
    counters = _counters(groups, instances) | counted
    counters["engines_used"] = sum(total > before.get(name, 0) for name, total in generated.items())
    return CellRun(
        groups=groups,
        counters=counters,
        versions=instances[0].versions,
        seconds=seconds,
        kv_blocks=instances[0].capacity.kv_blocks,
        images=images,
        generated=generated,
    )


async def _respond(
    client: RolloutClient, job: Job, prompts: list[Prompt], watch: Callable[[Show], Show] | None
) -> list[Group]:
    rollout = await client.submit(
        prompts,
        n=job.n,
        sampling=job.sampling,
        seed=job.seed,
        rollout_number=ROLLOUT_NUMBER,
        deadline_seconds=job.cell_seconds,
    )
    with showing(len(prompts) * job.n) as show:
        rollout.on_progress = show if watch is None else watch(show)
        return await rollout.result()


def _and_once(show: Show, act: Callable[[], None], tokens: int) -> Show:
    """Show progress, and act when there are so many tokens."""
    left = [act]

    def shown(progress: Progress) -> None:
        show(progress)
        if left and progress.tokens >= tokens:
            left.pop()()

    return shown


def _stops(groups: list[Group], sampling: SamplingParams) -> dict[str, int]:
    """Count responses that ended by a stop string, and by a token of `stop_token_ids`."""
    reasons = [response.stop_reason for group in groups for response in group.responses]
    return {
        "text_stops": sum(reason in sampling.stop for reason in reasons),
        "id_stops": sum(reason in map(str, sampling.stop_token_ids) for reason in reasons),
    }


_POOL_COUNTS = ("pool_tokens", "pool_saved_blocks", "pool_dropped_blocks", "pool_failures", "pool_corrupt")


def _counters(groups: list[Group], instances: list[InstanceStatus]) -> dict[str, int]:
    use = total([instance.stats for instance in instances])
    return {
        "responses": sum(len(group.responses) for group in groups),
        "chunks": sum(group.chunks for group in groups),
        "migrations": sum(group.migrations for group in groups),
        "preemptions": sum(group.preemptions for group in groups),
        "restarts": sum(instance.restarts for instance in instances),
        "tensor_parallel": int(instances[0].versions.get("tensor_parallel", 1)),
        "data_parallel": int(instances[0].versions.get("data_parallel", 1)),
        "dummy_steps": use.dummy_steps,
        "verifications": use.verifications,
        "drafted_tokens": use.drafted_tokens,
        "accepted_tokens": use.accepted_tokens,
        "computed_tokens": use.prompt_tokens - use.cached_tokens,
        **{name: getattr(use, name) for name in _POOL_COUNTS},
        "pool_ssd_reads": 0,
    }


async def _final_status(client: RolloutClient, tokens: int) -> list[InstanceStatus]:
    """Return the instances once they have reported all tokens, or as they are after a while.

    What a killed engine had generated nobody reports: there, all must have done something, and be idle.
    """
    deadline = time.monotonic() + STATUS_WAIT_SECONDS
    while True:
        instances = (await client.status()).instances
        stats = [instance.stats for instance in instances]
        rested = all(each.generated_tokens and not (each.running or each.waiting) for each in stats)
        killed = any(instance.restarts for instance in instances)
        whole = sum(each.generated_tokens for each in stats) >= tokens
        if whole or (killed and rested) or time.monotonic() > deadline:
            if not instances:
                raise SeerError("no engine is there any more, after all responses were")
            return instances
        await asyncio.sleep(0.2)
