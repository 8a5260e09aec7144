"""Stops of the KV pool's processes, under vLLM engines that move chunks, and their KV, between each other.

Invariants:
- rollouts go on while any of them stands still, with the same tokens;
- afterwards the pool serves again by itself: blocks are saved, and read, once more.
"""

from __future__ import annotations

import asyncio
import importlib.util
import signal
from collections.abc import Sequence
from pathlib import Path

from chaos.rollouts import Roll, job
from chaos.stops import SECONDS, Trial
from chaos.system import System
from seer.client import RolloutClient
from seer.common.config import BufferConfig, Config, EngineConfig, PoolConfig

TARGETS = ("pool-master", "pool-program", "pool-owner", "pool-holder")
"""The services, and what they run: Mooncake's master, and the process that holds the memory."""

PROMPTS, MAX_TOKENS = 6, 160
BOUND_SECONDS = 240.0
"""Longest rollout, and longest time until the pool serves again."""


def problem() -> str:
    """Say why there can be no pool here; empty when there can."""
    missing = [name for name in ("vllm", "mooncake") if importlib.util.find_spec(name) is None]
    return f"{' and '.join(missing)} cannot be imported" if missing else ""


def config() -> Config:
    """Return a configuration in which every request moves after each chunk."""
    return Config(
        buffer=BufferConfig(policy="migrate", chunk_size=32),
        engine=EngineConfig(backend="vllm", kv_blocks=300, max_model_len=512, max_num_seqs=16),
        pool=PoolConfig(kind="mooncake", dram_gib=0.25, pull_tokens=0),
    )


class Stops:
    """Stops one after the other on one system."""

    def __init__(self, system: System, client: RolloutClient) -> None:
        self._system, self._client = system, client
        self._number = 0

    async def roll(self, number: int) -> dict[str, object]:
        """Return the answers to rollout `number`, which has tokens of its own."""
        roll = Roll(self._system, job(self._system, PROMPTS, max_tokens=MAX_TOKENS, number=number))
        await asyncio.wait_for(roll.run(), BOUND_SECONDS)
        if roll.failed:
            raise AssertionError(roll.failed)
        return {line.id: line.answers for line in roll.lines()}

    async def _used(self) -> tuple[int, int, bool]:
        await asyncio.sleep(1.5)  # engines report every second
        stats = [instance.stats for instance in (await self._client.status(60.0)).instances]
        away = any(each.pool_away for each in stats)
        return sum(each.pool_saved_blocks for each in stats), sum(each.pool_tokens for each in stats), away

    async def serves(self) -> float:
        """Roll until the pool saves and is read; return the seconds it took. Raises `TimeoutError`."""
        clock = asyncio.get_running_loop().time
        began = clock()
        async with asyncio.timeout(BOUND_SECONDS):
            while True:
                saved, read, _ = await self._used()
                self._number += 1
                await self.roll(self._number)
                now_saved, now_read, away = await self._used()
                if now_saved > saved and now_read > read and not away:
                    return clock() - began

    async def trial(self, target: str, seconds: float) -> Trial:
        """Stop a process for so long while rollouts are made, and judge these by making one again."""
        clock, system = asyncio.get_running_loop().time, self._system
        began, problems, rolled = clock(), [], {}
        changed = responses = 0
        recovery: float | None = None
        pid = system.pid(target)
        system.signal(target, signal.SIGSTOP)
        try:
            while clock() < began + seconds:
                self._number += 1
                rolling = asyncio.create_task(self.roll(self._number))
                await asyncio.wait([rolling], timeout=max(0.0, began + seconds - clock()))
                if not rolling.done():
                    self._go_on(target, pid)
                rolled[self._number] = await rolling
            self._go_on(target, pid)
            recovery = round(await self.serves(), 1)
            for number, answers in rolled.items():
                again = await self.roll(number)
                responses += sum(map(len, answers.values()))
                changed += sum(answers[key] != again[key] for key in again)
        except (AssertionError, TimeoutError) as error:
            problems.append(f"after a stop of {target} for {seconds:g} s: {error!r}")
        finally:
            self._go_on(target, pid)
        if changed:
            problems.append(f"{changed} groups changed")
        problems += system.leaks()
        wall = round(clock() - began, 1)
        return Trial(f"stop {target}", seconds, problems, 0, 0, changed, responses, {}, recovery, wall)

    def _go_on(self, target: str, pid: int | None) -> None:
        if self._system.pid(target) == pid:
            self._system.signal(target, signal.SIGCONT)


async def matrix(
    model: Path, targets: Sequence[str] = TARGETS, seconds: Sequence[float] = SECONDS
) -> list[Trial]:
    """Stop each of these for each of these times, one after the other."""
    trials: list[Trial] = []
    system = System(config(), model=model)
    async with system, RolloutClient(system.config.endpoints.trainers, name="asks") as client:
        stops = Stops(system, client)
        await stops.serves()
        for target in targets:
            trials += [await stops.trial(target, each) for each in seconds]
    trials[-1].problems += [f"left over: {what}" for what in system.leftovers()]
    return trials
