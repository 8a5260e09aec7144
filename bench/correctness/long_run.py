"""Hours of rollouts under faults on two cores, and what grows meanwhile; prints JSON, and a table to stderr.

    make long-run                        # two hours
    make long-run MINUTES=20 SYSTEMS=vllm

Two systems run at once: two replay engines (`tests/chaos/long.py`: rollouts, agents, images, whole updates
and deltas, kills and stops of every process), and two vLLM engines with the shipped model and a KV pool (the
same without images). Every response is compared: with the rule of replay engines, or with what vLLM engines
answered before any fault. Memory, files and threads of every process, and bytes of folders, are measured
every 5 s; a slope is the median of those of all pairs of samples of a life, after a warm-up. The lag is the
buffer's own `loop_lag_seconds`, the largest within a minute, asked for while nobody stops the buffer.

Exits with 1 if a response was lost, doubled or changed, if anything else went wrong, or if something grows by
more an hour than it may.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from lib.hardware import machine
from lib.paths import EXAMPLE, TESTS

sys.path.insert(0, str(TESTS))

from chaos.long import Long, Seen
from chaos.measure import WHAT, growth, over, per_hour

SYSTEMS = ("replay", "vllm")

LOG_MIB = 2048 + 16
"""What a buffer's log may have, a segment over its bound included; below that it may grow."""

Json = dict[str, Any]


def told(seen: Seen, warm_up: float, bounds: dict[str, float], disk: float) -> Json:
    """Return what a system's run comes to, for JSON; `problems` is empty if all is well."""
    outcome, grown = seen.outcome, growth(seen.samples, warm_up)
    folders = {name: _folder(points, warm_up) for name, points in seen.folders.items()}
    problems = outcome.problems + over(grown, bounds)
    for name, held in folders.items():
        if name == "log" and held["most_mib"] > LOG_MIB:
            problems.append(f"the log has {held['most_mib']} MiB, more than {LOG_MIB}")
        if name != "log" and (held["mib_per_hour"] or 0) > disk:
            problems.append(f"folder {name} grows by {held['mib_per_hour']} MiB an hour, more than {disk:g}")
    return {
        "responses": outcome.responses,
        **{what: getattr(outcome, what) for what in ("lost", "doubled", "changed")},
        "jobs": dict(seen.jobs),
        "faults": dict(sorted(Counter(outcome.faults).items())),
        "loop_lag_seconds": _shares(seen.lag),
        "status_seconds": _shares(seen.answers),
        "folders": folders,
        "processes": grown,
        "problems": problems,
    }


def _folder(points: list[tuple[float, float]], warm_up: float) -> Json:
    warm = [point for point in points if point[0] >= warm_up]
    sizes = [size for _, size in points]
    return {
        "last_mib": round(sizes[-1], 1),
        "most_mib": round(max(sizes), 1),
        "mib_per_hour": per_hour([warm]),
    }


def _shares(values: list[float]) -> Json:
    return {f"p{share}": round(float(np.percentile(values, share)), 4) for share in (50, 99) if values}


def show(report: dict[str, Json]) -> None:
    """Print the figures as tables to stderr."""
    for name, found in report.items():
        counts = ("responses", "lost", "doubled", "changed", "loop_lag_seconds", "status_seconds")
        print(f"\n{name}:", {key: found[key] for key in counts}, file=sys.stderr)
        print(f"{'':34}{'lives':>6}{'s':>7}", *(f"{what:>12}{'/h':>10}" for what in WHAT), file=sys.stderr)
        for role, held in found["processes"].items():
            cells = [f"{held[what]['last']:>12}{_signed(held[what]['per_hour']):>10}" for what in WHAT]
            print(f"{role:34}{held['lives']:>6}{held['longest']:>7}", *cells, file=sys.stderr)
        for folder, held in found["folders"].items():
            print(
                f"{folder:34}{held['last_mib']:>12} MiB{_signed(held['mib_per_hour']):>10}", file=sys.stderr
            )
        print(*found["problems"], sep="\n", file=sys.stderr)


def _signed(slope: float | None) -> str:
    return "" if slope is None else f"{slope:+.2f}"


async def run(args: argparse.Namespace) -> dict[str, Seen]:
    """Run the systems at once, each to its end."""
    model = EXAMPLE / "model"
    made = [
        Long(name, args.minutes * 60, args.seed, model if name == "vllm" else None) for name in args.systems
    ]
    seen = await asyncio.gather(*(each.run() for each in made))
    return dict(zip(args.systems, seen, strict=True))


def main() -> int:
    """Print what the command line asks for; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=SYSTEMS)
    parser.add_argument(
        "--warm-up", type=float, metavar="MINUTES", help="of a life; default: a twelfth of all"
    )
    parser.add_argument(
        "--mib", type=float, default=16.0, help="bound on memory's growth an hour, of a process"
    )
    parser.add_argument("--files", type=float, default=4.0, help="the same of open files")
    parser.add_argument("--threads", type=float, default=2.0, help="the same of threads")
    parser.add_argument(
        "--disk", type=float, default=16.0, help="the same of a folder's MiB; the log has a bound"
    )
    parser.add_argument("--samples", type=Path, metavar="FILE", help="write what was measured as JSON")
    args = parser.parse_args()
    warm_up = 60 * (args.minutes / 12 if args.warm_up is None else args.warm_up)
    bounds = {"mib": args.mib, "files": args.files, "threads": args.threads}
    seen = asyncio.run(run(args))
    if args.samples:
        samples = {name: [asdict(each) for each in of.samples] for name, of in seen.items()}
        args.samples.write_text(json.dumps(samples))
    report = {name: told(of, warm_up, bounds, args.disk) for name, of in seen.items()}
    show(report)
    print(
        json.dumps(
            {"machine": machine("torch", "vllm"), "asked": vars(args), **report}, indent=1, default=str
        )
    )
    return int(any(found["problems"] for found in report.values()))


if __name__ == "__main__":
    sys.exit(main())
