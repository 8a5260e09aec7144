"""Tokens/s on one GPU: bare vLLM in three shapes, Seer's engine alone, whole Seer systems, in turns.

    python bench/gpu/rates.py rates.json
    python bench/gpu/rates.py rates.json --sides vllm off --cells 512x64 --set engine.batch_invariant=true
    python bench/gpu/rates.py rates.json --cpu

Few sides are on the device at once (`--at-once`), since all share the host's cores: the first one, which
ratios are to, and others after each other. Those that are there take turns; each turn has prompts and a seed
of its own. A cell is most tokens of a response x responses at once. The model is the shipped one, padded to a
weight and a number of layers that occupy a GPU (examples/countdown/heavier.py), in bfloat16. Writes after
each cell, by side: its runner's class, the median of tokens/s and of the ratio to the first side in the same
turn, with the least and the most, and how many of a Seer system's responses differ from those of the first
such system, which only batch-invariant kernels exclude. A side that the system refuses has its reason.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from contestants import Process, RefusedError, Responses, System
from lib.hardware import machine
from lib.paths import EXAMPLE
from sides import SIDES, SYSTEMS, WEIGHTS, contestant, padded, prompts_of

from seer.common.errors import SeerError
from seer.common.process.devices import driver_version, visible_devices

GROUP = 8
"""Responses to a prompt; fewer where fewer are at once."""

RUN_SECONDS = 90.0
"""Longest turn of a side; one that takes longer hangs, and others go on without it."""

CELLS, CPU_CELLS = ("16x64", "16x256", "512x1", "512x64", "1024x256"), ("16x4", "64x8")


class Rates:
    """What was measured: by cell and side, a figure for each turn; `report` is what is written."""

    def __init__(self, out: Path, report: dict[str, Any], reference: str) -> None:
        self._out, self._report, self._reference = out, report, reference
        self._rates: dict[tuple[str, str], list[float]] = {}
        self._expected: dict[tuple[str, int], Responses] = {}
        report |= {"reference": reference, "sides": {}, "cells": {}}

    def tell(self, side: str, about: dict[str, Any]) -> None:
        """Note what a side is, or why it was refused."""
        self._report["sides"][side] = about
        print(side, json.dumps(about), file=sys.stderr, flush=True)
        self.write()

    def keep(self, cell: str, found: dict[str, list[tuple[float, Responses]]]) -> None:
        """Add a cell's turns: seconds and responses by side. The reference's are of these turns."""
        own = [sum(len(ids) for _, _, ids in each) / took for took, each in found.get(self._reference, [])]
        for side, turns in found.items():
            rates = [sum(len(ids) for _, _, ids in each) / took for took, each in turns]
            entry: dict[str, Any] = {
                "turns": len(turns), "tokens_per_s": round(statistics.median(rates)),
                "seconds": round(statistics.median(took for took, _ in turns), 3), **against(rates, own),
            }  # fmt: skip
            if side in SYSTEMS:
                entry |= {"responses": 0, "differing": 0}
                for turn, (_, each) in enumerate(turns):
                    expected = self._expected.setdefault((cell, turn), each)
                    entry["responses"] += len(each)
                    entry["differing"] += sum(a != b for a, b in zip(each, expected, strict=True))
            cells = self._report["cells"].setdefault(cell, {})
            if side == self._reference and side in cells:  # again beside others: all its medians are kept
                cells[side].setdefault("again", []).append(entry["tokens_per_s"])
            else:
                cells[side] = entry
            print(cell, side, json.dumps(entry), file=sys.stderr, flush=True)
        self.write()

    def write(self) -> None:
        """Write the report as it is."""
        self._out.write_text(json.dumps(self._report, indent=1) + "\n")


def against(rates: Sequence[float], reference: Sequence[float]) -> dict[str, list[float]]:
    """Return the median of the ratios to the reference, and the least and the most."""
    ratios = [one / other for one, other in zip(rates, reference, strict=False)]
    if not ratios:
        return {}
    return {"ratio": [round(each, 3) for each in (statistics.median(ratios), min(ratios), max(ratios))]}


async def measure(
    cell: str, sides: dict[str, Process | System], turns: int, rates: Rates
) -> dict[str, list[tuple[float, Responses]]]:
    """Run a cell; the first turn warms up and does not count. A side that fails or hangs is left out."""
    tokens, running = map(int, cell.split("x"))
    n = min(GROUP, running)
    found: dict[str, list[tuple[float, Responses]]] = {name: [] for name in sides}
    names = list(sides)
    for number in range(turns + 1):
        prompts = prompts_of(number, running // n)
        for name in (*names[number % len(names) :], *names[: number % len(names)]):
            if name not in sides:
                continue
            begun = time.perf_counter()
            try:
                responses = await asyncio.wait_for(sides[name].run(prompts, n, tokens, number), RUN_SECONDS)
            except (RefusedError, SeerError, OSError) as error:  # TimeoutError is an OSError
                said = f"{type(error).__name__}: {error}"[-500:]
                rates.tell(name, {"refused": f"in turn {number} of {cell}: {said}"})
                del found[name]
                await sides.pop(name).close()
                continue
            if number:
                found[name].append((time.perf_counter() - begun, responses))
    return found


async def start(name: str, side: Process | System, rates: Rates) -> bool:
    """Start a side; return whether it is there."""
    begun = time.monotonic()
    try:
        about: dict[str, Any] = await side.start()
    except RefusedError as error:
        rates.tell(name, {"refused": str(error)})
        return False
    rates.tell(name, about | {"start_seconds": round(time.monotonic() - begun, 1)})
    return True


async def start_all(sides: dict[str, Process | System], rates: Rates) -> dict[str, Process | System]:
    """Start sides, all at once; return those that are there."""
    there = await asyncio.gather(*(start(name, side, rates) for name, side in sides.items()))
    return {name: side for (name, side), ok in zip(sides.items(), there, strict=True) if ok}


async def compare(model: Path, given: argparse.Namespace) -> None:
    """Run all cells, a few sides at a time, until the time is over."""
    running = max(int(cell.split("x")[1]) for cell in given.cells)
    rates = Rates(given.out, {
        "machine": machine("torch", "vllm", "triton"), "driver": driver_version(), "settings": given.sets,
        "devices": [each.model for each in visible_devices()], "model": model.name,
        "model_bytes": (model / WEIGHTS).stat().st_size, "skipped": [],
    }, given.sides[0])  # fmt: skip
    size = max(1, given.at_once - 1)
    groups = [given.sides[1:][place : place + size] for place in range(0, len(given.sides) - 1, size)] or [[]]
    first: dict[str, Process | System] = {}
    async with contextlib.AsyncExitStack() as outer:
        for place, names in enumerate(groups):
            async with contextlib.AsyncExitStack() as stack:
                sides = {name: contestant(name, model, running, given) for name in names}
                if not place:
                    first = {given.sides[0]: contestant(given.sides[0], model, running, given)}
                    outer.push_async_callback(first[given.sides[0]].close)
                for side in sides.values():
                    stack.push_async_callback(side.close)
                there = await start_all(sides if place else first | sides, rates)
                if not place:
                    first = {name: side for name, side in there.items() if name in first}
                await cells(first | there, rates, given)


async def cells(sides: dict[str, Process | System], rates: Rates, given: argparse.Namespace) -> None:
    """Run all cells on sides that are there; one for which no time seems to be left is skipped."""
    took = 0.0
    for cell in given.cells:
        if not sides:
            break
        begun = time.monotonic()
        if begun + took > given.end:
            rates._report["skipped"].append([cell, *sides])
            continue
        rates.keep(cell, await measure(cell, sides, given.turns, rates))
        took = time.monotonic() - begun
    rates.write()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="file of the figures")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--cells", nargs="+")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--at-once", type=int, default=3, help="sides on the device at once")
    parser.add_argument("--seconds", type=float, default=3600, help="begin no cell that might end later")
    parser.add_argument("--model", type=Path, help="a padded model that is there already")
    parser.add_argument("--gigabytes", type=float, default=4, help="weight of the padded model")
    parser.add_argument("--layers", type=int, default=8, help="so many times the layers")
    parser.add_argument("--fill", choices=("zeros", "random"), default="zeros", help="what pads the model")
    parser.add_argument(
        "--share", type=float, default=0.5, help="of the device's memory, that a side may see in use"
    )
    parser.add_argument("--set", action="append", default=[], dest="sets", help="a setting of Seer's sides")
    parser.add_argument("--cpu", action="store_true", help="try it on CPUs: the shipped model, small cells")
    given = parser.parse_args()
    given.end = time.monotonic() + given.seconds  # to make the model takes some of it
    given.cells = given.cells or list(CPU_CELLS if given.cpu else CELLS)
    if given.cpu:
        given.model = given.model or EXAMPLE / "model"
    asyncio.run(compare(given.model or padded(given.gigabytes, given.layers, given.fill), given))


if __name__ == "__main__":
    main()
