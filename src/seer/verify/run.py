"""`seer verify`: the same prompts through every cell, on the path that rollouts take.

Invariants:
- nothing is started before the whole input was checked;
- no file or folder of a system with the same configuration is touched (`local/beside.py`);
- cells run one after the other, the teacher after all of them: each has the machine to itself;
- a planted fault is in the engine of its cell: no other cell runs on that engine;
- every response of every cell is compared with the reference's: where cells need more responses than
  were asked for, the reference is run with as many.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from seer.client import Group, Prompt
from seer.client.prompts import check_request
from seer.common.config import Config
from seer.common.errors import ConfigError, InvalidField, SeerError
from seer.common.types import SamplingParams
from seer.local import system as launch
from seer.local.beside import beside
from seer.local.hardware import Hardware
from seer.rollout.files import (
    ModelFacts,
    PromptLine,
    check_fit,
    check_writable,
    model_facts,
    read_prompts,
    tokenizer_of,
    with_length,
    write_report,
)
from seer.rollout.image_reader import ImageReader
from seer.verify import trainer_pass, turns
from seer.verify.cell_run import ROLLOUT_NUMBER, CellRun, Job, Runner, Say
from seer.verify.cells import CELLS, TURN_CELLS, Cell, Sampled, block_size, choose, sequences, settled
from seer.verify.compare import compare, logprob_tolerance
from seer.verify.fitting import Fit, Work, fit, n_for_tokens
from seer.verify.parameters import every_parameter, structured
from seer.verify.report import CellReport, Fault, Report, show
from seer.verify.teacher import Compared, in_process, judge

TRIES = 2
"""A cell that does not exercise what it is there for, though it should, is run so often."""

PLAIN_WIDTH = 120
"""Columns of the table when nobody's terminal limits it."""


def perform(job: Job, json_file: Path | None) -> int:
    """Verify, print and write the report; return the exit code: 0 if it passed, else 1."""
    from rich.console import Console

    check_writable("--json", json_file)
    report = verify(job, lambda line: print(line, file=sys.stderr, flush=True))
    width = None if sys.stdout.isatty() else PLAIN_WIDTH
    show(report, Console(width=width, markup=False, highlight=False, soft_wrap=True))
    if json_file is not None:
        write_report("--json", json_file, report.as_json())
    return 1 if report.failures() else 0


def verify(job: Job, say: Say) -> Report:
    """Run the matrix and judge every difference. `say` gets one line per step.

    Raises `InvalidField` or `ConfigError` for bad input, other `SeerError`s when the reference
    cannot run; what befalls other cells is in the report.
    """
    config, prompts = _prepare(job)
    if job.turns:
        job = replace(job, sampling=turns.without_placeholders(job.sampling, prompts))
    with beside(config) as own:
        return _verify(own, prompts, job, say)


def _verify(config: Config, prompts: list[Prompt], job: Job, say: Say) -> Report:
    machine = Hardware.here()
    config = settled(config, machine)
    matrix = TURN_CELLS if job.turns else CELLS
    cells, skipped = choose(job.matrix, config, machine, matrix)
    files = _files(config)
    report, reference, runs = launch.run(_run_cells(cells, skipped, config, Runner(job, prompts, say)))
    if _files(config) != files:
        raise SeerError(f"{config.shared.model} was changed while it was verified: run again")
    if config.engine.backend == "vllm":
        engines = {cell.name: replace(config.engine, **cell.engine) for cell in cells}
        judge(report, cells[0].config(config), engines, reference.images, runs, say)
        if job.trainer:
            say("comparing with the trainer's forward pass")
            report.trainer = trainer_pass.compared(
                cells[0].config(config), reference.groups, job.sampling, report.dtype,
                report.logprob_tolerance, in_process,
            )  # fmt: skip
    return report


