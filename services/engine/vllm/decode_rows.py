"""What `DecodeScheduler` knows of requests that run, so that it need not ask vLLM in each step.

Invariant: what is known for some steps alone is a bound up to which vLLM's own call would do nothing. It may
be too low, which costs that call; it is never too high.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.outputs import LogprobsLists
    from vllm.v1.request import Request


class Row:
    """A request that runs. Of `tokens` and `output`, vLLM's own lists, both get each new token.

    Nothing ends it before it has `end` tokens or samples one of `stops`. Up to `quiet` tokens it gets and
    loses no block, up to `cached` none of them is cached, and below `hash_at` none is hashed. With `last`
    tokens its limit lets it have one more.
    """

    __slots__ = (
        "cached", "client", "end", "hash_at", "images", "last", "logprobs", "output", "prompt", "quiet",
        "request", "stops", "tokens",
    )  # fmt: skip

    def __init__(self, request: Request, longest: int) -> None:
        sampling = request.sampling_params
        self.request = request
        self.tokens: list[int] = request._all_token_ids
        self.output: list[int] = request._output_token_ids
        self.prompt: int = request.num_prompt_tokens
        self.last = self.prompt + request.max_tokens - 1
        self.end = most_tokens(request, longest)
        self.stops = frozenset((*(sampling.stop_token_ids or ()), sampling.eos_token_id))
        self.logprobs = sampling.num_logprobs is not None
        self.images = bool(request.mm_features)
        self.client: int = request.client_index
        self.quiet = self.cached = self.hash_at = 0

    @property
    def is_over(self) -> bool:
        """Whether the steps under way end it at its limit, even if none of their drafts is right."""
        request, under_way = self.request, self.request.num_output_placeholders
        return bool(under_way > 0 and request.num_computed_tokens + 1 - under_way >= self.last)

    @property
    def decodes(self) -> bool:
        """Whether nothing of its prompt is left, and nothing under way became stale by a preemption."""
        return not (self.request.is_prefill_chunk or self.request.num_stale_output_tokens)


@dataclass(slots=True)
class Batch:
    """Requests that run together, in vLLM's order, with their rows and what is read of these in each step."""

    rows: list[Row]
    requests: list[Request]
    names: list[str]
    tokens: list[list[int]]
    prompts: list[int]
    lasts: list[int]
    quiet: list[int]
    cached: list[int]

    @classmethod
    def of(cls, rows: list[Row]) -> Batch:
        """Return the batch of these requests."""
        return cls(
            rows=rows,
            requests=[row.request for row in rows],
            names=[row.request.request_id for row in rows],
            tokens=[row.tokens for row in rows],
            prompts=[row.prompt for row in rows],
            lasts=[row.last for row in rows],
            quiet=[row.quiet for row in rows],
            cached=[row.cached for row in rows],
        )


@dataclass(slots=True)
class Step:
    """What a batch's requests compute next: tokens by number (`sizes`), up to `ends`, `drafts` among them.

    They have `known` tokens, or `begun` with those that steps under way will give. `growing` may get blocks
    or lose some, `filling` may have some cached: places in the batch. `taken` counts the requests that run
    first in vLLM's order: these, and some that get nothing in this step; `rest` is what vLLM adds.
    """

    batch: Batch
    taken: int
    known: list[int]
    begun: list[int]
    computed: list[int]
    ends: list[int]
    sizes: list[int]
    drafts: list[list[int]]
    growing: list[int]
    filling: list[int]
    new_blocks: list[tuple[list[int], ...] | None] = field(default_factory=list)
    rest: dict[str, int] | None = None


