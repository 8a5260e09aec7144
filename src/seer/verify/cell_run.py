"""One cell of `seer verify`: a system of its own, and the prompts through it.

Invariants:
- every cell draws from the same keys: same seed, same rollout number, same prompt ids;
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
from collections.abc import Callable
from pathlib import Path

import msgspec

from seer.client import Group, Prompt, RolloutClient
from seer.common.config import Config
from seer.common.pool import ask_master, read_figures
from seer.common.types import SamplingParams
from seer.common.wire import InstanceStatus, Progress
from seer.local.system import LocalSystem
from seer.report.pool import pool_use
from seer.rollout.progress import Show, showing
from seer.verify.cells import Cell

ROLLOUT_NUMBER = 0

STATUS_WAIT_SECONDS = 10.0
"""How long the engines' last counters may take to reach the buffer."""

Say = Callable[[str], None]


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What to verify.

    `matrix` names cells, comma-separated; empty: all that can run here. `logprob_tolerance` is in
    raw logits; None: by the model's dtype. `cell_seconds` is the deadline of one cell's rollout.
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


class CellRun(msgspec.Struct, frozen=True, kw_only=True):
    """What a cell produced. `kv_blocks` are an engine's; `seconds` from submission to the end."""

    groups: list[Group]
    counters: dict[str, int]
    versions: dict[str, str]
    seconds: float
    kv_blocks: int = 0


async def run_cell(
    cell: Cell, config: Config, job: Job, prompts: list[Prompt], say: Say, halfway: int
) -> CellRun:
    """Run the prompts through a system of its own; `halfway` in tokens is when an engine is killed.

    Raises `SeerError`s when the system cannot start or go on, or the rollout fails.
    """
    async with LocalSystem(config, cell.instances, say=say) as system:

        def kill() -> None:
            say(f"{cell.name}: killing engine-0")
            with contextlib.suppress(ProcessLookupError):  # it was lost just now
                os.kill(system.pids["engine-0"], signal.SIGKILL)

        if cell.again:
            await system.run(_roll(system.endpoint, job, prompts, None, halfway))
        found = await system.run(_roll(system.endpoint, job, prompts, kill if cell.killed else None, halfway))
        if cell.disk:
            figures = read_figures(await ask_master(system.config.pool.metrics))
            found.counters["pool_ssd_reads"] = figures.ssd_reads
        return found


async def _roll(
    endpoint: str, job: Job, prompts: list[Prompt], kill: Callable[[], None] | None, halfway: int
) -> CellRun:
    async with RolloutClient(endpoint) as client:
        started = time.monotonic()
        rollout = await client.submit(
            prompts,
            n=job.n,
            sampling=job.sampling,
            seed=job.seed,
            rollout_number=ROLLOUT_NUMBER,
            deadline_seconds=job.cell_seconds,
        )
        with showing(len(prompts) * job.n) as show:
            rollout.on_progress = show if kill is None else _and_once(show, kill, halfway)
            groups = await rollout.result()
        seconds = time.monotonic() - started
        tokens = sum(response.token_ids.size for group in groups for response in group.responses)
        instances = await _final_status(client, tokens)
    counters = _counters(groups, instances) | {"tokens": tokens}
    return CellRun(
        groups=groups,
        counters=counters,
        versions=instances[0].versions,
        seconds=seconds,
        kv_blocks=instances[0].capacity.kv_blocks,
    )


def _and_once(show: Show, act: Callable[[], None], tokens: int) -> Show:
    """Show progress, and act when there are so many tokens."""
    left = [act]

    def shown(progress: Progress) -> None:
        show(progress)
        if left and progress.tokens >= tokens:
            left.pop()()

    return shown


def _counters(groups: list[Group], instances: list[InstanceStatus]) -> dict[str, int]:
    pool = pool_use([instance.stats for instance in instances])
    return {
        "responses": sum(len(group.responses) for group in groups),
        "chunks": sum(group.chunks for group in groups),
        "migrations": sum(group.migrations for group in groups),
        "preemptions": sum(group.preemptions for group in groups),
        "engines_used": sum(instance.stats.generated_tokens > 0 for instance in instances),
        "restarts": sum(instance.restarts for instance in instances),
        "tensor_parallel": int(instances[0].versions.get("tensor_parallel", 1)),
        "verifications": sum(instance.stats.verifications for instance in instances),
        "drafted_tokens": sum(instance.stats.drafted_tokens for instance in instances),
        "accepted_tokens": sum(instance.stats.accepted_tokens for instance in instances),
        "pool_tokens": pool.pool_tokens,
        "pool_saved_blocks": pool.saved_blocks,
        "pool_dropped_blocks": pool.dropped_blocks,
        "pool_failures": pool.failures,
        "pool_corrupt": pool.corrupt,
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
            return instances
        await asyncio.sleep(0.2)
