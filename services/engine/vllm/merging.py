"""Merges a LoRA adapter into its base while vLLM loads it, one tensor after the other.

Invariants (tests/unit/test_lora_merge.py):
- a merged tensor is W + scale * (B @ A), computed in float32 on the CPU and rounded to W's type: what PEFT's
  `merge_and_unload` computes there with an adapter in float32, to the last bit;
- tensors that the adapter does not change are the base's own;
- memory is that of one tensor of the base, its float32 copy, and the product.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors import safe_open

from seer.common.weights.lora import read_config
from seer.common.weights.safetensors import Stored, stored
from seer.services.engine.weights.adapter import Pair, plan_merge
from seer.services.engine.weights.manifest import Tensor


class Adapter:
    """The adapter in a folder that `read_adapter` has checked; `base` is the folder of its base."""

    def __init__(self, folder: Path, base: Path) -> None:
        files = {each.name: each for each in stored(folder)}
        self._files = {name: each.file for name, each in files.items()}
        self._plan = plan_merge(read_config(folder), _tensors(files.values()), _tensors(stored(base)))

    def merged(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the base's tensors by name, each with the adapter's change if there is one."""
        for name, weight in weights:
            change = self._plan.get(name)
            if change is None:
                yield name, weight
            elif isinstance(change, str):
                yield name, self._read(change).to(weight.dtype)
            else:
                onto = self._read(change.onto).to(weight.dtype) if change.onto else weight
                yield name, merge(onto, self._read(change.a), self._read(change.b), change)

    def _read(self, name: str) -> torch.Tensor:
        with safe_open(self._files[name], "pt") as opened:
            found: torch.Tensor = opened.get_tensor(name)
            return found


def merge(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, pair: Pair) -> torch.Tensor:
    """Return a tensor of the base with the product of a pair added; see `Pair` for the shapes."""
    product = b.float() @ a.float()
    added = (product.T if pair.embedding else product) * pair.scale
    if pair.embedding:  # as PEFT, which rounds twice there
        added = added.to(weight.dtype).float()
    return added.add_(weight.to("cpu", torch.float32)).to(weight.dtype)


def _tensors(found: Iterable[Stored]) -> dict[str, Tensor]:
    return {each.name: Tensor(each.dtype, each.shape) for each in found}
