"""Digests of weights, and a check that a model folder is complete.

Invariants:
- a digest depends only on the tensors' names, types, shapes and bytes;
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

from seer.common.weights.finite import is_finite
from seer.common.weights.safetensors import Stored, open_regular, stamps, stored

_READ_BYTES = 2**22


class NotFinite(ValueError):  # noqa: N818 - reads as what it says at the call site
    """A tensor has values that are not finite."""

    def __init__(self, name: str) -> None:
        super().__init__(f"tensor {name} has values that are not finite")


def tensor_hash(name: str, dtype: str, shape: Sequence[int]) -> hashlib.blake2b:
    """Return a tensor's hash, to be updated with its bytes. `dtype` as in safetensors, e.g. `BF16`."""
    return hashlib.blake2b(json.dumps([name, dtype, list(shape)]).encode())


def digest_of(hashes: Mapping[str, bytes]) -> str:
    """Return a model's digest (32 hex characters) from its tensors' hashes by name."""
    whole = hashlib.blake2b(digest_size=16)
    for name in sorted(hashes):
        whole.update(hashes[name])
    return whole.hexdigest()


def hashes_of(
    tensors: Sequence[Stored],
    stop: Callable[[], bool] = lambda: False,
    *,
    finite: bool = False,
    known: Mapping[str, bytes] = MappingProxyType({}),
) -> dict[str, bytes]:
    """Return the hashes of tensors in files by name; reads every byte, until `stop()` is true.

    `finite`: all numbers must be. `known`: hashes of tensors that need not be read. Raises `ValueError` or
    `OSError`.
    """
    with ThreadPoolExecutor() as pool:  # hashlib and numpy release the GIL
        found = pool.map(lambda each: known.get(each.name) or _hash(each, stop, finite), tensors)
        return dict(zip((each.name for each in tensors), found, strict=True))


def digest_of_folder(folder: Path) -> str:
    """Return the digest of a model folder. An unchanged folder is read once.

    Raises `ValueError` or `OSError`.
    """
    return _digest_of_files(folder, stamps(folder))


@functools.lru_cache(maxsize=4)
def _digest_of_files(folder: Path, _stamps: tuple[object, ...]) -> str:
    return digest_of(hashes_of(stored(folder)))


def problem_of(folder: Path) -> str:
    """Return what is wrong with a folder's weights, with the file's name; empty when nothing is."""
    try:
        stored(folder)
    except OSError as error:
        return f"cannot be read: {error}"
    except ValueError as error:
        return str(error)
    return ""


def _hash(tensor: Stored, stop: Callable[[], bool], finite: bool) -> bytes:
    known = tensor_hash(tensor.name, tensor.dtype, tensor.shape)
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
