"""The mover of bytes: files that come in parts, and the processes that give parts away and fetch parts.

Invariants (tests/unit/test_blobs.py, tests/cluster/test_fan_out.py, tests/cluster/test_weight_copies.py):
- a blob has exactly the parts whose checksums were right, and no part is asked for again once it is there;
- who waits for a part gets it, or hears why it never comes; a bounded number of questions wait, and a reader
  that does not read delays no other;
- a blob is fetched from the first source that gives it, and what that one did not give from the next;
- a reader on the sender's machine needs nothing sent: it finds the sender's token in the folder;
- a source may give less than it is asked for: the rest is asked for, too;
- a blob of slices reads and writes these bytes of its file alone (tests/unit/test_slices.py);
- of one blob `WRITES` parts at most are written side by side, and a window at most is asked for or written;
  when a fetch has ended, however it did, nothing of it is written any more;
- no wait for an answer is longer than the source's patience.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, Protocol

import numpy as np
from isal import isal_zlib

from seer.common import wire
from seer.common.errors import SeerError
from seer.common.process.threads import until_ended
from seer.common.slices import Runs, Slices

FILE = "model.safetensors"
"""A blob's file in its folder; who can read that folder may read it there."""

NOTES = "stream.json"
"""File beside it: its size, and a token by which a reader knows that it sees the same folder."""

FILE_MODE = 0o600

MAX_DAMAGED = 16
"""Parts in a row that may arrive damaged, and are asked for again, before their source is given up."""

AT_ONCE = 8
"""Parts that are read from disk at once: 64 MiB."""

WRITES = 4
"""Parts that are written side by side. The kernel lets one thread at a time write a file: more would wait
there, and one alone would leave it idle between two parts."""

ASK_SECONDS = 5.0
"""Wait for an answer before questions are asked again: messages can be lost."""

POLL_SECONDS = 0.05
"""Pause between two questions about a blob that still grows on this machine."""

Question = wire.OpenSpool | wire.ReadSpool
Answer = wire.SpoolState | wire.SpoolData
Reply = Callable[[bytes, Answer], Awaitable[None]]
"""Sends an answer to a peer's address; the answer is lost if the peer does not read."""


class EndedForAll(ValueError):  # noqa: N818 - reads as what it says at the call site
    """Nobody will have more of a blob: no other source need be asked."""


# --- files: every function may block as long as the disk does, and raises `OSError` ---------------


def checksum(data: wire.Bytes) -> int:
    """Return the CRC-32 of a part, as zlib's, which would take two thirds of the time that a part takes."""
    return isal_zlib.crc32(data.data)


