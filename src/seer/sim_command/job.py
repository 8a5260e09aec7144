"""`seer sim`: policies on simulated clusters, in tables beside the paper's figures.

Invariants:
- nothing is simulated before the whole input was checked;
- tables go to stdout, progress to stderr.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace
from rich import progress
from rich.console import Console
from rich.table import Table
from rich.text import Text

from seer.common.errors import InvalidField
from seer.common.policy.chunk_size import default_chunk
from seer.rollout.files import check_writable, replacing, write_report
from seer.sim.files import load_workload
from seer.sim.paper import Figures, figures
from seer.sim.plan import instances_for
from seer.sim.study import (
    BASELINE,
    ORACLE,
    Run,
    Summary,
    Task,
    Variant,
    cpus,
    run_all,
    summarize,
    tasks,
    variants,
)
from seer.sim.study import perform as perform_one
from seer.sim.workload import WORKLOADS, Workload
from seer.sim_command.from_log import RealRun, read_run

POLICIES = ("static", "least-loaded", "divided", "least-generated", "seer-paper", "seer", "oracle")
"""Policies that are compared by default."""

DEFAULT = "seer"
"""The default policy for `--plan`, and for plots beside the baseline."""

RECORDED = ("lengths", "prompts")
"""Fields of a workload that are not in the report: they have an entry for each response or prompt."""

TABLE_WIDTH = 240
"""A table is not cut to a narrower terminal, or to a pipe's 80 columns."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What to simulate. No `workloads`: the paper's; no `policies`: `POLICIES`."""

    workloads: tuple[str, ...]
    cluster: str | None
    policies: tuple[str, ...]
    group_size: int | None
    between: float | None
    chunk_size: int | None
    drafts: bool
    seeds: int
    workers: int | None
    json_file: Path | None
    plot: Path | None
    plan: float | None
    log: Path | None = None
    from_log: Path | None = None
    rollout_id: str = ""
    instances: int | None = None
    real: RealRun | None = None

    def chunk(self, load: Workload) -> int:
        """Return the tokens of a chunk."""
        return self.chunk_size or default_chunk(load.cap)


def perform(job: Job) -> int:
    """Simulate and print; return the exit code. Raises `InvalidField` and `ConfigError`."""
    job = _as_it_was(job)
    base = None if job.real is None else job.real.load
    loads = [load_workload(name, job.cluster, base) for name in job.workloads]
    loads = loads or ([each() for each in WORKLOADS.values()] if base is None else [base])
    loads = [_adjusted(load, job) for load in loads]
    policies = job.policies or POLICIES
    compared = variants(policies, job.drafts)
    check_writable("--json", job.json_file)
    if job.plot is not None:
        _check_plot(job.plot)
    if job.log is not None:
        return _log(loads, job, job.log)
    console = Console(width=max(Console().width, TABLE_WIDTH))
    if job.plan is not None:
        report: list[object] = [_plan(load, job, console) for load in loads]
    else:
        report = [_study(load, compared, Variant(policies[0]), job, console) for load in loads]
    if job.json_file is not None:
        whole = {"seeds": job.seeds, "workloads": report}
        write_report("--json", job.json_file, msgspec.to_builtins(whole, str_keys=True))
    return 0


def _as_it_was(job: Job) -> Job:
    """Return a job with the rollout of a log, if one is given: as it was, unless told otherwise."""
    if job.from_log is None:
        if job.rollout_id:
            raise InvalidField("--rollout", job.rollout_id, "is of a log: give --from-log")
        return job
    real = read_run(job.from_log, job.rollout_id)
    drafts, chunk_size = real.variant.drafts, job.chunk_size or real.chunk_size
    if job.drafts and not drafts:
        raise InvalidField(
            "--drafts", True, "the rollout had none, so their acceptance is not known: leave it out"
        )
    policies = tuple(dict.fromkeys((real.variant.policy, *(job.policies or POLICIES))))
    return replace(job, real=real, policies=policies, drafts=drafts, chunk_size=chunk_size)


def _log(loads: Sequence[Workload], job: Job, path: Path) -> int:
    """Simulate one rollout, and write its log."""
    check_writable("--log", path)
    variant = Variant(job.policies[0] if job.policies else DEFAULT, job.drafts)
    if len(loads) > 1:
        raise InvalidField("--log", str(path), "is of one rollout: give one --workload")
    if variant.policy == ORACLE:
        raise InvalidField("--log", str(path), f"no buffer knows what {ORACLE} does: give another --policy")
    try:
        with replacing(path) as partial, partial.open("wb") as file:
            run = perform_one(Task(loads[0], variant, 0, job.chunk(loads[0])), file)
    except OSError as error:
        fix = f"cannot be written: {error.strerror}; give a file on a disk with room"
        raise InvalidField("--log", str(path), fix) from error
    print(f"{loads[0].name}: {run.total:.0f} s with {variant.label}, seed 0: {path}")
    return 0


def _adjusted(load: Workload, job: Job) -> Workload:
    for option, value in (("--group-size", job.group_size), ("--between", job.between)):
        if value is not None and load.lengths:
            raise InvalidField(option, value, f"{load.name} has recorded lengths: leave it out")
    if job.instances is not None:
        load = replace(load, instances=job.instances)
    if job.between is not None:
        load = replace(load, between=job.between)
    if job.group_size is not None:  # the same number of responses, of fewer or more prompts
        groups = max(1, round(load.groups * load.group_size / job.group_size))
        load = replace(load, groups=groups, group_size=job.group_size)
    return load


def _check_plot(folder: Path) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        fix = "plots need matplotlib: pip install 'seer-rollout[plot]'"
        raise InvalidField("--plot", str(folder), fix)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidField("--plot", str(folder), f"{error.strerror}; give a folder") from error


def _study(
    load: Workload, compared: Sequence[Variant], first: Variant, job: Job, console: Console
) -> dict[str, object]:
    seeds = 1 if load.lengths else job.seeds  # recorded lengths do not depend on seeds
    planned = list(tasks(load, compared, seeds, job.chunk(load)))
    if job.plot is not None:
        traced = _traced(compared)
        planned = [replace(task, traced=task.seed == 0 and task.variant in traced) for task in planned]
    with _progress(load.name, len(planned)) as on_run:
        runs = run_all(planned, job.workers or cpus(), on_run)
    summaries = summarize(runs, first)
    console.print(table_of(load, summaries, job))
    if job.real is not None:
        console.print(_against(job.real, load, summaries, job), markup=False, soft_wrap=True)
    if job.plot is not None:
        from seer.sim.plots import draw

        for path in draw(load, [run for run in runs if run.seed == 0], job.plot):
            console.print(str(path), style="dim", markup=False, soft_wrap=True)
    return {
        "workload": {
            key: value for key, value in msgspec.structs.asdict(load).items() if key not in RECORDED
        },
        "chunk_size": job.chunk(load),
        "responses": sum(map(len, load.draw(0))),
        "policies": [
            {"label": each.variant.label, "summary": each, "paper": figures(load, each.variant)}
            for each in summaries
        ],
        "runs": [replace(run, trace=None) for run in runs],
        "real": job.real
        and {"label": job.real.variant.label, "total": job.real.total, "tail": job.real.tail},
    }


def _against(real: RealRun, load: Workload, summaries: Sequence[Summary], job: Job) -> str:
    """Return how far the simulation is from the run, and what it leaves out."""
    text = f"the real run: {real.variant.label} on {real.load.instances} engines, {real.total:.1f} s"
    if (load, job.chunk_size) == (real.load, real.chunk_size):
        [same] = (each for each in summaries if each.variant == real.variant)
        text += f"; simulated {same.total:.1f} s, an error of {same.total / real.total - 1:+.1%}"
    return "; ".join((text, *(f"left out: {each}" for each in real.beside)))


def _traced(compared: Sequence[Variant]) -> list[Variant]:
    """Return the variants whose instances are plotted: the baseline, and `DEFAULT` or the last one named."""
    plain = [each for each in compared if not each.drafts]
    ours = Variant(DEFAULT) if Variant(DEFAULT) in plain else plain[-1]
    return list(dict.fromkeys([BASELINE, ours]))


@contextlib.contextmanager
def _progress(name: str, runs: int) -> Iterator[Callable[[Run], None]]:
    """Yield a function to call with each run that ended: shows a bar on a terminal, else lines, on stderr."""
    ended = 0

    def last(run: Run) -> str:
        return f"{run.variant.label}, seed {run.seed}: {run.total:.0f} s"

    def line(run: Run) -> None:
        nonlocal ended
        ended += 1
        print(f"{name}: {ended}/{runs} runs, {last(run)}", file=sys.stderr, flush=True)

    if not sys.stderr.isatty():
        yield line
        return
    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TextColumn("{task.fields[last]}"),
        progress.TimeElapsedColumn(),
    )
    with progress.Progress(*columns, console=Console(stderr=True), transient=True) as display:
        task = display.add_task(name, total=runs, last="")
        yield lambda run: display.update(task, advance=1, last=last(run))


def table_of(load: Workload, summaries: Sequence[Summary], job: Job) -> Table:
    """Return a table of the results of a study, beside the paper's, or those of the `real` run."""
    responses = f"{load.groups} prompts, {load.groups * load.group_size} responses"
    if load.lengths:
        responses = f"{len(load.lengths)} prompts, {sum(map(len, load.lengths))} recorded responses"
    title = (
        f"{load.name}: {responses} on {load.instances} instances; chunks of {job.chunk(load)}, "
        f"{summaries[0].seeds} seed{'s' * (summaries[0].seeds > 1)}"
    )
    table = Table(title=Text(title), title_justify="left", title_style="bold")
    rows = [
        _cells(each, figures(load, each.variant)) | _turn_cells(load, each) | _real_cells(each, job.real)
        for each in summaries
    ]
    shown = [heading for heading in rows[0] if any(row[heading] for row in rows)]
    for heading in shown:
        style = "cyan" if heading.startswith("paper") else ""
        table.add_column(
            heading, justify="left" if heading == "policy" else "right", no_wrap=True, style=style
        )
    for row in rows:
        table.add_row(*(row[heading] for heading in shown))
    return table


