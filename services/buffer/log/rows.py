"""A log of the buffer's machines: a line of JSON for each event, with what they answered.

The first line of a file is a `Header`, every other one `[time, event, [instruction, ...]]`, the time in
seconds of a monotonic clock. Events and instructions are the machines' own (`services/buffer/machine.py`),
so a log runs through the machines again as it is: `replay`. Instructions that repeat what their event says
are left out (`SAID`).

A line is written whole or, by a process that was killed, in part: `read` ends there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from seer.common.errors import SeerError
from seer.common.policy.schedule import POLICIES
from seer.services.buffer.machine import BufferMachine, Event, Instruction
from seer.services.buffer.requests import instructions
from seer.services.buffer.requests.machine import RequestMachine
from seer.services.buffer.requests.state import Limits
from seer.services.buffer.sleep import SleepMachine
from seer.services.buffer.weights.machine import WeightsMachine

FORMAT = 1

SAID = (
    instructions.Keep,
    instructions.Take,
    instructions.Forget,
    instructions.PublishOpened,
    instructions.PublishProgress,
    instructions.PublishClosed,
)
"""Instructions that no row holds: they follow from the event, and are most of all."""


class LogError(SeerError):
    """A log that cannot be read, or that this version's machines answer in another way."""

    code = "log"


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """What a log is of, and all that the machines' answers depend on beside events and times.

    `started` is the wall clock (seconds since 1970) at `clock` on the log's own. `attempt` numbers the first
    chunk; `engine`, in logs of the simulator, says what simulated it.
    """

    format: int = FORMAT
    version: str = ""
    incarnation: int = 0
    policy: str
    limits: Limits
    update_seconds: float
    attempt: int = 0
    started: float = 0.0
    clock: float = 0.0
    engine: str = ""

    def machine(self) -> BufferMachine:
        """Return the machines as they were at the beginning. Raises `LogError` for an unknown policy."""
        if self.policy not in POLICIES:
            raise LogError(f"policy = {self.policy!r}: this version has {', '.join(POLICIES)}")
        return BufferMachine(
            RequestMachine(POLICIES[self.policy], self.limits, first_attempt=self.attempt),
            WeightsMachine(self.update_seconds),
            SleepMachine(self.update_seconds),
        )


class Line(NamedTuple):
    """One row: when, what happened, and what the machines answered, `SAID` left out."""

    time: float
    event: Event
    out: list[Instruction]


_encoder = msgspec.json.Encoder()
_header = msgspec.json.Decoder(Header)
_line = msgspec.json.Decoder(Line)


def header_line(header: Header) -> bytes:
    """Return a file's first line."""
    return _encoder.encode(header) + b"\n"


def line(time: float, event: Event, out: Iterable[Instruction]) -> bytes:
    """Return the line of an event."""
    return _encoder.encode((time, event, [item for item in out if not isinstance(item, SAID)])) + b"\n"


def read(path: Path) -> tuple[Header, Iterator[Line]]:
    """Return what a file holds, up to a line that is not whole. Raises `LogError` for what is no log."""
    lines = _lines(path)
    first = next(lines, b"")
    try:
        header = _header.decode(first)
    except msgspec.MsgspecError as error:
        raise LogError(f"{path}: is no log of a buffer: {error}") from None
    if header.format != FORMAT:
        raise LogError(f"{path}: has format {header.format}, this version reads {FORMAT}")
    return header, (_decoded(path, number, each) for number, each in enumerate(lines, 2))


def _lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        for each in file:
            if not each.endswith(b"\n"):
                return  # its writer was killed
            yield each


def _decoded(path: Path, number: int, text: bytes) -> Line:
    try:
        return _line.decode(text)
    except msgspec.MsgspecError as error:
        raise LogError(f"{path}: line {number}: {error}") from None


def replay(header: Header, lines: Iterable[Line]) -> BufferMachine:
    """Run a log through the machines again. Raises `LogError` at the first answer that is another."""
    machine = header.machine()
    for number, each in enumerate(lines, 2):
        answer = [item for item in machine.apply(each.event, each.time) if not isinstance(item, SAID)]
        if answer != each.out:
            raise LogError(f"line {number}: answered {answer}, the log has {each.out}")
    return machine
