"""Keys on ZeroMQ sockets: CURVE for TCP, none for IPC, whose folder only its user can enter.

Invariants (tests/unit/test_curve.py asserts them):
- a socket that was bound with keys lets nobody in whom the list of keys does not have, also if the
  authenticator fails: without one libzmq would let every key in, unless `ZAP_ENFORCE_DOMAIN` is set;
- a message says whose key it came with, by a look at the list as it is then;
- the end that connects learns within a second why it is not let in;
- who was not let in is counted and logged, however many, in one line a minute.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter

import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator
from zmq.utils.monitor import parse_monitor_message

from seer.common.net.keys import ANYONE, Keys, Peers, User
from seer.common.process.log import get_logger

DOMAIN, SERVICES = "seer", "seer.services"
"""ZAP domains: sockets for everyone in the list; and those that publish, and hear nothing of who listens."""

LISTENERS = frozenset({"server", "service", "operator"})
"""Roles of keys that may listen to what is published."""

HANDSHAKE_MS = 5_000
"""A connection that has not shaken hands by then is closed."""

_REASONS: dict[int, str] = {
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: (
        "it does not admit this process's key (security.key): it was revoked, has expired, or never was in"
        " the list; add it there with `seer keys add`"
    ),
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: (
        "it has another key than security.server says, or keys are used at one end alone: give both ends"
        " [security] settings that fit (docs/security.md)"
    ),
}
_REASONS[zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL] = _REASONS[zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL]

FAILURES = 3
"""Handshakes in a row that end without a reason, before that is taken for keys that do not fit: a server that
dies can end one, too. Libzmq tries three within the first second, and no more after one with a reason."""

_FAILED: dict[int, str] = {
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "not_admitted",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "without_key",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "broken_off",  # silence, and another server key, too
}
COUNT_SECONDS, LOG_SECONDS = 1.0, 60.0
BATCH = 1_000
"""Failed handshakes that are counted in one turn of the event loop: 10 ms."""

_log = get_logger()


class Authenticator(AsyncioAuthenticator):
    """pyzmq's, whose task would end unnoticed with its first exception: here none gets that far."""

    def __init__(self, context: zmq.asyncio.Context, peers: Peers) -> None:
        super().__init__(context)
        self._peers = peers
        for domain in (DOMAIN, SERVICES):
            self.configure_curve_callback(domain, self)

    def callback(self, domain: str, key: bytes) -> bool:
        """Return whether a key is admitted; see `configure_curve_callback`."""
        user = self._peers.find(key.decode())
        return user is not None and (domain == DOMAIN or user.role in LISTENERS)

    async def handle_zap_message(self, msg: list[bytes]) -> None:
        """Answer a question of libzmq's: it asks once for each handshake, and waits for the answer."""
        try:
            await super().handle_zap_message(msg)
        except Exception:  # noqa: BLE001 - one that got out would end the task
            _log.exception("a key could not be checked: its connection is refused")
            self._send_zap_reply(msg[1], b"500", b"")


def serve(socket: zmq.asyncio.Socket, keys: Keys) -> None:
    """Let a socket that will be bound admit the keys of the list alone."""
    domain = SERVICES if socket.type == zmq.PUB else DOMAIN
    for option, value in (
        (zmq.CURVE_SERVER, 1),
        (zmq.CURVE_SECRETKEY, keys.secret.encode()),
        (zmq.ZAP_DOMAIN, domain.encode()),
        (zmq.ZAP_ENFORCE_DOMAIN, 1),
        (zmq.HANDSHAKE_IVL, HANDSHAKE_MS),
    ):
        socket.setsockopt(option, value)


def present(socket: zmq.asyncio.Socket, keys: Keys, server: str) -> None:
    """Let a socket that will be connected show our key, and talk to nobody but the holder of `server`."""
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public.encode())
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())
    socket.setsockopt(zmq.CURVE_SERVERKEY, server.encode())


def sender(frame: zmq.Frame, keys: Keys | None) -> User | None:
    """Return who sent a frame; None: the holder of a key that is not admitted any more."""
    if keys is None:
        return ANYONE
    try:
        public = frame.get("User-Id")
    except zmq.ZMQError:  # it came over IPC
        return ANYONE
    return keys.peers.find(str(public)) if keys.peers is not None else None


class Watch:
    """Why a connecting socket is not let in, by libzmq's own report."""

    def __init__(self, socket: zmq.asyncio.Socket) -> None:
        events = zmq.EVENT_HANDSHAKE_SUCCEEDED
        for event in _REASONS:
            events |= event
        self._socket = socket
        monitor = socket.get_monitor_socket(events)
        self._monitor: zmq.Socket[bytes] = zmq.Socket.shadow(monitor.underlying)
        self._failed, self._reason = 0, ""

    @property
    def problem(self) -> str:
        """Why the last attempts to connect failed; empty: they did not, or too few to say."""
        while not self._monitor.closed and self._monitor.poll(0):
            event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))["event"]
            self._reason = _REASONS.get(event, "")
            explained = event != zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
            self._failed = (FAILURES if explained else self._failed + 1) if self._reason else 0
        return self._reason if self._failed >= FAILURES else ""

    def close(self) -> None:
        """Stop watching; before the socket is closed."""
        if not self._socket.closed:
            self._socket.disable_monitor()


class Guard:
    """Counts those that a bound socket did not let in, `failed`, and says so in the log."""

    def __init__(self, socket: zmq.asyncio.Socket, context: zmq.asyncio.Context, endpoint: str) -> None:
        self.failed: Counter[str] = Counter()
        self._endpoint, self._logged, self._told = endpoint, 0, float("-inf")
        self._monitor: zmq.Socket[bytes] = zmq.Socket(zmq.Context.shadow(context.underlying), zmq.PAIR)
        self._monitor.setsockopt(zmq.LINGER, 0)
        # Unbounded: libzmq's thread would else wait for us, and hold a lock that closing the socket needs.
        # A second's handshakes are a few MB at most.
        self._monitor.setsockopt(zmq.RCVHWM, 0)
        address = f"inproc://guard-{id(self)}"
        socket.monitor(address, sum(_FAILED))
        self._monitor.connect(address)
        self._socket = socket
        self._task = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while True:
            pause = 0.0 if self._count() == BATCH else COUNT_SECONDS
            await asyncio.sleep(pause)
            now, failed = time.monotonic(), self.failed.total()
            if failed > self._logged and now >= self._told + LOG_SECONDS:
                self._logged, self._told = failed, now
                _log.warning("peers were not let in", endpoint=self._endpoint, **self.failed)

    def _count(self) -> int:
        for counted in range(BATCH):
            try:
                event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))["event"]
            except zmq.Again:
                return counted
            if event in _FAILED:
                self.failed[_FAILED[event]] += 1
        return BATCH

    def close(self) -> None:
        """Stop counting; before the socket is closed."""
        self._task.cancel()
        if not self._socket.closed:
            self._socket.disable_monitor()
        self._monitor.close()
