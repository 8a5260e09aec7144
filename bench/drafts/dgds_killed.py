"""What a dgds that dies costs a rollout: acceptance length over time around its SIGKILL, and the tokens.

Runs the same rollout twice on two engines, every chunk on another one than the one before, so that all
siblings' tokens come by the dgds; the second time the dgds is killed at a third. Prints JSON.

    python bench/drafts/dgds_killed.py --model examples/countdown/model \
        --prompts examples/countdown/prompts.jsonl
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from lib.hardware import machine

from seer.client import RolloutClient, SamplingParams
from seer.common.config import load
from seer.local.system import LocalSystem

GROUP = 8
MAX_TOKENS = 512
SLICE_SECONDS = 1.0


async def roll(options: argparse.Namespace, kill_at: int | None) -> dict[str, Any]:
    """Run the rollout; return its tokens and (seconds, acceptance length, tokens/s) slice by slice."""
    settings = [
        f"shared.model={options.model}", f"engine.max_model_len={MAX_TOKENS + 128}", "pool.kind=none",
        "buffer.policy=migrate", "buffer.chunk_size=64", "engine.max_num_seqs=32",
    ]  # fmt: skip
    lines = options.prompts.read_text().splitlines()[: options.groups]
    slices: list[dict[str, float]] = []
    killed: float | None = None
    async with (
        LocalSystem(load(None, {}, settings), 2) as system,
        RolloutClient(system.endpoint, tokenizer=options.model) as client,
    ):
        sampling = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
        prompts = [json.loads(line)["prompt"] for line in lines]
        rollout = await client.submit(prompts, n=GROUP, sampling=sampling)
        done = asyncio.create_task(rollout.result())
        begun, before = time.monotonic(), (0, 0, 0.0)
        while not done.done():
            await asyncio.wait([done], timeout=SLICE_SECONDS)
            stats = [instance.stats for instance in (await client.status()).instances]
            now = time.monotonic() - begun
            generated = sum(each.generated_tokens for each in stats)
            verified = sum(each.verifications for each in stats)
            if verified > before[1]:
                slices.append({
                    "at": round(now, 1),
                    "acceptance_length": round((generated - before[0]) / (verified - before[1]), 2),
                    "tokens_per_s": round((generated - before[0]) / (now - before[2])),
                })  # fmt: skip
                before = generated, verified, now
            progress = rollout.progress.tokens if rollout.progress else 0
            if kill_at is not None and killed is None and progress >= kill_at:
                os.kill(system.pids["dgds"], signal.SIGKILL)
                killed = round(time.monotonic() - begun, 1)
        seconds = time.monotonic() - begun
        groups = await done
        restarts = system.restarts["dgds"]
    tokens = [response.token_ids.tolist() for group in groups for response in group.responses]
    return {"tokens": tokens, "seconds": seconds, "killed": killed, "restarts": restarts, "slices": slices}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--groups", type=int, default=16)
    options = parser.parse_args()
    total = options.groups * GROUP * MAX_TOKENS
    whole = asyncio.run(roll(options, None))
    killed = asyncio.run(roll(options, total // 3))
    same = whole.pop("tokens") == killed.pop("tokens")
    report = {"machine": machine("torch", "vllm"), "same_tokens": same, "left_alone": whole, "killed": killed}
    print(json.dumps(report))
    if not same:
        raise SystemExit("tokens differ")


if __name__ == "__main__":
    main()
