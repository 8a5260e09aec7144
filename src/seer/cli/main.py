"""The command line. Only click is imported before a command runs, so that `seer --help` is fast.

Exit codes: 0 done; 1 some or all of the work failed; 2 bad input or configuration.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from seer import __version__

if TYPE_CHECKING:
    import msgspec

    from seer.common.config import Config

F = TypeVar("F", bound=Callable[..., Any])
J = TypeVar("J", bound="msgspec.Struct")

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
            from seer.common.process.log import printable  # errors may contain texts of other processes

            click.echo(printable(f"error: {error}"), err=True)
            sys.exit(2 if isinstance(error, ConfigError | InvalidField) else 1)
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            sys.exit(130)


@click.group(cls=_Cli, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="seer")
def main() -> None:
    """Fast, strictly on-policy rollouts for LLM reinforcement learning."""


def _together(*options: Callable[[F], F]) -> Callable[[F], F]:
    """Return one decorator for several options, which help lists in this order."""

    def decorate(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


# An option named `section__key` is the setting `section.key` of the configuration; see `_config`.
_MODEL = click.option(
    "--model", "shared__model", type=click.Path(path_type=Path, file_okay=False, resolve_path=True),
    help="Hugging Face model folder.",
)  # fmt: skip
_BACKEND = click.option(
    "--backend", "engine__backend", type=click.Choice(["vllm", "replay"]),
    help="Engine backend.  [default: vllm]",
)  # fmt: skip
_INSTANCES = click.option(
    "--instances", type=_POSITIVE, help="Engines to start.  [default: GPUs ÷ ranks, or 2 on CPUs]"
)
_SAMPLING = _together(
    click.option("-n", "n", default=8, show_default=True, help="Responses per prompt."),
    click.option("--max-tokens", default=512, show_default=True, help="Most tokens of a response."),
    click.option("--temperature", default=1.0, show_default=True, help="0: greedy."),
    click.option("--top-p", default=1.0, show_default=True),
    click.option("--top-k", default=0, show_default=True, help="0: all tokens."),
)
_SEED = click.option("--seed", default=0, show_default=True, help="Seed of the responses' noise.")
_POOL_AND_DRAFTS = _together(
    click.option(
        "--kv-pool", "pool__kind", type=click.Choice(["auto", "mooncake", "none"]),
        help="KV pool that engines share.  [default: auto, Mooncake if it is installed]",
    ),
    click.option(
        "--drafts", "drafts__source", type=click.Choice(["off", "own", "grouped"]),
        help="Source of draft tokens: none, the request's own, or all of its group.  [default: grouped]",
    ),
    click.option(
        "--max-draft", "drafts__max_draft", type=click.IntRange(1, 128),
        help="Most tokens drafted per request and step.  [default: 8]",
    ),
    click.option(
        "--max-paths", "drafts__max_paths", type=_POSITIVE,
        help="Most draft paths per request and step.  [default: as many as pay]",
    ),
)  # fmt: skip
_CONFIG = _together(
    click.option("--config", "config_file", type=_FILE, help="TOML configuration file."),
    click.option(
        "--set", "sets", multiple=True, metavar="A.B=C", help="Override a setting, e.g. engine.kv_blocks=48."
    ),
)


def _config(options: dict[str, object]) -> Config:
    """Load the configuration, and take what went into it out of a command's options."""
    from seer.common.config import load

    file = cast("Path | None", options.pop("config_file"))
    sets = cast("tuple[str, ...]", options.pop("sets"))
    settings = {name: options.pop(name) for name in list(options) if "__" in name}
    given = [f"{name.replace('__', '.')}={value}" for name, value in settings.items() if value is not None]
    return load(file, os.environ, [*given, *sets])


def _job(kind: type[J], options: dict[str, object]) -> J:
    """Make a command's job of its options: those that are no field of it are sampling parameters."""
    import msgspec

    from seer.common.types import SamplingParams

    config = _config(options)
    fields = {name: options.pop(name) for name in kind.__struct_fields__ if name in options}
    sampling = msgspec.convert(options, SamplingParams)
    return msgspec.convert(fields | {"config": config, "sampling": sampling}, kind)


