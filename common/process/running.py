"""Which systems run on this machine, so that commands beside one need not be told where it is.

A system has a folder of its own in its user's runtime folder, with a file that says where its trainers
connect. The file holds no keys.

Invariants (tests/unit/test_running.py asserts them):
- a folder is locked as long as its system lives: what a killed one left is not shown, and removed, whichever
  process has its number now;
- nothing is read from, or written to, a place that another user could have made or can write to.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

import msgspec

from seer.common.errors import NOT_DECODED, ConfigError
from seer.common.process.scratch import Scratch, lasting_temporary_folder, sweep

_KIND, _FILE = "system", "where.json"


class Running(msgspec.Struct, frozen=True, kw_only=True):
    """A system: where trainers connect, its model's folder, and its buffer's log.

    `stays` is false for a system that ends with the command that it was started for, as a rollout's does.
    """

    pid: int
    endpoint: str
    model: str = ""
    log: str = ""
    stays: bool = False


def announce(system: Running) -> Scratch:
    """Let others find a system until this is closed, or this process ends. Raises `OSError`."""
    scratch = Scratch(_KIND, runtime_folder())
    try:
        new = scratch.path / f"{_FILE}.new"
        new.write_bytes(msgspec.json.encode(system))
        new.rename(scratch.path / _FILE)
    except BaseException:
        scratch.close()
        raise
    return scratch


def systems() -> list[Running]:
    """Return the systems that this user runs here, and remove what killed ones left."""
    try:
        folder = runtime_folder()
    except OSError:
        return []
    sweep(folder)
    found = []
    for file in folder.glob(f"seer-{_KIND}-*/{_FILE}"):
        with contextlib.suppress(OSError, *NOT_DECODED):  # it ends just now; another version wrote it
            found.append(msgspec.json.decode(file.read_bytes(), type=Running))
    return sorted(found, key=lambda system: system.pid)


def the_system(name_it: str, *, stays: bool = False) -> Running | None:
    """Return the one system that is meant where none is named; None if there is none.

    A system that stays goes before others; with `stays` the others do not count. Raises `ConfigError` for
    several: it lists each as `name_it`, a text with {endpoint} or {log} in it.
    """
    every = systems()
    found = [system for system in every if system.stays] or ([] if stays else every)
    if len(found) < 2:
        return found[0] if found else None
    lines = [
        f"  {name_it.format_map(msgspec.to_builtins(each))}   (process {each.pid}, {_model(each)})"
        for each in found
    ]
    raise ConfigError("\n".join([f"{len(found)} systems run on this machine; name one:", *lines]))


def _model(system: Running) -> str:
    return f"model {Path(system.model).name}" if system.model else "no model"


def runtime_folder() -> Path:
    """Return XDG_RUNTIME_DIR, else a folder of this user's in the temporary one. Raises `OSError`."""
    given = Path(os.environ.get("XDG_RUNTIME_DIR", ""))
    if given.is_absolute() and _is_private(given):
        return given
    folder = lasting_temporary_folder() / f"seer-{os.geteuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(0o700)
    if not _is_private(folder):
        raise PermissionError(f"{folder} is not a folder that this user alone can use: remove it")
    return folder


def _is_private(folder: Path) -> bool:
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077
