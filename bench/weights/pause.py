"""The pause of a load of new weights in one engine, against a bare copy of the same bytes in memory.

One vLLM engine on CPUs, in this process or of `--ranks`, and a random model. Each turn loads a folder that
was laid out before, as engines do while they generate, and one that was not, as vLLM does by itself;
`check_seconds` and `lay_out_seconds` are outside the pause. `over_copy` has the seconds of both loads, as
shares of those of a copy into tensors that are there. Prints JSON.

    python bench/weights/pause.py --synthetic 200 --turns 5
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
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
from safetensors.torch import load_file, save_file

from seer.common.config import EngineConfig, SharedConfig
from seer.services.engine.vllm.backend import VllmBackend
from seer.services.engine.weights.manifest import read_manifest

FREED_SECONDS = 1.0
"""After which the version before is freed, beside steps."""


def seconds(work: Callable[[], object]) -> float:
    """Return how long some work takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def changed(model: Path, folder: Path) -> Path:
    """Write a model with other weights into a folder."""
    shutil.copytree(model, folder)
    tensors = {name: each * 1.01 for name, each in load_file(model / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def measure(model: Path, other: Path, turns: int, ranks: int) -> list[dict[str, float]]:
    """Take turns on one engine."""
    config = EngineConfig(kv_blocks=100, max_model_len=256, tensor_parallel=ranks)
    backend = VllmBackend(config, SharedConfig(model=str(model)))
    backend.start()
    source = list(load_file(model / "model.safetensors").values())
    target = [torch.zeros_like(each) for each in source]

    def copy() -> None:
        for into, each in zip(target, source, strict=True):
            into.copy_(each)

    def lay_out(folder: Path, digest: str) -> None:
        backend.lay_out_weights(folder, digest)
        while backend.lays_out():
            time.sleep(0.001)

    def turn(number: int) -> dict[str, float]:
        folder, digest = (other, model)[number % 2], f"laid out {number}"
        found = {
            "check_seconds": seconds(lambda: read_manifest(folder, finite=True)),
            "copy_seconds": seconds(copy),
            "lay_out_seconds": seconds(lambda: lay_out(folder, digest)),
            "load_seconds": seconds(lambda: backend.load_weights(folder, digest)),
        }
        backend.lay_out_weights(None, "")
        time.sleep(FREED_SECONDS)
        found["vllm_load_seconds"] = seconds(lambda: backend.load_weights(folder, "not laid out"))
        print(found, file=sys.stderr)
        return found

    turn(1)  # the first loads allocate pages
    return [turn(number) for number in range(turns)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--synthetic", type=int, default=200, metavar="MB", help="size of the random model")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=1)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="seer-bench-") as scratch:
        folder = Path(scratch) / "model"
        folder.mkdir()
        model = random_llama(folder, given.synthetic)
        turns = measure(model, changed(model, Path(scratch) / "other"), given.turns, given.ranks)
        size = (model / "model.safetensors").stat().st_size
    medians = {key: statistics.median(each[key] for each in turns) for key in turns[0]}
    report: dict[str, Any] = {
        "machine": machine("torch", "vllm"),
        "model_mb": round(size / 1e6, 1),
        "medians": medians,
        "over_copy": {
            key: sorted(each[key] / each["copy_seconds"] for each in turns)
            for key in ("load_seconds", "vllm_load_seconds")
        },
        "turns": turns,
    }
    print(json.dumps(report, indent=1))
    sys.stdout.flush()
    os._exit(0)  # the engine's threads need not end


if __name__ == "__main__":
    main()
