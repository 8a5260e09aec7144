"""Agents with a calculator: Seer's trajectories, with a KV pool and without, single requests, and plain vLLM.

The shipped model's Countdown on two engines, a core each. A turn ends at "=", a calculator writes the result
after a log-normal wait (sigma 1.2; what it is follows from the place alone), and the model goes on.

- `trajectories`: `RolloutClient.trajectories`, no pool; `pool`: the same, with Mooncake;
- `single`: the same loop over an open rollout, each turn a request that knows nothing of the others, no pool;
- `vllm`: whole contexts resent to plain vLLM, a trajectory always to one engine (agents_vllm.py). It draws
  noise of its own, so its tokens are others: compare tokens/s.

Every run of Seer has a system of its own. Tokens must not differ between them, whatever the wait: exit code 1
if they do. `computed` and `pulled` are tokens of context; `idle`: the share of their time in which
engines take no step. Prints JSON.

    python bench/trainers/agents.py --waits 0 1 10 --repeats 3
    python bench/trainers/agents.py --prompts 2 -n 2 --waits 0 --systems trajectories vllm
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from agents_vllm import AgentEngine
from lib.hardware import machine
from lib.paths import EXAMPLE
from lib.processes import cpu_seconds

from seer.client import Prompt, RolloutClient, SamplingParams
from seer.client.turns import Trajectory, TrajectoryFailed
from seer.common.config import Config, load
from seer.common.policy.device_defaults import BLOCK_SIZE
from seer.common.policy.tail import tail_seconds
from seer.common.wire import InstanceStatus
from seer.local.hardware import plan_engines
from seer.local.system import LocalSystem

sys.path.insert(0, str(EXAMPLE))
from task import IDS, LARGEST, VOCAB

SIGMA = 1.2
INSTANCES = 2
SETTLE_SECONDS = 10.0
WARM_UP = 4
OPERATORS: dict[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
}

Generate = Callable[[list[int], int, int], Awaitable[list[int]]]
"""From context, most tokens and the turn's number to what is generated."""


@dataclass
class Run:
    """One run of a system. Times in seconds, of trajectories; tokens by prompt and index."""

    system: str
    wait: float
    seconds: float = 0.0
    ends: list[float] = field(default_factory=list)
    tokens: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    turns: int = 0
    generated: int = 0
    computed: float = 0.0
    pulled: float = 0.0
    step_seconds: float = 0.0
    buffer_cpu: float = 0.0

    def figures(self) -> dict[str, float]:
        """Return what is reported, by name."""
        return {
            "seconds": round(self.seconds, 2),
            "tail_seconds": round(tail_seconds(self.ends), 2),
            "trajectories": len(self.tokens),
            "turns": self.turns,
            "generated": self.generated,
            "tokens_per_s": round(self.generated / self.seconds, 1),
            "computed": self.computed,
            "pulled": self.pulled,
            "idle": round(1 - self.step_seconds / (INSTANCES * self.seconds), 3),
            "buffer_ms_a_turn": round(1e3 * self.buffer_cpu / self.turns, 3),
        }


def _count(run: Run, found: list[int]) -> None:
    run.turns += 1
    run.generated += len(found)


def _end(run: Run, place: tuple[int, int], tokens: list[int]) -> None:
    run.tokens[place] = tokens
    run.ends.append(time.monotonic())


def result_of(context: list[int]) -> list[int]:
    """Return what the calculator writes after "a op b =": a number, or nothing where it is no sum."""
    words = [VOCAB[token] for token in context[-4:]]
    if len(words) < 4 or not (words[0].isdecimal() and words[2].isdecimal() and words[1] in OPERATORS):
        return []
    found = OPERATORS[words[1]](int(words[0]), int(words[2]))
    return [IDS[str(found)]] if 1 <= found <= LARGEST else []


def wait_of(mean: float, place: tuple[int, int], turn: int) -> float:
    scale = np.random.default_rng((*place, turn)).lognormal(-(SIGMA**2) / 2, SIGMA)
    return mean * float(scale)


