"""The default policy against Algorithm 2, least generated first and the oracle, whatever groups tell.

The paper's workloads at a quarter of their size (a quarter of the prompts on a quarter of the instances),
by responses per prompt and by the prompt's share of the variance of log length; evaluation seeds, paired.
`over_best`: the default's throughput over that of the better of the other two, geometric mean over seeds
with a 95 % confidence interval; the better one is chosen by its own mean. Prints JSON.

    python bench/scheduling/policy_sweep.py --seeds 10
    python bench/scheduling/policy_sweep.py --workloads qwen2-vl-72b --between 0.65 --group-sizes 16 --drafts
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from typing import Any

from msgspec.structs import replace

from seer.sim import study
from seer.sim.workload import WORKLOADS, Workload

CHUNK = 2048
OTHERS = ("least-generated", "seer-paper")


def quarter(name: str, group_size: int, between: float) -> Workload:
    """Return the workload with a quarter of its responses and instances."""
    load = WORKLOADS[name]()
    groups = load.groups * load.group_size // group_size // 4
    return replace(load, instances=load.instances // 4, groups=groups, group_size=group_size, between=between)


def cell(load: Workload, seeds: int, drafts: bool, workers: int) -> dict[str, Any]:
    compared = [study.Variant(name, drafts) for name in ("seer", *OTHERS, study.ORACLE)]
    tasks = list(study.tasks(load, [study.BASELINE, *compared], seeds, CHUNK))
    runs = study.run_all(tasks, workers, lambda run: None)
    summaries = {each.variant.policy: each for each in study.summarize(runs, compared[0]) if each.seeds}
    by_policy = {each.policy: [run for run in runs if run.variant == each] for each in compared}
    best = min(OTHERS, key=lambda name: summaries[name].total)
    over = study.ratio(by_policy[best], by_policy["seer"])
    return {
        "best_other": best,
        "over_best": [round(value, 4) for value in (over.mean, over.low or 0.0, over.high or 0.0)],
        "of_oracle": round(study.ratio(by_policy["seer"], by_policy[study.ORACLE]).mean ** -1, 4),
        "efficiency": {name: round(each.efficiency, 3) for name, each in summaries.items()},
        "speedup": {name: round(each.speedup.mean, 3) for name, each in summaries.items()},
        "spread": {name: round(each.total_deviation / each.total, 3) for name, each in summaries.items()},
        "error": {name: round(each.error, 3) for name, each in summaries.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--group-sizes", nargs="+", type=int, default=[8, 16])
    parser.add_argument("--between", nargs="+", type=float, default=[0.0, 0.3, 0.65, 0.9])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--drafts", action="store_true")
    parser.add_argument("--workers", type=int, default=study.cpus())
    options = parser.parse_args()
    found = []
    for name, size, between in itertools.product(options.workloads, options.group_sizes, options.between):
        started = time.perf_counter()
        load = quarter(name, size, between)
        found.append(
            {"workload": name, "group_size": size, "between": between}
            | cell(load, options.seeds, options.drafts, options.workers)
        )
        print(f"{found[-1]} {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
    print(json.dumps({"seeds": options.seeds, "drafts": options.drafts, "cells": found}, indent=1))


if __name__ == "__main__":
    main()
