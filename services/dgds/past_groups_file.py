"""The file that keeps a dgds's `PastGroups` over restarts.

Invariants (tests/unit/test_dgds_memory.py asserts them):
- the file is complete or was not written: the file is replaced in one step;
- only an undamaged file that `save` wrote under the same `[shared]` settings is read;
- a file that `save` did not write is never overwritten;
- only its user can read the file, which has responses.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from seer.common.errors import NOT_DECODED, ConfigError
from seer.common.process.scratch import open_private

_MAGIC = b"seer dgds memory 1\n"
_DIGEST_BYTES = 16

Entries = list[tuple[int, tuple[bytes, ...]]]
"""Prompts with their packed streams, least recently used first."""


def save(path: Path, shared: str, entries: Sequence[tuple[int, tuple[bytes, ...]]]) -> None:
    """Write `entries`; `shared` is the `shared_hash` of the configuration. Raises `ConfigError`."""
    body = msgspec.msgpack.encode((shared, entries))
    new = Path(f"{path}.new")
    try:
        if path.exists() and not _ours(path):
            raise _problem(path, "not a file of Seer's; give the dgds a file of its own")
        with open_private(new, "wb") as file:
            file.writelines((_MAGIC, _digest(body), body))
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except OSError as error:
        raise ConfigError(
            f"dgds.remember_path = {path}: {error.strerror}; name a file on a disk with room"
        ) from error


def load(path: Path, shared: str) -> Entries:
    """Return what `save` wrote; nothing if there is no file. Raises `ConfigError` for any other."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise _problem(path, f"{error.strerror}; name a file") from error
    head, body = data[: len(_MAGIC)], data[len(_MAGIC) + _DIGEST_BYTES :]
    if head != _MAGIC:
        raise _problem(path, "not a file of Seer's; give the dgds a file of its own")
    if data[len(_MAGIC) : len(_MAGIC) + _DIGEST_BYTES] != _digest(body):
        raise _problem(path, "damaged; it is not used")
    try:
        written_for, entries = msgspec.msgpack.decode(body, type=tuple[str, Entries])
    except NOT_DECODED as error:
        raise _problem(path, f"of another version ({error}); it is not used") from error
    if written_for != shared:
        raise ConfigError(
            f"dgds.remember_path = {path}: written for another model or [shared] section; it is not used"
        )
    return entries


def _problem(path: Path, what: str) -> ConfigError:
    return ConfigError(f"dgds.remember_path = {path}: {what}")


def _ours(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


def _digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest()
