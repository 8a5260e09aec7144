"""One run of a workload on a live system: what `bench/scheduling/real_engines.py` compares policies by.

Every run has a whole system of its own. Its tokens are those of the run before, so whatever outlives a
rollout (prefix caches, the KV pool, draft trees) would help it.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lib.processes import TICKS_PER_SECOND, cpu_seconds
from msgspec.structs import replace

from seer.client import RolloutClient, SamplingParams
from seer.client.prompts import Prompt
from seer.common.config import Config
from seer.common.policy.rollout_bound import lower_bound
from seer.common.policy.tail import tail_seconds
from seer.common.wire import InstanceStatus
from seer.local.system import LocalSystem
from seer.services.engine.server import STATUS_SECONDS

WARM_UP_TOKENS = 512


class CpuUse:
    """What some processes, and all others, take of the machine's cores from now on."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._pids = list(pids)
        self._begun = time.monotonic(), self._own_seconds(), _busy_seconds()

    def _own_seconds(self) -> float:
        return sum(map(cpu_seconds, self._pids))

    def shares(self) -> tuple[float, float]:
        """Return their share of all cores since the beginning, and the others'."""
        begun, own, busy = self._begun
        whole = (time.monotonic() - begun) * (os.cpu_count() or 1)
        mine = (self._own_seconds() - own) / whole
        return mine, max(0.0, (_busy_seconds() - busy) / whole - mine)


def _busy_seconds() -> float:
    """Return the CPU time that this machine has used, less what it was idle or waited for a disk."""
    fields = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / TICKS_PER_SECOND


@dataclass(frozen=True)
class Mode:
    """A fixed workload and the engines for it; `warm_up` groups of other prompts are run before.

    These make a batch of about what KV holds of the workload's responses, halfway through.
    """

    instances: int
    warm_up: int
    groups: int
    n: int
    max_tokens: int
    settings: tuple[str, ...]


@dataclass
class Run:
    """What one run of a contestant took; of Seer alone: `hashes`, and what engines said after warm-up."""

    name: str
    lengths: list[int]
    finish_times: list[float]
    preemptions: int
    cpu_shares: tuple[float, float]
    chunks: int = 0
    migrations: int = 0
    hashes: dict[str, str] = field(default_factory=dict)
    instances: list[InstanceStatus] = field(default_factory=list)

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
            "cpu_share": round(self.cpu_shares[0], 3),
            "cpu_share_of_others": round(self.cpu_shares[1], 3),
        }


async def run_seer(
    policy: str,
    mode: Mode,
    config: Config,
    prompts: Sequence[list[int]],
    others: Sequence[list[int]],
    seed: int,
) -> Run:
    """Run the workload once, after a warm-up on other prompts. Tokens follow from the seed.

    `policy` may name a source of drafts after a slash: "static/off".
    """
    name, _, source = policy.partition("/")
    config = replace(config, buffer=replace(config.buffer, policy=name))
    if source:
        config = replace(config, drafts=replace(config.drafts, source=source))
    async with (
        LocalSystem(config, mode.instances) as system,
        RolloutClient(system.endpoint) as client,
    ):
        instances = await warm_up(client, mode, others, seed, 2 * STATUS_SECONDS)
        use = CpuUse([os.getpid(), *system.pids.values()])  # this process is the trainer
        named = [Prompt(f"p{number}", token_ids=tokens) for number, tokens in enumerate(prompts)]
        sampling = SamplingParams(max_tokens=mode.max_tokens)
        begun = time.monotonic()
        rollout = await client.submit(named, n=mode.n, sampling=sampling, seed=seed, rollout_number=0)
        groups = await rollout.result()
        seconds = time.monotonic() - begun
        shares = use.shares()
    responses = [(f"{g.prompt_id}#{r.index}", r.token_ids) for g in groups for r in g.responses]
    return Run(
        name=policy,
        lengths=[tokens.size for _, tokens in responses],
        finish_times=[*sorted(rollout.finish_times)[:-1], seconds],
        preemptions=sum(group.preemptions for group in groups),
        cpu_shares=shares,
        chunks=sum(group.chunks for group in groups),
        migrations=sum(group.migrations for group in groups),
        hashes={name: hashlib.blake2b(tokens.tobytes()).hexdigest() for name, tokens in responses},
        instances=instances,
    )


async def warm_up(
    client: RolloutClient, mode: Mode, others: Sequence[list[int]], seed: int, report_seconds: float
) -> list[InstanceStatus]:
    """Have engines run that batch, then one request at a time; return how fast they say they were."""
    if others:
        sampling = SamplingParams(max_tokens=WARM_UP_TOKENS)
        await (await client.submit(others, n=mode.n, sampling=sampling, seed=seed)).result()
        for tokens in others[: 2 * mode.instances]:
            await (await client.submit([tokens], n=1, sampling=sampling, seed=seed)).result()
        await asyncio.sleep(report_seconds)
    return (await client.status()).instances
