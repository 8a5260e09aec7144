"""What weights a model folder holds: names, types, shapes and a digest of their bytes. No torch.

Invariants:
- the digest depends on the tensors alone, not on how they are spread over files;
- every problem with a folder is an `InvalidField` that names the file;
- a folder that changed after it was read is noticed by `Manifest.stamps`;
- a scale of quantized weights may have another float type, or one dimension of 1 more or less: quantizers
  differ, and vLLM holds it as float32; so may a draft head, which may be left out, too;
- memory is bounded, whatever the size of the model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from seer.common.errors import InvalidField
from seer.common.weights import safetensors
from seer.common.weights.digest import BLAKE3, NotFinite, digest_of, hashes_of
from seer.common.weights.in_place import read_plan
from seer.common.weights.lora import CONFIG
from seer.services.engine.weights.draft_heads import PREFIX, lacking, predicts

_SCALES = ("_scale", "_scale_inv")
"""How the names of scales end."""
_SCALE_TYPES = {"F32", "F16", "BF16"}
_QUANTIZED_FIX = (
    "send what shared.model holds: weights quantized as there, or, of a model that is not, plain ones, which "
    "engine.vllm.quantization quantizes"
)

FINITE_FIX = "go back to a step before it diverged, or set engine.finite_weights = false"


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor's type and shape as safetensors writes them, e.g. `BF16` and (4096, 128)."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes that it takes."""
        return safetensors.BITS.get(self.dtype, 0) * math.prod(self.shape) // 8


@dataclass(frozen=True, slots=True)
class Manifest:
    """A folder's tensors by name, and the digest of their bytes.

    `size`: bytes of all tensors; `stamps`: state of the files when they were read; `hashes`: the
    tensors', of which the digest is made; `optional`: those that other weights may have or lack.
    """

    tensors: dict[str, Tensor]
    digest: str
    size: int = field(default=0, compare=False)
    stamps: tuple[object, ...] = field(default=(), compare=False)
    hashes: dict[str, bytes] = field(default_factory=dict, compare=False)
    optional: dict[str, Tensor] = field(default_factory=dict, compare=False)

    @property
    def uncertain_bytes(self) -> int:
        """How many more bytes, or fewer, an update may have: scales of quantized weights, a draft head."""
        scales = sum(each.size for name, each in self.tensors.items() if name.endswith(_SCALES))
        return scales + 2 * sum(each.size for each in self.optional.values())  # bfloat16 may come as float32


def resolve_beneath(folder: Path, root: Path) -> Path:
    """Return a folder, links resolved. Raises `InvalidField` unless it and its files lie in `root`."""
    try:
        found, top = folder.resolve(), root.resolve(strict=True)
        read = (found, *found.glob("*.safetensors*"), *found.glob(CONFIG))
        outside = [each for each in read if not each.resolve().is_relative_to(top)]
    except (OSError, RuntimeError, ValueError) as error:
        raise InvalidField("source", str(folder), f"cannot be read: {error}") from error
    if outside:
        fix = f"{outside[0].name} is not in engine.weights_root = {str(root)!r}: give a folder that is in it"
        raise InvalidField("source", str(folder), fix)
    return found


def read_manifest(
    folder: Path,
    stop: Callable[[], bool] = lambda: False,
    *,
    finite: bool = False,
    known: Mapping[str, bytes] | None = None,
    tag: str = BLAKE3,
) -> Manifest:
    """Read a folder's safetensors files, every byte; give up when `stop()` is true. Raises `InvalidField`.

    `finite`: all numbers in them must be. `known`: hashes of tensors that need not be read. `tag`: the
    digest's.
    """
    try:
        stamps = safetensors.stamps(folder)
        stored = safetensors.stored(folder)
        hashes = hashes_of(stored, stop, finite=finite, known=known or {}, tag=tag)
    except OSError as error:
        raise InvalidField("source", str(folder), f"cannot be read: {error}") from error
    except NotFinite as error:
        raise InvalidField("source", str(folder), f"{error}: {FINITE_FIX}") from error
    except ValueError as error:
        raise InvalidField("source", str(folder), f"{error}; give a folder with a whole model") from error
    if len(hashes) < len(stored):
        raise InvalidField(
            "source", str(folder), "has the same tensor in two files; give a folder with one model"
        )
    tensors = {each.name: Tensor(each.dtype, each.shape) for each in stored}
    return Manifest(tensors, digest_of(hashes, tag), sum(each.size for each in stored), stamps, hashes)


def read_planned(folder: Path, live: Manifest, tag: str = BLAKE3) -> Manifest:
    """Read a plan of an update in place: its tensors, and the plan's own digest.

    Raises `InvalidField`, also if a model loaded from `live` cannot load such tensors.
    """
    read = read_manifest(folder, tag=tag)
    try:
        plan = read_plan(folder)
    except (OSError, ValueError) as error:
        raise InvalidField("source", str(folder), str(error)) from error
    planned = [tensor for bucket in plan.buckets for tensor in bucket.tensors]
    tensors = {tensor.name: Tensor(tensor.dtype, tensor.shape) for tensor in planned}
    found = Manifest(tensors, read.digest, sum(tensor.size for tensor in planned), read.stamps)
    if problem := differences(live, found):
        raise InvalidField("source", plan.name, problem)
    return found


def optional_tensors(model: Path, tensors: Mapping[str, Tensor], head: str) -> dict[str, Tensor]:
    """Return those of a model's layers of multi-token prediction, and of the folder `head`, if it is one.

    Raises `InvalidField`.
    """
    try:
        described = json.loads((model / "config.json").read_text())
        layers = int((described.get("text_config") or described)["num_hidden_layers"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        layers = 10**9  # not a model that an engine of vLLM's could load
    found = {name: each for name, each in tensors.items() if predicts(name, layers)}
    if head and Path(head).is_dir():
        try:
            stored = safetensors.stored(Path(head))
        except (OSError, ValueError) as error:
            raise InvalidField("drafts.head", head, f"{error}; give the folder of a draft head") from error
        found |= {PREFIX + each.name: Tensor(each.dtype, each.shape) for each in stored}
    return found


def differences(live: Manifest, new: Manifest) -> str:
    """Return why a model loaded from `live` cannot load `new`; empty when it can."""
    known = live.tensors | live.optional
    if name := lacking(live.optional, new.tensors):
        return f"lacks tensor {name}, and has others of the draft head: give all, or none"
    for name in sorted(live.tensors.keys() | new.tensors.keys()):
        ours, theirs = known.get(name), new.tensors.get(name)
        if theirs is None and name in live.optional:
            continue
        if theirs is None:
            return f"lacks tensor {name}"
        if ours is None:
            fix = ": set drafts.head, or leave it out" if name.startswith(PREFIX) else ""
            return f"has a tensor {name} that the model lacks{fix}"
        is_scale = name.endswith(_SCALES) or name in live.optional
        if ours.shape != theirs.shape and not (is_scale and {ours.shape, theirs.shape} == {(), (1,)}):
            return f"tensor {name} has shape {list(theirs.shape)}, the model's has {list(ours.shape)}"
        types = {ours.dtype, theirs.dtype}
        if len(types) > 1 and not (is_scale and types <= _SCALE_TYPES):
            fix = f": {_QUANTIZED_FIX}" if any(each.startswith("F8") for each in types) else ""
            return f"tensor {name} has type {theirs.dtype}, the model's has {ours.dtype}{fix}"
    return ""
