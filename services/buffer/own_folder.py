"""A folder of the buffer's own: whose it is, and that nobody else uses it meanwhile.

Invariants (tests/unit/test_spool_folder.py):
- a configured folder is one of its own below the configured one, with a marker file in it: a folder of that
  name without the marker is refused, and nothing outside it is touched;
- a buffer holds a lock on the marker as long as it runs: a second buffer is refused at its start;
- folders have mode 0700 and files 0600: only the user that runs the buffer can read what is there;
- every function may block as long as the disk does, and raises `OSError` if that fails.
"""

from __future__ import annotations

import fcntl
import os
import stat
import tempfile
from pathlib import Path

from seer.common.errors import ConfigError

MARKER = "this-folder-belongs-to-a-seer-buffer"
FOLDER_MODE, FILE_MODE = 0o700, 0o600
_AWAY = "move it away, or give another folder"


class OwnFolder:
    """`configured`: the setting `key`, below which the folder `name` is used.

    If it is empty, a temporary folder is used, whose name begins with `prefix`, and `release` deletes it.
    """

    def __init__(self, key: str, configured: str, name: str, prefix: str) -> None:
        self._key, self._configured = key, configured
        self._name, self._prefix = name, prefix
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._lock: int | None = None

    @property
    def root(self) -> Path:
        """The folder; a temporary one is made when it is first needed."""
        if self._configured:
            return Path(self._configured) / self._name
        if self._temporary is None:
            self._temporary = tempfile.TemporaryDirectory(prefix=self._prefix, ignore_cleanup_errors=True)
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
            root.mkdir(FOLDER_MODE)
        except FileExistsError:
            found = root.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
                raise self._refusal(f"{root} is no folder of this user's: {_AWAY}") from None
            held = {each.name for each in root.iterdir()}
            if held and MARKER not in held:
                raise self._refusal(f"{root} is not a buffer's, as it lacks {MARKER}: {_AWAY}") from None
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        lock = os.open(root / MARKER, flags, FILE_MODE)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise self._refusal(f"another buffer holds {root}: give each one a folder of its own") from None
        except OSError:
            os.close(lock)
            raise
        self._lock = lock
        root.chmod(FOLDER_MODE)

    def _refusal(self, problem: str) -> ConfigError:
        return ConfigError(f"{self._key} = {self._configured!r}: {problem}")

    def release(self) -> None:
        """Unlock the folder; delete it if it is temporary."""
        temporary, self._temporary = self._temporary, None
        if temporary is not None:
            temporary.cleanup()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
