"""What a step with several draft paths does on GPUs: five launches, none of which the host waits for.

Invariant (tests/unit/test_paths_triton.py asserts it): all memory is as `PathOps` leaves it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton

from seer.services.engine.vllm.drafts.path_kernels import (
    attend_kernel,
    begin_kernel,
    choose_kernel,
    copy_kernel,
)
from seer.services.engine.vllm.drafts.path_ops import Blocks, Inputs, Kept, PathOps, Rows
from seer.services.engine.vllm.sampling.triton_launch import launch


class TritonPathOps(PathOps):
    """See `PathOps`."""

    def __init__(self, caches: Sequence[torch.Tensor], count: int, size: int) -> None:
        super().__init__(caches, count, size)
        self._layers: torch.Tensor | None = None  # None: blocks have gaps, which the kernel knows nothing of
        if all(map(_is_dense, self._caches)):
            layers = [(*_words(cache), len(cache) // count) for cache in self._caches]
            self._layers = torch.tensor(layers, dtype=torch.int64, device=caches[0].device)

    def begin(self, rows: Rows, inputs: Inputs, lengths: torch.Tensor, contexts: torch.Tensor) -> None:
        """See `PathOps`."""
        arguments = (
            rows.owners, rows.paths, rows.shorter, rows.shifts, rows.starts, rows.bounds, inputs.positions,
            inputs.places, inputs.token_ids, lengths, contexts,
        )  # fmt: skip
        launch(begin_kernel, len(rows.owners), arguments, triton.next_power_of_2(rows.longest))

    def attend(
        self,
        rows: Rows,
        positions: torch.Tensor,
        table: torch.Tensor,
        slots: torch.Tensor,
        scratch: torch.Tensor,
    ) -> Blocks:
        """See `PathOps`."""
        further, width = scratch.shape
        begins = torch.empty(further, dtype=torch.int64, device=scratch.device)
        own = torch.empty_like(scratch)
        arguments = (
            rows.further, rows.bounds, positions, table, slots, scratch, begins, own, table.stride(0),
            table.shape[1], width, self._size,
        )  # fmt: skip
        launch(attend_kernel, further, arguments, triton.next_power_of_2(max(rows.longest, width)))
        return Blocks(begins, own, scratch)

    def copy_before(self, rows: Rows, blocks: Blocks) -> None:
        """See `PathOps`."""
        if self._layers is None:
            partly = blocks.begins % self._size > 0
            self._copy_wanted(blocks.own[:, :1], blocks.scratch[:, :1], partly[:, None])
        else:
            self._copy_blocks(self._layers, rows, blocks, rows.firsts, rows.firsts, 0)

    def choose(
        self, rows: Rows, sampled: torch.Tensor, logprobs: torch.Tensor, gained: torch.Tensor
    ) -> tuple[torch.Tensor, Kept]:
        """See `PathOps`."""
        requests, width = len(rows.firsts), sampled.shape[1]
        winners = torch.empty_like(rows.firsts)
        tokens, values = sampled.new_empty(requests, width), logprobs.new_empty(requests, width)
        counts = gained.new_empty(requests)
        arguments = (
            rows.firsts, rows.choices, sampled, logprobs, gained, winners, tokens, values, counts,
            self.decided, width,
        )  # fmt: skip
        launch(choose_kernel, requests, arguments, triton.next_power_of_2(width))
        return winners, (tokens, values, counts)

    def copy_after(self, rows: Rows, blocks: Blocks, winners: torch.Tensor, gained: torch.Tensor) -> None:
        """See `PathOps`."""
        if self._layers is None:
            self._copy_wanted(blocks.scratch, blocks.own, self._moved(rows, blocks, winners, gained))
        else:
            self._copy_blocks(self._layers, rows, blocks, winners, gained, 1)

    def _copy_wanted(self, source: torch.Tensor, target: torch.Tensor, wanted: torch.Tensor) -> None:
        """Copy blocks that the device alone knows to be wanted; others are copied to where they are."""
        self._copy(source.reshape(-1).long(), torch.where(wanted, target, source).reshape(-1).long())

    def _copy_blocks(
        self,
        layers: torch.Tensor,
        rows: Rows,
        blocks: Blocks,
        winners: torch.Tensor,
        gained: torch.Tensor,
        after: int,
    ) -> None:
        further, width = blocks.scratch.shape
        pairs = further * width if after else further
        arguments = (
            layers, rows.owners, rows.paths, rows.further, blocks.begins, winners, gained, blocks.own,
            blocks.scratch, width, pairs, self._size,
        )  # fmt: skip
        launch(copy_kernel, len(layers) * pairs, arguments, after)


def _is_dense(cache: torch.Tensor) -> bool:
    """Return whether a block's memory, in whatever order, is one piece of whole words, and nothing else's."""
    block, numbers = cache[0], (cache.data_ptr(), cache.stride(0) * cache.element_size(), cache[0].nbytes)
    span = 1 + sum((length - 1) * stride for length, stride in zip(block.shape, block.stride(), strict=True))
    return span == block.numel() and not any(number % 4 for number in numbers)


def _words(cache: torch.Tensor) -> tuple[int, int, int]:
    """Return where a layer's memory is, and in words of four bytes how far apart blocks are, and how long."""
    return cache.data_ptr(), cache.stride(0) * cache.element_size() // 4, cache[0].nbytes // 4