class Agents:
    """The workload: prompts, n trajectories of each, at most `most` tokens after a prompt."""

    def __init__(self, options: argparse.Namespace) -> None:
        lines = (EXAMPLE / "prompts_512.jsonl").read_text().splitlines()
        texts = [json.loads(line)["prompt"] for line in lines[: options.prompts + WARM_UP]]
        ids = [[IDS[word] for word in text.split()] for text in texts]
        self.prompts, self.others = ids[: options.prompts], ids[options.prompts :]
        self.n, self.most = options.n, options.max_tokens

    async def loop(self, run: Run, place: tuple[int, int], generate: Generate) -> None:
        """Run one agent that resends its whole context."""
        prompt = self.prompts[place[0]]
        context = list(prompt)
        for turn in range(self.most):
            left = self.most - (len(context) - len(prompt))
            if left < 1:
                break
            found = await generate(context, left, turn)
            context += found
            _count(run, found)
            if found[-1] != IDS["="]:
                break
            await asyncio.sleep(wait_of(run.wait, place, turn))
            context += result_of(context)
        _end(run, place, context[len(prompt) :])

    async def all_loops(self, run: Run, generator: Callable[[tuple[int, int]], Generate]) -> None:
        """Run all agents at once, each with the function that generates for its place."""
        places = [(number, index) for number in range(len(self.prompts)) for index in range(self.n)]
        await asyncio.gather(*(self.loop(run, place, generator(place)) for place in places))

    async def trajectories(self, run: Run, client: RolloutClient) -> None:
        """Run the same agents over `RolloutClient.trajectories`."""

        async def agent(trajectory: Trajectory) -> None:
            place = int(trajectory.prompt_id), trajectory.index
            while (left := self.most - len(trajectory.token_ids)) > 0:
                turn = await trajectory.generate(max_tokens=left)
                _count(run, turn.token_ids.tolist())
                if turn.token_ids[-1] != IDS["="]:
                    break
                await asyncio.sleep(wait_of(run.wait, place, len(trajectory.turns) - 1))
                trajectory.append(result_of(trajectory.context.tolist()))
            _end(run, place, trajectory.token_ids.tolist())

        prompts = [Prompt(str(number), token_ids=tokens) for number, tokens in enumerate(self.prompts)]
        async with client.trajectories(
            prompts, n=self.n, sampling=sampling(self.most), rollout_number=1, max_open=len(prompts) * self.n,
            max_context=self.most + max(map(len, self.prompts)),
        ) as rollout:  # fmt: skip
            async for group in rollout.run(agent):
                for each in group.trajectories:
                    if isinstance(each, TrajectoryFailed):
                        raise each

    async def single(self, run: Run, client: RolloutClient) -> None:
        """Run them over an open rollout whose requests know nothing of turns."""
        rollout = client.open_rollout(rollout_number=1)

        def generator(place: tuple[int, int]) -> Generate:
            async def generate(context: list[int], most: int, turn: int) -> list[int]:
                asked = rollout.submit(
                    Prompt(f"{place[0]}#{place[1]}.{turn}", token_ids=context), sampling=sampling(most),
                    group=str(place[0]), first_index=place[1],
                )  # fmt: skip
                return (await asked.result()).responses[0].token_ids.tolist()

            return generate

        await self.all_loops(run, generator)


def sampling(most: int) -> SamplingParams:
    return SamplingParams(max_tokens=most, stop_token_ids=(IDS["="],))


