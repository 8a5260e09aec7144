"""The spool's folder, and the files of streams in it.

Every function may block as long as the disk does, and raises `OSError` if that fails.
"""

from __future__ import annotations

import json
import os
import shutil

from seer.common import wire
from seer.common.weights.digest import SPOOL_FILE, SPOOL_NOTES, read_part, write_part
from seer.services.buffer.own_folder import FILE_MODE, FOLDER_MODE, OwnFolder

NAME = "seer-spool"
"""The folder's name, below `buffer.spool`."""

_SPARE = "spare"


class SpoolFolder(OwnFolder):
    """`configured`: `buffer.spool`; empty: a temporary folder, deleted by `release`."""

    def __init__(self, configured: str) -> None:
        super().__init__("buffer.spool", configured, NAME, "seer-weights-")

    # --- streams -------------------------------------------------------------------------

    def inherited(self) -> dict[str, tuple[int, str]]:
        """Return size and token of an earlier life's complete streams, by name; delete its other ones."""
        found: dict[str, tuple[int, str]] = {}
        if not self._configured:
            return found
        for name in sorted(each.name for each in self.root.iterdir()):
            if not name.startswith("v"):
                continue
            try:
                notes = json.loads((self.root / name / SPOOL_NOTES).read_bytes())
                size, token = int(notes["size"]), str(notes["token"])
                if notes["whole"] and (self.root / name / SPOOL_FILE).stat().st_size == size:
                    found[name] = size, token
                    continue
            except (OSError, ValueError, LookupError, TypeError, ArithmeticError, RecursionError):
                pass  # it is not complete
            self.remove(name)
        return found

    def begin(self, name: str, size: int, token: str) -> None:
        """Create a stream's folder, from the spare one if there is one.

        Raises `ValueError` if the disk has no room for the stream.
        """
        folder = self.root / name
        self.remove(name)
        if (self.root / _SPARE).is_dir():
            (self.root / _SPARE).rename(folder)
        else:
            folder.mkdir(FOLDER_MODE)
        file = folder / SPOOL_FILE
        if not file.exists() or file.stat().st_size != size:
            file.unlink(missing_ok=True)
            free = shutil.disk_usage(folder).free
            if size > free:
                where = f"{self.root} ({free} free)"
                raise ValueError(
                    f"{size} bytes do not fit into {where}: set buffer.spool to a folder with more room"
                )
        os.close(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, FILE_MODE))
        self.write_notes(name, size, token, whole=False)

    def write_notes(self, name: str, size: int, token: str, *, whole: bool) -> None:
        """Write the file that tells readers, and a later life of the buffer, about a stream.

        `whole`: all of its bytes are there.
        """
        notes = json.dumps({"size": size, "token": token, "whole": whole}).encode()
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        opened = os.open(self.root / name / SPOOL_NOTES, flags, FILE_MODE)
        try:
            if os.write(opened, notes) < len(notes):
                raise OSError(f"{SPOOL_NOTES} could only be written in part")
        finally:
            os.close(opened)

    def write(self, part: wire.SpoolData) -> bool:
        """Write a part at its offset unless it is damaged; return whether it was written."""
        return write_part(self.root / part.name / SPOOL_FILE, part)

    def read(self, name: str, offset: int, length: int) -> tuple[wire.Bytes, int]:
        """Return bytes of a stream, and their checksum."""
        return read_part(self.root / name / SPOOL_FILE, offset, length)

    def keep_as_spare(self, name: str) -> None:
        """Keep a stream's file for the next stream: allocating pages costs more than all else here."""
        self.remove(_SPARE)
        try:
            (self.root / name).rename(self.root / _SPARE)
        except OSError:
            self.remove(name)

    def remove(self, name: str = _SPARE) -> None:
        """Delete a stream's folder, or the spare one; errors are ignored."""
        shutil.rmtree(self.root / name, ignore_errors=True)
