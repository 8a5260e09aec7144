"""`seer keys`: its commands; `seer.cli.keys` does their work."""

from __future__ import annotations

from pathlib import Path

import click

from seer.cli.options import FOLDER

_KEYS = click.argument("folder", type=FOLDER)
_USERS = click.argument("users", nargs=-1, required=True, metavar="ROLE:NAME...")


@click.group()
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
