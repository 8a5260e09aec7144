"""The folder of images: a file each, under the image's name once it was checked.

Every function may block as long as the disk does, and raises `OSError` if that fails.
"""

from __future__ import annotations

import os

import numpy as np

from seer.common import wire
from seer.common.blobs import read_at, write_at
from seer.common.prepared_image import read
from seer.common.types import IMAGE_NAME, MAX_IMAGE_BYTES
from seer.services.buffer.own_folder import OwnFolder

NAME = "seer-images"
"""The folder's name, below `buffer.images`."""

_PART = ".part"
"""Ends the name of the file of an incomplete image."""


class ImageFolder(OwnFolder):
    """`configured`: `buffer.images`; empty: a temporary folder, deleted by `release`."""

    def __init__(self, configured: str) -> None:
        super().__init__("buffer.images", configured, NAME, "seer-images-")

    def inherited(self) -> dict[str, int]:
        """Return the sizes of an earlier incarnation's images, the oldest first; delete incomplete ones."""
        found: list[tuple[float, str, int]] = []
        if not self._configured:
            return {}
        for each in self.root.iterdir():
            if each.name.endswith(_PART):
                each.unlink()
            elif IMAGE_NAME.fullmatch(each.name):
                about = each.stat()
                found.append((about.st_mtime, each.name, about.st_size))
        return {name: size for _, name, size in sorted(found)}

    def append(self, name: str, offset: int, data: wire.Bytes) -> None:
        """Write a part of an incomplete image from `offset` on; the first one creates its file anew."""
        write_at(
            self.root / (name + _PART), [(offset, len(data))], data, 0 if offset else os.O_CREAT | os.O_TRUNC
        )

    def check(self, name: str) -> None:
        """Check an image, all of whose bytes are there, and note that it is used; give a new file its name.

        Raises `InvalidField` if it has other bytes.
        """
        file, new = self.root / name, self.root / (name + _PART)
        found = new if new.exists() else file
        with found.open("rb") as opened:
            data = opened.read(MAX_IMAGE_BYTES + 1)
        read(name, np.frombuffer(data, np.uint8))
        os.utime(found)
        found.rename(file)

    def read(self, name: str, offset: int, length: int) -> wire.Bytes:
        """Return bytes of an image that was checked."""
        return read_at(self.root / name, [(offset, length)])

    def remove(self, name: str) -> None:
        """Delete an image, whole or not, if it is there."""
        for file in (name, name + _PART):
            (self.root / file).unlink(missing_ok=True)