async def _run_cells(
    cells: Sequence[Cell], skipped: dict[str, str], config: Config, runner: Runner
) -> tuple[Report, CellRun, dict[str, Compared]]:
    """Run all cells that can be exercised, and compare; return the reference, and what was compared."""
    async with runner:
        reference, *others = cells
        job, say = runner.job, runner.say
        first = await _reference(reference, config, job.n, runner)
        fits, cannot = _fits(others, config, job, first)
        most = max((each.n for each in fits), default=job.n)
        if most > job.n:
            say(f"{most} responses per prompt, so that all cells have something to do")
            job = replace(job, n=most)
            first = await _reference(reference, config, most, runner)
        for name, why in cannot.items():
            say(f"{name} is left out: {why}")
        report = _new_report(job, skipped | cannot, _cell_report(Fit(cell=reference, n=job.n), first), first)
        if job.plant_fault and fits:
            report.fault = Fault(cell=fits[0].cell.name, position=most_random_position(first.groups))
            where = f"{report.fault.cell} draws absolute position {report.fault.position}"
            say(f"planting a fault: {where} wrongly")
        runs: dict[str, Compared] = {}
        most = max((each.n for each in fits if each.cell.sampled), default=0)
        own: dict[Sampled, tuple[list[Group], SamplingParams]] = {}
        for each in fits:
            name, about = each.cell.name, each.cell.about
            ours, sampling, kind = _first(first.groups, each.n), None, each.cell.sampled
            try:
                if kind:
                    if kind not in own:
                        groups = _first(first.groups, most)
                        own[kind] = await _sampled(kind, reference, config, groups, runner)
                    ours, sampling = _first(own[kind][0], each.n), own[kind][1]
                runs[name] = ours, await _exercise(each, config, ours, report, runner, sampling)
            except (InvalidField, ConfigError):
                raise
            except SeerError as error:
                say(f"{name} failed: {error}")
                report.cells.append(CellReport(name=name, about=about, error=str(error)))
    return report, first, runs


async def _sampled(
    kind: Sampled, reference: Cell, config: Config, groups: list[Group], runner: Runner
) -> tuple[list[Group], SamplingParams]:
    """Run the reference, sampled otherwise; with other stops if it is to have stops that end no response."""
    model, n = config.shared.model, len(groups[0].responses)
    if kind == "structured":
        sampling = structured(runner.job.sampling)
        return (await _reference(reference, config, n, runner, sampling)).groups, sampling
    tokenizer = tokenizer_of(Path(model)) if model else None
    for _ in range(TRIES):
        sampling = every_parameter(runner.job.sampling, groups, tokenizer)
        found = await _reference(reference, config, n, runner, sampling)
        groups = found.groups
        if found.counters["text_stops"] and found.counters["id_stops"]:
            break
    return groups, sampling


