"""The folder of media: a file each, under the medium's name once it was checked.

Every function may block as long as the disk does, and raises `OSError` if that fails.
"""

from __future__ import annotations

import os

import numpy as np

from seer.common import wire
from seer.common.media import read
from seer.common.types import MAX_MEDIUM_BYTES, MEDIUM_NAME
from seer.services.buffer.own_folder import FILE_MODE, OwnFolder

NAME = "seer-media"
"""The folder's name, below `buffer.media`."""

_PART = ".part"
"""Ends the name of the file of an incomplete medium."""


class MediaFolder(OwnFolder):
    """`configured`: `buffer.media`; empty: a temporary folder, deleted by `release`."""

    def __init__(self, configured: str) -> None:
        super().__init__("buffer.media", configured, NAME, "seer-media-")

    def inherited(self) -> dict[str, int]:
        """Return the sizes of an earlier life's media, the oldest first; delete incomplete ones."""
        found: list[tuple[float, str, int]] = []
        if not self._configured:
            return {}
        for each in self.root.iterdir():
            if each.name.endswith(_PART):
                each.unlink()
            elif MEDIUM_NAME.fullmatch(each.name):
                about = each.stat()
                found.append((about.st_mtime, each.name, about.st_size))
        return {name: size for _, name, size in sorted(found)}

    def append(self, name: str, offset: int, data: wire.Bytes) -> None:
        """Write a part of an incomplete medium from `offset` on, and cut off what was there."""
        file = self.root / (name + _PART)
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
        opened = os.open(file, flags, FILE_MODE)
        try:
            os.ftruncate(opened, offset)
            left = data.data
            while left:
                written = os.pwrite(opened, left, offset)
                left, offset = left[written:], offset + written
        finally:
            os.close(opened)

    def finish(self, name: str) -> None:
        """Check an incomplete medium, all of whose bytes are there, and give its file its name.

        Raises `InvalidField` if they are another's.
        """
        self._check(name, name + _PART)
        (self.root / (name + _PART)).rename(self.root / name)

    def check(self, name: str) -> None:
        """Check a medium's file, and note that it is used. Raises `InvalidField` if it has other bytes."""
        self._check(name, name)
        os.utime(self.root / name)

    def _check(self, name: str, file: str) -> None:
        with (self.root / file).open("rb") as opened:
            data = opened.read(MAX_MEDIUM_BYTES + 1)
        read(name, np.frombuffer(data, np.uint8))

    def read(self, name: str, offset: int, length: int) -> wire.Bytes:
        """Return bytes of a medium that was checked."""
        with (self.root / name).open("rb") as opened:
            opened.seek(offset)
            data = opened.read(length)
        if len(data) < length:
            raise OSError(f"{name} is shorter than it was")
        return np.frombuffer(data, np.uint8)

    def remove(self, name: str) -> None:
        """Delete a medium, whole or not, if it is there."""
        for file in (name, name + _PART):
            (self.root / file).unlink(missing_ok=True)
