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
import struct
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from seer.common.wire.messages import Bytes, SpoolData

SPOOL_FILE = "model.safetensors"
"""A stream of weights in the buffer's spool; whoever sees that folder may read it there."""

SPOOL_NOTES = "stream.json"
"""Beside it: its size, and the token that tells a reader that it is that very folder."""

_INDEX = "model.safetensors.index.json"
_PATTERNS = ("*.safetensors", "*.bin", "*.pt")
_MAX_HEADER_BYTES = 100_000_000
"""Bound that the safetensors format sets itself."""


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


def write_part(opened: int, part: SpoolData) -> bool:
    """Write a part of a stream at its place in an open file, unless it is damaged. Raises `OSError`."""
    if checksum(part.data) != part.checksum:
        return False
    left, offset = part.data.data, part.offset
    while left:
        written = os.pwrite(opened, left, offset)
        left, offset = left[written:], offset + written
    return True


def problem_of(folder: Path) -> str:
    """Say what is wrong with the weights, naming the file; empty when nothing is."""
    try:
        files = {path.name: path for pattern in _PATTERNS for path in folder.glob(pattern)}
        if not files:
            return f"has no weights ({', '.join(_PATTERNS)})"
        missing = sorted(_listed(folder / _INDEX) - files.keys())
        if missing:
            return f"lacks {missing[0]}, which {_INDEX} lists"
        for name, path in sorted(files.items()):
            if name.endswith(".safetensors") and not _whole(path):
                return f"holds a truncated or damaged {name}"
    except OSError as error:
        return f"cannot be read: {error}"
    return ""


def _listed(index: Path) -> set[str]:
    """Return the files that a sharded model consists of; none when it has no (sound) index."""
    try:
        shards = json.loads(index.read_bytes())["weight_map"].values()
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
        return set()
    return {shard for shard in shards if isinstance(shard, str)}


def _whole(path: Path) -> bool:
    """Say whether a file is as long as its header says: 8 bytes of length, JSON, data."""
    with path.open("rb") as file:
        head = file.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else _MAX_HEADER_BYTES + 1
        if length > _MAX_HEADER_BYTES:
            return False
        try:
            tensors = json.loads(file.read(length))
            end = max(
                (each["data_offsets"][1] for key, each in tensors.items() if key[:2] != "__"), default=0
            )
        except (ValueError, LookupError, TypeError, AttributeError):
            return False
        return path.stat().st_size == 8 + length + int(end)
