"""What a transport offers: four socket kinds with ZeroMQ's semantics, frames in and out.

Invariants every implementation keeps:
- a message is a list of frames, delivered whole or not at all, in order per peer;
- every queue is bounded: DEALER and ROUTER sends wait for room, at most `SEND_SECONDS`, then
  raise `Unreachable`; PUB never waits and drops for a slow subscriber (the sequence numbers above
  reveal it);
- frames are passed on without a copy where possible: nobody changes an array after sending it;
- `recv` of a closed socket raises `Unreachable`; `recv` may be cancelled without losing a message;
- a socket that always has a message still lets other tasks run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from seer.common.net.keys import User

Frame = bytes | memoryview

SEND_SECONDS = 30.0
"""Longest wait for room: a peer that lives but has not read its queue for this long is stuck."""

FAIR_EVERY = 32
"""Messages a socket hands out before it lets other tasks run: a recv that finds a message ready
does not suspend, so a busy socket would otherwise starve them."""


class Socket(Protocol):
    """A DEALER socket: one peer."""

    @property
    def problem(self) -> str:
        """Why the peer did not accept the last connection, or it was not accepted; empty: nothing known."""

    async def send(self, frames: Sequence[Frame]) -> None:
        """Queue one message; waits while the queue is full, then raises `Unreachable`."""

    async def recv(self) -> list[Frame]:
        """Return the next message."""

    def close(self) -> None:
        """Close without waiting; what was not sent yet may be dropped. Idempotent."""


class Router(Protocol):
    """A ROUTER socket: many peers, told apart by identity."""

    async def send(self, identity: bytes, frames: Sequence[Frame]) -> None:
        """Queue one message for a peer; raises `Unreachable` when it is gone or does not read."""

    async def recv(self) -> tuple[bytes, list[Frame], User | None]:
        """Return the next message, its sender, and who that is by its key; None: a key not admitted now."""

    def close(self) -> None:
        """Close without waiting. Idempotent."""

    @property
    def endpoint(self) -> str:
        """Where it is bound, with the real port."""


class Publisher(Protocol):
    """A bound PUB socket."""

    async def send(self, frames: Sequence[Frame]) -> None:
        """Send one message to whoever listens; never suspends the caller."""

    def close(self) -> None:
        """Close without waiting. Idempotent."""

    @property
    def endpoint(self) -> str:
        """Where it is bound, with the real port."""


class Subscriber(Protocol):
    """A connected SUB socket."""

    async def recv(self) -> list[Frame]:
        """Return the next message."""

    def close(self) -> None:
        """Close without waiting. Idempotent."""


class Transport(Protocol):
    """Makes sockets."""

    async def router(self, endpoint: str, queue: int | None = None) -> Router:
        """Bind a ROUTER; `queue` replaces the bound on messages that wait for each peer.

        Raises `ConfigError` naming the endpoint when it cannot.
        """

    async def dealer(self, endpoint: str, identity: bytes) -> Socket:
        """Connect a DEALER; connecting never blocks, the peer may come later."""

    async def publisher(self, endpoint: str) -> Publisher:
        """Bind a PUB. Raises `ConfigError` naming the endpoint when it cannot."""

    async def subscriber(self, endpoint: str) -> Subscriber:
        """Connect a SUB to everything the endpoint publishes."""

    async def close(self) -> None:
        """Close every socket made here. Idempotent."""
