"""`seer verify`: the same prompts through every cell, on the path that rollouts take.

Invariants:
- nothing is started before the whole input was checked;
- cells run one after the other, the teacher after all of them: each has the machine to itself.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from seer import launch
from seer.client import Group, Prompt
from seer.client.prompts import check_request
from seer.common.config import Config
from seer.common.errors import ConfigError, InvalidField, SeerError
from seer.hardware import Machine
from seer.prompts_io import (
    ModelFacts,
    check_fit,
    check_writable,
    model_facts,
    read_prompts,
    tokenizer_of,
    write_report,
)
from seer.verify.cell_run import ROLLOUT_NUMBER, CellRun, Job, Say, run_cell
from seer.verify.cells import Cell, choose
from seer.verify.compare import LOGPROB_TOLERANCE, compare
from seer.verify.judge import judge
from seer.verify.report import CellReport, Fault, Report, show

SLACK_TOKENS = 32
"""Room beyond prompt and output, as rollouts have it, for tokens that an engine drafts."""

PLAIN_WIDTH = 120
"""Columns of the table when nobody's terminal limits it."""


def perform(job: Job, json_file: Path | None) -> int:
    """Verify, print and write the report; return the exit code: 0 if it passed, else 1."""
    from rich.console import Console

    if json_file is not None:
        check_writable("--json", json_file)
    report = verify(job, lambda line: print(line, file=sys.stderr, flush=True))
    width = None if sys.stdout.isatty() else PLAIN_WIDTH
    show(report, Console(width=width, markup=False, highlight=False, soft_wrap=True))
    if json_file is not None:
        write_report(json_file, report.as_json())
    return 1 if report.failures() else 0


def verify(job: Job, say: Say) -> Report:
    """Run the matrix and judge every difference. `say` gets one line per step.

    Raises `InvalidField` or `ConfigError` for bad input, other `SeerError`s when the reference
    cannot run; what befalls other cells is in the report.
    """
    config, prompts = _prepare(job)
    (reference, *others), skipped = choose(job.matrix, config, Machine.here())
    files = _files(config)
    first = _perform(reference, reference.config(config), job, prompts, say)
    report = _new_report(job, len(prompts), skipped, _cell_report(reference, first), first.versions)
    if job.plant_fault:
        report.fault = Fault(cell=others[0].name, position=most_random_position(first.groups))
        say(f"planting a fault: {others[0].name} draws absolute position {report.fault.position} wrongly")
    lengths = [g.prompt_token_ids.size + r.token_ids.size for g in first.groups for r in g.responses]
    runs = {}
    for cell in others:
        try:
            its = _planted(cell, cell.config(config, lengths), report.fault)
            found = _perform(cell, its, job, prompts, say, first.counters["tokens"])
        except (InvalidField, ConfigError):
            raise
        except SeerError as error:
            say(f"{cell.name} failed: {error}")
            report.cells.append(CellReport(name=cell.name, about=cell.about, error=str(error)))
            continue
        found_report = _cell_report(cell, found)
        found_report.comparison = compare(
            first.groups, found.groups, job.sampling.temperature, report.logprob_tolerance
        )
        report.cells.append(found_report)
        runs[cell.name] = found.groups
    if _files(config) != files:
        raise SeerError(f"{config.shared.model} was changed while it was verified: run again")
    if config.engine.backend == "vllm":
        engines = {cell.name: msgspec.structs.replace(config.engine, **cell.engine) for cell in others}
        judge(report, reference.config(config), engines, first.groups, runs, say)
    return report


def _new_report(
    job: Job, prompts: int, skipped: dict[str, str], reference: CellReport, versions: dict[str, str]
) -> Report:
    dtype = versions.get("dtype", "")
    tolerance = job.logprob_tolerance
    return Report(
        versions=versions,
        dtype=dtype,
        seed=job.seed,
        rollout_number=ROLLOUT_NUMBER,
        n=job.n,
        prompts=prompts,
        sampling=job.sampling,
        min_tokens=job.min_tokens,
        logprob_tolerance=LOGPROB_TOLERANCE.get(dtype, 0.0) if tolerance is None else tolerance,
        skipped=skipped,
        reference=reference,
    )


def most_random_position(groups: Sequence[Group]) -> int:
    """Return the absolute position at which the responses have the most entropy, by their logprobs.

    Wherever all responses are certain of their token, a wrong key draws the right one.
    """
    surprise = np.zeros(
        max(g.prompt_token_ids.size + max(r.token_ids.size for r in g.responses) for g in groups)
    )
    for group in groups:
        start = group.prompt_token_ids.size
        for response in group.responses:
            surprise[start : start + response.logprobs.size] -= response.logprobs
    return int(surprise.argmax())


def _prepare(job: Job) -> tuple[Config, list[Prompt]]:
    check_request(job.n, job.sampling, job.seed, ROLLOUT_NUMBER)
    config = job.config
    if config.engine.backend == "vllm" and not config.shared.model:
        raise InvalidField("--model", "", "give a Hugging Face model folder")
    if job.plant_fault and job.sampling.temperature == 0:
        raise InvalidField("--temperature", 0, "--plant-fault needs noise to spoil; give more than 0")
    model = Path(config.shared.model) if config.shared.model else None
    facts = ModelFacts() if model is None else model_facts(model)
    lines = read_prompts(job.prompts, tokenizer_of(model))
    length = check_fit(lines, job.sampling.max_tokens, facts) + job.sampling.max_tokens + SLACK_TOKENS
    if config.engine.max_model_len is None:
        length = min(length, facts.context or length)
        config = msgspec.structs.replace(
            config, engine=msgspec.structs.replace(config.engine, max_model_len=length)
        )
    return config, [Prompt(line.prompt.id, token_ids=line.prompt.token_ids) for line in lines]


def _files(config: Config) -> list[tuple[str, int, int]]:
    """Return what tells whether the model changed: cells load it one after the other."""
    files = sorted(Path(config.shared.model).iterdir()) if config.shared.model else []
    return [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]


def _planted(cell: Cell, config: Config, fault: Fault | None) -> Config:
    if fault is None or fault.cell != cell.name:
        return config
    engine = msgspec.structs.replace(config.engine, fault_position=fault.position)
    return msgspec.structs.replace(config, engine=engine)


def _perform(
    cell: Cell, config: Config, job: Job, prompts: list[Prompt], say: Say, tokens: int = 0
) -> CellRun:
    say(f"{cell.name}: {cell.about}")
    found = launch.run(run_cell(cell, config, job, prompts, say, tokens // 2))
    say(f"{cell.name}: {found.counters['tokens']} tokens in {found.seconds:.1f} s")
    return found


def _cell_report(cell: Cell, found: CellRun) -> CellReport:
    return CellReport(
        name=cell.name,
        about=cell.about,
        seconds=found.seconds,
        counters=found.counters,
        unmet=cell.unmet(found.counters),
    )
