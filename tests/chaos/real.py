"""What `bench/correctness/chaos.py` runs on real processes, and says of it.

`processes` and `vllm` kill and stop by seed. `stops`: each process stands still for 5 to 90 s; `cuts`: each
pair that talks is cut off for 30 s, in network namespaces; `poor-cuts`: the same with 50 ms of latency and
1 % of loss; `disks`: disks that fill; `pool-stops` and `pool-cuts`: the
KV pool's processes stand still, and its links are cut.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from chaos import cuts, disks, network, pools, processes, stops
from chaos.outcome import summary
from chaos.stops import Trial

MODEL = Path(__file__).parents[2] / "examples" / "countdown" / "model"
BY_SEED = ("processes", "vllm")
FIXED = ("stops", "cuts", "poor-cuts", "disks", "pool-stops", "pool-cuts")

Report = tuple[dict[str, Any], list[str]]
"""For JSON; and what was wrong."""


def report(kind: str, seed: int, seconds: float, systems: int) -> Report:
    """Run one kind, from `seed` on and for so long where it goes by seeds."""
    if kind in BY_SEED:
        return _by_seed(kind, seed, seconds, systems)
    if why := _problem(kind):
        return {"skipped": why}, []
    began = time.monotonic()
    found, problems = _disks() if kind == "disks" else _trials(asyncio.run(_matrix(kind)))
    return {"wall_seconds": round(time.monotonic() - began, 1), **found}, problems


def _problem(kind: str) -> str:
    if "cuts" in kind and (why := network.problem()):
        return why
    if "pool" in kind:
        return pools.problem()
    return disks.problem() if kind == "disks" else ""


def _matrix(kind: str) -> Coroutine[Any, Any, list[Trial]]:
    match kind:
        case "stops":
            return stops.matrix()
        case "cuts":
            return cuts.matrix()
        case "poor-cuts":
            return cuts.matrix(**cuts.POOR)
        case "pool-cuts":
            return pools.cuts(MODEL)
    return pools.matrix(MODEL)


def _trials(trials: Sequence[Trial]) -> Report:
    problems = [f"{each.what}, {each.seconds:g} s: {why}" for each in trials for why in each.problems]
    counts = {what: sum(getattr(each, what) for each in trials) for what in ("lost", "doubled", "changed")}
    told = {"trials": len(trials), "responses": sum(each.responses for each in trials), **counts}
    return {**told, "each": [msgspec.to_builtins(each) for each in trials]}, problems


def _disks() -> Report:
    async def run() -> dict[str, list[str]]:
        found = {f"weights, {where}": await disks.streams(where) for where in ("spool", "TMPDIR")}
        return {**found, "--out": await disks.outputs()}

    found = asyncio.run(run())
    return {"each": found}, [f"{where}: {why}" for where, problems in found.items() for why in problems]


def _by_seed(kind: str, seed: int, seconds: float, systems: int) -> Report:
    load, model = processes.Load(prompts=20, faults=8, burst_seconds=6.0, long_stops=True), None
    if kind == "vllm":  # half of the faults are the engines'
        kinds = (*processes.PROCESSES, "engine", "engine", "engine")
        load = processes.Load(prompts=8, max_tokens=300, faults=4, burst_seconds=5.0, kinds=kinds)
        model, systems = MODEL, 1
    began = time.monotonic()
    found = asyncio.run(processes.campaign(_seeds(seed, seconds, systems), load, model, systems))
    told = summary(found.outcomes, time.monotonic() - began) | {"use": _use(found.use)}
    return told, [f"{kind} seed {each.seed}: {each.problems}" for each in found.outcomes if each.problems]


def _use(use: dict[str, dict[str, list[list[float]]]]) -> dict[str, Any]:
    """Return, by service and what it uses, the most before and after, and the largest growth of a place."""
    told: dict[str, Any] = {}
    for (service, kinds), what in itertools.product(use.items(), ("mib", "files")):
        before, after = zip(*kinds[what], strict=True)
        growth = max(late - early for early, late in kinds[what])
        told.setdefault(service, {})[what] = {
            "before": max(before), "after": max(after), "growth": round(growth, 1)
        }  # fmt: skip
    return told


def _seeds(first: int, seconds: float, least: int) -> Iterator[int]:
    """Yield seeds until the time, from the first one on, is over; one for each system at least."""
    end = time.monotonic() + seconds
    for seed in itertools.count(first):
        if seed >= first + least and time.monotonic() > end:
            return
        yield seed
