"""When a request should leave its prefix, whether siblings should begin together, how long chunks should be.

The default policy on a quarter of each of the paper's clusters, with a KV pool and without: a quarter of the
prompts, and as `few` as fit at once (at their mean length). Tuning seeds, paired. `over`: a variant's
throughput over that of the policy as it is, geometric mean with a 95 % confidence interval; `moved`: chunks
that ran elsewhere than the one before; `missing`: tokens of KV fetched, or computed again without a pool,
for each token generated. Prints JSON.

    python bench/scheduling/placement.py
    python bench/scheduling/placement.py --whole --loads few --seeds 4
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from statistics import fmean
from typing import Any, NamedTuple

import msgspec
from policy_sweep import CHUNK, quarter

from seer.common.policy import placement
from seer.common.policy.fleet import Fleet
from seer.common.policy.request import RequestView
from seer.common.policy.schedule import POLICIES, Policy
from seer.sim import study
from seer.sim.cluster import Cluster, Outcome
from seer.sim.workload import TUNING_SEED, WORKLOADS, Workload

SEER = POLICIES["seer"]


def together() -> Policy:
    """Begin a prompt's responses near its first one."""
    first: dict[int, str] = {}

    def place(request: RequestView, chunk: int, fleet: Fleet) -> str | None:
        near = request.last_instance or first.get(request.group_number, "")
        name = placement.stay_or_least_loaded(replace(request, last_instance=near), chunk, fleet)
        if name is not None:
            first.setdefault(request.group_number, name)
        return name

    return replace(SEER, place=place)


class Variant(NamedTuple):
    """The policy as it is, but for what is given."""

    spread: int = placement.BALANCE_SPREAD
    size: int = CHUNK
    policy: Callable[[], Policy] = lambda: SEER


VARIANTS = {
    "as it is": Variant(),
    **{f"spread {spread}": Variant(spread=spread) for spread in (0, 8, 32)},
    **{f"siblings together, spread {n}": Variant(spread=n, policy=together) for n in (2, 32)},
    **{f"chunks of {size}": Variant(size=size) for size in (256, 512, 8192)},
}


def cell(load: Workload, seeds: int) -> dict[str, Any]:
    every = {}
    drawn = [load.draw(seed) for seed in range(TUNING_SEED, TUNING_SEED + seeds)]
    for name, (spread, size, policy) in VARIANTS.items():
        placement.BALANCE_SPREAD = spread  # which `stay_or_least_loaded` looks up whenever it is asked
        every[name] = [Cluster(load, policy(), lengths, size).run() for lengths in drawn]
    rows = {}
    for name, runs in every.items():
        over = study.ratio(every["as it is"], runs)
        rows[name] = {
            "over": [round(value, 4) for value in (over.mean, over.low or 0.0, over.high or 0.0)],
            "moved": round(fmean(run.counts["migrations"] / run.counts["chunks"] for run in runs), 3),
            "missing": round(fmean(missing(load, run) / run.tokens for run in runs), 2),
        }
    return rows


def missing(load: Workload, run: Outcome) -> float:
    """Return the tokens of context that an instance had to fetch, or to compute once more."""
    prompts = load.prompt * len(run.finished)
    return run.counts["pulled_tokens"] + run.counts["prefilled_tokens"] - prompts


def few(load: Workload) -> Workload:
    fit = load.model.kv_tokens // round(load.prompt + load.mean)
    return msgspec.structs.replace(load, groups=load.instances * fit // load.group_size)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--loads", nargs="+", choices=("all", "few"), default=["all", "few"])
    parser.add_argument("--whole", action="store_true", help="whole clusters, not a quarter")
    parser.add_argument("--seeds", type=int, default=2)
    options = parser.parse_args()
    found = []
    for name, which, pool in itertools.product(options.workloads, options.loads, (True, False)):
        started = time.perf_counter()
        load = WORKLOADS[name]()
        load = load if options.whole else quarter(name, load.group_size, load.between)
        load = msgspec.structs.replace(few(load) if which == "few" else load, pool=pool)
        shape = {"workload": name, "load": which, "instances": load.instances, "prompts": load.groups}
        rows = cell(load, options.seeds)
        found.append({**shape, "pool": pool, "variants": rows})
        print(f"{found[-1]} {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
    print(json.dumps({"seeds": options.seeds, "chunk_size": CHUNK, "cells": found}, indent=1))


if __name__ == "__main__":
    main()
