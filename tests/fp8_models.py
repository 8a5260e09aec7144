"""Models with FP8 weights and their scales, and kernels for those that vLLM's builds for CPUs lack.

vLLM's own kernels compute what has a scale a channel. Weights with a scale a tensor or a block need others
on CPUs: `stand_ins`, in plain torch. Loading, quantizing and reloading are vLLM's own there, too.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file

if TYPE_CHECKING:
    import pytest

BLOCK = 128
LARGEST = 448.0
"""Of F8_E4M3."""

NAMES = {"tensor": "weight_scale", "channel": "weight_scale", "block": "weight_scale_inv"}
"""How scales are called, by what a scale is for."""


def quantize(folder: Path, kind: str, scale_dtype: torch.dtype = torch.float32) -> Path:
    """Have a model folder's layers in FP8, with scales, as the usual checkpoints of this kind have them."""
    file, config = folder / "model.safetensors", folder / "config.json"
    found: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(file).items():
        if not name.endswith("proj.weight"):
            found[name] = tensor
            continue
        scale = _scale(tensor.float(), kind).to(scale_dtype)
        found[name] = (tensor.float() / spread(scale, tensor.shape, kind)).to(torch.float8_e4m3fn)
        found[name.replace("weight", NAMES[kind])] = scale
    save_file(found, file, metadata={"format": "pt"})
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": _described(kind)}))
    return folder


def spread(scale: torch.Tensor, shape: tuple[int, ...], kind: str) -> torch.Tensor:
    """Return the scale of each weight."""
    if kind == "block":
        scale = scale.repeat_interleave(BLOCK, 0)[: shape[0]].repeat_interleave(BLOCK, 1)[:, : shape[1]]
    return scale.float()


def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have vLLM's engine in this process compute FP8 with a scale a tensor or a block."""
    from vllm import _custom_ops
    from vllm.model_executor.kernels import linear
    from vllm.platforms import PlatformEnum, current_platform

    if not current_platform.is_cpu():
        return
    monkeypatch.setattr(_custom_ops, "scaled_fp8_quant", _quantized)
    monkeypatch.setitem(linear._POSSIBLE_FP8_BLOCK_KERNELS, PlatformEnum.CPU, [_blocks()])


def _scale(weight: torch.Tensor, kind: str) -> torch.Tensor:
    """Return the scales of a weight [out, in]: [], [out, 1], or one for each `BLOCK` x `BLOCK`."""
    size = weight.abs()
    if kind == "tensor":
        return size.max() / LARGEST
    if kind == "channel":
        return size.amax(1, keepdim=True) / LARGEST
    rows = torch.stack([each.amax(0) for each in size.split(BLOCK)])
    return torch.stack([each.amax(1) for each in rows.split(BLOCK, 1)], 1) / LARGEST


def _described(kind: str) -> dict[str, Any]:
    if kind == "channel":
        number = {"num_bits": 8, "type": "float", "symmetric": True}
        group = {
            "targets": ["Linear"],
            "weights": number | {"strategy": "channel", "dynamic": False},
            "input_activations": number | {"strategy": "token", "dynamic": True},
        }
        return {
            "quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"],
            "config_groups": {"group_0": group}, "quantization_status": "compressed",
        }  # fmt: skip
    described = {"quant_method": "fp8", "activation_scheme": "dynamic", "modules_to_not_convert": ["lm_head"]}
    return described | ({"weight_block_size": [BLOCK, BLOCK]} if kind == "block" else {})


def _quantized(tensor: torch.Tensor, scale: torch.Tensor, **_: object) -> tuple[torch.Tensor, torch.Tensor]:
    """Stand for `scaled_fp8_quant` where the scale is known."""
    return (tensor.float() / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scale


def _blocks() -> type:
    """Return a kernel of blocks. Its weights lie the other way round, as if packed: they must be each time."""
    from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUFp8BlockScaledMMKernel
    from vllm.model_executor.utils import replace_parameter

    class Blocks(CPUFp8BlockScaledMMKernel):
        @classmethod
        def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
            return True, None

        def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
            replace_parameter(layer, "weight", layer.weight.data.t().contiguous())

        def apply_weights(
            self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None, **_: object
        ) -> torch.Tensor:
            weight = layer.weight.t().float()
            weight *= spread(layer.weight_scale_inv, weight.shape, "block")
            return torch.nn.functional.linear(x, weight.to(x.dtype), bias)

    return Blocks
