"""Chunks that are kept on disk, in files of one rollout each, read when the buffer is started again.

A response is a function of weights, prompt, sampling and key, so what a killed buffer had kept is what its
successor would generate again. Once a client submits the same prompt for the same weights, its responses
continue from there.

Invariants (tests/unit/test_kept_chunks.py):
- what is restored is what was kept; a file counts up to the first damaged record (`chunk_file.py`);
- nothing is restored for other weights, sampling, seed, n or prompt;
- a file is deleted with the last of its groups, or after `ttl_seconds` if no client submits its rollout
  again;
- a file of `FILE_BYTES` gets no more groups: what a rollout that takes prompts for ever has on disk is
  bounded by what goes on;
- only one buffer at a time uses a folder, and only its user can read what is there;
- the buffer never waits for data to reach the disk (no fsync), and a full disk does not stop it: what could
  not be written is generated again if the buffer is killed meanwhile;
- once there is room again, files are cut to what was written whole, and each group in them begins anew, with
  all that it has by then: `CATCH_UP_BYTES` of them at each `tick`, and those that get a chunk.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NamedTuple

from seer.common import wire
from seer.common.errors import ConfigError
from seer.common.process.log import get_logger
from seer.common.process.scratch import open_private
from seer.services.buffer.events import Weights
from seer.services.buffer.log.chunk_file import (
    GroupRecord,
    Output,
    Outputs,
    RemovedRecord,
    RolloutRecord,
    SavedGroup,
    chunk_records,
    encode_record,
    prompt_digest,
    read_groups,
    read_outputs,
)
from seer.services.buffer.log.outage import Outage, check_room, outage, write_all
from seer.services.buffer.requests.events import Kept

SUFFIX = ".chunks"

FILE_BYTES = 2**28
"""Size from which a file gets no more groups."""

CATCH_UP_BYTES = 2**23
"""What a `tick` writes of groups that could not be written before: 10 to 14 ms (`bench/services/log.py`)."""


class SoFar(NamedTuple):
    """A group of this incarnation. `params_digest` is `ids.params_digest` of its submission."""

    params_digest: int
    prompt: wire.Tokens
    weights: Weights
    outputs: Outputs


@dataclass(slots=True, eq=False)
class _File:
    """A file of a rollout; all sets and dicts are by prompt id.

    `earlier`: groups that an earlier incarnation of the buffer wrote and nobody has submitted again.
    `offered`: outputs of earlier groups that were submitted again and are not restored yet.
    `live`: groups that this incarnation has; `written`: the live groups that the file has; `behind`: the live
    groups of which the file may lack chunks. `pending`: records to be written. `started`: the file has its
    first record, or the first record is pending. `failed`: writing failed, so nothing is written until there
    is room. Good are the first `size` bytes.
    """

    path: Path
    out: BinaryIO | None = None
    earlier: dict[str, SavedGroup] = field(default_factory=dict)
    offered: dict[str, Outputs] = field(default_factory=dict)
    live: set[str] = field(default_factory=set)
    written: set[str] = field(default_factory=set)
    behind: set[str] = field(default_factory=set)
    pending: list[bytes] = field(default_factory=list)
    started: bool = False
    failed: bool = False
    size: int = 0


class KeptChunks:
    """The files below `folder`; empty: nothing is kept. `now`: monotonic seconds.

    `so_far` tells what a group has by its id; None: it is forgotten. `outage`: since when
    files cannot be written, None if they can. Raises `ConfigError` if the folder cannot be used, or another
    buffer uses it.
    """

    def __init__(
        self, folder: str, ttl_seconds: float, now: float, so_far: Callable[[str], SoFar | None]
    ) -> None:
        self._log = get_logger()
        self._folder = Path(folder) if folder else None
        self._files: dict[str, list[_File]] = {}  # by rollout id, the one for new groups last
        self._changed: set[_File] = set()
        self._expires = now + ttl_seconds
        self._now, self._so_far = now, so_far
        self.outage: Outage | None = None
        self._lock: int | None = None
        if self._folder is not None:
            self._lock = _lock(self._folder)
            for path in sorted(self._folder.glob(f"*{SUFFIX}")):
                self._read(path)

    # --- what an earlier incarnation kept --------------------------------------------------

    def _read(self, path: Path) -> None:
        try:
            rollout_id, groups, end = read_groups(path)
            if not rollout_id or not groups:
                path.unlink()
                return
            if end < path.stat().st_size:
                self._log.warning("kept chunks are damaged from here on", file=str(path), offset=end)
                os.truncate(path, end)
        except OSError as error:
            self._log.warning("kept chunks cannot be read", file=str(path), error=str(error))
            return
        file = _File(path, earlier=groups, started=True, size=end)
        self._files.setdefault(rollout_id, []).append(file)

    def offer(self, rollout_id: str, prompt_id: str, params_digest: int, prompt: wire.Tokens) -> Kept | None:
        """Return what an earlier incarnation kept of a prompt submitted again; None: nothing of use."""
        file = next((file for file in self._files.get(rollout_id, ()) if prompt_id in file.earlier), None)
        if file is None:
            return None
        group = file.earlier[prompt_id]
        if (group.record.params_digest, group.record.prompt) != (params_digest, prompt_digest(prompt)):
            return None
        try:
            file.offered[prompt_id] = read_outputs(file.path, group)
        except (OSError, ValueError) as error:
            self._log.warning("kept chunks cannot be read", file=str(file.path), error=str(error))
            return None
        return group.kept()

    def restore(self, group_id: str) -> Outputs:
        """Return the outputs that were offered; further chunks of the group are appended to its file."""
        rollout_id, _, prompt_id = group_id.partition("/")
        for file in self._files[rollout_id]:
            file.live.discard(prompt_id)
            file.behind.discard(prompt_id)
        file = next(file for file in self._files[rollout_id] if prompt_id in file.offered)
        file.earlier.pop(prompt_id, None)
        file.live.add(prompt_id)
        file.written.add(prompt_id)
        self._delete_unneeded(rollout_id)
        return file.offered.pop(prompt_id)

    # --- this incarnation --------------------------------------------------------------------

    def open(self, rollout_id: str, prompt_id: str) -> None:
        """Record that the buffer has a group: a file of its rollout stays until it is forgotten."""
        if self._folder is None:
            return
        files = self._files.setdefault(rollout_id, [])
        if not files or files[-1].size >= FILE_BYTES:
            files.append(_File(self._new_path(rollout_id)))
        files[-1].live.add(prompt_id)

    def _new_path(self, rollout_id: str) -> Path:
        """Return a path that no file has."""
        name = hashlib.blake2b(rollout_id.encode(), digest_size=16).hexdigest()
        taken = {file.path for file in self._files[rollout_id]}  # one may not be on disk yet
        number = len(taken)
        while (path := Path(self._folder or "") / f"{name}-{number}{SUFFIX}") in taken or path.exists():
            number += 1
        return path

    def keep(self, group_id: str, index: int, chunk: Output) -> None:
        """Add a chunk, to be written by the next `flush`; `so_far` has it already."""
        rollout_id, _, prompt_id = group_id.partition("/")
        file = self._file_of(rollout_id, prompt_id)
        if file is None or file.failed:
            return
        if prompt_id in file.written and prompt_id not in file.behind:
            file.pending += chunk_records(prompt_id, index, chunk)
            self._changed.add(file)
        else:
            self._begin(file, rollout_id, prompt_id)

    def _begin(self, file: _File, rollout_id: str, prompt_id: str) -> int:
        """Add all that a group has, in place of what the file may have of it; return the bytes of that."""
        file.behind.discard(prompt_id)
        group = self._so_far(f"{rollout_id}/{prompt_id}")
        if group is None or not group.outputs:
            return 0
        records = [] if file.started else [encode_record(RolloutRecord(rollout_id))]
        file.started = True
        file.written.add(prompt_id)
        for other in self._files[rollout_id]:
            other.earlier.pop(prompt_id, None)
            other.offered.pop(prompt_id, None)
        self._delete_unneeded(rollout_id)
        of = (prompt_digest(group.prompt), group.weights.version, group.weights.digest)
        records.append(encode_record(GroupRecord(prompt_id, group.params_digest, *of)))
        for index, output in group.outputs.items():
            records += chunk_records(prompt_id, index, output)
        file.pending += records
        self._changed.add(file)
        return sum(map(len, records))

    def _file_of(self, rollout_id: str, prompt_id: str) -> _File | None:
        """Return the file that has a group of this incarnation; looks at the newest first."""
        files = reversed(self._files.get(rollout_id, ()))
        return next((file for file in files if prompt_id in file.live), None)

    def flush(self) -> None:
        """Write all pending records."""
        for file in self._changed:
            if file.failed or not file.pending:
                continue
            text, file.pending = b"".join(file.pending), []
            try:
                if file.out is None:
                    file.out = open_private(file.path, "ab", buffering=0)
                write_all(file.out, text)
                file.size += len(text)
            except OSError as error:
                if self.outage is None:
                    why = str(error)
                    self._log.warning("no chunks are kept until they can be", file=str(file.path), error=why)
                self.outage = outage(self.outage, error, self._now)
                file.failed = True  # the file's chunks stay valid: any beginning of a response can go on
        self._changed.clear()

    def _resume(self, folder: Path) -> None:
        """Have files that failed go on, if there is room."""
        self.outage, before = None, self.outage
        failed = [file for files in self._files.values() for file in files if file.failed]
        try:
            check_room(folder)
        except OSError as error:
            self.outage = outage(before, error, self._now)
            return
        for file in failed:
            try:
                if file.out is not None:
                    file.out.truncate(file.size)  # an end of half a record would hide what follows
            except OSError as error:
                self.outage = outage(before, error, self._now)
                continue
            file.failed, file.behind = False, set(file.live)
            if file.size:
                self._changed.add(file)
            else:
                file.started, file.pending = False, []
                file.written.clear()
        if self.outage is None:
            self._log.info("chunks are kept again")

    def _catch_up(self) -> None:
        left = CATCH_UP_BYTES
        for rollout_id, files in list(self._files.items()):
            for file in list(files):
                while file.behind and not file.failed and left > 0:
                    left -= self._begin(file, rollout_id, next(iter(file.behind)))

    def forget(self, group_id: str) -> None:
        """Remove a group that the buffer has no longer; with the last one, delete its rollout's file."""
        rollout_id, _, prompt_id = group_id.partition("/")
        for file in self._files.get(rollout_id, ()):
            file.offered.pop(prompt_id, None)
            file.live.discard(prompt_id)
            file.behind.discard(prompt_id)
            if prompt_id in file.written:
                file.written.discard(prompt_id)
                file.pending.append(encode_record(RemovedRecord(prompt_id)))
                self._changed.add(file)
        self._delete_unneeded(rollout_id)

    def tick(self, now: float) -> None:
        """Write what is pending, also of groups that could not be written before, if there is room now.

        Free outputs of refused prompts; after `ttl_seconds`, delete what nobody submitted again.
        """
        self._now = now
        if self._folder is not None and self.outage is not None and now >= self.outage.again:
            self._resume(self._folder)
        self._catch_up()
        self.flush()
        expired = now >= self._expires
        for rollout_id, files in list(self._files.items()):
            for file in list(files):
                for prompt_id in [each for each in file.offered if not any(each in of.live for of in files)]:
                    del file.offered[prompt_id]  # its submission was refused
                if expired:
                    file.earlier.clear()
            if expired:
                self._delete_unneeded(rollout_id)

    def close(self) -> None:
        """Write pending records and close all files; a successor reads them."""
        self.flush()
        for file in (file for files in self._files.values() for file in files):
            if file.out is not None:
                file.out.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _delete_unneeded(self, rollout_id: str) -> None:
        files = self._files.get(rollout_id, [])
        for file in [file for file in files if not (file.live or file.earlier or file.offered)]:
            files.remove(file)
            self._delete(file)
        if not files:
            self._files.pop(rollout_id, None)

    def _delete(self, file: _File) -> None:
        self._changed.discard(file)
        with contextlib.suppress(OSError):  # a disk that fails; it is left to the next incarnation
            if file.out is not None:
                file.out.close()
            file.path.unlink(missing_ok=True)


def _lock(folder: Path) -> int:
    """Lock a folder until the returned descriptor is closed or the process ends. Raises `ConfigError`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise ConfigError(f"buffer.log: no chunks can be kept there: {error}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        fix = "give each one a folder of its own, or say buffer.keep_chunks=false"
        raise ConfigError(f"buffer.log: another buffer keeps its chunks in {folder}: {fix}") from None
    return lock
