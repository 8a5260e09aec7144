"""What data-parallel ranks cost an instance that would else have one KV, in the simulator; prints JSON.

Ranks step together, so those without a request run dummies, and all wait for the one with most KV to read.
The peer is the same instance without ranks, in the same run and with the same lengths.

    python bench/simulator/ranks.py --workload kimi-k2 --ranks 8 32 --seeds 3
"""

from __future__ import annotations

import argparse
import json
import statistics

from lib.hardware import machine
from msgspec.structs import replace

from seer import __version__
from seer.common.policy.schedule import default_chunk
from seer.sim.study import Run, Task, Variant, cpus, run_all
from seer.sim.workload import WORKLOADS


def summary(runs: list[Run], peer: list[Run]) -> dict[str, float]:
    """Return means over seeds; `times` is the time as a multiple of the peer's."""
    ratios = [run.total / other.total for run, other in zip(runs, peer, strict=True)]
    found = {
        "seconds": statistics.fmean(run.total for run in runs),
        "tail_seconds": statistics.fmean(run.tail for run in runs),
        "times": statistics.geometric_mean(ratios),
        "of_bound": statistics.fmean(run.bound / run.total for run in runs),
        "preemptions": statistics.fmean(run.counts["preemptions"] for run in runs),
        "dummy_share": statistics.fmean(run.counts.get("dummies", 0.0) for run in runs),
    }
    return {name: round(value, 4) for name, value in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workload", default="kimi-k2", choices=sorted(WORKLOADS))
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--policies", nargs="+", default=["static", "seer"])
    parser.add_argument("--drafts", action="store_true")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--share", type=float, default=1.0, help="of the workload's prompts and instances")
    args = parser.parse_args()
    load = WORKLOADS[args.workload]()
    groups, instances = (max(1, round(args.share * each)) for each in (load.groups, load.instances))
    load = replace(load, groups=groups, instances=instances)
    found: dict[str, dict[str, dict[str, float]]] = {}
    for policy in args.policies:
        variant = Variant(policy, args.drafts)
        peer: list[Run] = []
        for ranks in (1, *args.ranks):
            each = replace(load, ranks=ranks)
            tasks = [Task(each, variant, seed, default_chunk(load.cap)) for seed in range(args.seeds)]
            runs = run_all(tasks, cpus(), lambda _: None)
            peer = peer or runs
            found.setdefault(variant.label, {})[str(ranks)] = summary(runs, peer)
    print(json.dumps({
        "machine": machine(), "versions": {"seer": __version__}, "workload": load.name, "seeds": args.seeds,
        "instances": instances, "responses": groups * load.group_size, "by_ranks": found,
    }, indent=1))  # fmt: skip


if __name__ == "__main__":
    main()
