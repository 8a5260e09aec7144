"""What it costs and gains that a request goes on where it runs, instead of taking turns with those that wait.

The default policy by its share `stay` and by the chunk size, against the same policy with turns after every
chunk of a 32nd of the cap, as it was before: how many times as long, and how much KV moves. The paper's
workloads, tuning seeds or held-out ones, paired. Prints JSON.

    python bench/scheduling/moves.py --seeds 5
    python bench/scheduling/moves.py --whole --seeds 2 --stay 0.3 --parts 64 --held-out
    python bench/scheduling/moves.py --stay 0.3 --parts 64 --gigabits 10 25 100
    python bench/scheduling/moves.py --stay 0.3 --parts 64 --no-pool
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from dataclasses import replace
from statistics import fmean
from typing import Any

from msgspec import structs
from policy_sweep import quarter

from seer.common.policy.chunk_size import LEAST_CHUNK
from seer.common.policy.placement import stay_or_least_loaded
from seer.common.policy.schedule import POLICIES, Policy
from seer.sim import study
from seer.sim.cluster import Cluster, Outcome
from seer.sim.workload import TUNING_SEED, WORKLOADS, Workload

SEER = POLICIES["seer"]

IN_TURNS = replace(SEER, stay=0.0, place=stay_or_least_loaded)

PARTS_BEFORE = 32

NODES = {"kimi-k2": 4}
"""Nodes of an instance, each with links of its own, where there are several."""


def runs(load: Workload, policy: Policy, parts: int, seeds: range, drafts: bool) -> list[Outcome]:
    chunk = max(LEAST_CHUNK, load.cap // parts)
    return [Cluster(load, policy, load.draw(seed), chunk, drafts).run() for seed in seeds]


def figures(load: Workload, found: list[Outcome], before: list[Outcome]) -> dict[str, Any]:
    times = study.ratio(found, before)
    moved = fmean(run.counts["pulled_tokens"] for run in found) * load.model.kv_bytes
    return {
        "times_as_long": [round(value, 4) for value in (times.mean, times.low or 0.0, times.high or 0.0)],
        "terabytes": round(moved / 1e12, 2),
        "pulled_a_token": round(fmean(run.counts["pulled_tokens"] / run.tokens for run in found), 2),
        "computed_a_token": round(fmean(run.counts["prefilled_tokens"] / run.tokens for run in found), 2),
        "seconds": round(fmean(run.total for run in found)),
        "tail_seconds": round(fmean(run.tail for run in found)),
    }


def with_link(load: Workload, gigabits: float) -> Workload:
    """Return the workload with a network of so many Gbit/s a node; 0: as it is."""
    speed = gigabits * 1e9 / 8 * NODES.get(load.name, 1)
    seconds = load.model.kv_bytes / speed if gigabits else load.model.pull
    return structs.replace(load, model=structs.replace(load.model, pull=seconds))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--between", type=float, nargs="+", default=[0.65])
    parser.add_argument("--gigabits", type=float, nargs="+", default=[0.0], help="0: the workload's own")
    parser.add_argument("--stay", type=float, nargs="+", default=[0.0, 0.1, 0.3, 0.5, 1.0])
    parser.add_argument("--parts", type=int, nargs="+", default=[32, 64, 128], help="chunks of a whole cap")
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--held-out", action="store_true", help="seeds that no choice was made with")
    parser.add_argument("--drafts", action="store_true")
    parser.add_argument("--no-pool", action="store_true")
    parser.add_argument("--whole", action="store_true", help="the whole workload, not a quarter of it")
    options = parser.parse_args()
    first = 0 if options.held_out else TUNING_SEED
    seeds = range(first, first + options.seeds)
    rows = []
    for name, between, gigabits in itertools.product(options.workloads, options.between, options.gigabits):
        whole = structs.replace(WORKLOADS[name](), between=between)
        load = whole if options.whole else quarter(name, whole.group_size, between)
        load = structs.replace(with_link(load, gigabits), pool=not options.no_pool)
        before = runs(load, IN_TURNS, PARTS_BEFORE, seeds, options.drafts)
        cell = {"workload": name, "between": between, "gigabits": gigabits}
        rows.append(cell | {"in_turns": True} | figures(load, before, before))
        print(rows[-1], file=sys.stderr, flush=True)
        for parts, stay in itertools.product(options.parts, options.stay):
            policy = replace(SEER, stay=stay)
            found = runs(load, policy, parts, seeds, options.drafts)
            rows.append(cell | {"parts": parts, "stay": stay} | figures(load, found, before))
            print(rows[-1], file=sys.stderr, flush=True)
    print(json.dumps({**vars(options), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
