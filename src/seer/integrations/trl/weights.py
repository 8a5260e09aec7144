"""The weights that a trainer trains, whole: gathered, and with PEFT adapters merged.

Invariants:
- names are those of the model without adapters; what is sent is what the trainer computes with;
- merging leaves no trace: afterwards every bit of the model is as before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from seer.common.errors import InvalidField
from seer.integrations.hf import unwrapped

if TYPE_CHECKING:
    from peft import PeftModel
    from torch import Tensor
    from transformers import PreTrainedModel
    from trl import GRPOTrainer

PARTS = (".base_layer", "modules_to_save.default.")
"""What PEFT puts into the names of tensors that the model has without it, too."""


@contextmanager
def whole_weights(trainer: GRPOTrainer) -> Iterator[tuple[PreTrainedModel, Mapping[str, Tensor]]]:
    """Yield the model and its state, which holds as long as the context; all processes take part.

    Where weights are sharded, the main process alone has the state.
    """
    accelerator = trainer.accelerator
    model = accelerator.unwrap_model(trainer.model_wrapped, keep_torch_compile=False)
    if not hasattr(model, "peft_config"):
        yield model, accelerator.get_state_dict(trainer.model_wrapped)
        return
    with merged(model):
        state = accelerator.get_state_dict(trainer.model_wrapped)
        yield model.get_base_model(), base_state(state, model.prefix)


@contextmanager
def merged(model: PeftModel) -> Iterator[None]:
    """Merge the active adapters for as long as the context, then restore the weights.

    Unmerging subtracts what merging added, which leaves rounding errors that would grow with each step.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    weights = [weight for layer in layers for weight in layer.get_base_layer().parameters()]
    before = [weight.detach().clone() for weight in weights]
    model.merge_adapter()
    try:
        yield
    finally:
        model.unmerge_adapter()
        for weight, old in zip(weights, before, strict=True):
            weight.data.copy_(old)


def base_state(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the tensors that the model has without adapters, under their names there.

    `prefix` begins the names of what the adapter adds, e.g. `lora_`.
    """
    found = {}
    for name, tensor in state.items():
        plain = unwrapped(name).removeprefix("base_model.model.")
        if prefix in plain or "original_module." in plain:  # the latter: what modules_to_save replace
            continue
        for part in PARTS:
            plain = plain.replace(part, "")
        found[plain] = tensor
    return found


def check_mergeable(trainer: GRPOTrainer) -> None:
    """Raise `InvalidField` if the model has adapters that cannot be merged into its weights."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    if not hasattr(model, "peft_config"):
        return
    if not hasattr(model, "merge_adapter"):
        fix = "Seer takes whole weights: give an adapter that PEFT can merge, as LoRA"
        raise InvalidField("peft_config", model.peft_config, fix)
    if getattr(model.get_base_model(), "is_quantized", False):
        fix = "Seer takes whole weights: train the adapter on a model that is not quantized"
        raise InvalidField("model", "a quantized model with an adapter", fix)
    if getattr(getattr(trainer.accelerator.state, "fsdp_plugin", None), "fsdp_version", 2) == 1:
        fix = "version 1 keeps shards that no adapter can be merged into: set it to 2"
        raise InvalidField("fsdp_config['version']", 1, fix)
