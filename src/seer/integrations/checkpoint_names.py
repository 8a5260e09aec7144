"""A Hugging Face model's weights with the names and types of its checkpoint, for `update_weights`.

Invariants:
- names and types are the checkpoint's, however the trainer wraps, ties, fuses or upcasts tensors;
- a tensor that only the trainer or only the checkpoint has is an error that names it.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterable, Mapping
from contextlib import AsyncExitStack
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from seer.client import RolloutClient, SentWeights, ShardedTensors, TorchRanks
from seer.client.sharded_tensors import Ranks, on_all, shared_out
from seer.common.errors import InvalidField, Unreachable, WeightsRefused
from seer.common.weights.safetensors import stored

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedModel

WRAPPERS = ("module.", "_orig_mod.")
"""Prefixes that data parallelism and `torch.compile` add to names."""

FIX = "give the folder that the engines were started with"

_SENT: dict[str, SentWeights] = {}
"""By endpoint, of which a process has one: what was sent there last. Each update has a client of its own."""


def checkpoint_tensors(
    model: PreTrainedModel, state: Mapping[str, Tensor], folder: Path
) -> dict[str, Tensor]:
    """Return the weights in `state`, a state dict of `model`, under `folder`'s names and types.

    Raises `InvalidField` when the model and the checkpoint in `folder` do not have the same tensors.
    """
    found = CheckpointCopy(folder, "model", model=model)
    for name, tensor in state.items():
        found.add(name, tensor)
    return found.tensors()


class CheckpointCopy:
    """A copy in host memory of what a trainer hands out tensor by tensor, with `folder`'s names and types.

    `field` is the trainer's setting that names the folder. `model`: whose names in memory all have; without
    `ranks` its tensors are not copied. None: names may be the checkpoint's, and `tied`: the embedding is the
    output layer, too. With `ranks` to which the same is handed out, all make one: each copies and sends its
    share, and calls `send` or `source`; the first one has what can be converted only together. Raises
    `InvalidField`, on all ranks, when there is no checkpoint in the `folder` of one, or another one.
    """

    def __init__(
        self, folder: Path, field: str, *, tied: bool = False, model: PreTrainedModel | None = None,
        ranks: Ranks | None = None,
    ) -> None:  # fmt: skip
        self._folder = folder
        self._field = field
        self._model = model
        self._copy = model is None or ranks is not None
        self._types: dict[str, tuple[torch.dtype, int]] = {}
        # A rank that raised alone would leave the others waiting in what hands tensors out.
        if len(set([self._read()] if ranks is None else on_all(ranks, self._read))) > 1:
            raise InvalidField(field, str(folder), "give all ranks the same checkpoint: they have several")
        self._unsaved = {"lm_head.weight"} if tied else set()  # checkpoints store tied tensors once
        if model is not None:
            self._unsaved = {*model.all_tied_weights_keys, *(model._keys_to_ignore_on_save or ())}
        self._ranks = ranks
        rank, size = (0, 1) if ranks is None else (ranks.rank, ranks.size)
        owners = shared_out({name: count for name, (_, count) in self._types.items()}, size)
        self._own = {name for name, owner in owners.items() if owner == rank}
        self._found: dict[str, Tensor] = {}
        self._handed_out: dict[str, Tensor] = {}
        """By name in memory, of the first rank: what is converted together; of all else the shape alone."""
        self._problem: Exception | None = None

    def _read(self) -> str:
        """Read the checkpoint's names and types; equal texts mean equal ones."""
        self._types = checkpoint_types(self._folder, self._field)
        return hashlib.sha256(repr(sorted(self._types.items())).encode()).hexdigest()

    def add(self, name: str, tensor: Tensor) -> None:
        """Take a tensor. What is wrong with it is an error later: handing out is collective."""
        try:
            self._add(unwrapped(name), tensor.detach())
        except Exception as error:  # noqa: BLE001 - raised on all ranks once all has been handed out
            self._problem = self._problem or error

    def _add(self, name: str, tensor: Tensor) -> None:
        unsaved, alone = name in self._unsaved, self._alone(name, tensor)
        if unsaved and not alone and name not in self._types:
            return
        for each in alone.keys() & self._own:
            # Some checkpoints store a tied tensor twice; copy it, as streams leave out what shares memory.
            self._found[each] = self._kept(alone[each], self._types[each][0], unsaved)
        if self._ranks is None or self._ranks.rank == 0:
            self._handed_out[name] = tensor.to("meta") if alone else self._kept(tensor, tensor.dtype)

    def _kept(self, tensor: Tensor, dtype: torch.dtype, twice: bool = False) -> Tensor:
        return tensor.to("cpu" if self._copy else tensor.device, dtype, copy=self._copy or twice)

    def _alone(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """Return what a tensor is in the checkpoint; empty: it is there only together with others."""
        saved = {name: tensor}
        if self._model is not None or not (name in self._types or name in self._unsaved):
            try:
                saved = self._as_saved(saved)
            except (ValueError, LookupError):  # as of experts of which the checkpoint has two kinds in a row
                return {}
        types = {each: self._types.get(each, (tensor.dtype, -1)) for each in saved}
        sizes = ((saved[each].numel() * dtype.itemsize, size) for each, (dtype, size) in types.items())
        return saved if all(found == size for found, size in sizes) else {}

    def _as_saved(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors of the model as transformers would save them; unchanged if transformers lacks it.

        In memory Qwen2-VL's layers are `model.language_model.layers`, in its checkpoints `model.layers`.
        """
        from transformers.core_model_loading import revert_weight_conversion

        model = self._model or _model_of(self._folder)
        if model is None:
            return tensors
        saved: dict[str, Tensor] = revert_weight_conversion(model, tensors)
        return saved

    async def send(self, endpoint: str) -> int:
        """Send all tensors to the buffer as one more version; return the version once it is live.

        Raises `InvalidField`, `Unreachable`, `WeightsRefused`.
        """
        source = await asyncio.to_thread(self.source)
        deltas = _SENT.setdefault(endpoint, SentWeights())
        async with AsyncExitStack() as stack:
            version, problem = 0, ""
            try:
                client = await stack.enter_async_context(RolloutClient(endpoint, deltas=deltas))
                version = (await client.status()).weight_version + 1
            except Exception as error:
                if self._ranks is None:
                    raise
                problem = str(error) or repr(error)  # the other ranks wait to hear of it
            known = [(version, problem)]
            if self._ranks is not None:
                known = await asyncio.to_thread(self._ranks.gather, *known)
            for rank, (_, why) in enumerate(known):
                if why:
                    raise Unreachable(f"rank {rank} cannot update: {why}")
            version = max(known)[0]
            try:
                await client.update_weights(version, source)
            except WeightsRefused as error:
                if not any(error.reasons):  # no engine refused them
                    raise
                fix = f"start Seer with the same model; {error}"
                raise InvalidField(self._field, str(self._folder), fix) from error
        return version

    def source(self) -> dict[str, Tensor] | ShardedTensors:
        """Return what is sent, once all ranks have called this. Raises `InvalidField`, on all ranks."""
        if self._ranks is None:
            return self.tensors()
        tensors: dict[str, Tensor] = {}
        on_all(self._ranks, lambda: tensors.update(self.tensors()))
        shards = ShardedTensors(tensors, self._ranks, divided=True)
        self._check_whole(shards.stream.owners)
        return shards

    def _check_whole(self, names: Iterable[str]) -> None:
        for name in sorted(self._types.keys() - set(names)):
            problem = f"has a tensor {name}, which the trainer's lacks; {FIX}"
            raise InvalidField(self._field, str(self._folder), problem)

    def tensors(self) -> dict[str, Tensor]:
        """Return this rank's tensors, by name. Raises `InvalidField` if some are not the checkpoint's."""
        if self._problem is not None:
            raise self._problem
        waiting = not all(each.is_meta for each in self._handed_out.values())
        for name, each in self._as_saved(self._handed_out).items() if waiting else ():
            if name in self._types and not each.is_meta:
                self._found[name] = each.to(self._types[name][0])
            elif not each.is_meta and name not in self._unsaved:
                problem = f"lacks a tensor {name}, which the trainer's has; {FIX}"
                raise InvalidField(self._field, str(self._folder), problem)
        if self._ranks is None:
            self._check_whole(self._found)
        return self._found


def all_ranks() -> Ranks | None:
    """Return the trainer's ranks; None: there is one."""
    import torch.distributed as dist

    return TorchRanks() if dist.is_initialized() and dist.get_world_size() > 1 else None


@cache
def _model_of(folder: Path) -> PreTrainedModel | None:
    """Return the model of a checkpoint, without weights; None: transformers lacks it."""
    import torch
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError):  # a model with code of its own, which nobody may have us run
        return None
    architecture = getattr(transformers, (config.architectures or [""])[0], None)
    with torch.device("meta"):
        return None if architecture is None else architecture(config)


def unwrapped(name: str) -> str:
    """Return a tensor's name in the model itself."""
    while name.startswith(WRAPPERS):
        name = name.partition(".")[2]
    return name


def checkpoint_types(folder: Path, field: str = "model") -> dict[str, tuple[torch.dtype, int]]:
    """Return type and bytes of each tensor of a checkpoint, by name. Raises `InvalidField` for `field`."""
    import torch

    floats = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    try:
        found = stored(folder)
    except (ValueError, OSError) as error:
        fix = f"{error}; give the folder of safetensors that the engines load"
        raise InvalidField(field, str(folder), fix) from error
    for each in found:
        if each.dtype not in floats:
            fix = (
                f"tensor {each.name} is {each.dtype}: not a plain float; give trainer and engines a model "
                "that is not quantized, and engines engine.vllm.quantization"
            )
            raise InvalidField(field, str(folder), fix)
    return {each.name: (floats[each.dtype], each.size) for each in found}