async def settled(client: RolloutClient, tokens: int) -> list[InstanceStatus]:
    """Return the engines once they have reported so many tokens, or after a while."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        instances = (await client.status()).instances
        if sum(each.stats.generated_tokens for each in instances) >= tokens or time.monotonic() > deadline:
            return instances
        await asyncio.sleep(0.2)


async def run_seer(name: str, wait: float, agents: Agents, config: Config) -> Run:
    run = Run(name, wait)
    async with LocalSystem(config, INSTANCES) as system, RolloutClient(system.endpoint) as client:
        warm = await client.submit(agents.others, n=agents.n, sampling=SamplingParams(max_tokens=64))
        tokens = sum(len(each.token_ids) for group in await warm.result() for each in group.responses)
        before = await settled(client, tokens)
        cpu, begun = cpu_seconds(system.pids["buffer"]), time.monotonic()
        await (agents.single if name == "single" else agents.trajectories)(run, client)
        close(run, begun)
        run.buffer_cpu = cpu_seconds(system.pids["buffer"]) - cpu
        after = await settled(client, tokens + run.generated)
    for old, new in zip(before, after, strict=True):
        computed = new.stats.prompt_tokens - new.stats.cached_tokens
        run.computed += computed - (old.stats.prompt_tokens - old.stats.cached_tokens)
        run.pulled += new.stats.pool_tokens - old.stats.pool_tokens
        run.step_seconds += new.stats.step_seconds - old.stats.step_seconds
    return run


async def run_vllm(wait: float, agents: Agents, engines: list[AgentEngine]) -> Run:
    run = Run("vllm", wait)
    for engine in engines:
        await engine.used()
    begun = time.monotonic()

    def generator(place: tuple[int, int]) -> Generate:
        engine = engines[(place[0] * agents.n + place[1]) % len(engines)]

        async def generate(context: list[int], most: int, turn: int) -> list[int]:
            return await engine.generate(f"{place[0]}#{place[1]}.{turn}", context, most, [IDS["="]])

        return generate

    await agents.all_loops(run, generator)
    close(run, begun)
    for engine in engines:
        used = await engine.used()
        run.computed += used["computed"]
        run.step_seconds += used["step_seconds"]
    return run


def close(run: Run, begun: float) -> None:
    run.ends = sorted(end - begun for end in run.ends)
    run.seconds = run.ends[-1]


async def measure(options: argparse.Namespace) -> list[Run]:
    agents = Agents(options)
    base = [
        f"shared.model={EXAMPLE / 'model'}", f"engine.max_num_seqs={options.seqs}", "log.level=warning",
        f"engine.max_model_len={options.max_tokens + 64}", f"engine.kv_blocks={options.kv_blocks}",
        f"pool.pull_tokens={options.pull_tokens}", *options.overrides,
    ]  # fmt: skip
    configs = {
        name: load(None, {}, [*base, f"pool.kind={'mooncake' if name == 'pool' else 'none'}"])
        for name in ("trajectories", "pool", "single")
    }
    engine, block = configs["single"].engine, configs["single"].shared.block_size or BLOCK_SIZE
    settings = {
        "model": str(EXAMPLE / "model"), "dtype": "float32", "max_num_seqs": engine.max_num_seqs,
        "max_model_len": engine.max_model_len, "block_size": block, "use_tqdm_on_load": False,
        "num_gpu_blocks_override": options.kv_blocks + 1,  # vLLM's null block
    }  # fmt: skip
    engines: list[AgentEngine] = []
    runs: list[Run] = []
    try:
        if "vllm" in options.systems:
            plans = plan_engines(engine, INSTANCES)
            engines += [await AgentEngine.start(settings, plan.config.cpu_cores) for plan in plans]
            await run_vllm(0.0, agents, engines)  # to warm up
        for turn, wait in ((turn, wait) for turn in range(options.repeats) for wait in options.waits):
            for name in options.systems if turn % 2 == 0 else options.systems[::-1]:
                if name == "vllm":
                    runs.append(await run_vllm(wait, agents, engines))
                else:
                    runs.append(await run_seer(name, wait, agents, configs[name]))
                print(f"{turn} {name}, {wait:g} s: {runs[-1].figures()}", file=sys.stderr, flush=True)
    finally:
        for each in engines:
            await each.close()
    return runs


def report(runs: list[Run]) -> tuple[list[dict[str, Any]], int]:
    """Return medians by wait and system, and how many trajectories of Seer are not as in its first run."""
    cells: list[dict[str, Any]] = []
    ours = [run for run in runs if run.system != "vllm"]
    differing = sum(run.tokens[place] != ours[0].tokens[place] for run in ours for place in run.tokens)
    for wait in dict.fromkeys(run.wait for run in runs):
        here = [run for run in runs if run.wait == wait]
        systems = {}
        for name in dict.fromkeys(run.system for run in here):
            each = [run.figures() for run in here if run.system == name]
            systems[name] = {key: statistics.median(figures[key] for figures in each) for key in each[0]}
        cells.append({"wait": wait, "systems": systems})
    return cells, differing


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ("trajectories", "pool", "single", "vllm")
    parser.add_argument("--systems", nargs="+", choices=names, default=list(names))
    parser.add_argument("--waits", nargs="+", type=float, default=[0.0, 1.0, 10.0], help="mean seconds")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("-n", type=int, default=8, help="trajectories per prompt")
    parser.add_argument("--max-tokens", type=int, default=1024, help="of a trajectory after its prompt")
    parser.add_argument("--seqs", type=int, default=32, help="most at once on an engine")
    parser.add_argument("--kv-blocks", type=int, default=512, help="of 32 tokens, of an engine")
    parser.add_argument("--pull-tokens", type=int, default=32, help="least worth fetching from the pool")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="A.B=C")
    options = parser.parse_args()
    before = machine("vllm", "torch")
    cells, differing = report(asyncio.run(measure(options)))
    print(json.dumps({"ran_on": before, **vars(options), "differing": differing, "cells": cells}, indent=1))
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
