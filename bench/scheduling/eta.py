"""How far the estimate of a rollout's end is from what happened, over recorded rollouts.

A recorded rollout is a buffer's log (`seer sim --log`, `buffer.log` of a real one). Its events go through the
machines again, and whenever a share of the responses has finished the estimate of that moment is compared
with the time that was in fact left. Prints JSON: for each log how much longer it was expected to take, in
percent of what was left, when 25, 50 and 75 % had finished; and medians of the absolute values by policy.

    python bench/scheduling/eta.py LOG ...
    python bench/scheduling/eta.py --simulate     # the paper's three clusters, whole and a quarter of them
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from lib.hardware import machine
from msgspec.structs import replace
from policy_sweep import CHUNK

from seer.services.buffer.log.rows import read
from seer.services.buffer.rollout_progress import Survey, survey
from seer.services.buffer.statistics import Statistics
from seer.sim.study import Task, Variant, perform
from seer.sim.workload import WORKLOADS

SHARES = (0.25, 0.5, 0.75)
POLICIES = ("seer", "seer-paper", "static")


class Moment(NamedTuple):
    """What was expected at one moment."""

    share: float
    time: float
    eta: float | None


def moments(path: Path) -> tuple[str, list[Moment], float]:
    """Return the policy, what was expected whenever a share had finished, and when the rollout ended."""
    header, lines = read(path)
    machines = header.machine()
    statistics_, seen, end = Statistics(machines), [], 0.0
    for line in lines:
        out = machines.apply(line.event, line.time)
        statistics_.record(line.time, line.event, out)
        for rollout in machines.requests.rollouts.values():
            if not rollout.requests or rollout.finished < SHARES[min(len(seen), 2)] * rollout.requests:
                continue
            if len(seen) < len(SHARES):
                *_, found = survey(machines.requests, statistics_, line.time)
                assert isinstance(found, Survey)
                seen.append(Moment(SHARES[len(seen)], line.time, found.etas.get(rollout.rollout_id)))
            if rollout.finished == rollout.requests and not end:
                end = line.time
    return header.policy, seen, end


def errors(path: Path) -> dict[str, Any]:
    """Return the figures of one log."""
    policy, seen, end = moments(path)
    return {
        "log": path.stem,
        "policy": policy,
        "error_percent": {
            f"{each.share:.0%}": None
            if each.eta is None
            else round(100 * (each.eta / (end - each.time) - 1), 1)
            for each in seen
        },
        "left_seconds": {f"{each.share:.0%}": round(end - each.time, 1) for each in seen},
    }


def simulated(folder: Path) -> Iterator[Path]:
    """Simulate rollouts and yield their logs."""
    for name, make in WORKLOADS.items():
        load = make()
        small = replace(load, instances=load.instances // 4, groups=load.groups // 4)
        for size, scaled in (("whole", load), ("quarter", small)):
            for policy in POLICIES:
                path = folder / f"{name}-{size}-{policy}.jsonl"
                with path.open("wb") as file:
                    perform(Task(scaled, Variant(policy), 0, CHUNK), file)
                yield path


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("logs", nargs="*", type=Path)
    parser.add_argument("--simulate", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        found = [errors(path) for path in options.logs]
        if options.simulate:
            found += [errors(path) for path in simulated(Path(name))]
    medians = {
        policy: {
            share: round(statistics.median(abs(each["error_percent"][share]) for each in some), 1)
            for share in ("25%", "50%", "75%")
        }
        for policy in sorted({each["policy"] for each in found})
        if (
            some := [
                each
                for each in found
                if each["policy"] == policy and None not in each["error_percent"].values()
            ]
        )
    }
    print(
        json.dumps({"machine": machine("numpy"), "median_absolute_percent": medians, "logs": found}, indent=1)
    )


if __name__ == "__main__":
    main()
