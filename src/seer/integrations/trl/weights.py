"""The weights that a trainer trains: whole, with PEFT adapters merged; or an adapter alone.

Invariants:
- names are those of the model without adapters; what is sent is what the trainer computes with;
- merging leaves no trace: afterwards every bit of the model is as before;
- an adapter is sent alone only if engines then have the weights that merging here would give, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from seer.client import LoraAdapter
from seer.client.tensor_stream import TensorStream
from seer.common.errors import InvalidField
from seer.integrations.checkpoint_names import checkpoint_tensors, unwrapped

if TYPE_CHECKING:
    from accelerate import Accelerator
    from peft import PeftModel
    from torch import Tensor
    from transformers import PreTrainedModel
    from trl import GRPOTrainer

ADAPTER = "default"
"""PEFT's name of a model's only adapter."""

NO_ADAPTER = "the model has no adapter"

NO_BASE = "0" * 32
"""A digest for checks in which the base does not count."""

PARTS = (".base_layer", "modules_to_save.default.")
"""What PEFT puts into the names of tensors that the model has without it, too."""


def handed_out(accelerator: Accelerator) -> bool:
    """Return whether several processes have all tensors, or put shards together, one tensor at a time.

    Else Accelerate gathers all in the main process.
    """
    if accelerator.num_processes == 1:
        return False
    return accelerator.is_fsdp2 or str(accelerator.distributed_type.value).startswith("MULTI_")


@contextmanager
def whole_weights(trainer: GRPOTrainer) -> Iterator[tuple[PreTrainedModel, Mapping[str, Tensor]]]:
    """Yield the model and its state, which holds as long as the context; all processes take part.

    Sharded weights are DTensors if they are `handed_out`; else the main process alone has the state.
    """
    accelerator = trainer.accelerator
    model = accelerator.unwrap_model(trainer.model_wrapped, keep_torch_compile=False)
    gather = partial(accelerator.get_state_dict, trainer.model_wrapped)
    state_dict = model.state_dict if handed_out(accelerator) else gather
    if not hasattr(model, "peft_config"):
        yield model, state_dict()
        return
    with merged(model):
        yield model.get_base_model(), base_state(state_dict(), model.prefix)


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


def gathered_adapter(trainer: GRPOTrainer) -> tuple[PeftModel, dict[str, Tensor]]:
    """Return the model and its state, adapters apart; all processes take part, the main one has the state."""
    accelerator = trainer.accelerator
    model = accelerator.unwrap_model(trainer.model_wrapped, keep_torch_compile=False)
    state = accelerator.get_state_dict(trainer.model_wrapped) or {}
    return model, {unwrapped(name): tensor.detach() for name, tensor in state.items()}


def adapter_alone(model: PeftModel, state: Mapping[str, Tensor], base: str | TensorStream) -> LoraAdapter:
    """Return the adapter in `state`; `base`: its base's tensors, or their digest."""
    from peft import get_peft_model_state_dict

    tensors = get_peft_model_state_dict(model, dict(state), ADAPTER, save_embedding_layers=False)
    return LoraAdapter(tensors, model.peft_config[ADAPTER], base=base)


def why_merged(trainer: GRPOTrainer) -> str:
    """Return why the trainer's adapter cannot be sent alone, whatever its base is; empty: the adapter can.

    Processes need not take part, and all get the same answer.
    """
    model = trainer.accelerator.unwrap_model(trainer.model)
    if not hasattr(model, "peft_config"):
        return NO_ADAPTER
    if list(model.peft_config) != [ADAPTER] or model.active_adapters != [ADAPTER]:
        return f"the model has other adapters than {ADAPTER!r}"
    types = {str(each.dtype) for name, each in model.named_parameters() if model.prefix in name}
    if types != {"torch.float32"}:
        return f"it is in {', '.join(sorted(types)) or 'no type'}, not in float32"
    try:
        LoraAdapter({"none": np.zeros(1)}, model.peft_config[ADAPTER], base=NO_BASE)
    except InvalidField as error:
        return str(error)
    return ""


def base_stream(model: PeftModel, state: Mapping[str, Tensor], folder: Path) -> TensorStream:
    """Return the tensors that the trainer's base has as a checkpoint like `folder`.

    Raises `InvalidField` if engines that merge the adapter into the base would get other bits than the
    trainer.
    """
    import torch

    base = {}
    for name, tensor in state.items():
        if model.prefix not in name and "modules_to_save." not in name:
            plain = name.removeprefix("base_model.model.")
            base[plain.replace(".base_layer", "").replace("original_module.", "")] = tensor
    tensors = checkpoint_tensors(model.get_base_model(), base, folder)
    embeddings = any("lora_embedding" in name for name in state)
    for name, stored in tensors.items():
        own = base.get(name, stored)
        if own.dtype == stored.dtype:
            continue
        exact = own.dtype == torch.float32 and torch.equal(stored.to(own.dtype), own)
        if embeddings or not exact:
            fix = f"the trainer has it as {own.dtype}, the checkpoint as {stored.dtype}"
            raise InvalidField("model", name, f"{fix}: the adapter merges into these differently")
    return TensorStream(tensors)


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
