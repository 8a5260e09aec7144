"""How far the default policy is from what is possible, and how much of that is information.

Each of the paper's workloads, a quarter of it or the whole: how long the default policy takes, and of that
- `bound`: what no schedule goes below (sim/bound.py);
- `found`: the best schedule found that knows all lengths. So many of the longest responses have some
  instances to themselves, where batches are small and so fast; the rest runs longest remaining first. Both
  numbers are searched for, for each seed;
- `oracle`: longest remaining first, without instances for the longest;
- `groups known`: the default's order, if it knew the mean of each group's log lengths and their spread from
  the start, more than a context service can learn; at the best of several chances of being longer.
With `--signals`, instead of the search: `groups known` with a signal of each response besides, that has such
a correlation with how far the response's log length is from its group's, and is seen once the response has
generated `--after` of the cap; at the default's chance. A signal of 1 at the start is nearly `oracle`.
Geometric means over seeds. Prints JSON.

    python bench/scheduling/possible.py --seeds 3
    python bench/scheduling/possible.py --seeds 3 --drafts
    python bench/scheduling/possible.py --seeds 3 --signals 0.5 0.7 0.9 --after 0
    python bench/scheduling/possible.py --whole --seeds 1 --workloads qwen2-vl-72b
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from policy_sweep import quarter

from seer.common.policy.chunk_size import default_chunk
from seer.common.policy.fleet import Fleet
from seer.common.policy.length import Estimate
from seer.common.policy.request import RequestView
from seer.common.policy.schedule import (
    POLICIES,
    TAIL_PROBABILITY,
    OrderKey,
    Policy,
    length_quantile,
    oracle,
)
from seer.sim.bound import of_rollout
from seer.sim.cluster import Cluster
from seer.sim.workload import TUNING_SEED, WORKLOADS, Workload

Lengths = list[list[int]]

SHARES = (1.0, 0.95, 0.9, 0.8, 0.7)
"""Responses of at least such shares of the longest are tried as those that have instances for themselves."""

CHANCES = (1e-6, 1e-3, 0.03, 0.3)


def named(lengths: Lengths) -> dict[str, int]:
    """Return all lengths by the names that `Cluster` gives to requests."""
    return {f"r/{g}#{i}": length for g, group in enumerate(lengths) for i, length in enumerate(group)}


def longest_apart(lengths: Mapping[str, int], longest: int, apart: int) -> Policy:
    """Give `apart` instances to so many of the longest responses, in turns; the rest as `oracle`."""
    chosen = sorted(lengths, key=lambda name: -lengths[name])[:longest]
    home = {name: f"e{place % apart:04}" for place, name in enumerate(chosen)}
    most = {f"e{place:04}": -(-longest // apart) for place in range(apart)}

    def place(request: RequestView, chunk: int, fleet: Fleet) -> str | None:
        own = home.get(request.request_id)
        if own is not None and fleet.has_room(own, request.context, chunk):
            return own
        able = [
            view
            for view in fleet.values()
            if view.has_room(request.context, chunk) and view.chunks < most.get(view.name, math.inf)
        ]
        if not able:
            return None
        best = min(able, key=lambda view: (view.chunks, -view.free_blocks, view.name))
        stays = any(view.name == request.last_instance for view in able)
        return request.last_instance if stays else best.name

    def order(request: RequestView, estimate: Estimate) -> OrderKey:
        name = request.request_id
        return (name not in home, request.produced - lengths[name], request.queued)

    return Policy("longest-apart", order, place, chunked=True, admission=True)


def known(lengths: Lengths, chance: float, signal: float = 0.0, after: float = 0.0, seed: int = 0) -> Policy:
    """Order by the length that is exceeded with this chance, by the true log-normal of each group.

    Once a response has generated `after` tokens, its estimate is what a `signal` of this correlation tells.
    """
    logs = [[math.log(length) for length in group] for group in lengths]
    spread = math.sqrt(statistics.fmean(statistics.variance(group) for group in logs))
    middles = [statistics.fmean(group) for group in logs]
    groups = [Estimate(math.exp(middle), spread) for middle in middles]
    noise, left = random.Random(seed), math.sqrt(1 - signal**2)
    seen = {
        f"r/{g}#{i}": Estimate(
            math.exp(middles[g] + signal * (signal * (log - middles[g]) + left * spread * noise.gauss())),
            spread * left,
        )
        for g, group in enumerate(logs)
        for i, log in enumerate(group)
    }

    def order(request: RequestView, estimate: Estimate) -> OrderKey:
        mine = seen[request.request_id] if request.produced >= after else groups[group_of(request)]
        still = length_quantile(mine, request.produced, request.most, chance) - request.produced
        return (-round(still), request.produced, request.queued)

    return replace(POLICIES["seer"], name="known", order=order)


def group_of(request: RequestView) -> int:
    """Return the number of the group that `Cluster` named the request by."""
    return int(request.request_id.split("/")[1].split("#")[0])


def candidates(load: Workload, flat: list[int]) -> Iterator[tuple[int, int]]:
    """Yield how many of the longest responses to set apart, and on how many instances."""
    tried = set()
    for share in SHARES:
        longest = sum(length >= share * max(flat) for length in flat)
        for apart in range(1, load.instances // 2 + 1):
            fits = longest * (load.prompt + max(flat)) <= 2.5 * apart * load.model.kv_tokens
            if fits and longest >= 2 * apart:
                tried.add((longest, apart))
    yield from sorted(tried)


def one(
    load: Workload, seed: int, drafts: bool, signals: Sequence[float] = (), after: float = 0.0
) -> dict[str, Any]:
    """Return the seconds of each way on one draw of lengths."""
    lengths = load.draw(seed)
    chunk = default_chunk(load.cap)

    def seconds(policy: Policy) -> float:
        return Cluster(load, policy, lengths, chunk, drafts).run().total

    names = named(lengths)
    found: dict[str, Any] = {
        "bound": of_rollout(load, lengths, drafts).seconds(load.instances),
        "seer": seconds(POLICIES["seer"]),
        "oracle": seconds(oracle(names)),
    }
    if signals:
        for signal in signals:
            order = known(lengths, TAIL_PROBABILITY, signal, after * load.cap, seed)
            found[f"signal {signal:g}"] = seconds(order)
        return found
    tried = {pair: seconds(longest_apart(names, *pair)) for pair in candidates(load, list(names.values()))}
    best = min(tried, key=lambda pair: tried[pair], default=(0, 0))
    found["found"] = min(found["oracle"], *tried.values(), math.inf)
    found["longest, apart"] = best
    by_chance = {chance: seconds(known(lengths, chance)) for chance in CHANCES}
    found["chance"] = min(by_chance, key=lambda chance: by_chance[chance])
    found["groups known"] = by_chance[found["chance"]]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--tuning", action="store_true", help="tuning seeds, not held-out ones")
    parser.add_argument("--drafts", action="store_true")
    parser.add_argument("--whole", action="store_true", help="the whole workload, not a quarter of it")
    parser.add_argument("--signals", type=float, nargs="+", default=[], metavar="CORRELATION")
    parser.add_argument("--after", type=float, default=0.0, help="of the cap, before a signal is seen")
    options = parser.parse_args()
    first = TUNING_SEED if options.tuning else 0
    rows = []
    for name in options.workloads:
        whole = WORKLOADS[name]()
        load = whole if options.whole else quarter(name, whole.group_size, whole.between)
        runs = []
        for seed in range(first, first + options.seeds):
            runs.append(one(load, seed, options.drafts, options.signals, options.after))
            print(name, seed, runs[-1], file=sys.stderr, flush=True)
        ways = [way for way in runs[0] if way not in ("seer", "longest, apart", "chance")]
        times = {way: statistics.geometric_mean(run[way] / run["seer"] for run in runs) for way in ways}
        rows.append(
            {"workload": name, "seer_seconds": round(statistics.fmean(run["seer"] for run in runs))}
            | {f"{way}, of seer's time": round(value, 4) for way, value in times.items()}
            | {"runs": runs}
        )
    print(json.dumps({**vars(options), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
