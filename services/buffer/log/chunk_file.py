"""The file format of kept chunks: records that are appended, and read back up to the first damaged one.

A file belongs to one rollout. Its first record names the rollout; the others open a group, append a chunk to
one of its responses, or remove the group.

Invariants (tests/unit/test_kept_chunks.py):
- what is read is what was written: reading stops at the first record that is damaged or incomplete, as after
  the writer was killed;
- a group that is opened again has nothing of what was written before.
"""

from __future__ import annotations

import hashlib
import mmap
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from seer.common import wire
from seer.common.errors import NOT_DECODED
from seer.services.buffer.requests.events import Kept, KeptResponse

Finish = tuple[str, str]
"""Finish reason and stop reason of a response, empty if it goes on."""

Outputs = Mapping[int, tuple[wire.Tokens, wire.Logprobs, Finish]]
"""Tokens, logprobs and end by the index of their response."""

_NO_TOKENS = np.empty(0, np.int32)
_PREFIX = struct.Struct("<III")
"""Bytes of a record's head, number of tokens that follow it, CRC-32 of both."""


class RolloutRecord(msgspec.Struct, array_like=True, tag=0):
    """The first record of a file."""

    rollout_id: str


class GroupRecord(msgspec.Struct, array_like=True, tag=1):
    """A group begins, or begins again if the file has it already.

    `params_digest` is `ids.params_digest` of its submission, `prompt` a digest of the prompt's tokens;
    `version` and `digest` are those of the weights that generate the group.
    """

    prompt_id: str
    params_digest: int
    prompt: bytes
    version: int
    digest: str


class ChunkRecord(msgspec.Struct, array_like=True, tag=2):
    """A chunk of one response. Its tokens follow, 4 bytes each, then their logprobs, 4 bytes each."""

    prompt_id: str
    index: int
    finish: str
    stop_reason: str


class RemovedRecord(msgspec.Struct, array_like=True, tag=3):
    """A group is no longer needed: its trainer received it or cancelled it."""

    prompt_id: str


_Head = RolloutRecord | GroupRecord | ChunkRecord | RemovedRecord

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Head)


@dataclass(slots=True)
class SavedGroup:
    """A group in a file. By response index: where its chunks are (offset, tokens), and how it finished."""

    record: GroupRecord
    chunks: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    finishes: dict[int, Finish] = field(default_factory=dict)

    def kept(self) -> Kept:
        """Return how many tokens of each response are in the file, and how those that finished did."""
        responses = [
            KeptResponse(index, sum(count for _, count in chunks), *self.finishes.get(index, ("", "")))
            for index, chunks in sorted(self.chunks.items())
        ]
        return Kept(self.record.version, self.record.digest, responses)


def read_groups(path: Path) -> tuple[str, dict[str, SavedGroup], int]:
    """Return a file's rollout id (empty: none), its groups by prompt id, and the offset at which it ends.

    The offset is smaller than the file if a record there is damaged or incomplete. Raises `OSError`.
    """
    rollout_id, end = "", 0
    groups: dict[str, SavedGroup] = {}
    for record, offset, count, after in _records(path):
        end = after
        match record:
            case RolloutRecord():
                rollout_id = record.rollout_id
            case GroupRecord():
                groups[record.prompt_id] = SavedGroup(record)
            case ChunkRecord(prompt_id, index) if (group := groups.get(prompt_id)) is not None:
                group.chunks.setdefault(index, []).append((offset, count))
                if record.finish:
                    group.finishes[index] = (record.finish, record.stop_reason)
            case RemovedRecord():
                groups.pop(record.prompt_id, None)
    return rollout_id, groups, end


def read_outputs(path: Path, group: SavedGroup) -> Outputs:
    """Return the outputs of a group's responses. Raises `OSError`, or `ValueError` for a file cut short."""
    with path.open("rb") as data, mmap.mmap(data.fileno(), 0, access=mmap.ACCESS_READ) as view:
        return {
            index: (*_arrays(view, chunks), group.finishes.get(index, ("", "")))
            for index, chunks in group.chunks.items()
        }


def prompt_digest(prompt: wire.Tokens) -> bytes:
    """Return the digest that stands for a prompt in a `GroupRecord`."""
    return hashlib.blake2b(np.ascontiguousarray(prompt, np.int32).tobytes(), digest_size=16).digest()


def encode_record(
    head: _Head,
    tokens: wire.Tokens = _NO_TOKENS,
    logprobs: wire.Tokens | wire.Logprobs = _NO_TOKENS,
) -> bytes:
    """Return a record's bytes; `tokens` and `logprobs` have the same length."""
    text = _encoder.encode(head)
    data = tokens.astype("<i4").tobytes() + logprobs.astype("<f4").tobytes()
    crc = zlib.crc32(data, zlib.crc32(text))
    return _PREFIX.pack(len(text), len(data) // 8, crc) + text + data


def _records(path: Path) -> Iterator[tuple[_Head, int, int, int]]:
    """Yield each valid record: its head, the offset of its tokens, their number, and where it ends."""
    if path.stat().st_size == 0:
        return
    with path.open("rb") as data, mmap.mmap(data.fileno(), 0, access=mmap.ACCESS_READ) as view:
        at = 0
        while at + _PREFIX.size <= len(view):
            size, count, crc = _PREFIX.unpack_from(view, at)
            head, end = at + _PREFIX.size, at + _PREFIX.size + size + 8 * count
            if end > len(view):
                return
            with memoryview(view) as whole, whole[head:end] as part:
                if zlib.crc32(part) != crc:
                    return
                try:
                    record = _decoder.decode(part[:size])
                except NOT_DECODED:
                    return
            yield record, head + size, count, end
            at = end


def _arrays(view: mmap.mmap, chunks: list[tuple[int, int]]) -> tuple[wire.Tokens, wire.Logprobs]:
    tokens = [np.frombuffer(view[at : at + 4 * count], "<i4") for at, count in chunks]
    logprobs = [np.frombuffer(view[at + 4 * count : at + 8 * count], "<f4") for at, count in chunks]
    return np.concatenate(tokens).astype(np.int32), np.concatenate(logprobs).astype(np.float32)
