"""CUDA graphs for every decode step of model runner V2, whatever number of drafts its requests have.

vLLM captures them for one number of drafts, or for any with its adaptive verification, which excludes other
things. `install` has V2's own manager capture them without it.

Invariants (tests/unit/test_decode_graphs.py asserts them):
- where attention takes requests of different lengths in one graph, every decode step of up to `MOST_TOKENS`
  tokens has a full one; elsewhere those steps in which all requests have as many tokens, one of `lengths`;
- a step is padded by less than an eighth, or by fewer than 8 tokens; where lengths are alike, by at most a
  quarter of its requests, or by one. Sizes are 64 at most;
- attention is told of the longest query of a graph's capture, never of a step's own: for 1 token a request
  FlashAttention 3 lays out its schedule in another way, which a graph for more would read wrongly;
- the sums of split attention take no more memory than in the largest graph that vLLM has by default.
"""

from __future__ import annotations

import time
from itertools import chain
from typing import TYPE_CHECKING, Any

import msgspec

from seer.common.policy.graph_times import Axis, Graphs
from seer.common.process.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm.v1.worker.gpu.cudagraph_utils import ModelCudaGraphManager

MOST_TOKENS = 4096
"""Tokens of the largest graph: the GPU is longer busy with more than the host is with launching them."""

VLLM_TOKENS = 512
"""Tokens of the largest graph that vLLM has by default."""

_FEW = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 40, 48, 56, 64)
"""Sizes so small that padding costs nothing: a step reads all weights."""

_FEW_ROWS = (1, 2, 3, 4, 5, 6, 7, 8)

_log = get_logger()


class DecodeGraphs(msgspec.Struct, frozen=True, kw_only=True):
    """The graphs of a model runner: full graphs of decode steps, piecewise graphs of all other steps.

    `full` and `piecewise` are numbers of tokens, rising. The `count` full graphs serve steps in which all
    requests have as many tokens, one of `lengths`; without these, any mix of 1 to `longest` tokens a request;
    with `prefills`, every step.
    """

    full: Axis = ()
    piecewise: Axis = ()
    lengths: Axis = ()
    longest: int = 1
    prefills: bool = False
    count: int = 0

    def drafts(self) -> Axis:
        """Return how many drafts all requests of a step may have for it to have a full graph."""
        return tuple(each - 1 for each in self.lengths or range(1, self.longest + 1)) if self.full else ()

    def for_profile(self) -> Graphs:
        """Return the graphs as the profile of step times takes them."""
        if not self.lengths:
            return Graphs(mixed=self.full or self.piecewise)
        return Graphs(
            mixed=self.piecewise, full=tuple(size for size in self.full if size % self.lengths[-1] == 0)
        )

    def __str__(self) -> str:
        rest = f"piecewise up to {self.piecewise[-1]} tokens" if self.piecewise else ""
        if not self.full:
            return rest or "none"
        if self.prefills:
            steps = "any step"
        elif self.lengths:
            steps = f"{', '.join(map(str, self.lengths))} tokens for each request alike"
        else:
            steps = f"any mix of 1 to {self.longest} tokens a request"
        return f"full for {steps} up to {self.full[-1]} tokens ({self.count})" + (rest and f", else {rest}")


def capture_sizes(max_num_seqs: int, max_draft: int, max_num_batched_tokens: int | None) -> list[int]:
    """Return the tokens of graphs for steps of so many requests, each with at most so many drafts.

    Full batches without drafts, and with all, have graphs of their own.
    """
    room = min(MOST_TOKENS, max_num_batched_tokens or MOST_TOKENS)
    decodes = min(max_num_seqs * (1 + max_draft), room)
    largest = max(decodes, min(2 * decodes, VLLM_TOKENS, room))  # prefills may be with them
    return sorted({*_grid(_FEW, 8, largest), decodes, min(max_num_seqs, decodes)})


def lengths(max_draft: int) -> Axis:
    """Return the tokens a request of graphs for equal ones: for no drafts, each power of 2, and all."""
    powers = {2**power for power in range(max_draft.bit_length())}
    return tuple(1 + drafts for drafts in sorted({0, max_draft} | powers))


def row_counts(max_num_seqs: int) -> list[int]:
    """Return the numbers of requests of graphs for equal ones; none for no requests."""
    return sorted({*_grid(_FEW_ROWS, 4, max_num_seqs), max_num_seqs} - {0})