async def _reference(
    cell: Cell, config: Config, n: int, runner: Runner, sampling: SamplingParams | None = None
) -> CellRun:
    """Run the reference, once more with fewer sequences at once where it was short of KV memory."""
    found = await runner.run(cell, cell.config(config), n, sampling=sampling)
    if found.counters["preemptions"] and found.kv_blocks:
        block = block_size(config)
        longest = max(max(prompt + output for prompt, output in _work(found.groups).grown(n)) + 1, block)
        seqs = max(1, found.kv_blocks // -(-longest // block))
        runner.say(f"{cell.name} was preempted: once more, {seqs} sequences at once")
        engine = replace(config.engine, max_num_seqs=min(seqs, sequences(config)))
        config = replace(config, engine=engine)
        found = await runner.run(cell, cell.config(config), n, sampling=sampling)
    return found


def _fits(
    cells: Sequence[Cell], config: Config, job: Job, first: CellRun
) -> tuple[list[Fit], dict[str, str]]:
    """Return how each cell can be exercised by these prompts, and why others cannot."""
    work = _work(first.groups)
    bytes_ = np.dtype(first.versions.get("dtype", "float16").replace("bfloat16", "float16")).itemsize
    every = [fit(cell, config, work, bytes_) for cell in cells]
    cannot = {each.cell.name: each.why for each in every if each.why}
    fits = [each for each in every if not each.why]
    least = n_for_tokens(work, job.min_tokens // max(1, len(fits)))
    return [replace(each, n=max(each.n, least)) for each in fits], cannot


def _work(groups: Sequence[Group]) -> Work:
    return Work(
        [group.prompt_token_ids.size for group in groups],
        [[response.token_ids.size for response in group.responses] for group in groups],
    )


def _first(groups: Sequence[Group], n: int) -> list[Group]:
    return [dataclasses.replace(group, responses=group.responses[:n]) for group in groups]


async def _exercise(
    fit: Fit,
    config: Config,
    ours: list[Group],
    report: Report,
    runner: Runner,
    sampling: SamplingParams | None,
) -> list[Group]:
    """Run a cell, again if the first run did not exercise what the cell is for, and report what was found.

    `sampling`: None for the job's.
    """
    lengths = [g.prompt_token_ids.size + r.token_ids.size for g in ours for r in g.responses]
    tokens = sum(response.token_ids.size for group in ours for response in group.responses)
    its, fault = fit.cell.config(config, lengths), report.fault
    planted = fault.position if fault is not None and fault.cell == fit.cell.name else None
    for left in range(TRIES - 1, -1, -1):
        found = await runner.run(fit.cell, its, fit.n, tokens // 2, sampling, planted)
        cell = _cell_report(fit, found)
        cell.sampling = sampling
        cell.comparison = compare(ours, found.groups, report.sampling.temperature, report.logprob_tolerance)
        if not cell.unmet or cell.mismatches or not left:
            break
        runner.say(f"{fit.cell.name} did not exercise {', '.join(cell.unmet)}: once more")
    report.cells.append(cell)
    return found.groups


def _new_report(job: Job, skipped: dict[str, str], reference: CellReport, first: CellRun) -> Report:
    tolerance = job.logprob_tolerance
    return Report(
        versions=first.versions,
        dtype=first.versions.get("dtype", ""),
        seed=job.seed,
        rollout_number=ROLLOUT_NUMBER,
        n=job.n,
        prompts=len(first.groups),
        sampling=job.sampling,
        min_tokens=job.min_tokens,
        logprob_tolerance=logprob_tolerance(first.versions) if tolerance is None else tolerance,
        skipped=skipped,
        reference=reference,
        named=bool(job.matrix),
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
    lines = read_prompts(job.prompts, tokenizer_of(model), ImageReader(job.prompts.parent, model))
    if job.trainer:
        trainer_pass.check(
            job.sampling, images=any(line.prompt.images for line in lines), backend=config.engine.backend
        )
    most = turns.most_tokens(job.sampling, _longest_image(lines)) if job.turns else job.sampling.max_tokens
    config = with_length(config, check_fit(lines, most, facts) + most, facts)
    return config, [
        Prompt(line.prompt.id, token_ids=line.prompt.token_ids, images=line.prompt.images) for line in lines
    ]


def _longest_image(lines: Sequence[PromptLine]) -> int:
    return max((each.length for line in lines for each in line.prompt.images), default=0)


def _files(config: Config) -> list[tuple[str, int, int]]:
    """Return what tells whether the model changed: cells load it one after the other."""
    files = sorted(Path(config.shared.model).iterdir()) if config.shared.model else []
    return [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]


def _cell_report(fit: Fit, found: CellRun) -> CellReport:
    size = fit.cell.buffer.get("chunk_size", 0)
    return CellReport(
        name=fit.cell.name,
        about=fit.cell.about,
        chunk_size=size if isinstance(size, int) else 0,
        n=fit.n,
        seconds=found.seconds,
        counters=found.counters,
        unmet=fit.cell.unmet(found.counters),
    )
