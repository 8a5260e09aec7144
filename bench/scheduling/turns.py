"""Who goes first, and where, in rollouts of many turns: orders and placements against the default policy.

Qwen's lengths on two of its instances, cut into turns with tools in between: with too little KV memory
(scarce) and with room for all (ample), with a pool and without, by the mean wait for a tool. Tuning seeds,
paired. `over`: a variant's throughput over that of the policy as it is, geometric mean with a 95 % confidence
interval; `computed` and `pulled`: tokens of context for each one generated; `idle`: the instances' share of
the time. Prints JSON.

    python bench/scheduling/turns.py --seeds 5
    python bench/scheduling/turns.py --seeds 5 --waits 8 --memory scarce --only seer "oldest trajectory"
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import msgspec

from seer.common.policy import placement
from seer.common.policy.fleet import Fleet
from seer.common.policy.length import Estimate
from seer.common.policy.request import RequestView
from seer.common.policy.schedule import POLICIES, Order, OrderKey, Policy
from seer.sim import study, turns
from seer.sim.bound import of_trajectories
from seer.sim.turn_cluster import TurnCluster
from seer.sim.workload import TUNING_SEED, WORKLOADS, Workload

SEER = POLICIES["seer"]
CHUNK = 1280
MEMORY = {"scarce": 0.25, "ample": 1.0}
"""Shares of the KV memory that Qwen's instances have; all of it holds every trajectory at once."""


def oldest_trajectory() -> Order:
    """Order by when a trajectory's first turn came."""
    first: dict[tuple[int, int], int] = {}

    def order(request: RequestView, estimate: Estimate) -> OrderKey:
        return (first.setdefault((request.group_number, request.index), request.queued), request.queued)

    return order


def first(back: Order) -> Order:
    """Put those that come back with a turn, or go on with one, before those that have not begun."""

    def order(request: RequestView, estimate: Estimate) -> OrderKey:
        return (not request.produced, *back(request, estimate))

    return order


def spread(most: int) -> placement.Place:
    """Let those that come back stay while their instance has at most so many chunks beyond the emptiest."""

    def place(request: RequestView, chunk: int, fleet: Fleet) -> str | None:
        emptiest = fleet.emptiest(request.context, chunk)
        comes_back = request.earlier and not request.generated
        if emptiest is None or not comes_back:
            return placement.stay_or_least_loaded(request, chunk, fleet)
        home = request.last_instance
        stays = fleet.has_room(home, request.context, chunk) and fleet[home].chunks - emptiest.chunks <= most
        return home if stays else emptiest.name

    return place


VARIANTS: dict[str, Callable[[], Policy]] = {
    "seer": lambda: SEER,
    "least generated": lambda: replace(SEER, order=POLICIES["least-generated"].order),
    "oldest trajectory": lambda: replace(SEER, order=oldest_trajectory()),
    "arrival of turns": lambda: replace(SEER, order=POLICIES["divided"].order),
    "begun first": lambda: replace(SEER, order=first(SEER.order)),
    "who returns: spread 0": lambda: replace(SEER, place=spread(0)),
    "who returns: spread 8": lambda: replace(SEER, place=spread(8)),
    "who returns: spread 32": lambda: replace(SEER, place=spread(32)),
}


def workload(memory: str, pool: bool, wait: float, options: argparse.Namespace) -> Workload:
    load = WORKLOADS["qwen2-vl-72b"]()
    model = msgspec.structs.replace(load.model, kv_tokens=int(load.model.kv_tokens * MEMORY[memory]))
    return msgspec.structs.replace(
        load, name="turns", instances=2, groups=options.groups, group_size=8, between=options.between,
        model=model, pool=pool, turns=8.0, tool_tokens=200.0, tool_seconds=wait,
    )  # fmt: skip


def run(load: Workload, name: str, seed: int) -> dict[str, float]:
    """Simulate one rollout; return its figures."""
    drawn = turns.draw(load, TUNING_SEED + seed)
    found = TurnCluster(load, VARIANTS[name](), drawn, CHUNK).run()
    counts = found.counts
    return {
        "total": found.total,
        "tail": found.tail,
        "of_bound": of_trajectories(load, drawn, drafts=False).seconds(load.instances) / found.total,
        "computed": (counts["prefilled_tokens"] + counts["recomputed_tokens"]) / found.tokens,
        "pulled": counts["pulled_tokens"] / found.tokens,
        "moved": counts["migrations"] / counts["chunks"],
        "idle": 1 - counts["busy"],
    }


def rows(runs: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, Any]]:
    """Return each variant's means, and its throughput over the default's."""
    found: dict[str, dict[str, Any]] = {}
    base = [SimpleNamespace(**each) for each in runs["seer"]]
    for name, each in runs.items():
        over = study.ratio(base, [SimpleNamespace(**run) for run in each])
        found[name] = {key: round(fmean(run[key] for run in each), 3) for key in each[0]}
        found[name]["over"] = [round(value, 4) for value in (over.mean, over.low or 0.0, over.high or 0.0)]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--groups", type=int, default=64, help="of 8 trajectories each")
    parser.add_argument("--between", type=float, default=0.65, help="the prompt's share of the variance")
    parser.add_argument("--pool", nargs="+", choices=("yes", "no"), default=["yes", "no"])
    parser.add_argument("--waits", nargs="+", type=float, default=[0.0, 1.0, 8.0], help="mean seconds")
    parser.add_argument("--memory", nargs="+", choices=MEMORY, default=list(MEMORY))
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS), metavar="NAME")
    parser.add_argument("--workers", type=int, default=study.cpus())
    options = parser.parse_args()
    names = dict.fromkeys(["seer", *options.only])
    cells = []
    with ProcessPoolExecutor(options.workers) as workers:
        for memory, pool, wait in itertools.product(options.memory, options.pool, options.waits):
            started = time.perf_counter()
            load = workload(memory, pool == "yes", wait, options)
            asked = {
                name: [workers.submit(run, load, name, s) for s in range(options.seeds)] for name in names
            }
            done = {name: [each.result() for each in runs] for name, runs in asked.items()}
            cells.append({"memory": memory, "pool": pool == "yes", "wait": wait, "variants": rows(done)})
            print(f"{cells[-1]} {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
    shape = {
        "seeds": options.seeds,
        "chunk_size": CHUNK,
        "groups": options.groups,
        "between": options.between,
    }
    print(json.dumps({**shape, "cells": cells}, indent=1))


if __name__ == "__main__":
    main()
