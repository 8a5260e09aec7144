"""Chunks that outlive the buffer: a file per rollout, read when the buffer comes back.

A response is a function of weights, prompt, sampling and key, so what a killed buffer had kept is what its
successor would make again. It goes on from there once a client submits the same prompt for the same weights.

Invariants (tests/unit/test_kept.py):
- what is restored is what was kept: damage ends a file where it is found, and so does a killed writer;
- other weights, sampling, seed, n or prompt restore nothing;
- a file goes with the last of its rollout's groups, or after `ttl_seconds` if nobody asks for it again;
- a folder is one buffer's at a time;
- a buffer never waits for the disk's surface (no fsync), nor fails with it: a full one costs time, later.
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np

from seer.common import wire
from seer.common.errors import ConfigError
from seer.common.process.log import get_logger
from seer.services.buffer.events import Weights
from seer.services.buffer.requests.events import Kept, KeptResponse

SUFFIX = ".chunks"

Outputs = dict[int, tuple[wire.Tokens, wire.Logprobs]]
"""Tokens and logprobs by the index of their response."""

_NONE = np.empty(0, np.int32)
_PREFIX = struct.Struct("<III")
"""Bytes of a record's head, tokens that follow it, CRC-32 of both."""


class _Rollout(msgspec.Struct, array_like=True, tag=0):
    rollout_id: str


class _Opened(msgspec.Struct, array_like=True, tag=1):
    """A group begins, anew if the file has it already: what it is of, and by which weights."""

    prompt_id: str
    params_digest: int
    prompt: bytes
    version: int
    digest: str


class _Chunk(msgspec.Struct, array_like=True, tag=2):
    """Tokens and logprobs follow, 4 bytes each."""

    prompt_id: str
    index: int
    finish: str
    stop_reason: str


class _Forgotten(msgspec.Struct, array_like=True, tag=3):
    """A group is no more: its trainer has it, or gave it up."""

    prompt_id: str


_Head = _Rollout | _Opened | _Chunk | _Forgotten

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Head)


@dataclass(slots=True)
class _Group:
    """What a file has of a group: per response, where its chunks lie (offset, tokens) and how it ended."""

    opened: _Opened
    chunks: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    ends: dict[int, tuple[str, str]] = field(default_factory=dict)


@dataclass(slots=True)
class _File:
    """A rollout's file. `earlier` are groups of an earlier life that nobody asked for yet; `offered` has the
    arrays of those that somebody did. `live` are this life's, of which some are `written` in the file.
    """

    path: Path
    out: BinaryIO | None = None
    earlier: dict[str, _Group] = field(default_factory=dict)
    offered: dict[str, Outputs] = field(default_factory=dict)
    live: set[str] = field(default_factory=set)
    written: set[str] = field(default_factory=set)
    waiting: list[bytes] = field(default_factory=list)
    begun: bool = False
    failed: bool = False


