"""How much memory this process may have, what is left of it, and what follows for bounds.

Invariants (tests/unit/test_memory_limit.py asserts them):
- the limit is the smallest of the limits of the process's cgroup and all cgroups above (v2 `memory.max`,
  which systemd's `MemoryMax` and containers set, or v1), of RLIMIT_AS and of the machine;
- bounds that follow from a limit, or are accepted beside it, are at most `MOST` of it together: a process
  refuses by name before the kernel ends it.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from seer.common.errors import ConfigError

MOST = 0.75
"""Share of its limit that a process may promise to hold; code, copies on their way and gaps take the rest."""

_ROOT = Path("/")


class Bound(NamedTuple):
    """`given`: what setting `key` says, in units of `unit` bytes; None: `share` of a limit, up to `most`."""

    key: str
    given: int | None
    share: float
    most: int
    unit: int = 1


def bounds(wanted: Sequence[Bound], limit: int) -> list[int]:
    """Return each bound in its units. `limit`: in bytes, 0 if unknown. Raises `ConfigError` beyond `MOST`."""
    found = [
        each.most if not limit else min(each.most, int(limit * each.share / each.unit))
        if each.given is None else each.given
        for each in wanted
    ]  # fmt: skip
    held = sum(each.unit * count for each, count in zip(wanted, found, strict=True))
    if limit and held > MOST * limit:
        named = ", ".join(f"{each.key} = {count}" for each, count in zip(wanted, found, strict=True))
        raise ConfigError(
            f"{named}: {held / 2**30:.2f} GiB, where this process may have {limit / 2**30:.2f} GiB (by its "
            f"cgroup, MemoryMax, RLIMIT_AS or machine): give at most {MOST * limit / 2**30:.2f} GiB in all, "
            "leave them out to have them follow from the limit, or raise the limit"
        )
    return found


def limit_bytes(root: Path = _ROOT) -> int:
    """Return the most memory that this process may have, 0 if unknown. `root`: where /proc and /sys are."""
    found = [limit for limit, _ in _cgroups(root)]
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        found.append(soft)
    # Not /proc/meminfo, which units with ProcSubset=pid have not.
    found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return min((each for each in found if each > 0), default=0)


def free_bytes(root: Path = _ROOT) -> int:
    """Return memory that can be used without swapping, 0 if unknown; a container's limit counts."""
    available = (line for line in _lines(root / "proc/meminfo") if line.startswith("MemAvailable:"))
    free = [int(line.split()[1]) * 1024 for line in available]
    free += [limit - used for limit, used in _cgroups(root)]
    return max(0, min(free, default=0))


def _cgroups(root: Path) -> Iterator[tuple[int, int]]:
    """Yield limit and use of each cgroup that has a limit, from the process's own up."""
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, names = root / "sys/fs/cgroup", ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            top, names = root / "sys/fs/cgroup/memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        own = Path(path.strip().lstrip("/"))
        for folder in (own, *own.parents):  # the path may be that outside the container
            limit, used = (_lines(top / folder / name) for name in names)
            if limit and used and limit[0].isdecimal():
                yield int(limit[0]), int(used[0]) - _cached(top / folder / "memory.stat")


def _cached(stat: Path) -> int:
    """Return what of a cgroup's memory is files that the kernel may drop at any time."""
    found = dict(line.split(" ", 1) for line in _lines(stat))
    return int(found.get("total_inactive_file", found.get("inactive_file", 0)))


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
