"""The sides that `rates.py` and `profile_steps.py` compare, and the model and prompts that they get.

A side is a name: bare vLLM in one of its shapes (`BARE`), Seer's engine alone (`ENGINES`) or a whole Seer
system (`SYSTEMS`). All have the same limits.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from contestants import Process, Prompts, System
from lib.paths import EXAMPLE, ROOT
from tokenizers import Tokenizer

sys.path.insert(0, str(EXAMPLE))
from heavier import WEIGHTS, heavier

OFF, NOW = "drafts.source=off", "engine.async_scheduling=false"
GROUPED = "drafts.source=grouped"

SYSTEMS = {
    "off": [OFF],
    "off-1024": [OFF, "buffer.chunk_size=1024"],
    "off-now": [OFF, NOW],
    "own": ["drafts.source=own"],
    "grouped": [GROUPED],
    "grouped-now": [GROUPED, NOW],
}
"""Seer with its services; `now`: each step begins once the last one is read.
By default chunks have 256 tokens here: a 64th of a response, but at least that."""

ENGINES = {"engine": [OFF]}
"""Seer's engine alone, without its services."""

BARE = {
    "vllm": {},
    "vllm-v1": {"VLLM_USE_V2_MODEL_RUNNER": "0"},
    "vllm-here": {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
}
"""vLLM by its defaults, with model runner V1, with the engine in the process that asks: their environment."""

SIDES = (*BARE, *ENGINES, *SYSTEMS)
LONGEST = 2304
"""Tokens of the longest sequence."""

BATCHED_TOKENS = 4096
"""Most tokens of a step: the padded MLPs are so wide that vLLM's default would take most of the memory."""

KV_BYTES, KV_BLOCKS = 6 << 30, 11_000
"""Of a bare engine; of one of Seer's, in blocks of 32 tokens. Enough for all cells, and fixed, as engines
that start at once count each other's memory as their own."""

QUIET = {
    "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR",
    # Nobody asks for top-k or top-p here, but bare vLLM's warm-up does: FlashInfer would compile with ninja.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}  # fmt: skip
CPU_ENVIRON = {"VLLM_CPU_KVCACHE_SPACE": "3", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}


def limits_of(running: int, given: argparse.Namespace) -> dict[str, object]:
    """Return the limits of every engine."""
    limits: dict[str, object] = {"max_num_seqs": running, "max_model_len": LONGEST}
    if not given.cpu:
        limits |= {"max_num_batched_tokens": BATCHED_TOKENS, "gpu_memory_utilization": given.share}
    return limits


def config_of(name: str, model: Path, running: int, given: argparse.Namespace) -> list[str]:
    """Return the configuration of one of Seer's sides, as `a.b=c`."""
    return [
        f"shared.model={model}", "pool.kind=none", "log.level=warning", *given.sets,
        *(ENGINES | SYSTEMS)[name],
        *(f"engine.{key}={value}" for key, value in limits_of(running, given).items()),
        "engine.kv_cache_gib=2.5" if given.cpu else f"engine.kv_blocks={KV_BLOCKS}",
    ]  # fmt: skip


def in_process(
    name: str, model: Path, running: int, given: argparse.Namespace
) -> tuple[str, dict[str, Any], dict[str, str]]:
    """Return kind, settings and environment of a side without services."""
    environ = QUIET | (CPU_ENVIRON if given.cpu else {})
    if name in ENGINES:
        return "engine", {"config": config_of(name, model, running, given)}, environ
    settings = {"model": str(model), **limits_of(running, given)}
    settings |= {"enforce_eager": True} if given.cpu else {"kv_cache_memory_bytes": KV_BYTES}
    return "vllm", settings, environ | BARE[name]


def contestant(name: str, model: Path, running: int, given: argparse.Namespace) -> Process | System:
    """Return a side, not started yet."""
    if name in SYSTEMS:
        return System(config_of(name, model, running, given))
    return Process(*in_process(name, model, running, given))


def padded(gigabytes: float, layers: int, fill: str) -> Path:
    """Return the shipped model with so many GB in bfloat16 and `layers` times its layers; it is made once."""
    from safetensors.torch import load_file, save_file

    folder = ROOT / "build" / f"padded-{gigabytes:g}-{layers}-{fill}"
    described = folder / "config.json"
    if described.exists() and json.loads(described.read_text()).get("dtype") == "bfloat16":
        return folder
    shipped = (EXAMPLE / "model" / WEIGHTS).stat().st_size
    heavier(folder, weight=2e9 * gigabytes / shipped, layers=layers, fill=fill)
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(folder / WEIGHTS).items()}
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    described.write_text(json.dumps(json.loads(described.read_text()) | {"dtype": "bfloat16"}))
    return folder


def prompts_of(number: int, count: int) -> Prompts:
    """Return the prompts of a turn."""
    tokenizer = Tokenizer.from_file(str(EXAMPLE / "model" / "tokenizer.json"))
    lines = (EXAMPLE / "prompts_512.jsonl").read_text().splitlines()
    texts = [json.loads(lines[(number * count + i) % len(lines)])["prompt"] for i in range(count)]
    ids = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    return [(str(place), each) for place, each in enumerate(ids)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path, help="file of what was made")
    parser.add_argument("--gigabytes", type=float, default=4)
    parser.add_argument("--layers", type=int, default=8, help="so many times the layers")
    parser.add_argument("--fill", choices=("zeros", "random"), default="random")
    given = parser.parse_args()
    made = padded(given.gigabytes, given.layers, given.fill)
    given.out.write_text(json.dumps({"model": made.name, "bytes": (made / WEIGHTS).stat().st_size}) + "\n")


if __name__ == "__main__":
    main()
