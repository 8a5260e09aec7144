"""Who may connect to a cluster, and as what: key pairs, and the list of those that are admitted.

A folder of keys, made by `seer keys`, holds secrets (`ROLE:NAME SECRET`): `ROLE-NAME.key`, and the services'
`server.key`; and a folder `public` with `server.pub` and `peers`: a line `ROLE:NAME PUBLIC [until DATE]` for
each key that is admitted. Keys are CURVE's, in Z85.

Invariants (tests/unit/test_keys.py asserts them):
- a secret that everybody on the machine can read is not used;
- a list that changed counts from the next message on; one that cannot be read or understood changes nothing;
- a key says which roles its holder may take, and under which names: `NAME`, or what begins with `NAME-`.
"""

from __future__ import annotations

import os
import secrets
import socket
import stat
import struct
import time
from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import zmq
from zmq.utils import z85

from seer.common.config import ENV_PREFIX, SecurityConfig, load
from seer.common.errors import ConfigError
from seer.common.process.log import get_logger

KEY_LENGTH = 40
"""Characters of a key in Z85."""

ANY_NAME = "*"

SERVER = "server"

HTTP, OPERATOR, GATEWAY = "http", "operator", "gateway"

_READS = frozenset({"trainer", "status"})

_ASKING = frozenset({"status", "ping"})
"""Roles whose holders may only ask how things are, whatever their key."""

ROLES: Mapping[str, frozenset[str]] = {
    SERVER: _READS | {"buffer", "context", "dgds"},
    "trainer": _READS,
    "generator": _READS,
    GATEWAY: _READS,
    "engine": _READS | {"engine", "node"},
    "service": _READS | {"buffer", "context", "dgds"},
    "observer": _READS,
    OPERATOR: _READS | {"engine", "node", "buffer", "context", "dgds"},
    HTTP: frozenset(),
}
"""Roles of keys, and those that their holders may take in a `Hello`. Keys for HTTP are for the gateway."""

SUBMITS = frozenset({"trainer", "generator", GATEWAY, OPERATOR})
"""Whose holders do what trainers do; others that come as one may only ask how things are."""

CHANGES = SUBMITS - {"generator"}
"""Whose holders change what all trainers have: the weights, and whether engines sleep."""

NAMES_OTHERS = frozenset({GATEWAY, OPERATOR})
"""Whose holders say by whose share what they submit runs."""

NAMED = frozenset({"trainer", "generator", GATEWAY, "engine", "observer"})
"""Roles of keys that hold for one name."""

_log = get_logger()


class User(msgspec.Struct, frozen=True):
    """The holder of a key that is admitted."""

    role: str
    name: str

    def __str__(self) -> str:
        return f"{self.role}:{self.name}"

    def only_reads(self, role: str) -> bool:
        """Return whether it may do no more, in this role, than ask how things are."""
        return role in _ASKING or (role == "trainer" and self.role not in SUBMITS)

    @property
    def lacks(self) -> str:
        """Why it must not change what all trainers have; empty if it may."""
        if self.role in CHANGES:
            return ""
        why = "which has no right to update weights or to have engines sleep or wake"
        return f"its key is for {self}, {why}: a key trainer:NAME has it"

    def objection(self, role: str, name: str) -> str:
        """Return why it must not come with this role and name; empty if it may."""
        if role == "ping" and self.role != HTTP:
            return ""
        if role not in ROLES[self.role]:
            return f"its key is for {self}, not for the role {role!r}: give it a key of that role"
        if self.role not in NAMED or self.name in (ANY_NAME, name) or name.startswith(f"{self.name}-"):
            return ""
        fix = f"name it {self.name} or {self.name}-*, or add a key {self.role}:{name}"
        return f"its key is for {self}, not for the name {name!r}: {fix}"

    def share(self, name: str, shares: Collection[str], client: str = "") -> str:
        """Return by whose share a trainer of this name runs: all that come with one key for a name have one.

        Others have one with those whose names begin with the same name in `shares` and a dash, or their own.
        `client`: for whom it says that it submits, which counts from a gateway.
        """
        if client and self.role in NAMES_OTHERS:
            return client
        if self.role in NAMED and self.name != ANY_NAME:
            return self.name
        return max((each for each in shares if name.startswith(f"{each}-")), key=len, default=name)


ANYONE = User(OPERATOR, "")
"""Whoever reaches a socket where no keys are used."""


class Keys(msgspec.Struct, frozen=True):
    """What a process has: its own pair, the services' public key, and who may connect to it.

    `user` is whose key it is. All keys in Z85; `peers` is None in a process that nobody connects to.
    """

    user: User
    public: str
    secret: str
    server: str
    peers: Peers | None


