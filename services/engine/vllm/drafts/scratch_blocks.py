"""KV blocks for verifying several draft paths at once, taken out of vLLM's block pool for good.

Invariants (tests/e2e/test_draft_paths.py asserts them):
- scratch blocks are counted nowhere: not by the scheduler, in `Capacity`, free blocks or the prefix cache;
- an engine that cannot verify several paths logs why, once, and verifies one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from seer.common.config import DraftsConfig
from seer.common.process.log import get_logger

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore

MAX_PATH_ROWS = 16
"""Most paths in a step besides each request's first: they pay in small batches only."""

MIN_BLOCKS_PER_SCRATCH = 8
"""At most one block in so many is scratch, if free memory determines the number of blocks."""

_log = get_logger()


def path_blocks(max_draft: int, block_size: int) -> int:
    """Return the most blocks that the tokens of a path, and the one before it, lie in."""
    return (block_size - 1 + max_draft) // block_size + 1


def scratch_blocks(drafts: DraftsConfig | None, block_size: int) -> int:
    """Return how many KV blocks an engine needs in addition to `engine.kv_blocks`."""
    if drafts is None or drafts.max_paths == 1 or drafts.head:  # a head's draft has one path
        return 0
    return MAX_PATH_ROWS * path_blocks(drafts.max_draft, block_size)


def take_scratch_blocks(core: EngineCore, drafts: DraftsConfig | None, block_size: int) -> list[int]:
    """Take scratch blocks out of an idle engine's block pool; return their ids, none if of no use."""
    wanted = scratch_blocks(drafts, block_size)
    if not wanted:
        return []
    why = _obstacle(core)
    if why:
        log_single_path(why)
    pool = core.scheduler.kv_cache_manager.block_pool
    if core.vllm_config.cache_config.num_gpu_blocks_override is None:  # else they were added
        wanted = 0 if why else min(wanted, pool.num_gpu_blocks // MIN_BLOCKS_PER_SCRATCH)
    blocks = pool.get_new_blocks(wanted)
    pool.num_gpu_blocks -= wanted  # else they would count as used
    return [] if why else [block.block_id for block in blocks]


def log_single_path(why: str) -> None:
    """Log once, at start-up, that this engine verifies one draft path per request."""
    _log.info("one draft path per request", why=why)


def _obstacle(core: EngineCore) -> str:
    """Return what in vLLM's configuration rules out several paths; empty if nothing does."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    config = core.vllm_config
    parallel, transfer = config.parallel_config, config.kv_transfer_config
    groups = core.scheduler.kv_cache_config.kv_cache_groups
    obstacles = {
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "context parallelism": parallel.decode_context_parallel_size > 1
        or parallel.prefill_context_parallel_size > 1,
        "data parallelism": parallel.data_parallel_size > 1,
        "KV that is not of full attention alone": len(groups) != 1
        or not isinstance(groups[0].kv_cache_spec, FullAttentionSpec),
        "M-RoPE": config.model_config.uses_mrope,
        "LoRA": config.lora_config is not None,
        "a KV connector that saves while a step runs": transfer is not None
        and transfer.kv_connector != "SeerStoreConnector",
    }
    return next((name for name, there in obstacles.items() if there), "")
