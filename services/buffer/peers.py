"""Which peers are connected: the name of each address, and the address that holds each name.

Invariants (tests/unit/test_outbox.py):
- an earlier incarnation never takes a name from a later one that is still connected and not silent for
  `SILENT_SECONDS`. Only clocks say which incarnation is later, and after a clock was set back a new
  incarnation seems to be an earlier one: it gets the name once the other is gone or silent;
- a stall of this process does not count as silence: an incarnation is silent only if another one that claims
  its name sent several messages meanwhile, as messages of both are read in turn;
- at most `MAX_PEERS` addresses are known; beyond that, the one that has been silent for longest is forgotten.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import Any

import msgspec
from msgspec import structs

from seer.common import ids
from seer.common.clock import Clock
from seer.common.endpoints import check_endpoint
from seer.common.errors import ConfigError, InvalidField
from seer.common.net.hub import MAX_PEERS, Hub
from seer.common.net.identity import CHECK_SECONDS
from seer.common.wire import MAX_ID, Hello, Register

MAX_SIZE = 2**31 - 1
"""Bound on every number of a capacity: blocks, tokens, requests."""

MAX_PARTS = 1024
"""Bound on an engine's data-parallel ranks, which are on one machine: the buffer keeps books of each."""

MAX_VERSIONS = 64
"""Bound on the entries of `Register.versions`: every `Status` has them."""

SILENT_SECONDS = 15.0
"""A peer that sends no `Hello` for this long loses its name to one that does. Peers send it every 5 s."""

SILENT_HELLOS = 3
"""`Hello`s that the other incarnation must have sent in that time."""


class _Peer(msgspec.Struct):
    """One incarnation of a peer; `first_hello` and `last_hello` are times in monotonic seconds.

    If another one holds its name: `holder` has that one's `incarnation` and number of Hellos, as of this
    one's last Hello; `claims` counts this one's Hellos since the holder's last one.
    """

    name: str
    incarnation: int
    first_hello: float
    last_hello: float
    hellos: int = 0
    holder: tuple[int, int] = (0, 0)
    claims: int = 0


class Peers:
    """Incarnations of peers of one kind. Every `Hello` goes to `hello`; peers repeat it every few seconds.

    `registered`: by address, the session of the hub in which that incarnation registered last.
    """

    def __init__(self) -> None:
        self.registered: dict[bytes, int] = {}
        self._peers: OrderedDict[bytes, _Peer] = OrderedDict()
        self._addresses: dict[str, bytes] = {}

    def hello(self, address: bytes, hello: Hello, now: float) -> bytes | None:
        """Note a `Hello`; return which other address holds its name, None if `address` holds it now."""
        peer = self._peers.get(address)
        if peer is not None and peer.name != hello.name:  # addresses have no more than a name's beginning
            self.remove(address)
            peer = None
        first = peer is None
        peer = peer or _Peer(hello.name, hello.incarnation, now, now)
        peer.last_hello, peer.hellos = now, peer.hellos + 1
        self._peers[address] = peer
        self._peers.move_to_end(address)
        at = self._addresses.get(hello.name)
        if at is None or at == address or self._takes(peer, self._peers[at], first):
            self._addresses[hello.name] = at = address
        if len(self._peers) > MAX_PEERS:
            self.remove(next(iter(self._peers)))
        return None if at == address else at

    def _takes(self, peer: _Peer, holder: _Peer, first: bool) -> bool:
        if first and ids.not_before(peer.incarnation, holder.incarnation):
            return True
        state = holder.incarnation, holder.hellos
        peer.claims = peer.claims + 1 if peer.holder == state else 1
        peer.holder = state
        return peer.last_hello - holder.last_hello >= SILENT_SECONDS and peer.claims >= SILENT_HELLOS

    def holder_may_be_dead(self, address: bytes) -> bool:
        """Return whether another incarnation holds this one's name but may be dead.

        The holder may be dead if it sent no `Hello` since shortly after this incarnation's first: last
        messages of a dead incarnation can arrive late, after its network was cut for a while.
        """
        peer = self._peers[address]
        at = self._addresses.get(peer.name)
        if at is None or at == address:
            return False
        return self._peers[at].last_hello < peer.first_hello + CHECK_SECONDS

    def remove(self, address: bytes) -> None:
        """Remove an incarnation; an unknown one is ignored."""
        peer = self._peers.pop(address, None)
        self.registered.pop(address, None)
        if peer is not None and self._addresses.get(peer.name) == address:
            del self._addresses[peer.name]

    def name_of(self, address: bytes) -> str | None:
        """Return the name of the incarnation at an address; None: there is none."""
        return self._peers[address].name if address in self._peers else None

    @property
    def addresses(self) -> list[bytes]:
        """The addresses of all incarnations."""
        return list(self._peers)

    def address_of(self, name: str) -> bytes | None:
        """Return the address of the incarnation that holds a name; None: there is none."""
        return self._addresses.get(name)

    def assign(self, name: str, address: bytes) -> None:
        """Give a name to the incarnation at an address, even if another one holds it."""
        self._addresses[name] = address


async def handle_hello(hub: Hub[Any, Any], peers: Peers, address: bytes, hello: Hello, clock: Clock) -> None:
    """Add an incarnation; it gets its name if no other holds the name, or the holder's connection is gone.

    An incarnation that may have missed messages, or whose messages were ignored, has to shake hands again.
    """
    had_no_name = peers.name_of(address) is not None and peers.address_of(hello.name) != address
    holder = peers.hello(address, hello, clock.now())
    if holder is not None and not await hub.is_connected(holder):
        peers.remove(holder)
        hub.dismiss(holder)  # it gets no messages from now on: if it comes back, it has to know
        holder = peers.hello(address, hello, clock.now())
    if had_no_name and holder is None:
        hub.dismiss(address)  # what it sent before was ignored: it has to start again


def incarnation_of(address: bytes) -> int:
    """Return a number of the incarnation at an address: not the number in the incarnation's `Hello`."""
    return int.from_bytes(hashlib.blake2b(address, digest_size=8).digest(), "little")


def check_register(register: Register) -> None:
    """Raise `InvalidField` if an engine's capacity or versions are out of bounds, or its endpoint is none."""
    if register.weights_endpoint:
        try:
            check_endpoint("weights_endpoint", register.weights_endpoint)
        except ConfigError as error:
            raise InvalidField("weights_endpoint", register.weights_endpoint, str(error)) from error
    for name, value in structs.asdict(register.capacity).items():
        least = 0 if name in ("draft_tokens", "image_tokens") else 1
        if not least <= value <= MAX_SIZE:
            raise InvalidField(f"capacity.{name}", value, f"must be in [{least}, {MAX_SIZE}]")
    if (parts := register.capacity.parts) > min(register.capacity.kv_blocks, MAX_PARTS):
        raise InvalidField("capacity.parts", parts, f"must be at most kv_blocks, and at most {MAX_PARTS}")
    longest = max((len(text) for item in register.versions.items() for text in item), default=0)
    if len(register.versions) > MAX_VERSIONS or longest > MAX_ID:
        fix = f"give at most {MAX_VERSIONS} entries of {MAX_ID} characters"
        raise InvalidField("versions", f"{len(register.versions)} entries", fix)
