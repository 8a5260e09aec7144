"""`seer config`: what a configuration comes to."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from seer.cli.options import FILE, FOLDER, POSITIVE, Number

_SIZE = Number(min=0, max=2**30, min_open=True, max_open=True)


def _memory(context: click.Context, option: click.Parameter, given: tuple[str, ...]) -> dict[str, float]:
    from seer.config_check.command import MEMORY_ROLES

    found = {}
    for each in given:
        role, _, text = each.partition("=")
        try:
            size = float(text)
        except ValueError:
            size = 0.0
        if role not in MEMORY_ROLES or not 0 < size < 2**30:
            raise click.BadParameter(f"{each!r}: give ROLE=GIB, with a role of {', '.join(MEMORY_ROLES)}")
        found[role] = size
    return found


@click.group("config")
def config_group() -> None:
    """Look at a configuration before a system runs with it."""


@config_group.command()
@click.argument("files", type=FILE, nargs=-1, required=True, metavar="FILE...")
@click.option("--set", "sets", multiple=True, metavar="A.B=C", help="Override a setting.")
@click.option("--model", type=FOLDER, help="Where the model lies here.  [default: shared.model]")
@click.option("--engines", type=POSITIVE, help="Engines of the cluster.  [default: those of this machine]")
@click.option("--gpu-gib", type=_SIZE, help="Memory of a node's GPUs.  [default: of those here, else CPUs]")
@click.option(
    "--memory", multiple=True, callback=_memory, metavar="ROLE=GIB",
    help="Limit of the buffer, a dgds or an engine; may be repeated.  [default: this machine's]",
)  # fmt: skip
@click.option("--disk", "disk_gib", type=_SIZE, metavar="GIB",
    help="Volume of the buffer's folders.  [default: the room for buffer.spool here]",
)  # fmt: skip
@click.option("--tokens", "mean_tokens", type=POSITIVE, default=16_384, show_default=True,
    help="Tokens of a response, on average.",
)  # fmt: skip
def check(files: tuple[Path, ...], sets: tuple[str, ...], **given: object) -> None:
    """Show what every process would use by FILE, and what a cluster of its size should change.

    FILE is a configuration; further ones, *.env, have lines SEER_SECTION__KEY=VALUE, as those of Kubernetes.
    Exits with 1 if something should change. Nothing is started.
    """
    import msgspec

    from seer.config_check.command import Given, check

    text, changes = check(files, sets, msgspec.convert(given, Given))
    click.echo(text)
    sys.exit(1 if changes else 0)
