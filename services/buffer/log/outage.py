"""Times in which a folder cannot be written, as its disk is full or fails."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

RETRY_SECONDS = 10.0
"""A try takes 1 ms (`bench/services/log.py`)."""

ROOM_BYTES = 2**22
"""What must be free at least, so that writing does not end again at once."""


@dataclass(slots=True)
class Outage:
    """`since`, and `again`, when it is tried next, are monotonic seconds."""

    since: float
    why: str
    again: float


def outage(before: Outage | None, error: OSError, now: float) -> Outage:
    """Return the outage that an error begins, or prolongs."""
    return Outage(before.since if before else now, str(error), now + RETRY_SECONDS)


def write_all(file: BinaryIO, data: bytes | bytearray) -> None:
    """Write to a file without a buffer. Raises `OSError`; a part may be written then."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def check_room(folder: Path, size: int = ROOM_BYTES) -> None:
    """Raise `OSError` unless so many bytes can be written in a folder."""
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(size))
        file.flush()
