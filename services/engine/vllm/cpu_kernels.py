"""The Triton kernels that vLLM's model runner V2 launches without drafts of its own, in numpy, for CPUs.

Without Triton vLLM replaces other kernels (`CpuPlatform.register_triton_kernel_overrides`), none of these:
`register` adds them to the same table.

Invariants (tests/e2e/test_runner_v2.py, under `make kernel-test`: they draw what the kernels of GPUs draw):
- each function writes what the kernel of its name in vllm/v1/worker/gpu writes, for each request of its step;
- a CPU has no graphs and no context parallelism, so that no row is padding: what kernels write to padding is
  left out, but for `seq_lens` and slots behind the last request.
"""

from __future__ import annotations

import ctypes
from typing import cast

import numpy as np
import numpy.typing as npt
from torch import Tensor

Ints = npt.NDArray[np.int32]


def register() -> None:
    """Have V2 call the functions of this module instead of Triton's kernels; once in a process."""
    from vllm.triton_utils import triton
    from vllm.triton_utils.dispatcher import register_kernels
    from vllm.utils.math_utils import next_power_of_2

    triton.next_power_of_2 = next_power_of_2  # vLLM's stand-in for Triton lacks it
    module = "vllm.v1.worker.gpu"
    inputs = f"{module}.input_batch"
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
        }
    )


def lift_check() -> None:
    """Have vLLM configure V2 without Triton; `register` is to follow in every worker."""
    from vllm.config import vllm

    vllm.HAS_TRITON = True


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
    num_blocks: Tensor, _stride: int, num_reqs: int, **_: object,
) -> None:  # fmt: skip
    """Copy the block ids of a step's requests, for each group of KV caches, to the step's own tables."""
    slots = idx_mapping.numpy()[:num_reqs]
    if not num_reqs:
        return
    for group, stride in enumerate(strides.tolist()):
        most = int(num_blocks[group].numpy()[slots].max())
        source = _rows(int(sources[group]), num_blocks.shape[1], stride)
        _rows(int(targets[group]), num_reqs, stride)[:, :most] = source[slots, :most]


