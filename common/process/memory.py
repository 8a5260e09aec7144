"""How much memory this process may still take."""

from __future__ import annotations

from pathlib import Path


def free_bytes() -> int:
    """Return memory that can be used without swapping, 0 if unknown; a container's limit counts."""
    available = (line for line in _lines("/proc/meminfo") if line.startswith("MemAvailable:"))
    free = [int(line.split()[1]) * 1024 for line in available]
    limit, used = _lines("/sys/fs/cgroup/memory.max"), _lines("/sys/fs/cgroup/memory.current")
    if limit and used and limit[0].isdecimal():
        free.append(int(limit[0]) - int(used[0]))
    return max(0, min(free, default=0))


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
