"""The finished groups of a `seer rollout`, kept in OUT.journal until OUT can be written completely.

Invariants:
- the journal gets a group's line when the group has finished, the same line that OUT will have; an
  incomplete last line is dropped;
- a journal is continued only by the same run: same model bytes, parameters and prompts;
- OUT appears complete, in input order, and only then is the journal removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, Self

import msgspec

from seer.client.results import Group
from seer.common.errors import NOT_DECODED, InvalidField
from seer.common.process.scratch import open_private
from seer.rollout.files import PromptLine, encode_group, replacing

SUFFIX = ".journal"
_BEGINS = b'{"journal":'
_DIGEST_BYTES = 16


class _Head(msgspec.Struct, forbid_unknown_fields=True):
    """First line of a journal: all that its run's tokens depend on."""

    journal: dict[str, str]


class _Id(msgspec.Struct):
    id: str
    weight_version: int


class Journal:
    """Append-only. `done`: ids of the groups in it; `path`: OUT's name + `.journal`."""

    def __init__(self, out: Path, file: BinaryIO) -> None:
        self.path = _beside(out)
        self._out = out
        self._file = file
        self._lines: dict[str, tuple[int, int]] = {}
        self._weight_version: int | None = None
        self._began = False

    @classmethod
    def open(cls, out: Path, run: Mapping[str, str], *, resume: bool) -> Self:
        """Begin a journal, or with `resume` continue the one that is there.

        `run` is everything that the tokens depend on, by name. Raises `InvalidField` when the journal is of
        another run, when there is one but not `resume`, or when its run is still going on.
        """
        path = _beside(out)
        with contextlib.ExitStack() as on_error:
            try:
                journal = cls(out, open_private(path, "a+b"))
                on_error.callback(journal.close)
                journal._lock()
                journal._begin(dict(run), resume)
            except OSError as error:
                raise InvalidField("--out", str(out), f"cannot write {path}: {error.strerror}") from error
            on_error.pop_all()
        return journal

    @property
    def done(self) -> frozenset[str]:
        """Prompt ids of the groups in the journal."""
        return frozenset(self._lines)

    def add(self, group: Group) -> None:
        """Add a finished group. Raises `InvalidField` when it cannot be written, or has other weights."""
        self._same_weights(group.prompt_id, group.weight_version)
        line = encode_group(group)
        try:
            start = self._file.seek(0, os.SEEK_END)
            self._file.write(line)
            self._file.flush()
        except OSError as error:
            fix = f"{self.path}: {error.strerror}; fix that and continue with --resume"
            raise InvalidField("--out", str(self._out), fix) from error
        self._lines[group.prompt_id] = (start, len(line))

    def publish(self, order: Sequence[str]) -> None:
        """Write OUT, one line per id of `order`, and remove the journal. Raises as `add` does."""
        try:
            with replacing(self._out) as partial, partial.open("wb") as out:
                for prompt_id in order:
                    start, length = self._lines[prompt_id]
                    self._file.seek(start)
                    out.write(self._file.read(length))
                out.flush()
                os.fsync(out.fileno())
        except OSError as error:
            fix = f"{error.strerror}; all groups are in {self.path}: fix that and continue with --resume"
            raise InvalidField("--out", str(self._out), fix) from error
        self.path.unlink()

    def close(self) -> None:
        """Close the file; a new journal without groups is removed."""
        if self._began and not self._lines:
            self.path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # on a full disk it fails again
            self._file.close()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            fix = "another run is writing it; wait for that, or give another file"
            raise InvalidField("--out", str(self._out), fix) from error

    def _begin(self, run: dict[str, str], resume: bool) -> None:
        self._file.seek(0)
        head = self._file.readline()
        whole = head.endswith(b"\n")
        if not whole and _BEGINS.startswith(head[: len(_BEGINS)]):  # empty, or interrupted before any group
            self._began = True
            self._file.truncate(0)
            self._file.write(msgspec.json.encode(_Head(run)) + b"\n")
            self._file.flush()
            return
        if not resume:
            fix = f"{self.path} holds an interrupted run: give --resume to continue it, or delete it"
            raise InvalidField("--out", str(self._out), fix)
        self._check(head, run)
        self._load()

    def _check(self, head: bytes, run: dict[str, str]) -> None:
        try:
            known = msgspec.json.decode(head, type=_Head).journal
        except NOT_DECODED as error:
            raise InvalidField("--resume", str(self.path), f"not a journal ({error}); delete it") from error
        other = [
            f"{name} {run.get(name, 'none')}, there {known.get(name, 'none')}"
            for name in sorted(known | run)
            if known.get(name) != run.get(name)
        ]
        if other:
            fix = f"belongs to another run ({'; '.join(other)}): give another --out, or delete it"
            raise InvalidField("--resume", str(self.path), fix)

    def _load(self) -> None:
        start = self._file.tell()
        for line in self._file:
            try:
                entry = msgspec.json.decode(line, type=_Id) if line.endswith(b"\n") else None
            except NOT_DECODED as error:
                raise InvalidField("--resume", str(self.path), f"is damaged ({error}); delete it") from error
            if entry is None:
                self._file.truncate(start)
                break
            self._same_weights(entry.id, entry.weight_version)
            self._lines[entry.id] = (start, len(line))
            start += len(line)

    def _same_weights(self, prompt_id: str, version: int) -> None:
        if self._weight_version not in (None, version):
            fix = f"the journal's groups have weight version {self._weight_version}; delete it and start over"
            raise InvalidField(f"weight version of {prompt_id}", version, fix)
        self._weight_version = version


def model_digest(folder: Path) -> str:
    """Digest the bytes of a folder's configuration, weights and tokenizer."""
    files = sorted([*folder.glob("*.json"), *folder.glob("*.safetensors"), *folder.glob("*.bin")])
    with ThreadPoolExecutor() as pool:  # hashlib releases the GIL; a large model has many shards
        digests = list(pool.map(_file_digest, files))
    named = [(file.name, digest) for file, digest in zip(files, digests, strict=True)]
    return hashlib.blake2b(msgspec.json.encode(named), digest_size=_DIGEST_BYTES).hexdigest()


def prompts_digest(lines: Iterable[PromptLine]) -> str:
    """Digest the prompts: ids, token ids, metadata and images, in order."""
    whole = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for line in lines:
        prompt = line.prompt
        asked = [prompt.id, prompt.token_ids.tolist(), prompt.metadata, *prompt.places]
        whole.update(msgspec.json.encode(asked) + b"\n")
    return whole.hexdigest()


def _file_digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "blake2b").hexdigest()
    except OSError as error:
        raise InvalidField("--model", str(path), f"cannot be read: {error.strerror}") from error


def _beside(out: Path) -> Path:
    return out.with_name(out.name + SUFFIX)
