"""What trainers, buffer and engines agree on about weights: digests, and whether a folder is whole.

Invariants:
- a digest follows from the tensors' names, types, shapes and bytes alone;
- what `problem_of` refuses, from file names and headers alone, could not be loaded; the rest is for
  the loader to judge.
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
"""A stream of weights in the buffer's spool; whoever sees that folder may read it there."""

SPOOL_NOTES = "stream.json"
"""Beside it: its size, and the token that tells a reader that it is that very folder."""


def tensor_hash(name: str, dtype: str, shape: Sequence[int]) -> hashlib.blake2b:
    """Begin a tensor's hash; its bytes follow. `dtype` as safetensors has it."""
    return hashlib.blake2b(json.dumps([name, dtype, list(shape)]).encode())


def digest_of(hashes: Mapping[str, bytes]) -> str:
    """Return a model's digest (32 hex characters) from its tensors' hashes by name."""
    whole = hashlib.blake2b(digest_size=16)
    for name in sorted(hashes):
        whole.update(hashes[name])
    return whole.hexdigest()


def checksum(data: Bytes) -> int:
    """Return what goes with a part of a stream: its CRC-32."""
    return zlib.crc32(data.data)


def write_part(file: Path, part: SpoolData) -> bool:
    """Write a part of a stream at its place in a file that is there, unless it is damaged.

    Opens the file for each part: who calls this on a thread may stop waiting for it. Raises `OSError`.
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
    """Say what is wrong with the weights, naming the file; empty when nothing is."""
    try:
        stored(folder)
    except OSError as error:
        return f"cannot be read: {error}"
    except ValueError as error:
        return str(error)
    return ""
