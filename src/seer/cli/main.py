"""The command line. Only click is imported before a command runs: `seer --help` must be quick.

Exit codes: 0 done; 1 some or all of the work failed; 2 bad input or configuration.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from seer import __version__

if TYPE_CHECKING:
    from seer.common.config import Config
    from seer.common.types import SamplingParams

F = TypeVar("F", bound=Callable[..., Any])

_FILE = click.Path(path_type=Path, dir_okay=False)
_FOLDER = click.Path(path_type=Path, file_okay=False)
_POSITIVE = click.IntRange(min=1)


class _Cli(click.Group):
    """Turns expected errors into one line and an exit code."""

    def invoke(self, ctx: click.Context) -> object:
        from seer.common.errors import ConfigError, InvalidField, SeerError

        try:
            return super().invoke(ctx)
        except SeerError as error:
            from seer.common.process.log import printable  # services word errors, too

            click.echo(printable(f"error: {error}"), err=True)
            sys.exit(2 if isinstance(error, ConfigError | InvalidField) else 1)
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            sys.exit(130)


@click.group(cls=_Cli, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="seer")
def main() -> None:
    """Fast, strictly on-policy rollouts for LLM reinforcement learning."""


def _config_options(command: F) -> F:
    sets = click.option(
        "--set", "sets", multiple=True, metavar="A.B=C", help="Override a setting, e.g. engine.kv_blocks=48."
    )
    file = click.option("--config", "config_file", type=_FILE, help="TOML configuration file.")
    return file(sets(command))


def _load(config_file: Path | None, overrides: list[str], sets: tuple[str, ...]) -> Config:
    from seer.common.config import load

    return load(config_file, os.environ, [*overrides, *sets])


def _sampling(values: dict[str, object]) -> SamplingParams:
    import msgspec

    from seer.common.types import SamplingParams

    return msgspec.convert(values, SamplingParams)


def _overrides(**values: object) -> list[str]:
    """Turn the options that were given into overrides; `buffer__policy` sets buffer.policy."""
    given = {key.replace("__", "."): value for key, value in values.items() if value is not None}
    return [f"{key}={value}" for key, value in given.items()]


_KV_POOL = click.option(
    "--kv-pool", type=click.Choice(["auto", "mooncake", "none"]),
    help="Where engines share KV.  [default: auto, Mooncake where it is installed]",
)  # fmt: skip


def _draft_options(command: F) -> F:
    source = click.option(
        "--drafts", type=click.Choice(["off", "own", "grouped"]),
        help="Whose tokens drafts come from.  [default: grouped, all of the same prompt]",
    )  # fmt: skip
    most = click.option(
        "--max-draft", type=click.IntRange(1, 128),
        help="Most tokens drafted per request and step.  [default: 8]",
    )  # fmt: skip
    paths = click.option(
        "--max-paths", type=_POSITIVE,
        help="Most draft paths verified per request and step.  [default: as many as pay]",
    )  # fmt: skip
    return source(most(paths(command)))


@main.command()
@click.argument("prompts", type=_FILE)
@click.option("--model", type=_FOLDER, help="Hugging Face model folder.")
@click.option("--out", type=_FILE, required=True, help="Output: one JSON line per prompt, in input order.")
@click.option("-n", "n", default=8, show_default=True, help="Responses per prompt.")
@click.option("--max-tokens", default=512, show_default=True, help="Longest response.")
@click.option("--temperature", default=1.0, show_default=True, help="0: greedy.")
@click.option("--top-p", default=1.0, show_default=True)
@click.option("--top-k", default=0, show_default=True, help="0: all tokens.")
@click.option("--min-p", default=0.0, show_default=True)
@click.option("--stop", multiple=True, help="Stop string; may be repeated.")
@click.option("--ignore-eos", is_flag=True, help="Generate max-tokens tokens whatever comes.")
@click.option(
    "--logprobs", type=click.Choice(["scaled", "raw", "processed"]), default="scaled", show_default=True,
    help="Distribution under which logprobs are returned.",
)  # fmt: skip
@click.option("--seed", default=0, show_default=True, help="Noise of the responses.")
@click.option("--rollout-number", default=0, show_default=True, help="Use another for every iteration.")
@click.option("--instances", type=_POSITIVE, default=2, show_default=True, help="Engines to start.")
@click.option("--tensor-parallel", type=_POSITIVE, help="Ranks per engine.  [default: 1]")
@click.option(
    "--chunk-size", type=_POSITIVE, help="Tokens per chunk.  [default: a 32nd of --max-tokens, at least 256]"
)
@click.option("--policy", help="Scheduling policy.  [default: seer]")
@click.option("--max-num-seqs", type=_POSITIVE, help="Requests an engine runs at once.  [default: 64]")
@click.option("--kv-blocks", type=_POSITIVE, help="KV blocks per engine; default: what the memory gives.")
@_KV_POOL
@_draft_options
@click.option("--backend", type=click.Choice(["vllm", "replay"]), help="Engine backend.  [default: vllm]")
@click.option("--report", type=_FILE, help="Write counts and timings as JSON.")
@click.option("--report-html", type=_FILE, help="Draw what ran when and where, whether or not all finishes.")
@click.option("--resume", is_flag=True, help="Continue an interrupted run from OUT.journal, if there is one.")
@click.option("--connect", default="", metavar="ENDPOINT", help="Use a running system; start none.")
@_config_options
def rollout(
    prompts: Path,
    model: Path | None,
    out: Path,
    n: int,
    seed: int,
    rollout_number: int,
    instances: int,
    tensor_parallel: int | None,
    chunk_size: int | None,
    policy: str | None,
    max_num_seqs: int | None,
    kv_blocks: int | None,
    kv_pool: str | None,
    drafts: str | None,
    max_draft: int | None,
    max_paths: int | None,
    backend: str | None,
    report: Path | None,
    report_html: Path | None,
    resume: bool,
    connect: str,
    config_file: Path | None,
    sets: tuple[str, ...],
    **sampling: object,
) -> None:
    """Generate n responses to every prompt of PROMPTS.jsonl.

    A line is {"id": ..., "prompt": ... or "prompt_token_ids": [...]}; other fields come back as metadata.
    """
    from seer.rollout.job import Job, perform

    overrides = _overrides(
        shared__model=model and model.resolve(),
        engine__backend=backend,
        engine__tensor_parallel=tensor_parallel,
        engine__max_num_seqs=max_num_seqs,
        engine__kv_blocks=kv_blocks,
        buffer__policy=policy,
        buffer__chunk_size=chunk_size,
        pool__kind=kv_pool,
        drafts__source=drafts,
        drafts__max_draft=max_draft,
        drafts__max_paths=max_paths,
    )
    if connect and len(overrides) > (model is not None):
        click.echo("warning: with --connect, engine and scheduling options have no effect", err=True)
    config = _load(config_file, overrides, sets)
    job = Job(
        prompts=prompts,
        out=out,
        report=report,
        report_html=report_html,
        model=Path(config.shared.model) if config.shared.model else None,
        n=n,
        sampling=_sampling(sampling),
        seed=seed,
        rollout_number=rollout_number,
        instances=instances,
        connect=connect,
        resume=resume,
        config=config,
    )
    sys.exit(perform(job))


@main.command()
@click.argument("prompts", type=_FILE)
@click.option("--model", type=_FOLDER, help="Hugging Face model folder.")
@click.option("-n", "n", default=8, show_default=True, help="Responses per prompt.")
@click.option("--max-tokens", default=512, show_default=True, help="Longest response.")
@click.option("--temperature", default=1.0, show_default=True, help="0: greedy.")
@click.option("--top-p", default=1.0, show_default=True)
@click.option("--top-k", default=0, show_default=True, help="0: all tokens.")
@click.option("--seed", default=0, show_default=True, help="Noise of the responses.")
@click.option(
    "--matrix", default="", metavar="CELLS", help="Comma-separated; default: all that can run here."
)
@click.option("--min-tokens", default=10_000, show_default=True, help="Pass only if this many are compared.")
@click.option(
    "--logprob-tolerance", type=click.FloatRange(min=0), help="In raw logits; default: by the model's dtype."
)
@click.option("--deadline", default=3600.0, show_default=True, help="Seconds for one cell's rollout.")
@click.option("--plant-fault", is_flag=True, help="Spoil one position in one cell: the check must fail.")
@click.option("--backend", type=click.Choice(["vllm", "replay"]), help="Engine backend.  [default: vllm]")
@click.option("--json", "json_file", type=_FILE, help="Write the whole report.")
@_config_options
def verify(
    prompts: Path,
    model: Path | None,
    n: int,
    seed: int,
    matrix: str,
    min_tokens: int,
    logprob_tolerance: float | None,
    deadline: float,
    plant_fault: bool,
    backend: str | None,
    json_file: Path | None,
    config_file: Path | None,
    sets: tuple[str, ...],
    **sampling: object,
) -> None:
    """Check that no schedule changes a token: PROMPTS.jsonl through a matrix of schedules.

    Exits 0 only with no bug, every cell named in --matrix exercised and enough tokens compared.
    More responses than -n are made where a cell needs them.
    """
    from seer.verify.cell_run import Job
    from seer.verify.run import perform

    overrides = _overrides(shared__model=model and model.resolve(), engine__backend=backend)
    job = Job(
        prompts=prompts,
        n=n,
        sampling=_sampling(sampling),
        seed=seed,
        config=_load(config_file, overrides, sets),
        matrix=matrix,
        min_tokens=min_tokens,
        logprob_tolerance=logprob_tolerance,
        cell_seconds=deadline,
        plant_fault=plant_fault,
    )
    sys.exit(perform(job, json_file))


@main.command()
@click.option("--model", type=_FOLDER, help="Hugging Face model folder.")
@click.option("--instances", type=_POSITIVE, default=2, show_default=True, help="Engines to start.")
@_KV_POOL
@_draft_options
@_config_options
def up(
    model: Path | None,
    instances: int,
    kv_pool: str | None,
    drafts: str | None,
    max_draft: int | None,
    max_paths: int | None,
    config_file: Path | None,
    sets: tuple[str, ...],
) -> None:
    """Run a whole system on this machine until Ctrl-C, which drains it; a second one stops it at once."""
    from seer.local.up import serve

    overrides = _overrides(
        shared__model=model and model.resolve(),
        pool__kind=kv_pool,
        drafts__source=drafts,
        drafts__max_draft=max_draft,
        drafts__max_paths=max_paths,
    )
    serve(_load(config_file, overrides, sets), instances)


@main.command()
@click.option("--connect", required=True, metavar="ENDPOINT", help="The buffer's endpoint for trainers.")
@click.option("--json", "as_json", is_flag=True, help="Print the whole status as JSON.")
def status(connect: str, as_json: bool) -> None:
    """Show what a running system does; exits with 1 when a part of it does not answer."""
    from seer.cli.status import show

    sys.exit(show(connect, as_json))


@main.command()
@click.argument("log", type=click.Path(path_type=Path))
@click.option("--out", type=_FILE, help="Draw it here, as one HTML file.  [default: report.html]")
@click.option(
    "--trace", type=_FILE, help="Write every chunk for https://ui.perfetto.dev instead, or as well."
)
@click.option("--rollout", "rollout_id", default="", metavar="ID", help="Which one.  [default: the last]")
def report(log: Path, out: Path | None, trace: Path | None, rollout_id: str) -> None:
    """Draw what ran when and where in a rollout, from a buffer's LOG: a folder of `buffer.log`, or a file.

    docs/report.md tells how to read it.
    """
    from seer.report.command import write_reports

    html = Path("report.html") if out is None and trace is None else out
    click.echo(write_reports(log, html=html, trace_file=trace, rollout_id=rollout_id), err=True)


@main.command()
@click.argument("log", type=click.Path(path_type=Path, exists=True))
def replay(log: Path) -> None:
    """Run the log of a buffer through its machines again: a file, or a folder of them.

    Exits with 1 at the first row that they answer otherwise. docs/log.md says where logs are.
    """
    from seer.cli.replay import run

    sys.exit(run(log))


def _names(context: click.Context, option: click.Parameter, text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


@main.command()
@click.option(
    "--workload", "workloads", default="", callback=_names, metavar="NAME|FILE[,...]",
    help="moonlight, qwen2-vl-72b, kimi-k2, a TOML file, or a JSONL trace.  [default: the paper's three]",
)  # fmt: skip
@click.option("--cluster", metavar="NAME|FILE", help="The workload on whose instances a trace runs.")
@click.option(
    "--policy", "policies", default="", callback=_names, metavar="NAME[,...]",
    help="What to compare, always with static.  "
    "[default: static,least-loaded,divided,least-generated,seer-paper,seer,oracle]",
)  # fmt: skip
@click.option("--group-size", type=_POSITIVE, help="Responses per prompt, of as many in all.")
@click.option("--between", type=click.FloatRange(0, 1), help="Share of the variance between prompts.")
@click.option(
    "--chunk-size", type=_POSITIVE, help="Tokens per chunk.  [default: a 32nd of the cap, at least 256]"
)
@click.option("--drafts", is_flag=True, help="Run every policy with drafts as well.")
@click.option("--seeds", type=_POSITIVE, default=3, show_default=True, help="Draws of lengths to compare on.")
@click.option("--plan", type=click.FloatRange(min=0, min_open=True), metavar="SECONDS",
    help="Find the least number of instances that end a rollout in this time.",
)  # fmt: skip
@click.option("--workers", type=_POSITIVE, help="Processes to simulate with.  [default: one per CPU]")
@click.option("--json", "json_file", type=_FILE, help="Write everything found.")
@click.option(
    "--log", type=_FILE, help="Simulate one rollout, with the first policy, and write a buffer's log of it."
)
@click.option("--plot", type=_FOLDER, help="Draw into this folder; needs the extra `plot`.")
def sim(**options: object) -> None:
    """Compare scheduling policies on simulated clusters, beside what the paper measured on real ones.

    docs/simulator.md describes the model, workload files and traces.
    """
    import msgspec

    from seer.sim_command.job import Job, perform

    sys.exit(perform(msgspec.convert(options, Job)))


def _service(name: str, help_text: str, module: str = "") -> None:
    @main.command(name, help=help_text)
    @_config_options
    @click.option("--ready-fd", type=int, help="Write one line there when ready.")
    @click.option("--parent-pid", type=int, hidden=True)
    def command(
        config_file: Path | None, sets: tuple[str, ...], ready_fd: int | None, parent_pid: int | None
    ) -> None:
        if parent_pid is not None:
            from seer.local.child import die_with

            die_with(parent_pid)
        from seer.common.process.service import run_process

        config = _load(config_file, [], sets)
        make = importlib.import_module(f"seer.services.{module or f'{name}.server'}").make
        label = config.engine.name if name == "engine" and config.engine.name else name
        sys.exit(run_process(label, make, config, ready_fd))


_service("buffer", "Run the buffer: requests, their chunks and where they run.")
_service("context", "Run the context service: what groups teach of their lengths and drafts.")
_service("dgds", "Run the dgds: grouped token streams, shared between engines.")
_service("engine", "Run an engine: one model replica.")
_service("pool-master", "Run the KV pool's master: Mooncake's own, watched.", "pool.master")
_service("pool-owner", "Run the owner of the KV pool's memory and disk.", "pool.owner")


if __name__ == "__main__":
    main()
