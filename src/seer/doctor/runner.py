"""Runs checks one after another, in processes of their own, and keeps what they find.

Invariants:
- a check that crashes or outlasts its deadline becomes a line that fails with a fix; the next one runs, in
  another process if it was to share this one;
- a check whose needed one failed fails by name, and is not begun;
- the time of all checks together is bounded. A check for which none is left says so by name: it fails, or is
  left out if it is optional;
- a line is handed on as soon as it is written; no process of a check outlives it, and none this process.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from seer.doctor.bundle import whole_lines
from seer.doctor.report_lines import ENDED, Line, parse

_EXIT_SECONDS = 10.0
"""What a process has to end in, after its last line or a kill."""

_READ = 1 << 16
_MAX_LINE = 1 << 20
_TAIL, _SHOWN = 600, 80


@dataclass(frozen=True, slots=True)
class Check:
    """One check: `function` is "module:name", called with a `Report`; it may take `seconds`.

    Neighbours of one `process` share it; the first one there has `setup` seconds more. `needs` names a check
    without which this one has nothing to check.
    """

    name: str
    function: str
    seconds: float
    process: str = ""
    setup: float = 0.0
    needs: str = ""
    optional: bool = False


def run_checks(
    checks: Sequence[Check], seconds: float, config: str = "", logs: Path | None = None
) -> Iterator[Line]:
    """Run all checks within `seconds`; yield their lines as they come.

    `config` is a file for the checks to read, `logs` a folder for what they print, `<name>.log` of each
    process's first check.
    """
    end = time.monotonic() + seconds
    waiting, failed = list(checks), set[str]()
    while waiting:
        check = waiting[0]
        if check.needs in failed:
            text = f"not checked: it needs what {check.needs} checks, which failed"
            yield Line(check.name, "fail", text, f"mend {check.needs} first")
            waiting.pop(0)
        elif time.monotonic() >= end:
            text = f"not run: the {seconds:.0f} s for all checks are used up"
            fix = f"allow more with --seconds, or run --only {check.name}"
            yield Line(check.name, "skip" if check.optional else "fail", text, fix)
            waiting.pop(0)
        else:
            for line in _Process(_neighbours(waiting), config, logs).lines(end):
                if line.status == "fail":
                    failed.add(line.check)
                if line.text == ENDED:
                    waiting.pop(0)
                yield line


def _neighbours(checks: Sequence[Check]) -> list[Check]:
    """Return the first checks, which share a process."""
    first, *others = checks
    found = [first]
    for check in others:
        if not first.process or check.process != first.process:
            break
        found.append(check)
    return found


class _Process:
    """A process with one check or several; each that it gets to ends with the line `ENDED`."""

    def __init__(self, checks: Sequence[Check], config: str, logs: Path | None) -> None:
        self._checks, self._config, self._logs = list(checks), config, logs
        self._last, self._begun = "nothing", time.monotonic()

    def lines(self, end: float) -> Iterator[Line]:
        """Run until `end` at most, and yield lines; the first check ends, whatever happens."""
        reading, writing = os.pipe()
        with self._output() as output, os.fdopen(reading, "rb", buffering=0) as pipe:
            given = json.dumps([asdict(check) for check in self._checks])
            arguments = str(os.getpid()), str(writing), self._config, given
            process = subprocess.Popen(
                [sys.executable, "-m", "seer.doctor.child", *arguments],
                stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                pass_fds=(writing,), start_new_session=True,
            )  # fmt: skip
            os.close(writing)
            try:
                yield from self._listen(pipe, process, output, end)
            finally:
                _end(process)

    def _listen(
        self, pipe: IO[bytes], process: subprocess.Popen[bytes], output: IO[bytes], end: float
    ) -> Iterator[Line]:
        texts, seconds = _Texts(pipe), self._checks[0].seconds + self._checks[0].setup
        failed = set[str]()
        problem = ""
        while not problem:
            seconds = min(seconds, end - self._begun)
            try:
                text = texts.read(self._begun + seconds)
                status = process.wait(_EXIT_SECONDS) if text is None else 0
            except (TimeoutError, subprocess.TimeoutExpired):
                problem = f"did not end within {seconds:.0f} s"
            else:
                if text is not None:
                    try:
                        line = parse(text)
                    except ValueError:
                        problem = f"wrote what is no line of a check: {text[:_SHOWN]!r}"
                        continue
                    if line.status == "fail":
                        failed.add(line.check)
                    yield line
                    seconds = self._follow(line, seconds)
                elif not self._checks or (status == 0 and self._checks[0].needs in failed):
                    return
                else:
                    ended = f"signal {-status}" if status < 0 else f"exit code {status}"
                    problem = f"crashed with {ended}"
        if self._checks:
            yield from self._failed(problem, output)

    def _follow(self, line: Line, seconds: float) -> float:
        """Take note of a line; return how many seconds the check that runs now may take."""
        self._last = line.text
        if line.text != ENDED:
            return seconds
        self._checks.pop(0)
        self._begun, self._last = time.monotonic(), "nothing"
        return self._checks[0].seconds if self._checks else _EXIT_SECONDS

    def _failed(self, problem: str, output: IO[bytes]) -> Iterator[Line]:
        name = self._checks[0].name
        fix = f"run `--only {name}`; it wrote: {_tail(output)}"
        yield Line(name, "fail", f"{problem}; its last line said: {self._last}", fix)
        yield Line(name, "note", ENDED, figures={"seconds": round(time.monotonic() - self._begun, 1)})

    def _output(self) -> IO[bytes]:
        if self._logs is None:
            return tempfile.TemporaryFile()
        return (self._logs / f"{self._checks[0].name}.log").open("w+b")


class _Texts:
    """The lines that come out of a pipe."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self._pipe, self._lines, self._rest = pipe, list[bytes](), b""

    def read(self, deadline: float) -> str | None:
        """Return the next line, None when the writer has closed; raise `TimeoutError` at the deadline."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._pipe, selectors.EVENT_READ)
            while True:
                left = deadline - time.monotonic()  # also bounds one that never stops writing
                if left <= 0:
                    raise TimeoutError
                if self._lines:
                    return self._lines.pop(0).decode(errors="replace")
                if not selector.select(left):
                    raise TimeoutError
                read = self._pipe.read(_READ)
                if not read:
                    return None
                *self._lines, self._rest = (self._rest + read).split(b"\n")
                if len(self._rest) > _MAX_LINE:  # no line of ours
                    self._lines.append(self._rest)
                    self._rest = b""


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the check with all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_EXIT_SECONDS)  # a driver that hangs keeps even a killed process


def _tail(output: IO[bytes]) -> str:
    size = output.seek(0, os.SEEK_END)
    output.seek(max(0, size - _TAIL))
    text = output.read().decode(errors="replace").strip()
    return (whole_lines(text) if size > _TAIL else text) or "nothing"