def fits(scheduler: Scheduler) -> bool:
    """Say whether requests may be taken out of steps."""
    config, parallel = scheduler.scheduler_config, scheduler.parallel_config
    speculation = scheduler.vllm_config.speculative_config
    unknown = (
        scheduler.log_stats, scheduler.lora_config, scheduler.ec_connector, scheduler.aux_output_connector,
        scheduler.finished_req_ids_dict is not None, scheduler.spec_decode_metrics_level != "none",
        scheduler.is_encoder_decoder, scheduler.is_mm_encoder_only, scheduler.return_sampling_mask,
        scheduler.num_sampled_tokens_per_step != 1, scheduler.use_pp,
        parallel.decode_context_parallel_size > 1, parallel.prefill_context_parallel_size > 1,
        scheduler.prefix_replay_tokens, scheduler.has_mamba_layers, scheduler.num_prefill_lookahead,
        speculation is not None and speculation.max_num_new_slots_for_drafting,
        # Else what vLLM does for others depends on how many run.
        config.long_prefill_token_threshold, scheduler.kv_cache_manager.watermark_blocks,
        scheduler.max_num_scheduled_tokens > config.max_num_batched_tokens,
    )  # fmt: skip
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    return bool(managers) and not any(unknown) and all(map(_is_known, managers))


def _is_known(manager: Any) -> bool:  # noqa: ANN401 - vLLM's
    """Say whether `quiet_until` knows what this manager of blocks does for a request that decodes."""
    from vllm.v1.core.single_type_kv_cache_manager import (
        ChunkedLocalAttentionManager,
        FullAttentionManager,
        SlidingWindowManager,
    )

    if type(manager) is FullAttentionManager:  # else it would cache the tail of a prompt again and again
        return bool(manager.block_size == manager.block_pool.hash_block_size)
    return type(manager) in (SlidingWindowManager, ChunkedLocalAttentionManager)


def most_tokens(request: Request, longest: int) -> int:
    """Return how many tokens a request may have, if none may have more than `longest`."""
    limit: int = request.num_prompt_tokens + request.max_tokens
    return min(longest, limit)


def is_usual(request: Request) -> bool:
    """Say whether all that a request may need while it decodes is known here."""
    sampling = request.sampling_params
    return (
        sampling is not None
        and sampling.repetition_detection is None
        and request.pooling_params is None
        and request.lora_request is None
        and request.trace_headers is None
        and request.spec_decode_metrics is None
        and not request.use_structured_output
        and not request.resumable
    )


def by_request(logprobs: LogprobsLists, sampled: list[list[int]]) -> list[LogprobsLists]:
    """Return what `slice_request` gives for all tokens of each of a step's requests."""
    ids, values, ranks, starts = logprobs
    kind = type(logprobs)
    if starts is None and max(map(len, sampled)) <= 1 and len(sampled) <= len(ranks):
        parts = zip(ids[:, None], values[:, None], ranks[:, None], repeat(None), strict=False)
        return list(map(tuple.__new__, repeat(kind), parts))
    firsts = starts if starts is not None else range(len(sampled))
    bounds = [(first, first + len(new)) for first, new in zip(firsts, sampled, strict=False)]
    return [tuple.__new__(kind, (ids[a:b], values[a:b], ranks[a:b], None)) for a, b in bounds]


def quiet_until(managers: Sequence[Any], request: Request, lookahead: int) -> int:
    """Return up to how many tokens `allocate_slots` gives and frees nothing, right after it was called."""
    name, bound = request.request_id, sys.maxsize
    processed = max(0, request.num_computed_tokens - request.num_in_flight_tokens)
    for manager in managers:
        bound = min(bound, manager.block_size * len(manager.req_to_blocks.get(name, ())) - lookahead)
        bound = min(bound, _in_window_until(manager, processed, bound))
    return bound


def cached_until(managers: Sequence[Any], request: Request) -> int:
    """Return up to how many tokens `cache_blocks` does nothing for a request."""
    name, bound = request.request_id, sys.maxsize
    for manager in managers:
        if manager.enable_caching:
            bound = min(bound, manager.block_size * (1 + manager.num_cached_block.get(name, 0)) - 1)
    return bound


def _in_window_until(manager: Any, processed: int, most: int) -> int:  # noqa: ANN401 - vLLM's
    """Return how many tokens may be processed, of at most so many, before another block leaves the window."""
    size, low, high = manager.block_size, processed, max(processed, most)
    gone = manager.get_num_skipped_tokens(processed) // size
    if manager.get_num_skipped_tokens(high) // size == gone:
        return high
    while low < high:  # blocks only ever leave
        middle = (low + high + 1) // 2
        if manager.get_num_skipped_tokens(middle) // size > gone:
            high = middle - 1
        else:
            low = middle
    return low
