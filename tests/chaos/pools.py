"""Stops of the KV pool's processes, and cuts of its links, under vLLM engines that move chunks, and their KV.

Invariants:
- rollouts go on while any of them stands still or cannot be reached, with the same tokens;
- afterwards the pool serves again by itself: blocks are saved, and read, once more.
"""

from __future__ import annotations

import asyncio
import importlib.util
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

from chaos.cuts import CUT_SECONDS
from chaos.network import Network
from chaos.rollouts import Roll, job
from chaos.stops import SECONDS, Trial
from chaos.system import System
from seer.client import RolloutClient
from seer.common.config import BufferConfig, Config, EngineConfig, PoolConfig

TARGETS = ("pool-master", "pool-program", "pool-owner", "pool-holder")
"""The services, and what they run: Mooncake's master, and the process that holds the memory."""

PAIRS = (
    ("engine-0", "pool-owner"),
    ("engine-1", "pool-owner"),
    ("engine-0", "pool-master"),
    ("engine-1", "pool-master"),
    ("pool-owner", "pool-master"),
)
"""Who of the pool talks to whom."""

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


class Troubles:
    """Stops or cuts one after the other on one system."""

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

    async def stop(self, target: str, seconds: float) -> Trial:
        """Stop a process for so long."""
        pid = self._system.pid(target)

        def go_on() -> None:
            if self._system.pid(target) == pid:
                self._system.signal(target, signal.SIGCONT)

        self._system.signal(target, signal.SIGSTOP)
        return await self._trial(f"stop {target}", seconds, go_on)

    async def cut(self, net: Network, one: str, other: str) -> Trial:
        """Cut two off each other."""
        net.cut(one, other)
        net.cut(other, one)
        return await self._trial(f"cut {one} - {other}", CUT_SECONDS, net.heal)

    async def _trial(self, what: str, seconds: float, end: Callable[[], None]) -> Trial:
        """Make rollouts until `seconds` are over and `end` was called; judge them by making them again."""
        clock = asyncio.get_running_loop().time
        began, problems, rolled = clock(), [], {}
        changed = responses = 0
        recovery: float | None = None
        try:
            while clock() < began + seconds:
                self._number += 1
                rolling = asyncio.create_task(self.roll(self._number))
                await asyncio.wait([rolling], timeout=max(0.0, began + seconds - clock()))
                if not rolling.done():
                    end()
                rolled[self._number] = await rolling
            end()
            recovery = round(await self.serves(), 1)
            for number, answers in rolled.items():
                again = await self.roll(number)
                responses += sum(map(len, answers.values()))
                changed += sum(answers[key] != again[key] for key in again)
        except (AssertionError, TimeoutError) as error:
            problems.append(f"{what} for {seconds:g} s: {error!r}")
        finally:
            end()
        if changed:
            problems.append(f"{changed} groups changed")
        problems += self._system.leaks()
        wall = round(clock() - began, 1)
        return Trial(what, seconds, problems, 0, 0, changed, responses, {}, recovery, wall)


async def matrix(
    model: Path, targets: Sequence[str] = TARGETS, seconds: Sequence[float] = SECONDS
) -> list[Trial]:
    """Stop each of these for each of these times, one after the other."""
    trials: list[Trial] = []
    system = System(config(), model=model)
    async with system, system.client("asks") as client:
        troubles = Troubles(system, client)
        await troubles.serves()
        for target in targets:
            trials += [await troubles.stop(target, each) for each in seconds]
    trials[-1].problems += [f"left over: {what}" for what in system.leftovers()]
    return trials


async def cuts(model: Path, pairs: Sequence[tuple[str, str]] = PAIRS) -> list[Trial]:
    """Cut each of these pairs off each other, one after the other."""
    trials: list[Trial] = []
    net = Network()
    try:
        system = System(config(), model=model, net=net, trainers=("trainer", "asks"))
        async with system:
            client = system.client("asks")
            async with system.place("asks"):  # where its sockets are
                await client.__aenter__()
            try:
                troubles = Troubles(system, client)
                await troubles.serves()
                trials += [await troubles.cut(net, *pair) for pair in pairs]
            finally:
                await client.__aexit__(None, None, None)
        trials[-1].problems += [f"left over: {what}" for what in system.leftovers()]
    finally:
        net.close()
    return trials
