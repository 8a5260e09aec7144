"""New weights for a running model: what vLLM 0.32 leaves out of such a load.

- On CPUs it packs experts for the processor's instructions at the first load alone (`_setup_kernel` in
  fused_moe/unquantized_fused_moe_method.py); its kernels then read plain weights as packed ones. vllm#42821
  tells the same of other kernels.
- A layer whose weights are another's, as a tied output layer, is not packed again on CPUs, either
  (`finalize_layerwise_processing` in model_loader/reload/layerwise.py).
- Where a model's loader copies into parameters by itself, as gpt-oss's does experts and sinks, layers keep
  their old weights on any device, with a line in the log.
- A parameter that gets nothing while others of its layer do, as a scale that is missing, gets whatever lay
  in its new memory (`materialize_layer` in reload/meta.py).
- After a load that failed, layers keep what came of it, and the next one adds to that
  (`initialize_layerwise_reload` in model_loader/reload/layerwise.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

from seer.common.errors import EngineError

if TYPE_CHECKING:
    import torch
    from vllm.model_executor.model_loader.reload.types import LayerReloadingInfo


def reloading(load: Callable[..., None], **given: object) -> None:
    """Load weights by `load`. Raises `EngineError` if a layer got none, or a part of its parameters."""
    from vllm.model_executor.model_loader.reload import layerwise
    from vllm.platforms import current_platform

    if on_cpu := current_platform.is_cpu():
        _pack_experts_again()
    put_back = layerwise._place_kernel_tensors
    loaded: set[int] = set()  # parameters
    lacking: set[str] = set()
    others: list[tuple[torch.nn.Module, set[int]]] = []

    def noted(layer: torch.nn.Module, info: LayerReloadingInfo) -> None:
        parameters = set(map(id, info.kernel_tensors[0].values()))
        if info.load_numel > 0:
            loaded.update(parameters)
            lacking.update(_lacking(layer, info))
        elif not layerwise.is_deferred_attention_layer(layer):
            others.append((layer, parameters))
        put_back(layer, info)

    layerwise._place_kernel_tensors = noted
    try:
        load(**given)
    except BaseException:
        for layer, info in list(layerwise.LAYERWISE_INFO.items()):
            if info.can_load() and info.kernel_tensors is not None:
                put_back(layer, info)
                info.reset()
        raise
    finally:
        layerwise._place_kernel_tensors = put_back
    lacking |= {type(layer).__name__ for layer, parameters in others if parameters - loaded}
    if lacking:
        names = ", ".join(sorted(lacking))
        raise EngineError(f"vLLM gave layers no new weights ({names}): it cannot update this model")
    for layer, parameters in others:
        if on_cpu and parameters and hasattr(layer, "quant_method"):
            layer.quant_method.process_weights_after_loading(layer)


def _lacking(layer: torch.nn.Module, info: LayerReloadingInfo) -> set[str]:
    """Return the parameters that got nothing; those of attention, scales of its KV, begin with a default."""
    from vllm.model_executor.model_loader.reload.layerwise import is_deferred_attention_layer

    if is_deferred_attention_layer(layer):
        return set()
    # A bias and what else is not in there keeps its values.
    missing = info.restore_metadata[0].keys() - {name for name, _ in info.loaded_weights}
    return {f"{type(layer).__name__}.{name}" for name in missing}


def _pack_experts_again() -> None:
    """Have vLLM pack experts whenever weights are loaded."""
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    first = UnquantizedFusedMoEMethod._setup_kernel
    if hasattr(first, "__wrapped__"):
        return

    @functools.wraps(first)
    def packed(self: UnquantizedFusedMoEMethod, layer: torch.nn.Module, **weights: torch.Tensor) -> None:
        again = self.moe_kernel is not None
        first(self, layer=layer, **weights)
        if again:
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    UnquantizedFusedMoEMethod._setup_kernel = packed
