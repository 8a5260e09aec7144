"""The command line. Only click is imported before a command runs, so that `seer --help` is fast.

Exit codes: 0 done; 1 some or all of the work failed; 2 bad input or configuration.
"""

from __future__ import annotations

import errno
import signal
import sys
from pathlib import Path

import click

from seer import __version__
from seer.cli.config_commands import config_group
from seer.cli.key_commands import keys
from seer.cli.observe_commands import COMMANDS as OBSERVE_COMMANDS
from seer.cli.options import (
    BACKEND,
    CONFIG,
    CONNECT,
    FILE,
    FOLDER,
    INSTANCES,
    MODEL,
    POOL_AND_DRAFTS,
    POSITIVE,
    SAMPLING,
    SEED,
    Number,
    beside_running,
    config_of,
    endpoint_of,
    job_of,
    log_of_running,
)
from seer.cli.service_commands import COMMANDS

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


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
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            click.echo(f"error: {error}: make room, and run it again", err=True)
            sys.exit(1)
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            sys.exit(130)


@click.group(cls=_Cli, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="seer")
def main() -> None:
    """Fast, strictly on-policy rollouts for LLM reinforcement learning."""


for _command in (config_group, keys, *COMMANDS, *OBSERVE_COMMANDS):
    main.add_command(_command)


@main.command()
@click.argument("prompts", type=FILE)
@MODEL
@click.option("--out", type=FILE, required=True, help="Output: one JSON line per prompt, in input order.")
@SAMPLING
@click.option("--min-p", default=0.0, show_default=True)
@click.option("--stop", multiple=True, help="Stop string; may be repeated.")
@click.option(
    "--ignore-eos", is_flag=True, help="Generate --max-tokens tokens, also after an end-of-sequence token."
)
@click.option(
    "--logprobs", type=click.Choice(["scaled", "raw", "processed"]), default="scaled", show_default=True,
    help="Distribution of the returned logprobs.",
)  # fmt: skip
@SEED
@click.option(
    "--rollout-number",
    type=int,
    help="Part of the noise key: use another for every iteration.  [default: follows from the weights]",
)
@INSTANCES
@click.option(
    "--tensor-parallel", "engine__tensor_parallel", type=POSITIVE, help="Ranks per engine.  [default: 1]"
)
@click.option(
    "--chunk-size", "buffer__chunk_size", type=POSITIVE,
    help="Tokens per chunk.  [default: a 64th of --max-tokens, at least 256]",
)  # fmt: skip
@click.option("--policy", "buffer__policy", help="Scheduling policy.  [default: seer]")
@click.option(
    "--max-num-seqs", "engine__max_num_seqs", type=POSITIVE,
    help="Most requests that an engine runs at once.  [default: by device, 64 on CPUs]",
)  # fmt: skip
@click.option(
    "--kv-blocks", "engine__kv_blocks", type=POSITIVE,
    help="KV blocks per engine.  [default: as many as fit]",
)  # fmt: skip
@POOL_AND_DRAFTS
@BACKEND
@click.option("--report", type=FILE, help="Write counts and timings to a JSON file.")
@click.option("--report-html", type=FILE, help="Draw what ran when and where, also of a run that failed.")
@click.option(
    "--receipts", "receipt", is_flag=True, default=None,
    help="Put a receipt beside each response, for `seer recompute`.",
)  # fmt: skip
@click.option("--resume", is_flag=True, help="Continue an interrupted run from OUT.journal, if there is one.")
@click.option(
    "--connect", default="", metavar="ENDPOINT",
    help="Use a running system instead of starting one.  [default without --model: the one on this machine]",
)  # fmt: skip
@CONFIG
def rollout(**options: object) -> None:
    """Generate n responses to every prompt of PROMPTS.jsonl.

    A line is {"id": ..., "prompt": ... or "prompt_token_ids": [...]}; other fields come back as metadata.
    """
    settings = {name for name, value in options.items() if "__" in name and value is not None}
    config = config_of(options)
    found = None
    if not (options["connect"] or config.shared.model) and config.engine.backend == "vllm":
        found = beside_running(config, "--connect {endpoint}")
    if found is not None:
        config, options["connect"] = found, found.endpoints.trainers
        click.echo(f"uses the system at {config.endpoints.trainers}, model {config.shared.model}", err=True)
    if options["connect"] and settings - {"shared__model"}:
        click.echo("warning: in a running system, engine and scheduling options have no effect", err=True)
    if not options["connect"]:
        from seer.local.own_network import for_pool

        if note := for_pool(config):  # before an import starts threads
            click.echo(note, err=True)
    from seer.rollout.job import Job, perform

    sys.exit(perform(job_of(Job, options, config)))


