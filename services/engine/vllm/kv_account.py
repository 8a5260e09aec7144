"""How much KV an engine has, and who holds it, counted in blocks' worth of tokens.

Some models have several KV cache groups: some layers attend to everything, others to a window. A request then
takes a block of each group for the same tokens, all out of one pool. The rest of Seer counts those as one.

Invariants (tests/property/test_chunk_gate.py runs them against vLLM's own scheduler):
- tokens of a request never take more than ceil(tokens / block size) of what is counted here;
- where groups hold unequal numbers, less is promised than there is: free blocks are rounded down, pinned ones
  up;
- a model whose layers keep anything else, as states, is refused by name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from seer.common.errors import EngineError

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
    from vllm.v1.request import Request

COUNTED = ("FullAttentionSpec", "MLAAttentionSpec", "SlidingWindowSpec", "ChunkedLocalAttentionSpec")
"""vLLM's kinds of KV that take at most one block for a block's worth of tokens."""


class KvAccount:
    """The account of an idle engine's KV; `blocks`: how many a request may take in each group.

    Raises `EngineError` for KV that cannot be counted.
    """

    def __init__(self, manager: KVCacheManager, config: KVCacheConfig, block_size: int) -> None:
        for group in config.kv_cache_groups:
            _check(group.kv_cache_spec, group.layer_names, block_size)
        self._groups = len(config.kv_cache_groups)
        self._pool = manager.block_pool
        self._managers: tuple[Any, ...] = manager.coordinator.single_type_managers
        usable: int = self._pool.num_gpu_blocks - 1  # without the null block
        self.blocks, surplus = divmod(usable, self._groups)
        self._pool.get_new_blocks(surplus)
        self._pool.num_gpu_blocks -= surplus  # else they would count as used

    @property
    def free(self) -> int:
        """Blocks that the scheduler could give out now, cached ones that nobody references included."""
        free: int = self._pool.get_num_free_blocks()
        return free // self._groups

    def held(self, engine_id: str) -> int:
        """Return the blocks of a request that it need not take any more, those beyond a window included."""
        return sum(len(each.req_to_blocks.get(engine_id, ())) for each in self._managers) // self._groups

    def forget_cached(self, request: Request) -> None:
        """Have no request find a request's blocks by content; requests that hold the blocks keep them."""
        for digest in request.block_hashes:
            for group in range(self._groups):
                for block in self._pool.get_cached_block(digest, [group]) or ():
                    self._pool.evict_blocks({block.block_id})

    def zero_new(self, scheduler: Scheduler) -> None:
        """Have workers zero blocks as they are given out (`cpu_kernels.FreshBlocks`)."""
        scheduler.needs_kv_cache_zeroing = True
        for manager in self._managers:
            manager._record_new_block_ids = True

    def pinned(self) -> int:
        """Return the blocks in use that no running request has; one that several share counts once."""
        used = {
            block.block_id
            for manager in self._managers
            for blocks in manager.req_to_blocks.values()
            for block in blocks
            if not block.is_null
        }
        idle: int = self._pool.get_num_free_blocks() + len(used)
        pinned = self.blocks * self._groups - idle
        return max(0, -(-pinned // self._groups))


def _check(spec: KVCacheSpec, layers: list[str], block_size: int) -> None:
    for kind in {type(each).__name__ for each in getattr(spec, "kv_cache_specs", {"": spec}).values()}:
        if kind not in COUNTED:
            raise EngineError(
                f"shared.model: what its layers {', '.join(layers[:2])} keep ({kind} in vLLM) cannot be "
                "counted in KV blocks; give a model with full, sliding-window or chunked attention alone"
            )
    if spec.block_size < block_size:
        raise EngineError(
            f"shared.block_size = {block_size}: layer {layers[0]} has blocks of {spec.block_size} tokens; "
            "set that"
        )
