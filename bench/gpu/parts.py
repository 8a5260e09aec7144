"""A folder as files of bounded size, and back.

A packed folder `NAME` is `NAME-00.xz`, `NAME-01.xz`, ..., and `NAME.json` with their checksums. One behind
the other the parts are a tar file compressed by xz, in blocks that are compressed by themselves.

Invariants:
- equal folders give equal parts: names in order, no times, no owners;
- nothing is unpacked before every part is there and right, and a folder appears whole or not at all;
- what is unpacked already is not unpacked again.
"""

from __future__ import annotations

import hashlib
import io
import json
import lzma
import os
import shutil
import tarfile
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

MIB = 1 << 20
BLOCK = 16 * MIB
"""Bytes compressed by themselves, so that all cores work: lzma leaves Python's lock to others."""


class PartsError(Exception):
    """Parts are missing or damaged; the message names them."""


class _Packer(io.RawIOBase):
    """Compresses what is written to it, in order, into parts of at most `limit` bytes."""

    def __init__(self, stem: Path, limit: int, workers: int) -> None:
        self._stem, self._limit = stem, limit
        self._pool = ThreadPoolExecutor(workers)
        self._waiting: deque[Future[bytes]] = deque()
        self._most = 2 * workers
        self._raw, self._part, self._blocks = bytearray(), bytearray(), list[int]()
        self._whole = hashlib.sha256()
        self._size = 0
        self.parts: list[dict[str, Any]] = []

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:  # noqa: ANN401 - any buffer
        self._raw += data
        while len(self._raw) >= BLOCK:
            self._submit(bytes(self._raw[:BLOCK]))
            del self._raw[:BLOCK]
        return len(data)

    def finish(self) -> dict[str, Any]:
        """Write what is left; return bytes and checksum of the tar file, and the parts."""
        if self._raw:
            self._submit(bytes(self._raw))
        while self._waiting:
            self._keep(self._waiting.popleft().result())
        self._end_part()
        self._pool.shutdown()
        return {"bytes": self._size, "sha256": self._whole.hexdigest(), "parts": self.parts}

    def _submit(self, block: bytes) -> None:
        self._whole.update(block)
        self._size += len(block)
        self._waiting.append(self._pool.submit(lzma.compress, block))
        if len(self._waiting) > self._most:
            self._keep(self._waiting.popleft().result())

    def _keep(self, block: bytes) -> None:
        if len(block) > self._limit:
            raise ValueError(
                f"limit = {self._limit}: a block has {len(block)} bytes; give {BLOCK + MIB} or more"
            )
        if len(self._part) + len(block) > self._limit:
            self._end_part()
        self._part += block
        self._blocks.append(len(block))

    def _end_part(self) -> None:
        file = self._stem.with_name(f"{self._stem.name}-{len(self.parts):02}.xz")
        file.write_bytes(self._part)
        digest = hashlib.sha256(self._part).hexdigest()
        self.parts.append(
            {"name": file.name, "bytes": len(self._part), "sha256": digest, "blocks": self._blocks}
        )
        self._part, self._blocks = bytearray(), []


def pack(tree: Path, folder: Path, name: str, limit: int, about: dict[str, Any]) -> dict[str, Any]:
    """Pack `tree` into parts of at most `limit` bytes in `folder`; return what `NAME.json` says.

    That begins with `about`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob(f"{name}-[0-9]*.xz"):
        old.unlink()
    packer = _Packer(folder / name, limit, len(os.sched_getaffinity(0)))
    with tarfile.open(fileobj=packer, mode="w|", format=tarfile.PAX_FORMAT) as tar:
        for path in sorted(tree.rglob("*")):
            tar.add(path, str(path.relative_to(tree)), recursive=False, filter=_plain)
    described = about | packer.finish()
    (folder / f"{name}.json").write_text(json.dumps(described, indent=1) + "\n")
    return described


def _plain(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.mtime = info.uid = info.gid = 0
    info.uname = info.gname = ""
    return info


class _Unpacker(io.RawIOBase):
    """The tar file of all parts."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks, self._left = blocks, memoryview(b"")
        self.whole = hashlib.sha256()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:  # noqa: ANN401 - any buffer
        while not self._left:
            block = next(self._blocks, None)
            if block is None:
                return 0
            self.whole.update(block)
            self._left = memoryview(block)
        size = min(len(buffer), len(self._left))
        buffer[:size] = self._left[:size]
        self._left = self._left[size:]
        return size


def missing(folder: Path, name: str) -> list[str]:
    """Return the parts that are not there, or not as `NAME.json` says."""
    described = json.loads((folder / f"{name}.json").read_text())
    return [part["name"] for part in described["parts"] if not _right(folder / part["name"], part["sha256"])]


def _right(file: Path, digest: str) -> bool:
    return file.is_file() and hashlib.sha256(file.read_bytes()).hexdigest() == digest


def unpack(folder: Path, name: str, to: Path) -> bool:
    """Lay the folder out as `to/NAME`; return whether there was anything to do. Raises `PartsError`."""
    described = json.loads((folder / f"{name}.json").read_text())
    done, partial, stamp = to / name, to / f"{name}.partial", to / f"{name}.sha256"
    if done.is_dir() and stamp.is_file() and stamp.read_text() == described["sha256"]:
        return False
    if lost := missing(folder, name):
        raise PartsError(f"{', '.join(lost)}: missing or damaged in {folder}; send them")
    for old in (done, partial):
        shutil.rmtree(old, ignore_errors=True)
    partial.mkdir(parents=True)
    stream = _Unpacker(_blocks(folder, described["parts"]))
    with tarfile.open(fileobj=io.BufferedReader(stream, MIB), mode="r|") as tar:
        tar.extractall(partial, filter="data")
    while stream.read(MIB):  # what tar does not read behind its end counts, too
        pass
    if stream.whole.hexdigest() != described["sha256"]:
        raise PartsError(f"{name}: the parts are right, but not what was packed; pack it again")
    partial.rename(done)
    stamp.write_text(described["sha256"])
    return True


def _blocks(folder: Path, parts: list[dict[str, Any]]) -> Iterator[bytes]:
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for part in parts:
            stored = io.BytesIO((folder / part["name"]).read_bytes())
            yield from pool.map(lzma.decompress, [stored.read(size) for size in part["blocks"]])
