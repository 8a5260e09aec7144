"""The spool's folder, and the files of streams in it.

Every function may block as long as the disk does, and raises `OSError` if that fails.
"""

from __future__ import annotations

import json
import shutil

from seer.common.blobs import FILE, NOTES, Blob
from seer.common.weights.delta import SUFFIX as DELTA
from seer.services.buffer.own_folder import FOLDER_MODE, OwnFolder

NAME = "seer-spool"
"""The folder's name, below `buffer.spool`."""

_SPARE = "spare"


class SpoolFolder(OwnFolder):
    """`configured`: `buffer.spool`; empty: a temporary folder, deleted by `release`."""

    def __init__(self, configured: str) -> None:
        super().__init__("buffer.spool", configured, NAME, "seer-weights-")

    # --- streams -------------------------------------------------------------------------

    def inherited(self) -> dict[str, tuple[int, str]]:
        """Return size and token of an earlier incarnation's complete streams, by name; delete the others.

        Deltas, too: one that is there is not sent again, so what it was for would never be made.
        """
        found: dict[str, tuple[int, str]] = {}
        if not self._configured:
            return found
        for name in sorted(each.name for each in self.root.iterdir()):
            if not name.startswith("v"):
                continue
            try:
                notes = json.loads((self.root / name / NOTES).read_bytes())
                size, token = int(notes["size"]), str(notes["token"])
                whole = notes["whole"] and not name.endswith(DELTA)
                if whole and (self.root / name / FILE).stat().st_size == size:
                    found[name] = size, token
                    continue
            except (OSError, ValueError, LookupError, TypeError, ArithmeticError, RecursionError):
                pass  # it is not complete
            self.remove(name)
        return found

    def begin(self, stream: Blob) -> None:
        """Create a stream's folder, from the spare one if there is one.

        Raises `ValueError` if the disk has no room for the stream.
        """
        self.remove(stream.name)
        if (self.root / _SPARE).is_dir() and not stream.name.endswith(DELTA):
            (self.root / _SPARE).rename(stream.folder)
        else:
            stream.folder.mkdir(FOLDER_MODE)
        stream.begin("set buffer.spool to a folder with more room")

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
