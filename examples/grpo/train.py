"""GRPO on the countdown task: Seer's rollouts, the task's checker as reward, training steps in torch on CPU.

    python examples/grpo/train.py --seed 0
    python examples/grpo/train.py --seed 0 --problems problems_images

Each iteration brings the weights to the engines, measures the held-out pass rate, rolls out, scores groups
while others are still generated, takes one optimizer step and writes a checkpoint (docs/grpo.md).

Invariants:
- prompts, tokens, weights and so the whole curve follow from `Settings`: schedule, number of engines and
  kills do not change them;
- a run goes on after its last whole iteration; an iteration that was interrupted is done again;
- the checkpoint is the truth: metrics.jsonl is written from it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import checkpoint
import curves
import numpy as np
import transformers
from learner import Learner, Sample, advantages
from stopwatch import Stopwatch
from updates import bring

from seer.client import (
    Group,
    Prompt,
    Response,
    RewardMetrics,
    RolloutClient,
    SamplingParams,
    Scored,
    Scores,
    per_response,
)
from seer.common.config import Config
from seer.common.config import load as load_config
from seer.common.errors import SeerError
from seer.common.policy.tail import tail_seconds
from seer.local.system import LocalSystem, run
from seer.rollout.files import check_weights
from seer.rollout.rollout_journal import model_digest

SLACK_TOKENS = 64
"""Room beyond a response's longest length, for its prompt."""

WARMUP = 5
"""Iterations until the learning rate is at its full value: AdamW's first steps are as long as any, and follow
mere noise."""

ROUTING = ("own", "replayed")
"""How the trainer sends tokens to a mixture's experts: as its own routers say, or as the engines did."""


@dataclass(frozen=True)
class Settings:
    """What the curve follows from. A checkpoint of other settings is refused."""

    model: str
    seed: int = 0
    prompts: int = 24
    responses: int = 16
    max_tokens: int = 256
    held_out: int = 96
    held_out_responses: int = 1
    learning_rate: float = 4e-4
    routing: str = "own"

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name not in ("model", "seed", "routing") and not value > 0:
                raise ValueError(f"--{field.name.replace('_', '-')} {value}: give more than 0")
        if self.routing not in ROUTING:
            raise ValueError(f"--routing {self.routing}: give {' or '.join(ROUTING)}")


class Problems(Protocol):
    """What a run is about: a module such as `problems.py`. `MODEL` is trained if no other is given."""

    MODEL: Path

    def held_out_prompts(self, count: int) -> list[Prompt]:
        """Return prompts that are never trained on."""

    def training_prompts(self, seed: int, iteration: int, count: int, held_out: list[Prompt]) -> list[Prompt]:
        """Return an iteration's prompts."""

    def reward(self, group: Group, response: Response) -> float:
        """Return what a response is worth."""


def samples(scored: Sequence[Scored]) -> list[Sample]:
    """Return what the learner needs of each response, in the order of the prompts."""
    return [
        Sample(
            np.concatenate([each.group.prompt_token_ids, response.token_ids]),
            response.logprobs,
            advantage,
            images=each.group.metadata.get("images", {}),
            experts=response.routed_experts,
        )
        for each in scored
        for response, advantage in zip(each.group.responses, advantages(each.rewards), strict=True)
    ]


