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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import msgspec
import numpy as np
from isal import isal_zlib

from seer.common import wire
from seer.common.errors import NOT_DECODED
from seer.services.buffer.requests.events import Kept, KeptResponse

Finish = tuple[str, str]
"""Finish reason and stop reason of a response, empty if it goes on."""


class Output(NamedTuple):
    """A response so far, or a chunk of one; `beside`: what comes beside its tokens, by kind."""

    tokens: wire.Tokens
    logprobs: wire.Logprobs
    finish: Finish
    beside: Mapping[str, wire.Bytes] = MappingProxyType({})


Outputs = Mapping[int, Output]
"""By the index of their response."""

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
    """A group is no longer needed: the trainer received or cancelled the group."""

    prompt_id: str


class BesideRecord(msgspec.Struct, array_like=True, tag=4):
    """What comes beside the tokens of the chunk of the next record; follows, padded to 8 bytes."""

    sizes: wire.Sizes


_Head = RolloutRecord | GroupRecord | ChunkRecord | RemovedRecord | BesideRecord

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Head)


class _Chunk(NamedTuple):
    """Where a chunk's `tokens` begin, and what is `beside` them, of these sizes."""

    offset: int
    tokens: int
    beside: int
    sizes: wire.Sizes


@dataclass(slots=True)
class SavedGroup:
    """A group in a file. By response index: its chunks, and how it finished."""

    record: GroupRecord
    chunks: dict[int, list[_Chunk]] = field(default_factory=dict)
    finishes: dict[int, Finish] = field(default_factory=dict)

    def kept(self) -> Kept:
        """Return how many tokens of each response are in the file, and how those that finished did."""
        responses = [
            KeptResponse(index, sum(chunk.tokens for chunk in chunks), *self.finishes.get(index, ("", "")))
            for index, chunks in sorted(self.chunks.items())
        ]
        return Kept(self.record.version, self.record.digest, responses)


def read_groups(path: Path) -> tuple[str, dict[str, SavedGroup], int]:
    """Return a file's rollout id (empty: none), its groups by prompt id, and the offset at which it ends.

    The offset is smaller than the file if a record there is damaged or incomplete. Raises `OSError`.
    """
    rollout_id, end = "", 0
    groups: dict[str, SavedGroup] = {}
    beside, sizes = 0, dict[str, int]()
    for record, offset, count, after in _records(path):
        if isinstance(record, BesideRecord):  # it counts with the chunk's own record, else as damaged
            if sum(record.sizes.values()) > 8 * count:
                break
            beside, sizes = offset, record.sizes
            continue
        end = after
        match record:
            case RolloutRecord():
                rollout_id = record.rollout_id
            case GroupRecord():
                groups[record.prompt_id] = SavedGroup(record)
            case ChunkRecord(prompt_id, index) if (group := groups.get(prompt_id)) is not None:
                group.chunks.setdefault(index, []).append(_Chunk(offset, count, beside, sizes))
                if record.finish:
                    group.finishes[index] = (record.finish, record.stop_reason)
            case RemovedRecord():
                groups.pop(record.prompt_id, None)
        sizes = {}
    return rollout_id, groups, end


def read_outputs(path: Path, group: SavedGroup) -> Outputs:
    """Return the outputs of a group's responses. Raises `OSError`, or `ValueError` for a file cut short."""
    with path.open("rb") as data, mmap.mmap(data.fileno(), 0, access=mmap.ACCESS_READ) as view:
        return {
            index: _output(view, chunks, group.finishes.get(index, ("", "")))
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
    return _encode(head, tokens.astype("<i4").tobytes() + logprobs.astype("<f4").tobytes())


def _encode(head: _Head, data: bytes) -> bytes:
    text, data = _encoder.encode(head), data + bytes(-len(data) % 8)
    crc = isal_zlib.crc32(data, isal_zlib.crc32(text))
    return _PREFIX.pack(len(text), len(data) // 8, crc) + text + data


def chunk_records(prompt_id: str, index: int, chunk: Output) -> list[bytes]:
    """Return the records of a chunk, or of all that a response has."""
    record = encode_record(ChunkRecord(prompt_id, index, *chunk.finish), chunk.tokens, chunk.logprobs)
    if not chunk.beside:
        return [record]
    sizes = {kind: len(data) for kind, data in chunk.beside.items()}
    return [_encode(BesideRecord(sizes), b"".join(data.data for data in chunk.beside.values())), record]


def _records(path: Path) -> Iterator[tuple[_Head, int, int, int]]:
    """Yield each valid record: head, offset of its tokens, number of tokens, offset of the record's end."""
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
                if isal_zlib.crc32(part) != crc:
                    return
                try:
                    record = _decoder.decode(part[:size])
                except NOT_DECODED:
                    return
            yield record, head + size, count, end
            at = end


def _output(view: mmap.mmap, chunks: list[_Chunk], finish: Finish) -> Output:
    tokens = [np.frombuffer(view[at : at + 4 * count], "<i4") for at, count, *_ in chunks]
    logprobs = [np.frombuffer(view[at + 4 * count : at + 8 * count], "<f4") for at, count, *_ in chunks]
    beside: dict[str, bytes] = {}
    for _, _, at, sizes in chunks:
        for kind, size in sizes.items():
            beside[kind] = beside.get(kind, b"") + view[at : at + size]
            at += size
    arrays = np.concatenate(tokens).astype(np.int32), np.concatenate(logprobs).astype(np.float32)
    return Output(*arrays, finish, {kind: np.frombuffer(data, np.uint8) for kind, data in beside.items()})
