"""Whole rollouts with drafts off, `own` and `grouped` in turns: what drafts gain, and that they never cost.

    python bench/drafts/never_slower.py build/never-slower.jsonl
    python bench/drafts/never_slower.py build/never-slower.jsonl --cells 16x64 16x64x30 --pairs 7

A cell is most tokens of a response x responses at once, then x weight of the model x temperature (1 and 1.0
where not given). All systems of a cell are up, with one engine each and no KV pool; they take turns, so that
a slow moment of the machine hits all. Every turn has prompts and a seed of its own, and all must give the
same tokens. `control` has no drafts either: how far its ratio is from 1 is what the machine makes of equal
engines. Runs are appended to the file as they end; started again, the script goes on where it was stopped.
Prints JSON: of each cell the medians of tokens/s; the geometric mean of the ratios to off, and the ends
of its 95 % interval; the same of tokens per CPU second of all processes, which other work changes
less; the share of the time that drafts took to make; and geometric means over all cells.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import math
import os
import statistics
import sys
import tempfile
import time
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec
from lib.hardware import machine
from lib.paths import EXAMPLE
from lib.processes import cpu_seconds

sys.path.insert(0, str(EXAMPLE))
from heavier import heavier

from seer.client import Prompt, RolloutClient, SamplingParams
from seer.common.config import load
from seer.local.system import LocalSystem
from seer.services.engine.server import STATUS_SECONDS

SOURCES = ("off", "own", "grouped", "control")
CELLS = (
    "16x64", "64x64", "512x64", "2048x64", "512x1", "512x8", "512x256", "512x64x30", "512x64x1x0.6", "16x1",
    "16x256", "16x64x30", "2048x8x30", "512x1x30",
)  # fmt: skip
GROUP = 8
LEAST_TOKENS, MOST_TOKENS, TOKENS_EACH = 2_048, 32_768, 1_280
"""Tokens of a turn if no response ends early: so many for each that runs at once, within these bounds."""

T95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}
"""Student's t for a 95 % interval, by the number of pairs; 2.2 for more."""


