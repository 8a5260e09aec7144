"""One copy of a stream of weights: a file that grows part by part, from which other engines may read.

Invariants (tests/unit/test_stream_copies.py):
- a copy has exactly the parts whose checksums were right, and no part is asked for again once it is there;
- who waits for a part of a copy gets it, or an error when the copy is deleted;
- a linked copy is whole at once, and lasts when the file that it was linked to is deleted.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from seer.common import wire
from seer.common.weights.digest import SPOOL_FILE, SPOOL_NOTES, read_part, write_part

MAX_DAMAGED = 16
"""Parts in a row that may arrive damaged, and are asked for again, before their source is given up."""

GONE = "this engine has no copy of it any more"


class Source(Protocol):
    """Where parts of a stream come from."""

    async def ask(self, question: wire.OpenSpool | wire.ReadSpool) -> None:
        """Send a question, which may be lost."""
        ...

    async def next(
        self, questions: Sequence[wire.OpenSpool | wire.ReadSpool]
    ) -> wire.SpoolState | wire.SpoolData:
        """Return the next answer, and repeat `questions` while there is none. Raises `ValueError`."""
        ...


class StreamCopy:
    """A copy of a stream of `size` bytes, in a temporary folder. Raises `OSError` if that cannot be made.

    `senders`: endpoints of other engines that parts may be from, so a wrong digest may be their fault.
    """

    def __init__(self, name: str, size: int) -> None:
        self.name, self.size = name, size
        self.senders: list[str] = []
        self._temporary = tempfile.TemporaryDirectory(prefix="seer-weights-", ignore_cleanup_errors=True)
        self.folder = Path(self._temporary.name)
        self.file = self.folder / SPOOL_FILE
        self._token = secrets.token_hex(16)
        self._arrived: set[int] = set()
        self._have = 0
        self._deleted = False
        self._waiting: dict[int, list[asyncio.Future[None]]] = {}

    @property
    def have(self) -> int:
        """Bytes at the beginning of the stream that are there, without gaps."""
        while self._have in self._arrived:
            self._have = min(self._have + wire.SPOOL_BYTES, self.size)
        return self._have

    @property
    def arrived(self) -> int:
        """Bytes that are there."""
        return min(len(self._arrived) * wire.SPOOL_BYTES, self.size)

    @property
    def state(self) -> wire.SpoolState:
        """What a holder answers about it."""
        return wire.SpoolState(
            name=self.name, size=self.size, have=self.have, folder=str(self.folder), token=self._token
        )

    def begin(self) -> None:
        """Create the file. Raises `ValueError` if it has no room, or `OSError`."""
        if self.size > (free := shutil.disk_usage(self.folder).free):
            raise ValueError(
                f"{self.size} bytes do not fit into {self.folder} ({free} free): set TMPDIR to a larger disk"
            )
        self.file.touch(0o600)
        (self.folder / SPOOL_NOTES).write_text(self._token)

    def missing(self) -> Iterator[int]:
        """Return the offsets of the parts that are not there."""
        return (at for at in range(0, self.size, wire.SPOOL_BYTES) if at not in self._arrived)

    def length(self, offset: int) -> int:
        """Return the bytes of the part at an offset."""
        return min(wire.SPOOL_BYTES, self.size - offset)

    async def write(self, part: wire.SpoolData) -> bool:
        """Write a part; return whether it was whole and undamaged. Raises `OSError`."""
        whole = len(part.data) == self.length(part.offset)
        if not whole or not await asyncio.to_thread(write_part, self.file, part):
            return False
        self._note([part.offset])
        return True

    async def link(self, folder: Path) -> bool:
        """Take the whole file of another engine's copy in `folder`; return whether that could be done."""
        if not await asyncio.to_thread(_linked, folder / SPOOL_FILE, self.file, self.size):
            return False
        self._note(self.missing())
        return True

    async def part(self, offset: int) -> wire.SpoolData:
        """Return a part as soon as it is there. Raises `ValueError` or `OSError`."""
        if not 0 <= offset < self.size or offset % wire.SPOOL_BYTES:
            raise ValueError("has no such part")
        if offset not in self._arrived and not self._deleted:
            arrival: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(offset, []).append(arrival)
            await arrival
        if self._deleted:
            raise ValueError(GONE)
        data, checksum = await asyncio.to_thread(read_part, self.file, offset, self.length(offset))
        return wire.SpoolData(name=self.name, offset=offset, checksum=checksum, data=data)

    async def delete(self) -> None:
        """Delete the folder; cancelling this does not keep it from being deleted."""
        self._deleted = True
        self._wake(list(self._waiting))
        await asyncio.to_thread(self._temporary.cleanup)

    def _note(self, offsets: Iterable[int]) -> None:
        found = list(offsets)
        self._arrived.update(found)
        self._wake(found)

    def _wake(self, offsets: Sequence[int]) -> None:
        for offset in offsets:
            for arrival in self._waiting.pop(offset, ()):
                if not arrival.done():
                    arrival.set_result(None)


async def copy_parts(copy: StreamCopy, source: Source) -> None:
    """Copy what is missing, `SPOOL_WINDOW` parts requested ahead. Raises `ValueError` or `OSError`."""
    offsets, asked, damaged = copy.missing(), dict[int, wire.ReadSpool](), 0
    while True:
        while len(asked) < wire.SPOOL_WINDOW and (offset := next(offsets, None)) is not None:
            asked[offset] = wire.ReadSpool(name=copy.name, offset=offset)
            await source.ask(asked[offset])
        if not asked:
            return
        part = await source.next(list(asked.values()))
        if not isinstance(part, wire.SpoolData) or part.offset not in asked:
            continue
        if await copy.write(part):
            del asked[part.offset]
            damaged = 0
        elif (damaged := damaged + 1) >= MAX_DAMAGED:
            raise ValueError(f"{damaged} parts in a row arrived damaged")
        else:
            await source.ask(asked[part.offset])


def on_this_machine(state: wire.SpoolState) -> bool:
    """Whether the sender's folder is readable here: it holds the token that the sender named."""
    try:
        return bool(state.token) and state.token in (Path(state.folder) / SPOOL_NOTES).read_text()
    except (OSError, ValueError):
        return False


def _linked(theirs: Path, ours: Path, size: int) -> bool:
    """Have `ours` be the same file as `theirs`; False if the system allows no such link, or it is gone."""
    other = ours.with_suffix(".link")
    try:
        os.link(theirs, other)
        if other.stat().st_size != size:
            other.unlink()
            return False
        other.replace(ours)
    except OSError:
        return False
    return True