def compute_slot_mappings(
    _tokens: int, idx_mapping: Tensor, query_start_loc: Tensor, pos: Tensor,
    tables: Tensor, strides: Tensor, block_sizes: Tensor, enabled: Tensor,
    _sharded: Tensor, slot_mappings: Tensor, _stride: int, _rank: int, CP_SIZE: int, PAD_ID: int, **_: object,  # noqa: N803 - the kernel's names
) -> None:  # fmt: skip
    """Write where in each group of KV caches the KV of each token of this step lies; `PAD_ID`: nowhere."""
    if CP_SIZE != 1:
        raise NotImplementedError("context parallelism on CPUs")
    slots = idx_mapping.numpy()
    lengths = _spans(query_start_loc, len(slots))[1]
    owners = np.repeat(slots, lengths)
    positions = pos.numpy()[: len(owners)]
    mappings = slot_mappings.numpy()
    for group, (stride, size, is_on) in enumerate(
        zip(strides.tolist(), block_sizes.tolist(), enabled.tolist(), strict=True)
    ):
        mapping = mappings[group]
        mapping[len(owners) :] = PAD_ID
        if not is_on:
            mapping[: len(owners)] = PAD_ID
        elif len(owners):
            table = _rows(int(tables[group]), int(slots.max(initial=0)) + 1, stride)
            blocks = table[owners, positions // size].astype(np.int64)
            mapping[: len(owners)] = np.where(owners < 0, PAD_ID, blocks * size + positions % size)


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
    slots = idx_mapping.numpy()
    starts, lengths = _spans(query_start_loc, len(slots))
    done, lens = num_computed.numpy()[slots], seq_lens.numpy()
    lens[: len(slots)] = done + lengths
    lens[len(slots) :] = 0
    offsets = np.repeat(done - starts, lengths)
    pos.numpy()[: len(offsets)] = offsets + np.arange(len(offsets))


def combine_sampled_and_draft_tokens(
    input_ids: Tensor, idx_mapping: Tensor, last_sampled: Tensor, query_start_loc: Tensor,
    seq_lens: Tensor, prefill_len: Tensor, drafts: Tensor, _stride: int, cu_num_logits: Tensor,
    logits_indices: Tensor, NUM_NEW_SAMPLED_TOKENS: int = 1, **_: object,  # noqa: N803 - the kernel's names
) -> None:  # fmt: skip
    """Write the last token and the drafts of requests that decode, and which tokens have logits."""
    slots = idx_mapping.numpy()
    starts, lengths = _spans(query_start_loc, len(slots))
    logits_ends = cu_num_logits.numpy()[: len(slots) + 1]
    counts, ends = np.diff(logits_ends), starts + lengths
    logits_indices.numpy()[:] = np.repeat(ends - logits_ends[1:], counts) + np.arange(len(logits_indices))
    lens, goals = seq_lens.numpy()[: len(slots)], prefill_len.numpy()[slots]
    ids = input_ids.numpy()
    draws = (lens > goals) & (lens - counts >= goals) & (NUM_NEW_SAMPLED_TOKENS > 0)
    ids[(ends - counts)[draws]] = last_sampled.numpy()[slots[draws]].reshape(-1)
    drafted = np.where(lens > goals, counts - NUM_NEW_SAMPLED_TOKENS, 0)
    if drafted.any():
        places = np.arange(drafted.sum()) - np.repeat(np.cumsum(drafted) - drafted, drafted)
        tokens = drafts.numpy()[np.repeat(slots, drafted), places]
        ids[np.repeat(ends - drafted, drafted) + places] = tokens


def get_num_sampled_and_rejected(
    num_sampled: Tensor, num_rejected: Tensor, seq_lens: Tensor, cu_num_logits: Tensor,
    idx_mapping: Tensor, prefill_len: Tensor, **_: object,
) -> None:  # fmt: skip
    """Write how many tokens each request gains and how many of its drafts are lost: 0 in a prefill."""
    slots = idx_mapping.numpy()
    ended = seq_lens.numpy()[: len(slots)] >= prefill_len.numpy()[slots]
    sampled = num_sampled.numpy()[: len(slots)]
    sampled *= ended
    counts = np.diff(cu_num_logits.numpy()[: len(slots) + 1])
    num_rejected.numpy()[: len(slots)] = (counts - sampled) * ended


def post_update(
    idx_mapping: Tensor, num_computed: Tensor, last_sampled: Tensor, bin_counts: Tensor | None,
    _bin_stride: int, sampled: Tensor, _sampled_stride: int, num_sampled: Tensor, num_rejected: Tensor,
    query_start_loc: Tensor | None, all_token_ids: Tensor, _stride: int, total_len: Tensor, **_: object,
) -> None:  # fmt: skip
    """Append what was sampled to the requests of a step, and count what is computed."""
    slots = idx_mapping.numpy()
    real = slots >= 0
    slots, tokens = slots[real], sampled.numpy()[real]
    counts, totals = num_sampled.numpy()[: len(real)][real], total_len.numpy()
    for place in range(int(counts.max(initial=0))):
        more = counts > place
        owners, ids = slots[more], tokens[more, place]
        all_token_ids.numpy()[owners, totals[owners] + place] = ids
        last_sampled.numpy().reshape(len(last_sampled), -1)[owners, 0] = ids
        if bin_counts is not None:
            bin_counts.numpy()[owners, ids] += 1
    totals[slots] += counts
    computed = -num_rejected.numpy()[: len(real)]
    if query_start_loc is not None:
        computed = computed + _spans(query_start_loc, len(real))[1]
    num_computed.numpy()[slots] += computed[real]


def post_update_num_computed_tokens(
    idx_mapping: Tensor, num_computed: Tensor, query_start_loc: Tensor, **_: object
) -> None:
    """Count what a step computes that samples nothing."""
    num_computed.numpy()[idx_mapping.numpy()] += _spans(query_start_loc, len(idx_mapping))[1]


def expand_idx_mapping(
    idx_mapping: Tensor,
    slots: Tensor,
    places: Tensor,
    cu_num_logits: Tensor,
    **_: object,
) -> None:
    """Write the slot of each row of logits, and the row's place among those of its request."""
    ends = cu_num_logits.numpy()[: len(idx_mapping) + 1]
    counts = np.diff(ends)
    slots.numpy()[: ends[-1]] = np.repeat(idx_mapping.numpy(), counts)
    places.numpy()[: ends[-1]] = np.arange(ends[-1]) - np.repeat(ends[:-1], counts)


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
