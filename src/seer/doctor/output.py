"""Shows lines as they come, and keeps them as JSON.

Invariant: the JSON is whole after every line, so that a run that is cut off leaves what it found.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from seer import __version__
from seer.doctor.report_lines import Line
from seer.doctor.runner import Check


def show(lines: Iterable[Line], json_file: Path | None, about: Mapping[str, Any] = {}) -> list[Line]:
    """Print each line, and write all so far to the file, with what else is told `about` them; return them."""
    shown: list[Line] = []
    for line in lines:
        print(line.shown(), flush=True)
        shown.append(line)
        if json_file:
            write(json_file, shown, about)
    return shown


def write(file: Path, lines: Sequence[Line], about: Mapping[str, Any] = {}) -> None:
    """Replace the file by one with these lines."""
    part = file.with_name(file.name + ".part")
    part.write_text(as_json(lines, about))
    part.replace(file)


def as_json(lines: Sequence[Line], about: Mapping[str, Any]) -> str:
    """Return the report: `seer` (the version), `about`'s keys, and `lines`, each with its figures."""
    return json.dumps({"seer": __version__, **about, "lines": [asdict(line) for line in lines]}, indent=1)


def names(text: str, checks: Sequence[Check]) -> tuple[str, ...]:
    """Return the checks that a comma-separated text names; raise `ValueError` for one that is none."""
    given = tuple(name.strip() for name in text.split(",") if name.strip())
    known = [check.name for check in checks]
    for name in given:
        if name not in known:
            raise ValueError(f"{name!r} is no check; there are {', '.join(known)}")
    return given


def counted(lines: Sequence[Line]) -> str:
    """Return how many lines pass, fail, and say that something is slow."""
    number = {status: sum(line.status == status for line in lines) for status in ("pass", "fail", "slow")}
    slow = f", {number['slow']} slow" if number["slow"] else ""
    return f"{number['pass']} lines pass, {number['fail']} fail{slow}"
