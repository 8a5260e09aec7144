"""Fault campaigns by seed, for as long as one likes; prints JSON. `make chaos SECONDS=600 SEED=1000`.

`virtual`: whole systems in one event loop each, on virtual time; `processes`: real processes and sockets
with replay engines; `vllm`: the same with real engines and the shipped model. Not by seed, and only when
named: `stops`, `cuts`, `poor-cuts`, `disks`, `pool-stops`, `pool-cuts` (`tests/chaos/real.py`). The tests
hold a fixed part of each; their modules in `tests/chaos` say what a run is and what is checked. A failing
virtual seed replays exactly with `--replay SEED`.

    python bench/correctness/chaos.py --seconds 180 --seed 0 --only virtual processes
"""

from __future__ import annotations

import argparse
import concurrent.futures
import gc
import itertools
import json
import os
import sys
import time

from lib.hardware import machine
from lib.paths import TESTS

sys.path.insert(0, str(TESTS))

from chaos import real, virtual
from chaos.outcome import Outcome, summary

BATCH = 20
"""Virtual runs per task of a worker: about a second."""


def _batch(first: int, noise: bool) -> list[Outcome]:
    gc.freeze()
    gc.set_threshold(50_000)  # a run leaves little, and the collector would take a quarter of the time
    with virtual.quiet():
        return [virtual.run(seed, noise=noise) for seed in range(first, first + BATCH)]


def _virtual(seed: int, seconds: float, workers: int, noise: bool) -> list[Outcome]:
    end, outcomes = time.monotonic() + seconds, []
    firsts = itertools.count(seed, BATCH)
    with concurrent.futures.ProcessPoolExecutor(workers) as pool:
        running = {pool.submit(_batch, next(firsts), noise) for _ in range(workers)}
        while running:
            done, running = concurrent.futures.wait(running, return_when="FIRST_COMPLETED")
            found = [outcome for batch in done for outcome in batch.result()]
            for outcome in found:
                if outcome.problems:
                    print(f"virtual seed {outcome.seed}: {outcome.problems}", file=sys.stderr, flush=True)
            outcomes += found
            if time.monotonic() < end:
                running |= {pool.submit(_batch, next(firsts), noise) for _ in done}
    return sorted(outcomes, key=lambda outcome: outcome.seed)


def main() -> int:
    """Run the campaigns asked for; 1 when any seed failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    kinds = ("virtual", *real.BY_SEED)
    parser.add_argument("--only", nargs="+", choices=(*kinds, *real.FIXED), default=kinds)
    parser.add_argument("--seconds", type=float, default=60.0, help="for each kind")
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="of the virtual runs")
    parser.add_argument("--systems", type=int, default=2, help="of processes that run at once")
    parser.add_argument("--replay", type=int, metavar="SEED", help="run one virtual seed, with its logs")
    parser.add_argument("--noise", action="store_true", help="add what TCP never does to the virtual runs")
    args = parser.parse_args()
    if args.replay is not None:
        print(virtual.draw(args.replay, noise=args.noise))
        outcome = virtual.run(args.replay, noise=args.noise)
        print(outcome)
        return int(bool(outcome.problems))
    report: dict[str, object] = {"machine": machine()}
    failed = False
    for kind in args.only:
        began = time.monotonic()
        if kind != "virtual":
            report[kind], problems = real.report(kind, args.seed, args.seconds, args.systems)
            failed = failed or bool(problems)
            print(*problems, sep="\n", file=sys.stderr)
            continue
        outcomes = _virtual(args.seed, args.seconds, args.workers, args.noise)
        report[kind] = summary(outcomes, time.monotonic() - began)
        failed = failed or any(outcome.problems for outcome in outcomes)
    print(json.dumps(report, indent=1))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