@main.command()
@click.argument("prompts", type=FILE)
@MODEL
@SAMPLING
@SEED
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
    type=Number(min=0),
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
@click.option(
    "--trainer", type=click.Choice(["hf"]),
    help="Compare logprobs with a forward pass of transformers.",
)  # fmt: skip
@BACKEND
@click.option("--json", "json_file", type=FILE, help="Write the whole report as JSON.")
@CONFIG
def verify(json_file: Path | None, **options: object) -> None:
    """Check that no schedule changes a token: run PROMPTS.jsonl under a matrix of schedules (cells).

    Exits with 0 only if there is no bug, every cell named in --matrix was exercised and enough tokens were
    compared. Cells that need more responses than -n generate more.
    """
    from seer.verify.cell_run import Job
    from seer.verify.run import perform

    sys.exit(perform(job_of(Job, options, config_of(options)), json_file))


@main.command()
@click.argument("receipts", type=FILE)
@MODEL
@CONFIG
def recompute(receipts: Path, **options: object) -> None:
    """Generate the responses of RECEIPTS again: a file that `seer rollout --receipts` wrote, or of receipts.

    Says of each whether it is equal, differs by last bits of arithmetic, or is different, and where first.
    Exits with 1 if one is different.
    """
    from seer.verify.recompute import perform

    sys.exit(perform(receipts, config_of(options)))


@main.command()
@MODEL
@INSTANCES
@POOL_AND_DRAFTS
@CONFIG
def up(instances: int | None, **options: object) -> None:
    """Run a whole system on this machine. Ctrl-C drains it; a second Ctrl-C stops it at once."""
    from seer.local.up import serve

    serve(config_of(options), instances)


@main.command()
@CONNECT
@click.option("--json", "as_json", is_flag=True, help="Print the whole status as JSON.")
@CONFIG
def status(connect: str, as_json: bool, **options: object) -> None:
    """Show the state of a running system; exits with 1 if a service does not answer."""
    from seer.cli.status import show

    config = config_of(options)
    sys.exit(show(endpoint_of(connect, config), config.security, as_json))


@main.command()
@MODEL
@click.option(
    "--only", default="", metavar="CHECK[,...]", help="Run these checks.  [default: all that apply]"
)
@click.option("--seconds", type=Number(min=0, min_open=True),
    help="Most seconds of all checks.  [default: 600]",
)  # fmt: skip
@click.option("--json", "json_file", type=FILE, help="Write all lines as JSON, after each one.")
@click.option("--bundle", type=FILE, help="Write a tar.gz for a bug report: no prompts, no secrets.")
@CONFIG
def doctor(
    only: str, seconds: float | None, json_file: Path | None, bundle: Path | None, **options: object
) -> None:
    """Check this machine: driver, libraries, limits, ports, an engine, its tokens, its speed, the KV pool.

    Exits with 1 if a line fails. docs/doctor.md says what each check finds out. Without --model it runs the
    tiny one of a checkout.
    """
    from seer.common.errors import InvalidField
    from seer.doctor import checkup
    from seer.doctor.output import names
    from seer.rollout.files import check_writable

    config = config_of(options)
    try:
        chosen = names(only, checkup.CHECKS)
    except ValueError as error:
        raise InvalidField("--only", only, str(error)) from error
    check_writable("--json", json_file)
    check_writable("--bundle", bundle)
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM)
    )  # the check that runs ends with it
    sys.exit(checkup.run(config, chosen, json_file, bundle, seconds or checkup.SECONDS))


