"""Fit the simulated instances' step and row times on the baseline's published times, and on nothing else.

Two numbers of each workload, a (`Model.step`) and b (`Model.request`), by damped least squares on the
relative errors of the total and the tail of `static`, medians over tuning seeds. Prints JSON; the
result is written into sim/workload.py by hand.

    python bench/simulator/calibrate.py --workloads qwen2-vl-72b --seeds 8
"""

from __future__ import annotations

import argparse
import json
import math
import statistics

from msgspec.structs import replace

from seer.common.policy.schedule import POLICIES
from seer.sim.cluster import Cluster
from seer.sim.workload import TUNING_SEED, WORKLOADS, Workload

PUBLISHED = {"moonlight": (3910, 1817), "qwen2-vl-72b": (3957, 2301), "kimi-k2": (12202, 3144)}
"""veRL's total and tail in seconds (the paper's figure 8)."""

ROUNDS = 8


def measured(load: Workload, seeds: int, step: float, request: float) -> tuple[float, float]:
    load = replace(load, model=replace(load.model, step=step, request=request))
    runs = [
        Cluster(load, POLICIES["static"], load.draw(TUNING_SEED + seed), load.cap).run()
        for seed in range(seeds)
    ]
    return statistics.median(run.total for run in runs), statistics.median(run.tail for run in runs)


def fit(name: str, seeds: int) -> dict[str, float]:
    load, target = WORKLOADS[name](), PUBLISHED[name]

    def errors(at: tuple[float, float]) -> list[float]:
        found = measured(load, seeds, math.exp(at[0]), math.exp(at[1]))
        return [math.log(a / b) for a, b in zip(found, target, strict=True)]

    at = (math.log(load.model.step), math.log(load.model.request))
    now = errors(at)
    for _ in range(ROUNDS):
        columns = []
        for axis in (0, 1):
            moved = tuple(x + 0.1 * (i == axis) for i, x in enumerate(at))
            columns.append([(a - b) / 0.1 for a, b in zip(errors(moved), now, strict=True)])
        (a, c), (b, d) = columns
        damp = 1e-2
        aa, bb, ab = a * a + c * c + damp, b * b + d * d + damp, a * b + c * d
        ra, rb = a * now[0] + c * now[1], b * now[0] + d * now[1]
        det = aa * bb - ab * ab
        step = (-(bb * ra - ab * rb) / det, -(aa * rb - ab * ra) / det)
        best = min(
            ((tuple(x + k * s for x, s in zip(at, step, strict=True))) for k in (1.0, 0.5, 0.2)),
            key=lambda point: sum(error**2 for error in errors(point)),
        )
        found = errors(best)
        if sum(x * x for x in found) >= sum(x * x for x in now) - 1e-6:
            break
        at, now = best, found
    return {
        "step": math.exp(at[0]),
        "request": math.exp(at[1]),
        "total_error": math.expm1(now[0]),
        "tail_error": math.expm1(now[1]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    print(json.dumps({name: fit(name, options.seeds) for name in options.workloads}, indent=1))


if __name__ == "__main__":
    main()
