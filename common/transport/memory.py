"""Sockets inside one process and one event loop, for clusters that run in virtual time.

Invariants beyond `base`:
- only asyncio primitives: nothing happens outside the event loop, so a run is deterministic;
- what was queued to a ROUTER that closes is lost, as with a process that dies; what was queued to an
  endpoint nobody binds yet waits, as in ZeroMQ;
- a DEALER with a known identity replaces the older one;
- `disconnect` breaks a process's connections as a network does: what was under way is lost, and on the
  same sockets things go on after `reconnect` as if nothing had happened.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Generic, TypeVar

from seer.common.errors import ConfigError, Unreachable
from seer.common.transport.base import FAIR_EVERY, SEND_SECONDS, Frame

T = TypeVar("T")

QUEUE_MESSAGES = 1_000
"""Bound per peer and direction."""

STREAM_MESSAGES = 100_000
"""Bound per subscriber."""

_FIRST_FREE_PORT = 49152


class _Queue(Generic[T]):
    """A bounded queue that can be closed (asyncio's cannot before Python 3.13)."""

    def __init__(self, name: str, bound: int | None) -> None:
        self._items: deque[T] = deque()
        self.closed = False
        self._name = name
        self.bound = bound
        self._waiters: list[asyncio.Future[None]] = []
        self._taken = 0

    def __len__(self) -> int:
        return len(self._items)

    def full(self) -> bool:
        return self.bound is not None and len(self._items) >= self.bound

    def push(self, item: T) -> None:
        self._items.append(item)
        self._wake()

    def pop(self) -> T:
        item = self._items.popleft()
        self._wake()
        return item

    def clear(self) -> None:
        self._items.clear()
        self._wake()

    def discard(self, item: T) -> None:
        self._items = deque(other for other in self._items if other is not item)

    async def put(self, item: T) -> None:
        if self.full():
            await self._room()
        if self.closed:
            raise Unreachable(f"{self._name}: closed")
        self.push(item)

    async def get(self) -> T:
        self._taken += 1
        if self._taken % FAIR_EVERY == 0:
            await asyncio.sleep(0)
        while not self._items and not self.closed:
            await self._change()
        if self.closed:
            raise Unreachable(f"{self._name}: closed")
        return self.pop()

    def close(self) -> None:
        self.closed = True
        self._wake()

    async def _room(self) -> None:
        try:
            async with asyncio.timeout(SEND_SECONDS):
                while self.full() and not self.closed:
                    await self._change()
        except TimeoutError as error:
            raise Unreachable(f"{self._name}: peer reads nothing for {SEND_SECONDS:g} s") from error

    async def _change(self) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)


class MemoryNetwork:
    """The endpoints that the transports of one simulated cluster share."""

    def __init__(self) -> None:
        self.routers: dict[str, _MemoryRouter] = {}
        self.publishers: dict[str, _MemoryPublisher] = {}
        self.dealers: dict[str, list[_MemoryDealer]] = {}
        self.subscribers: dict[str, list[_MemorySubscriber]] = {}
        self._next_port = _FIRST_FREE_PORT

    def claim(self, endpoint: str) -> str:
        """Return `endpoint` with a real port; `ConfigError` when it is taken."""
        if endpoint.endswith(":0"):
            endpoint = f"{endpoint[:-1]}{self._next_port}"
            self._next_port += 1
        if endpoint in self.routers or endpoint in self.publishers:
            raise ConfigError(
                f"cannot bind {endpoint}: another process listens there; configure another port"
            )
        return endpoint


class _MemoryDealer:
    def __init__(self, network: MemoryNetwork, endpoint: str, identity: bytes) -> None:
        self.identity = identity
        self.up: _Queue[list[Frame]] = _Queue(endpoint, QUEUE_MESSAGES)
        self.down: _Queue[list[Frame]] = _Queue(endpoint, QUEUE_MESSAGES)
        self._peers = network.dealers.setdefault(endpoint, [])
        self._peers.append(self)
        self._network = network
        self._endpoint = endpoint
        self.connected = False
        self.connect()

    def _router(self) -> _MemoryRouter | None:
        return self._network.routers.get(self._endpoint)

    def links(self) -> list[_MemoryDealer]:
        return [] if self.up.closed else [self]

    def connect(self) -> None:
        if not self.connected and (router := self._router()):
            router.join(self)
        self.connected = True

    def disconnect(self) -> None:
        self.connected = False
        self.up.clear()
        self.down.clear()
        if router := self._router():
            router.leave(self)
            router.arrived.discard(self)

    async def send(self, frames: Sequence[Frame]) -> None:
        await self.up.put(list(frames))
        if self.connected and (router := self._router()):
            router.arrived.push(self)

    async def recv(self) -> list[Frame]:
        return await self.down.get()

    def close(self) -> None:
        if self in self._peers:
            self._peers.remove(self)
            self.up.close()
            self.down.close()
            if router := self._router():
                router.leave(self)


