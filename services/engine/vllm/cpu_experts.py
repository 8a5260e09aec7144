"""Experts divided among ranks on CPUs, where vLLM 0.32 crashes with them.

`CPUUnquantizedExperts.apply` (fused_moe/experts/cpu_moe.py) gets each expert's place on this rank, and does
not look at it: its kernel takes experts' numbers in the model for places. The rank has fewer places than
that, so the kernel counts tokens, and reads weights, outside of their memory.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


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
