"""Runs the events of a log through the machines again and compares the instructions, bit for bit."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path

from seer.services.buffer.buffer_machine import BufferMachine
from seer.services.buffer.log.rows import Header, Line, LogError, read, without_implied
from seer.services.buffer.log.snapshot import parse, snapshot

MAX_SHOWN = 400
"""Characters of an event or instruction that an error shows: they may have thousands of prompts."""


def replay(header: Header, lines: Iterable[Line]) -> BufferMachine:
    """Run one file's lines through the machines. Raises `LogError` at the first instruction that differs."""
    machine = header.machine()
    for _ in replayed(machine, lines):
        pass
    return machine


def replayed(machine: BufferMachine, lines: Iterable[Line]) -> Iterator[Line]:
    """Run lines through machines and yield each; raise `LogError` at the first instruction that differs."""
    for number, each in enumerate(lines, 2):
        try:
            answer = without_implied(machine.apply(each.event, each.time))
        except Exception as error:
            at = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{at.filename}:{at.lineno} ({at.name})"
            raise LogError(f"line {number}: {_short(each.event)} fails at {where}: {error!r}") from error
        for new, logged in zip_longest(answer, each.out):
            if new != logged:
                what = f"answered by {_short(new)}, in the log by {_short(logged)}"
                raise LogError(f"line {number}: {_short(each.event)} is {what}")
        yield each


def _short(item: object) -> str:
    text = repr(item) if item is not None else "nothing"
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def replay_incarnation(paths: Sequence[Path]) -> Iterator[tuple[Header, Line]]:
    """Run the segments of one incarnation, in their order, and yield the lines with their segment's header.

    Raises `LogError`, which names the file, if a segment cannot be read, an instruction differs from the log,
    or a segment does not begin in the state in which the previous one ends.
    """
    machine: BufferMachine | None = None
    number = -1
    for path in paths:
        header, lines = read(path)
        try:
            before = machine if header.number == number + 1 else None
            if before is not None and parse(snapshot(before)) != parse(header.state):
                raise LogError("line 1: this is not the state in which the previous segment ends")
            machine, number = header.machine(), header.number
            for line in replayed(machine, lines):
                yield header, line
        except LogError as error:
            raise LogError(f"{path.name}: {error}") from None
