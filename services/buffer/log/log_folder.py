"""The files of a log's folder: `INCARNATION-NUMBER.jsonl`, the segments of each incarnation of the buffer.

Invariants (tests/unit/test_log_folder.py):
- the oldest segment about one of the newest `ROLLOUTS` rollouts of all incarnations, and all segments after
  it, are kept; but the oldest segments are deleted while all together have more than `KEPT_BYTES`;
- a segment that is being written is never deleted, whichever buffer writes it;
- no other files are touched.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from itertools import islice
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec

from seer.common.errors import NOT_DECODED
from seer.services.buffer.log.rows import Header, Line, Submission
from seer.services.buffer.requests.events import GroupsSubmitted

ROLLOUTS = 20
"""Enough for an incident that is noticed within a few iterations."""

KEPT_BYTES = 2**31
"""Room for the rows of 20 rollouts of half an hour, at 100,000 tokens/s in chunks of 512."""

_NAME = re.compile(r"[0-9a-f]{16}-[0-9]{6}\.jsonl")
_SUBMITTED = b'["GroupsSubmitted",'


def name(header: Header) -> str:
    """Return a segment's file name."""
    return f"{header.incarnation:016x}-{header.number:06}.jsonl"


def segments(folder: Path) -> list[Path]:
    """Return the segments in a folder, sorted by incarnation and number."""
    return sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name))


def incarnations(folder: Path) -> list[list[Path]]:
    """Return each incarnation's segments in order; incarnations, too, unless a clock was set back."""
    found: dict[str, list[Path]] = {}
    for path in segments(folder):
        found.setdefault(path.name.partition("-")[0], []).append(path)
    return list(found.values())


def begun(path: Path) -> bool:
    """Return whether a file has a whole first line; its writer may have been killed before."""
    with path.open("rb") as file:
        return file.readline().endswith(b"\n")


def submitted(path: Path) -> list[Submission]:
    """Return the rollouts submitted in a segment, up to the first line that cannot be read."""
    submissions: dict[Submission, None] = {}
    with path.open("rb") as file:
        for text in file:
            if _SUBMITTED in text:  # few lines have it; decoding all lines takes ten times as long
                try:
                    event = _line.decode(text).event
                except NOT_DECODED:
                    break
                if isinstance(event, GroupsSubmitted):
                    submissions[event.rollout_id, event.submission] = None
    return list(submissions)


def create(path: Path) -> BinaryIO:
    """Create a segment, locked for as long as it is being written. Raises `OSError`."""
    while True:
        file = path.open("xb", buffering=0)
        fcntl.flock(file, fcntl.LOCK_EX)  # a buffer that deletes old segments may hold it for a moment
        if os.fstat(file.fileno()).st_nlink:
            return file
        file.close()


class _Head(msgspec.Struct):
    """The fields of a `Header` that `Pruner` needs."""

    started: float = 0.0
    open: list[Submission] = []
    before: list[Submission] = []


_line = msgspec.json.Decoder(Line)
_head = msgspec.json.Decoder(_Head)


class _Segment(NamedTuple):
    started: float
    path: Path
    size: int
    submissions: list[Submission]


class Pruner:
    """Deletes old segments of a folder. It reads each segment once, and remembers what it read."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._heads: dict[Path, _Head] = {}
        # With the size that the segment had when it was read.
        self._submissions: dict[Path, tuple[int, list[Submission]]] = {}

    def prune(self) -> None:
        """Delete segments that are no longer needed. Raises `OSError`."""
        found = self._segments()
        newest: dict[Submission, None] = {}
        for segment in reversed(found):
            newest |= dict.fromkeys(reversed(segment.submissions))
        needed = set(islice(newest, ROLLOUTS))
        total = sum(segment.size for segment in found)
        begun = len(newest) <= ROLLOUTS
        for segment in found:
            begun = begun or not needed.isdisjoint(segment.submissions)
            if begun and total <= KEPT_BYTES:
                return
            if _deleted(segment.path):
                total -= segment.size
                self._heads.pop(segment.path)
                self._submissions.pop(segment.path, None)

    def _segments(self) -> list[_Segment]:
        """Return segments, the oldest first; those that are no log count as the oldest.

        Those that cannot be opened now are left alone: what they hold may be needed.
        """
        found = []
        for incarnation in incarnations(self._folder):
            for path, following in zip(incarnation, [*incarnation[1:], None], strict=True):
                with contextlib.suppress(OSError):
                    size, head = path.stat().st_size, self._head(path)
                    new = self._head(following).before if following else self._submitted(path, size)
                    found.append(_Segment(head.started, path, size, head.open + new))
        return sorted(found)

    def _head(self, path: Path) -> _Head:
        if path not in self._heads:
            with path.open("rb") as file:
                try:
                    self._heads[path] = _head.decode(file.readline())
                except NOT_DECODED:
                    self._heads[path] = _Head()
        return self._heads[path]

    def _submitted(self, path: Path, size: int) -> list[Submission]:
        if self._submissions.get(path, (-1,))[0] != size:
            self._submissions[path] = size, submitted(path)
        return self._submissions[path][1]


def _deleted(path: Path) -> bool:
    """Delete a segment unless it is being written, or cannot be opened; return whether it is gone."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
    except OSError as error:
        return isinstance(error, FileNotFoundError)  # another buffer deleted it
    return True
