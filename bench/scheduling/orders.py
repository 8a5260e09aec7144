"""Orders and placements that were tried for the default policy, against least generated first.

Qwen's workload at a quarter of its size, tuning seeds, paired: geometric mean over seeds of how many times
as long each takes, and the KV that it moves for every token. `quantile 1e-6` is the default's own order
without its bound on waiting. Prints JSON.

    python bench/scheduling/orders.py --seeds 4
    python bench/scheduling/orders.py --seeds 4 --between 0.9 --workload moonlight
    python bench/scheduling/orders.py --seeds 2 --whole --only seer "one instance in batches of 16"
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from statistics import fmean

from msgspec import structs
from policy_sweep import CHUNK, quarter

from seer.common.policy.fleet import Fleet
from seer.common.policy.length import Estimate
from seer.common.policy.placement import BALANCE_SPREAD, Place
from seer.common.policy.request import RequestView
from seer.common.policy.schedule import POLICIES, Order, OrderKey, Policy, length_quantile
from seer.sim import study
from seer.sim.cluster import Cluster, Outcome
from seer.sim.workload import TUNING_SEED, WORKLOADS

BASE = POLICIES["least-generated"]
BY_ESTIMATE = replace(BASE, estimator="posterior")


def quantile(chance: float) -> Order:
    def order(request: RequestView, estimate: Estimate) -> OrderKey:
        still = length_quantile(estimate, request.generated, request.max_tokens, chance) - request.generated
        return (-round(still), request.generated, request.queued)

    return order


def expected(request: RequestView, estimate: Estimate) -> OrderKey:
    # The mean of equally likely quantiles: cheaper than the integral, and close enough to sort by.
    chances = [(i + 0.5) / 8 for i in range(8)]
    lengths = [length_quantile(estimate, request.generated, request.max_tokens, chance) for chance in chances]
    still = fmean(lengths) - request.generated
    return (-round(still), request.generated, request.queued)


def share_done(power: float) -> Order:
    def order(request: RequestView, estimate: Estimate) -> OrderKey:
        return (
            (request.generated + 1)
            / length_quantile(estimate, request.generated, request.max_tokens, 0.5) ** power,
            request.queued,
        )

    return order


def probes_first(request: RequestView, estimate: Estimate) -> OrderKey:
    first = (0.0, float(request.generated)) if request.index == 0 else (1.0,)
    return (*first, *quantile(1e-6)(request, estimate))


def in_turns(tokens: int) -> Order:
    """Least generated first, but who runs goes on until it is so many tokens further."""

    def order(request: RequestView, estimate: Estimate) -> OrderKey:
        return (request.generated // tokens, -request.generated, request.queued)

    return order


def one_in_small_batches(most: int) -> Place:
    """As the default, but the first instance runs at most so many at a time: faster, for who goes first."""

    def place(request: RequestView, chunk: int, fleet: Fleet) -> str | None:
        small = fleet.names[0]
        able = [
            view
            for view in fleet.values()
            if view.has_room(request.context, chunk) and (view.name != small or view.chunks < most)
        ]
        if not able:
            return None
        best = min(able, key=lambda view: (view.chunks, -view.free_blocks, view.name))
        home = fleet.get(request.last_instance)
        return home.name if home in able and home.chunks - best.chunks <= BALANCE_SPREAD else best.name

    return place


def by_blocks(request: RequestView, chunk: int, fleet: Fleet) -> str | None:
    able = [view for view in fleet.values() if view.has_room(request.context, chunk)]
    if not able:
        return None
    best = max(able, key=lambda view: (view.free_blocks, view.name))
    home = fleet.get(request.last_instance)
    stays = home is not None and home.has_room(request.context, chunk)
    near = home is not None and best.free_blocks - home.free_blocks <= 0.1 * best.capacity.kv_blocks
    return request.last_instance if stays and near else best.name


TRIED: dict[str, Policy] = {
    "seer": POLICIES["seer"],
    **{
        f"quantile {chance:g}": replace(BY_ESTIMATE, order=quantile(chance))
        for chance in (1e-6, 1e-4, 0.01, 0.1, 0.5)
    },
    "expected length": replace(BY_ESTIMATE, order=expected),
    "share done": replace(BY_ESTIMATE, order=share_done(1.0)),
    "share done, square root": replace(BY_ESTIMATE, order=share_done(0.5)),
    "a probe of each group first": replace(BY_ESTIMATE, order=probes_first),
    **{f"turns of {tokens}": replace(BASE, order=in_turns(tokens)) for tokens in (4096, 8192)},
    "placed by blocks": replace(BASE, place=by_blocks),
    **{
        f"one instance in batches of {most}": replace(POLICIES["seer"], place=one_in_small_batches(most))
        for most in (16, 32)
    },
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workload", choices=WORKLOADS, default="qwen2-vl-72b")
    parser.add_argument("--between", type=float, default=0.65)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--whole", action="store_true", help="the whole workload, not a quarter of it")
    parser.add_argument("--only", nargs="+", choices=TRIED, default=list(TRIED), metavar="NAME")
    options = parser.parse_args()
    whole = structs.replace(WORKLOADS[options.workload](), between=options.between)
    load = whole if options.whole else quarter(whole.name, whole.group_size, options.between)

    drawn = [load.draw(seed) for seed in range(TUNING_SEED, TUNING_SEED + options.seeds)]

    def runs(policy: Policy) -> list[Outcome]:
        return [Cluster(load, policy, lengths, CHUNK).run() for lengths in drawn]

    base = runs(BASE)
    found: dict[str, dict[str, float]] = {}
    for name in options.only:
        each = runs(TRIED[name])
        found[name] = {
            "times_as_long": round(study.ratio(each, base).mean, 4),
            "pulled": round(fmean(run.counts["pulled_tokens"] / run.tokens for run in each), 2),
        }
        print(name, found[name], file=sys.stderr, flush=True)
    print(json.dumps({**vars(options), "orders": found}, indent=1))


if __name__ == "__main__":
    main()
