"""Fault campaigns by seed, for as long as one likes; prints JSON. `make chaos SECONDS=600 SEED=1000`.

`virtual`: whole systems in one event loop each, on virtual time; `processes`: real processes and sockets
with replay engines; `vllm`: the same with real engines and the shipped model. The tests hold a fixed part
of each; their modules in `tests/chaos` say what a run is and what is checked. A failing virtual seed
replays exactly with `--replay SEED`.

    python bench/chaos.py --seconds 180 --seed 0 --only virtual processes
"""

from __future__ import annotations

import argparse
import asyncio
import concurrent.futures
import gc
import itertools
import json
import os
import platform
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from chaos import plan, processes, virtual  # noqa: E402
from chaos.outcome import Outcome, summary  # noqa: E402

BATCH = 20
"""Virtual runs per task of a worker: about a second."""


def _batch(first: int) -> list[Outcome]:
    gc.freeze()
    gc.set_threshold(50_000)  # a run leaves little, and the collector would take a quarter of the time
    with virtual.quiet():
        return [virtual.run(seed) for seed in range(first, first + BATCH)]


def _virtual(seed: int, seconds: float, workers: int) -> list[Outcome]:
    end, outcomes = time.monotonic() + seconds, []
    firsts = itertools.count(seed, BATCH)
    with concurrent.futures.ProcessPoolExecutor(workers) as pool:
        running = {pool.submit(_batch, next(firsts)) for _ in range(workers)}
        while running:
            done, running = concurrent.futures.wait(running, return_when="FIRST_COMPLETED")
            outcomes += [outcome for batch in done for outcome in batch.result()]
            if time.monotonic() < end:
                running |= {pool.submit(_batch, next(firsts)) for _ in done}
    return sorted(outcomes, key=lambda outcome: outcome.seed)


def _seeds(first: int, seconds: float) -> Iterator[int]:
    end = time.monotonic() + seconds
    yield from itertools.takewhile(
        lambda seed: seed == first or time.monotonic() < end, itertools.count(first)
    )


def _campaign(kind: str, seed: int, seconds: float, workers: int) -> list[Outcome]:
    if kind == "virtual":
        return _virtual(seed, seconds, workers)
    if kind == "processes":
        load = processes.Load(prompts=20, faults=8, burst_seconds=6.0, long_stops=True)
        return asyncio.run(processes.campaign(_seeds(seed, seconds), load))
    load = processes.Load(prompts=8, max_tokens=300, faults=3, burst_seconds=4.0)
    return asyncio.run(processes.campaign(_seeds(seed, seconds), load, ROOT / "examples/countdown/model"))


def main() -> int:
    """Run the campaigns asked for; 1 when any seed failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    kinds = ("virtual", "processes", "vllm")
    parser.add_argument("--only", nargs="+", choices=kinds, default=kinds)
    parser.add_argument("--seconds", type=float, default=60.0, help="for each kind")
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="of the virtual runs")
    parser.add_argument("--replay", type=int, metavar="SEED", help="run one virtual seed, with its logs")
    args = parser.parse_args()
    if args.replay is not None:
        print(plan.draw(args.replay))
        outcome = virtual.run(args.replay)
        print(outcome)
        return int(bool(outcome.problems))
    report: dict[str, object] = {"python": platform.python_version(), "cores": os.cpu_count()}
    failed = False
    for kind in args.only:
        began = time.monotonic()
        outcomes = _campaign(kind, args.seed, args.seconds, args.workers)
        report[kind] = summary(outcomes, time.monotonic() - began)
        for outcome in outcomes:
            if outcome.problems:
                failed = True
                print(f"{kind} seed {outcome.seed}: {outcome.problems}", file=sys.stderr)
    print(json.dumps(report, indent=1))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