class Peers:
    """The list of admitted keys. Raises `ConfigError` if it cannot be read at first."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp = self._stamp_now()
        self._users = parse_peers(_read(path, "security.peers"), str(path))

    def find(self, public: str) -> User | None:
        """Return who holds a key; None: nobody who is admitted now."""
        self._follow()
        found = self._users.get(public)
        if found is None:
            return None
        user, until = found
        return user if time.time() < until else None

    def _follow(self) -> None:
        """Read the list again if it changed."""
        stamp = self._stamp_now()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._users = parse_peers(_read(self._path, "security.peers"), str(self._path))
        except ConfigError as error:
            _log.error("the list of keys is not read again: the one before holds", error=str(error))
        else:
            _log.info("read the list of keys again", keys=len(self._users))

    def _stamp_now(self) -> tuple[int, ...]:
        try:
            found = self._path.stat()
        except OSError:
            return ()
        return found.st_mtime_ns, found.st_size, found.st_ino


def load_keys(config: SecurityConfig) -> Keys | None:
    """Read what the configuration names; None where it names no key. Raises `ConfigError`."""
    if not config.key:
        if config.peers or config.server:
            raise ConfigError("security.key is empty: give this process's key too (`seer keys add`)")
        return None
    user, secret = read_secret(Path(config.key))
    public = zmq.curve_public(secret.encode()).decode()
    server = read_public(config.server) if config.server else ""
    peers = Peers(Path(config.peers)) if config.peers else None
    if peers is None and not server:
        raise ConfigError("security.server is empty: give the services' public key (public/server.pub)")
    return Keys(user, public, secret, server or public, peers)


def read_secret(path: Path) -> tuple[User, str]:
    """Return a secret key and whose it is. Raises `ConfigError` if it is none, or everybody can read it."""
    where = f"security.key = {path}"
    whose, _, text = _read(path, "security.key").strip().partition(" ")
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o007:
        raise ConfigError(f"{where}: others can read it (mode {mode:o}); chmod 600 {path}")
    return parse_user(whose, where), _checked(text, where)


def read_public(text: str) -> str:
    """Return a public key that is given as it is, or by its file. Raises `ConfigError`."""
    if len(text) == KEY_LENGTH and not Path(text).exists():
        return _checked(text, "security.server")
    return _checked(_read(Path(text), "security.server").strip(), f"security.server = {text}")


def security_of(environ: Mapping[str, str]) -> SecurityConfig:
    """Return the section `[security]` that environment variables make. Raises `ConfigError`."""
    prefix = f"{ENV_PREFIX}SECURITY__"
    return load(None, {name: text for name, text in environ.items() if name.startswith(prefix)}).security


def new_name(keys: Keys | None) -> str:
    """Return a name that no other process has, and that the key allows."""
    return name_under(keys, f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}")


def name_under(keys: Keys | None, name: str) -> str:
    """Return a name as the key allows it: behind the key's own, if it holds for one."""
    if keys is None or keys.user.role not in NAMED or keys.user.name == ANY_NAME:
        return name
    return f"{keys.user.name}-{name}"


def own_public(config: SecurityConfig) -> str:
    """Return this process's public key; empty where no keys are used. Raises `ConfigError`."""
    keys = load_keys(config)
    return "" if keys is None else keys.public


def with_key(endpoint: str, public: str) -> str:
    """Return an endpoint that also says whose key answers there; as it is for an empty key."""
    return f"{endpoint}#{z85.decode(public.encode()).hex()}" if public else endpoint


def split_key(endpoint: str) -> tuple[str, str]:
    """Return an endpoint, and the public key that it says, if it does. Raises `ConfigError`."""
    address, _, text = endpoint.partition("#")
    try:
        return address, z85.encode(bytes.fromhex(text)).decode() if text else ""
    except ValueError as error:
        raise ConfigError(f"{endpoint}: what follows # is no key of 64 hexadecimal digits") from error


def parse_peers(text: str, where: str) -> dict[str, tuple[User, float]]:
    """Return users by key, with the Unix time until which they are admitted. Raises `ConfigError`."""
    users: dict[str, tuple[User, float]] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        at = f"{where}:{number}"
        if len(words) not in (2, 4) or words[2:3] not in ([], ["until"]):
            raise ConfigError(f"{at}: write ROLE:NAME PUBLIC, or ROLE:NAME PUBLIC until YYYY-MM-DD")
        until = _time(words[3], at) if len(words) == 4 else float("inf")
        users[_checked(words[1], at)] = parse_user(words[0], at), until
    return users


def parse_user(text: str, where: str) -> User:
    """Read `ROLE:NAME`. Raises `ConfigError`."""
    role, colon, name = text.partition(":")
    if role not in ROLES or not colon or not name or any(c.isspace() or not c.isprintable() for c in name):
        raise ConfigError(f"{where}: {text!r} is not ROLE:NAME; roles are {', '.join(ROLES)}")
    return User(role, name)


def _time(text: str, where: str) -> float:
    try:
        return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()
    except ValueError as error:
        raise ConfigError(f"{where}: until {text!r}: write a date as YYYY-MM-DD") from error


def _checked(text: str, where: str) -> str:
    try:
        sound = len(text) == KEY_LENGTH and len(z85.decode(text.encode())) == 32
    except (ValueError, KeyError, struct.error):  # the last: characters that stand for too large a number
        sound = False
    if not sound:
        raise ConfigError(f"{where}: holds no key of {KEY_LENGTH} characters; make one with `seer keys`")
    return text


def _read(path: Path, field: str) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{field} = {path}: {reason}; give a file that `seer keys` made") from error