def _cells(found: Summary, paper: Figures) -> dict[str, str]:
    """Return a row by headings; cells without a value are empty."""
    speedup = f"{found.speedup.mean:.2f}"
    if found.speedup.low is not None and found.variant != BASELINE:
        speedup += f" ({found.speedup.low:.2f}-{found.speedup.high:.2f})"
    return {
        "policy": found.variant.label,
        "total s": _spread(found.total, found.total_deviation, found.seeds),
        "paper s": _beside(paper.total, found.total, ".0f"),
        "tail s": _spread(found.tail, found.tail_deviation, found.seeds),
        "paper tail": _beside(paper.tail, found.tail, ".0f"),
        "x static": speedup,
        "paper x": _beside(paper.speedup, found.speedup.mean, ".2f"),
        "tail/static": "" if found.tail_ratio is None else f"{found.tail_ratio:.2f}",
        "paper t/s": _beside(paper.tail_ratio, found.tail_ratio, ".2f"),
        "of bound": f"{found.efficiency:.1%}",
        "preempt.": f"{found.preemptions:.2f}",
        "migr.": f"{found.migrations:.0f}",
        "TB": f"{found.pulled_terabytes:.1f}",
        "error": f"{found.error:.2f}",
    }


def _real_cells(found: Summary, real: RealRun | None) -> dict[str, str]:
    """Return the real run's times, and how far a simulated row is from them."""
    if real is None:
        return {}
    ran = " (ran)" if found.variant == real.variant else ""
    return {
        "policy": found.variant.label + ran,
        "real s": _beside(real.total, found.total, ".1f"),
        "real tail": _beside(real.tail, found.tail, ".1f"),
    }