def part_bytes(size: int) -> int:
    """Return the bytes of a part, the last one apart, of a blob of `size`: a sixty-fourth, within bounds.

    A source before protocol 3.14 gives a part as whole ones of its own, so none overlaps the next part.
    """
    short = wire.SHORT_SPOOL_BYTES
    return min(wire.SPOOL_BYTES, max(short, size // (64 * short) * short))


def window(part: int) -> int:
    """Return how many parts of so many bytes may be in flight."""
    return min(wire.SPOOL_WINDOW, wire.SPOOL_WINDOW_BYTES // part)


def is_whole(part: wire.SpoolData) -> bool:
    """Return whether a part arrived as it was sent."""
    return checksum(part.data) == part.checksum


def write_at(file: Path, runs: Runs, data: wire.Bytes, flags: int = 0) -> None:
    """Write into a file at some places; `flags`: of `os.open`, beside those for writing.

    Opens the file for each part, so that whoever removes a blob has nothing to close.
    """
    opened = os.open(file, os.O_WRONLY | os.O_CLOEXEC | flags, FILE_MODE)
    try:
        left = data.data
        for at, length in runs:
            end = at + length
            while at < end:
                written = os.pwrite(opened, left[: end - at], at)
                left, at = left[written:], at + written
    finally:
        os.close(opened)


def read_at(file: Path, runs: Runs) -> wire.Bytes:
    """Return the bytes of a file at some places, one after the other."""
    opened = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        data = b"".join([os.pread(opened, size, at) for at, size in runs])
    finally:
        os.close(opened)
    if len(data) < sum(size for _, size in runs):
        raise OSError(f"{file.name} is shorter than it was")
    return np.frombuffer(data, dtype=np.uint8)


def on_this_machine(state: wire.SpoolState) -> bool:
    """Whether the sender's folder is readable here: it holds the token that the sender named."""
    try:
        return bool(state.token) and state.token in (Path(state.folder) / NOTES).read_text()
    except (OSError, ValueError):
        return False


# --- a blob ------------------------------------------------------------------------------------


class Blob:
    """A file of `size` bytes in `folder` that comes in parts, in any order, and is read meanwhile.

    `token` is in the blob's notes: by it readers on this machine know the folder; empty: no reader uses the
    folder. The first `have` bytes are there without gaps. With `slices`, it is that part of a larger file,
    which has holes where the part was fetched.
    """

    def __init__(
        self, name: str, size: int, folder: Path, token: str = "", have: int = 0, slices: Slices | None = None
    ) -> None:
        self.name, self.size, self.folder, self.token, self.have = name, size, folder, token, have
        self.file, self.part_bytes = folder / FILE, part_bytes(size)
        self.slices = slices
        self._ahead: dict[int, int] = {}  # lengths of the parts behind a gap, by their offsets
        self._end = ""
        self._changed = asyncio.Event()

    @property
    def arrived(self) -> int:
        """Bytes that are there."""
        return self.have + sum(self._ahead.values())

    def state(self, *, resend: bool = False, problem: str = "") -> wire.SpoolState:
        """Return what is said about it."""
        return wire.SpoolState(
            name=self.name, size=self.size, have=self.have, resend=resend, folder=str(self.folder),
            token=self.token, problem=problem, most=wire.SPOOL_BYTES,
        )  # fmt: skip

    def begin(self, fix: str) -> None:
        """Create the file, or take over one of this size, and the notes. Blocks.

        Raises `OSError`, or `ValueError` with the `fix` if there is no room.
        """
        if not self.file.exists() or self.file.stat().st_size != self.size:
            self.file.unlink(missing_ok=True)
            if self.size > (free := shutil.disk_usage(self.folder).free):
                raise ValueError(f"{self.size} bytes do not fit into {self.folder} ({free} free): {fix}")
        os.close(os.open(self.file, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, FILE_MODE))
        if self.slices is not None:
            os.truncate(self.file, self.slices.whole)
        self.note(whole=False)

    def note(self, *, whole: bool) -> None:
        """Write the notes; `whole`: all bytes are there, for a later incarnation of this process. Blocks."""
        notes = np.frombuffer(
            json.dumps({"size": self.size, "token": self.token, "whole": whole}).encode(), np.uint8
        )
        write_at(self.folder / NOTES, [(0, len(notes))], notes, os.O_CREAT | os.O_TRUNC)

    def length(self, offset: int) -> int:
        """Return the bytes of the part at an offset."""
        return min(self.part_bytes, self.size - offset)

    def has(self, offset: int, length: int) -> bool:
        """Return whether so many bytes from an offset on are there."""
        return self.have >= offset + length or self._ahead.get(offset, 0) >= length

    def put(self, part: wire.SpoolData) -> None:
        """Write a part into the file. Blocks."""
        write_at(self.file, self._runs(part.offset, len(part.data)), part.data)

    def store(self, part: wire.SpoolData) -> bool:
        """Write a part into the file unless it is damaged; return whether it was written. Blocks."""
        if valid := is_whole(part):
            self.put(part)
        return valid

    def read(self, offset: int, length: int) -> wire.SpoolData:
        """Return a part that is there. Blocks; raises `OSError`."""
        data = read_at(self.file, self._runs(offset, length))
        return wire.SpoolData(name=self.name, offset=offset, checksum=checksum(data), data=data)

    def _runs(self, offset: int, length: int) -> Runs:
        return [(offset, length)] if self.slices is None else self.slices.runs(offset, length)

    async def write(self, part: wire.SpoolData) -> bool:
        """Store a part unless it is damaged, or too long; return whether that was done. Raises `OSError`.

        When this has ended, nothing is written any more.
        """
        valid = 0 < len(part.data) <= self.length(part.offset) and await until_ended(self.store, part)
        if valid:
            self.came(part.offset, len(part.data))
        return valid

    async def link(self, folder: Path) -> bool:
        """Take the whole file of another copy, in `folder`; return whether that could be done."""
        if linked := await until_ended(_linked, folder / FILE, self.file, self.size):
            self.came(0, self.size)
        return linked

    def came(self, offset: int, length: int) -> None:
        """Note bytes that are in the file now."""
        self._ahead[offset] = length
        for start in sorted(self._ahead):
            if start <= self.have:
                self.have = max(self.have, start + self._ahead.pop(start))
        self._wake()

    def end(self, why: str) -> None:
        """Give no part of it away any more: who waits for one, or asks, hears why."""
        self._end = why
        self._wake()

    async def part(self, asked: wire.ReadSpool, disk: asyncio.Semaphore) -> wire.SpoolData:
        """Return a part as soon as it is there; `disk`: bound on reads. Raises `ValueError` or `OSError`."""
        offset = asked.offset
        if not 0 <= offset < self.size:
            raise ValueError("has no such bytes")
        length = min(self.length(offset), asked.length)
        while not (self._end or self.has(offset, length)):
            await self._changed.wait()
        async with disk:
            part = None if self._end else await asyncio.to_thread(self.read, offset, length)
        if part is None or self._end:  # also if it ended while it was read: its file may be another's by now
            raise ValueError(self._end)
        return part

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _linked(theirs: Path, ours: Path, size: int) -> bool:
    """Have `ours` be the same file as `theirs`; False if the system allows no such link, or it is gone."""
    other = ours.with_suffix(".link")
    try:
        if whole := theirs.stat().st_size == size:
            os.link(theirs, other)
            other.replace(ours)
    except OSError:
        return False
    return whole


# --- giving and taking ---------------------------------------------------------------------------


class Turns:
    """Does jobs one after the other. At most `most` wait, and `most_parts` of those that bring a part.

    Those beyond are dropped: peers ask again, and send again what was not answered.
    """

    def __init__(self, most: int, most_parts: int) -> None:
        self.queue: asyncio.Queue[tuple[Callable[[], Awaitable[None]], bool]] = asyncio.Queue()
        self._most, self._parts, self._most_parts = most, 0, most_parts

    def add(self, job: Callable[[], Awaitable[None]], *, part: bool = False, always: bool = False) -> None:
        """Do a job in its turn; `part`: it brings one; `always`: it is never dropped, so bound those."""
        dropped = self.queue.qsize() >= self._most or (part and self._parts >= self._most_parts)
        if always or not dropped:
            self._parts += part
            self.queue.put_nowait((job, part))

    async def run(self) -> NoReturn:
        """Do the jobs until cancelled."""
        while True:
            job, part = await self.queue.get()
            self._parts -= part
            await job()


class Readers:
    """Answers who reads blobs, the disk `AT_ONCE` of them at a time.

    At most `most` questions wait; readers ask the others again.
    `find(name)` returns a blob, or why there is none; empty: the blob has not begun.
    """

    def __init__(self, find: Callable[[str], Blob | str], most: int) -> None:
        self._find, self._most = find, most
        self.reads: dict[tuple[bytes, str, int], asyncio.Task[None]] = {}
        self._disk = asyncio.Semaphore(AT_ONCE)

    async def answer(self, reply: Reply, address: bytes, question: Question) -> None:
        """Answer a question, that for a part as soon as it can be."""
        name, blob = question.name, self._find(question.name)
        if isinstance(blob, str):
            await reply(address, wire.SpoolState(name=name, size=0, have=0, problem=blob))
        elif isinstance(question, wire.OpenSpool):
            await reply(address, blob.state())
        elif (key := (address, name, question.offset)) not in self.reads and len(self.reads) < self._most:
            self.reads[key] = task = asyncio.create_task(self._read(reply, address, blob, question))
            task.add_done_callback(lambda _: self.reads.pop(key))

    async def _read(self, reply: Reply, address: bytes, blob: Blob, asked: wire.ReadSpool) -> None:
        answer: Answer
        try:
            answer = await blob.part(asked, self._disk)
        except ValueError as error:
            answer = blob.state(problem=str(error))
        except OSError as error:
            answer = blob.state(problem=f"cannot be read: {error}")
        await reply(address, answer)

    def close(self) -> None:
        """Answer no more."""
        for task in self.reads.values():
            task.cancel()


# --- fetching ------------------------------------------------------------------------------------


class Source(Protocol):
    """Where a blob of `size` bytes comes from; 0: not known yet."""

    size: int

    async def fetch(self, blob: Blob) -> None:
        """Fetch what is missing. Raises `SeerError` or `ValueError`: try another source; or `OSError`."""


class OneOfSeveral(Source, Protocol):
    """A source that is left for the next one when it fails."""

    def left(self, why: Exception) -> None:
        """Hear that it is left."""


async def fetch(blob: Blob, sources: Sequence[OneOfSeveral], last: Source) -> None:
    """Fetch a blob from the first source that gives it, and what that one did not give from the next.

    Raises what the last one raises.
    """
    for source in sources:
        try:
            await source.fetch(blob)
        except EndedForAll:
            raise
        except (SeerError, ValueError) as error:
            source.left(error)
        else:
            return
    await last.fetch(blob)


class Asked(ABC):
    """A source that answers questions about the blob `name`."""

    def __init__(
        self, name: str, send: Callable[[Any], Awaitable[None]], receive: Callable[[], Awaitable[Any]]
    ) -> None:
        self.name, self._send, self._receive = name, send, receive
        self.silent = 0.0
        """Seconds for which the source has been asked in vain."""
        self.had: int | None = None
        """Bytes that the source had by its latest answer."""
        self.size = 0
        """Bytes of the blob, once the source said so."""
        self.base, self.keep = "", False
        """What the source last said of deltas: see `SpoolState`."""

    @abstractmethod
    async def patience(self) -> float:
        """Return how long to wait for an answer now. Raises `ValueError`: give this source up."""

    def here(self, state: wire.SpoolState) -> bool:
        """Whether its folder is on this machine. Blocks."""
        return on_this_machine(state)

    async def ask(self, question: Question) -> None:
        """Send a question, which may be lost."""
        await self._send(question)

    async def state(self) -> wire.SpoolState:
        """Return what it says of the blob. Raises `ValueError`."""
        question = wire.OpenSpool(name=self.name)
        await self.ask(question)
        while not isinstance(answer := await self.next([question]), wire.SpoolState):
            pass
        return answer

    async def next(self, questions: Sequence[Question]) -> Answer:
        """Return the next answer, and repeat `questions` while there is none. Raises `ValueError`."""
        while True:
            wait = min(await self.patience(), ASK_SECONDS)
            try:
                async with asyncio.timeout(wait):
                    answer = await self._receive()
            except TimeoutError:
                self.silent += wait
                for question in questions:
                    await self.ask(question)
                continue
            if not isinstance(answer, wire.SpoolState | wire.SpoolData) or answer.name != self.name:
                continue
            self.silent = 0.0
            if isinstance(answer, wire.SpoolState):
                if answer.problem:
                    raise ValueError(answer.problem)
                self.had, self.size = answer.have, answer.size or self.size
                self.base, self.keep = answer.base, answer.keep
            return answer

    async def whole_here(self, check: Callable[[int], None] = lambda size: None) -> Path | None:
        """Return its folder once all is there; None: that is not on this machine.

        Raises `ValueError`, or what `check` raises for the blob's size.
        """
        while True:
            state = await self.state()
            if state.size:
                check(state.size)
                if not await asyncio.to_thread(self.here, state):
                    return None
                if state.have >= state.size:
                    return Path(state.folder)
            await asyncio.sleep(POLL_SECONDS)

    async def fetch(self, blob: Blob) -> None:
        """Copy what is missing, a window of parts at a time. See `Source.fetch` for what it raises."""
        try:
            await _Window(self, blob).fetch()
        except ExceptionGroup as several:  # as of one disk, which is full for all
            raise several.exceptions[0] from several


class _Window:
    """The parts of a blob that were asked for, and those that are written: a `window` together."""

    def __init__(self, source: Asked, blob: Blob) -> None:
        self._source, self._blob = source, blob
        lengths = ((at, blob.length(at)) for at in range(0, blob.size, blob.part_bytes))
        self._missing = ((at, length) for at, length in lengths if not blob.has(at, length))
        self._asked: dict[int, wire.ReadSpool] = {}
        self._writes: set[asyncio.Task[None]] = set()
        self._damaged = 0

    async def fetch(self) -> None:
        """See `Asked.fetch`. What it raises is in a group."""
        async with asyncio.TaskGroup() as writers:
            for offset, length in itertools.islice(self._missing, window(self._blob.part_bytes)):
                await self._ask(offset, length)
            while self._asked or self._writes:
                if len(self._writes) >= WRITES or not self._asked:
                    await asyncio.wait(self._writes, return_when=asyncio.FIRST_COMPLETED)
                    continue
                part = await self._source.next(list(self._asked.values()))
                if isinstance(part, wire.SpoolData) and part.offset in self._asked:
                    length = self._asked.pop(part.offset).length
                    self._writes.add(write := writers.create_task(self._write(part, length)))
                    write.add_done_callback(self._writes.discard)

    async def _ask(self, offset: int, length: int) -> None:
        self._asked[offset] = question = wire.ReadSpool(name=self._blob.name, offset=offset, length=length)
        await self._source.ask(question)

    async def _write(self, part: wire.SpoolData, length: int) -> None:
        """Write a part, of which `length` was asked for; ask for its rest, for the next, or for it again."""
        if await self._blob.write(part):
            self._damaged = 0
            came = len(part.data)
            rest = (part.offset + came, length - came) if came < length else next(self._missing, None)
            if rest is not None:
                await self._ask(*rest)
        elif (damaged := self._damaged + 1) >= MAX_DAMAGED:
            raise ValueError(f"{damaged} parts in a row arrived damaged")
        else:
            self._damaged = damaged
            await self._ask(part.offset, length)
