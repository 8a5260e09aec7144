"""How many engines a machine runs and how large their batches are, where the configuration leaves it open.

Invariants:
- without devices, the values are those for CPUs;
- engines on one device together ask for no more of its memory than is free on it now;
- attention that is to be exact is measured to be, or sums in one order by its construction;
- a device of which nothing is known counts as a small one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

CPU_INSTANCES = 2
CPU_MAX_NUM_SEQS = 64
BLOCK_SIZE = 32
"""Tokens per KV block where the model's attention does not ask for another size."""

MEMORY_SHARE = 0.9
"""Share of a device's memory that its engines take; the rest is for CUDA and for what is not profiled."""

LEFT_TO_OTHERS = 0.05
"""Share of a device's memory that stays free beside others who are on the device already."""

LARGE_BYTES, LARGE_A100_BYTES = 70 * 2**30, 160 * 2**30
"""A device takes large batches from this much memory on; no A100 has enough, as large ones slow it down.
These limits and the sizes below are those of vLLM's offline engines."""

LARGE_SEQS, SMALL_SEQS = 1024, 256
LARGE_BATCH, SMALL_BATCH = 16_384, 8_192

HOPPER = 9
"""The first generation whose MLA kernels ask for blocks of a size."""

MLA_BLOCK_SIZE, CUTLASS_BLOCK_SIZE = 64, 128
"""64 suits every MLA kernel that vLLM would choose by itself: FlashAttention's and FlashMLA on Hopper,
FlashInfer's on Blackwell. CUTLASS's takes 128 alone."""

EXACT_HEAD_SIZE = 128
"""With heads of this size FlashAttention 3 gives a decode the bits of a prefill and of a verified draft; with
32 it does not, as it then sums in other tiles for a single token (docs/gpu.md: measured on an H100)."""

EXACT_ATTENTION = "TRITON_ATTN"
"""With batch-invariant kernels, its sums are in one order for heads of any size."""


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """A device. `name` is as `CUDA_VISIBLE_DEVICES` takes it; memory is in bytes, 0 if unknown.

    `generation` is the compute capability without what follows the point, 0 if unknown.
    """

    name: str
    uuid: str = ""
    model: str = ""
    total_bytes: int = 0
    free_bytes: int = 0
    generation: int = 0


class EngineDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """Values for what a configuration leaves open. `sharing` engines are on each device.

    `max_num_batched_tokens` is None where vLLM's own default holds.
    """

    instances: int
    sharing: int
    max_num_seqs: int
    max_num_batched_tokens: int | None
    block_size: int
    gpu_memory_utilization: float

    def unset(self, engine: object) -> dict[str, Any]:
        """Return the values of those fields of `config.EngineConfig` that `engine` leaves open."""
        names = ("max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization")
        return {name: getattr(self, name) for name in names if getattr(engine, name) is None}


def engine_defaults(
    devices: Sequence[Device],
    ranks: int,
    model: Mapping[str, Any],
    *,
    instances: int | None = None,
    attention_backend: str | None = None,
) -> EngineDefaults:
    """Return the defaults for engines of `ranks` devices each; `model` is its config.json.

    `instances` is how many engines share all devices; None: as many as have devices of their own. Memory that
    is in use on a device counts as that of a trainer, which keeps it.
    """
    if not devices:
        return EngineDefaults(
            instances=instances or CPU_INSTANCES, sharing=1, max_num_seqs=CPU_MAX_NUM_SEQS,
            max_num_batched_tokens=None, block_size=BLOCK_SIZE, gpu_memory_utilization=MEMORY_SHARE,
        )  # fmt: skip
    instances = instances or max(1, len(devices) // ranks)
    sharing = -(-instances * ranks // len(devices))
    large = all(_is_large(device, sharing) for device in devices)
    share = min(_free_share(device) for device in devices)
    return EngineDefaults(
        instances=instances,
        sharing=sharing,
        max_num_seqs=LARGE_SEQS if large else SMALL_SEQS,
        max_num_batched_tokens=LARGE_BATCH if large else SMALL_BATCH,
        block_size=_block_size(devices[0], model, attention_backend),
        gpu_memory_utilization=share / sharing,
    )


def has_experts(model: Mapping[str, Any]) -> bool:
    """Return whether a model's config.json describes a mixture of experts."""
    text = model.get("text_config", model)
    counts = ("num_experts", "num_local_experts", "n_routed_experts")
    return isinstance(text, Mapping) and any(text.get(name) for name in counts)


def uses_mla(model: Mapping[str, Any]) -> bool:
    """Return whether the model's attention keeps one latent vector per token, as DeepSeek's and Kimi's."""
    text = model.get("text_config", model)
    return isinstance(text, Mapping) and bool(text.get("kv_lora_rank"))


def exact_attention(model: Mapping[str, Any]) -> str | None:
    """Return the attention backend by which last bits depend on a request's tokens alone.

    `model` is its config.json. None: the one that vLLM chooses does, or it is MLA, of which nothing is known.
    """
    text = model.get("text_config", model)
    if uses_mla(model) or not isinstance(text, Mapping):
        return None
    size, width, heads = (text.get(name) for name in ("head_dim", "hidden_size", "num_attention_heads"))
    if size is None and isinstance(width, int) and isinstance(heads, int) and heads > 0:
        size = width // heads
    return None if size == EXACT_HEAD_SIZE else EXACT_ATTENTION


def _is_large(device: Device, sharing: int) -> bool:
    least = LARGE_A100_BYTES if "A100" in device.model else LARGE_BYTES
    return device.total_bytes // sharing >= least


def _free_share(device: Device) -> float:
    """Return the share of the device's memory that engines may take, in whole hundredths."""
    if not device.total_bytes:
        return MEMORY_SHARE
    free = device.free_bytes / device.total_bytes
    if free >= 1 - LEFT_TO_OTHERS:  # a display or a driver at most
        return MEMORY_SHARE
    return max(1, min(int(100 * MEMORY_SHARE), int(100 * (free - LEFT_TO_OTHERS)))) / 100


def _block_size(device: Device, model: Mapping[str, Any], attention_backend: str | None) -> int:
    if not uses_mla(model) or device.generation < HOPPER:
        return BLOCK_SIZE
    return CUTLASS_BLOCK_SIZE if attention_backend == "CUTLASS_MLA" else MLA_BLOCK_SIZE