def _turn_cells(load: Workload, found: Summary) -> dict[str, str]:
    """Return what a row has beside where responses have turns: millions of tokens, and a share."""
    if load.turns == 1:
        return {}
    return {
        "computed": f"{found.computed_tokens / 1e6:.2f}",
        "pulled": f"{found.pulled_tokens / 1e6:.2f}",
        "idle": f"{found.idle:.1%}",
    }


def _spread(mean: float, deviation: float, seeds: int) -> str:
    digits = 0 if mean >= 100 else 1
    spread = f" ± {deviation:.{digits}f}" if seeds > 1 else ""
    return f"{mean:.{digits}f}{spread}"


def _beside(published: float | None, found: float | None, form: str) -> str:
    """Return a published figure, and how far ours is from it."""
    if published is None:
        return ""
    if not published or found is None:
        return f"{published:{form}}"
    return f"{published:{form}} ({found / published - 1:+.0%})"


def _plan(load: Workload, job: Job, console: Console) -> dict[str, object]:
    seconds = job.plan or 0.0
    variant = Variant(job.policies[0] if job.policies else DEFAULT, job.drafts)
    tried: dict[int, float] = {}

    def on_result(instances: int, took: float) -> None:
        tried[instances] = took
        print(f"{load.name}: {took:.0f} s on {instances}", file=sys.stderr, flush=True)

    workers = job.workers or cpus()
    needed = instances_for(load, variant, seconds, job.seeds, job.chunk(load), workers, on_result)
    console.print(
        f"{load.name}: within {seconds:.0f} s with {variant.label}: {needed} of its instances "
        f"({tried[needed]:.0f} s); the workload has {load.instances}",
        soft_wrap=True,
        markup=False,
    )
    return {
        "workload": load.name,
        "chunk_size": job.chunk(load),
        "instances": needed,
        "policy": variant.label,
        "tried": tried,
    }
