"""The tensors in a folder's safetensors files, from their headers. Files are untrusted.

Invariants (tests/unit/test_weights.py):
- only regular files are opened: a FIFO would block its reader for ever;
- a header must be consistent: tensors follow each other without gaps up to the end of the file, and each is
  as long as its type and shape require;
- memory is bounded: `MAX_HEADER_BYTES` and `MAX_TENSORS` are bounds for the whole folder;
- any error is a `ValueError` that names the file, or an `OSError`, and quotes nothing of a file that is no
  safetensors file: a link may lead to any file of the reader's.
"""

from __future__ import annotations

import math
import os
import stat
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, BinaryIO

import msgspec

from seer.common.errors import NOT_DECODED

PATTERN = "*.safetensors"

MAX_HEADER_BYTES = 100_000_000
"""The safetensors format's own bound for one file."""

MAX_TENSORS = 1_000_000
"""The largest models have a tenth of that."""

_MAX_FILES = 10_000
_MAX_INDEX_BYTES = MAX_HEADER_BYTES
_INDEX = "model.safetensors.index.json"
BITS = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
    "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64, "C64": 64,
}  # fmt: skip
"""Bits of an element by type."""

_Size = Annotated[int, msgspec.Meta(ge=0)]


class _Entry(msgspec.Struct):
    dtype: Annotated[str, msgspec.Meta(max_length=32)]
    shape: Annotated[list[_Size], msgspec.Meta(max_length=64)]
    data_offsets: tuple[_Size, _Size]


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a file: `size` bytes from `start` on; `dtype` as safetensors has it, e.g. `BF16`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    size: int


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading, following links. Raises `ValueError` if it is not a regular file."""
    opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(opened).st_mode):
        os.close(opened)
        raise ValueError(f"holds {path.name}, which is not a regular file")
    return os.fdopen(opened, "rb")


def stamps(folder: Path) -> tuple[tuple[object, ...], ...]:
    """Return a fingerprint that changes when a folder's files do; empty if they cannot be read."""
    try:
        found = [(path.name, path.stat()) for path in sorted(folder.glob(PATTERN))]
    except OSError:
        return ()
    return tuple((name, it.st_dev, it.st_ino, it.st_size, it.st_mtime_ns) for name, it in found)


def stored(folder: Path) -> list[Stored]:
    """Return every tensor of a folder, reading headers only. Raises `ValueError` or `OSError`."""
    files = {path.name: path for path in folder.glob(PATTERN)}
    if not files:
        raise ValueError(f"has no weights ({PATTERN})")
    if len(files) > _MAX_FILES:
        raise ValueError(f"has {len(files)} files, more than {_MAX_FILES}")
    if missing := sorted(_listed(folder / _INDEX) - files.keys()):
        raise ValueError(f"lacks {missing[0]}, which {_INDEX} lists")
    found: list[Stored] = []
    left = MAX_HEADER_BYTES
    for name, path in sorted(files.items()):
        try:
            length, tensors = header(path, left)
        except (*NOT_DECODED, struct.error) as error:
            raise ValueError(f"holds a truncated or damaged {name}: {error}") from error
        left -= length
        found += tensors
        if len(found) > MAX_TENSORS:
            raise ValueError(f"has more than {MAX_TENSORS} tensors, up to {name}")
    return found


def metadata(path: Path) -> dict[str, str]:
    """Return the texts in a file's header, if it has any. Raises `ValueError` or `OSError`."""
    with open_regular(path) as opened:
        head = opened.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        text = opened.read(min(length, MAX_HEADER_BYTES))
    try:
        entries = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        return msgspec.json.decode(entries.get("__metadata__", b"{}"), type=dict[str, str])
    except NOT_DECODED:
        return {}


def _listed(index: Path) -> set[str]:
    """Return the files in a sharded model's index; none if it has no (valid) index."""
    try:
        with open_regular(index) as opened:
            text = opened.read(_MAX_INDEX_BYTES + 1)
    except FileNotFoundError:
        return set()
    if len(text) > _MAX_INDEX_BYTES:
        raise ValueError(f"holds an {index.name} of more than {_MAX_INDEX_BYTES} bytes")
    try:
        shards = msgspec.json.decode(text, type=dict[str, msgspec.Raw])["weight_map"]
        return set(msgspec.json.decode(shards, type=dict[str, str]).values())
    except (*NOT_DECODED, LookupError):
        return set()


def header(path: Path, most: int = MAX_HEADER_BYTES) -> tuple[int, list[Stored]]:
    """Return a header's length and its tensors: 8 bytes of length, JSON, data."""
    with open_regular(path) as opened:
        whole = os.fstat(opened.fileno()).st_size
        (length,) = struct.unpack("<Q", opened.read(8))
        if length > min(most, whole - 8):
            raise ValueError(f"holds a truncated or damaged {path.name}: its header has no room")
        text = opened.read(length)
    entries = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    if len(entries) > MAX_TENSORS:
        raise ValueError(f"holds {path.name}, which has more than {MAX_TENSORS} tensors")
    entries.pop("__metadata__", None)
    found = [(name, msgspec.json.decode(entry, type=_Entry)) for name, entry in entries.items()]
    end = 0
    for name, entry in sorted(found, key=lambda each: each[1].data_offsets):
        first, last = entry.data_offsets
        bits = BITS.get(entry.dtype)
        if first != end or last < first or (bits and bits * math.prod(entry.shape) != 8 * (last - first)):
            raise ValueError(
                f"holds a truncated or damaged {path.name}: {name[:80]!r} is not at {first} to {last}"
            )
        end = last
    if whole != 8 + length + end:
        raise ValueError(
            f"holds a truncated or damaged {path.name}: it has {whole} bytes, not {8 + length + end}"
        )
    return length, [
        Stored(
            name,
            entry.dtype,
            tuple(entry.shape),
            path,
            8 + length + entry.data_offsets[0],
            entry.data_offsets[1] - entry.data_offsets[0],
        )
        for name, entry in found
    ]
