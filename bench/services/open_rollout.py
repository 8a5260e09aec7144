"""What single requests cost: over an open rollout, as one submission, and each as a rollout of its own.

A buffer and replay engines run as processes, whose steps take no time; the client is this process. Ways take
turns. Prints JSON: seconds of CPU of the client and of the buffer per round, medians, and their ratio to one
submission of the same prompts.

    python bench/services/open_rollout.py --requests 256 --tokens 16 --rounds 9
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
from collections.abc import Awaitable, Callable

from lib.hardware import machine
from lib.processes import cpu_seconds

from seer.client import OpenRollout, RolloutClient, SamplingParams
from seer.common.config import load
from seer.local.system import LocalSystem

Way = Callable[[list[list[int]]], Awaitable[int]]


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--n", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--instances", type=int, default=2)
    args = parser.parse_args()
    sampling = SamplingParams(max_tokens=args.tokens, ignore_eos=True)
    settings = [
        "engine.backend=replay", "engine.replay.step_seconds=0", "engine.replay.row_seconds=0",
        "engine.kv_blocks=20000", "engine.max_num_seqs=256", "log.level=warning",
    ]  # fmt: skip
    async with (
        LocalSystem(load(None, {}, settings), args.instances) as system,
        RolloutClient(system.endpoint) as client,
    ):
        opened = client.open_rollout()
        ways = {
            "one submission": lambda prompts: submitted(client, prompts, args.n, sampling),
            "open rollout": lambda prompts: one_by_one(opened, prompts, args.n, sampling),
            "a rollout each": lambda prompts: apart(client, prompts, args.n, sampling),
        }
        used = await measured(ways, system.pids["buffer"], args.requests, args.rounds)
    peer = used["one submission"]
    print(json.dumps({
        "machine": machine("zmq", "msgspec"), "requests": args.requests, "n": args.n, "tokens": args.tokens,
        "rounds": args.rounds, "cpu_seconds": used,
        "ratio_to_one_submission": {
            way: {who: round(used[way][who] / peer[who], 2) for who in peer} for way in used
        },
    }, indent=1))  # fmt: skip


async def measured(
    ways: dict[str, Way], buffer: int, requests: int, rounds: int
) -> dict[str, dict[str, float]]:
    """Return medians of CPU seconds; the first round of each way is left out."""
    seen: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for number in range(rounds + 1):
        for way, run in ways.items():
            prompts = [[number % 100 + 1, index % 1000, index // 1000, 7] for index in range(requests)]
            before = cpu_seconds(os.getpid()), cpu_seconds(buffer)
            assert await run(prompts) == requests
            await asyncio.sleep(0.3)  # for what is acknowledged
            seen[way].append((cpu_seconds(os.getpid()) - before[0], cpu_seconds(buffer) - before[1]))
    return {
        way: {
            who: round(statistics.median(pair[position] for pair in pairs[1:]), 4)
            for position, who in enumerate(("client", "buffer"))
        } | {"both": round(statistics.median(sum(pair) for pair in pairs[1:]), 4)}
        for way, pairs in seen.items()
    }  # fmt: skip


async def submitted(client: RolloutClient, prompts: list[list[int]], n: int, sampling: SamplingParams) -> int:
    rollout = await client.submit(prompts, n=n, sampling=sampling)
    return len(await rollout.result())


async def one_by_one(rollout: OpenRollout, prompts: list[list[int]], n: int, sampling: SamplingParams) -> int:
    """Each from a task of its own, as requests come to a server."""

    async def one(prompt: list[int]) -> None:
        await rollout.submit(prompt, n=n, sampling=sampling).result()

    await asyncio.gather(*(one(prompt) for prompt in prompts))
    return len(prompts)


async def apart(client: RolloutClient, prompts: list[list[int]], n: int, sampling: SamplingParams) -> int:
    async def one(prompt: list[int]) -> int:
        rollout = await client.submit([prompt], n=n, sampling=sampling)
        return len(await rollout.result())

    return sum(await asyncio.gather(*(one(prompt) for prompt in prompts)))


if __name__ == "__main__":
    asyncio.run(main())
