"""The ZeroMQ transport, over TCP and IPC.

Invariants beyond `base`:
- a peer whose host vanishes is noticed by TCP itself, even while Python is busy: within about
  `GONE_SECONDS` a ROUTER does not know it any more, and sends to it are `Unreachable`. A process that hangs
  is noticed by the services, by its silence;
- a connection with a known identity replaces the older one;
- an address in use is a `ConfigError`, for IPC too, where ZeroMQ itself would take it over;
- `close` leaves no IPC socket file behind;
- with keys, TCP sockets are CURVE's (`curve.py`); without, none is bound where other machines reach it,
  unless that is asked for.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import socket as sockets
import stat
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import zmq
import zmq.asyncio

from seer.common.endpoints import check_endpoint, is_local
from seer.common.errors import ConfigError, Unreachable
from seer.common.net.keys import Keys, User, split_key
from seer.common.net.transport import curve
from seer.common.net.transport.base import FAIR_EVERY, SEND_SECONDS, Frame
from seer.common.wire.codec import Limits

GONE_SECONDS = 10
"""A host that acknowledges neither data nor probes of an idle connection for this long is gone.

TCP keepalive, not ZMTP heartbeats: libzmq 4.3.5 aborts the whole process when one is due on a connection
that broke while its full queue was not read (`!_io_error`), which any peer can bring about.
"""

PROBE_SECONDS = 2
"""Interval of probes of an idle connection, after `GONE_SECONDS` / 2 of silence."""

LINGER_MS = 1_000
"""Last messages (`Goodbye`, `Refused`) get this long to leave when a socket is closed."""

RECONNECT_MS = (100, 500)
"""First and longest wait before connecting again: who waits for a restarted service waits so much longer."""

QUEUE_MESSAGES = 1_000
"""Bound per peer on DEALER and ROUTER: far above the chunks an engine can hold."""

STREAM_MESSAGES = 100_000
"""Bound per subscriber: small messages, and opening a rollout publishes thousands at once."""

SMALL_BYTES = 64 * 1024
"""Frames up to this size are copied, which is cheaper than sharing their memory with the IO thread."""

QUEUE_BYTES = 64 * 2**20
"""Bound per peer of a ROUTER on the bytes of large frames that libzmq has not yet given to the kernel, a
single larger message apart. libzmq itself bounds only the number of messages, whatever their size."""

IO_THREADS = 4
"""A connection has one of them. A node that takes a stream of weights and sends it to two others would keep
one busy for 1 s a GB, and with keys, where a thread encrypts 155 to 285 MB/s, for 10 to 20 s."""

_ROOM_SECONDS = (0.001, 0.05)
_BIND_FIX = {
    zmq.EADDRINUSE: "another process listens there; stop it or configure another port",
    errno.ENODEV: "not an address of this machine; set endpoints.bind_host, e.g. to '*'",
    zmq.EADDRNOTAVAIL: "not an address of this machine; set endpoints.bind_host, e.g. to '*'",
}


class _ZmqSocket:
    """One socket; a ROUTER's identity frame is just its first frame."""

    def __init__(self, socket: zmq.asyncio.Socket, endpoint: str) -> None:
        self._socket = socket
        self.endpoint = endpoint
        self._received = 0
        self._rescued: list[list[zmq.Frame]] = []

    async def send_frames(self, frames: Sequence[Frame | zmq.Frame]) -> None:
        """Send without blocking and try again while there is no room.

        A ROUTER is writable as soon as any peer is, so waiting for POLLOUT would not do.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + SEND_SECONDS
        pause, longest = _ROOM_SECONDS
        while True:
            try:
                # copy=False still copies frames below the socket's copy_threshold.
                await self._socket.send_multipart(frames, flags=zmq.NOBLOCK, copy=False)
            except zmq.Again as error:
                if loop.time() >= deadline:
                    raise Unreachable(
                        f"{self.endpoint}: peer reads nothing for {SEND_SECONDS:g} s"
                    ) from error
            except zmq.ZMQError as error:
                raise Unreachable(f"{self.endpoint}: {error.strerror}") from error
            else:
                return
            await asyncio.sleep(pause)
            pause = min(2 * pause, longest)

    async def recv_frames(self) -> list[zmq.Frame]:
        self._received += 1
        if self._received % FAIR_EVERY == 0:
            await asyncio.sleep(0)
        if self._rescued:
            return self._rescued.pop()
        receiving = cast("asyncio.Future[list[zmq.Frame]]", self._socket.recv_multipart(copy=False))
        try:
            frames = await receiving
        except zmq.ZMQError as error:
            raise Unreachable(f"{self.endpoint}: {error.strerror}") from error
        except asyncio.CancelledError as error:
            # Closing a socket cancels the future, not the task, that waits for it.
            task = asyncio.current_task()
            if self._socket.closed and not (task and task.cancelling()):
                raise Unreachable(f"{self.endpoint}: closed") from error
            if receiving.done() and not receiving.cancelled():
                # Cancelled between arrival and delivery: keep the message for the next call.
                self._rescued.append(receiving.result())
            raise
        return frames

    def close(self) -> None:
        """Close without waiting; queued messages get `LINGER_MS` to leave."""
        self._socket.close()


def _unpack(frames: list[zmq.Frame]) -> list[Frame]:
    return [frame.bytes if len(frame) <= SMALL_BYTES else frame.buffer for frame in frames]


class _StreamSocket(_ZmqSocket):
    """DEALER, PUB or SUB."""

    def __init__(self, socket: zmq.asyncio.Socket, endpoint: str, watch: curve.Watch | None = None) -> None:
        super().__init__(socket, endpoint)
        self._watch = watch

    @property
    def problem(self) -> str:
        return "" if self._watch is None else self._watch.problem

    async def send(self, frames: Sequence[Frame]) -> None:
        await self.send_frames(frames)

    async def recv(self) -> list[Frame]:
        return _unpack(await self.recv_frames())

    def close(self) -> None:
        """See `_ZmqSocket.close`."""
        if self._watch is not None:
            self._watch.close()
        super().close()


class _RouterSocket(_ZmqSocket):
    def __init__(self, socket: zmq.asyncio.Socket, endpoint: str, keys: Keys | None) -> None:
        super().__init__(socket, endpoint)
        self._keys = keys
        self._large: dict[bytes, deque[tuple[int, zmq.MessageTracker]]] = {}

    async def send(self, identity: bytes, frames: Sequence[Frame]) -> None:
        large = [index for index, frame in enumerate(frames) if len(frame) >= SMALL_BYTES]
        if not large:
            await self.send_frames([identity, *frames])
            return
        size = sum(len(frames[index]) for index in large)
        await self._wait_for_bytes(identity, size)
        tracked = [
            zmq.Frame(frame, track=True, copy=False) if len(frame) >= SMALL_BYTES else frame
            for frame in frames
        ]
        await self.send_frames([identity, *tracked])
        trackers = (cast("zmq.Frame", tracked[index]).tracker for index in large)
        self._large.setdefault(identity, deque()).append((size, zmq.MessageTracker(*trackers)))

    async def recv(self) -> tuple[bytes, list[Frame], User | None]:
        parts = await self.recv_frames()
        identity, *frames = _unpack(parts)
        return bytes(identity), frames, curve.sender(parts[-1], self._keys)

    async def _wait_for_bytes(self, identity: bytes, size: int) -> None:
        """Wait until `size` bytes fit into what is queued for a peer."""
        deadline = asyncio.get_running_loop().time() + SEND_SECONDS
        pause, longest = _ROOM_SECONDS
        while self._queued(identity) > 0 and self._queued(identity) + size > QUEUE_BYTES:
            if asyncio.get_running_loop().time() >= deadline:
                raise Unreachable(f"{self.endpoint}: peer reads nothing for {SEND_SECONDS:g} s")
            await asyncio.sleep(pause)
            pause = min(2 * pause, longest)

    def _queued(self, identity: bytes) -> int:
        for peer in [identity, *itertools.islice(self._large, 2)]:  # two others, to forget peers that left
            queue = self._large.get(peer)
            while queue and queue[0][1].done:
                queue.popleft()
            if queue is not None:
                del self._large[peer]
                if queue:  # to the end, so that all get their turn
                    self._large[peer] = queue
        return sum(size for size, _ in self._large.get(identity, ()))


class ZmqTransport:
    """Sockets of one ZeroMQ context; `bind_host` replaces the host of every TCP bind.

    `insecure`: it may bind beyond loopback without `keys`.
    """

    def __init__(
        self,
        bind_host: str = "",
        keys: Keys | None = None,
        *,
        insecure: bool = False,
    ) -> None:
        self._bind_host = bind_host
        self._keys = keys
        self._insecure = insecure
        self._context = zmq.asyncio.Context(IO_THREADS)
        self._authenticator: curve.Authenticator | None = None
        self._sockets: list[zmq.asyncio.Socket] = []
        self._guards: list[curve.Guard] = []
        self._files: dict[zmq.asyncio.Socket, Path] = {}

    async def router(self, endpoint: str, queue: int | None = None) -> _RouterSocket:
        """Bind a ROUTER; `ConfigError` when it cannot."""
        socket = self._socket(zmq.ROUTER, endpoint)
        if queue is not None:
            socket.setsockopt(zmq.SNDHWM, queue)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        bound = self._bind(socket, endpoint)
        return _RouterSocket(socket, bound, self._keys)

    async def dealer(self, endpoint: str, identity: bytes) -> _StreamSocket:
        """Connect a DEALER under `identity` (1 to 255 bytes, the first not zero).

        Raises `Unreachable` while this process may open no more files, as a flood of connections may have it.
        """
        socket = self._socket(zmq.DEALER, endpoint)
        socket.setsockopt(zmq.IDENTITY, identity)
        try:
            watch = curve.Watch(socket) if endpoint.startswith("tcp://") else None
        except zmq.ZMQError as error:
            socket.close(linger=0)
            raise _no_file(endpoint, error) from error
        return _StreamSocket(self._connect(socket, endpoint), endpoint, watch)

    async def publisher(self, endpoint: str) -> _StreamSocket:
        """Bind a PUB; `ConfigError` when it cannot."""
        socket = self._socket(zmq.PUB, endpoint)
        return _StreamSocket(socket, self._bind(socket, endpoint))

    async def subscriber(self, endpoint: str) -> _StreamSocket:
        """Connect a SUB to everything."""
        socket = self._socket(zmq.SUB, endpoint)
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        return _StreamSocket(self._connect(socket, endpoint), endpoint)

    async def close(self) -> None:
        """Close all sockets and wait, at most `LINGER_MS`, for what they still send."""
        for socket, path in self._files.items():
            if not socket.closed:  # ZeroMQ leaves the file; once we close, another may bind there
                path.unlink(missing_ok=True)
        for guard in self._guards:
            guard.close()
        for socket in self._sockets:
            if not socket.closed:
                socket.disable_monitor()
                socket.close()
        if self._authenticator is not None:
            self._authenticator.stop()
            self._authenticator = None
        await asyncio.to_thread(self._context.term)

    def _socket(self, kind: int, endpoint: str) -> zmq.asyncio.Socket:
        check_endpoint("endpoint", endpoint)
        bound = STREAM_MESSAGES if kind in (zmq.PUB, zmq.SUB) else QUEUE_MESSAGES
        try:
            socket = self._context.socket(kind)
        except zmq.ZMQError as error:
            raise _no_file(endpoint, error) from error
        self._sockets = [*(made for made in self._sockets if not made.closed), socket]
        for option, value in (
            (zmq.SNDHWM, bound),
            (zmq.RCVHWM, bound),
            (zmq.LINGER, LINGER_MS),
            (zmq.TCP_KEEPALIVE, 1),
            (zmq.TCP_KEEPALIVE_IDLE, GONE_SECONDS // 2),
            (zmq.TCP_KEEPALIVE_INTVL, PROBE_SECONDS),
            (zmq.TCP_KEEPALIVE_CNT, GONE_SECONDS // 2 // PROBE_SECONDS),
            (zmq.TCP_MAXRT, GONE_SECONDS * 1000),
            (zmq.RECONNECT_IVL, RECONNECT_MS[0]),
            (zmq.RECONNECT_IVL_MAX, RECONNECT_MS[1]),
            (zmq.CONNECT_TIMEOUT, GONE_SECONDS * 1000),
            (zmq.MAXMSGSIZE, Limits().max_frame_bytes),
            (zmq.IPV6, int("[" in endpoint or "[" in self._bind_host)),
        ):
            socket.setsockopt(option, value)
        return socket

    def _connect(self, socket: zmq.asyncio.Socket, endpoint: str) -> zmq.asyncio.Socket:
        try:
            address, server = split_key(endpoint)
            if self._keys is not None and address.startswith("tcp://"):
                curve.present(socket, self._keys, server or self._keys.server)
            socket.connect(address)
        except zmq.ZMQError as error:
            socket.close(linger=0)
            raise ConfigError(f"cannot connect to {endpoint}: {error.strerror}") from error
        return socket

    def _bind(self, socket: zmq.asyncio.Socket, endpoint: str) -> str:
        """Bind and return `endpoint` with the real port."""
        endpoint, _ = split_key(endpoint)
        scheme, _, address = endpoint.partition("://")
        host, _, port = address.rpartition(":")
        target = endpoint
        try:
            if scheme == "ipc":
                _refuse_ipc_in_use(address)
            else:
                target = f"tcp://{self._bind_host or host}:{port}"
                self._secure(socket, target)
            socket.bind(target)
        except (zmq.ZMQError, OSError) as error:
            socket.close(linger=0)
            fix = _BIND_FIX.get(error.errno or 0, error.strerror)
            raise ConfigError(f"cannot bind {target} ({endpoint}): {fix}") from error
        if scheme == "ipc" and not address.startswith(("@", "*")):
            self._files[socket] = Path(address)
        if scheme == "tcp" and self._keys is not None:
            self._guards.append(curve.Guard(socket, self._context, target))
        real = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        return real if scheme == "ipc" else f"tcp://{host}:{real.rpartition(':')[2]}"

    def _secure(self, socket: zmq.asyncio.Socket, target: str) -> None:
        """Require keys of a TCP socket before it is bound, or refuse to bind it where strangers reach it."""
        if self._keys is None:
            if self._insecure or is_local(target):
                return
            socket.close(linger=0)
            raise ConfigError(
                f"{target} would be open to everyone who reaches it: give security.key and security.peers"
                " (`seer keys init`), or set security.insecure = true in a network that all may trust"
            )
        if self._keys.peers is None:
            socket.close(linger=0)
            raise ConfigError(f"{target}: security.peers is empty; give the list of keys that are admitted")
        if self._authenticator is None:
            self._authenticator = curve.Authenticator(self._context, self._keys.peers)
            self._authenticator.start()
        curve.serve(socket, self._keys)


def _no_file(endpoint: str, error: zmq.ZMQError) -> Unreachable:
    return Unreachable(f"{endpoint}: no socket: {error.strerror}: see who holds connections to this process")


def _refuse_ipc_in_use(path: str) -> None:
    """Raise `OSError` unless nothing, or the socket of a process that died, lies at `path`.

    ZeroMQ removes whatever lies there before it binds.
    """
    if path.startswith(("@", "*")) or not Path(path).exists():
        return
    if not stat.S_ISSOCK(Path(path).stat().st_mode):
        raise OSError(zmq.EINVAL, "a file that is no socket lies there; configure another path")
    with sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return
        raise OSError(zmq.EADDRINUSE, "in use")
