"""The Triton kernels that vLLM's model runner V2 launches without drafts of its own, for CPUs.

Without Triton vLLM replaces other kernels (`CpuPlatform.register_triton_kernel_overrides`), none of these:
`register` adds them to the same table. Those of each step are compiled (native/bindings/
runner_kernels_module.cpp): in numpy they took a tenth of a step of few requests. The others are numpy.

Invariants (tests/e2e/test_runner_v2.py, under `make kernel-test`: they draw what the kernels of GPUs draw):
- each function writes what the kernel of its name in vllm/v1/worker/gpu writes, for each request of its step;
- a CPU has no graphs and no context parallelism, so that no row is padding: what kernels write to padding is
  left out, but for `seq_lens` and slots behind the last request.
"""

from __future__ import annotations

import ctypes
import functools
from typing import TYPE_CHECKING, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, int32, int64, uint64

from seer._native import runner_kernels

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

Ints = npt.NDArray[np.int32]


@functools.cache
def register() -> None:
    """Have V2 call the functions of this module instead of Triton's kernels, in all engines of this process.

    vLLM looks through all modules for them: for each further engine that was two fifths of its start.
    """
    from vllm.triton_utils import triton
    from vllm.triton_utils.dispatcher import register_kernels
    from vllm.utils.math_utils import next_power_of_2

    triton.next_power_of_2 = next_power_of_2  # vLLM's stand-in for Triton lacks it
    module = "vllm.v1.worker.gpu"
    inputs, head = f"{module}.input_batch", f"{module}.spec_decode.target_dependent_ar.speculator"
    register_kernels(
        {
            f"{module}.buffer_utils._apply_write_kernel": apply_write,
            f"{module}.block_table._gather_block_tables_kernel": gather_block_tables,
            f"{module}.block_table._compute_slot_mappings_kernel": compute_slot_mappings,
            f"{inputs}._prepare_prefill_inputs_kernel": prepare_prefill_inputs,
            f"{inputs}._prepare_pos_seq_lens_kernel": prepare_pos_seq_lens,
            f"{inputs}._combine_sampled_and_draft_tokens_kernel": combine_sampled_and_draft_tokens,
            f"{inputs}._get_num_sampled_and_rejected_kernel": get_num_sampled_and_rejected,
            f"{inputs}._post_update_kernel": post_update,
            f"{inputs}._post_update_num_computed_tokens_kernel": post_update_num_computed_tokens,
            f"{inputs}._expand_idx_mapping_kernel": expand_idx_mapping,
            f"{module}.mm.rope._prepare_rope_positions_kernel": prepare_rope_positions,
            f"{module}.sample.prompt_logprob._prompt_logprobs_token_ids_kernel": prompt_logprobs_token_ids,
            f"{module}.sample.logprob._topk_log_softmax_kernel": topk_log_softmax,
            f"{module}.sample.logprob._ranks_kernel": ranks,
            f"{module}.structured_outputs._apply_grammar_bitmask_kernel": apply_grammar_bitmask,
            f"{head}._prepare_prefill_inputs_kernel": prepare_head,
            f"{head}._prepare_decode_inputs_kernel": prepare_head_decode,
            f"{head}._update_draft_inputs_kernel": update_head_inputs,
        }
    )


def lift_check() -> None:
    """Have vLLM configure V2 without Triton; `register` is to follow in every worker."""
    from vllm.config import vllm

    vllm.HAS_TRITON = True


def _at(tensor: Tensor | None, dtype: torch.dtype) -> int:
    """Return where a tensor's values begin, for compiled code; 0 for none."""
    if tensor is None:
        return 0
    if tensor.dtype is not dtype or not tensor.is_contiguous():
        raise TypeError(f"{tensor.dtype} {tuple(tensor.stride())} where {dtype} without gaps is expected")
    return int(tensor.data_ptr())


