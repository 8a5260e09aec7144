"""Who a process is to its peers, and what both ends of a connection know of the handshake.

A connecting process sends `Hello` and waits for `Welcome`. `Channel` (DEALER) is the end that connects,
`Hub` (ROUTER) the end that many channels connect to.
"""

from __future__ import annotations

import msgspec

from seer.common.config import Config, shared_hash
from seer.common.errors import InvalidField, RequestRefused, SeerError, error_class
from seer.common.ids import new_incarnation
from seer.common.wire import Hello, Refused
from seer.common.wire.codec import SCHEMA_HASH
from seer.common.wire.version import MAJOR, MINOR

HELLO_SECONDS = 1.0
"""Pause between two Hellos while one is unanswered."""

CHECK_SECONDS = 5.0
"""Pause between two Hellos of a working connection: a restarted server does not know its peers, and both
ends compare how many messages they sent and received."""

HELLO_FIRST = "hello"
"""`Refused.code` for a peer that must send `Hello` (again) before anything else."""


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """Who this process is. At most one channel per identity may connect to an endpoint.

    `config_hash` is `config.shared_hash`, empty for a process that need not know it.
    """

    role: str
    name: str
    incarnation: int
    config_hash: str = ""

    def address(self) -> bytes:
        """Return the ROUTER identity. A restarted process has another, so it gets no messages of the old
        one.
        """
        return f"{self.role}/{self.name}".encode()[:200] + f"/{self.incarnation:x}".encode()

    def hello(self, sent: int = 0) -> Hello:
        """Return a `Hello`; `sent` counts the messages sent before it."""
        return Hello(
            major=MAJOR,
            minor=MINOR,
            schema_hash=SCHEMA_HASH,
            config_hash=self.config_hash,
            role=self.role,
            name=self.name,
            incarnation=self.incarnation,
            sent=sent,
        )


def this_process(role: str, name: str, config: Config) -> Identity:
    """Return who a process is that has just started, and runs with this configuration."""
    return Identity(
        role=role, name=name, incarnation=new_incarnation(), config_hash=shared_hash(config.shared)
    )


def error_of(refused: Refused) -> SeerError:
    """Return the error that a `Refused` stands for."""
    cls = error_class(refused.code)
    if issubclass(cls, RequestRefused):
        return cls(refused.message, tuple(refused.prompt_ids))
    return SeerError(refused.message) if issubclass(cls, InvalidField) else cls(refused.message)
