"""What every figure depends on: the machine, how busy it is, and the versions of what ran."""

from __future__ import annotations

import os
import platform
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any

import seer


def machine(*packages: str) -> dict[str, Any]:
    """Return the processor, cores, load over 1, 5 and 15 minutes, and versions, also of `packages`.

    Packages are named as they are imported; one that is not installed is left out.
    """
    found = packages_distributions()
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor() or platform.machine(),
        "architecture": platform.machine(),
        "cores": os.cpu_count(),
        "load": [round(load, 2) for load in os.getloadavg()],
        "libc": " ".join(platform.libc_ver()),
        "python": platform.python_version(),
        "seer": seer.__version__,
        **{name: version(found[name][0]) for name in packages if name in found},
    }
