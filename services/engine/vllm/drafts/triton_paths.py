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
        layers = []
        for cache in self._caches:
            stride, block = cache.stride(0) * cache.element_size(), cache[0].nbytes
            if not cache[0].is_contiguous() or stride % 4 or block % 4:
                raise RuntimeError(
                    f"KV of shape {tuple(cache.shape)}, strides {cache.stride()}: blocks have gaps"
                )
            layers.append([cache.data_ptr(), stride // 4, block // 4, len(cache) // count])
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
        self._copy_blocks(rows, blocks, rows.firsts, rows.firsts, 0)

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
        self._copy_blocks(rows, blocks, winners, gained, 1)

    def _copy_blocks(
        self, rows: Rows, blocks: Blocks, winners: torch.Tensor, gained: torch.Tensor, after: int
    ) -> None:
        further, width = blocks.scratch.shape
        pairs = further * width if after else further
        arguments = (
            self._layers, rows.owners, rows.paths, rows.further, blocks.begins, winners, gained, blocks.own,
            blocks.scratch, width, pairs, self._size,
        )  # fmt: skip
        launch(copy_kernel, len(self._layers) * pairs, arguments, after)
