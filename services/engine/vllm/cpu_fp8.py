"""Which FP8 vLLM 0.32 computes on CPUs: what it lacks ends in errors of kernels, after seconds of loading.

Its builds for CPUs declare the kernels that quantize whole tensors and leave them empty (`_C` has
`static_scaled_fp8_quant() -> ()`), so that of weights with one scale a tensor none run. Those with a scale a
channel run on any CPU, in torch; blocks need AMX (kernels/linear/scaled_mm/cpu.py), and so do experts, of
which only blocks run (fused_moe/experts/cpu_moe.py). An FP8 KV cache needs AVX-512 (`_get_attn_isa` in
v1/attention/backends/cpu_attn.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from seer.common.policy.device_defaults import has_experts
from seer.common.vllm_settings import VllmSettings

ONLINE = {
    "fp8": "tensor",
    "fp8_per_tensor": "tensor",
    "fp8_per_block": "block",
    "fp8_per_channel": "channel",
}
"""What a scale is for, by the value of `quantization` for a model that is not quantized."""


def problem(settings: VllmSettings, model: Mapping[str, Any], *, avx512: bool, amx: bool) -> str:
    """Return what this CPU cannot do, by field, and what to do; empty: nothing. `model`: its config.json."""
    if (settings.kv_cache_dtype or "").startswith("fp8") and not (avx512 or amx):
        return (
            f"engine.vllm.kv_cache_dtype = {settings.kv_cache_dtype!r}: needs AVX-512 on CPUs; leave it out"
        )
    own = list(_stored(model))
    field, fix = "shared.model: its config.json's quantization_config", "give a model that is not quantized"
    if not own and settings.quantization in ONLINE:
        own = [ONLINE[settings.quantization]]
        field, fix = f"engine.vllm.quantization = {settings.quantization!r}", "leave it out"
    if own and has_experts(model) and (set(own) != {"block"} or not amx):
        return f"{field}: vLLM has no FP8 experts on CPUs, but for blocks with AMX; {fix}"
    if "tensor" in own:
        return f"{field}: vLLM has no FP8 with one scale a tensor on CPUs; {fix}, or use fp8_per_channel"
    if "block" in own and not amx:
        return f"{field}: FP8 with a scale a block needs AMX on CPUs; {fix}, or use fp8_per_channel"
    return ""


def _stored(model: Mapping[str, Any]) -> Iterator[str]:
    """Yield what scales are for in a checkpoint that has FP8 weights."""
    found = _mapping(model.get("quantization_config"))
    if found.get("quant_method") == "fp8":
        yield "block" if found.get("weight_block_size") else "tensor"
    for group in _mapping(found.get("config_groups")).values():
        weights = _mapping(_mapping(group).get("weights"))
        if (weights.get("type"), weights.get("num_bits")) == ("float", 8):
            yield str(weights.get("strategy"))


def _mapping(value: object) -> Mapping[str, Any]:
    """Return what a config.json, which is untrusted, has there, if that is an object."""
    return value if isinstance(value, Mapping) else {}