class KeptChunks:
    """Without a `folder` nothing is kept. Raises `ConfigError` where it cannot be taken. `now`: monotonic."""

    def __init__(self, folder: str, ttl_seconds: float, now: float) -> None:
        self._log = get_logger()
        self._folder = Path(folder) if folder else None
        self._files: dict[str, _File] = {}
        self._changed: set[str] = set()
        self._until = now + ttl_seconds
        self._lock: int | None = None
        if self._folder is not None:
            self._lock = _claimed(self._folder)
            for path in sorted(self._folder.glob(f"*{SUFFIX}")):
                self._read(path)

    # --- what an earlier life kept ---------------------------------------------------------

    def _read(self, path: Path) -> None:
        file = _File(path, begun=True)
        name, end = "", 0
        try:
            for record, offset, count, after in _records(path):
                end = after
                match record:
                    case _Rollout():
                        name = record.rollout_id
                    case _Opened():
                        file.earlier[record.prompt_id] = _Group(record)
                    case _Chunk(prompt_id, index) if (group := file.earlier.get(prompt_id)) is not None:
                        group.chunks.setdefault(index, []).append((offset, count))
                        if record.finish:
                            group.ends[index] = (record.finish, record.stop_reason)
                    case _Forgotten():
                        file.earlier.pop(record.prompt_id, None)
            if not name or not file.earlier:
                path.unlink()
                return
            if end < path.stat().st_size:
                self._log.warning("kept chunks are damaged from here on", file=str(path), offset=end)
                os.truncate(path, end)
        except OSError as error:
            self._log.warning("kept chunks cannot be read", file=str(path), error=str(error))
            return
        self._files[name] = file

    def offer(self, rollout_id: str, prompt_id: str, params_digest: int, prompt: wire.Tokens) -> Kept | None:
        """Return what an earlier life kept of a prompt that is submitted again, None if nothing of use."""
        file = self._files.get(rollout_id)
        group = file.earlier.get(prompt_id) if file is not None else None
        if file is None or group is None:
            return None
        if (group.opened.params_digest, group.opened.prompt) != (params_digest, _digest(prompt)):
            return None
        try:
            file.offered[prompt_id] = _outputs(file.path, group)
        except (OSError, ValueError) as error:
            self._log.warning("kept chunks cannot be read", file=str(file.path), error=str(error))
            return None
        responses = [
            KeptResponse(index, sum(count for _, count in chunks), *group.ends.get(index, ("", "")))
            for index, chunks in sorted(group.chunks.items())
        ]
        return Kept(group.opened.version, group.opened.digest, responses)

    def restore(self, group_id: str) -> Outputs:
        """Return by response the tokens and logprobs that were offered; the file goes on from there."""
        rollout_id, _, prompt_id = group_id.partition("/")
        file = self._files[rollout_id]
        file.earlier.pop(prompt_id, None)
        file.written.add(prompt_id)
        return file.offered.pop(prompt_id)

    # --- this life ---------------------------------------------------------------------------

    def open(self, rollout_id: str, prompt_id: str) -> None:
        """Note that a group is there: its rollout's file stays as long."""
        if self._folder is None:
            return
        if rollout_id not in self._files:
            name = hashlib.blake2b(rollout_id.encode(), digest_size=16).hexdigest()
            self._files[rollout_id] = _File(self._folder / f"{name}{SUFFIX}")
        self._files[rollout_id].live.add(prompt_id)

    def keep(
        self,
        group_id: str,
        index: int,
        tokens: wire.Tokens,
        logprobs: wire.Logprobs,
        finish: tuple[str, str],
        identity: Callable[[], tuple[int, wire.Tokens]],
        weights: Weights,
    ) -> None:
        """Note a chunk. `finish` is how its response ended and by which stop, empty if it goes on; `identity`
        returns the digest of the parameters (`ids.params_digest`) and the prompt, once a group.
        """
        rollout_id, _, prompt_id = group_id.partition("/")
        file = self._files.get(rollout_id)
        if file is None or file.failed or prompt_id not in file.live:
            return
        if prompt_id not in file.written:
            if not file.begun:
                file.begun = True
                file.waiting.append(_record(_Rollout(rollout_id)))
            file.written.add(prompt_id)
            file.earlier.pop(prompt_id, None)
            file.offered.pop(prompt_id, None)
            params_digest, prompt = identity()
            opened = _Opened(prompt_id, params_digest, _digest(prompt), weights.version, weights.digest)
            file.waiting.append(_record(opened))
        file.waiting.append(_record(_Chunk(prompt_id, index, *finish), tokens, logprobs))
        self._changed.add(rollout_id)

    def flush(self) -> None:
        """Write what was noted since the last call."""
        for rollout_id in self._changed:
            file = self._files.get(rollout_id)
            if file is None or file.failed or not file.waiting:
                continue
            text, file.waiting = b"".join(file.waiting), []
            try:
                if file.out is None:
                    file.out = file.path.open("ab", buffering=0)
                if file.out.write(text) != len(text):
                    raise OSError("written in part")
            except OSError as error:
                self._log.warning("chunks are kept no more", file=str(file.path), error=str(error))
                file.failed = True  # what it has stays good: it is a beginning of what would be generated
        self._changed.clear()

    def forget(self, group_id: str) -> None:
        """Note that a group is no more; the last one takes its rollout's file along."""
        rollout_id, _, prompt_id = group_id.partition("/")
        file = self._files.get(rollout_id)
        if file is None:
            return
        file.live.discard(prompt_id)
        file.offered.pop(prompt_id, None)
        if not file.live and not file.earlier:
            self._drop(rollout_id)
        elif prompt_id in file.written:
            file.written.discard(prompt_id)
            file.waiting.append(_record(_Forgotten(prompt_id)))
            self._changed.add(rollout_id)

    def tick(self, now: float) -> None:
        """Delete what an earlier life left and nobody asked for, or nobody was given."""
        over = now >= self._until
        for rollout_id, file in list(self._files.items()):
            for prompt_id in file.offered.keys() - file.live:
                del file.offered[prompt_id]  # it was refused
            if over:
                file.earlier.clear()
                if not file.live:
                    self._drop(rollout_id)

    def close(self) -> None:
        """Write what waits, and close all files: a successor reads them."""
        self.flush()
        for file in self._files.values():
            if file.out is not None:
                file.out.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _drop(self, rollout_id: str) -> None:
        file = self._files.pop(rollout_id)
        if file.out is not None:
            file.out.close()
        file.path.unlink(missing_ok=True)


def _claimed(folder: Path) -> int:
    """Take a folder until what is returned is closed, or the process ends."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise ConfigError(f"buffer.log: no chunks can be kept there: {error}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        fix = "give each one a folder of its own, or say buffer.keep_chunks=false"
        raise ConfigError(f"buffer.log: another buffer keeps its chunks in {folder}: {fix}") from None
    return lock


def _digest(prompt: wire.Tokens) -> bytes:
    return hashlib.blake2b(np.ascontiguousarray(prompt, np.int32).tobytes(), digest_size=16).digest()


def _record(
    head: _Head,
    tokens: wire.Tokens = _NONE,
    logprobs: wire.Tokens | wire.Logprobs = _NONE,
) -> bytes:
    text = _encoder.encode(head)
    data = tokens.astype("<i4").tobytes() + logprobs.astype("<f4").tobytes()
    crc = zlib.crc32(data, zlib.crc32(text))
    return _PREFIX.pack(len(text), len(data) // 8, crc) + text + data


def _records(path: Path) -> Iterator[tuple[_Head, int, int, int]]:
    """Yield each whole record: its head, where its tokens lie, how many, and where it ends."""
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
                except msgspec.MsgspecError:
                    return
            yield record, head + size, count, end
            at = end


def _outputs(path: Path, group: _Group) -> Outputs:
    with path.open("rb") as data, mmap.mmap(data.fileno(), 0, access=mmap.ACCESS_READ) as view:
        return {index: _arrays(view, chunks) for index, chunks in group.chunks.items()}


def _arrays(view: mmap.mmap, chunks: list[tuple[int, int]]) -> tuple[wire.Tokens, wire.Logprobs]:
    tokens = [np.frombuffer(view[at : at + 4 * count], "<i4") for at, count in chunks]
    logprobs = [np.frombuffer(view[at + 4 * count : at + 8 * count], "<f4") for at, count in chunks]
    return np.concatenate(tokens).astype(np.int32), np.concatenate(logprobs).astype(np.float32)
