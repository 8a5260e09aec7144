"""The spool's folder: whose it is, and the files of streams in it.

Invariants (tests/unit/test_spool_folder.py):
- a configured spool is a folder of its own below the configured one, with a marker file in it: a folder of
  that name without the marker is refused, and nothing outside it is touched;
- a buffer holds a lock on the marker as long as it runs: a second buffer is refused at its start;
- folders have mode 0700 and files 0600: only the user that runs the buffer can read weights;
- every function may block as long as the disk does, and raises `OSError` if that fails.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import stat
import tempfile
from pathlib import Path

from seer.common import wire
from seer.common.errors import ConfigError
from seer.common.weights.digest import SPOOL_FILE, SPOOL_NOTES, read_part, write_part

NAME = "seer-spool"
"""The folder's name, below `buffer.spool`."""

MARKER = "this-folder-belongs-to-a-seer-buffer"
_AWAY = "move it away, or give another folder"
_SPARE = "spare"
_FOLDER_MODE, _FILE_MODE = 0o700, 0o600


class SpoolFolder:
    """`configured`: `buffer.spool`; empty: a temporary folder, deleted by `release`."""

    def __init__(self, configured: str) -> None:
        self._configured = configured
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._lock: int | None = None

    @property
    def root(self) -> Path:
        """The folder of the streams; a temporary one is made when it is first needed."""
        if self._configured:
            return Path(self._configured) / NAME
        if self._temporary is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="seer-weights-", ignore_cleanup_errors=True)
        return Path(self._temporary.name)

    def claim(self) -> None:
        """Lock a configured folder until `release` or the process's end. Raises `ConfigError`."""
        if not self._configured:
            return
        try:
            Path(self._configured).mkdir(parents=True, exist_ok=True)
            self._lock_root()
        except OSError as error:
            raise self._refusal(
                f"cannot be used ({error}); give a folder that the buffer may write"
            ) from error

    def _lock_root(self) -> None:
        root = self.root
        try:
            root.mkdir(_FOLDER_MODE)
        except FileExistsError:
            found = root.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
                raise self._refusal(f"{root} is no folder of this user's: {_AWAY}") from None
            held = {each.name for each in root.iterdir()}
            if held and MARKER not in held:
                raise self._refusal(f"{root} is not a buffer's, as it lacks {MARKER}: {_AWAY}") from None
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        lock = os.open(root / MARKER, flags, _FILE_MODE)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise self._refusal(f"another buffer holds {root}: give each one a folder of its own") from None
        except OSError:
            os.close(lock)
            raise
        self._lock = lock
        root.chmod(_FOLDER_MODE)

    def _refusal(self, problem: str) -> ConfigError:
        return ConfigError(f"buffer.spool = {self._configured!r}: {problem}")

    def release(self) -> None:
        """Unlock the folder; delete it if it is temporary."""
        temporary, self._temporary = self._temporary, None
        if temporary is not None:
            temporary.cleanup()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

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
            except (OSError, ValueError, LookupError, TypeError):
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
            folder.mkdir(_FOLDER_MODE)
        file = folder / SPOOL_FILE
        if not file.exists() or file.stat().st_size != size:
            file.unlink(missing_ok=True)
            free = shutil.disk_usage(folder).free
            if size > free:
                where = f"{self.root} ({free} free)"
                raise ValueError(
                    f"{size} bytes do not fit into {where}: set buffer.spool to a folder with more room"
                )
        os.close(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, _FILE_MODE))
        self.write_notes(name, size, token, whole=False)

    def write_notes(self, name: str, size: int, token: str, *, whole: bool) -> None:
        """Write the file that tells readers, and a later life of the buffer, about a stream.

        `whole`: all of its bytes are there.
        """
        notes = json.dumps({"size": size, "token": token, "whole": whole}).encode()
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        opened = os.open(self.root / name / SPOOL_NOTES, flags, _FILE_MODE)
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
