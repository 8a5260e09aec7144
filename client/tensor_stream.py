"""A trainer's tensors as one stream of bytes in the safetensors format, generated as it is read.

Invariants:
- extra memory is one part of the stream, and for tensors on a device a copy of one tensor;
- a tensor that shares its memory with an earlier one (tied embeddings) is left out, as in checkpoints;
- the digest is the one that engines compute from these bytes: names, types, shapes and contents;
- torch is imported for torch tensors only. Tensors must not change while they are read.
"""

from __future__ import annotations

import bisect
import itertools
import json
import struct
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np

from seer.common.errors import InvalidField
from seer.common.weights.digest import BLAKE3, digest_of, tensor_hash
from seer.common.wire import Bytes

_TYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
    "uint64": "U64", "uint32": "U32", "uint16": "U16",
}  # fmt: skip
"""Names of types in numpy and torch, and in safetensors."""


T = TypeVar("T")

Tensor = Any
"""A numpy array or a torch tensor."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor with its name; `dtype` as in safetensors, `size` in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    size: int
    tensor: Tensor


class TensorStream:
    """`tensors`: numpy arrays or torch tensors, with the names of the model folder's tensors.

    `metadata`: texts for the stream's header, which the digest leaves out. `owners`: by name, which rank has
    a tensor's values, where not all are here.
    Raises `InvalidField` for values that cannot be stored in a safetensors file.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor] | list[Entry],
        metadata: Mapping[str, str] | None = None,
        owners: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        entries = tensors if isinstance(tensors, list) else entries_of(tensors)
        # Widest types first, so that every tensor is aligned, as readers of the format expect.
        entries.sort(key=lambda each: (-each.tensor.dtype.itemsize, owners.get(each.name, 0), each.name))
        ends = [0, *itertools.accumulate(entry.size for entry in entries)]
        described: dict[str, object] = {
            entry.name: {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": offsets}
            for entry, offsets in zip(entries, itertools.pairwise(ends), strict=True)
        }
        if metadata:
            described["__metadata__"] = dict(metadata)
        text = json.dumps(described).encode()
        text += b" " * (-len(text) % 8)
        self.head = np.frombuffer(struct.pack("<Q", len(text)) + text, dtype=np.uint8)
        self.entries = entries
        self._starts = [len(self.head) + start for start in ends[:-1]]
        self._last: tuple[int, Bytes] = (-1, self.head)
        self.size = len(self.head) + ends[-1]
        self.owners = {entry.name: owners.get(entry.name, 0) for entry in entries}

    def ranges(self) -> list[tuple[int, int, int]]:
        """Return what each rank sends: rank, first byte, and the one behind the last; by first byte."""
        found: list[tuple[int, int, int]] = []
        for start, entry in zip(self._starts, self.entries, strict=True):
            owner, begin = self.owners[entry.name], 0
            if found and (begin := start) and found[-1][0] == owner:
                begin = found.pop()[1]
            found.append((owner, begin, start + entry.size))
        return [each for each in found if each[1] < each[2]]

    def digest(self, tag: str = BLAKE3) -> str:
        """Return the digest of all tensors, which are all here; reads every byte."""
        return digest_of(self.each(lambda entry, data: hash_of(entry, data, tag)), tag)

    def own(self, rank: int = 0) -> list[Entry]:
        """Return a rank's tensors, in their order here."""
        return [entry for entry in self.entries if self.owners[entry.name] == rank]

    def each(self, work: Callable[[Entry, Bytes], T], rank: int = 0) -> dict[str, T]:
        """Return by name what `work` returns for each tensor of a rank and its bytes; in threads."""
        own = self.own(rank)
        with ThreadPoolExecutor() as pool:  # hashes and numpy release the GIL
            found = pool.map(lambda entry: work(entry, bytes_of(entry.tensor)), own)
            return dict(zip((entry.name for entry in own), found, strict=True))

    def read(self, offset: int, length: int) -> Bytes:
        """Return bytes [offset, offset + length): a view where they are of one tensor on the CPU."""
        parts = []
        end = min(self.size, offset + length)
        while offset < end:
            index = bisect.bisect_right(self._starts, offset) - 1
            data, start = (self.head, 0) if index < 0 else (self._data(index), self._starts[index])
            part = data[offset - start : end - start]
            parts.append(part)
            offset += len(part)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _data(self, index: int) -> Bytes:
        last = self._last  # another thread may read another tensor
        if last[0] != index:
            self._last = last = (index, bytes_of(self.entries[index].tensor))
        return last[1]


def hash_of(entry: Entry, data: Bytes, tag: str) -> bytes:
    """Return the hash of a tensor, with its bytes."""
    known = tensor_hash(entry.name, entry.dtype, entry.shape, tag)
    known.update(data.data)
    return known.digest()


def entries_of(tensors: Mapping[str, Tensor]) -> list[Entry]:
    """Return tensors in their order, tied ones once. Raises `InvalidField`."""
    entries = [entry_of(name, tensor) for name, tensor in _untied(tensors).items()]
    if not entries:
        raise InvalidField("source", dict(tensors), "give at least one tensor, by name")
    return entries


def entry_of(name: str, tensor: Tensor) -> Entry:
    """Return a tensor by its name. Raises `InvalidField`."""
    try:
        dtype = _TYPES[str(tensor.dtype).removeprefix("torch.")]
        shape, size = tuple(int(length) for length in tensor.shape), int(tensor.nbytes)
    except (AttributeError, KeyError) as error:
        kind = f"{type(tensor).__name__} {getattr(tensor, 'dtype', '')}"
        fix = f"give numpy arrays or torch tensors of {', '.join(_TYPES)}"
        raise InvalidField(f"source[{name!r}]", kind, fix) from error
    return Entry(name, dtype, shape, size, tensor)


def _untied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    seen: set[object] = set()
    kept: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if not isinstance(name, str):
            raise InvalidField("source", name, "name every tensor by a string")
        if problem := _problem(tensor):
            raise InvalidField(f"source[{name!r}]", type(tensor).__name__, problem)
        place: object = id(tensor)
        if hasattr(tensor, "data_ptr") and tensor.nbytes:
            place = (str(tensor.device), tensor.data_ptr(), tuple(tensor.shape), tensor.stride())
        if place not in seen:
            kept[name] = tensor
        seen.add(place)
    return kept


def _problem(tensor: Tensor) -> str:
    """Return why a torch tensor has no bytes to send; empty: it has bytes, or is no torch tensor."""
    if hasattr(tensor, "full_tensor"):
        return "is one rank's part of a tensor: give its full_tensor(), or ShardedTensors on all ranks"
    if getattr(tensor, "is_meta", False):
        return "is on the device meta, and has no values: give the tensor that was loaded"
    if str(getattr(tensor, "layout", "torch.strided")) != "torch.strided":
        return f"has the layout {tensor.layout}: give its to_dense()"
    return ""


def bytes_of(tensor: Tensor) -> Bytes:
    """Return a tensor's bytes: a view if it is on the CPU and contiguous, else a copy."""
    if not isinstance(tensor, np.ndarray):
        import torch

        tensor = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    flat: Bytes = np.ascontiguousarray(tensor).reshape(-1).view(np.uint8)
    return flat
