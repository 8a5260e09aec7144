"""Digests of weights, the format of streams of weights, and a check that a model folder is complete.

Invariants:
- a digest depends only on the tensors' names, types, shapes and bytes;
- `problem_of` reads file names and headers only: what it rejects could not be loaded, and what it does not
  reject may still fail to load.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from seer.common.weights.safetensors import stored
from seer.common.wire import Bytes, SpoolData

SPOOL_FILE = "model.safetensors"
"""File of a stream of weights in the buffer's spool; who can read that folder may read it there."""

SPOOL_NOTES = "stream.json"
"""File beside it: its size, and a token by which a reader knows that it sees the same folder."""


def tensor_hash(name: str, dtype: str, shape: Sequence[int]) -> hashlib.blake2b:
    """Return a tensor's hash, to be updated with its bytes. `dtype` as in safetensors, e.g. `BF16`."""
    return hashlib.blake2b(json.dumps([name, dtype, list(shape)]).encode())


def digest_of(hashes: Mapping[str, bytes]) -> str:
    """Return a model's digest (32 hex characters) from its tensors' hashes by name."""
    whole = hashlib.blake2b(digest_size=16)
    for name in sorted(hashes):
        whole.update(hashes[name])
    return whole.hexdigest()


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


def problem_of(folder: Path) -> str:
    """Return what is wrong with a folder's weights, with the file's name; empty when nothing is."""
    try:
        stored(folder)
    except OSError as error:
        return f"cannot be read: {error}"
    except ValueError as error:
        return str(error)
    return ""
