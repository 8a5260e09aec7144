"""A transport that injects faults into another one, reproducible by seed.

Invariants:
- the faults of a socket are a function of (seed, socket kind, endpoint, identity), of how many such
  sockets were made before and of how many messages it sent, not of what other sockets do;
- without `reorder`, a delayed message never overtakes another of its socket;
- while an endpoint is partitioned off, nothing passes between it and this transport's sockets.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from seer.common.clock import Clock
from seer.common.errors import Unreachable
from seer.common.net.keys import User
from seer.common.net.transport.base import Frame, Publisher, Router, Socket, Subscriber, Transport

_Send = Callable[[], Awaitable[None]]
_Late = asyncio.Task[None]


class Faults(msgspec.Struct, frozen=True, kw_only=True):
    """What happens to each message sent: probabilities, and the longest delay in seconds."""

    drop: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    delay_seconds: float = 0.0


class FaultyTransport:
    """Wraps the transport of one node; each node of a test gets its own."""

    def __init__(self, inner: Transport, seed: int, plan: Faults, clock: Clock) -> None:
        self.plan = plan
        self.clock = clock
        self.counters = {"sent": 0, "dropped": 0, "duplicated": 0, "delayed": 0}
        self._inner = inner
        self._seed = seed
        self._cut: set[str] = set()
        self._made: Counter[tuple[object, ...]] = Counter()
        self._late: set[_Late] = set()

    def partition(self, endpoint: str, on: bool) -> None:
        """Cut this node off from `endpoint` (as passed to the socket, or as bound), or heal it."""
        (self._cut.add if on else self._cut.discard)(endpoint)

    def is_cut(self, endpoint: str) -> bool:
        """Say whether messages to and from `endpoint` are lost now."""
        return endpoint in self._cut

    async def router(self, endpoint: str, queue: int | None = None) -> Router:
        """Bind a ROUTER."""
        return _FaultyRouter(await self._inner.router(endpoint, queue), self)

    async def dealer(self, endpoint: str, identity: bytes) -> Socket:
        """Connect a DEALER."""
        return _FaultyDealer(await self._inner.dealer(endpoint, identity), self, endpoint, identity)

    async def publisher(self, endpoint: str) -> Publisher:
        """Bind a PUB."""
        return _FaultyPublisher(await self._inner.publisher(endpoint), self)

    async def subscriber(self, endpoint: str) -> Subscriber:
        """Connect a SUB."""
        return _FaultySubscriber(await self._inner.subscriber(endpoint), self, endpoint)

    async def close(self) -> None:
        """Close the inner transport; delayed messages are lost."""
        for task in self._late:
            task.cancel()
        await self._inner.close()

    def random(self, *socket: object) -> random.Random:
        """Return the generator of one socket's faults."""
        self._made[socket] += 1
        return random.Random(f"{self._seed}/{socket}/{self._made[socket]}")

    def later(self, seconds: float, after: _Late | None, send: _Send) -> _Late:
        """Perform a send after `seconds`, and not before `after` is done."""
        task = asyncio.get_running_loop().create_task(self._send_later(seconds, after, send))
        self._late.add(task)
        task.add_done_callback(self._late.discard)
        return task

    async def _send_later(self, seconds: float, after: _Late | None, send: _Send) -> None:
        await self.clock.sleep(seconds)
        if after is not None:
            await asyncio.wait([after])
        try:
            await send()
        except Unreachable:
            self.counters["dropped"] += 1


class _Line:
    """The faults of what one socket sends."""

    def __init__(self, node: FaultyTransport, *socket: object) -> None:
        self._node = node
        self._random = node.random(*socket)
        self._last: _Late | None = None

    async def send(self, endpoint: str, send: _Send) -> None:
        plan, count = self._node.plan, self._node.counters
        lost, doubled, early, delay = (self._random.random() for _ in range(4))
        count["sent"] += 1
        if lost < plan.drop or self._node.is_cut(endpoint):
            count["dropped"] += 1
            return
        copies = 2 if doubled < plan.duplicate else 1
        count["duplicated"] += copies - 1
        seconds = delay * plan.delay_seconds
        overtakes = early < plan.reorder
        after = None if overtakes or self._last is None or self._last.done() else self._last
        for _ in range(copies):
            if seconds == 0.0 and after is None:
                await send()
                continue
            count["delayed"] += 1
            late = self._node.later(seconds, after, send)
            if not overtakes:
                after = self._last = late


class _FaultyRouter:
    def __init__(self, inner: Router, node: FaultyTransport) -> None:
        self.endpoint = inner.endpoint
        self._inner = inner
        self._node = node
        self._line = _Line(node, "router", inner.endpoint)

    async def send(self, identity: bytes, frames: Sequence[Frame]) -> None:
        await self._line.send(self.endpoint, lambda: self._inner.send(identity, frames))

    async def recv(self) -> tuple[bytes, list[Frame], User | None]:
        while True:
            message = await self._inner.recv()
            if not self._node.is_cut(self.endpoint):
                return message

    def close(self) -> None:
        self._inner.close()


class _FaultyPublisher:
    def __init__(self, inner: Publisher, node: FaultyTransport) -> None:
        self.endpoint = inner.endpoint
        self._inner = inner
        self._line = _Line(node, "publisher", inner.endpoint)

    async def send(self, frames: Sequence[Frame]) -> None:
        await self._line.send(self.endpoint, lambda: self._inner.send(frames))

    def close(self) -> None:
        self._inner.close()


class _FaultySubscriber:
    def __init__(self, inner: Subscriber, node: FaultyTransport, endpoint: str) -> None:
        self._inner = inner
        self._node = node
        self._endpoint = endpoint

    async def recv(self) -> list[Frame]:
        while True:
            frames = await self._inner.recv()
            if not self._node.is_cut(self._endpoint):
                return frames

    def close(self) -> None:
        self._inner.close()


class _FaultyDealer(_FaultySubscriber):
    def __init__(self, inner: Socket, node: FaultyTransport, endpoint: str, identity: bytes) -> None:
        super().__init__(inner, node, endpoint)
        self._socket = inner
        self._line = _Line(node, "dealer", endpoint, identity)

    @property
    def problem(self) -> str:
        return self._socket.problem

    async def send(self, frames: Sequence[Frame]) -> None:
        await self._line.send(self._endpoint, lambda: self._socket.send(frames))