class Trainer:
    """A run in folder `out`: goes on from its checkpoint if there is one. Raises ValueError if it cannot.

    `ahead`: it names its next prompts, which engines generate while it trains.
    """

    def __init__(
        self, settings: Settings, problems: Problems, model: Path, out: Path, *, ahead: bool = False
    ) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self.out, self._ahead = out, ahead
        self.learner = Learner(model)
        self._settings = settings
        self._problems = problems
        # Engines know a placeholder that the model sampled from an image's; transformers counts it as one.
        never = {} if self.learner.placeholder is None else {self.learner.placeholder: -100.0}
        replayed = 0 if settings.routing == "replayed" else None
        self._sampling = SamplingParams(
            max_tokens=settings.max_tokens, logit_bias=never, routed_experts_from=replayed
        )
        self._held_out = problems.held_out_prompts(settings.held_out)
        self._file = out / "checkpoint.pt"
        self.rows = checkpoint.resume(self._file, asdict(settings), self.learner)
        if self.rows:
            curves.write_metrics(self.rows, out)  # a kill may have come between the two files

    async def train(self, client: RolloutClient, iterations: int) -> None:
        """Iterate until `iterations` are done."""
        while len(self.rows) < iterations:
            self.rows.append(await self._iterate(client, len(self.rows)))
            self._save()
            print(curves.line(self.rows[-1], iterations), flush=True)

    async def _iterate(self, client: RolloutClient, iteration: int) -> dict[str, Any]:
        asked, watch = self._settings, Stopwatch()
        with watch("update"):
            live = await bring(client, self.learner, iteration)
        for instance, reason in live.quarantined.items():
            print(f"{instance} gets no work until the next update: {reason}", file=sys.stderr)
        with watch("eval"):
            held_out, _, _ = await self._roll(client, iteration, self._held_out, asked.held_out_responses)
        with watch("rollout"):
            prompts = self._problems.training_prompts(asked.seed, iteration, asked.prompts, self._held_out)
            scored, rewarding, tail = await self._roll(client, iteration, prompts, asked.responses)
        if self._ahead and not prompts[0].images:
            await self._name_next(client, iteration + 1)
        with watch("train"):
            rate = asked.learning_rate * min(1, (iteration + 1) / WARMUP)
            step = await asyncio.to_thread(self.learner.step, samples(scored), rate)
        lengths = [response.token_ids.size for each in scored for response in each.group.responses]
        generating = watch.seconds["rollout"] - rewarding.after_seconds
        return {
            "iteration": iteration,
            "weight_version": live.version,
            "weights_digest": live.digest,
            "reward": statistics.mean(value for each in scored for value in each.rewards),
            "held_out": statistics.mean(value for each in held_out for value in each.rewards),
            "mixed_groups": statistics.mean(len(set(each.rewards)) > 1 for each in scored),
            "length_mean": statistics.mean(lengths),
            "length_max": max(lengths),
            "tokens": sum(lengths),
            **asdict(step),
            "tokens_per_second": sum(lengths) / generating,
            "tail_seconds": tail,
            "reward_seconds": rewarding.seconds,
            "reward_overlap": rewarding.overlap,
            "seconds": watch.seconds,
        }

    async def _roll(
        self, client: RolloutClient, iteration: int, prompts: list[Prompt], n: int
    ) -> tuple[list[Scored], RewardMetrics, float]:
        """Return groups and rewards in the order of the prompts, what rewards took, the tail's seconds."""
        rollout = await client.submit(
            prompts, n=n, sampling=self._sampling, seed=self._settings.seed, rollout_number=iteration
        )
        async with Scores(rollout, per_response(self._problems.reward)) as scores:
            scored = await scores.result()
        return scored, scores.metrics, tail_seconds(rollout.finish_times)

    async def _name_next(self, client: RolloutClient, iteration: int) -> None:
        """Have idle engines generate an iteration's prompts, for drafts: without these it is only slower."""
        asked = self._settings
        prompts = self._problems.training_prompts(asked.seed, iteration, asked.prompts, self._held_out)
        with contextlib.suppress(SeerError):
            await client.next_prompts(
                prompts, n=asked.responses, sampling=self._sampling, seed=asked.seed,
                rollout_number=iteration, timeout_seconds=1.0,
            )  # fmt: skip

    def _save(self) -> None:
        checkpoint.save_run(self._file, asdict(self._settings), self.rows, self.learner)
        curves.write_metrics(self.rows, self.out)


def parse() -> argparse.Namespace:
    """Return the arguments; every field of `Settings` but the model's digest is one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--problems", default="problems", help="module with prompts and reward")
    parser.add_argument("--model", type=Path, help="a Hugging Face folder; default: that of the problems")
    parser.add_argument("--out", type=Path, help="folder of the run; default runs/grpo/seed-SEED")
    parser.add_argument("--iterations", type=int, default=24)
    parser.add_argument("--instances", type=int, default=2, help="engines to start")
    parser.add_argument("--connect", default="", metavar="ENDPOINT", help="use a running system")
    parser.add_argument("--set", dest="sets", action="append", default=[], metavar="A.B=C", help="a setting")
    for field in fields(Settings):
        if field.name != "model":
            name = "--" + field.name.replace("_", "-")
            parser.add_argument(name, type=type(field.default), default=field.default)
    return parser.parse_args()


async def work(trainer: Trainer, args: argparse.Namespace, config: Config) -> None:
    """Train on a running system, or on one started for this run."""
    if args.connect:
        async with RolloutClient(args.connect, tokenizer=args.model) as client:
            await trainer.train(client, args.iterations)
        return
    async with (
        LocalSystem(config, args.instances, say=lambda line: print(line, file=sys.stderr)) as system,
        RolloutClient(system.endpoint, tokenizer=args.model) as client,
    ):
        await system.run(trainer.train(client, args.iterations))


def main() -> int:
    """Train, draw the curves and print the summary; returns the exit code."""
    transformers.utils.logging.disable_progress_bar()
    args = parse()
    problems: Any = import_module(args.problems)
    args.model = args.model or problems.MODEL
    out = args.out or Path("runs/grpo") / f"seed-{args.seed}"
    sets = [
        f"shared.model={args.model.resolve()}",
        f"engine.max_model_len={args.max_tokens + SLACK_TOKENS}",
        "engine.max_num_seqs=128",
        f"engine.routed_experts={str(args.routing == 'replayed').lower()}",
    ]
    given = {field.name: getattr(args, field.name) for field in fields(Settings)}
    try:
        if args.iterations < 1:
            raise ValueError(f"--iterations {args.iterations}: give 1 or more")
        check_weights(args.model)
        config = load_config(None, {}, [*sets, *args.sets])
        settings = Settings(**{**given, "model": model_digest(args.model)})
        # Engines that this run starts have the cores on which it trains.
        trainer = Trainer(settings, problems, args.model, out, ahead=bool(args.connect))
        if trainer.rows:
            print(f"going on after iteration {len(trainer.rows) - 1} of {out}")
        if len(trainer.rows) < args.iterations:
            run(work(trainer, args, config))
    except (SeerError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    curves.report(trainer.rows, out / "curves.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
