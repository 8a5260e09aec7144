"""Temporary folders, and private files. The folders of a killed process are removed by the next that starts.

Invariants:
- a folder is private (0700) and locked, by a marker file in it, as long as its process lives; the kernel
  releases the lock however the process ends;
- `sweep` removes folders that have our name and a marker, belong to this user and are not locked. It follows
  no links, and touches nothing else;
- a marker is never seen without its lock, so a folder that is just being made is not swept; of several
  sweeps one removes a folder, and the marker last: what was interrupted is done by the next sweep.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import stat
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Self, cast

_NAME = re.compile(r"seer-[a-z]+-[a-z0-9_]{8}")
_MARK = ".seer-scratch"
_MARK_TEXT = "A temporary folder of Seer, removed when no process holds the lock of this file.\n"


def nearest_existing(path: Path) -> Path:
    """Return a path, or its nearest parent if it does not exist yet or lies in a folder of others."""
    whole = path.absolute()
    return next(each for each in (whole, *whole.parents) if os.path.exists(each))  # noqa: PTH110 - never raises


def open_private(path: Path, mode: str, *, buffering: int = -1) -> BinaryIO:
    """Open a file of bytes as `open` does; nobody but its user may read or write it. Raises `OSError`."""
    return cast("BinaryIO", open(path, mode, buffering, opener=_private))


def _private(path: str, flags: int) -> int:
    opened = os.open(path, flags | os.O_CLOEXEC, 0o600)
    if os.fstat(opened).st_mode & 0o077:  # an earlier release made it
        with contextlib.suppress(PermissionError):  # it is another user's, or of a file system without modes
            os.fchmod(opened, 0o600)
    return opened


class Scratch:
    """A new folder `seer-<kind>-XXXXXXXX` in `parent` (default: the temporary folder), with only a marker.

    Use as a context manager, or `close` it. Raises `OSError`.
    """

    def __init__(self, kind: str, parent: str | Path | None = None) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=f"seer-{kind}-", dir=parent))
        try:
            self._mark = _mark(self.path)
        except BaseException:
            shutil.rmtree(self.path, ignore_errors=True)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the folder, as far as possible."""
        _remove(self.path)
        os.close(self._mark)

    def keep(self) -> None:
        """Leave the folder and its files to the user: it will never be swept."""
        (self.path / _MARK).unlink(missing_ok=True)
        os.close(self._mark)


@contextlib.contextmanager
def private_temporary_folder() -> Iterator[None]:
    """Put temporary files of this process, and of those that it starts, into a `Scratch`.

    Meanwhile removes folders of killed processes beside it. If no folder can be made, e.g. on a full disk,
    nothing changes: whatever needs temporary files will report it.
    """
    configured, parent = os.environ.get("TMPDIR"), tempfile.gettempdir()
    # `tempfile` skips a full disk for another, but leftovers may be what fills it: sweep both.
    for place in {parent, configured or parent}:
        threading.Thread(target=sweep, args=(place,), name="seer-sweep", daemon=True).start()
    try:
        scratch = Scratch("proc", parent)
    except OSError:
        yield
        return
    try:
        os.environ["TMPDIR"] = tempfile.tempdir = str(scratch.path)
        yield
    finally:
        tempfile.tempdir = parent
        os.environ.pop("TMPDIR")
        if configured is not None:
            os.environ["TMPDIR"] = configured
        scratch.close()


def lasting_temporary_folder() -> Path:
    """Return the temporary folder whose files outlive this process; a `private_temporary_folder`'s do not."""
    folder = Path(tempfile.gettempdir())
    return folder.parent if (folder / _MARK).exists() else folder


def cache_folder() -> Path:
    """Return the default folder for what is kept between starts."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "seer"


def sweep(parent: str | Path | None = None) -> list[Path]:
    """Remove folders of killed processes in `parent` (default: the temporary one); return those removed."""
    swept = []
    for folder in _ours(Path(parent or tempfile.gettempdir())):
        with contextlib.suppress(OSError), _held(folder):
            _remove(folder)
            if not folder.exists():
                swept.append(folder)
    return swept


def _mark(folder: Path) -> int:
    """Put a marker into a new folder, locked before it can be seen; return its file descriptor."""
    new = folder / f"{_MARK}.new"
    mark = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        fcntl.flock(mark, fcntl.LOCK_EX)
        os.write(mark, _MARK_TEXT.encode())
        new.rename(folder / _MARK)
    except BaseException:
        os.close(mark)
        raise
    return mark


def _ours(parent: Path) -> Iterator[Path]:
    with contextlib.suppress(OSError):
        for folder in [each for each in parent.iterdir() if _NAME.fullmatch(each.name)]:
            with contextlib.suppress(OSError):
                found = folder.lstat()
                if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid():
                    yield folder


@contextlib.contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Lock a folder that no process uses. Raises `OSError` if it has no marker, or is in use."""
    mark = os.open(folder / _MARK, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        found = os.fstat(mark)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            raise PermissionError(f"{folder / _MARK} is not ours")
        fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat((folder / _MARK).lstat(), found):  # another sweeper was here
            raise FileNotFoundError(folder)
        yield
    finally:
        os.close(mark)


def _remove(folder: Path) -> None:
    with contextlib.suppress(OSError):
        for entry in list(folder.iterdir()):
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            elif entry.name != _MARK:
                with contextlib.suppress(OSError):
                    entry.unlink()
        if [entry.name for entry in folder.iterdir()] == [_MARK]:
            (folder / _MARK).unlink()
        folder.rmdir()
