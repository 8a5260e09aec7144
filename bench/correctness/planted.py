"""Whether `seer verify` finds planted faults: in engines alone, and in engines and its teacher.

Prints JSON. The faults are those of `tests/planted/faults.py`. For each, the reference and the cell that is
to find it run with the fault in their engines, which stay from one fault to the next. Then one teacher judges
all differences, without the fault and with it. `none` runs every cell without a fault, and must pass. Exit
code 0 only if it does, and each fault was called a bug in its cell both times.

    python bench/correctness/planted.py --out planted.json
    python bench/correctness/planted.py --faults context-last-token,key-half
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import copy
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lib.hardware import machine
from lib.paths import EXAMPLE, TESTS
from msgspec.structs import replace

sys.path.insert(0, str(TESTS))
sys.path.insert(0, str(TESTS / "planted"))

import faults
import vision_models

from seer.common.config import Config, load
from seer.common.types import SamplingParams
from seer.local.beside import beside
from seer.local.hardware import Hardware
from seer.rollout.files import SLACK_TOKENS
from seer.verify import run
from seer.verify import teacher as judging
from seer.verify.cell_run import Job, Runner
from seer.verify.cells import choose, settled
from seer.verify.report import VERDICTS, Report
from seer.verify.teacher import Compared
from seer.verify.turns import Shown

NONE = "none"
WHERE = ("engines", "engines and teacher")
PROMPTS = 24
"""Of them, four are those of the faults in one prompt of twelve."""

CELLS = ("chunk-16", "sampling", "structured", "pool-migrate", "drafts-sampling")


class Lasting(Runner):
    """A runner whose system stays when the cells of one fault have run."""

    async def __aexit__(self, *error: object) -> None:
        pass


@dataclass
class Found:
    """What the cells of one fault were, before anything was judged."""

    fault: str
    cell: str
    report: Report
    images: Shown
    runs: dict[str, Compared]
    seconds: float


async def run_faults(wanted: list[tuple[str, str]], config: Config, job: Job, control: Path) -> list[Found]:
    """Run the reference and a cell for each (fault, cell); engines read the fault in `control`."""
    config, prompts = run._prepare(replace(job, config=config))
    found = []
    with beside(config) as own:
        machine = Hardware.here()
        own = settled(own, machine)
        runner = Lasting(job, prompts, say)
        try:
            for name, cell in wanted:
                plant(control, name)
                begun = time.monotonic()
                cells, _ = choose(cell, own, machine)
                report, reference, runs = await run._run_cells(cells, {}, own, runner)
                seconds = time.monotonic() - begun
                found.append(Found(name, cell, report, reference.images, runs, seconds))
                say(f"{name}: {len(report.cells[0].mismatches)} differences in {seconds:.1f} s")
        finally:
            plant(control, NONE)
            await runner._end()
    return found


def plant(control: Path, fault: str) -> None:
    """Have engines read the name of this fault from now on."""
    control.write_text(fault)


def judge_all(found: list[Found], config: Config, in_teacher: list[str]) -> Iterator[dict[str, Any]]:
    """Judge what was found by one teacher; `in_teacher` holds the name of its fault."""
    config = settled(config, Hardware.here())
    with (
        beside(config) as own,
        judging.in_process(replace(own, pool=replace(own.pool, kind="none"))) as backend,
    ):
        judging.in_process = lambda _: contextlib.nullcontext(backend)
        for each in found:
            for where in WHERE if each.fault != NONE else WHERE[:1]:
                in_teacher[:] = [each.fault if where == WHERE[1] else NONE]
                report, begun = copy.deepcopy(each.report), time.monotonic()
                engines = {cell.name: own.engine for cell in report.cells}
                judging.judge(report, own, engines, each.images, each.runs, lambda line: None)
                yield told(each, where, report, time.monotonic() - begun)


def told(each: Found, where: str, report: Report, judged: float) -> dict[str, Any]:
    """Return a row: whether the fault was found, and how."""
    (cell,) = report.cells
    row = {
        "fault": each.fault,
        "in": where,
        "cell": each.cell,
        "found": cell.count("bug") > 0,
        **{verdict: cell.count(verdict) for verdict in VERDICTS},
        "unmet": cell.unmet,
        "error": cell.error,
        "tokens": cell.comparison.tokens if cell.comparison else 0,
        "seconds": round(each.seconds, 1),
        "judged_seconds": round(judged, 1),
    }
    say(json.dumps(row))
    return row


def of_kind(names: list[str], *kinds: str) -> list[tuple[str, str]]:
    """Return (fault, cell) of these kinds, and the cells without a fault first."""
    pairs = [(name, faults.FAULTS[name].cell) for name in names if faults.FAULTS[name].kind in kinds]
    return [(NONE, cell) for cell in CELLS if cell in {cell for _, cell in pairs}] + pairs


def systems(names: list[str], folder: Path) -> Iterator[tuple[list[tuple[str, str]], Config, Job]]:
    """Yield what runs on the same model, with that model's configuration and prompts."""
    text, images = folder / "text.jsonl", folder / "model"
    text.write_text("\n".join((EXAMPLE / "prompts.jsonl").read_text().splitlines()[:PROMPTS]))
    sampling = SamplingParams(max_tokens=128)
    config = load(None, {}, [f"shared.model={EXAMPLE / 'model'}", "engine.dtype=float32"])
    job = Job(prompts=text, n=2, sampling=sampling, seed=0, config=config, min_tokens=1)
    if wanted := of_kind(names, "context", "key", "position", "history", "order", "pool", "draft", "grammar"):
        yield wanted, config, job
    if wanted := of_kind(names, "image"):
        vision_models.make("qwen2-vl", images)
        shown = vision_models.write_lines(folder)
        config = load(None, {}, [f"shared.model={images}", "engine.max_model_len=400", "pool.kind=none"])
        yield (
            wanted,
            config,
            replace(job, prompts=shown, config=config, sampling=replace(sampling, max_tokens=64)),
        )


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what was missed, and how differences were called where there was a fault."""
    planted = [row for row in rows if row["fault"] != NONE]
    clean = [row for row in rows if row["fault"] == NONE]
    return {
        "faults": len({row["fault"] for row in planted}),
        "missed": [f"{row['fault']} in {row['in']}" for row in planted if not row["found"]],
        **{f"called_{verdict}": sum(row[verdict] for row in planted) for verdict in VERDICTS},
        "clean_passes": bool(clean) and not any(row["bug"] or row["error"] or row["unmet"] for row in clean),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", default=",".join(faults.FAULTS), help="names, comma-separated")
    parser.add_argument("--out", type=Path, help="write the JSON there too")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    in_teacher = [NONE]
    faults.install(lambda: faults.FAULTS.get(in_teacher[0]))
    teacher = judging.in_process
    with tempfile.TemporaryDirectory() as folder:
        control = Path(folder) / "fault"
        os.environ |= {
            "PYTHONPATH": str(TESTS / "planted"), "SEER_PLANTED": str(control), "SEER_PLANTED_IN": "engines",
        }  # fmt: skip
        for wanted, config, job in systems(options.faults.split(","), Path(folder)):
            found = asyncio.run(run_faults(wanted, config, job, control))
            judging.in_process = teacher
            length = max(
                len(g.prompt_token_ids) for each in found for ours, _ in each.runs.values() for g in ours
            )
            fitting = replace(config.engine, max_model_len=length + job.sampling.max_tokens + SLACK_TOKENS)
            rows += judge_all(found, replace(config, engine=fitting), in_teacher)
    result = {"machine": machine("torch", "vllm"), **summary(rows), "rows": rows}
    text = json.dumps(result, indent=1)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n")
    return 0 if result["clean_passes"] and not result["missed"] else 1


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
