"""`seer trace`: reads the rows of a log that may concern a prompt."""

from __future__ import annotations

from pathlib import Path

from seer.common.process.log import printable
from seer.prompt_trace.way import concerns, follow, needle
from seer.report.log_reader import log_files
from seer.services.buffer.log import rows


def told(log: Path, wanted: str) -> str:
    """Return the way of a prompt, by a log's file or folder. Raises `InvalidField`."""
    text = needle(wanted)
    with log_files(log) as files:
        found = (rows.read(path, lambda row: concerns(row, text)) for path in files)
        return "\n".join(str(printable(line)) for line in follow(found, wanted))
