"""The lines of a doctor's report, and how a check sends them to the process that started it.

Invariant: only the standard library is imported, so that a missing package is a line, not a traceback.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Literal, TextIO, get_args

Status = Literal["pass", "fail", "slow", "skip", "note"]
Figure = float | int | str | None
ENDED = "ended"
"""The text of a check's last line."""

MAX_TEXT = 2_000
"""Bound on a line's text, in characters: errors may quote whole compilations."""


@dataclass(frozen=True, slots=True)
class Line:
    """One finding.

    `slow`: it works, but costs time or memory. `skip`: it does not apply here. `note`: figures that are
    neither right nor wrong.
    """

    check: str
    status: Status
    text: str
    fix: str = ""
    figures: Mapping[str, Figure] = field(default_factory=dict)

    def shown(self) -> str:
        """Return the line as people read it."""
        figures = ", ".join(f"{name} {_short(value)}" for name, value in self.figures.items())
        text = f"{self.text}: {figures}" if figures else self.text
        return f"{self.status:4}  {self.check}: {text}" + (f"\n      fix: {self.fix}" if self.fix else "")


def _short(value: Figure) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _is_json(value: Figure) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


def _cut(text: str) -> str:
    """Return a text up to its bound, without a word that it cuts: a bundle finds whole secrets alone."""
    if len(text) <= MAX_TEXT:
        return text
    words = text[:MAX_TEXT].rpartition(" ")[0]
    return words if len(words) > MAX_TEXT // 2 else text[:MAX_TEXT]


class Report:
    """Where a check writes its lines. `config`: the file with the configuration that is checked, if any."""

    def __init__(self, check: str, to: TextIO, config: str = "") -> None:
        self.config, self.failed = config, False
        self._check, self._to = check, to

    def note(self, text: str, **figures: Figure) -> None:
        """Write figures."""
        self._write("note", text, "", figures)

    def skip(self, text: str) -> None:
        """Say what does not apply here, and why."""
        self._write("skip", text, "", {})

    def expect(self, good: bool, text: str, fix: str, **figures: Figure) -> None:
        """Write `text` as a promise that holds, or does not; then also how to mend it."""
        self.failed |= not good
        self._write("pass" if good else "fail", text, "" if good else fix, figures)

    def prefer(self, good: bool, text: str, fix: str, **figures: Figure) -> None:
        """Write `text` as what Seer works without, but better with."""
        self._write("pass" if good else "slow", text, "" if good else fix, figures)

    def _write(self, status: Status, text: str, fix: str, figures: Mapping[str, Figure]) -> None:
        plain = {name: value if _is_json(value) else str(value) for name, value in figures.items()}
        line = Line(self._check, status, _cut(text), _cut(fix), plain)
        self._to.write(json.dumps(asdict(line)) + "\n")
        self._to.flush()


def parse(text: str) -> Line:
    """Return the line that `Report` wrote as `text`. Raises `ValueError` for anything else."""
    try:
        line = Line(**json.loads(text))
    except TypeError as error:
        raise ValueError(f"no line of a check: {error}") from error
    if line.status not in get_args(Status):
        raise ValueError(f"no status of a line: {line.status}")
    return line
