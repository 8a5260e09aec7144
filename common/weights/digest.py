"""Digests of weights, and a check that a model folder is complete.

A digest's tag says what it was computed by: BLAKE3, or, without a tag, BLAKE2b, which is all that releases
before protocol 3.13 know. A named digest is checked by its own tag. One that nobody named has the tag of the
live weights' digest, so all of a cluster find the same digest of the same weights; before any are live, that
of BLAKE3.

Invariants:
- a digest depends only on its tag and the tensors' names, types, shapes and bytes;
- `problem_of` reads file names and headers only: what it rejects could not be loaded, and what it does not
  reject may still fail to load.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType

from blake3 import blake3

from seer.common.weights.finite import is_finite
from seer.common.weights.safetensors import Stored, open_regular, stamps, stored

BLAKE3 = "blake3-"
"""The tag of BLAKE3; that of BLAKE2b is empty."""

_READ_BYTES = 2**22


class NotFinite(ValueError):  # noqa: N818 - reads as what it says at the call site
    """A tensor has values that are not finite."""

    def __init__(self, name: str) -> None:
        super().__init__(f"tensor {name} has values that are not finite")


def tag_of(digest: str) -> str:
    """Return the tag of a digest; of one that this release does not know: none."""
    return BLAKE3 if digest.startswith(BLAKE3) else ""


def tensor_hash(name: str, dtype: str, shape: Sequence[int], tag: str) -> hashlib.blake2b | blake3:
    """Return a tensor's hash, to be updated with its bytes. `dtype` as in safetensors, e.g. `BF16`."""
    described = json.dumps([name, dtype, list(shape)]).encode()
    return blake3(described) if tag else hashlib.blake2b(described)


def tagged(data: bytes, tag: str) -> str:
    """Return the digest of bytes: a tag and 32 hex characters."""
    return tag + (blake3(data).digest(16) if tag else hashlib.blake2b(data, digest_size=16).digest()).hex()


def digest_of(hashes: Mapping[str, bytes], tag: str) -> str:
    """Return a model's digest from its tensors' hashes by name, which are by the same tag."""
    return tagged(b"".join(hashes[name] for name in sorted(hashes)), tag)


def hashes_of(
    tensors: Sequence[Stored],
    stop: Callable[[], bool] = lambda: False,
    *,
    finite: bool = False,
    known: Mapping[str, bytes] = MappingProxyType({}),
    tag: str = BLAKE3,
) -> dict[str, bytes]:
    """Return the hashes of tensors in files by name; reads every byte, until `stop()` is true.

    `finite`: all numbers must be. `known`: hashes of tensors that need not be read. Raises `ValueError` or
    `OSError`.
    """
    with ThreadPoolExecutor() as pool:  # hashes and numpy release the GIL
        found = pool.map(lambda each: known.get(each.name) or _hash(each, stop, finite, tag), tensors)
        return dict(zip((each.name for each in tensors), found, strict=True))


def digest_of_folder(folder: Path, tag: str = BLAKE3) -> str:
    """Return the digest of a model folder. An unchanged folder is read once.

    Raises `ValueError` or `OSError`.
    """
    return _digest_of_files(folder, tag, stamps(folder))


@functools.lru_cache(maxsize=4)
def _digest_of_files(folder: Path, tag: str, _stamps: tuple[object, ...]) -> str:
    return digest_of(hashes_of(stored(folder), tag=tag), tag)


def problem_of(folder: Path) -> str:
    """Return what is wrong with a folder's weights, with the file's name; empty when nothing is."""
    try:
        stored(folder)
    except OSError as error:
        return f"cannot be read: {error}"
    except ValueError as error:
        return str(error)
    return ""


def _hash(tensor: Stored, stop: Callable[[], bool], finite: bool, tag: str) -> bytes:
    known = tensor_hash(tensor.name, tensor.dtype, tensor.shape, tag)
    left = tensor.size
    with open_regular(tensor.file) as opened:
        opened.seek(tensor.start)
        while left > 0:
            data = opened.read(min(left, _READ_BYTES))
            if not data:
                raise ValueError(f"{tensor.file.name} ends within tensor {tensor.name}")
            if stop():
                raise ValueError(f"{tensor.file.name} is not needed any more: the update was cancelled")
            if finite and not is_finite(data, tensor.dtype):
                raise NotFinite(tensor.name)
            known.update(data)
            left -= len(data)
    return known.digest()