@main.command()
@click.argument("prompts", type=_FILE)
@_MODEL
@click.option("--out", type=_FILE, required=True, help="Output: one JSON line per prompt, in input order.")
@_SAMPLING
@click.option("--min-p", default=0.0, show_default=True)
@click.option("--stop", multiple=True, help="Stop string; may be repeated.")
@click.option(
    "--ignore-eos", is_flag=True, help="Generate --max-tokens tokens, also after an end-of-sequence token."
)
@click.option(
    "--logprobs", type=click.Choice(["scaled", "raw", "processed"]), default="scaled", show_default=True,
    help="Distribution of the returned logprobs.",
)  # fmt: skip
@_SEED
@click.option(
    "--rollout-number",
    default=0,
    show_default=True,
    help="Part of the noise key: use another for every iteration.",
)
@_INSTANCES
@click.option(
    "--tensor-parallel", "engine__tensor_parallel", type=_POSITIVE, help="Ranks per engine.  [default: 1]"
)
@click.option(
    "--chunk-size", "buffer__chunk_size", type=_POSITIVE,
    help="Tokens per chunk.  [default: a 64th of --max-tokens, at least 256]",
)  # fmt: skip
@click.option("--policy", "buffer__policy", help="Scheduling policy.  [default: seer]")
@click.option(
    "--max-num-seqs", "engine__max_num_seqs", type=_POSITIVE,
    help="Most requests that an engine runs at once.  [default: by device, 64 on CPUs]",
)  # fmt: skip
@click.option(
    "--kv-blocks", "engine__kv_blocks", type=_POSITIVE,
    help="KV blocks per engine.  [default: as many as fit]",
)  # fmt: skip
@_POOL_AND_DRAFTS
@_BACKEND
@click.option("--report", type=_FILE, help="Write counts and timings to a JSON file.")
@click.option("--report-html", type=_FILE, help="Draw what ran when and where, also of a run that failed.")
@click.option("--resume", is_flag=True, help="Continue an interrupted run from OUT.journal, if there is one.")
@click.option(
    "--connect", default="", metavar="ENDPOINT", help="Use a running system instead of starting one."
)
@_CONFIG
def rollout(**options: object) -> None:
    """Generate n responses to every prompt of PROMPTS.jsonl.

    A line is {"id": ..., "prompt": ... or "prompt_token_ids": [...]}; other fields come back as metadata.
    """
    from seer.rollout.job import Job, perform

    settings = {name for name, value in options.items() if "__" in name and value is not None}
    if options["connect"] and settings - {"shared__model"}:
        click.echo("warning: with --connect, engine and scheduling options have no effect", err=True)
    sys.exit(perform(_job(Job, options)))


@main.command()
@click.argument("prompts", type=_FILE)
@_MODEL
@_SAMPLING
@_SEED
@click.option(
    "--matrix", default="", metavar="CELLS", help="Comma-separated.  [default: all that can run here]"
)
@click.option(
    "--min-tokens",
    default=10_000,
    show_default=True,
    help="Pass only if at least this many tokens are compared.",
)
@click.option(
    "--logprob-tolerance",
    type=click.FloatRange(min=0),
    help="In raw logits.  [default: by the model's dtype]",
)
@click.option(
    "--deadline",
    "cell_seconds",
    default=3600.0,
    show_default=True,
    help="Most seconds for one cell's rollout.",
)
@click.option("--turns", is_flag=True, help="Responses of four turns, with a tool in between: other cells.")
@click.option("--plant-fault", is_flag=True, help="Change one token in one cell: the check must find it.")
@_BACKEND
@click.option("--json", "json_file", type=_FILE, help="Write the whole report as JSON.")
@_CONFIG
def verify(json_file: Path | None, **options: object) -> None:
    """Check that no schedule changes a token: run PROMPTS.jsonl under a matrix of schedules (cells).

    Exits with 0 only if there is no bug, every cell named in --matrix was exercised and enough tokens were
    compared. Cells that need more responses than -n generate more.
    """
    from seer.verify.cell_run import Job
    from seer.verify.run import perform

    sys.exit(perform(_job(Job, options), json_file))


