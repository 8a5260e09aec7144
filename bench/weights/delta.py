"""Deltas of weights in bfloat16 against the whole stream: bytes, seconds until live, and a rollout's pause.

A whole local system with the vLLM backend, on one machine. Each turn sends the whole model in updates (the
peer), then deltas: 1 % and 10 % of all elements changed, each either `spread` evenly over all tensors or
`clustered` in the first tensors, whole rows of them. `prepare` is an update while nothing is generated;
`pause_seconds` is what a rollout in flight sees: from its last token until the new weights are live. `over`
has bytes and seconds as shares of the whole stream's in the same turn. `client_seconds` is what the trainer
needs to compare and hash before anything is sent. Prints JSON.

    python bench/weights/delta.py --synthetic 500 --turns 3
    python bench/weights/delta.py --synthetic 500 --turns 3 --replay
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
from pathlib import Path
from typing import Any

import torch
from lib.hardware import machine
from lib.random_model import random_llama
from safetensors.torch import load_file

from seer.client import RolloutClient, SamplingParams
from seer.client.sent_weights import ALONE, Plan, SentWeights, Together
from seer.client.tensor_stream import TensorStream
from seer.common.config import load
from seer.common.weights.digest import BLAKE3
from seer.local.system import LocalSystem

Tensors = dict[str, torch.Tensor]
SHARES = (0.01, 0.1)


def spread(tensors: Tensors, share: float, seed: int) -> None:
    """Change the last bit of this share of all elements, anywhere."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in tensors.values():
        flat = tensor.view(torch.int16).view(-1)
        at = torch.randint(0, len(flat), (round(len(flat) * share),), generator=generator)
        flat[at] ^= 1


def clustered(tensors: Tensors, share: float, seed: int) -> None:
    """Change all elements of the first tensors, up to this share of the model."""
    left = round(share * sum(tensor.numel() for tensor in tensors.values()))
    for tensor in tensors.values():
        flat = tensor.view(torch.int16).view(-1)[: max(0, left)]
        flat ^= 1 + seed % 2
        left -= len(flat)


class Timed(SentWeights):
    """Notes in `seconds` how long the last plan took."""

    seconds = 0.0

    def plan(
        self, stream: TensorStream, base: int | None, ranks: Together = ALONE, tag: str = BLAKE3
    ) -> Plan:
        """See `SentWeights.plan`."""
        started = time.perf_counter()
        made = super().plan(stream, base, ranks, tag)
        self.seconds = time.perf_counter() - started
        return made


async def update(client: RolloutClient, tensors: Tensors) -> dict[str, float]:
    """Measure an update while nothing is generated."""
    timed = client.deltas
    assert isinstance(timed, Timed)
    version = (await client.status()).weight_version + 1
    started = time.perf_counter()
    live = await client.update_weights(version, tensors)
    taken = time.perf_counter() - started
    if live.quarantined:
        raise RuntimeError(live.quarantined)
    print(version, taken, client.deltas.last, file=sys.stderr)  # how far it is
    return {"mb": client.deltas.last.sent / 1e6, "seconds": taken, "client_seconds": timed.seconds}


async def pause(client: RolloutClient, tensors: Tensors) -> float:
    """Return how long a rollout waits for new weights after its last token."""
    version = (await client.status()).weight_version + 1
    sampling = SamplingParams(max_tokens=60, ignore_eos=True)
    rollout = await client.submit([[1, 5, 9]], n=2, sampling=sampling)
    running = asyncio.create_task(client.update_weights(version, tensors))
    await rollout.result()
    ended = time.perf_counter()
    await running
    return time.perf_counter() - ended


async def turn(
    whole: RolloutClient, client: RolloutClient, tensors: Tensors, number: int
) -> dict[str, dict[str, float]]:
    """Measure one of each kind."""
    spread(tensors, 0.01, number)
    found = {"whole": await update(whole, tensors)}
    spread(tensors, 0.01, number + 1)
    found["whole"]["pause_seconds"] = await pause(whole, tensors)
    await update(client, tensors)  # the base
    changes: tuple[Callable[[Tensors, float, int], None], ...] = (spread, clustered)
    for change in changes:
        for share in SHARES:
            name = f"{share:.0%} {change.__name__}"
            change(tensors, share, number + 2)
            found[name] = await update(client, tensors)
            change(tensors, share, number + 3)
            found[name]["pause_seconds"] = await pause(client, tensors)
    return found


async def measure(
    model: Path | None, megabytes: int, instances: int, turns: int
) -> list[dict[str, dict[str, float]]]:
    """Run a system and take turns. Without a model engines replay, and only check what they would load."""
    settings = ["engine.kv_blocks=100", "engine.max_model_len=256"]
    if model is None:
        settings.append("engine.backend=replay")
        tensors = {
            f"layers.{number}": torch.randn(5000, 1000).bfloat16() for number in range(megabytes // 10)
        }
    else:
        # CPUs without AMX are slow in bfloat16; updates do not depend on what engines compute in.
        settings += [f"shared.model={model}", "engine.dtype=float32"]
        tensors = load_file(model / "model.safetensors")
    async with (
        LocalSystem(load(None, {}, settings), instances) as system,
        RolloutClient(system.endpoint, deltas=Timed(enabled=False)) as whole,
        RolloutClient(system.endpoint, deltas=Timed()) as client,
    ):
        await update(whole, tensors)  # the first one allocates pages
        return [await turn(whole, client, tensors, 10 * number) for number in range(turns)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--synthetic", type=int, default=500, metavar="MB", help="size of the random model")
    parser.add_argument("--replay", action="store_true", help="engines that check weights, and load none")
    parser.add_argument("--instances", type=int, default=2)
    parser.add_argument("--turns", type=int, default=3)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="seer-bench-") as scratch:
        model = None if given.replay else random_llama(Path(scratch), given.synthetic, torch.bfloat16)
        turns = asyncio.run(measure(model, given.synthetic, given.instances, given.turns))
    kinds = {
        kind: {key: statistics.median(each[kind][key] for each in turns) for key in turns[0][kind]}
        for kind in turns[0]
    }
    over = {
        kind: {
            key: statistics.median(each[kind][key] / each["whole"][key] for each in turns)
            for key in ("mb", "seconds", "pause_seconds")
        }
        for kind in kinds
        if kind != "whole"
    }
    report: dict[str, Any] = {
        "machine": machine("torch", "vllm"),
        "instances": given.instances,
        "medians": kinds,
        "over": over,
        "turns": turns,
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
