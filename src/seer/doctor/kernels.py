"""`seer doctor --kernels`: is this GPU right and fast for Seer? Needs torch, Triton and msgspec alone.

    python -m seer.doctor.kernels [--json FILE] [--only NAME,...] [--seconds 480]

Invariants:
- no vLLM, no network, no model: it runs in a plain checkout with `PYTHONPATH=src`;
- every check has a process and a deadline of its own (see `runner`), and prints its lines as they come.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from seer.doctor.output import counted, names, show
from seer.doctor.runner import Check, run_checks

SECONDS = 480.0

CHECKS = (
    Check("machine", "seer.doctor.machine:check", 60),
    Check("bits", "seer.doctor.sampler_bits:bits", 150),
    Check("repeats", "seer.doctor.sampler_bits:repeats", 60),
    Check("speed", "seer.doctor.sampler_speed:speed", 120),
    Check("compiled", "seer.doctor.sampler_speed:compiled", 40),
    Check("steps", "seer.doctor.sampler_steps:steps", 60),
    Check("slabs", "seer.doctor.sampler_memory:slabs", 60),
    Check("streams", "seer.doctor.streams:streams", 40),
    Check("graph", "seer.doctor.streams:graph", 40),
    Check("copies", "seer.doctor.copies:copies", 60),
    Check("gathers", "seer.doctor.copies:gathers", 40),
    Check("overlap", "seer.doctor.copies:overlap", 30),
    Check("ipc", "seer.doctor.ipc:check", 90),
)
"""In this order: what others build on comes first. Seconds are upper bounds."""


def run(only: Sequence[str], json_file: Path | None, seconds: float) -> int:
    """Run the checks of these names, or all; return 1 if a line failed, else 0."""
    chosen = [check for check in CHECKS if not only or check.name in only]
    lines = show(run_checks(chosen, seconds), json_file)
    print(counted(lines), flush=True)
    return int(any(line.status == "fail" for line in lines))


def main() -> None:
    """Run the checks that the command line asks for."""
    parser = argparse.ArgumentParser(prog="seer.doctor.kernels")
    parser.add_argument("--json", type=Path, help="write the lines here, after each one")
    parser.add_argument("--only", default="", help="names of checks, comma-separated")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="most seconds of all checks")
    arguments = parser.parse_args()
    try:
        only = names(arguments.only, CHECKS)
    except ValueError as error:
        parser.error(f"--only: {error}")
    sys.exit(run(only, arguments.json, arguments.seconds))


if __name__ == "__main__":
    main()
