"""Files that are read, with something wrong in them: each is read as it is, or refused by a named error.

`python tests/process/fuzz_files.py --cases 700000 --seed 1` prints what it read as JSON, and exits with 1 when a
reader raised anything but the project's own errors, took longer than `MOST_SECONDS`, or more memory than
`MOST_MIB`, or when a file with a checksum was read as something that was never written.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import structlog

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
from process.file_kinds import Kind, Wrong, kinds

MOST_SECONDS = 10.0
"""A reader that takes longer is called stuck. Files here have some kilobytes."""

MOST_MIB = 512.0
"""Growth of the process that is called harm: what a file claims to hold is not what is allocated for it."""

SHOWN = 5
"""Crashes of a kind that are reported with their file."""


@dataclass
class Seen:
    """What came of a kind. `longest`: seconds of processor time of one case."""

    cases: int = 0
    read: int = 0
    refused: int = 0
    crashes: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)
    wrong: int = 0
    longest: float = 0.0


class Stuck(BaseException):
    """A reader did not come to an end; no reader catches this."""


def _stuck(number: int, frame: FrameType | None) -> None:
    raise Stuck(f"longer than {MOST_SECONDS:g} s")


def one(kind: Kind, rng: random.Random, seen: Seen) -> None:
    """Read one mutated file."""
    data = kind.mutated(rng)
    seen.cases += 1
    signal.setitimer(signal.ITIMER_PROF, MOST_SECONDS)
    began = time.thread_time()
    try:
        kind.read(data)
        seen.read += 1
    except Wrong as error:
        seen.wrong += 1
        seen.examples.append(f"{error}: {data[:2000]!r}")
    except kind.errors:
        seen.refused += 1
    except (Exception, Stuck) as error:  # noqa: BLE001 - what is looked for
        at = traceback.extract_tb(error.__traceback__)[-1]
        what = f"{type(error).__name__} at {Path(at.filename).name}:{at.lineno} ({at.name})"
        seen.crashes[what] += 1
        if seen.crashes[what] == 1 and len(seen.examples) < SHOWN:
            seen.examples.append(f"{what}: {error}"[:300] + f" <- {data[:300]!r}")
    finally:
        seen.longest = max(seen.longest, time.thread_time() - began)
        signal.setitimer(signal.ITIMER_PROF, 0)


def fuzz(cases: int, seed: int, only: list[str] | None = None) -> dict[str, Any]:
    """Read so many files, of all kinds in turn; return what was seen."""
    before = signal.signal(signal.SIGPROF, _stuck)
    was = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    found: dict[str, Seen] = {}
    try:
        memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
        with tempfile.TemporaryDirectory(prefix="seer-fuzz-", dir=memory) as folder:
            chosen = [kind for kind in kinds(Path(folder)) if not only or kind.name in only]
            weights = sum(kind.weight for kind in chosen)
            rss = _rss_mib()
            for kind in chosen:
                rng, seen = random.Random(f"{seed} {kind.name}"), found.setdefault(kind.name, Seen())
                for _ in range(math.ceil(cases * kind.weight / weights)):
                    one(kind, rng, seen)
            grown = _rss_mib() - rss
    finally:
        signal.signal(signal.SIGPROF, before)
        structlog.configure(**was)
    harm = {
        name: seen.examples
        for name, seen in found.items()
        if seen.crashes or seen.wrong or seen.longest > MOST_SECONDS or not seen.read
    }
    if grown > MOST_MIB:
        harm["memory"] = [f"{grown:.0f} MiB"]
    return {
        "cases": sum(seen.cases for seen in found.values()),
        "crashes": sum(sum(seen.crashes.values()) for seen in found.values()),
        "wrong": sum(seen.wrong for seen in found.values()),
        "longest_seconds": max(seen.longest for seen in found.values()),
        "grown_mib": round(grown, 1),
        "harm": harm,
        "kinds": {name: {**vars(seen), "crashes": dict(seen.crashes)} for name, seen in found.items()},
    }


def _rss_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> int:
    """Read files of all kinds; 1 if anything came to harm."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="+", help="kinds of files")
    args = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
    from lib.hardware import machine

    began = time.monotonic()
    report = fuzz(args.cases, args.seed, args.only)
    print(
        json.dumps({**report, "seconds": round(time.monotonic() - began, 1), "machine": machine()}, indent=1)
    )
    return int(bool(report["harm"]))


if __name__ == "__main__":
    sys.exit(main())