@main.command()
@_MODEL
@_INSTANCES
@_POOL_AND_DRAFTS
@_CONFIG
def up(instances: int | None, **options: object) -> None:
    """Run a whole system on this machine. Ctrl-C drains it; a second Ctrl-C stops it at once."""
    from seer.local.up import serve

    serve(_config(options), instances)


@main.command()
@click.option("--connect", required=True, metavar="ENDPOINT", help="The buffer's endpoint for trainers.")
@click.option("--json", "as_json", is_flag=True, help="Print the whole status as JSON.")
def status(connect: str, as_json: bool) -> None:
    """Show the state of a running system; exits with 1 if a service does not answer."""
    from seer.cli.status import show

    sys.exit(show(connect, as_json))


_KEYS = click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
_USERS = click.argument("users", nargs=-1, required=True, metavar="ROLE:NAME...")


@main.group()
def keys() -> None:
    """Make and revoke the keys of a cluster whose machines share a network with others.

    Roles: trainer, engine, service, observer (may only read), operator. NAME may be `*`. docs/security.md
    tells how they are used.
    """


@keys.command("init")
@_KEYS
def keys_init(folder: Path) -> None:
    """Make the services' key and an operator's in a new FOLDER."""
    from seer.cli.keys import init

    for path in init(folder):
        click.echo(path)


@keys.command("add")
@_KEYS
@_USERS
@click.option("--until", default="", metavar="YYYY-MM-DD", help="Last day before which it is admitted, UTC.")
def keys_add(folder: Path, users: tuple[str, ...], until: str) -> None:
    """Make a key for each user, and print where it lies."""
    from seer.cli.keys import add

    for path in add(folder, users, until):
        click.echo(path)


@keys.command("revoke")
@_KEYS
@_USERS
def keys_revoke(folder: Path, users: tuple[str, ...]) -> None:
    """Refuse all keys of these users from the next message on."""
    from seer.cli.keys import revoke

    revoke(folder, users)


@keys.command("rotate")
@_KEYS
@click.argument("users", nargs=-1, metavar="[ROLE:NAME...]")
@click.option("--drop-old", is_flag=True, help="Refuse the keys before the newest ones.")
def keys_rotate(folder: Path, users: tuple[str, ...], drop_old: bool) -> None:
    """Make new keys for these users, or for all; those before hold until --drop-old."""
    from seer.cli.keys import rotate

    for path in rotate(folder, users, drop_old=drop_old):
        click.echo(path)


@keys.command("list")
@_KEYS
def keys_list(folder: Path) -> None:
    """Show whose keys are admitted."""
    from seer.cli.keys import listed

    click.echo(listed(folder), nl=False)


