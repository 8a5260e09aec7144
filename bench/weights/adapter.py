"""A LoRA adapter that is sent alone against the merged model that it makes: bytes and seconds.

A whole local system of two instances with the vLLM backend. Each turn streams the merged tensors in an
update (the peer), then the adapter, of rank `--rank` on every projection. Nothing is generated meanwhile.
Seconds are from the call until the weights are live. Prints JSON.

    python bench/weights/adapter.py --model examples/countdown/model --turns 5
    python bench/weights/adapter.py --synthetic 1000 --turns 3
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lib.hardware import machine
from lib.random_model import random_llama
from safetensors.torch import load_file

from seer.client import LoraAdapter, RolloutClient
from seer.client.tensor_stream import TensorStream
from seer.common.config import load
from seer.local.system import LocalSystem

Tensors = Mapping[str, torch.Tensor]


def new_adapter(model: Tensors, rank: int) -> dict[str, torch.Tensor]:
    """Return random matrices for every projection."""
    tensors = {}
    for name, weight in model.items():
        if name.endswith("_proj.weight"):
            module = f"base_model.model.{name.removesuffix('.weight')}"
            tensors[f"{module}.lora_A.weight"] = 0.01 * torch.randn(rank, weight.shape[1])
            tensors[f"{module}.lora_B.weight"] = 0.01 * torch.randn(weight.shape[0], rank)
    return tensors


async def update(client: RolloutClient, source: Tensors | LoraAdapter) -> float:
    """Return the seconds of an update."""
    version = (await client.status()).weight_version
    started = time.perf_counter()
    await client.update_weights(version + 1, source)
    return time.perf_counter() - started


async def measure(model: Path, rank: int, turns: int) -> list[dict[str, float]]:
    """Run a system of two instances and take turns."""
    settings = [f"shared.model={model}", "engine.max_model_len=256", "engine.kv_blocks=100"]
    found = []
    base = load_file(model / "model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
    async with LocalSystem(load(None, {}, settings), 2) as system, RolloutClient(system.endpoint) as client:
        for number in range(turns + 1):
            merged = {name: tensor * (1 + 1e-3 * (number + 1)) for name, tensor in base.items()}
            adapter = new_adapter(base, rank)
            found.append({
                "merged_mb": TensorStream(merged).size / 1e6,
                "merged_update_seconds": await update(client, merged),
                "adapter_mb": TensorStream(adapter).size / 1e6,
                "adapter_update_seconds": await update(client, LoraAdapter(adapter, config, base=model)),
            })  # fmt: skip
    return found[1:]  # in the first one the client reads the base for its digest


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="model folder with one model.safetensors")
    parser.add_argument("--synthetic", type=int, metavar="MB", help="a random model of this size instead")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--turns", type=int, default=3)
    given = parser.parse_args()
    if (given.model is None) == (given.synthetic is None):
        parser.error("give either --model or --synthetic")
    with tempfile.TemporaryDirectory(prefix="seer-bench-") as scratch:
        model = given.model or random_llama(Path(scratch), given.synthetic)
        turns = asyncio.run(measure(model.absolute(), given.rank, given.turns))
    report: dict[str, Any] = {
        "machine": machine("torch", "vllm"),
        "rank": given.rank,
        "instances": 2,
        "medians": {key: round(statistics.median(each[key] for each in turns), 3) for key in turns[0]},
        "turns": turns,
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
