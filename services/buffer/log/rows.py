"""The format of the log: a line of JSON for each event, with the instructions that the machines returned.

The first line of a file is a `Header` with the machines' state. Every other line is
`[time, event, [instruction, ...]]`, with the time in seconds of a monotonic clock. Events and instructions
are those of the machines (`services/buffer/buffer_machine.py`), so a log can be replayed as it is
(`replay.py`). Instructions that follow from their event alone are left out (`instructions.Implied`).

A process that is killed may leave an incomplete last line: `read` ignores it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, get_args

import msgspec

from seer.common.errors import NOT_DECODED, SeerError
from seer.common.policy.schedule import POLICIES
from seer.services.buffer.buffer_machine import BufferMachine, Event, Instruction, Logged
from seer.services.buffer.log.snapshot import parse, restored
from seer.services.buffer.requests.instructions import Implied
from seer.services.buffer.requests.request_machine import RequestMachine
from seer.services.buffer.requests.state import Limits
from seer.services.buffer.sleep_machine import SleepMachine
from seer.services.buffer.weights.weights_machine import WeightsMachine

FORMAT = 2
"""1: what releases up to 0.3.0 wrote, before protocol 3."""

_IMPLIED = frozenset(get_args(Implied))


class LogError(SeerError):
    """A log that cannot be read, or for which this version's machines return other instructions."""

    code = "log"


Submission = tuple[str, int]
"""A rollout's id, and the number of one of its submissions."""


NO_STATE = msgspec.Raw(b"null")

_NOT_RESTORED = (*NOT_DECODED, LookupError, TypeError, ValueError, ArithmeticError, AttributeError)
"""What a state may lead to whose parts do not fit together."""


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """All that the machines' instructions depend on, beside events and their times.

    `started` is the wall-clock time (seconds since 1970) when the log's own clock showed `clock`.
    Attempts count up from `attempt`. `engine` is set in logs of the simulator: its model of an engine.
    `number` counts the segments of one incarnation. `open`: rollouts that the buffer has when the segment
    begins; `before`: rollouts submitted during the previous segment.
    `state` is a snapshot of the machines (`snapshot.py`); null: their state when an incarnation begins.
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
    number: int = 0
    open: list[Submission] = []
    before: list[Submission] = []
    state: msgspec.Raw = NO_STATE

    def machine(self) -> BufferMachine:
        """Return the machines in the state in which the segment begins.

        Raises `LogError` for an unknown policy, or a state that this version cannot read.
        """
        if self.policy not in POLICIES:
            raise LogError(f"policy = {self.policy!r}: this version has {', '.join(POLICIES)}")
        requests = RequestMachine(POLICIES[self.policy], self.limits, first_attempt=self.attempt)
        if self.state == NO_STATE:
            rests = SleepMachine(self.update_seconds, first_wish=max(1, self.incarnation))
            return BufferMachine(requests, WeightsMachine(self.update_seconds), rests)
        try:
            return restored(parse(self.state), requests)
        except _NOT_RESTORED as error:
            raise LogError(f"this version cannot read the machines' state: {error}") from None


class Line(NamedTuple):
    """One row: the time, the event, and the instructions without those that are `Implied`."""

    time: float
    event: Event
    out: list[Logged]


_encoder = msgspec.json.Encoder()
_header = msgspec.json.Decoder(Header)
_line = msgspec.json.Decoder(Line)


def header_line(header: Header) -> bytes:
    """Return a file's first line."""
    return _encoder.encode(header) + b"\n"


def line(time: float, event: Event, out: Iterable[Instruction]) -> bytes:
    """Return the line of an event."""
    return _encoder.encode((time, event, without_implied(out))) + b"\n"


def without_implied(out: Iterable[Instruction]) -> list[Instruction]:
    """Return the instructions that are logged."""
    return [item for item in out if type(item) not in _IMPLIED]


def read(path: Path, wanted: Callable[[bytes], bool] = lambda _: True) -> tuple[Header, Iterator[Line]]:
    """Return a file's header and its complete lines, of those whose text is `wanted`.

    Raises `LogError` if it is not a log of a buffer.
    """
    lines = _lines(path)
    header = read_header(path, next(lines, b""))
    return header, (read_line(path, number, each) for number, each in enumerate(lines, 2) if wanted(each))


def read_header(path: Path, text: bytes) -> Header:
    """Return what the first line of a file says. Raises `LogError` if the file is not a log of a buffer."""
    try:
        header = _header.decode(text)
    except NOT_DECODED as error:
        raise LogError(f"{path}: is not a log of a buffer: {error}") from None
    if header.format != FORMAT:
        written = f"has format {header.format} of version {header.version or '?'}"
        raise LogError(f"{path}: {written}, this one reads {FORMAT}: read it with the version that wrote it")
    return header


def _lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        for each in file:
            if not each.endswith(b"\n"):
                return  # its writer was killed
            yield each


def read_line(path: Path, number: int, text: bytes) -> Line:
    """Return what another line of a file says. Raises `LogError`, which names file and line."""
    try:
        return _line.decode(text)
    except NOT_DECODED as error:
        raise LogError(f"{path}: line {number}: {error}") from None
