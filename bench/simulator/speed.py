"""How long it takes to simulate one iteration of the paper's Qwen workload, and of ten times the cluster.

On one core, without drafts, 16 instances and 9,600 responses against 160 and 96,000. Processor time:
what else runs on the machine is left out. Prints JSON.

    python bench/simulator/speed.py
    python bench/simulator/speed.py --policies static seer --times 1 2
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from lib.hardware import machine
from msgspec.structs import replace

from seer.common.policy.schedule import POLICIES
from seer.sim.cluster import Cluster
from seer.sim.workload import TUNING_SEED, WORKLOADS

CHUNK = 2048


def simulated(policy: str, times: int) -> dict[str, Any]:
    """Simulate a cluster so many times as large."""
    load = WORKLOADS["qwen2-vl-72b"]()
    load = replace(load, instances=times * load.instances, groups=times * load.groups)
    lengths = load.draw(TUNING_SEED)
    start = time.process_time()
    outcome = Cluster(load, POLICIES[policy], lengths, CHUNK).run()
    seconds = time.process_time() - start
    return {
        "policy": policy, "instances": load.instances, "requests": load.groups * load.group_size,
        "seconds": round(seconds, 2), "chunks": outcome.counts["chunks"],
        "simulated_seconds": round(outcome.total),
    }  # fmt: skip


def main() -> None:
    """Simulate and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policies", nargs="+", choices=sorted(POLICIES), default=["seer"])
    parser.add_argument("--times", nargs="+", type=int, default=[1, 10])
    arguments = parser.parse_args()
    runs = []
    for policy in arguments.policies:
        rows = [simulated(policy, times) for times in arguments.times]
        for row in rows[1:]:
            row["growth"] = round(row["seconds"] / rows[0]["seconds"], 2)
        runs += rows
    json.dump({"machine": machine(), "chunk_size": CHUNK, "runs": runs}, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