@main.command()
@_MODEL
@click.option(
    "--kernels", is_flag=True, help="Only the GPU: sampler, copies, streams; needs torch and Triton alone."
)
@click.option(
    "--only", default="", metavar="CHECK[,...]", help="Run these checks.  [default: all that apply]"
)
@click.option("--seconds", type=click.FloatRange(min=0, min_open=True),
    help="Most seconds of all checks.  [default: 600, or 480 with --kernels]",
)  # fmt: skip
@click.option("--json", "json_file", type=_FILE, help="Write all lines as JSON, after each one.")
@click.option(
    "--bundle", type=_FILE, help="Write one file for a bug report, FILE.tar.gz: no prompts, no secrets."
)
@_CONFIG
def doctor(
    kernels: bool,
    only: str,
    seconds: float | None,
    json_file: Path | None,
    bundle: Path | None,
    **options: object,
) -> None:
    """Check this machine: driver, libraries, limits, ports, an engine, its tokens, its speed, the KV pool.

    Exits with 1 if a line fails. docs/doctor.md says what each check finds out. Without --model it runs the
    tiny one of a checkout.
    """
    from seer.common.errors import InvalidField
    from seer.doctor import checkup
    from seer.doctor import kernels as kernel_checks
    from seer.doctor.output import names
    from seer.rollout.files import check_writable

    config = _config(options)
    try:
        chosen = names(only, kernel_checks.CHECKS if kernels else checkup.CHECKS)
    except ValueError as error:
        raise InvalidField("--only", only, str(error)) from error
    for option, file in (("--json", json_file), ("--bundle", bundle)):
        if file is not None:
            check_writable(option, file)
    if kernels and bundle is not None:
        raise InvalidField(
            "--bundle", str(bundle), "leave out --kernels: the whole doctor has those checks, too"
        )
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM)
    )  # the check that runs ends with it
    if kernels:
        sys.exit(kernel_checks.run(chosen, json_file, seconds or kernel_checks.SECONDS))
    sys.exit(checkup.run(config, chosen, json_file, bundle, seconds or checkup.SECONDS))


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
@click.option("--cluster", metavar="NAME|FILE", help="The workload whose instances run a trace.")
@click.option(
    "--policy", "policies", default="", callback=_names, metavar="NAME[,...]",
    help="Policies to compare, always with static.  "
    "[default: static,least-loaded,divided,least-generated,seer-paper,seer,oracle]",
)  # fmt: skip
@click.option("--group-size", type=_POSITIVE, help="Responses per prompt, with the same total number.")
@click.option(
    "--between", type=click.FloatRange(0, 1), help="Share of the lengths' variance that lies between prompts."
)
@click.option(
    "--chunk-size", type=_POSITIVE, help="Tokens per chunk.  [default: a 64th of the cap, at least 256]"
)
@click.option("--drafts", is_flag=True, help="Run every policy also with drafts.")
@click.option(
    "--seeds", type=_POSITIVE, default=3, show_default=True, help="Number of random draws of lengths."
)
@click.option("--plan", type=click.FloatRange(min=0, min_open=True), metavar="SECONDS",
    help="Find the least number of instances that finish a rollout in this time.",
)  # fmt: skip
@click.option("--workers", type=_POSITIVE, help="Worker processes.  [default: one per CPU]")
@click.option("--json", "json_file", type=_FILE, help="Write all results as JSON.")
@click.option(
    "--log", type=_FILE, help="Simulate one rollout, with the first policy, and write a buffer's log of it."
)
@click.option("--plot", type=_FOLDER, help="Write plots to this folder; needs the extra `plot`.")
def sim(**options: object) -> None:
    """Compare scheduling policies on simulated clusters, beside the paper's measurements on real ones.

    docs/simulator.md describes the model, workload files and traces.
    """
    import msgspec

    from seer.sim_command.job import Job, perform

    sys.exit(perform(msgspec.convert(options, Job)))


def _service(name: str, help_text: str, module: str = "") -> None:
    @main.command(name, help=help_text)
    @_CONFIG
    @click.option("--ready-fd", type=int, help="File descriptor to write one line to when ready.")
    @click.option("--parent-pid", type=int, hidden=True)
    def command(ready_fd: int | None, parent_pid: int | None, **options: object) -> None:
        if parent_pid is not None:
            from seer.local.child import die_with

            die_with(parent_pid)
        from seer.common.process.service import run_process

        config = _config(options)
        try:
            make = importlib.import_module(f"seer.{module or f'services.{name}.server'}").make
        except ModuleNotFoundError as error:
            from seer.common.errors import ConfigError

            raise ConfigError(f"seer {name} needs an extra, '.[{name}]': {error}") from error
        label = config.engine.name if name == "engine" and config.engine.name else name
        sys.exit(run_process(label, make, config, ready_fd))


_service("buffer", "Run the buffer: it has all requests, and schedules their chunks on engines.")
_service("context", "Run the context service: estimates of response lengths and of draft acceptance.")
_service("dgds", "Run the dgds: token streams of groups, shared between engines for drafts.")
_service("engine", "Run an engine: one model replica.")
_service("pool-master", "Run the KV pool's master: supervises Mooncake's own.", "services.pool.master")
_service("pool-owner", "Run the process that provides the KV pool's memory and disk.", "services.pool.owner")
_service("gateway", "Run the gateway: vLLM's HTTP for trainers and agents.", "gateway.server")


if __name__ == "__main__":
    main()
