"""What earlier iterations' tokens gain as drafts, and those of run-ahead beside, over an RL run.

    python bench/drafts/earlier_iterations.py --iterations 12
    python bench/drafts/earlier_iterations.py --iterations 8 --weight 30
    python bench/drafts/earlier_iterations.py --iterations 6 --pool 144    # no prompt comes again

A GRPO run (examples/grpo) whose prompts come again: each iteration takes the next part of a fixed set, so a
prompt has been rolled out `--pool / --prompts` iterations earlier, by weights that have learnt since. Three
systems are up: one with `dgds.remember_tokens`, one that runs ahead besides, one with neither. All get every
iteration's weights and prompts in turns, and must give the same tokens. The learner trains on them. Run-ahead
has the rollout's tail and `--idle` seconds after it, as while a trainer trains. With `--weight` engines get
the weights padded with zeros, which generate the same (examples/countdown/heavier.py). Prints JSON: of the
iterations but the first whose prompts came before, or of all but the first if none did, the geometric mean of
the ratios of tokens/s and the ends of its 95 % interval, acceptance lengths, and tokens generated ahead.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lib.hardware import machine
from lib.paths import EXAMPLE, ROOT
from never_slower import ratio

# Before the other example, which has a train.py, too.
sys.path.insert(0, str(ROOT / "examples" / "grpo"))
from heavier import heavier
from learner import Learner
from problems import held_out_prompts, reward, training_prompts
from train import samples

from seer.client import Prompt, RolloutClient, SamplingParams, Scored, Scores, per_response
from seer.common.config import load
from seer.local.system import LocalSystem
from seer.services.engine.server import STATUS_SECONDS

SIDES = {"none": 0, "remembered": 50_000_000, "ahead": 50_000_000}
"""Values of `dgds.remember_tokens`."""

LEARNING_RATE = 4e-4


class Side:
    """One system, with or without memory of earlier groups; it runs `ahead` or does not."""

    def __init__(self, client: RolloutClient, *, ahead: bool) -> None:
        self._client, self._ahead = client, ahead

    async def roll(
        self, version: int, weights: Path, prompts: list[Prompt], coming: list[Prompt],
        options: argparse.Namespace,
    ) -> tuple[list[Scored], dict[str, Any]]:  # fmt: skip
        """Load weights, then roll out; return scored groups, and figures of the rollout."""
        asked: dict[str, Any] = {
            "n": options.n, "sampling": SamplingParams(max_tokens=options.max_tokens), "seed": options.seed,
        }  # fmt: skip
        await self._client.update_weights(version, str(weights))
        (*before, had), begun = await self._figures(), time.perf_counter()
        rollout = await self._client.submit(prompts, rollout_number=version, **asked)
        if self._ahead:
            await self._client.next_prompts(coming, rollout_number=version + 1, **asked)
        async with Scores(rollout, per_response(reward)) as scores:
            scored = await scores.result()
        seconds = time.perf_counter() - begun
        drafted, accepted, verified = (
            now - then for now, then in zip((await self._figures())[:3], before, strict=True)
        )
        if self._ahead:
            await asyncio.sleep(options.idle)
            await (await self._client.submit([[1]], n=1, sampling=SamplingParams(max_tokens=1))).result()
        responses = [response.token_ids.tolist() for each in scored for response in each.group.responses]
        return scored, {
            "tokens_per_s": sum(map(len, responses)) / seconds,
            "acceptance_length": 1 + accepted / max(1, verified),
            "drafted": drafted,
            "seconds": seconds,
            "ahead_tokens": (await self._figures())[3] - had,
            "reward": statistics.fmean(value for each in scored for value in each.rewards),
            "digest": hashlib.blake2b(json.dumps(responses).encode(), digest_size=8).hexdigest(),
        }

    async def _figures(self) -> tuple[int, int, int, int]:
        await asyncio.sleep(1.5 * STATUS_SECONDS)
        stats = [each.stats for each in (await self._client.status()).instances]
        return (
            sum(each.drafted_tokens for each in stats),
            sum(each.accepted_tokens for each in stats),
            sum(each.verifications for each in stats),
            sum(each.ahead_tokens for each in stats),
        )


async def sides_of(
    stack: contextlib.AsyncExitStack, model: Path, options: argparse.Namespace
) -> dict[str, Side]:
    """Start both systems."""
    sides = {}
    for name, tokens in SIDES.items():
        config = load(None, {}, [
            f"shared.model={model}", f"engine.max_num_seqs={options.running}",
            f"engine.max_model_len={options.max_tokens + 64}", "engine.kv_cache_gib=0.5",
            "pool.kind=none", "log.level=warning",
            f"dgds.remember_tokens={tokens}", *options.sets,
        ])  # fmt: skip
        system = await stack.enter_async_context(LocalSystem(config, options.instances))
        client = RolloutClient(system.endpoint, tokenizer=str(EXAMPLE / "model"))
        sides[name] = Side(await stack.enter_async_context(client), ahead=name == "ahead")
    return sides


async def measure(options: argparse.Namespace) -> list[dict[str, dict[str, Any]]]:
    """Return the figures of each iteration, by side. Exits if tokens differ."""
    learner = Learner(EXAMPLE / "model")
    held_out = held_out_prompts(96)
    pool = training_prompts(options.seed, 0, options.pool, held_out)
    turns: list[dict[str, dict[str, Any]]] = []
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        sides = await sides_of(stack, weights_of(learner, folder / "0", options.weight), options)
        for number in range(options.iterations):
            weights = weights_of(learner, folder / str(number), options.weight)
            begin, after = (each * options.prompts % options.pool for each in (number, number + 1))
            names = list(sides)[:: -1 if number % 2 else 1]
            scored: Sequence[Scored] = []
            turns.append({})
            for name in names:
                scored, turns[-1][name] = await sides[name].roll(
                    number + 1, weights, pool[begin : begin + options.prompts],
                    pool[after : after + options.prompts], options,
                )  # fmt: skip
            if len({run["digest"] for run in turns[-1].values()}) != 1:
                raise SystemExit(f"iteration {number}: tokens differ")
            print(number, {name: round(run["tokens_per_s"]) for name, run in turns[-1].items()},
                  {name: round(run["acceptance_length"], 2) for name, run in turns[-1].items()},
                  file=sys.stderr)  # fmt: skip
            await asyncio.to_thread(learner.step, samples(scored), LEARNING_RATE)
    return turns


def weights_of(learner: Learner, folder: Path, weight: float) -> Path:
    """Write the learner's weights into a folder, padded to so many times their size."""
    small = folder / "small"
    learner.model.save_pretrained(small)
    return heavier(folder / "padded", weight=weight, model=small) if weight > 1 else small


