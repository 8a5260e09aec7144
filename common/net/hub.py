"""The accepting end of many typed, counted connections: a ROUTER socket that admits peers.

Invariants:
- `recv` returns messages only of peers that sent `Hello` to this process; others are asked to send it, so
  peers of a restarted server shake hands again by themselves, idle ones within `CHECK_SECONDS`;
- another protocol major, or another shared configuration where required, is refused with the reason;
- a `Hello` counts only at the address that its role, name and incarnation make; `Goodbye` ends a
  handshake;
- where keys are used, a peer has the roles and names that its key is for (`keys.py`), and a message counts
  only if it came with the key that said `Hello`, and that key is still admitted;
- what does not decode, or is refused, is counted, logged once per peer and problem, and dropped; it never
  stops a loop, and `reply` waits for nobody: a peer that does not read delays no other;
- each admission of a peer is a session with a number of its own, which every `Welcome` names. A lost
  message, either way, begins a new one: that is how a `Channel` learns of it, once.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec

from seer.common.errors import ProtocolMismatch, SeerError, Unauthorized, Unreachable, WireError
from seer.common.net.identity import HELLO_FIRST, HELLO_SECONDS, Identity
from seer.common.net.keys import ANYONE, User
from seer.common.net.transport.base import Frame, Router
from seer.common.process.log import get_logger
from seer.common.wire import Goodbye, Hello, Message, Refused, SnapshotRequest, StatusRequest, Welcome
from seer.common.wire.codec import SCHEMA_HASH, Decoder, encode
from seer.common.wire.version import MAJOR, MINOR

Out = TypeVar("Out", bound=Message)
In = TypeVar("In", bound=Message)

MAX_PEERS = 10_000
"""Bound on peers remembered; the longest silent one is forgotten and shakes hands again."""

_SHOWN = 80
"""Characters logged of a text that a peer sent and nothing bounds."""

_STRANGER = Refused(code=HELLO_FIRST, message="say Hello first")

_READING = Hello | Goodbye | StatusRequest | SnapshotRequest
"""What a peer that may only read may send."""

_log = get_logger()


class _Peer(msgspec.Struct):
    """`session` is 0 while it is not admitted; `refused_at` is when it was last asked to send `Hello`.

    `user` said that `Hello`, by its key, and may do no more than ask if it `only_reads`.
    `warned`: problems that were logged. `sent` and `arrived` count messages to and from it, as in
    `Welcome.sent` and `Hello.sent`.
    """

    session: int = 0
    user: User | None = None
    only_reads: bool = False
    refused_at: float = float("-inf")
    warned: set[str] = set()
    sent: int = 0
    arrived: int = 0


class Hub(Generic[Out, In]):
    """The server's side of many channels. One task may receive while others send.

    `incoming` is the union that clients send; it includes `Hello`. Peers of other `roles` are refused.
    `weight_version`, `digests`: what a `Welcome` says of them.
    """

    def __init__(
        self,
        router: Router,
        me: Identity,
        incoming: object,
        require_config_hash: bool,
        roles: frozenset[str] | None = None,
        weight_version: Callable[[], int] = lambda: -1,
        digests: Callable[[], str] = str,
    ) -> None:
        self.counters = {
            "sent": 0, "received": 0, "malformed": 0, "strangers": 0, "refused": 0, "undeliverable": 0,
        }  # fmt: skip
        self._router = router
        self._me = me
        self._decoder: Decoder[In] = Decoder(incoming)
        self._require_config_hash = require_config_hash
        self._roles = roles
        self._weight_version, self._digests = weight_version, digests
        self._peers: OrderedDict[bytes, _Peer] = OrderedDict()
        self._sessions = 0
        self._started = asyncio.get_running_loop().time()

    @property
    def uptime_seconds(self) -> float:
        """Seconds since this Hub was made."""
        return asyncio.get_running_loop().time() - self._started

    async def recv(self) -> tuple[bytes, In]:
        """Return the next message and its sender's address.

        An accepted `Hello` is answered and also returned, each time: a client repeats it.
        """
        while True:
            identity, frames, user = await self._router.recv()
            peer = self._peer(identity)
            peer.arrived += 1
            try:
                message = self._decoder.decode(frames)
            except WireError as error:
                self.refuse(identity, error)
                continue
            if user is None:
                self.dismiss(identity)
                await self._deny(identity, peer, "its key is not admitted any more")
                continue
            if isinstance(message, Hello):
                await self._answer(identity, peer, user, message)
            elif peer.session and peer.only_reads and not isinstance(message, _READING):
                await self._deny(identity, peer, f"its key is for {user}, which may only read")
                continue
            elif peer.user != user:
                self.dismiss(identity)
                self.counters["strangers"] += 1
                await self._refuse_stranger(identity, peer)
            elif not peer.session:
                self.counters["strangers"] += 1
                await self._refuse_stranger(identity, peer)
            if peer.session:
                if isinstance(message, Goodbye):
                    self.dismiss(identity)
                self.counters["received"] += 1
                return identity, message

    async def send(self, identity: bytes, message: Out) -> bool:
        """Queue a message, waiting for room; False when the peer is gone or takes nothing for too long."""
        return await self.send_frames(identity, encode(message))

    async def send_frames(self, identity: bytes, frames: list[Frame]) -> bool:
        """Queue an encoded message, as `send`."""
        try:
            await self._router.send(identity, frames)
        except Unreachable:
            self._count(identity, sent=False)
            return False
        self._count(identity, sent=True)
        return True

    async def offer_frames(self, identity: bytes, frames: list[Frame]) -> bool:
        """Queue an encoded message if there is room now; False: there is none, and nothing was sent."""
        if not await self._fits(identity, frames):
            return False
        self._count(identity, sent=True)
        return True

    async def is_connected(self, identity: bytes) -> bool:
        """Return whether a peer is connected, or was a moment ago. Sends it a message that it ignores."""
        peer = self._peers.get(identity)
        if peer is None:
            return False
        known = self._welcome(peer) if peer.session else _STRANGER
        try:
            async with asyncio.timeout(0):
                await self._router.send(identity, encode(known))
        except Unreachable:
            return False
        except TimeoutError:
            return True  # it has no room
        peer.sent += known is _STRANGER
        return True

    async def reply(self, identity: bytes, message: Out | Message) -> None:
        """Queue a message, or lose it if there is no room now: the next `Hello` reveals that."""
        sent = await self._fits(identity, encode(message))
        if isinstance(message, Welcome):
            return
        self._count(identity, sent=sent, counted=not isinstance(message, Refused))

    async def _fits(self, identity: bytes, frames: list[Frame]) -> bool:
        try:
            async with asyncio.timeout(0):  # a send that finds room does not suspend
                await self._router.send(identity, frames)
        except (Unreachable, TimeoutError):
            return False
        return True

    def refuse(self, identity: bytes, error: SeerError) -> None:
        """Count an invalid message; the first one of a peer is logged."""
        self.counters["malformed"] += 1
        self._warn_once(self._peer(identity), "message dropped", identity, str(error))

    def dismiss(self, identity: bytes) -> None:
        """Ignore a peer until it shakes hands again.

        It is asked to at its next message, whatever that is, and once a second while it sends others.
        """
        peer = self._peers.get(identity)
        if peer is not None and peer.session:
            peer.session, peer.refused_at = 0, float("-inf")

    def session(self, identity: bytes) -> int:
        """Return the number of a peer's admission, 0 while it is not admitted."""
        peer = self._peers.get(identity)
        return peer.session if peer else 0

    def user(self, identity: bytes) -> User:
        """Return whose key an admitted peer came with."""
        return self._peers[identity].user or ANYONE

    def close(self) -> None:
        """Close the socket; idempotent."""
        self._router.close()

    async def _deny(self, identity: bytes, peer: _Peer, reason: str) -> None:
        """Refuse what a key does not allow."""
        self.counters["refused"] += 1
        self._warn_once(peer, "peer refused", identity, reason)
        await self.reply(identity, Refused(code=Unauthorized.code, message=f"{self._me.name}: {reason}"))

    async def _answer(self, identity: bytes, peer: _Peer, user: User, hello: Hello) -> None:
        code, reason = ProtocolMismatch.code, self._refusal_reason(identity, hello)
        if not reason and (reason := user.objection(hello.role, hello.name)):
            code, reason = Unauthorized.code, f"{hello.name} is refused by {self._me.name}: {reason}"
        if reason:
            peer.session = 0
            self.counters["refused"] += 1
            self._warn_once(peer, "peer refused", identity, reason)
            await self.reply(identity, Refused(code=code, message=reason))
            return
        peer.user, peer.only_reads = user, user.only_reads(hello.role)
        if not peer.session:
            _log.info("peer connected", role=hello.role, name=hello.name)
        if hello.schema_hash != SCHEMA_HASH:
            schema = hello.schema_hash[:_SHOWN]
            self._warn_once(peer, "peer has another schema of the same protocol", identity, schema)
        lost = not peer.session or hello.sent != peer.arrived - 1  # this Hello arrived, too
        peer.arrived = hello.sent
        if lost:
            self._sessions += 1
            peer.session = self._sessions
        await self.reply(identity, self._welcome(peer))

    def _welcome(self, peer: _Peer) -> Welcome:
        return Welcome(
            major=MAJOR,
            minor=MINOR,
            schema_hash=SCHEMA_HASH,
            name=self._me.name,
            incarnation=self._me.incarnation,
            uptime_seconds=self.uptime_seconds,
            sent=peer.sent,
            session=peer.session,
            weight_version=self._weight_version(),
            digests=self._digests(),
        )

    async def _refuse_stranger(self, identity: bytes, peer: _Peer) -> None:
        now = asyncio.get_running_loop().time()
        if now - peer.refused_at >= HELLO_SECONDS:
            peer.refused_at = now
            await self.reply(identity, _STRANGER)

    def _refusal_reason(self, identity: bytes, hello: Hello) -> str:
        if hello.major != MAJOR:
            return (
                f"{self._me.name} speaks protocol {MAJOR}.{MINOR}, {hello.name} speaks"
                f" {hello.major}.{hello.minor}: run one version of seer-rollout everywhere"
            )
        if not hello.name:
            return f"{hello.role[:_SHOWN]!r} comes to {self._me.name} without a name: give it one of its own"
        if self._roles is not None and hello.role not in self._roles:
            admitted = ", ".join(sorted(self._roles))
            return (
                f"{hello.name} comes as {hello.role[:_SHOWN]!r}: this socket of {self._me.name} is for"
                f" {admitted}; check the endpoint it was given"
            )
        theirs, ours = hello.config_hash[:_SHOWN], self._me.config_hash
        if self._require_config_hash and theirs and theirs != ours:
            return (
                f"{hello.name} runs with other [shared] settings ({theirs}) than {self._me.name} ({ours}):"
                " make the section equal on every node"
            )
        claimed = Identity(role=hello.role, name=hello.name, incarnation=hello.incarnation)
        if claimed.address() != identity:
            return f"{hello.name} has another address than its Hello makes: somebody else repeats its Hello"
        return ""

    def _count(self, identity: bytes, *, sent: bool, counted: bool = True) -> None:
        self.counters["sent" if sent else "undeliverable"] += counted
        if peer := self._peers.get(identity):
            peer.sent += 1

    def _peer(self, identity: bytes) -> _Peer:
        peer = self._peers.setdefault(identity, _Peer())
        self._peers.move_to_end(identity)
        if len(self._peers) > MAX_PEERS:
            self._peers.popitem(last=False)
        return peer

    def _warn_once(self, peer: _Peer, problem: str, identity: bytes, detail: str) -> None:
        if problem not in peer.warned:
            peer.warned.add(problem)
            _log.warning(problem, peer=identity.decode(errors="replace"), detail=detail)
