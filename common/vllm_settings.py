"""`[engine.vllm]`: settings of vLLM that are passed on, and why others are not.

Invariants:
- what is left out is vLLM's own default;
- all that is set here is reported with the engine's versions, and only engines with equal settings share KV:
  each may change the last bits of a number;
- a setting that Seer makes itself, or that its promise does not hold with, is refused by name.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgspec

from seer.common.bounds import Count, Section

_SETS = "Seer sets it itself"
_ONE_RANK = (
    "the KV pool and drafts find all blocks of a sequence on each rank: raise engine.tensor_parallel instead"
)


_ROUTERS = ("*.gate", "*.router")
"""Names of layers that choose experts, as patterns. vLLM would quantize these, too, and route otherwise."""


class VllmSettings(Section, frozen=True):
    """Settings with vLLM's own names, types and meanings; what a device or model cannot do, vLLM refuses."""

    title = "engine.vllm"

    attention_backend: str | None = None
    """As FLASH_ATTN, FLASHINFER or FLASHMLA; default: vLLM's choice for the model and the device."""
    cudagraph_capture_sizes: tuple[Count, ...] | None = None
    """Tokens a step for which graphs are captured; steps of other sizes take the next larger one."""
    cudagraph_mode: Literal["NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"] | None = (
        None
    )
    data_parallel_size: Count = 1
    """Ranks on this machine with requests and KV of their own, which share the experts of a mixture."""
    enable_expert_parallel: bool = False
    """Divide whole experts among ranks, instead of each expert."""
    enforce_eager: bool | None = None
    """Neither compile the model nor capture graphs; default: only on CPUs."""
    kv_cache_dtype: Literal["float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_ds_mla"] | None = None
    """Type of numbers in the KV cache; default: the model's."""
    quantization: str | None = None
    """Method, as fp8_per_block, which leaves routers out; default: as the model's config.json says."""
    trust_remote_code: bool = False
    """Run Python code from the model's folder, with all rights of the engine."""

    REFUSED: ClassVar[dict[str, str]] = {
        "model": f"{_SETS}: give shared.model",
        "tokenizer": f"{_SETS}: it is the one in shared.model",
        "dtype": f"{_SETS}: give engine.dtype",
        "block_size": f"{_SETS}: give shared.block_size",
        "max_model_len": f"{_SETS}: give engine.max_model_len",
        "max_num_seqs": f"{_SETS}: give engine.max_num_seqs",
        "max_num_batched_tokens": f"{_SETS}: give engine.max_num_batched_tokens",
        "tensor_parallel_size": f"{_SETS}: give engine.tensor_parallel",
        "gpu_memory_utilization": f"{_SETS}: give engine.gpu_memory_utilization",
        "num_gpu_blocks_override": f"{_SETS}: give engine.kv_blocks",
        "kv_cache_memory_bytes": f"{_SETS}: give engine.kv_blocks or engine.gpu_memory_utilization",
        "load_format": f"{_SETS}: weights are safetensors files, never pickles",
        "seed": "it would have no effect: a rollout's seed is an argument of `submit`",
        "speculative_config": "drafts come from the response's group: set [drafts]",
        "kv_transfer_config": "the KV pool is Seer's: set [pool]",
        "worker_extension_cls": f"{_SETS}: its sampler is put into the worker there",
        "worker_cls": "Seer's sampler is put into vLLM's own worker",
        "scheduler_cls": "Seer counts the blocks of vLLM's own scheduler",
        "scheduling_policy": "the buffer decides what goes first: set buffer.policy",
        "logits_processors": "Seer samples by itself: give penalties or logit_bias with a request",
        "enable_prefix_caching": f"{_SETS}: chunks go on from cached KV",
        "enable_sleep_mode": f"{_SETS}: it is on wherever vLLM has it",
        "enable_lora": "adapters are merged into the weights: send them by `update_weights`",
        "async_scheduling": f"{_SETS}: give engine.async_scheduling",
        "distributed_executor_backend": "ranks are processes of vLLM's own executor: docs/models.md",
        "nnodes": f"{_SETS}: give engine.nodes",
        "pipeline_parallel_size": "drafts and sampling need the first and the last layer in each rank: raise "
        "engine.tensor_parallel instead",
        "decode_context_parallel_size": _ONE_RANK,
        "prefill_context_parallel_size": _ONE_RANK,
        "enable_eplb": "it moves experts by load: a response's numbers would depend on other requests",
        "enable_dbo": "it splits batches by their load, which no test of equal tokens covers",
        "compilation_config": "give its parts cudagraph_mode and cudagraph_capture_sizes here",
        "attention_config": "give attention_backend here",
        "quantization_config": "give quantization here",
    }

    def given(self) -> dict[str, Any]:
        """Return what differs from the defaults, by name."""
        default = VllmSettings()
        return {
            name: value
            for name, value in msgspec.structs.asdict(self).items()
            if value != getattr(default, name)
        }

    def texts(self) -> dict[str, str]:
        """Return what differs from the defaults as texts, by the setting's whole name."""
        return {f"engine.vllm.{name}": str(value) for name, value in self.given().items()}

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of vLLM's engine that are set here."""
        found = self.given()
        found.pop("data_parallel_size", None)  # each rank is told which one it is
        if "cudagraph_mode" in found:
            found["compilation_config"] = {"cudagraph_mode": found.pop("cudagraph_mode")}
        if "cudagraph_capture_sizes" in found:
            found["cudagraph_capture_sizes"] = list(found["cudagraph_capture_sizes"])
        if found.get("quantization", "").startswith("fp8_per_"):
            found["quantization_config"] = {"ignore": list(_ROUTERS)}
        return found