def _rows(address: int, rows: int, stride: int) -> Ints:
    """Return the int32 [rows, stride] at an address, which whoever passed the address keeps alive."""
    memory = (ctypes.c_int32 * (rows * stride)).from_address(address)
    table: Ints = np.frombuffer(memoryview(memory).cast("B"), np.int32)
    return table.reshape(rows, stride)


def _spans(query_start_loc: Tensor, requests: int) -> tuple[Ints, Ints]:
    """Return where each request's tokens of this step begin, and how many there are."""
    starts = query_start_loc.numpy()[: requests + 1]
    lengths: Ints = np.diff(starts)
    return starts[:-1], lengths


def apply_write(
    output: Tensor, stride: Tensor | int, indices: Tensor, starts: Tensor, contents: Tensor,
    ends: Tensor, groups: Tensor | None, **_: object,
) -> None:  # fmt: skip
    """Write each run of `contents` to a row of `output`, or to one of the tables that `output` points to."""
    values, begin = contents.numpy(), 0
    for n, (row, start, end) in enumerate(zip(indices.tolist(), starts.tolist(), ends.tolist(), strict=True)):
        if groups is None:
            table = output.numpy().reshape(len(output), -1)
        else:
            group = int(groups[n])
            table = _rows(int(output[group]), row + 1, int(cast("Tensor", stride)[group]))
        table[row, start : start + end - begin] = values[begin:end]
        begin = end


def gather_block_tables(
    idx_mapping: Tensor, sources: Tensor, targets: Tensor, strides: Tensor,
    num_blocks: Tensor, num_blocks_stride: int, num_reqs: int, **_: object,
) -> None:  # fmt: skip
    """Copy the block ids of a step's requests, for each group of KV caches, to the step's own tables."""
    runner_kernels.gather_block_tables(
        num_reqs, _at(idx_mapping, int64), len(sources), _at(sources, uint64), _at(targets, uint64),
        _at(strides, int64), _at(num_blocks, int32), num_blocks_stride,
    )  # fmt: skip


def compute_slot_mappings(
    _tokens: int, idx_mapping: Tensor, query_start_loc: Tensor, pos: Tensor,
    tables: Tensor, strides: Tensor, block_sizes: Tensor, enabled: Tensor,
    _sharded: Tensor, slot_mappings: Tensor, _stride: int, _rank: int, CP_SIZE: int, PAD_ID: int, **_: object,  # noqa: N803 - the kernel's names
) -> None:  # fmt: skip
    """Write where in each group of KV caches the KV of each token of this step lies; `PAD_ID`: nowhere."""
    if CP_SIZE != 1:
        raise NotImplementedError("context parallelism on CPUs")
    runner_kernels.compute_slot_mappings(
        len(idx_mapping), _at(idx_mapping, int64), _at(query_start_loc, int32), _at(pos, int64), len(tables),
        _at(tables, uint64), _at(strides, int64), _at(block_sizes, int32), _at(enabled, torch.bool),
        _at(slot_mappings, int64), slot_mappings.shape[1], PAD_ID,
    )  # fmt: skip


def prepare_prefill_inputs(
    input_ids: Tensor, next_tokens: Tensor, _next_stride: int, _lookahead: int, idx_mapping: Tensor,
    query_start_loc: Tensor, all_token_ids: Tensor, _stride: int, prefill_len: Tensor,
    num_computed: Tensor, **_: object,
) -> None:  # fmt: skip
    """Write the tokens of this step's prefills, and those that come next of each."""
    slots = idx_mapping.numpy()
    done, goals = num_computed.numpy()[slots], prefill_len.numpy()[slots]
    starts, lengths = _spans(query_start_loc, len(slots))
    ids, known, ahead = input_ids.numpy(), all_token_ids.numpy(), next_tokens.numpy()
    for row in np.flatnonzero(done < goals).tolist():
        slot, begin, end = slots[row], done[row], done[row] + lengths[row]
        ids[starts[row] : starts[row] + lengths[row]] = known[slot, begin:end]
        following = known[slot, end : min(end + len(ahead), goals[row])]
        ahead[:, slot] = 0
        ahead[: len(following), slot] = following


