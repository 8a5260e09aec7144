"""New weights for a running model: patches of two functions of vLLM 0.32.

- On CPUs vLLM packs experts for the processor's instructions at the first load alone (`_setup_kernel` in
  fused_moe/unquantized_fused_moe_method.py); its kernels then read plain weights as packed ones. vllm#42821
  tells the same of other kernels.
- Where a model's loader copies into parameters by itself, as gpt-oss's does experts and sinks, layers keep
  their old weights, with a line in the log (`finalize_layerwise_processing` in
  model_loader/reload/layerwise.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from seer.common.errors import EngineError


def reloading(load: Callable[..., None], **given: object) -> None:
    """Load weights by `load`. Raises `EngineError` if a layer got none."""
    from vllm.model_executor.model_loader.reload import layerwise

    _pack_at_each_load()
    left_out, put_back = [], layerwise._place_kernel_tensors

    def noted(layer: Any, info: Any) -> None:  # noqa: ANN401 - vLLM's
        parameters, _ = info.kernel_tensors
        if parameters and info.load_numel <= 0 and not layerwise.is_deferred_attention_layer(layer):
            left_out.append(type(layer).__name__)
        put_back(layer, info)

    layerwise._place_kernel_tensors = noted
    try:
        load(**given)
    finally:
        layerwise._place_kernel_tensors = put_back
    if left_out:
        names = ", ".join(dict.fromkeys(left_out))
        raise EngineError(
            f"vLLM gave layers no new weights ({names}): it cannot update this family of models"
        )


def _pack_at_each_load() -> None:
    """Have vLLM pack experts whenever weights are loaded, where it packs any."""
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    from vllm.platforms import current_platform

    first = UnquantizedFusedMoEMethod._setup_kernel
    if not current_platform.is_cpu() or hasattr(first, "__wrapped__"):
        return

    @functools.wraps(first)
    def packed(self: Any, layer: Any, **weights: Any) -> None:  # noqa: ANN401 - vLLM's
        again = self.moe_kernel is not None
        first(self, layer=layer, **weights)
        if again:
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    UnquantizedFusedMoEMethod._setup_kernel = packed
