"""`seer replay`: a buffer's log through its machines again, to see whether they answer the same."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from seer import __version__
from seer.common.errors import InvalidField
from seer.common.process.log import printable
from seer.services.buffer.events import Joined
from seer.services.buffer.log.log_folder import begun, incarnations
from seer.services.buffer.log.replay import replay_incarnation
from seer.services.buffer.log.rows import Header, LogError, Submission, read
from seer.services.buffer.requests.events import GroupsSubmitted


def run(log: Path) -> int:
    """Replay a file, or each incarnation of a folder, and tell what it was; return 1 if an answer is another.

    Raises `InvalidField` for a folder without logs.
    """
    given = incarnations(log) if log.is_dir() else [[log]]
    found = [whole for paths in given if (whole := list(filter(begun, paths)))]
    if not found:
        raise InvalidField("LOG", str(log), "holds no log of a buffer")
    return max([_replay(paths) for paths in found])


def _replay(paths: Sequence[Path]) -> int:
    try:
        header, _ = read(paths[0])
    except LogError as error:
        print(printable(str(error)))
        return 1
    began = datetime.fromtimestamp(header.started, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    what = f"incarnation {header.incarnation:016x}: {began}"
    if header.engine:
        what = f"simulated {header.engine}"
    print(printable(f"{what}, by version {header.version}, policy {header.policy}"))
    try:
        told = _told(header, paths)
    except LogError as error:
        told = str(error)
        if header.version != __version__:
            told += f"\n  version {header.version} wrote it, this is {__version__}: replay it with that one"
        print(printable(f"  {told}"))
        return 1
    print(printable(f"  {told}\n  the same answers"))
    return 0


def _told(header: Header, paths: Sequence[Path]) -> str:
    """Replay an incarnation and return its figures."""
    rollouts: set[Submission] = set(header.open)
    engines = set(header.machine().engines)
    rows, last = 0, header.clock
    for _, line in replay_incarnation(paths):
        rows, last = rows + 1, line.time
        match line.event:
            case GroupsSubmitted():
                rollouts.add((line.event.rollout_id, line.event.submission))
            case Joined():
                engines.add(line.event.instance)
    seconds = last - header.clock
    return f"{len(rollouts)} rollouts, {rows} rows, {seconds:.1f} s, {len(engines)} engines"
