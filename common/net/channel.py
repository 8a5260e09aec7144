"""The connecting end of a typed, counted connection: a DEALER socket that shakes hands.

Invariants:
- what does not decode is counted, logged once and dropped; it never stops a loop;
- a message that was lost, either way, is revealed: a `Welcome` follows on `Channel.recv`, within
  `CHECK_SECONDS` and a round trip of a working connection. TCP loses nothing, but a connection that
  breaks takes with it what was under way, and ZeroMQ reconnects without telling anyone;
- each loss is revealed by exactly one such `Welcome`: `recv` returns only those that name another session
  than the last, or reveal a loss by their counts. Neither what is queued at the time, nor latency, nor a
  lost `Refused` or `Welcome` changes that.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Generic, TypeVar

from seer.common.clock import Clock
from seer.common.errors import Unauthorized, Unreachable, WireError
from seer.common.net.identity import CHECK_SECONDS, HELLO_FIRST, HELLO_SECONDS, Identity, error_of
from seer.common.net.transport.base import Frame, Socket, Transport
from seer.common.process.log import get_logger
from seer.common.wire import Message, Refused, Welcome
from seer.common.wire.codec import OF_SERVER, SCHEMA_HASH, Decoder, encode

Out = TypeVar("Out", bound=Message)
In = TypeVar("In", bound=Message)

_log = get_logger()


class Channel(Generic[Out, In]):
    """A connection to a server. One task may receive while others send.

    `incoming` is the union of messages that the server sends; it includes `Welcome` and `Refused`.
    """

    def __init__(
        self, transport: Transport, endpoint: str, me: Identity, incoming: object, clock: Clock
    ) -> None:
        self.peer: Welcome | None = None
        self.digests = ""  # as the last Welcome said
        self.counters = {"sent": 0, "received": 0, "malformed": 0, "hellos": 0}
        self._transport = transport
        self._endpoint = endpoint
        self._me = me
        self._decoder: Decoder[In] = Decoder(incoming, OF_SERVER)
        self._clock = clock
        self._socket: Socket | None = None
        self._sending = (
            asyncio.Lock()
        )  # a Hello has the count of what was sent before it, also if it waits for room
        self._last_hello = float("-inf")
        self._sent = self._arrived = 0  # as in `Hello.sent` and `Welcome.sent`
        self._session = (0, 0)  # the server's incarnation, and the session it gave us
        self._warned: set[str] = set()

    async def open(self, deadline_seconds: float) -> Welcome:
        """Shake hands; may be called again. What arrives before the `Welcome` is dropped.

        Raises `Unreachable` when nobody answers in time, `Unauthorized` when keys do not fit, and the error
        that the server refuses with (`ProtocolMismatch` for another major or another shared configuration).
        """
        if self._socket is None:
            self._socket = await self._transport.dealer(self._endpoint, self._me.address())
        self.peer = None
        try:
            async with asyncio.timeout(deadline_seconds):
                while self.peer is None:
                    await self._say_hello()
                    await self._receive(HELLO_SECONDS)
                    if self.peer is None and (problem := self._socket.problem):
                        raise Unauthorized(f"{self._endpoint}: {problem}")
        except (TimeoutError, Unauthorized) as error:
            self.close()  # drops the Hellos that nobody read
            self._socket = None
            if isinstance(error, Unauthorized):
                raise
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

        Returns a `Welcome` when the server was restarted, had forgotten us, or when a message was lost: those
        sent before, either way, may not have arrived. May be cancelled without losing a message.
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
            self._warn_once("message dropped", str(error))
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
        """Return whether the caller must see it: something was lost since the last one."""
        self.peer, self.digests = welcome, welcome.digests
        if welcome.schema_hash != SCHEMA_HASH:
            self._warn_once("peer has another schema of the same protocol", welcome.schema_hash)
        missed = welcome.sent != self._arrived
        self._arrived = welcome.sent
        known, self._session = self._session, (welcome.incarnation, welcome.session)
        return known != self._session or missed

    def _warn_once(self, problem: str, detail: str) -> None:
        if problem not in self._warned:
            self._warned.add(problem)
            _log.warning(problem, endpoint=self._endpoint, detail=detail)
