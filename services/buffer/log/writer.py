"""Writes the log of one incarnation of the buffer in segments: files in a folder, or the last two in memory.

Invariants (tests/unit/test_log_writer.py):
- the buffer does not depend on its log: if the disk is full, only the log ends, and begins again with another
  segment when there is room; that segment's number says that rows are missing before it;
- lines are written in order, many at a time;
- each segment begins with the machines' state, so it can be replayed without the others;
- at most two segments are in memory: at least the last `RING_BYTES` of rows, once there are so many;
- of crashes without a folder the rows of the last `CRASHES` are kept;
- a segment does not end while there are more than `SNAPSHOT_REQUESTS` requests, as it takes long to write
  their state; but one in a file that has `Folder.longest` bytes does, and one in memory that has
  `Ring.longest` is dropped, with all rows until there are fewer requests.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
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
from seer.services.buffer.buffer_machine import BufferMachine, Event, Instruction
from seer.services.buffer.log import log_folder, rows
from seer.services.buffer.log.outage import ROOM_BYTES, Outage, check_room, outage, write_all
from seer.services.buffer.log.snapshot import snapshot
from seer.services.buffer.requests.events import GroupsSubmitted

FLUSH_BYTES = 2**20
"""Lines not written yet: with more of them, the next tick is not waited for."""

SEGMENT_BYTES = 2**24
"""A file larger than this is followed by another: 11 minutes at 100,000 tokens/s in chunks of 512."""

RING_BYTES = 2**22
"""The same limit for segments in memory: nearly three minutes."""

LONGEST_IN_FILE, LONGEST_IN_MEMORY = 2**29, 2**26
"""Bytes of a segment that would be followed by another, were it not for the many requests."""

SNAPSHOT_REQUESTS = 20_000
"""Requests, and groups, of which a snapshot takes about 50 ms, in which the buffer does nothing else."""

SNAPSHOTS = 4
"""A segment is at least this many times as long as the snapshot it begins with."""

CRASHES = 8
"""Crashes whose rows stay in the temporary folder: a buffer that is started again may crash again."""

_FULL = (errno.ENOSPC, errno.EDQUOT)


class Ring:
    """The last segments, in memory."""

    limit, longest = RING_BYTES, LONGEST_IN_MEMORY

    def __init__(self) -> None:
        self.kept: deque[tuple[str, bytearray]] = deque(maxlen=2)

    def begin(self, name: str, text: bytes) -> None:
        """Begin a segment."""
        self.kept.append((name, bytearray(text)))

    def append(self, text: bytes | bytearray) -> None:
        """Add lines, unless all were dropped."""
        if self.kept:
            self.kept[-1][1].extend(text)

    def close(self) -> None:
        """Free everything."""
        self.kept.clear()


class Folder:
    """Segments in files; the writer of a file holds a lock on it."""

    limit, longest = SEGMENT_BYTES, LONGEST_IN_FILE

    def __init__(self, path: Path) -> None:
        self._path = path
        self._pruner = log_folder.Pruner(path)
        self._file: BinaryIO | None = None

    def begin(self, name: str, text: bytes) -> None:
        """Begin a segment, and delete those that are no longer needed."""
        self.close()
        self._path.mkdir(parents=True, exist_ok=True)
        path = self._path / name
        path.unlink(missing_ok=True)  # what a try that failed may have left
        self._file = log_folder.create(path)
        try:
            self.append(text)
        except OSError:
            with contextlib.suppress(OSError):
                path.unlink()  # a log with half a header cannot be read
            raise
        with contextlib.suppress(OSError):  # another buffer may delete them, too; and this one can be written
            self._pruner.prune()

    def append(self, text: bytes | bytearray) -> None:
        """Write lines."""
        if self._file is not None:
            write_all(self._file, text)

    def close(self) -> None:
        """Close the file."""
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()


class LogWriter:
    """Writes to `folder`; empty: the last rows are kept in memory, for `dump`.

    `outage`: since when it cannot, None if it can. Raises `ConfigError` if the folder cannot be created or
    written, unless its disk is full.
    """

    def __init__(self, folder: str, header: rows.Header, machine: BufferMachine) -> None:
        self._log = get_logger()
        self._header, self._machine = header, machine
        self._text = bytearray()
        self._size = self._limit = 0
        self._submitted: dict[rows.Submission, None] = {}
        self._now = header.clock
        self._folder = Path(folder)
        self._segments: Ring | Folder | None = Folder(self._folder) if folder else Ring()
        self.outage: Outage | None = None
        try:
            self._begin(header)
        except OSError as error:
            if error.errno not in _FULL:
                fix = "give a folder that the buffer may write"
                raise ConfigError(f"buffer.log = {folder!r}: cannot be used ({error}); {fix}") from error
            self._stop(error)

    def position(self) -> str:
        """Return where the next row will be, `FILE:OFFSET`; empty: in no file."""
        if not isinstance(self._segments, Folder) or self.outage is not None:
            return ""
        return f"{log_folder.name(self._header)}:{self._size + len(self._text)}"

    def record(self, now: float, event: Event, out: Iterable[Instruction]) -> None:
        """Add an event that was just applied, and the instructions that the machines returned."""
        self._now = now
        if self._segments is None or self.outage is not None:
            return
        self._text += rows.line(now, event, out)
        if isinstance(event, GroupsSubmitted):
            self._submitted[event.rollout_id, event.submission] = None
        if self._size + len(self._text) > self._limit:
            self._end()
        elif len(self._text) > FLUSH_BYTES:
            self.flush()

    def tick(self, now: float) -> None:
        """Write all lines; if the log had ended, begin again when there is room. `now`: monotonic."""
        self._now = now
        self.flush()
        if self._segments is None or self.outage is None or now < self.outage.again:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            # For a snapshot as the last one: it would take long to make that for nothing.
            check_room(self._folder, max(ROOM_BYTES, self._limit // SNAPSHOTS))
        except OSError as error:
            self._stop(error)
        else:
            self._begin_next()

    def flush(self) -> None:
        """Write all lines that are not written yet."""
        if self._segments is None or not self._text:
            return
        text, self._text = self._text, bytearray()
        self._size += len(text)
        try:
            self._segments.append(text)
        except OSError as error:
            self._stop(error)

    def dump(self) -> None:
        """After a crash, write the segments in memory to a new temporary folder."""
        self.flush()
        if not isinstance(self._segments, Ring):
            return
        try:
            parent = lasting_temporary_folder()
            _make_room(parent)
            folder = Path(tempfile.mkdtemp(prefix="seer-crash-", dir=parent))
            for name, text in self._segments.kept:
                (folder / name).write_bytes(text)
        except OSError as error:
            self._log.warning("the log of this crash could not be written", error=str(error))
        else:
            self._log.error("the events before this crash can be replayed", command=f"seer replay {folder}")

    def close(self) -> None:
        """Write all lines and close; later ones are ignored."""
        self.flush()
        if self._segments is not None:
            self._segments.close()
            self._segments = None

    def _end(self) -> None:
        """Begin the next segment, or let this one go on: with many requests, its snapshot would take long."""
        self.flush()
        requests = self._machine.requests
        if self._segments is None or self.outage is not None:
            return
        if len(requests.requests) + len(requests.groups) <= SNAPSHOT_REQUESTS:
            self._begin_next()
        elif self._size < self._segments.longest:
            self._limit = self._size + self._segments.limit
        elif isinstance(self._segments, Ring):
            self._segments.close()
        else:
            self._begin_next()

    def _begin_next(self) -> None:
        number = self._header.number + (1 if self.outage is None else 2)  # 2: rows are missing
        header = msgspec.structs.replace(self._header, number=number, before=list(self._submitted))
        try:
            self._begin(header)
        except OSError as error:
            self._stop(error)
            return
        self._header, self._submitted = header, {}
        if self.outage is not None:
            self._log.info("the log begins again")
            self.outage = None

    def _begin(self, header: rows.Header) -> None:
        """Begin a segment with the machines' state. Raises `OSError`."""
        if self._segments is None:
            return
        header = msgspec.structs.replace(
            header,
            started=time.time(),
            clock=self._now,
            open=[(each.rollout_id, each.submission) for each in self._machine.requests.rollouts.values()],
            state=msgspec.Raw(snapshot(self._machine)),
        )
        text = rows.header_line(header)
        self._size = len(text)
        self._limit = max(self._segments.limit, SNAPSHOTS * len(text))
        self._segments.begin(log_folder.name(header), text)

    def _stop(self, error: OSError) -> None:
        if self.outage is None:
            self._log.warning("the log ends here, until it can be written", error=str(error))
        self.outage = outage(self.outage, error, self._now)
        self._text.clear()
        if self._segments is not None:
            self._segments.close()


def _make_room(parent: Path) -> None:
    """Delete this user's oldest crashes in `parent`, so that one more is within `CRASHES`."""
    found = []
    for folder in parent.glob("seer-crash-*"):
        with contextlib.suppress(OSError):
            status = folder.lstat()
            if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid():
                found.append((status.st_mtime_ns, folder))
    for _, folder in sorted(found)[: 1 - CRASHES]:
        shutil.rmtree(folder, ignore_errors=True)
