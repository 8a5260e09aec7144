"""`seer trace`: reads the rows of a log that may concern a prompt."""

from __future__ import annotations

from pathlib import Path

from seer.common.errors import InvalidField
from seer.common.process.log import printable
from seer.prompt_trace.way import concerns, follow, needle
from seer.services.buffer.log import rows


def told(log: Path, wanted: str) -> str:
    """Return the way of a prompt, by a log's file or folder. Raises `InvalidField`."""
    fix = "give a folder or file that buffer.log wrote"
    text = needle(wanted)
    try:
        files = sorted(log.glob("*.jsonl")) if log.is_dir() else [log]
        files = [path for path in files if path.stat().st_size]
        if not files:
            raise InvalidField("LOG", str(log), f"holds no log: {fix}")
        found = (rows.read(path, lambda row: concerns(row, text)) for path in files)
        return "\n".join(str(printable(line)) for line in follow(found, wanted))
    except OSError as error:
        raise InvalidField("LOG", str(log), f"{error.strerror}; {fix}") from error
    except rows.LogError as error:
        raise InvalidField("LOG", str(log), str(error)) from error
