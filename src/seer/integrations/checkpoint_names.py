"""A Hugging Face model's weights with the names and types of its checkpoint, for `update_weights`.

Invariants:
- names and types are the checkpoint's, however the trainer wraps, ties, fuses or upcasts tensors;
- a tensor that only the trainer or only the checkpoint has is an error that names it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from seer.client import RolloutClient, SentWeights
from seer.common.errors import InvalidField, WeightsRefused

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

WRAPPERS = ("module.", "_orig_mod.")
"""Prefixes that data parallelism and `torch.compile` add to names."""

_SENT: dict[str, SentWeights] = {}
"""By endpoint, of which a process has one: what was sent there last. Each update has a client of its own."""


def checkpoint_tensors(
    model: PreTrainedModel, state: Mapping[str, Tensor], folder: Path
) -> dict[str, Tensor]:
    """Return the weights in `state`, a state dict of `model`, under `folder`'s names and types.

    Raises `InvalidField` when the model and the checkpoint in `folder` do not have the same tensors.
    """
    from transformers.core_model_loading import revert_weight_conversion

    plain = {unwrapped(name): tensor.detach() for name, tensor in state.items()}
    known = revert_weight_conversion(model, plain)  # e.g. fused experts back to one tensor each
    types = checkpoint_types(folder)
    fix = "give the folder that the engines were started with"
    for name in sorted(types.keys() - known.keys()):
        raise InvalidField("model", str(folder), f"has a tensor {name}, which the trainer's lacks; {fix}")
    unsaved = {*model.all_tied_weights_keys, *(model._keys_to_ignore_on_save or ())}
    for name in sorted(known.keys() - types.keys() - unsaved):
        raise InvalidField("model", str(folder), f"lacks a tensor {name}, which the trainer's has; {fix}")
    tensors = {name: known[name].to(dtype) for name, dtype in types.items()}
    # Some checkpoints store a tied tensor twice; copy it, as streams leave out what shares memory.
    return tensors | {name: tensors[name].clone() for name in types.keys() & model.all_tied_weights_keys}


class CheckpointCopy:
    """A copy in host memory of what a trainer hands out tensor by tensor, with `folder`'s names and types.

    `field` is the trainer's setting that names the folder; `tied`: the embedding is the output layer, too.
    Raises `InvalidField` when there is no checkpoint in `folder`.
    """

    def __init__(self, folder: Path, field: str, *, tied: bool) -> None:
        self._folder = folder
        self._field = field
        self._types = checkpoint_types(folder, field)
        self._ignored = {"lm_head.weight"} if tied else set()  # checkpoints store tied tensors once
        self._found: dict[str, Tensor] = {}
        self._others: dict[str, Tensor] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """Copy a tensor. One that the checkpoint lacks is an error later: handing out is collective."""
        if name in self._types:
            self._found[name] = tensor.detach().to("cpu", self._types[name], copy=True)
        elif name not in self._ignored:
            self._others[name] = tensor.detach().to("cpu", copy=True)

    async def send(self, endpoint: str) -> int:
        """Send all tensors to the buffer as one more version; return the version once it is live.

        Raises `InvalidField`, `Unreachable`.
        """
        tensors = self.tensors()
        deltas = _SENT.setdefault(endpoint, SentWeights())
        async with RolloutClient(endpoint, deltas=deltas) as client:
            version = (await client.status()).weight_version + 1
            try:
                await client.update_weights(version, tensors)
            except WeightsRefused as error:
                fix = f"start Seer with the same model; {error}"
                raise InvalidField(self._field, str(self._folder), fix) from error
        return version

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors by name. Raises `InvalidField` unless they are the checkpoint's."""
        saved = _as_saved(self._folder, self._others)
        both = saved.keys() & self._types.keys()
        found = self._found | {name: saved[name].to(self._types[name]) for name in both}
        for name in sorted(self._types.keys() - found.keys()):
            problem = f"has a tensor {name}, which the trainer does not send"
            raise InvalidField(self._field, str(self._folder), problem)
        for name in sorted(saved.keys() - self._types.keys()):
            problem = f"lacks a tensor {name}, which the trainer sends"
            raise InvalidField(self._field, str(self._folder), problem)
        return found


def _as_saved(folder: Path, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors of `folder`'s model as transformers would save them; unchanged if transformers lacks it.

    In memory Qwen2-VL's layers are `model.language_model.layers`, in its checkpoints `model.layers`.
    """
    if not tensors:
        return {}
    import torch
    import transformers
    from transformers.core_model_loading import revert_weight_conversion

    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError):  # a model with code of its own, which nobody may have us run
        return tensors
    architecture = getattr(transformers, (config.architectures or [""])[0], None)
    if architecture is None:
        return tensors
    with torch.device("meta"):
        model = architecture(config)
    saved: dict[str, Tensor] = revert_weight_conversion(model, tensors)
    return saved


def unwrapped(name: str) -> str:
    """Return a tensor's name in the model itself."""
    while name.startswith(WRAPPERS):
        name = name.partition(".")[2]
    return name


def checkpoint_types(folder: Path, field: str = "model") -> dict[str, object]:
    """Return the torch type of each tensor of a checkpoint, by name. Raises `InvalidField` for `field`."""
    import torch
    from safetensors import safe_open

    floats = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    types: dict[str, object] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                dtype = opened.get_slice(name).get_dtype()
                if dtype not in floats:
                    fix = (
                        f"tensor {name} is {dtype}: not a plain float; give trainer and engines a model that "
                        "is not quantized, and engines engine.vllm.quantization"
                    )
                    raise InvalidField(field, str(folder), fix)
                types[name] = floats[dtype]
    if not types:
        raise InvalidField(field, str(folder), "give the folder of safetensors that the engines load")
    return types