def report_of(turns: list[dict[str, dict[str, Any]]], options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of the iterations whose prompts came before, or of all but the first."""
    known = turns[options.pool // options.prompts :]
    again = known or turns[1:]
    return {
        "machine": machine("torch", "vllm"),
        "weight": options.weight,
        "iterations": len(turns),
        "of them with known prompts": len(known),
        **{
            f"{one}_over_{other}": ratio(
                [turn[one]["tokens_per_s"] / turn[other]["tokens_per_s"] for turn in again]
            )
            for one, other in (("remembered", "none"), ("ahead", "none"), ("ahead", "remembered"))
        },
        **{
            name: {
                key: round(statistics.median(turn[name][key] for turn in again), 3)
                for key in ("tokens_per_s", "seconds", "acceptance_length", "drafted", "ahead_tokens")
            }
            for name in SIDES
        },
        "reward": [round(turn["none"]["reward"], 3) for turn in turns],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--pool", type=int, default=48, help="prompts that come again")
    parser.add_argument("--prompts", type=int, default=24, help="of an iteration")
    parser.add_argument("--n", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--running", type=int, default=64, help="responses at once in an engine")
    parser.add_argument("--instances", type=int, default=2)
    parser.add_argument("--weight", type=float, default=1)
    parser.add_argument("--idle", type=float, default=5.0, help="seconds of run-ahead after a rollout")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], dest="sets", help="a setting for both systems")
    options = parser.parse_args()
    if options.pool % options.prompts:
        parser.error(f"--pool {options.pool}: give a multiple of --prompts {options.prompts}")
    print(json.dumps(report_of(asyncio.run(measure(options)), options), indent=1))


if __name__ == "__main__":
    main()
