"""What weights a model folder holds: names, types, shapes and a digest of their bytes. No torch.

Invariants:
- the digest follows from the tensors alone: how they are spread over files does not matter;
- whatever is wrong with a folder is an `InvalidField` that names the file;
- memory is bounded, whatever the size of the model.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from seer.common.errors import InvalidField
from seer.common.weights import digest_of, problem_of, tensor_hash

_READ_BYTES = 2**22


@dataclass(frozen=True, slots=True)
class Tensor:
    """As safetensors has it, e.g. `BF16` and (4096, 128)."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """A folder's tensors by name, and the digest (32 hex characters) of all they hold."""

    tensors: dict[str, Tensor]
    digest: str


@dataclass(frozen=True, slots=True)
class _Stored:
    name: str
    tensor: Tensor
    file: Path
    start: int
    size: int


def inspect(folder: Path) -> Manifest:
    """Read a folder's safetensors files, every byte. Raises `InvalidField`."""
    try:
        problem = problem_of(folder)
        stored = (
            [] if problem else [item for file in sorted(folder.glob("*.safetensors")) for item in _in(file)]
        )
        if not problem and not stored:
            problem = "has no safetensors files"
        if problem:
            raise InvalidField("source", str(folder), f"{problem}; give a folder with a whole model")
        with ThreadPoolExecutor() as pool:  # hashlib releases the GIL
            hashes = dict(zip((item.name for item in stored), pool.map(_hash, stored), strict=True))
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise InvalidField("source", str(folder), f"cannot be read: {error}") from error
    if len(hashes) < len(stored):
        raise InvalidField("source", str(folder), "has a tensor in two files; give a folder with one model")
    return Manifest({item.name: item.tensor for item in stored}, digest_of(hashes))


def differences(live: Manifest, new: Manifest) -> str:
    """Say why a model loaded from `live` cannot take `new`; empty when it can."""
    for name in sorted(live.tensors.keys() | new.tensors.keys()):
        ours, theirs = live.tensors.get(name), new.tensors.get(name)
        if theirs is None:
            return f"lacks tensor {name}"
        if ours is None:
            return f"has a tensor {name} that the model lacks"
        if ours.shape != theirs.shape:
            return f"tensor {name} has shape {list(theirs.shape)}, the model's has {list(ours.shape)}"
        if ours.dtype != theirs.dtype:
            return f"tensor {name} has type {theirs.dtype}, the model's has {ours.dtype}"
    return ""


def _in(file: Path) -> Iterator[_Stored]:
    """Yield what a file holds: 8 bytes of length, a JSON header, data (the safetensors format)."""
    with file.open("rb") as opened:
        (length,) = struct.unpack("<Q", opened.read(8))
        header = json.loads(opened.read(length))
    for name, entry in header.items():
        if name != "__metadata__":
            first, end = entry["data_offsets"]
            tensor = Tensor(entry["dtype"], tuple(entry["shape"]))
            yield _Stored(name, tensor, file, 8 + length + first, end - first)


def _hash(stored: _Stored) -> bytes:
    tensor = stored.tensor
    known = tensor_hash(stored.name, tensor.dtype, tensor.shape)
    left = stored.size
    with stored.file.open("rb") as opened:
        opened.seek(stored.start)
        while left > 0:
            data = opened.read(min(left, _READ_BYTES))
            if not data:
                raise ValueError(f"{stored.file.name} ends within tensor {stored.name}")
            known.update(data)
            left -= len(data)
    return known.digest()
