"""Make a model heavier without changing what it computes: it gets parts, and layers, that add zero.

    python examples/countdown/heavier.py build/heavier-30 --weight 30 --kv 4
    python examples/countdown/heavier.py build/heavier-gpu --weight 1000 --layers 8 --fill random

The shipped model is so small that a step's time is Python's. Padded with zeros it takes the time and the
memory of a larger model and still generates the same text, so figures about schedules, drafts and the KV pool
can be measured on one that behaves as models do. GPUs multiply zeros faster than other numbers; with random
ones instead, what the parts add is so small that rounding loses it. For models of the Llama family (Llama,
Qwen2, Qwen3) in one safetensors file, with `mlp.{gate,up,down}_proj` and `self_attn.{q,k,v,o}_proj`.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file, save_file

MODEL = Path(__file__).parent / "model"

WEIGHTS = "model.safetensors"

STEP = 128
"""The MLPs' width is a multiple of this, as models' are."""

SCALE, LOST = 0.02, 2.0**-60
"""Of random weights, and of those whose products are added to the rest and rounded away."""

PERIOD = 1_000_003
"""Random numbers drawn for a tensor; it repeats them, as gigabytes take a minute to draw."""

Array = npt.NDArray[np.float32]


def heavier(
    folder: Path, *, weight: float = 1, kv: int = 1, layers: int = 1, model: Path = MODEL, fill: str = "zeros"
) -> Path:
    """Write `model` into `folder`, at least `weight` times as large, with `layers` times as many layers.

    `kv` is by how much a layer's KV grows: more attention heads. The MLPs take the rest of the weight. `fill`
    is what new weights are, "zeros" or "random". Returns `folder`. Raises `ValueError` for factors below 1.
    """
    if min(weight, kv, layers) < 1:
        raise ValueError(f"weight = {weight}, kv = {kv}, layers = {layers}: give 1 or more")
    new = _random if fill == "random" else _zeros
    tensors = load_file(model / WEIGHTS)
    config = json.loads((model / "config.json").read_text())
    target = weight * sum(tensor.nbytes for tensor in tensors.values())
    _add_layers(tensors, config, layers, new)
    heads = {part: kv * config[part] for part in ("num_attention_heads", "num_key_value_heads")}
    for part, axis in (("q", 0), ("k", 0), ("v", 0), ("o", 1)):
        _grow(tensors, f"self_attn.{part}_proj", axis, lambda size: kv * size, new)
    missing = target - sum(tensor.nbytes for tensor in tensors.values())
    a_unit = 3 * config["hidden_size"] * config["num_hidden_layers"] * 4  # bytes that one more MLP unit takes
    width = config["intermediate_size"]
    if missing > 0:
        width = -(-(width + round(missing / a_unit)) // STEP) * STEP
    for part, axis in (("gate", 0), ("up", 0), ("down", 1)):
        _grow(tensors, f"mlp.{part}_proj", axis, lambda _: width, new)
    shutil.copytree(model, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns(WEIGHTS))
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    (folder / "config.json").write_text(
        json.dumps(config | heads | {"intermediate_size": width}, indent=2) + "\n"
    )
    return folder


Fill = Callable[[tuple[int, ...], float], Array]
"""New weights of a shape, random ones of this scale."""


def _zeros(shape: tuple[int, ...], scale: float) -> Array:
    return np.zeros(shape, np.float32)


def _random(shape: tuple[int, ...], scale: float) -> Array:
    drawn = np.random.default_rng(0).standard_normal(PERIOD, dtype=np.float32)
    return np.resize(drawn * np.float32(scale), shape)


def _scale(key: str) -> float:
    return LOST if ".o_proj." in key or ".down_proj." in key else SCALE


def _add_layers(tensors: dict[str, Array], config: dict[str, Any], factor: int, new: Fill) -> None:
    """Append copies of all layers, so that there are `factor` times as many; what the copies add is new."""
    own = config["num_hidden_layers"]
    for key, tensor in list(tensors.items()):
        if found := re.fullmatch(r"(.*layers\.)(\d+)(\..*)", key):
            for copy in range(1, factor):
                name = f"{found[1]}{int(found[2]) + copy * own}{found[3]}"
                tensors[name] = new(tensor.shape, LOST) if _scale(key) == LOST else tensor.copy()
    config["num_hidden_layers"] = own * factor
    if "layer_types" in config:
        config["layer_types"] *= factor


def _grow(tensors: dict[str, Array], name: str, axis: int, size: Callable[[int], int], new: Fill) -> None:
    """Append new weights, and biases, to those of this name in every layer, along an axis of the weights."""
    for key, tensor in tensors.items():
        if name in key and axis < tensor.ndim:
            shape = list(tensor.shape)
            shape[axis] = size(shape[axis]) - shape[axis]
            tensors[key] = np.concatenate([tensor, new(tuple(shape), _scale(key))], axis)


def main() -> None:
    """Write a model."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--weight", type=float, default=30, help="at least so many times the bytes")
    parser.add_argument("--kv", type=int, default=1, help="so many times the KV of a layer")
    parser.add_argument("--layers", type=int, default=1, help="so many times as many layers")
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--fill", choices=("zeros", "random"), default="zeros", help="what new weights are")
    given = parser.parse_args()
    made = heavier(**vars(given))
    print(f"{made}: {(made / WEIGHTS).stat().st_size / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