def prepare_pos_seq_lens(
    pos: Tensor, seq_lens: Tensor, idx_mapping: Tensor, query_start_loc: Tensor,
    num_computed: Tensor, _most: int, **_: object,
) -> None:  # fmt: skip
    """Write the position of each token of this step, and the length of each request after it."""
    runner_kernels.prepare_pos_seq_lens(
        len(idx_mapping), _at(pos, int64), _at(seq_lens, int32), len(seq_lens), _at(idx_mapping, int64),
        _at(query_start_loc, int32), _at(num_computed, int32),
    )  # fmt: skip


def combine_sampled_and_draft_tokens(
    input_ids: Tensor, idx_mapping: Tensor, last_sampled: Tensor, query_start_loc: Tensor,
    seq_lens: Tensor, prefill_len: Tensor, drafts: Tensor, drafts_stride: int, cu_num_logits: Tensor,
    logits_indices: Tensor, NUM_NEW_SAMPLED_TOKENS: int = 1, **_: object,  # noqa: N803 - the kernel's names
) -> None:  # fmt: skip
    """Write the last token and the drafts of requests that decode, and which tokens have logits."""
    runner_kernels.combine_sampled_and_draft_tokens(
        len(idx_mapping), _at(input_ids, int32), _at(idx_mapping, int64), _at(last_sampled, int64),
        _at(query_start_loc, int32), _at(seq_lens, int32), _at(prefill_len, int32), _at(drafts, int64),
        drafts_stride, _at(cu_num_logits, int32), _at(logits_indices, int64), NUM_NEW_SAMPLED_TOKENS,
    )  # fmt: skip


def get_num_sampled_and_rejected(
    num_sampled: Tensor, num_rejected: Tensor, seq_lens: Tensor, cu_num_logits: Tensor,
    idx_mapping: Tensor, prefill_len: Tensor, **_: object,
) -> None:  # fmt: skip
    """Write how many tokens each request gains and how many of its drafts are lost: 0 in a prefill."""
    runner_kernels.get_num_sampled_and_rejected(
        len(idx_mapping), _at(num_sampled, int32), _at(num_rejected, int32), _at(seq_lens, int32),
        _at(cu_num_logits, int32), _at(idx_mapping, int64), _at(prefill_len, int32),
    )  # fmt: skip


def post_update(
    idx_mapping: Tensor, num_computed: Tensor, last_sampled: Tensor, bin_counts: Tensor | None,
    bin_stride: int, sampled: Tensor, sampled_stride: int, num_sampled: Tensor, num_rejected: Tensor,
    query_start_loc: Tensor | None, all_token_ids: Tensor, ids_stride: int, total_len: Tensor, **_: object,
) -> None:  # fmt: skip
    """Append what was sampled to the requests of a step, and count what is computed."""
    runner_kernels.post_update(
        len(idx_mapping), _at(idx_mapping, int64), _at(num_computed, int32), _at(last_sampled, int64),
        _at(bin_counts, int32), bin_stride, _at(sampled, int64), sampled_stride, _at(num_sampled, int32),
        _at(num_rejected, int32), _at(query_start_loc, int32), _at(all_token_ids, int32), ids_stride,
        _at(total_len, int32),
    )  # fmt: skip


def post_update_num_computed_tokens(
    idx_mapping: Tensor, num_computed: Tensor, query_start_loc: Tensor, **_: object
) -> None:
    """Count what a step computes that samples nothing."""
    num_computed.numpy()[idx_mapping.numpy()] += _spans(query_start_loc, len(idx_mapping))[1]


def expand_idx_mapping(
    idx_mapping: Tensor, slots: Tensor, places: Tensor, cu_num_logits: Tensor, **_: object
) -> None:
    """Write the slot of each row of logits, and the row's place among those of its request."""
    runner_kernels.expand_idx_mapping(
        len(idx_mapping), _at(idx_mapping, int64), _at(slots, int64), _at(places, int32),
        _at(cu_num_logits, int32),
    )  # fmt: skip


