"""Seconds that TRL's GRPOTrainer spends in rollouts: with Seer, and with its own generation.

The same model, prompts, config and machine, one trainer after the other, in turns. A rollout is what
TRL's trainer does to have completions: for Seer that is the weight update, sampling on two local
engines, and the way there and back. Both sample from their own model, which learns, so lengths differ:
tokens are counted too. The trainer has one thread unless told: beside other work, two wait for each
other and TRL's generation is six times slower. Prints JSON.

    python bench/trainers/trl_rollout.py --steps 3 --turns 1
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from lib.hardware import machine
from lib.paths import EXAMPLE

from seer.common.config import load
from seer.integrations.trl import SeerRollout
from seer.local.system import LocalSystem

sys.path.insert(0, str(EXAMPLE))
from task import check


def reward(prompts: list[str], completions: list[str], **_: object) -> list[float]:
    return [float(check(prompt, text)) for prompt, text in zip(prompts, completions, strict=True)]


def train(options: argparse.Namespace, rollout: Callable[..., Any] | None) -> dict[str, Any]:
    """Train for some steps; return what each took."""
    with tempfile.TemporaryDirectory(prefix="seer-bench-") as folder:
        config = trl.GRPOConfig(
            output_dir=folder,
            num_generations=options.n,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=options.prompts * options.n // 8,
            max_completion_length=options.max_tokens,
            max_steps=options.steps,
            learning_rate=1e-4,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            bf16=False,
            disable_tqdm=True,
        )
        trainer = trl.GRPOTrainer(
            model=str(EXAMPLE / "model"),
            reward_funcs=reward,
            args=config,
            train_dataset=Dataset.from_json(str(EXAMPLE / "prompts.jsonl"), cache_dir=folder),
            rollout_func=rollout,
        )
        seconds: list[float] = []
        tokens: list[int] = []
        generate = trainer._generate

        def timed(prompts: list[str]) -> tuple[Any, ...]:
            started = time.perf_counter()
            out = generate(prompts)
            seconds.append(time.perf_counter() - started)
            tokens.append(sum(map(len, out[1])))
            return out

        trainer._generate = timed
        trainer.remove_callback(transformers.PrinterCallback)
        started = time.perf_counter()
        trainer.train()
        whole = time.perf_counter() - started
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {
        "rollout_seconds": seconds,
        "rollout_tokens": tokens,
        "tokens_per_second": sum(tokens) / sum(seconds),
        "longest": [entry["completions/max_length"] for entry in logged],
        "reward": [entry["reward"] for entry in logged],
        "loss": [entry["loss"] for entry in logged],
        "train_seconds": whole,
    }


def turns(options: argparse.Namespace, endpoint: str) -> list[dict[str, Any]]:
    with SeerRollout(endpoint) as rollout:
        return [{"seer": train(options, rollout), "trl": train(options, None)} for _ in range(options.turns)]


async def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    settings = [f"shared.model={EXAMPLE / 'model'}", f"engine.max_model_len={options.max_tokens + 64}"]
    async with LocalSystem(load(None, {}, settings), options.instances) as system:
        return await asyncio.to_thread(turns, options, system.endpoint)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--prompts", type=int, default=8, help="a step")
    parser.add_argument("-n", type=int, default=8, help="responses per prompt")
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--instances", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="of the trainer")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    before = machine("accelerate", "torch", "transformers", "trl", "vllm")
    found = asyncio.run(measure(options))
    sums = {name: [sum(turn[name]["rollout_seconds"]) for turn in found] for name in ("seer", "trl")}
    speed = [turn["seer"]["tokens_per_second"] / turn["trl"]["tokens_per_second"] for turn in found]
    report = {
        "machine": before,
        "options": vars(options),
        "rollout_seconds": sums,
        "trl_over_seer_seconds": statistics.median(
            trl_ / seer for seer, trl_ in zip(sums["seer"], sums["trl"], strict=True)
        ),
        "seer_over_trl_tokens_per_second": statistics.median(speed),
        "turns": found,
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
