"""vLLM's scheduler and block allocator without a model.

It runs chunks, shares full blocks of equal prefixes by reference count, keeps freed ones findable until
they are reused, preempts the last chunk when a running one finds no block, and lets a save to the KV pool
pin the blocks of a running chunk, as vLLM's connectors do, until it is done.
"""

from __future__ import annotations

from pathlib import Path

MODEL = Path(__file__).parents[1] / "examples/countdown/model"


def token_after(tokens: list[int]) -> int:
    """Siblings agree for a while, then part: what decides whether they share blocks."""
    return (tokens[0] + len(tokens) // 9) % 3


class VllmAllocator:
    """vLLM's own `Scheduler`; only the model's part of each step is made up.

    With a `window`, some layers attend to so many tokens alone: a KV cache group of their own.
    """

    def __init__(self, blocks: int, block_size: int, seats: int, drafts: int, window: int = 0) -> None:
        # Heavy, and present only where the engine is.
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.structured_output import StructuredOutputManager

        from seer.services.engine.vllm.kv_account import KvAccount

        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(block_size, sha256)
        config, cache = _vllm_config(blocks, block_size, seats, drafts, window)
        self.scheduler = Scheduler(config, cache, StructuredOutputManager(config), block_size=block_size)
        self.manager = self.scheduler.kv_cache_manager
        self.pool = self.manager.block_pool
        self.account = KvAccount(self.manager, cache, block_size)
        assert self.account.blocks == blocks
        self.requests = {}
        self.pins = []
        self.preemptions = 0

    @property
    def free(self) -> int:
        return self.account.free

    @property
    def pinned(self) -> int:
        return self.account.pinned()

    def held(self, name: str) -> int:
        return self.account.held(name)

    def add(self, name: str, tokens: list[int], new: int) -> None:
        from vllm import SamplingParams
        from vllm.v1.request import Request

        sampling = SamplingParams(max_tokens=new, ignore_eos=True)
        self.requests[name] = Request(name, list(tokens), sampling, None, block_hasher=self.hasher)
        self.scheduler.add_request(self.requests[name])

    def drop(self, name: str) -> None:
        from vllm.v1.request import RequestStatus

        if self.requests.pop(name, None) is not None:
            self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def pin(self, name: str) -> None:
        tables = (each.req_to_blocks.get(name, ()) for each in self.manager.coordinator.single_type_managers)
        if blocks := [block for table in tables for block in table if not block.is_null]:
            self.pool.touch(blocks)
            self.pins.append(blocks)

    def unpin(self) -> None:
        self.pool.free_blocks(reversed(self.pins.pop(0)))

    def step(self, drafts: int, right: int) -> dict[str, list[int]]:
        """Run one step; return the chunks that ended, with all their tokens.

        At most `right` of the tokens drafted before are accepted; `drafts` are drafted for the next step.
        """
        from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

        scheduled = self.scheduler.schedule()
        names = list(scheduled.num_scheduled_tokens)
        sampled = []
        for name in names:
            request = self.requests[name]
            drafted = len(scheduled.scheduled_spec_decode_tokens.get(name, ()))
            tokens = list(request.all_token_ids)
            known = len(tokens)
            if request.num_computed_tokens >= known:  # else part of a prefill
                for _ in range(1 + min(drafted, right)):
                    tokens.append(token_after(tokens))
            sampled.append(tokens[known:])
        order = {name: position for position, name in enumerate(names)}
        self.scheduler.update_from_output(scheduled, ModelRunnerOutput(names, order, sampled))
        self.preemptions += len(scheduled.preempted_req_ids or ())
        ended = [name for name in names if self.requests[name].is_finished()]
        left = [name for name in names if name not in ended]
        self.scheduler.update_draft_token_ids(DraftTokenIds(left, [[1] * drafts for _ in left]))
        return {name: list(self.requests.pop(name).all_token_ids) for name in ended}


def _vllm_config(blocks: int, block_size: int, seats: int, drafts: int, window: int):
    import torch
    from vllm.config import (
        CacheConfig,
        DeviceConfig,
        ModelConfig,
        ParallelConfig,
        SchedulerConfig,
        SpeculativeConfig,
        VllmConfig,
    )
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        SlidingWindowSpec,
    )

    longest = blocks * block_size
    model = ModelConfig(model=str(MODEL), dtype="float32", max_model_len=longest, skip_tokenizer_init=True)
    speculation = None
    if drafts:
        speculation = SpeculativeConfig(
            method="custom_class",
            model="nothing.Proposer",
            num_speculative_tokens=drafts,
            target_model_config=model,
            target_parallel_config=ParallelConfig(),
        )
    cache = CacheConfig(block_size=block_size, enable_prefix_caching=True)
    physical = 2 * blocks + 1 if window else blocks  # one block is left over
    cache.num_gpu_blocks = physical + 1  # vLLM's null block
    scheduler = SchedulerConfig(
        max_num_seqs=seats,
        max_num_batched_tokens=longest,
        max_model_len=longest,
        is_encoder_decoder=False,
        async_scheduling=False,
    )
    config = VllmConfig(
        model_config=model,
        scheduler_config=scheduler,
        cache_config=cache,
        device_config=DeviceConfig("cpu"),
        speculative_config=speculation,
    )
    shape = {"block_size": block_size, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
    groups = [KVCacheGroupSpec(["layer"], FullAttentionSpec(**shape))]
    if window:
        groups.append(KVCacheGroupSpec(["windowed"], SlidingWindowSpec(**shape, sliding_window=window)))
    return config, KVCacheConfig(num_blocks=physical + 1, kv_cache_tensors=[], kv_cache_groups=groups)
