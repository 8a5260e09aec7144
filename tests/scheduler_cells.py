"""Configurations of vLLM's scheduler, for `scheduler_pair.py`."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

MODEL = Path(__file__).parents[1] / "examples/countdown/model"

BLOCK = 4
LONGEST = 48
IMAGE_BUDGET = 12
"""Tokens of images that a step may encode, and that may be kept."""


@dataclass(frozen=True)
class Cell:
    """A configuration. `ahead`: two steps are under way; `window`: some layers attend to so many tokens alone.

    `lookahead`: places for KV beyond a request's drafts, as a head needs them; `grammars`: some requests have
    one; `throttled`: some steps are to begin no prompt.
    """

    ahead: bool = False
    drafts: int = 0
    window: int = 0
    chunked: int = 0
    priority: bool = False
    connector: bool = False
    caching: bool = True
    images: bool = False
    dynamic: bool = False
    lookahead: int = 0
    grammars: bool = False
    throttled: bool = False
    blocks: int = 14
    seats: int = 5
    budget: int = 20


@functools.cache
def configured(cell: Cell) -> tuple[object, object]:
    """Return the configurations of a cell, of vLLM and of its KV."""
    import torch
    from vllm.config import (
        CacheConfig,
        DeviceConfig,
        KVTransferConfig,
        ModelConfig,
        ParallelConfig,
        SchedulerConfig,
        SpeculativeConfig,
        VllmConfig,
    )
    from vllm.v1.kv_cache_interface import (
        ChunkedLocalAttentionSpec,
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        SlidingWindowSpec,
    )

    model = ModelConfig(model=str(MODEL), dtype="float32", max_model_len=LONGEST, skip_tokenizer_init=True)
    speculation = None
    if cell.drafts:
        speculation = SpeculativeConfig(
            method="custom_class", model="nothing.Proposer", num_speculative_tokens=cell.drafts,
            target_model_config=model, target_parallel_config=ParallelConfig(),
        )  # fmt: skip
    cache = CacheConfig(block_size=BLOCK, enable_prefix_caching=cell.caching)
    cache.num_gpu_blocks = cell.blocks + 1  # vLLM's null block
    scheduler = SchedulerConfig(
        max_num_seqs=cell.seats, max_num_batched_tokens=cell.budget, max_model_len=LONGEST,
        is_encoder_decoder=False, async_scheduling=False, policy="priority" if cell.priority else "fcfs",
    )  # fmt: skip
    transfer = None
    if cell.connector:
        transfer = KVTransferConfig(
            kv_connector="RecordingConnector",
            kv_connector_module_path="recording_connector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",  # as `transfer_config` of the KV pool says
        )
    config = VllmConfig(
        model_config=model, scheduler_config=scheduler, cache_config=cache, device_config=DeviceConfig("cpu"),
        speculative_config=speculation, kv_transfer_config=transfer,
    )  # fmt: skip
    config.scheduler_config.async_scheduling = cell.ahead  # which vLLM refuses on CPUs
    shape = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
    groups = [KVCacheGroupSpec(["layer"], FullAttentionSpec(**shape))]
    if cell.window:
        groups.append(KVCacheGroupSpec(["windowed"], SlidingWindowSpec(**shape, sliding_window=cell.window)))
    if cell.chunked:
        groups.append(
            KVCacheGroupSpec(["local"], ChunkedLocalAttentionSpec(**shape, attention_chunk_size=cell.chunked))
        )
    return config, KVCacheConfig(num_blocks=cell.blocks + 1, kv_cache_tensors=[], kv_cache_groups=groups)
