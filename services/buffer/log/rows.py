"""A log of the buffer's machines: a line of JSON for each event, with what they answered.

The first line of a file is a `Header`, which has the machines' state, every other one
`[time, event, [instruction, ...]]`, the time in seconds of a monotonic clock. Events and instructions are the
machines' own (`services/buffer/machine.py`), so a log runs through the machines again as it is (`replay.py`).
Instructions that repeat what their event says are left out (`SAID`).

A line is written whole or, by a process that was killed, in part: `read` ends there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from seer.common.errors import SeerError
from seer.common.group_events import GroupClosed, GroupOpened, RequestProgress
from seer.common.policy.schedule import POLICIES
from seer.services.buffer.log.snapshot import parse, restored
from seer.services.buffer.machine import BufferMachine, Event, Instruction
from seer.services.buffer.requests import instructions
from seer.services.buffer.requests.machine import RequestMachine
from seer.services.buffer.requests.state import Limits
from seer.services.buffer.sleep import SleepMachine
from seer.services.buffer.weights.machine import WeightsMachine

FORMAT = 1

SAID = frozenset(
    (
        instructions.Keep,
        instructions.Take,
        instructions.Forget,
        GroupOpened,
        RequestProgress,
        GroupClosed,
    )
)
"""Instructions that no row holds: they follow from the event, and are most of all."""


class LogError(SeerError):
    """A log that cannot be read, or that this version's machines answer in another way."""

    code = "log"


Submission = tuple[str, int]
"""A rollout's id, and the number of one of its submissions."""


NO_STATE = msgspec.Raw(b"null")


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """What a log is of, and all that the machines' answers depend on beside events and times.

    `started` is the wall clock (seconds since 1970) at `clock` on the log's own. `attempt` numbers the first
    chunk of this life; `engine`, in logs of the simulator, says what simulated it.
    Segments of one life are numbered. `open` are the rollouts that are not forgotten as it begins, `before`
    those that were submitted in the segment before.
    `state` is a snapshot of the machines (`snapshot.py`); none: their state when a life begins.
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
        """Return the machines as they were at the beginning.

        Raises `LogError` for an unknown policy, or a state that this version cannot read.
        """
        if self.policy not in POLICIES:
            raise LogError(f"policy = {self.policy!r}: this version has {', '.join(POLICIES)}")
        requests = RequestMachine(POLICIES[self.policy], self.limits, first_attempt=self.attempt)
        if self.state == NO_STATE:
            return BufferMachine(
                requests, WeightsMachine(self.update_seconds), SleepMachine(self.update_seconds)
            )
        try:
            return restored(parse(self.state), requests)
        except msgspec.MsgspecError as error:
            raise LogError(f"this version cannot read the machines' state: {error}") from None


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
    return _encoder.encode((time, event, unsaid(out))) + b"\n"


def unsaid(out: Iterable[Instruction]) -> list[Instruction]:
    """Return the instructions that a row holds."""
    return [item for item in out if type(item) not in SAID]


def read(path: Path) -> tuple[Header, Iterator[Line]]:
    """Return what a file holds, up to a line that is not whole. Raises `LogError` for what is no log."""
    lines = _lines(path)
    first = next(lines, b"")
    try:
        header = _header.decode(first)
    except msgspec.MsgspecError as error:
        raise LogError(f"{path}: is no log of a buffer: {error}") from None
    if header.format != FORMAT:
        raise LogError(
            f"{path}: has format {header.format} of version {header.version or '?'}, this one reads {FORMAT}"
        )
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
