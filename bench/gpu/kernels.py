"""Are this GPU's kernels right and fast, and how fast is its memory? Needs torch, Triton and msgspec alone.

    python bench/gpu/kernels.py [--json FILE] [--only NAME,...] [--seconds 480]

Lines are as those of `seer doctor`, whose `bits` and `repeats` it has, too. `machine`: the GPU, and what
Triton needs; `speed`, `compiled`: the sampler against torch's own ways and a copy of the logits; `steps`:
what a step costs the host; `slabs`: the sampler's memory; `streams`, `graph`: the order of the device's
work; `copies`, `gathers`, `overlap`: memory between host and device; `ipc`: tensors that two processes share.

Invariants:
- no vLLM, no network, no model: it runs in a plain checkout with `PYTHONPATH=src`;
- every check has a process and a deadline of its own (`src/seer/doctor/runner.py`), and prints its lines as
  they come.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from seer.doctor.output import counted, names, show
from seer.doctor.runner import Check, run_checks

SECONDS = 480.0

CHECKS = (
    Check("machine", "kernel_checks.hardware:check", 60),
    Check("bits", "seer.doctor.sampler_bits:bits", 150),
    Check("repeats", "seer.doctor.sampler_bits:repeats", 60),
    Check("speed", "kernel_checks.speed:speed", 120),
    Check("compiled", "kernel_checks.speed:compiled", 40),
    Check("steps", "kernel_checks.steps:steps", 60),
    Check("slabs", "kernel_checks.memory:slabs", 60),
    Check("streams", "kernel_checks.streams:streams", 40),
    Check("graph", "kernel_checks.streams:graph", 40),
    Check("copies", "kernel_checks.copies:copies", 60),
    Check("gathers", "kernel_checks.copies:gathers", 40),
    Check("overlap", "kernel_checks.copies:overlap", 30),
    Check("ipc", "kernel_checks.ipc:check", 90),
)
"""In this order: what others build on comes first. Seconds are upper bounds."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the lines here, after each one")
    parser.add_argument("--only", default="", help="names of checks, comma-separated")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="most seconds of all checks")
    given = parser.parse_args()
    try:
        only = names(given.only, CHECKS)
    except ValueError as error:
        parser.error(f"--only: {error}")
    # The processes of checks find their modules here.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    chosen = [check for check in CHECKS if not only or check.name in only]
    lines = show(run_checks(chosen, given.seconds), given.json)
    print(counted(lines), flush=True)
    return int(any(line.status == "fail" for line in lines))


if __name__ == "__main__":
    sys.exit(main())
