"""What a prompt shows beside its tokens: images, each as tensors, named by their content.

An image's bytes are a header (its modality, and the name, type and shape of each tensor) and the tensors'
values. Only the name tells two images apart: in encoder caches, in prefix caches, and in the KV pool.

Invariants (tests/property/test_prepared_image.py):
- the name is the BLAKE2b-256 of these bytes: nobody can choose one, and other values, types, shapes or names
  of tensors make another image;
- equal content has equal bytes, in whatever order tensors are given and however they lie in memory; bytes in
  any other form are refused, as are bytes that do not match their name;
- whatever bytes arrive, `read` returns an image or raises `InvalidField`.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from seer.common.errors import NOT_DECODED, InvalidField
from seer.common.types import MAX_IMAGE_BYTES
from seer.common.wire.base import Bytes

MAX_TENSORS = 16
"""Bound on the tensors of an image; the models that can be run take two."""

MAX_DIMENSIONS = 8
"""Bound on the dimensions of a tensor."""

_TYPES = {"F32": "<f4", "I64": "<i8"}
"""Types of tensors, by their names in safetensors."""

_NAMES = {dtype: name for name, dtype in _TYPES.items()}

Tensor = npt.NDArray[np.float32] | npt.NDArray[np.int64]


class _Described(msgspec.Struct, array_like=True):
    name: str
    dtype: str
    shape: list[int]


class _Header(msgspec.Struct, array_like=True):
    modality: str
    tensors: list[_Described]


_header = msgspec.json.Decoder(_Header)


@dataclass(frozen=True, slots=True, eq=False)
class PreparedImage:
    """One image. `tensors` are views of `data`, its bytes: uint8 [size]; neither can be written."""

    name: str
    modality: str
    tensors: Mapping[str, Tensor]
    data: Bytes

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self.data)


def name_of(data: Bytes) -> str:
    """Return the name of an image of these bytes."""
    return hashlib.blake2b(data.data, digest_size=32).hexdigest()


def make(modality: str, tensors: Mapping[str, Any]) -> PreparedImage:
    """Return the image of these tensors, which are copied: numpy arrays, or torch tensors on a CPU.

    Raises `InvalidField` naming the tensor that is neither float32 nor int64, or the image that is too
    large.
    """
    arrays = {name: _array(name, tensor) for name, tensor in tensors.items()}
    described = [_Described(name, _NAMES[each.dtype.str], list(each.shape)) for name, each in arrays.items()]
    described.sort(key=_rank)
    parts = [_head(_Header(modality, described)), *(arrays[each.name].tobytes() for each in described)]
    data = np.frombuffer(b"".join(parts), np.uint8)
    return read(name_of(data), data)


def read(name: str, data: Bytes) -> PreparedImage:
    """Return the image that these bytes are, checked against its name. Raises `InvalidField`."""
    if not 8 < len(data) <= MAX_IMAGE_BYTES:
        raise InvalidField("image", f"{len(data)} bytes", f"give up to {MAX_IMAGE_BYTES} bytes")
    if name_of(data) != name:
        raise InvalidField("image", name, "is not the name of these bytes: send them again")
    (length,) = struct.unpack("<Q", data[:8].tobytes())
    try:
        header = _header.decode(data[8 : 8 + length].tobytes() if length < len(data) else b"")
    except NOT_DECODED as error:
        raise InvalidField("image", name, f"has no header: {error}") from error
    _check(name, header)
    if data[: 8 + length].tobytes() != _head(header):
        raise InvalidField("image", name, "has a header in another form: use `client.prepared_image`")
    data = data.view()
    data.flags.writeable = False
    return PreparedImage(name, header.modality, _views(name, header, data, 8 + length), data)


def _array(name: str, tensor: object) -> npt.NDArray[Any]:
    try:
        array = np.asarray(tensor)
    except (TypeError, ValueError, RuntimeError) as error:  # torch's for other devices, and for bfloat16
        raise InvalidField(name, type(tensor).__name__, f"give a float32 or int64 array: {error}") from error
    if array.dtype.newbyteorder("<").str not in _NAMES:
        raise InvalidField(name, str(array.dtype), "give float32 or int64 values")
    return array.astype(array.dtype.newbyteorder("<"), copy=False)


def _rank(each: _Described) -> tuple[bool, str]:
    """Return what tensors are sorted by: the widest type first, so that every value is aligned, then name."""
    return each.dtype != "I64", each.name


def _head(header: _Header) -> bytes:
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _check(name: str, header: _Header) -> None:
    """Raise `InvalidField` for a header that no image has, whatever its bytes."""
    known = {
        each.name
        for each in header.tensors
        if each.dtype in _TYPES
        and len(each.shape) <= MAX_DIMENSIONS
        and min(each.shape, default=0) >= 0
        and math.prod(length or 1 for length in each.shape) <= MAX_IMAGE_BYTES  # numpy has a bound, too
    }
    if len(known) != len(header.tensors) or not 1 <= len(known) <= MAX_TENSORS:
        fix = f"describe 1 to {MAX_TENSORS} tensors of float32 or int64, each once"
        raise InvalidField("image", name, fix)
    if header.tensors != sorted(header.tensors, key=_rank):
        raise InvalidField("image", name, "has its tensors in another order")


def _views(name: str, header: _Header, data: Bytes, start: int) -> dict[str, Tensor]:
    """Return the tensors, which take all bytes from `start` on. Raises `InvalidField`."""
    tensors: dict[str, Tensor] = {}
    for each in header.tensors:
        dtype = np.dtype(_TYPES[each.dtype])
        end = start + math.prod(each.shape) * dtype.itemsize
        if end > len(data):
            break
        tensors[each.name] = data[start:end].view(dtype).reshape(each.shape)
        start = end
    if len(tensors) < len(header.tensors) or start != len(data):
        raise InvalidField("image", name, "has another number of bytes than its tensors")
    return tensors
