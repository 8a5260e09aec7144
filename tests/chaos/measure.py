"""What processes and folders hold over time, and how fast that grows: slopes after each life's warm-up.

Invariants:
- a slope is Theil and Sen's: the median of the slopes of all pairs, so that single samples count little;
- pairs are of one half of a life of one process, and the slope is the lower one of both halves': what grows
  once, as a thread that is first needed late, does not grow on;
- what grows from life to life has a slope of its own;
- a life too short to say anything has no slope.
"""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

WHAT = ("mib", "files", "threads")

LEAST_SAMPLES, LEAST_LIVES = 12, 4
"""Of a life, and of a role, for a slope."""

MOST_SAMPLES = 1_000
"""Of a life: its pairs grow with the square."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What a process, in a role, held at a time in seconds; `born`: the kernel's ticks, so no pid is two lives.

    `mib` is memory that the kernel cannot take back: anonymous and shared memory. Pages of files, such as those
    of libraries, come as they are used and go with other programs' need.
    """

    at: float
    role: str
    pid: int
    born: int
    mib: float
    files: int
    threads: int


@dataclass(frozen=True, slots=True)
class Life:
    """A process after its warm-up: its samples from the first to the last."""

    role: str
    began: float
    seconds: float
    samples: Sequence[Sample]


def sample(at: float, roots: Mapping[str, int]) -> list[Sample]:
    """Measure these processes and all below them, which get their root's role and their own command's name."""
    children = defaultdict(list)
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):
            _, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            children[int(parent)].append(int(entry.name))
    found = []
    for role, root in roots.items():
        waiting = [(role, root)]
        while waiting:
            name, pid = waiting.pop()
            with contextlib.suppress(OSError, LookupError, ValueError):  # the process just ended
                found.append(_measure(at, name, pid))
                waiting += [(f"{role}/{_command(child)}", child) for child in children[pid]]
    return found


def _command(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


def _measure(at: float, role: str, pid: int) -> Sample:
    here = Path(f"/proc/{pid}")
    born = int((here / "stat").read_text().rpartition(")")[2].split()[19])
    status = dict(line.split(":", 1) for line in (here / "status").read_text().splitlines())
    kib = sum(int(status[name].split()[0]) for name in ("RssAnon", "RssShmem"))
    files = sum(1 for _ in (here / "fd").iterdir())
    return Sample(at, role, pid, born, kib / 1024, files, int(status["Threads"]))


def folder_mib(folder: Path) -> float:
    """Return what a folder has on its disk; files that go meanwhile do not count."""
    total = 0
    for where, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += (Path(where) / name).lstat().st_blocks * 512
    return total / 2**20


def per_hour(series: Iterable[Sequence[tuple[float, float]]]) -> float | None:
    """Return the median slope of pairs of (seconds, value), each pair of one series; None without pairs."""
    slopes = []
    for points in series:
        at, values = np.array(points[:: 1 + len(points) // MOST_SAMPLES], float).reshape(-1, 2).T
        first, second = np.triu_indices(len(at), 1)
        slopes.append((values[second] - values[first]) / (at[second] - at[first]))
    together = np.concatenate(slopes) if slopes else np.empty(0)
    return round(float(np.median(together)) * 3600, 3) if together.size else None


def _lasting(series: Sequence[Sequence[tuple[float, float]]]) -> float | None:
    """Return the lower slope of both halves."""
    halves = [
        [points[: len(points) // 2] for points in series],
        [points[len(points) // 2 :] for points in series],
    ]
    slopes = [per_hour(half) for half in halves]
    return min((slope for slope in slopes if slope is not None), default=None)


def lives(samples: Iterable[Sample], warm_up: float) -> list[Life]:
    """Return the lives that outlast their warm-up by enough samples, by role and beginning."""
    by_process = defaultdict(list)
    for each in samples:
        by_process[each.role, each.pid, each.born].append(each)
    found = []
    for (role, _, _), own in by_process.items():
        warm = [each for each in own if each.at - own[0].at >= warm_up]
        if len(warm) >= LEAST_SAMPLES:
            found.append(Life(role, own[0].at, own[-1].at - own[0].at, warm))
    return sorted(found, key=lambda life: (life.role, life.began))


def growth(samples: Sequence[Sample], warm_up: float) -> dict[str, dict[str, object]]:
    """Return by role: its lives, the longest one's seconds, and of each thing held its last value and slopes."""
    by_role = defaultdict(list)
    for life in lives(samples, warm_up):
        by_role[life.role].append(life)
    return {role: {"lives": len(own), "longest": round(max(life.seconds for life in own)), **_held(own)}
            for role, own in by_role.items()}  # fmt: skip


def _held(own: Sequence[Life]) -> dict[str, object]:
    found: dict[str, object] = {}
    for what in WHAT:
        within = [[(each.at, getattr(each, what)) for each in life.samples] for life in own]
        middles = [(life.began, float(np.median([value for _, value in points])))
                   for life, points in zip(own, within, strict=True)]  # fmt: skip
        found[what] = {
            "last": round(within[-1][-1][1], 1),
            "per_hour": _lasting(within),
            "each_life": [_lasting([points]) for points in within],
            "from_life_to_life": per_hour([middles]) if len(own) >= LEAST_LIVES else None,
        }
    return found


def over(grown: Mapping[str, Mapping[str, object]], bounds: Mapping[str, float]) -> list[str]:
    """Say what grows faster than its bound per hour."""
    found = []
    for role, held in grown.items():
        for what, bound in bounds.items():
            for kind in ("per_hour", "from_life_to_life"):
                slope = held.get(what, {}).get(kind)
                if slope is not None and slope > bound:
                    found.append(f"{role}: {what} grows by {slope:g} an hour ({kind}), more than {bound:g}")
    return found
