"""What a LoRA adapter changes in an engine's base model, and whether it can be merged into it. No torch.

The base is the model folder that the engine was started with, whatever was loaded since.

Invariants (tests/unit/test_lora.py):
- an adapter that passes `read_adapter` can be merged: every tensor of it has its place, shape and a type that
  is merged, all values are finite, and none that is added can exceed half of what the base's type holds;
- an adapter for another base, by its digest, is refused, and so is one whose base has changed on disk;
- every problem with an adapter is an `InvalidField` that names the tensor or setting.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from seer.common.errors import InvalidField
from seer.common.weights import safetensors
from seer.common.weights.digest import tag_of
from seer.common.weights.lora import CONFIG, LoraConfig, base_of, digest_of_adapter, inner_source, read_config
from seer.common.weights.safetensors import Stored
from seer.services.engine.weights.manifest import Manifest, Tensor, read_manifest

PREFIX = "base_model.model."
"""PEFT's, before the names that tensors have in the base."""

_LINEAR = (".lora_A.weight", ".lora_B.weight")
_EMBEDDING = (".lora_embedding_A", ".lora_embedding_B")
_OWN = ".base_layer."
"""In the name of a tensor of the module below an adapter: PEFT saves it, too, if that is an embedding."""
_OUTPUT = "lm_head.weight"
_LARGEST = {"F32": 3.40e38, "BF16": 3.38e38, "F16": 65504.0}
"""By type that is merged: its largest value."""

_READ_BYTES = 2**22


@dataclass(frozen=True, slots=True)
class Pair:
    """The names of two matrices whose product, times `scale`, is added to a tensor of the base.

    A tensor [out, in] of a linear layer has `a` [rank, in] and `b` [out, rank]; one [tokens, width] of an
    embedding has `a` [rank, tokens] and `b` [width, rank], and their product is transposed. `onto` is the
    tensor that stands for the base's there, as in PEFT, which loads it; empty: the base's own.
    """

    a: str
    b: str
    scale: float
    embedding: bool
    onto: str = ""


Plan = dict[str, Pair | str]
"""By name of a tensor of the base: what is added to it, or the name of the tensor that replaces it."""


def stamps(folder: Path, base: Path) -> tuple[object, ...]:
    """Return a fingerprint that changes when the files of an adapter, or of its base, do."""
    try:
        found = (folder / CONFIG).stat()
    except OSError:  # a stream: its settings are in its file
        return (safetensors.stamps(folder), safetensors.stamps(base))
    config = (found.st_ino, found.st_size, found.st_mtime_ns)
    return (safetensors.stamps(folder), safetensors.stamps(base), config)


def read_adapter(
    source: str, folder: Path, base: Path, model: Manifest, stop: Callable[[], bool] = lambda: False
) -> Manifest:
    """Read the adapter of `source`, which lies in `folder`, every byte, and check that it fits its base.

    `model` is what the folder `base` was known to hold. The digest returned is that of the merged weights, by
    the tag of the model's. Give up when `stop()` is true. Raises `InvalidField`.
    """
    before = stamps(folder, base)
    where, tag = inner_source(source), tag_of(model.digest)
    if safetensors.stamps(base) != model.stamps and read_manifest(base, stop, tag=tag).digest != model.digest:
        raise InvalidField("shared.model", str(base), "its files have changed since this engine was started")
    if base_of(source) not in ("", model.digest):
        fix = f"the adapter is for a base with digest {base_of(source)}, the engine's has {model.digest}"
        raise InvalidField("base", base_of(source), fix)
    found = read_manifest(folder, stop, tag=tag)
    try:
        config = read_config(folder)
        plan = plan_merge(config, found.tensors, model.tensors)
        largest = {each.name: _largest(each) for each in safetensors.stored(folder)}
        _check_sizes(plan, largest, found.tensors, model.tensors)
    except OSError as error:
        raise InvalidField("source", where, f"cannot be read: {error}") from error
    except ValueError as error:
        raise InvalidField("source", where, str(error)) from error
    return Manifest(found.tensors, digest_of_adapter(model.digest, found.digest, config), found.size, before)