class Cell(msgspec.Struct, frozen=True, order=True):
    """What a turn runs; ordered so that cells of the same engines follow each other."""

    weight: float
    running: int
    tokens: int
    temperature: float

    @classmethod
    def parse(cls, text: str) -> Cell:
        """Read `tokens x running [x weight [x temperature]]`."""
        tokens, running, *rest = text.split("x")
        weight, temperature = (*map(float, rest), *(1.0, 1.0)[len(rest) :])
        return cls(weight, int(running), int(tokens), temperature)

    def __str__(self) -> str:
        return f"{self.tokens}x{self.running}x{self.weight:g}x{self.temperature:g}"

    @property
    def groups(self) -> int:
        """Prompts of a turn."""
        tokens = min(MOST_TOKENS, max(LEAST_TOKENS, TOKENS_EACH * self.running))
        return max(1, self.running // GROUP, tokens // (GROUP * self.tokens))


class Side:
    """One system, with drafts from one source."""

    def __init__(self, source: str, client: RolloutClient, system: LocalSystem) -> None:
        self._source, self._client, self._system = source, client, system

    async def turn(self, cell: Cell, number: int) -> dict[str, Any]:
        """Run one rollout; prompts and seed follow from its number."""
        lines = (EXAMPLE / "prompts_512.jsonl").read_text().splitlines()
        texts = [json.loads(line)["prompt"] for line in lines]
        prompts = [
            Prompt(f"{cell}.{number}.{place}", text=texts[(number * cell.groups + place) % len(texts)])
            for place in range(cell.groups)
        ]
        before = await self._drafted()
        sampling = SamplingParams(max_tokens=cell.tokens, temperature=cell.temperature)
        begun, cpu = time.perf_counter(), self._cpu()
        groups = await (await self._client.submit(prompts, n=GROUP, sampling=sampling, seed=number)).result()
        seconds, cpu = time.perf_counter() - begun, self._cpu() - cpu
        after = await self._drafted()
        responses = sorted((g.prompt_id, r.index, r.token_ids.tolist()) for g in groups for r in g.responses)
        return {
            "cell": str(cell),
            "turn": number,
            "source": self._source,
            "tokens_per_s": sum(len(tokens) for *_, tokens in responses) / seconds,
            "tokens_per_cpu_s": sum(len(tokens) for *_, tokens in responses) / cpu,
            "seconds": seconds,
            "drafting_share": (after - before) / seconds,
            "digest": hashlib.blake2b(json.dumps(responses).encode(), digest_size=8).hexdigest(),
            "load": os.getloadavg()[0],
        }

    def _cpu(self) -> float:
        return time.process_time() + sum(map(cpu_seconds, self._system.pids.values()))

    async def _drafted(self) -> float:
        await asyncio.sleep(STATUS_SECONDS * 1.5)
        return sum(each.stats.draft_seconds for each in (await self._client.status()).instances)


async def systems(stack: contextlib.AsyncExitStack, cell: Cell, model: Path, sets: list[str]) -> list[Side]:
    """Start the systems of a cell."""
    sides = []
    for source in SOURCES:
        config = load(None, {}, [
            f"shared.model={model}", f"engine.max_num_seqs={cell.running}", "engine.max_model_len=2304",
            "engine.kv_cache_gib=1", "pool.kind=none",
            f"drafts.source={'off' if source == 'control' else source}", "log.level=warning", *sets,
        ])  # fmt: skip
        system = await stack.enter_async_context(LocalSystem(config, 1))
        client = RolloutClient(system.endpoint, tokenizer=str(model))
        sides.append(Side(source, await stack.enter_async_context(client), system))
    return sides


async def measure(cells: list[Cell], pairs: int, out: Path, sets: list[str]) -> None:
    """Run what the file lacks. Exits if tokens differ."""
    have = known(out)
    for (weight, running), some in groupby(sorted(cells), key=lambda cell: (cell.weight, cell.running)):
        todo = [cell for cell in some if len(have.get(str(cell), {})) < pairs]
        if not todo:
            continue
        async with contextlib.AsyncExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            model = EXAMPLE / "model" if weight == 1 else heavier(folder, weight=weight)
            print(f"weight {weight:g}, {running} at once: starting", file=sys.stderr)
            sides = await systems(stack, todo[0], model, sets)
            for cell in todo:
                for side in sides:
                    await side.turn(cell, 1000)
                for number in range(pairs):
                    if number not in have.get(str(cell), {}):
                        await take_turns(cell, number, sides, out)


async def take_turns(cell: Cell, number: int, sides: list[Side], out: Path) -> None:
    """Let each side run the same turn, in another order each time, and keep what they took."""
    first = number % len(sides)
    runs = [await side.turn(cell, number) for side in (*sides[first:], *sides[:first])]
    if len({run["digest"] for run in runs}) != 1:
        raise SystemExit(f"{cell}, turn {number}: tokens differ")
    with out.open("a") as file:
        file.writelines(json.dumps(run) + "\n" for run in runs)
    rates = {run["source"]: round(run["tokens_per_s"]) for run in runs}
    print(f"{cell}, turn {number}: {rates}", file=sys.stderr)


def known(out: Path) -> dict[str, dict[int, dict[str, dict[str, Any]]]]:
    """Return the runs in the file by cell, turn and source; turns that are not whole are left out."""
    runs: dict[str, dict[int, dict[str, dict[str, Any]]]] = {}
    for line in out.read_text().splitlines() if out.exists() else []:
        run = json.loads(line)
        runs.setdefault(run["cell"], {}).setdefault(run["turn"], {})[run["source"]] = run
    return {
        cell: {number: turn for number, turn in turns.items() if len(turn) == len(SOURCES)}
        for cell, turns in runs.items()
    }


def summary(turns: list[dict[str, dict[str, Any]]]) -> dict[str, Any]:
    """Return the figures of one cell."""
    report: dict[str, Any] = {"pairs": len(turns)}
    for source in SOURCES:
        runs = [turn[source] for turn in turns]
        report[source] = {"tokens_per_s": round(statistics.median(run["tokens_per_s"] for run in runs))}
        if source == "off":
            continue
        report[source] |= {
            "over_off": ratio([turn[source]["tokens_per_s"] / turn["off"]["tokens_per_s"] for turn in turns]),
            "over_off_by_cpu": ratio(
                [turn[source]["tokens_per_cpu_s"] / turn["off"]["tokens_per_cpu_s"] for turn in turns]
            ),
            "drafting_share": round(statistics.median(run["drafting_share"] for run in runs), 4),
        }
    return report


def ratio(ratios: list[float]) -> list[float]:
    """Return their geometric mean, and the ends of its 95 % interval."""
    logs = [math.log(each) for each in ratios]
    mean = statistics.fmean(logs)
    half = T95.get(len(logs), 2.2) * statistics.stdev(logs) / len(logs) ** 0.5 if len(logs) > 1 else 9.0
    return [round(math.exp(each), 3) for each in (mean, mean - half, mean + half)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="file of runs; what it has is not run again")
    parser.add_argument("--cells", nargs="+", type=Cell.parse, default=[Cell.parse(text) for text in CELLS])
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--set", action="append", default=[], dest="sets", help="a setting for all systems")
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    asyncio.run(measure(options.cells, options.pairs, options.out, options.sets))
    runs = known(options.out)
    names = [str(cell) for cell in options.cells if str(cell) in runs]
    cells = {name: summary(list(runs[name].values())) for name in names}
    report: dict[str, Any] = {"machine": machine("torch", "vllm"), "cells": cells}
    for source in SOURCES[1:]:
        for figure in ("over_off", "over_off_by_cpu"):
            means = [cell[source][figure][0] for cell in cells.values()]
            report[f"{source}_{figure}"] = round(statistics.geometric_mean(means), 3)
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
