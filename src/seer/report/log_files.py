"""The files of a log, as one timeline."""

from __future__ import annotations

import re
from pathlib import Path

from seer.common.errors import InvalidField
from seer.report.log_reader import LogReader
from seer.report.records import Timeline
from seer.services.buffer.log import rows


def read_timeline(log: Path) -> Timeline:
    """Read a file, or all files `*.jsonl` of a folder: every life of a buffer.

    Raises `InvalidField` for what is no log.
    """
    try:
        files = sorted(log.glob("*.jsonl"), key=_order) if log.is_dir() else [log]
        files = [path for path in files if path.stat().st_size]
        if not files:
            raise InvalidField("LOG", str(log), "holds no log: give a folder or file that buffer.log wrote")
        reader = LogReader()
        for path in files:
            header, lines = rows.read(path)
            reader.begin(header)
            for line in lines:
                reader.add(line)
        reader.finish()
    except OSError as error:
        fix = f"{error.strerror}; give a folder or file that buffer.log wrote"
        raise InvalidField("LOG", str(log), fix) from error
    except rows.LogError as error:
        raise InvalidField("LOG", str(log), str(error)) from error
    return reader.timeline


def _order(path: Path) -> tuple[str, list[int], str]:
    """Sort by life, then by segment: `<life>-<number>.jsonl`."""
    life, _, segment = path.stem.partition("-")
    return life, [int(number) for number in re.findall(r"\d+", segment)], path.name