def plan_merge(config: LoraConfig, adapter: Mapping[str, Tensor], base: Mapping[str, Tensor]) -> Plan:
    """Return what an adapter's tensors do to those of its base. Raises `ValueError`."""
    plan: Plan = {}
    for name in sorted(adapter):
        if adapter[name].dtype not in _LARGEST:
            raise ValueError(f"tensor {name} has type {adapter[name].dtype}: give F32, F16 or BF16")
        target, change = _change(name, adapter, config)
        if _is_tied(target, base):
            raise ValueError(
                f"tensor {name} is for {target}, but the base uses embeddings as {_OUTPUT}, too: leave both "
                "out of target_modules and modules_to_save, or send merged weights"
            )
        if (there := base.get(target)) is None:
            raise ValueError(f"tensor {name} is for {target}, which the base lacks")
        if there.dtype not in _LARGEST:
            raise ValueError(
                f"tensor {name} is for {target}, which the base has as {there.dtype}: start the engines with "
                "a model that is not quantized: F32, F16 or BF16"
            )
        if plan.setdefault(target, change) != change:
            raise ValueError(f"has two changes of {target}")
        _check_shapes(target, change, adapter, there, config)
    return plan


def _change(name: str, adapter: Mapping[str, Tensor], config: LoraConfig) -> tuple[str, Pair | str]:
    """Return the base's tensor that a tensor of an adapter is for, and what becomes of it."""
    for parts in (_LINEAR, _EMBEDDING):
        for part in (*parts, f"{_OWN}weight"):
            whole = name.removesuffix(part)
            a, b, own = (whole + each for each in (*parts, f"{_OWN}weight"))
            if whole == name or adapter.keys().isdisjoint((a, b)):
                continue
            if lacking := {a, b} - adapter.keys():
                raise ValueError(f"has {name}, and lacks {lacking.pop()}")
            module, onto = whole.removeprefix(PREFIX), own if own in adapter else ""
            return f"{module}.weight", Pair(a, b, config.scale(module), parts is _EMBEDDING, onto)
    return name.removeprefix(PREFIX).replace(_OWN, "."), name


def _check_shapes(
    target: str, change: Pair | str, adapter: Mapping[str, Tensor], there: Tensor, config: LoraConfig
) -> None:
    whole = change if isinstance(change, str) else change.onto
    if whole and adapter[whole].shape != there.shape:
        shapes = f"shape {list(adapter[whole].shape)}, the base's has {list(there.shape)}"
        raise ValueError(f"tensor {whole} has {shapes}")
    if isinstance(change, str):
        return
    if len(there.shape) != 2:
        raise ValueError(f"tensor {change.a} is for {target}, which is no matrix: {list(there.shape)}")
    rank = config.rank(target.removesuffix(".weight"))
    out, into = reversed(there.shape) if change.embedding else there.shape
    for name, shape in ((change.a, (rank, into)), (change.b, (out, rank))):
        if adapter[name].shape != shape:
            raise ValueError(
                f"tensor {name} has shape {list(adapter[name].shape)}: for rank {rank} and {target} of shape "
                f"{list(there.shape)} it must have {list(shape)}"
            )


def _is_tied(target: str, base: Mapping[str, Tensor]) -> bool:
    """Whether a tensor is an embedding and the output layer in one: an adapter is for one of the two uses."""
    return _OUTPUT not in base and ("embed" in target or target.endswith(("wte.weight", _OUTPUT)))


def _check_sizes(
    plan: Plan, largest: Mapping[str, float], adapter: Mapping[str, Tensor], base: Mapping[str, Tensor]
) -> None:
    """Raise `ValueError` if what is added to a tensor may be too large, by the largest values of a pair."""
    for target, change in plan.items():
        if isinstance(change, str):
            added = largest[change]
        else:
            rank = adapter[change.a].shape[0]
            added = abs(change.scale) * rank * largest[change.a] * largest[change.b]
            added += largest[change.onto] if change.onto else 0.0
        if not added < _LARGEST[base[target].dtype] / 2:
            raise ValueError(f"may make values of {target} larger than {base[target].dtype} can hold")


def _largest(stored: Stored) -> float:
    """Return the largest absolute value of a tensor. Raises `ValueError` if one is not finite."""
    found, left = 0.0, stored.size
    with safetensors.open_regular(stored.file) as opened:
        opened.seek(stored.start)
        while left > 0:
            data = opened.read(min(left, _READ_BYTES))
            if not data:
                raise ValueError(f"{stored.file.name} ends within tensor {stored.name}")
            left -= len(data)
            part = float(np.abs(_values(data, stored.dtype)).max(initial=0.0))
            if not math.isfinite(part):
                raise ValueError(f"tensor {stored.name} has values that are not finite")
            found = max(found, part)
    return found


def _values(data: bytes, dtype: str) -> npt.NDArray[np.floating]:
    if dtype == "BF16":  # the upper half of a float32
        return (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")
    return np.frombuffer(data, "<f4" if dtype == "F32" else "<f2")
