"""Reads a buffer's log while the buffer writes it, from the oldest segment on.

Invariants (tests/unit/test_spans.py):
- every complete line is read once, in order; the line that a writer has begun waits for its end;
- a segment is left once a later one is there: a line that is incomplete then was its writer's last;
- a line that cannot be read ends its segment, and is told; the next segment is read;
- no more than one line is in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from seer.services.buffer.log import log_folder, rows

_IDLE = tuple(b',["%b",' % name for name in (b"EngineReported", b"EstimatesChanged"))
_NOTHING = b",[]]\n"


class LogTail:
    """Reads `log`, a file or a folder of `buffer.log`, which may have no files yet."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._path: Path | None = None
        self._file: BinaryIO | None = None
        self._begun = b""
        self._number = 0  # of lines
        self._done = ""  # the last file that was begun

    def read(self) -> Iterator[rows.Header | rows.Line | rows.LogError]:
        """Yield what is there now: headers, rows, and what could not be read. Raises `OSError`."""
        while True:
            later = self._later()  # looked for first: what is written before it is there when it is
            if self._file is not None:
                yield from self._lines()
            if later is None:
                return
            self.close()
            self._open(later)

    def close(self) -> None:
        """Read no further in the present segment."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _later(self) -> Path | None:
        if self._log.is_file():  # asked first: a folder may be made at any moment
            return None if self._done else self._log
        if not self._log.is_dir():
            return None
        return next((path for path in log_folder.segments(self._log) if path.name > self._done), None)

    def _open(self, path: Path) -> None:
        self._path, self._done, self._number, self._begun = path, path.name, 0, b""
        try:
            self._file = path.open("rb")
        except FileNotFoundError:  # deleted a moment ago, as an old one
            self._file = None

    def _lines(self) -> Iterator[rows.Header | rows.Line | rows.LogError]:
        while self._file is not None:
            text = self._file.readline()
            if not text.endswith(b"\n"):
                self._begun += text
                return
            if self._begun:
                text, self._begun = self._begun + text, b""
            self._number += 1
            if text.endswith(_NOTHING) and any(idle in text[:64] for idle in _IDLE):
                continue
            try:
                yield self._read(text)
            except rows.LogError as error:
                self.close()
                yield error

    def _read(self, text: bytes) -> rows.Header | rows.Line:
        path = self._path or self._log
        if self._number == 1:
            return rows.read_header(path, text)
        return rows.read_line(path, self._number, text)
