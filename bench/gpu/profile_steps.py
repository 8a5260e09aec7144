"""Where a step's time goes: 20 decode steps of bare vLLM and of Seer's engine, by torch's profiler.

    python bench/gpu/profile_steps.py profile.json --sides vllm-here engine
    python bench/gpu/profile_steps.py profile.json --cpu

Each side has a process of its own, one after the other. Writes after each side, in milliseconds a step: the
time without the profiler, the time the GPU worked, launches and copies with the host time they took, waits,
and the operations with the most time of their own. A trace for viewers is beside it, SIDE.trace.json.gz.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from contestants import KINDS, Steps
from lib.paths import EXAMPLE
from sides import ENGINES, in_process, padded, prompts_of

SIDES = ("vllm-here", *ENGINES)
STEPS, WARM, ROWS = 20, 12, 64
TOP = 25
"""Operations that are listed."""

LAUNCHES = (
    "cudaLaunchKernel",
    "cudaLaunchKernelExC",
    "cuLaunchKernel",
    "cuLaunchKernelEx",
    "cudaGraphLaunch",
)
COPIES, WAITS = ("cudaMemcpyAsync", "cudaMemsetAsync"), ("cudaStreamSynchronize", "cudaEventSynchronize",
                                                         "cudaDeviceSynchronize")  # fmt: skip


def summary(events: list[tuple[str, int, float, float]], steps: int) -> dict[str, Any]:
    """Return figures a step. `events`: name, count, own host and own device time in microseconds."""

    def of(names: tuple[str, ...]) -> dict[str, float]:
        found = [(count, host) for name, count, host, _ in events if name in names]
        return {
            "count": round(sum(count for count, _ in found) / steps, 1),
            "host_ms": round(sum(host for _, host in found) / steps / 1e3, 3),
        }  # fmt: skip

    top = sorted(events, key=lambda each: -max(each[2], each[3]))[:TOP]
    return {
        "device_ms": round(sum(device for *_, device in events) / steps / 1e3, 3),
        "launches": of(LAUNCHES), "copies": of(COPIES), "waits": of(WAITS),
        "top": [
            {"name": name[:80], "count": round(count / steps, 1), "host_ms": round(host / steps / 1e3, 3),
             "device_ms": round(device / steps / 1e3, 3)}
            for name, count, host, device in top
        ],
    }  # fmt: skip


def advance(steps: Steps, count: int) -> float:
    """Run so many steps; return milliseconds a step."""
    begun = time.perf_counter()
    for _ in range(count):
        steps.step()
    return (time.perf_counter() - begun) / count * 1e3


def profiled(kind: str, settings: dict[str, Any], rows: int, trace: Path) -> dict[str, Any]:
    """Return the figures of one side, in this process."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    steps = KINDS[kind](settings)
    tokens = 2 * STEPS + WARM + 8
    for name, prompt in prompts_of(0, rows):
        steps.add(name, [*prompt, 1], 1, tokens, 0)
    advance(steps, WARM)
    plain = advance(steps, STEPS)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        beside = advance(steps, STEPS)
    found.export_chrome_trace(str(trace))
    events = [
        (each.key, each.count, 0.0 if each.device_type == DeviceType.CUDA else each.self_cpu_time_total,
         each.self_device_time_total if each.device_type == DeviceType.CUDA else 0.0)
        for each in found.key_averages()
    ]  # fmt: skip
    return steps.about | {
        "rows": rows, "step_ms": round(plain, 3), "profiled_step_ms": round(beside, 3),
        **summary(events, STEPS),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--fill", choices=("zeros", "random"), default="random")
    parser.add_argument("--share", type=float, default=0.5, help="of the device's memory")
    parser.add_argument("--seconds", type=float, default=150, help="most of one side")
    parser.add_argument("--set", action="append", default=[], dest="sets")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    rows = min(given.rows, 8) if given.cpu else given.rows
    model = given.model or (EXAMPLE / "model" if given.cpu else padded(4, 8, given.fill))
    if given.one:
        kind, settings, environ = in_process(given.one, model, rows, given)
        os.environ.update(environ)
        figures = profiled(kind, settings, rows, given.out.with_name(f"{given.one}.trace.json.gz"))
        print("answer", json.dumps(figures), flush=True)
        os._exit(0)  # vLLM's threads would be waited for
    report: dict[str, Any] = {"steps": STEPS, "model": model.name, "sides": {}}
    for side in given.sides:
        command = [sys.executable, __file__, *sys.argv[1:], "--one", side, "--model", str(model)]
        try:
            done = subprocess.run(
                command, stdout=subprocess.PIPE, text=True, timeout=given.seconds, check=False
            )
            answers = [line for line in done.stdout.splitlines() if line.startswith("answer ")]
            found = json.loads(answers[0].removeprefix("answer ")) if answers else {"refused": "see the log"}
        except subprocess.TimeoutExpired:
            found = {"refused": f"not done in {given.seconds:g} s"}
        report["sides"][side] = found
        given.out.write_text(json.dumps(report, indent=1) + "\n")
        print(
            side, json.dumps({key: found[key] for key in found if key != "top"}), file=sys.stderr, flush=True
        )


if __name__ == "__main__":
    main()