def prepare_rope_positions(
    positions: Tensor, _stride: int, prefill_positions: Tensor, _stride0: int, _stride1: int,
    prefill_delta: Tensor, idx_mapping: Tensor, query_start_loc: Tensor, prefill_len: Tensor,
    num_computed: Tensor, NUM_DIMS: int, **_: object,  # noqa: N803 - the kernel's names
) -> None:  # fmt: skip
    """Write the positions of this step's tokens, int64 [NUM_DIMS, tokens], for models with images."""
    slots = idx_mapping.numpy()
    starts, lengths = _spans(query_start_loc, len(slots))
    done, deltas = num_computed.numpy()[slots], prefill_delta.numpy()[slots]
    offsets = np.repeat(done + deltas - starts, lengths)
    out = positions.numpy()
    out[:, : len(offsets)] = offsets + np.arange(len(offsets))
    for row in np.flatnonzero(done < prefill_len.numpy()[slots]).tolist():
        base, begin, end = NUM_DIMS * slots[row], done[row], done[row] + lengths[row]
        known = prefill_positions.numpy()[base : base + NUM_DIMS, begin:end]
        out[:, starts[row] : starts[row] + lengths[row]] = known


def prompt_logprobs_token_ids(
    next_tokens: Tensor, query_start_loc: Tensor, idx_mapping: Tensor, num_computed: Tensor,
    all_token_ids: Tensor, _stride: int, **_: object,
) -> None:  # fmt: skip
    """Write the token that follows on each token of this step; 0 behind the last that is known."""
    out, known, slots = next_tokens.numpy(), all_token_ids.numpy(), idx_mapping.numpy()
    starts, lengths = _spans(query_start_loc, len(slots))
    out[:] = 0
    for slot, start, length in zip(slots, starts, lengths, strict=True):
        first = int(num_computed[slot]) + 1
        following = known[slot, first : first + length]
        out[start : start + len(following)] = following


def topk_log_softmax(
    out: Tensor,
    logits: Tensor,
    _stride: int,
    ids: Tensor,
    _ids_stride: int,
    _top: int,
    _vocab: int,
    **_: object,
) -> None:
    """Write the logprobs of these tokens of each row."""
    out.copy_(logits.float().log_softmax(dim=-1).gather(1, ids))


def ranks(out: Tensor, logits: Tensor, _stride: int, ids: Tensor, _vocab: int, **_: object) -> None:
    """Write how many tokens are at least as likely as that one of each row."""
    out.copy_((logits >= logits.gather(1, ids.long()[:, None])).sum(dim=-1))


def apply_grammar_bitmask(
    logits: Tensor, _stride: int, places: Tensor, starts: Tensor, masks: Tensor, _words: int, vocab: int,
    MASK_STRIDE: int, **_: object,  # noqa: N803 - the kernel's names
) -> None:  # fmt: skip
    """Take from each row of logits at `places` the tokens that its mask lacks, a bit each."""
    bits = np.unpackbits(masks.numpy().view(np.uint8), axis=1, bitorder="little")[:, :vocab]
    bounds = starts.tolist()
    for place, allowed in zip(places.tolist(), torch.from_numpy(bits) != 0, strict=True):
        request, position = divmod(place, MASK_STRIDE)
        if bounds[request] + position < bounds[request + 1]:
            logits[bounds[request] + position].masked_fill_(~allowed, -torch.inf)


