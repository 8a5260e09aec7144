"""Writes the log of one life of the buffer: `FOLDER/INCARNATION.jsonl`.

Invariants:
- a buffer's work never waits for its log, nor ends with it: a disk that is full ends the log alone;
- lines are written in their order, those of one turn of the loop or more at a time.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

from seer.common.process.log import get_logger
from seer.services.buffer.log import rows
from seer.services.buffer.machine import Event, Instruction

FLUSH_BYTES = 2**20
"""Lines that wait for the next tick at most."""


class LogWriter:
    """Without a `folder` nothing is written. Raises `OSError` where the folder cannot be made or written."""

    def __init__(self, folder: str, header: rows.Header) -> None:
        self._log = get_logger()
        self._lines: list[bytes] = []
        self._bytes = 0
        self._file: BinaryIO | None = None
        if folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
            self.path = Path(folder) / f"{header.incarnation:016x}.jsonl"
            self._file = self.path.open("ab", buffering=0)
            self._file.write(rows.header_line(header))

    def write(self, time: float, event: Event, out: Iterable[Instruction]) -> None:
        """Note what the machines were told, and answered."""
        if self._file is None:
            return
        text = rows.line(time, event, out)
        self._lines.append(text)
        self._bytes += len(text)
        if self._bytes > FLUSH_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write what waits."""
        if self._file is None or not self._lines:
            return
        text = b"".join(self._lines)
        self._lines, self._bytes = [], 0
        try:
            written = self._file.write(text)
            if written < len(text):
                self._file.write(text[written:])
        except OSError as error:
            self._log.warning(
                "the log ends here: it cannot be written", file=str(self.path), error=str(error)
            )
            self.close()

    def close(self) -> None:
        """Write what waits, and nothing more."""
        self.flush()
        if self._file is not None:
            self._file.close()
            self._file = None