def _grid(few: Axis, parts: int, largest: int) -> list[int]:
    """Return `few`, and so many sizes for each doubling beyond; none above `largest`."""
    sizes, low = list(few), few[-1]
    while low < largest:
        sizes += range(low + low // parts, 2 * low + 1, low // parts)
        low *= 2
    return [size for size in sizes if size <= largest]


def install(runner: Any) -> None:  # noqa: ANN401 - V2's runner
    """Have a V2 runner capture graphs of all its decode steps, and log which; before memory is profiled."""
    initialize, capture = runner.initialize_kv_cache, runner.capture_model

    def initialize_kv_cache(*args: object, **kwargs: object) -> None:
        initialize(*args, **kwargs)
        spread(runner.cudagraph_manager, takes_mixed_lengths(runner))

    def capture_model(*, profile_only: bool = False) -> int:
        begun = time.monotonic()
        size: int = capture(profile_only=profile_only)
        if not profile_only:
            graphs, seconds = captured(runner.cudagraph_manager), round(time.monotonic() - begun, 1)
            _log.info("captured CUDA graphs", graphs=str(graphs), seconds=seconds, mib=size >> 20)
        return size

    runner.initialize_kv_cache, runner.capture_model = initialize_kv_cache, capture_model
    hold_metadata(runner)


def takes_mixed_lengths(runner: Any) -> bool:  # noqa: ANN401 - V2's runner
    """Return whether full graphs of all attention layers serve requests of different lengths."""
    from vllm.v1.attention.backend import AttentionCGSupport
    from vllm.v1.worker.gpu.attn_utils import get_varlen_cudagraph_unsupported_backend

    lacks = get_varlen_cudagraph_unsupported_backend(
        runner.attn_groups, runner.vllm_config, runner.cudagraph_manager.decode_query_len
    )
    others, _ = runner.model_state.get_additional_cg_support()
    return lacks is None and bool(others == AttentionCGSupport.ALWAYS)


def spread(manager: ModelCudaGraphManager, mixed_lengths: bool) -> None:
    """Have a manager that has captured nothing yet serve decodes of all lengths, if its mode allows it."""
    from vllm.config import CUDAGraphMode

    mode = manager.cudagraph_mode
    decodes_alone = mode.separate_routine() and mode.decode_mode() == CUDAGraphMode.FULL
    if not decodes_alone or not manager.needs_capture() or manager.decode_query_len == 1:
        return
    if not mixed_lengths:
        _spread_lengths(manager)
        return
    manager.varlen_decode = True
    manager._capture_descs.clear()
    manager._candidates.clear()
    manager._init_candidates()


def _spread_lengths(manager: ModelCudaGraphManager) -> None:
    """Put graphs of all `lengths` in the place of those of the longest.

    vLLM's own table offers a step the graphs of the next larger size alone, be they of another length.
    """
    from vllm.config import CUDAGraphMode
    from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

    full, largest = CUDAGraphMode.FULL, manager.compilation_config.max_cudagraph_capture_size
    tiers = [
        [
            BatchExecutionDescriptor(
                cg_mode=full, num_tokens=rows * each, num_reqs=rows, uniform_token_count=each
            )
            for rows in row_counts(min(manager.max_num_reqs, largest // each))
        ]
        for each in lengths(manager.decode_query_len - 1)
    ]
    manager._capture_descs[full] = sorted(chain(*tiers), key=lambda desc: desc.num_tokens, reverse=True)
    for key, found in manager._candidates.items():
        manager._candidates[key] = [desc for desc in found if desc.cg_mode != full]
    for tier in tiers:
        first = 1
        for desc in tier:
            for tokens in range(first, desc.num_tokens + 1):
                manager._candidates.setdefault((tokens, 0), []).insert(0, desc)
            first = desc.num_tokens + 1


def hold_metadata(runner: Any) -> None:  # noqa: ANN401 - V2's runner
    """Have attention's metadata fit the graph that a step replays, of which `prepare_attn` knows nothing."""
    from vllm.config import CUDAGraphMode

    prepare = runner.model_state.prepare_attn
    splits = runner.vllm_config.attention_config.flash_attn_max_num_splits_for_cuda_graph

    def prepare_attn(
        batch: Any,  # noqa: ANN401 - V2's InputBatch
        mode: object,
        tables: object,
        slots: object,
        groups: Iterable[Iterable[Any]],
        *args: object,
        **kwargs: object,
    ) -> object:
        if mode == CUDAGraphMode.FULL:
            _promise_longest(batch, runner.cudagraph_manager)
        _bound_splits(groups, splits, batch.num_tokens_after_padding)
        return prepare(batch, mode, tables, slots, groups, *args, **kwargs)

    runner.model_state.prepare_attn = prepare_attn


def _promise_longest(batch: Any, manager: ModelCudaGraphManager) -> None:  # noqa: ANN401 - V2's InputBatch
    """Give a step the longest query that its full graph was captured with; graphs of `lengths` have one."""
    from vllm.config import CUDAGraphMode

    if manager.varlen_decode:
        batch.max_query_len = manager.decode_query_len
    elif manager.cudagraph_mode.mixed_mode() == CUDAGraphMode.FULL:
        batch.max_query_len = batch.num_tokens_after_padding


def _bound_splits(groups: Iterable[Iterable[Any]], most: int, tokens: int) -> None:
    """Have attention split less the more tokens there are: each split has a sum for each token."""
    for group in chain(*groups):
        builder = group.get_metadata_builder(0)
        if getattr(builder, "max_num_splits", 0):  # others choose by themselves, or do not split
            builder.max_num_splits = max(1, min(most, most * VLLM_TOKENS // tokens))


def captured(manager: ModelCudaGraphManager | None) -> DecodeGraphs:
    """Return which graphs a manager captures, or has."""
    from vllm.config import CUDAGraphMode

    if manager is None:
        return DecodeGraphs()
    full = manager._capture_descs.get(CUDAGraphMode.FULL, [])
    piecewise = manager._capture_descs.get(CUDAGraphMode.PIECEWISE, [])
    return DecodeGraphs(
        full=_rising(desc.num_tokens for desc in full),
        piecewise=_rising(desc.num_tokens for desc in piecewise),
        lengths=_rising(desc.uniform_token_count for desc in full if desc.uniform_token_count),
        longest=manager.decode_query_len,
        prefills=manager.cudagraph_mode.mixed_mode() == CUDAGraphMode.FULL,
        count=len(full),
    )


def _rising(numbers: Iterable[int]) -> Axis:
    return tuple(sorted(set(numbers)))
