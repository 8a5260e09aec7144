"""`seer keys`: makes, lists and revokes the keys of a cluster, in a folder that only its user can read.

The folder is described in `common/net/keys.py`. Every command may run while the services do: they read the
list again when it changes.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import zmq

from seer.common.errors import ConfigError
from seer.common.net.keys import ANY_NAME, SERVER, User, parse_peers, parse_user, read_secret

SERVICES, OWNER = User(SERVER, "head"), User("operator", "owner")
"""Whose keys `init` makes. The services connect to each other, too, so theirs is in the list."""

LIST, PUB = Path("public", "peers"), Path("public", "server.pub")


def init(folder: Path) -> list[Path]:
    """Make a folder with the services' key and an operator's; return their files. Raises `ConfigError`."""
    # Services that run as other users read what is public, and nothing else.
    folder.mkdir(mode=0o711, parents=True, exist_ok=True)
    with _locked(folder):
        if _secret(folder, SERVICES).exists():
            raise ConfigError(f"{folder} has keys already: `seer keys rotate {folder}` makes new ones")
        (folder / LIST).parent.mkdir(mode=0o755, exist_ok=True)
        _write(folder / LIST, "", 0o644)
        return [_new(folder, SERVICES, ""), _new(folder, OWNER, "")]


def add(folder: Path, users: Sequence[str], until: str) -> list[Path]:
    """Make a key for each `ROLE:NAME`, admitted until a date if one is given; return the secrets' files."""
    with _locked(folder):
        known = {str(user) for user, _ in _peers(folder).values()}
        wanted = [_user(text) for text in users]
        for user in wanted:
            if str(user) in known:
                fix = f"`seer keys rotate {folder} {user}` makes a new one"
                raise ConfigError(f"{user} has a key already: {fix}")
            known.add(str(user))
        return [_new(folder, user, until) for user in wanted]


def revoke(folder: Path, users: Sequence[str]) -> None:
    """Take all keys of these users from the list: from then on their messages are refused."""
    with _locked(folder):
        for text in users:
            user = _user(text)
            _drop(folder, [public for public, (found, _) in _peers(folder).items() if found == user], user)
            _secret(folder, user).unlink(missing_ok=True)


def rotate(folder: Path, users: Sequence[str], *, drop_old: bool) -> list[Path]:
    """Make new keys for these users, of all if none is named; the old ones hold until `drop_old`.

    The services have one key at a time: services use the new key once they start again.
    """
    with _locked(folder):
        peers = _peers(folder)
        known = list(dict.fromkeys(user for user, _ in peers.values()))
        found = [parse_user(text, "seer keys") for text in users] or known
        for user in found:
            if user not in known:
                raise ConfigError(f"{user} has no key: `seer keys add {folder} {user}` makes one")
        if not drop_old:
            return [_new(folder, user, "") for user in found]
        for user in found:
            _, secret = read_secret(_secret(folder, user))
            newest = zmq.curve_public(secret.encode()).decode()
            old = [public for public, (each, _) in peers.items() if each == user and public != newest]
            if old:
                _drop(folder, old, user)
        return []


def listed(folder: Path) -> str:
    """Return the list of admitted keys as it is."""
    _peers(folder)
    return (folder / LIST).read_text()


def _user(text: str) -> User:
    user = parse_user(text, "seer keys")
    if user.role == SERVER:
        raise ConfigError(f"{text}: `seer keys init` makes the services' key")
    return user


def _new(folder: Path, user: User, until: str) -> Path:
    public, secret = (key.decode() for key in zmq.curve_keypair())
    line = f"{user} {public}{f' until {until}' if until else ''}\n"
    text = (folder / LIST).read_text() + line
    parse_peers(text, str(folder / LIST))
    path = _secret(folder, user)
    _write(path, f"{user} {secret}\n", 0o600)
    if user == SERVICES:
        _write(folder / PUB, f"{public}\n", 0o644)
    _write(folder / LIST, text, 0o644)
    return path


def _drop(folder: Path, keys: Sequence[str], user: User) -> None:
    if not keys:
        raise ConfigError(f"{user} has no key in {folder / LIST}")
    lines = (folder / LIST).read_text().splitlines()
    kept = [line for line in lines if not set(line.split()[1:2]) & set(keys)]
    _write(folder / LIST, "".join(f"{line}\n" for line in kept), 0o644)


def _secret(folder: Path, user: User) -> Path:
    if user == SERVICES:
        return folder / f"{SERVER}.key"
    if user.name == ANY_NAME:
        return folder / f"{user.role}.key"
    name = "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in user.name)
    return folder / f"{user.role}-{name}.key"


def _peers(folder: Path) -> dict[str, tuple[User, float]]:
    path = folder / LIST
    if not path.exists():
        raise ConfigError(f"{folder} has no keys: `seer keys init {folder}` makes them")
    return parse_peers(path.read_text(), str(path))


def _write(path: Path, text: str, mode: int) -> None:
    """Write a file that appears whole, with its mode from the start."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.touch(mode)
    new.write_text(text)
    new.replace(path)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Let one command change a folder at a time."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} has no keys: `seer keys init {folder}` makes them")
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)
