"""Zeroes KV blocks as requests get them, on CPUs.

vLLM's attention on CPUs reads a block to its end and gives what lies behind the context a weight of
zero: zero times NaN is NaN. So what a request left that had no numbers, as by weights that overflow,
would fail the next ones that get its memory, also under good weights. Triton's attention on GPUs loads
zeros there instead.

vLLM has blocks zeroed for models with states, but by a kernel of Triton.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner


class FreshBlocks:
    """Stands for vLLM's `KVBlockZeroer`."""

    def __init__(self, runner: GPUModelRunner) -> None:
        self._runner = runner

    def zero_block_ids(self, block_ids: list[int]) -> None:
        """Zero these blocks in all layers."""
        for tensor in self._runner.kv_caches:
            for block in block_ids:  # one by one: an index of several takes twice as long
                tensor[block].zero_()