class _MemoryRouter:
    def __init__(self, network: MemoryNetwork, endpoint: str, queue: int | None) -> None:
        self.endpoint = endpoint
        self._bound = queue
        # One entry per message queued by a dealer: bounded by their queues.
        self.arrived: _Queue[_MemoryDealer] = _Queue(endpoint, None)
        self._network = network
        self._peers: dict[bytes, _MemoryDealer] = {}
        network.routers[endpoint] = self
        for dealer in self.links():
            if dealer.connected:
                self.join(dealer)

    def links(self) -> list[_MemoryDealer]:
        return self._network.dealers.get(self.endpoint, [])

    def join(self, dealer: _MemoryDealer) -> None:
        self._peers[dealer.identity] = dealer
        if self._bound is not None:
            dealer.down.bound = self._bound
        for _ in range(len(dealer.up)):
            self.arrived.push(dealer)

    def leave(self, dealer: _MemoryDealer) -> None:
        if self._peers.get(dealer.identity) is dealer:
            del self._peers[dealer.identity]

    async def send(self, identity: bytes, frames: Sequence[Frame]) -> None:
        dealer = self._peers.get(identity)
        if dealer is None or self.arrived.closed:
            raise Unreachable(f"{self.endpoint}: no peer {identity!r} is connected")
        await dealer.down.put(list(frames))

    async def recv(self) -> tuple[bytes, list[Frame]]:
        dealer = await self.arrived.get()
        return dealer.identity, dealer.up.pop()

    def close(self) -> None:
        if self._network.routers.get(self.endpoint) is self:
            del self._network.routers[self.endpoint]
            self.arrived.close()
            for dealer in self.links():
                dealer.up.clear()


class _MemorySubscriber:
    def __init__(self, network: MemoryNetwork, endpoint: str) -> None:
        self.queue: _Queue[list[Frame]] = _Queue(endpoint, STREAM_MESSAGES)
        self.connected = True
        self._peers = network.subscribers.setdefault(endpoint, [])
        self._peers.append(self)

    def links(self) -> list[_MemorySubscriber]:
        return [self]

    def connect(self) -> None:
        self.connected = True

    def disconnect(self) -> None:
        self.connected = False

    async def recv(self) -> list[Frame]:
        return await self.queue.get()

    def close(self) -> None:
        if self in self._peers:
            self._peers.remove(self)
            self.queue.close()


class _MemoryPublisher:
    def __init__(self, network: MemoryNetwork, endpoint: str) -> None:
        self.endpoint = endpoint
        self._network = network
        network.publishers[endpoint] = self

    def links(self) -> list[_MemorySubscriber]:
        return self._network.subscribers.get(self.endpoint, [])

    async def send(self, frames: Sequence[Frame]) -> None:
        if self._network.publishers.get(self.endpoint) is not self:
            raise Unreachable(f"{self.endpoint}: closed")
        for subscriber in self.links():
            if subscriber.connected and not subscriber.queue.full():
                subscriber.queue.push(list(frames))

    def close(self) -> None:
        if self._network.publishers.get(self.endpoint) is self:
            del self._network.publishers[self.endpoint]


class MemoryTransport:
    """The sockets of one simulated process."""

    def __init__(self, network: MemoryNetwork) -> None:
        self._network = network
        self._made: list[_MemoryRouter | _MemoryDealer | _MemoryPublisher | _MemorySubscriber] = []

    async def router(self, endpoint: str, queue: int | None = None) -> _MemoryRouter:
        """Bind a ROUTER; `ConfigError` when the endpoint is taken."""
        router = _MemoryRouter(self._network, self._network.claim(endpoint), queue)
        self._made.append(router)
        return router

    async def dealer(self, endpoint: str, identity: bytes) -> _MemoryDealer:
        """Connect a DEALER under `identity`."""
        dealer = _MemoryDealer(self._network, endpoint, identity)
        self._made.append(dealer)
        return dealer

    async def publisher(self, endpoint: str) -> _MemoryPublisher:
        """Bind a PUB; `ConfigError` when the endpoint is taken."""
        publisher = _MemoryPublisher(self._network, self._network.claim(endpoint))
        self._made.append(publisher)
        return publisher

    async def subscriber(self, endpoint: str) -> _MemorySubscriber:
        """Connect a SUB to everything."""
        subscriber = _MemorySubscriber(self._network, endpoint)
        self._made.append(subscriber)
        return subscriber

    def disconnect(self) -> None:
        """Break every connection of this process; what is under way is lost, sends to it fail."""
        for link in self._links():
            link.disconnect()

    def reconnect(self) -> None:
        """Connect again; what its peers tried to send meanwhile arrives, as with ZeroMQ's DEALER."""
        for link in self._links():
            link.connect()

    def _links(self) -> list[_MemoryDealer | _MemorySubscriber]:
        return [link for socket in self._made for link in socket.links()]

    async def close(self) -> None:
        """Close every socket made here."""
        for socket in self._made:
            socket.close()
