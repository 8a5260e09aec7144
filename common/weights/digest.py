"""Digests of weights, the format of streams of weights, and a check that a model folder is complete.

Invariants:
- a digest depends only on the tensors' names, types, shapes and bytes;
- `problem_of` reads file names and headers only: what it rejects could not be loaded, and what it does not
  reject may still fail to load.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from seer.common.weights.finite import is_finite
from seer.common.weights.safetensors import Stored, open_regular, stamps, stored
from seer.common.wire import Bytes, SpoolData

SPOOL_FILE = "model.safetensors"
"""File of a stream of weights in the buffer's spool; who can read that folder may read it there."""

SPOOL_NOTES = "stream.json"
"""File beside it: its size, and a token by which a reader knows that it sees the same folder."""

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
    tensors: Sequence[Stored], stop: Callable[[], bool] = lambda: False, *, finite: bool = False
) -> dict[str, bytes]:
    """Return the hashes of tensors in files by name; reads every byte, until `stop()` is true.

    `finite`: all numbers must be. Raises `ValueError` or `OSError`.
    """
    with ThreadPoolExecutor() as pool:  # hashlib and numpy release the GIL
        found = pool.map(lambda each: _hash(each, stop, finite), tensors)
        return dict(zip((each.name for each in tensors), found, strict=True))


def digest_of_folder(folder: Path) -> str:
    """Return the digest of a model folder. An unchanged folder is read once.

    Raises `ValueError` or `OSError`.
    """
    return _digest_of_files(folder, stamps(folder))


@functools.lru_cache(maxsize=4)
def _digest_of_files(folder: Path, _stamps: tuple[object, ...]) -> str:
    return digest_of(hashes_of(stored(folder)))


def checksum(data: Bytes) -> int:
    """Return the CRC-32 of a part of a stream."""
    return zlib.crc32(data.data)


def write_part(file: Path, part: SpoolData) -> bool:
    """Write a part of a stream into an existing file, at its offset; False if its checksum is wrong.

    Opens the file for each part, so that a caller may abandon the thread that this runs on. Raises `OSError`.
    """
    if checksum(part.data) != part.checksum:
        return False
    opened = os.open(file, os.O_WRONLY | os.O_CLOEXEC)
    try:
        left, offset = part.data.data, part.offset
        while left:
            written = os.pwrite(opened, left, offset)
            left, offset = left[written:], offset + written
    finally:
        os.close(opened)
    return True


def read_part(file: Path, offset: int, length: int) -> tuple[Bytes, int]:
    """Return `length` bytes of a stream's file from `offset` on, and their checksum. Raises `OSError`."""
    opened = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        data = os.pread(opened, length, offset)
    finally:
        os.close(opened)
    if len(data) < length:
        raise OSError(f"{file.name} is shorter than its stream")
    part = np.frombuffer(data, dtype=np.uint8)
    return part, checksum(part)


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
