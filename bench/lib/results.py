"""Put the JSON of a script into its section of a `RESULTS.md`.

    python bench/lib/results.py bench/drafts/RESULTS.md "Several paths" out.json

The section keeps its heading, its command and its line of context; all tables below are replaced. `machine`
becomes one line, with the date of the file. Flat values become a table of two columns; a list of objects, or
an object of objects, becomes a table with a row for each. Deeper values stand as JSON.
"""

from __future__ import annotations

import json
import re
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any


def cell(value: object) -> str:
    """Return a value as the text of a cell: floats with four digits, a bar escaped."""
    if isinstance(value, float):
        text = f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    elif isinstance(value, (dict, list)):
        text = json.dumps(value)
    else:
        text = "" if value is None else f"{value:,}" if type(value) is int else str(value)
    return text.replace("|", "\\|")


def table(head: list[str], rows: list[list[object]]) -> str:
    lines = [head, ["---"] * len(head), *([cell(value) for value in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def rows_of(objects: dict[str, dict[str, Any]], first: str = "") -> str:
    """Return a table with a row for each object; its columns are all keys, in order of appearance."""
    keys = list(dict.fromkeys(key for each in objects.values() for key in each))
    return table([first, *keys], [[name, *(each.get(key) for key in keys)] for name, each in objects.items()])


def render(report: dict[str, Any] | list[Any], name: str = "") -> list[str]:
    """Return the tables of a report, flat values first."""
    if isinstance(report, list):
        report = {str(number): value for number, value in enumerate(report, 1)}
    if report and all(isinstance(value, dict) for value in report.values()):
        return [rows_of(report, name)]
    flat = {key: value for key, value in report.items() if not isinstance(value, (dict, list))}
    found = [table([name, ""], [[key, value] for key, value in flat.items()])] if flat else []
    for key, value in report.items():
        if key not in flat and value:
            found += render(value, key) if _has_parts(value) else [table([key, ""], [["", value]])]
    return found


def _has_parts(value: dict[str, Any] | list[Any]) -> bool:
    return isinstance(value, dict) or all(isinstance(each, dict) for each in value)


def section(report: dict[str, Any] | list[Any], date: str) -> str:
    """Return what stands in a section below its line of context."""
    where = report.pop("machine", None) if isinstance(report, dict) else None
    line = ", ".join(f"{key} {cell(value)}" for key, value in (where or {}).items())
    return "\n\n".join([f"{date}{': ' if line else ''}{line}.", *render(report)])


def replace(page: str, heading: str, body: str) -> str:
    """Return the page with `body` in place of the tables below a heading.

    Raises `ValueError` if the page has no such section, or the section no command.
    """
    found = re.search(rf"(?ms)^## {re.escape(heading)}\n\n```\n.*?^```\n[^\n|]*(?:\n[^\n|]+)*\n", page)
    if found is None:
        raise ValueError(f"no section {heading!r} with a command in this page")
    rest = page[found.end() :]
    after = re.search(r"(?m)^## ", rest)
    return page[: found.end()] + f"\n{body}\n" + (f"\n{rest[after.start() :]}" if after else "")


if __name__ == "__main__":
    page, heading, source = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    day = datetime.fromtimestamp(source.stat().st_mtime, UTC).date().isoformat()
    page.write_text(replace(page.read_text(), heading, section(json.loads(source.read_text()), day)))
