"""Typed, counted, handshaken connections over DEALER (`Channel`) and ROUTER (`Hub`).

Invariants:
- a Hub hands out messages only of peers that said `Hello` in this life of the Hub; others are told to,
  so peers of a restarted server shake hands again by themselves, idle ones within `CHECK_SECONDS`;
- another protocol major, or another shared configuration where required, is refused with the reason;
- a `Hello` counts only at the address that its role, name and incarnation make; `Goodbye` ends a
  handshake;
- what does not decode, or is refused, is counted, logged once per peer and dropped; it never stops a
  loop, and what a Hub answers waits for nobody: a peer that does not read holds up no other;
- a message that was lost, either way, is revealed: a `Welcome` follows on `Channel.recv`, within
  `CHECK_SECONDS` and a round trip of a working connection. TCP loses nothing, but a connection that
  breaks takes with it what was under way, and ZeroMQ makes the next one without a word;
- one event, one such `Welcome`: each admission of a peer is a session with a number of its own, every
  `Welcome` names it, and only one that names another is handed out. So neither what is queued at the
  time, nor latency, nor a lost `Refused` or `Welcome` adds to it or hides it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from typing import Generic, TypeVar

import msgspec

from seer.common.clock import Clock
from seer.common.errors import (
    InvalidField,
    ProtocolMismatch,
    RequestRefused,
    SeerError,
    Unreachable,
    WireError,
    error_class,
)
from seer.common.net.transport.base import Frame, Router, Socket, Transport
from seer.common.process.log import get_logger
from seer.common.wire import Goodbye, Hello, Message, Refused, Welcome
from seer.common.wire.codec import SCHEMA_HASH, Decoder, encode
from seer.common.wire.version import MAJOR, MINOR

Out = TypeVar("Out", bound=Message)
In = TypeVar("In", bound=Message)

HELLO_SECONDS = 1.0
"""Pause between two Hellos while one is unanswered."""

CHECK_SECONDS = 5.0
"""A Hello is said this often: a restarted server does not know us, and both compare what they counted."""

MAX_PEERS = 10_000
"""Bound on peers remembered; the longest silent one is forgotten and shakes hands again."""

_SHOWN = 80
"""Characters shown of what a peer sent and nothing bounds."""

HELLO_FIRST = "hello"
"""`Refused.code` for a peer that has to say Hello (again)."""

_STRANGER = Refused(code=HELLO_FIRST, message="say Hello first")

_log = get_logger()


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """Who this process is. At most one channel per identity may lead to an endpoint.

    `config_hash` is `config.shared_hash`, empty for a process that need not know it.
    """

    role: str
    name: str
    incarnation: int
    config_hash: str = ""

    def address(self) -> bytes:
        """Return the ROUTER identity: another life is another address, so it gets no old mail."""
        return f"{self.role}/{self.name}".encode()[:200] + f"/{self.incarnation:x}".encode()

    def hello(self, sent: int = 0) -> Hello:
        """Return the first message of a connection, or its repetition after `sent` others."""
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


def error_of(refused: Refused) -> SeerError:
    """Return the error that a `Refused` stands for."""
    cls = error_class(refused.code)
    if issubclass(cls, RequestRefused):
        return cls(refused.message, tuple(refused.prompt_ids))
    return SeerError(refused.message) if issubclass(cls, InvalidField) else cls(refused.message)


class Channel(Generic[Out, In]):
    """The client's side. One task may receive while others send.

    `incoming` is the union that the server sends; it includes `Welcome` and `Refused`.
    """

    def __init__(
        self, transport: Transport, endpoint: str, me: Identity, incoming: object, clock: Clock
    ) -> None:
        self.peer: Welcome | None = None
        self.counters = {"sent": 0, "received": 0, "malformed": 0, "hellos": 0}
        self._transport = transport
        self._endpoint = endpoint
        self._me = me
        self._decoder: Decoder[In] = Decoder(incoming)
        self._clock = clock
        self._socket: Socket | None = None
        self._sending = asyncio.Lock()  # a Hello must say what was sent before it, also if it waits for room
        self._last_hello = float("-inf")
        self._sent = self._arrived = 0  # as in `Hello.sent` and `Welcome.sent`
        self._session = (0, 0)  # the server's incarnation, and its number of our admission
        self._complained: set[str] = set()

    async def open(self, deadline_seconds: float) -> Welcome:
        """Shake hands; may be called again. What arrives before the `Welcome` is dropped.

        Raises `Unreachable` when nobody answers in time, and the error that the server refuses with
        (`ProtocolMismatch` for another major or another shared configuration).
        """
        if self._socket is None:
            self._socket = await self._transport.dealer(self._endpoint, self._me.address())
        self.peer = None
        try:
            async with asyncio.timeout(deadline_seconds):
                while self.peer is None:
                    await self._say_hello()
                    await self._receive(HELLO_SECONDS)
        except TimeoutError as error:
            self.close()  # with the Hellos that nobody took
            self._socket = None
            raise Unreachable(
                f"{self._endpoint} did not answer within {deadline_seconds:g} s:"
                " check that its service runs and that [endpoints] has its address"
            ) from error
        return self.peer

    async def send(self, message: Out) -> None:
        """Queue one message; raises `Unreachable` when the peer reads nothing for too long."""
        async with self._sending:
            await self._connected().send(encode(message))
            self.counters["sent"] += 1
            self._sent += 1

    async def recv(self) -> In:
        """Return the next message; raises the error of a `Refused` that concerns the connection.

        A `Welcome` appears here when the peer had forgotten us, is another life of it, or when a
        message was lost: those sent before, either way, may not have arrived. May be cancelled
        without losing a message.
        """
        while True:
            pause = HELLO_SECONDS if self.peer is None else CHECK_SECONDS
            wait = self._last_hello + pause - self._clock.now()
            message = await self._receive(wait) if wait > 0 else None
            if message is not None:
                return message
            with contextlib.suppress(Unreachable):
                await self._say_hello()

    def close(self) -> None:
        """Close the socket; idempotent."""
        if self._socket is not None:
            self._socket.close()

    def _connected(self) -> Socket:
        if self._socket is None:
            raise Unreachable(f"{self._endpoint}: not connected; call open() first")
        return self._socket

    async def _say_hello(self) -> None:
        self._last_hello = self._clock.now()
        self.counters["hellos"] += 1
        async with self._sending:
            await self._connected().send(encode(self._me.hello(self._sent)))

    async def _receive(self, seconds: float) -> In | None:
        """Return the next message meant for the caller, or None after `seconds`."""
        socket = self._connected()
        try:
            async with asyncio.timeout(seconds):
                while True:
                    message = self._decode(await socket.recv())
                    self._arrived += not isinstance(message, Welcome)
                    if message is not None and await self._concerns_caller(message):
                        self.counters["received"] += 1
                        return message
        except TimeoutError:
            return None

    def _decode(self, frames: list[Frame]) -> In | None:
        try:
            return self._decoder.decode(frames)
        except WireError as error:
            self.counters["malformed"] += 1
            self._complain("message dropped", str(error))
            return None

    async def _concerns_caller(self, message: In) -> bool:
        if isinstance(message, Welcome):
            return self._welcomed(message)
        if not isinstance(message, Refused) or message.rollout_id or message.prompt_ids:
            return True
        if message.code != HELLO_FIRST:
            raise error_of(message)
        self.peer = None
        if self._clock.now() - self._last_hello >= HELLO_SECONDS:
            await self._say_hello()
        return False

    def _welcomed(self, welcome: Welcome) -> bool:
        """Say whether something happened since the last one: the caller must hear of it."""
        self.peer = welcome
        if welcome.schema_hash != SCHEMA_HASH:
            self._complain("peer has another schema of the same protocol", welcome.schema_hash)
        missed = welcome.sent not in (-1, self._arrived)
        self._arrived = welcome.sent
        known, self._session = self._session, (welcome.incarnation, welcome.session)
        lost = welcome.lost and not welcome.session  # of a server that does not number sessions
        return known != self._session or missed or lost

    def _complain(self, problem: str, detail: str) -> None:
        if problem not in self._complained:
            self._complained.add(problem)
            _log.warning(problem, endpoint=self._endpoint, detail=detail)


class _Peer(msgspec.Struct):
    """`session` is 0 while it is not admitted; `told` is when it last heard that it is not."""

    session: int = 0
    told: float = float("-inf")
    complained: bool = False
    sent: int = 0
    arrived: int = 0


class Hub(Generic[Out, In]):
    """The server's side of many channels. One task may receive while others send.

    `incoming` is the union that clients send; it includes `Hello`. Peers of other `roles` are refused.
    """

    def __init__(
        self,
        router: Router,
        me: Identity,
        incoming: object,
        require_config_hash: bool,
        roles: frozenset[str] | None = None,
    ) -> None:
        self.counters = {
            "sent": 0, "received": 0, "malformed": 0, "strangers": 0, "refused": 0, "undeliverable": 0,
        }  # fmt: skip
        self._router = router
        self._me = me
        self._decoder: Decoder[In] = Decoder(incoming)
        self._require_config_hash = require_config_hash
        self._roles = roles
        self._peers: OrderedDict[bytes, _Peer] = OrderedDict()
        self._sessions = 0
        self._started = asyncio.get_running_loop().time()

    @property
    def uptime_seconds(self) -> float:
        """Seconds since this Hub was made."""
        return asyncio.get_running_loop().time() - self._started

    @property
    def endpoint(self) -> str:
        """Where it is bound, with the real port."""
        return self._router.endpoint

    async def recv(self) -> tuple[bytes, In]:
        """Return the next message and its sender's address.

        An accepted `Hello` is answered and also returned, each time it is said: a client repeats it.
        """
        while True:
            identity, frames = await self._router.recv()
            peer = self._peer(identity)
            peer.arrived += 1
            try:
                message = self._decoder.decode(frames)
            except WireError as error:
                self.refuse(identity, error)
                continue
            if isinstance(message, Hello):
                await self._answer(identity, peer, message)
            elif not peer.session:
                self.counters["strangers"] += 1
                await self._tell_stranger(identity, peer)
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
        """Queue an encoded message if there is room now; else nothing happened, and False says so."""
        if not await self._fits(identity, frames):
            return False
        self._count(identity, sent=True)
        return True

    async def reaches(self, identity: bytes) -> bool:
        """Say whether a peer is connected, or was a moment ago. It is told what it knows already."""
        peer = self._peers.get(identity)
        if peer is None:
            return False
        news = self._welcome(peer, lost=False) if peer.session else _STRANGER
        try:
            async with asyncio.timeout(0):
                await self._router.send(identity, encode(news))
        except Unreachable:
            return False
        except TimeoutError:
            return True  # it has no room
        peer.sent += news is _STRANGER
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
        """Count a message that makes no sense; the first one of a peer is logged."""
        self.counters["malformed"] += 1
        self._complain(self._peer(identity), "message dropped", identity, str(error))

    def dismiss(self, identity: bytes) -> None:
        """Have a peer shake hands again before anything more of it counts.

        It is told so at its next message, whatever it is, and once a second while it sends others.
        """
        peer = self._peers.get(identity)
        if peer is not None and peer.session:
            peer.session, peer.told = 0, float("-inf")

    def session(self, identity: bytes) -> int:
        """Return the number of a peer's admission, 0 while it is not admitted."""
        peer = self._peers.get(identity)
        return peer.session if peer else 0

    def close(self) -> None:
        """Close the socket; idempotent."""
        self._router.close()

    async def _answer(self, identity: bytes, peer: _Peer, hello: Hello) -> None:
        reason = self._objection(identity, hello)
        if reason:
            peer.session = 0
            self.counters["refused"] += 1
            self._complain(peer, "peer refused", identity, reason)
            await self.reply(identity, Refused(code=ProtocolMismatch.code, message=reason))
            return
        if not peer.session:
            _log.info("peer connected", role=hello.role, name=hello.name)
        if hello.schema_hash != SCHEMA_HASH:
            schema = hello.schema_hash[:_SHOWN]
            self._complain(peer, "peer has another schema of the same protocol", identity, schema)
        lost = not peer.session or hello.sent not in (-1, peer.arrived - 1)  # this Hello arrived, too
        peer.arrived = hello.sent
        if lost:
            self._sessions += 1
            peer.session = self._sessions
        await self.reply(identity, self._welcome(peer, lost=lost))

    def _welcome(self, peer: _Peer, *, lost: bool) -> Welcome:
        return Welcome(
            major=MAJOR,
            minor=MINOR,
            schema_hash=SCHEMA_HASH,
            name=self._me.name,
            incarnation=self._me.incarnation,
            uptime_seconds=self.uptime_seconds,
            lost=lost,
            sent=peer.sent,
            session=peer.session,
        )

    async def _tell_stranger(self, identity: bytes, peer: _Peer) -> None:
        now = asyncio.get_running_loop().time()
        if now - peer.told >= HELLO_SECONDS:
            peer.told = now
            await self.reply(identity, _STRANGER)

    def _objection(self, identity: bytes, hello: Hello) -> str:
        if hello.major != MAJOR:
            return (
                f"{self._me.name} speaks protocol {MAJOR}.{MINOR}, {hello.name} speaks"
                f" {hello.major}.{hello.minor}: run one version of seer-rollout everywhere"
            )
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
            return f"{hello.name} has another address than its Hello says: somebody repeats it"
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

    def _complain(self, peer: _Peer, problem: str, identity: bytes, detail: str) -> None:
        if not peer.complained:
            peer.complained = True
            _log.warning(problem, peer=identity.decode(errors="replace"), detail=detail)