def prepare_head(
    last_indices: Tensor, depth: Tensor, ids: Tensor, positions: Tensor, query_start_loc: Tensor,
    seq_lens: Tensor, target_ids: Tensor, target_positions: Tensor, idx_mapping: Tensor, last_sampled: Tensor,
    next_prefill: Tensor, num_sampled: Tensor, num_rejected: Tensor, target_starts: Tensor,
    target_lens: Tensor, *_: object, **__: object,
) -> None:  # fmt: skip
    """Give a draft head the step's tokens, each in its predecessor's place, and what follows on the last."""
    n, end = len(idx_mapping), int(target_starts[len(idx_mapping)])
    starts, ends = target_starts[:n], target_starts[1 : n + 1]
    last = (ends - num_rejected[:n] - 1).long()
    kept = torch.arange(end) <= last.repeat_interleave(ends - starts)
    following, moved = last_sampled.view(-1)[idx_mapping], kept[1:] & kept[:-1]
    following = torch.where(num_sampled[:n] > 0, following, next_prefill.view(-1)[idx_mapping])
    ids[: end - 1] = torch.where(moved, target_ids[1:end], ids[: end - 1])
    ids[last] = following.to(ids.dtype)
    positions[:end] = torch.where(kept, target_positions[:end], positions[:end])
    query_start_loc[:n], query_start_loc[n:] = starts, end
    seq_lens[:n], seq_lens[n:] = target_lens[:n], 0
    last_indices[:n], last_indices[n:] = last, 0
    depth.zero_()


def prepare_head_decode(
    drafts: Tensor, _stride: int, target_lens: Tensor, num_rejected: Tensor, ids: Tensor, positions: Tensor,
    keys: Tensor, query_start_loc: Tensor, seq_lens: Tensor, most: int, rows: int,
    ADVANCE_DRAFT_POSITIONS: bool, **_: object,  # noqa: N803 - the kernel's names
) -> None:  # fmt: skip
    """Give a draft head its first draft of each request, one position further."""
    n, further = len(drafts), int(ADVANCE_DRAFT_POSITIONS)
    torch.clamp(torch.arange(rows + 1, dtype=torch.int32), max=n, out=query_start_loc[: rows + 1])
    seq_lens[:n], seq_lens[n:] = target_lens[:n] - num_rejected[:n], 0
    ids[:n] = drafts.to(ids.dtype)
    keys[:n] += 1
    positions[:n].add_(further).clamp_(max=most - 1)
    seq_lens[:n].add_(further).clamp_(max=most)


def update_head_inputs(
    out: Tensor, _stride: int, following: Tensor, _following_stride: int, ids: Tensor, positions: Tensor,
    keys: Tensor, seq_lens: Tensor, drafts: Tensor, depth: Tensor, hidden: Tensor, _hidden_stride: int,
    _size: int, most: int, steps: int, ADVANCE_DRAFT_POSITIONS: bool, **_: object,  # noqa: N803
) -> None:  # fmt: skip
    """Keep a draft head's drafts of this depth, and give them to it with what it made of the last ones."""
    n, further = len(drafts), int(ADVANCE_DRAFT_POSITIONS)
    out[:n, int(depth)] = drafts
    if int(depth) >= steps - 1:
        return
    ids[:n], following[:n] = drafts.to(ids.dtype), hidden[:n]
    keys[:n] += 1
    positions[:n].add_(further).clamp_(max=most - 1)
    seq_lens[:n].add_(further).clamp_(max=most)


class FreshBlocks:
    """Stands for vLLM's `KVBlockZeroer`, which has a kernel of Triton: zeroes KV blocks as requests get them.

    vLLM's attention on CPUs reads a block to its end and gives what lies behind the context a weight of
    zero: zero times NaN is NaN. So what a request left that had no numbers, as by weights that overflow,
    would fail the next ones that get its memory, also under good weights. Triton's attention on GPUs loads
    zeros there instead.
    """

    def __init__(self, runner: GPUModelRunner) -> None:
        self._runner = runner

    def zero_block_ids(self, block_ids: list[int]) -> None:
        """Zero these blocks in all layers."""
        for tensor in self._runner.kv_caches:
            for block in block_ids:  # one by one: an index of several takes twice as long
                tensor[block].zero_()
