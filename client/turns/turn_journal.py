"""What environments said, on disk: a trainer that is started again does not ask its environments again.

A file has a line of JSON for each answer, after a first line that names the run. The file has no generated
tokens: the same context gives the same tokens.

Invariants (tests/unit/test_journal.py):
- an answer is in the file before the agent sees the answer (and survives the process, not a power cut: no
  fsync), and is the same when read from the file;
- one process at a time writes a file, and only while it lives: the lock is the system's;
- a line that was cut off counts as not written, and is overwritten; a file that is no journal, or a journal
  of another run, is left unchanged;
- an answer is given only for the context to which the environment gave it.
"""

from __future__ import annotations

import fcntl
import secrets
from pathlib import Path
from typing import Self

import msgspec

from seer.common.errors import NOT_DECODED, InvalidField, RolloutFailed
from seer.common.process.scratch import open_private


class _Header(msgspec.Struct, forbid_unknown_fields=True):
    run: str
    asked: str


class _Answer(msgspec.Struct, forbid_unknown_fields=True):
    call_id: str
    context: str
    value: object


_BEGINNING = b'{"run":"'
_HEADER, _ANSWER = msgspec.json.Decoder(_Header), msgspec.json.Decoder(_Answer)


class Journal:
    """The answers in a file, which is made if it is not there. `asked` says what the run is about.

    `run` is the run's name: random when the file is made. Raises `InvalidField` if the file is of another
    run, no journal, in use by another process, or cannot be written.
    """

    def __init__(self, path: str | Path, asked: str) -> None:
        self._path = Path(path)
        self._answers: dict[str, _Answer] = {}
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open_private(self._path, "ab+")
        except OSError as error:
            raise InvalidField("journal", str(path), f"cannot be written: {error.strerror}") from error
        try:
            self._lock()
            self.run = self._read(asked)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __contains__(self, call_id: str) -> bool:
        return call_id in self._answers

    def __len__(self) -> int:
        return len(self._answers)

    def close(self) -> None:
        """Close the file; idempotent."""
        self._file.close()

    def read(self, call_id: str, context: str) -> object:
        """Return an answer. Raises `RolloutFailed` for an answer to another context (a digest)."""
        answer = self._answers[call_id]
        if answer.context != context:
            why = "the context is not what it was: other weights, another agent, or other prompts"
            raise RolloutFailed(f"{self._path}: the answer to {call_id} cannot be used again: {why}")
        return answer.value

    def write(self, call_id: str, context: str, value: object) -> None:
        """Keep an answer. Raises `InvalidField` if JSON cannot hold it."""
        try:
            line = msgspec.json.encode(_Answer(call_id, context, value))
        except (TypeError, ValueError) as error:
            fix = f"a journal keeps what JSON can hold: {error}"
            raise InvalidField("once", type(value).__name__, fix) from error
        self._write(line)
        self._answers[call_id] = _ANSWER.decode(line)

    def _write(self, line: bytes) -> None:
        self._file.write(line + b"\n")
        self._file.flush()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            in_use = "another run writes it: end that first, or give another file"
            fix = in_use if isinstance(error, BlockingIOError) else f"cannot be locked: {error.strerror}"
            raise InvalidField("journal", str(self._path), fix) from error

    def _read(self, asked: str) -> str:
        self._file.seek(0)
        data = self._file.read()
        whole = data.rfind(b"\n") + 1
        lines = data[:whole].splitlines()
        try:
            if not data.startswith(_BEGINNING[: len(data)]):
                raise msgspec.DecodeError("it begins otherwise")
            header = _HEADER.decode(lines[0]) if lines else _Header(secrets.token_hex(8), asked)
            answers = [_ANSWER.decode(line) for line in lines[1:]]
        except NOT_DECODED as error:
            raise InvalidField("journal", str(self._path), f"is no journal: {error}") from error
        if header.asked != asked:
            fix = f"is of a run with {header.asked}, and this one has {asked}: give another file"
            raise InvalidField("journal", str(self._path), fix)
        self._file.truncate(whole)
        if not lines:
            self._write(msgspec.json.encode(header))
        self._answers = {answer.call_id: answer for answer in answers}
        return header.run
