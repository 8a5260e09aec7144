"""Experts divided among ranks on CPUs: what vLLM 0.32 lacks there.

`CPUUnquantizedExperts.apply` (fused_moe/experts/cpu_moe.py) gets each expert's place on this rank, and does
not look at it: its kernel takes experts' numbers in the model for places. The rank has fewer places than
that, so the kernel counts tokens, and reads weights, outside of their memory.

Data-parallel ranks give each other their tokens by `all_gatherv` and `reduce_scatterv`, which
`CpuCommunicator` (distributed/device_communicators/cpu_communicator.py) does not have.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator


def divide_experts() -> None:
    """Have a rank give what its own experts add to each token; the ranks' sum is the layer's output."""
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    undivided = CPUUnquantizedExperts.apply
    if hasattr(undivided, "__wrapped__"):
        return

    @functools.wraps(undivided)
    def own(
        self: CPUUnquantizedExperts, *, topk_ids: torch.Tensor, topk_weights: torch.Tensor,
        expert_map: torch.Tensor | None, output: torch.Tensor, **given: object,
    ) -> None:  # fmt: skip
        places = topk_ids if expert_map is None else expert_map[topk_ids.long()].to(topk_ids.dtype)
        elsewhere = places < 0
        undivided(
            self, output=output, topk_ids=places.clamp(min=0), expert_map=expert_map,
            topk_weights=topk_weights.masked_fill(elsewhere, 0.0), **given,
        )  # fmt: skip
        if given["apply_router_weight_on_input"]:  # then each token has one expert, and the kernel no weight
            output.masked_fill_(elsewhere, 0.0)

    CPUUnquantizedExperts.apply = own


def exchange_tokens() -> None:
    """Have data-parallel ranks, which have unequal numbers of tokens, exchange them."""
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    CpuCommunicator.all_gatherv = _all_gatherv
    CpuCommunicator.reduce_scatterv = _reduce_scatterv


def _all_gatherv(
    self: CpuCommunicator,
    input_: torch.Tensor | list[torch.Tensor],
    dim: int = 0,
    sizes: list[int] | None = None,
) -> torch.Tensor | list[torch.Tensor]:
    """Return the rows of all ranks, in the order of ranks, of which each has as many as `sizes` says."""
    import torch

    if isinstance(input_, list):
        return [_all_gatherv(self, each, dim, sizes) for each in input_]
    if dim or sizes is None:
        raise NotImplementedError("only rows are gathered, whose numbers are known")
    rows = input_.new_zeros((max(sizes), *input_.shape[1:]))  # Gloo takes equal shapes alone
    rows[: len(input_)] = input_
    found = [torch.empty_like(rows) for _ in sizes]
    torch.distributed.all_gather(found, rows, group=self.device_group)
    return torch.cat([each[:size] for each, size in zip(found, sizes, strict=True)])


def _reduce_scatterv(
    self: CpuCommunicator, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None
) -> torch.Tensor:
    """Return this rank's rows of the sum over all ranks."""
    import torch

    if dim or sizes is None:
        raise NotImplementedError("only rows are scattered, whose numbers are known")
    whole = input_.contiguous()
    torch.distributed.all_reduce(whole, group=self.device_group)
    first = sum(sizes[: self.rank_in_group])
    return whole[first : first + sizes[self.rank_in_group]].clone()
