"""Writes the log of one life of the buffer, in segments: files of a folder, or the last two in memory.

Invariants (tests/unit/test_log_writer.py):
- a buffer's work never waits for its log, nor ends with it: a disk that is full ends the log alone;
- lines are written in their order, those of one turn of the loop or more at a time;
- each segment begins with the machines' state, and runs through the machines on its own;
- in memory are at most two segments: the last `RING_BYTES` of rows at least, once there were as many.
"""

from __future__ import annotations

import contextlib
import errno
import tempfile
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

import msgspec

from seer.common.errors import ConfigError
from seer.common.process.log import get_logger
from seer.common.process.scratch import lasting_temporary_folder
from seer.services.buffer.log import rows, segments
from seer.services.buffer.log.snapshot import snapshot
from seer.services.buffer.machine import BufferMachine, Event, Instruction
from seer.services.buffer.requests.events import GroupsSubmitted

FLUSH_BYTES = 2**20
"""Lines that wait for the next tick at most."""

SEGMENT_BYTES = 2**24
"""A file that grew past this is followed by another: 11 minutes at 100,000 tokens/s in chunks of 512."""

RING_BYTES = 2**22
"""Likewise without a folder, in memory: nearly three minutes."""

SNAPSHOTS = 4
"""Segments are so many times as long as the snapshot that they begin with, at least."""

_FULL = (errno.ENOSPC, errno.EDQUOT)


class Ring:
    """The last segments, in memory."""

    limit = RING_BYTES

    def __init__(self) -> None:
        self.kept: deque[tuple[str, bytearray]] = deque(maxlen=2)

    def begin(self, name: str, text: bytes) -> None:
        """Begin a segment."""
        self.kept.append((name, bytearray(text)))

    def append(self, text: bytes | bytearray) -> None:
        """Take lines."""
        self.kept[-1][1].extend(text)

    def close(self) -> None:
        """Forget all."""
        self.kept.clear()


class Folder:
    """Segments in files; who writes one holds its lock."""

    limit = SEGMENT_BYTES

    def __init__(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._keeper = segments.Keeper(path)
        self._file: BinaryIO | None = None

    def begin(self, name: str, text: bytes) -> None:
        """Begin a segment, and delete those that nobody needs any more."""
        self.close()
        path = self._path / name
        self._file = segments.create(path)
        try:
            self.append(text)
        except OSError:
            path.unlink()  # half a first line is no log
            raise
        with contextlib.suppress(FileNotFoundError):  # another buffer deletes them, too
            self._keeper.trim()

    def append(self, text: bytes | bytearray) -> None:
        """Write lines."""
        rest = memoryview(text)
        while rest and self._file is not None:
            rest = rest[self._file.write(rest) :]

    def close(self) -> None:
        """Write no more."""
        if self._file is not None:
            self._file.close()
            self._file = None


class LogWriter:
    """Without a `folder` the last rows are kept in memory, for `dump`.

    Raises `ConfigError` where the folder cannot be made or written, unless its disk is full.
    """

    def __init__(self, folder: str, header: rows.Header, machine: BufferMachine) -> None:
        self._log = get_logger()
        self._header, self._machine = header, machine
        self._text = bytearray()
        self._size = self._limit = 0
        self._submitted: dict[rows.Submission, None] = {}
        self._segments: Ring | Folder | None = None
        try:
            self._segments = Folder(Path(folder)) if folder else Ring()
            self._begin(header.clock)
        except OSError as error:
            if error.errno not in _FULL:
                fix = "give a folder that the buffer may write"
                raise ConfigError(f"buffer.log = {folder!r}: cannot be used ({error}); {fix}") from error
            self._give_up(error)

    def write(self, now: float, event: Event, out: Iterable[Instruction]) -> None:
        """Note what the machines were told, and answered just now."""
        if self._segments is None:
            return
        self._text += rows.line(now, event, out)
        if isinstance(event, GroupsSubmitted):
            self._submitted[event.rollout_id, event.submission] = None
        if self._size + len(self._text) > self._limit:
            self.flush()
            self._begin_next(now)
        elif len(self._text) > FLUSH_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write what waits."""
        if self._segments is None or not self._text:
            return
        text, self._text = self._text, bytearray()
        self._size += len(text)
        try:
            self._segments.append(text)
        except OSError as error:
            self._give_up(error)

    def dump(self) -> None:
        """Keep the log of a crash: what lies in memory is written to a new temporary folder."""
        self.flush()
        if not isinstance(self._segments, Ring):
            return
        try:
            folder = Path(tempfile.mkdtemp(prefix="seer-crash-", dir=lasting_temporary_folder()))
            for name, text in self._segments.kept:
                (folder / name).write_bytes(text)
        except OSError as error:
            self._log.warning("the log of this crash cannot be written", error=str(error))
        else:
            self._log.error("what led to this crash can be replayed", command=f"seer replay {folder}")

    def close(self) -> None:
        """Write what waits, and nothing more."""
        self.flush()
        if self._segments is not None:
            self._segments.close()
            self._segments = None

    def _begin_next(self, now: float) -> None:
        before, self._submitted = list(self._submitted), {}
        number = self._header.number + 1
        self._header = msgspec.structs.replace(self._header, number=number, before=before)
        try:
            self._begin(now)
        except OSError as error:
            self._give_up(error)

    def _begin(self, now: float) -> None:
        """Begin a segment with the machines' state."""
        if self._segments is None:
            return
        header = msgspec.structs.replace(
            self._header,
            started=time.time(),
            clock=now,
            open=[(each.rollout_id, each.submission) for each in self._machine.requests.rollouts.values()],
            state=msgspec.Raw(snapshot(self._machine)),
        )
        text = rows.header_line(header)
        self._size = len(text)
        self._limit = max(self._segments.limit, SNAPSHOTS * len(text))
        self._segments.begin(segments.name(header), text)

    def _give_up(self, error: OSError) -> None:
        self._log.warning("the log ends here: it cannot be written", error=str(error))
        segments, self._segments = self._segments, None
        if segments is not None:
            segments.close()
