"""Runs checks one after another, each in a process of its own, and keeps what they find.

Invariants:
- a check that crashes or outlasts its deadline becomes a line that fails with a fix; the next one runs;
- the time of all checks together is bounded, and a check for which none is left fails by name;
- a line is handed on as soon as it is written; no process of a check outlives it.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO

from seer.doctor.lines import Line, parse

_EXIT_SECONDS = 10.0
"""What a process has to end in, after its last line or a kill."""

_READ = 1 << 16
_TAIL = 600


@dataclass(frozen=True, slots=True)
class Check:
    """One check: `function` is "module:name", called with a `Report`; it may take `seconds`."""

    name: str
    function: str
    seconds: float


def run_checks(checks: Sequence[Check], seconds: float) -> Iterator[Line]:
    """Run all checks within `seconds`; yield their lines as they come."""
    end = time.monotonic() + seconds
    for check in checks:
        left = end - time.monotonic()
        if left <= 0:
            text = f"not run: the {seconds:.0f} s for all checks are used up"
            yield Line(check.name, "fail", text, f"allow more with --seconds, or run --only {check.name}")
        else:
            yield from _run(check, min(check.seconds, left))


def _run(check: Check, seconds: float) -> Iterator[Line]:
    begun = time.monotonic()
    reading, writing = os.pipe()
    with tempfile.TemporaryFile() as output, os.fdopen(reading, "rb", buffering=0) as pipe:
        command = [sys.executable, "-m", "seer.doctor.child", check.name, check.function, str(writing)]
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            pass_fds=(writing,), start_new_session=True,
        )  # fmt: skip
        os.close(writing)
        last = "nothing"
        try:
            for text in _texts(pipe, begun + seconds):
                line = parse(text)
                last = line.text
                yield line
            status = process.wait(max(_EXIT_SECONDS, begun + seconds - time.monotonic()))
        except (TimeoutError, subprocess.TimeoutExpired):
            _end(process)
            text = f"did not end within {seconds:.0f} s; its last line said: {last}"
            yield Line(check.name, "fail", text, f"run `--only {check.name}`; it wrote: {_tail(output)}")
        else:
            if status:
                ended = f"signal {-status}" if status < 0 else f"exit code {status}"
                text = f"crashed with {ended}; its last line said: {last}"
                yield Line(check.name, "fail", text, f"run `--only {check.name}`; it wrote: {_tail(output)}")
        finally:
            _end(process)
    yield Line(check.name, "note", "ended", figures={"seconds": round(time.monotonic() - begun, 1)})


def _texts(pipe: IO[bytes], deadline: float) -> Iterator[str]:
    """Yield lines until the writer closes; raise `TimeoutError` at the deadline."""
    rest = b""
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while True:
            left = deadline - time.monotonic()  # also bounds one that never stops writing
            if left <= 0 or not selector.select(left):
                raise TimeoutError
            read = pipe.read(_READ)
            if not read:
                return
            *lines, rest = (rest + read).split(b"\n")
            for line in lines:
                yield line.decode()


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the check with all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_EXIT_SECONDS)  # a driver that hangs keeps even a killed process


def _tail(output: IO[bytes]) -> str:
    size = output.seek(0, os.SEEK_END)
    output.seek(max(0, size - _TAIL))
    return output.read().decode(errors="replace").strip() or "nothing"
