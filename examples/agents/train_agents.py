"""Train the countdown model to use a tool: rollouts of two turns by Seer, GRPO on what was generated.

    python examples/agents/train_agents.py --seed 1

A line for each iteration, a table, a picture and a verdict in words; runs/agents/seed-1 has the figures. A
run goes on after its last whole iteration; journals have what the tool answered in one that was interrupted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import statistics
import sys
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import get_args

import transformers

sys.path.append(str(Path(__file__).parents[1] / "grpo"))
import checkpoint
import curves
import lookup
from learner import Learner, Sample, advantages
from problems import COUNTDOWN, held_out_prompts, training_prompts
from stopwatch import Stopwatch
from updates import bring

from seer.client import Prompt, RolloutClient, SamplingParams
from seer.client.turns import Trajectory, TrajectoryFailed
from seer.common.config import load as load_config
from seer.common.errors import SeerError
from seer.local.system import LocalSystem, run
from seer.rollout.files import check_weights
from seer.rollout.rollout_journal import model_digest

Group = list[Trajectory]

MAX_CONTEXT = 48
WARMUP = 4
CONTROL_RESPONSES = 4
LEAST_GAIN = 0.1
"""Of a pass rate, as much as chance does not bring."""

SHOWN: dict[lookup.Tool, str] = {"own": "its own answer", "swapped": "a sibling's", "none": "none"}

SETTINGS = ("seed", "prompts", "responses", "held_out", "learning_rate")
"""What the curve follows from, beside the model."""


async def roll(
    client: RolloutClient, prompts: list[Prompt], n: int, number: int, seed: int, journal: Path,
    tool: lookup.Tool = "own",
) -> list[Group]:  # fmt: skip
    """Return the trajectories of each prompt, in order. Raises the first failure."""
    agent = partial(lookup.agent, secret=f"{seed}/{number}", responses=n, tool=tool)
    async with client.trajectories(
        prompts, n=n, sampling=SamplingParams(), max_context=MAX_CONTEXT, seed=seed, rollout_number=number,
        journal=journal,
    ) as rollout:  # fmt: skip
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


async def train(client: RolloutClient, args: argparse.Namespace, out: Path) -> None:
    """Train, with a line for each iteration; then tell whose answer counts."""
    learner, held_out = Learner(args.model), held_out_prompts(args.held_out)
    settings = {name: getattr(args, name) for name in SETTINGS} | {"model": model_digest(args.model)}
    file, journals = out / "checkpoint.pt", out / "journals"
    rows = checkpoint.resume(file, settings, learner)
    curves.write_metrics(rows, out)
    while len(rows) < args.iterations:
        rows.append(await iterate(client, args, learner, held_out, len(rows), journals))
        checkpoint.save_run(file, settings, rows, learner)
        curves.write_metrics(rows, out)
        shutil.rmtree(journals)  # of this step; named by it, as a kill may leave them
        print(curves.line(rows[-1], args.iterations), flush=True)
    print("now whose answer counts: its own, that of a sibling, none", flush=True)
    await bring(client, learner, args.iterations)
    rates: dict[lookup.Tool, float] = {}
    for number, tool in enumerate(get_args(lookup.Tool), start=args.iterations + 1):
        groups = await roll(client, held_out, CONTROL_RESPONSES, number, args.seed, journals / tool, tool)
        rates[tool] = pass_rate(groups)
    checkpoint.write_whole(out / "controls.json", lambda file: file.write(json.dumps(rates).encode()))
    shutil.rmtree(journals)
    named = {f"afterwards, with {name}": f"{rates[tool]:.3f}" for tool, name in SHOWN.items()}
    curves.report(rows, out / "curves.png", named)
    print(verdict(rows[0]["held_out"], rates))


async def iterate(
    client: RolloutClient, args: argparse.Namespace, learner: Learner, held_out: list[Prompt], iteration: int,
    journals: Path,
) -> curves.Row:  # fmt: skip
    """Update, measure, roll out and train once; return what came out."""
    watch = Stopwatch()
    with watch("update"):
        live = await bring(client, learner, iteration)
    with watch("eval"):
        before = pass_rate(
            await roll(client, held_out, 1, iteration, args.seed, journals / f"held-out-{iteration}")
        )
    with watch("rollout"):
        prompts = training_prompts(args.seed, iteration, args.prompts, held_out)
        groups = await roll(
            client, prompts, args.responses, iteration, args.seed, journals / f"training-{iteration}"
        )
    with watch("train"):
        rate = args.learning_rate * min(1, (iteration + 1) / WARMUP)
        step = await asyncio.to_thread(learner.step, samples(groups), rate)
    return {
        "iteration": iteration,
        "weights_digest": live.digest,
        "held_out": before,
        "reward": pass_rate(groups),
        "mixed_groups": statistics.mean(len(set(rewards(group))) > 1 for group in groups),
        **asdict(step),
        "seconds": watch.seconds,
    }


def verdict(before: float, rates: Mapping[lookup.Tool, float]) -> str:
    """Say in words what was learnt: the task, and that by what the tool says."""
    gain = f"held-out pass rate {before:.2f} before and {rates['own']:.2f} after training"
    others = f"{rates['swapped']:.2f} with a sibling's answer and {rates['none']:.2f} without one"
    if rates["own"] - before < LEAST_GAIN:
        return f"Little was learnt: {gain}. More iterations, or another --learning-rate?"
    if max(rates["swapped"], rates["none"]) > rates["own"] / 2:
        return f"It learnt, but hardly by the tool: {gain}; still {others}."
    return f"It learnt to use the tool: {gain}; only {others}, so what the tool says is what counts."


async def work(args: argparse.Namespace, out: Path) -> None:
    """Train on a running system, or on one started for this run."""
    if args.connect:
        async with RolloutClient(args.connect, tokenizer=args.model) as client:
            await train(client, args, out)
        return
    sets = [f"shared.model={args.model.resolve()}", "engine.max_model_len=128", "engine.max_num_seqs=128"]
    config = load_config(None, {}, [*sets, *args.sets])
    async with (
        LocalSystem(config, args.instances, say=lambda line: print(line, file=sys.stderr)) as system,
        RolloutClient(system.endpoint, tokenizer=args.model) as client,
    ):
        await system.run(train(client, args, out))


def main() -> int:
    """Read the arguments and train; returns the exit code."""
    transformers.utils.logging.disable_progress_bar()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=COUNTDOWN / "model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--iterations", type=int, default=16)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--responses", type=int, default=16)
    parser.add_argument("--held-out", type=int, default=96)
    parser.add_argument("--learning-rate", type=float, default=4e-4)
    parser.add_argument("--instances", type=int, default=1, help="engines to start")
    parser.add_argument("--connect", default="", metavar="ENDPOINT", help="use a running system")
    parser.add_argument("--set", dest="sets", action="append", default=[], metavar="A.B=C", help="a setting")
    parser.add_argument("--out", type=Path, help="folder of the run; default runs/agents/seed-SEED")
    args = parser.parse_args()
    out = args.out or Path("runs/agents") / f"seed-{args.seed}"
    try:
        if args.iterations < 1:
            raise ValueError(f"--iterations {args.iterations}: give 1 or more")
        check_weights(args.model)
        run(work(args, out))
    except (SeerError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