@main.command()
@click.argument("log", type=click.Path(path_type=Path), required=False)
@click.option("--out", type=FILE, help="Draw it here, as one HTML file.  [default: report.html]")
@click.option("--trace", type=FILE, help="Write every chunk for https://ui.perfetto.dev instead, or as well.")
@click.option("--rollout", "rollout_id", default="", metavar="ID", help="Which one.  [default: the last]")
def report(log: Path | None, out: Path | None, trace: Path | None, rollout_id: str) -> None:
    """Draw what ran when and where in a rollout, from a buffer's LOG: a folder of `buffer.log`, or a file.

    Without LOG it is that of the system that runs on this machine. docs/log.md tells how to read the drawing.
    """
    from seer.report.command import write_reports

    log = log or log_of_running()
    html = Path("report.html") if out is None and trace is None else out
    lines = write_reports(log, html=html, trace_file=trace, rollout_id=rollout_id, what_if=True)
    click.echo(lines, err=True)
    click.echo(f"wrote {' and '.join(str(file) for file in (html, trace) if file is not None)}", err=True)


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
    "--from-log", type=click.Path(path_type=Path), metavar="LOG",
    help="Run a rollout of a buffer's log again, as it was but for the --workload files given.",
)  # fmt: skip
@click.option(
    "--rollout", "rollout_id", default="", metavar="ID", help="Which one of it.  [default: the last]"
)
@click.option("--instances", type=POSITIVE, help="Engines, instead of a workload's.")
@click.option(
    "--policy", "--policies", "policies", default="", callback=_names, metavar="NAME[,...]",
    help="Policies to compare, always with static.  "
    "[default: static,least-loaded,divided,least-generated,seer-paper,seer,oracle]",
)  # fmt: skip
@click.option("--group-size", type=POSITIVE, help="Responses per prompt, with the same total number.")
@click.option(
    "--between", type=Number(0, 1), help="Share of the lengths' variance that lies between prompts."
)
@click.option(
    "--chunk-size", type=POSITIVE, help="Tokens per chunk.  [default: a 64th of the cap, at least 256]"
)
@click.option("--drafts", is_flag=True, help="Run every policy also with drafts.")
@click.option(
    "--seeds", type=POSITIVE, default=3, show_default=True, help="Number of random draws of lengths."
)
@click.option("--plan", type=Number(min=0, min_open=True), metavar="SECONDS",
    help="Find the least number of instances that finish a rollout in this time.",
)  # fmt: skip
@click.option("--workers", type=POSITIVE, help="Worker processes.  [default: one per CPU]")
@click.option("--json", "json_file", type=FILE, help="Write all results as JSON.")
@click.option(
    "--log", type=FILE, help="Simulate one rollout, with the first policy, and write a buffer's log of it."
)
@click.option("--plot", type=FOLDER, help="Write plots to this folder; needs the extra `plot`.")
def sim(**options: object) -> None:
    """Compare scheduling policies on simulated clusters, beside the paper's measurements on real ones.

    docs/simulator.md describes the model, workload files and traces.
    """
    import msgspec

    from seer.sim_command.job import Job, perform

    sys.exit(perform(msgspec.convert(options, Job)))


def run() -> None:
    """Run the command line as the process that the script `seer` starts."""
    try:
        main()
    except SystemExit as ended:
        if "vllm" in sys.modules and isinstance(ended.code, int):
            from seer.common.process.leave import leave

            leave(ended.code)
        raise


if __name__ == "__main__":
    run()
