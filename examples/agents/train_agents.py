"""Train the countdown model to use a tool: rollouts of two turns by Seer, GRPO on what was generated.

python examples/agents/train_agents.py --seed 1
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from functools import partial
from pathlib import Path

import transformers

sys.path.append(str(Path(__file__).parents[1] / "grpo"))
import lookup
from learner import Learner, Sample, advantages
from problems import COUNTDOWN, held_out_prompts, training_prompts

from seer.client import Prompt, RolloutClient, SamplingParams
from seer.client.turns import Trajectory, TrajectoryFailed
from seer.common.config import load as load_config
from seer.local.system import LocalSystem, run

Group = list[Trajectory]

HELD_OUT = 96
MAX_CONTEXT = 48
WARMUP = 4


async def roll(
    client: RolloutClient, prompts: list[Prompt], n: int, number: int, seed: int, tool: lookup.Tool = "own"
) -> list[Group]:
    """Return the trajectories of each prompt, in order. Raises the first failure."""
    agent = partial(lookup.agent, secret=f"{seed}/{number}", responses=n, tool=tool)
    async with client.trajectories(
        prompts, n=n, sampling=SamplingParams(), max_context=MAX_CONTEXT, seed=seed, rollout_number=number
    ) as rollout:
        groups = {group.prompt_id: group.trajectories async for group in rollout.run(agent)}
    return [[_ended_well(each) for each in groups[prompt.id]] for prompt in prompts]


def _ended_well(trajectory: Trajectory | TrajectoryFailed) -> Trajectory:
    if isinstance(trajectory, TrajectoryFailed):
        raise trajectory
    return trajectory


def rewards(group: Group) -> list[float]:
    """Return what the agents of a group returned."""
    return [each.result for each in group]


def pass_rate(groups: list[Group]) -> float:
    """Return the mean reward."""
    return statistics.mean(reward for group in groups for reward in rewards(group))


def samples(groups: list[Group]) -> list[Sample]:
    """Return what the learner needs of each trajectory."""
    return [
        Sample(each.context, each.logprobs, advantage, each.loss_mask)
        for group in groups
        for each, advantage in zip(group, advantages(rewards(group)), strict=True)
    ]


async def train(client: RolloutClient, args: argparse.Namespace) -> None:
    """Print a line for each iteration, then the controls."""
    learner, held_out = Learner(args.model), held_out_prompts(HELD_OUT)
    for iteration in range(args.iterations + 1):
        began = time.monotonic()
        await client.update_weights(iteration + 1, learner.model.state_dict())
        row = {
            "iteration": iteration,
            "held_out": pass_rate(await roll(client, held_out, 1, iteration, args.seed)),
        }
        if iteration < args.iterations:
            prompts = training_prompts(args.seed, iteration, args.prompts, held_out)
            groups = await roll(client, prompts, args.responses, iteration, args.seed)
            rate = args.learning_rate * min(1, (iteration + 1) / WARMUP)
            step = await asyncio.to_thread(learner.step, samples(groups), rate)
            row |= {"reward": pass_rate(groups), "gap": step.gap, "corrected": step.corrected}
        row["seconds"] = time.monotonic() - began
        print(json.dumps({name: round(value, 7) for name, value in row.items()}), flush=True)
    for number, tool in enumerate(("own", "swapped", "none"), start=iteration + 1):
        groups = await roll(client, held_out, 4, number, args.seed, tool)
        print(json.dumps({"tool": tool, "held_out": round(pass_rate(groups), 4)}), flush=True)


async def work(args: argparse.Namespace) -> None:
    """Start a system, and train on it."""
    sets = [f"shared.model={args.model.resolve()}", "engine.max_model_len=128", "engine.max_num_seqs=128"]
    config = load_config(None, {}, [*sets, *args.sets])
    async with (
        LocalSystem(config, args.instances, say=lambda line: print(line, file=sys.stderr)) as system,
        RolloutClient(system.endpoint, tokenizer=args.model) as client,
    ):
        await system.run(train(client, args))


def main() -> None:
    """Read the arguments and train."""
    transformers.utils.logging.disable_progress_bar()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=COUNTDOWN / "model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--iterations", type=int, default=16)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--responses", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=4e-4)
    parser.add_argument("--instances", type=int, default=1, help="engines to start")
    parser.add_argument("--set", dest="sets", action="append", default=[], metavar="A.B=C", help="a setting")
    run(work(parser.parse_args()))


if __name__ == "__main__":
    main()
