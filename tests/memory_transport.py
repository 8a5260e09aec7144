"""Sockets inside one process and one event loop, for clusters that run in virtual time.

Invariants beyond those of `common/net/transport/base.py`:
- only asyncio primitives: nothing happens outside the event loop, so a run is deterministic;
- what was queued to a ROUTER that closes is lost, as with a process that dies; what was queued to an
  endpoint nobody binds yet waits, as in ZeroMQ;
- a DEALER with a known identity replaces the older one;
- `disconnect` breaks a process's connections as a network does: messages in flight are lost; after
  `reconnect` the same sockets work again;
- with `Roads` (`memory_pipes.py`), messages take time, in order per connection and direction. A cut road
  delays them and loses none; a connection that is reset loses messages in flight and some of those unread, and connects
  again by itself. What a closed socket had sent before still arrives.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Sequence

from memory_pipes import Pipe, Queue, Roads

from seer.common.errors import ConfigError, Unreachable
from seer.common.net.keys import ANYONE, User
from seer.common.net.transport.base import Frame

QUEUE_MESSAGES = 1_000
"""Bound per peer and direction."""

STREAM_MESSAGES = 100_000
"""Bound per subscriber."""

_FIRST_FREE_PORT = 49152


class MemoryNetwork:
    """The endpoints that the transports of one simulated cluster share."""

    def __init__(self, roads: Roads | None = None, queue: int | None = None) -> None:
        self.roads = roads
        self.queue = QUEUE_MESSAGES if queue is None else queue
        self.context = contextvars.copy_context()
        self.routers: dict[str, _MemoryRouter] = {}
        self.publishers: dict[str, _MemoryPublisher] = {}
        self.dealers: dict[str, list[_MemoryDealer]] = {}
        self.subscribers: dict[str, list[_MemorySubscriber]] = {}
        # With the other end's host; also connections of which only one end knows that the other is gone.
        self.connected: dict[_MemoryDealer | _MemorySubscriber, str] = {}
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

    def halt(self, source: str, target: str) -> None:
        """Hold messages in flight from one host to another: the road was cut."""
        for pipe in self._pipes(source, target):
            pipe.halt()

    def resume(self, source: str, target: str) -> None:
        """Send held messages, and connect what is not connected."""
        for pipe in self._pipes(source, target):
            pipe.resume()
        for dealers in self.dealers.values():
            for dealer in list(dealers):
                self.attempt(dealer)
        for subscribers in self.subscribers.values():
            for subscriber in list(subscribers):
                self.attempt(subscriber)

    def reset(self, one: str, other: str) -> None:
        """Break the connections between two hosts, as TCP does when nothing is acknowledged."""
        for link in self._links(one, other):
            link.reset()

    def attempt(self, link: _MemoryDealer | _MemorySubscriber) -> None:
        """Connect, after a pause, if it is not connected."""
        if self.roads is None:
            link.connect()
        elif link.missing:
            pause = self.roads.pause()
            asyncio.get_running_loop().call_later(pause, link.connect, context=self.context)

    def _links(self, one: str, other: str) -> list[_MemoryDealer | _MemorySubscriber]:
        return [link for link, far in self.connected.items() if {link.host, far} == {one, other}]

    def _pipes(self, source: str, target: str) -> list[Pipe]:
        links = self._links(source, target)
        return [pipe for link in links for pipe in link.pipes() if pipe.travels(source, target)]


class _MemoryDealer:
    problem = ""
    user: User = ANYONE

    def __init__(self, network: MemoryNetwork, host: str, endpoint: str, identity: bytes) -> None:
        self.identity = identity
        self.host = host
        self.up = Pipe(network, endpoint, network.queue, upward=True)
        self.down = Pipe(network, endpoint, network.queue, upward=False)
        self.up.on_arrival = self._arrived
        self.up.on_end = self.down.on_end = self._ended
        self._peers = network.dealers.setdefault(endpoint, [])
        self._peers.append(self)
        self._network = network
        self._endpoint = endpoint
        self._router: _MemoryRouter | None = None
        self._disconnected = False
        network.attempt(self)

    @property
    def missing(self) -> bool:
        """Whether it should be connected and is not."""
        return self._router is None and not self._disconnected and not self.down.closed

    def pipes(self) -> list[Pipe]:
        return [self.up, self.down]

    def links(self) -> list[_MemoryDealer]:
        return [] if self.down.closed else [self]

    def connect(self) -> None:
        """Connect if it is not connected and the network allows it."""
        router = self._network.routers.get(self._endpoint)
        if not self.missing or router is None:
            return
        roads = self._network.roads
        if roads is not None and not roads.joined(self.host, router.host):
            return
        self._router = router
        self._network.connected[self] = router.host
        router.join(self)
        self.down.open(router.host, self.host)
        self.up.open(self.host, router.host)

    def reset(self) -> None:
        """Break the connection; it connects again by itself."""
        router, self._router = self._router, None
        if router is None:
            return
        roads = self._network.roads
        kept_up, kept_down = (
            (roads.kept(len(self.up)), roads.kept(len(self.down))) if roads is not None else (0, 0)
        )
        del self._network.connected[self]
        router.arrived.discard(self, self.up.lose(kept_up))
        self.down.lose(kept_down)
        router.leave(self)
        self._network.attempt(self)

    def disconnect(self) -> None:
        self._disconnected = True
        self.reset()
        self.up.lose(len(self.up))  # what waited for a connection

    def reconnect(self) -> None:
        self._disconnected = False
        self._network.attempt(self)

    def _arrived(self) -> None:
        if self._router is not None:
            self._router.arrived.push(self)

    def _ended(self) -> None:
        """Disconnect: one side is gone, and all that it sent has arrived."""
        router, self._router = self._router, None
        if router is not None:
            del self._network.connected[self]
            router.leave(self)
        self.up.lose(len(self.up))
        self.down.lose(len(self.down))
        self._network.attempt(self)

    def lost(self, router: _MemoryRouter) -> None:
        """Handle that a router is gone; what it had sent still arrives."""
        if router is self._router:
            self.up.lose()
            self.down.end()

    async def send(self, frames: Sequence[Frame]) -> None:
        await self.up.put(list(frames))

    async def recv(self) -> list[Frame]:
        return await self.down.get()

    def close(self) -> None:
        if self in self._peers:
            self._peers.remove(self)
            self.up.closed = True
            self.up.end()
            self.down.close()
            if self._network.roads is None:
                self._ended()


class _MemoryRouter:
    def __init__(self, network: MemoryNetwork, host: str, endpoint: str, queue: int | None) -> None:
        self.endpoint = endpoint
        self.host = host
        self._bound = queue
        # One entry per message queued by a dealer: bounded by their queues.
        self.arrived: Queue[_MemoryDealer] = Queue(endpoint, None)
        self._network = network
        self._peers: dict[bytes, _MemoryDealer] = {}
        network.routers[endpoint] = self
        for dealer in self.links():
            network.attempt(dealer)

    def links(self) -> list[_MemoryDealer]:
        return list(self._network.dealers.get(self.endpoint, []))

    def join(self, dealer: _MemoryDealer) -> None:
        self._peers[dealer.identity] = dealer
        if self._bound is not None:
            dealer.down.bound = self._bound

    def leave(self, dealer: _MemoryDealer) -> None:
        if self._peers.get(dealer.identity) is dealer:
            del self._peers[dealer.identity]

    async def send(self, identity: bytes, frames: Sequence[Frame]) -> None:
        dealer = self._peers.get(identity)
        if dealer is None or self.arrived.closed:
            raise Unreachable(f"{self.endpoint}: no peer {identity!r} is connected")
        if dealer.down.closed:  # it is gone, and the router does not know yet
            return
        await dealer.down.put(list(frames))

    async def recv(self) -> tuple[bytes, list[Frame], User | None]:
        dealer = await self.arrived.get()
        return dealer.identity, dealer.up.pop(), dealer.user

    def close(self) -> None:
        if self._network.routers.get(self.endpoint) is self:
            del self._network.routers[self.endpoint]
            self.arrived.close()
            for dealer in self.links():
                dealer.up.clear()
            for link in list(self._network.connected):
                if isinstance(link, _MemoryDealer):
                    link.lost(self)


class _MemorySubscriber:
    def __init__(self, network: MemoryNetwork, host: str, endpoint: str) -> None:
        self.host = host
        self.queue = Pipe(network, endpoint, STREAM_MESSAGES, upward=False)
        self.queue.on_end = self.reset
        self._network = network
        self._endpoint = endpoint
        self._publisher: _MemoryPublisher | None = None
        self._disconnected = False
        self._peers = network.subscribers.setdefault(endpoint, [])
        self._peers.append(self)
        network.attempt(self)

    @property
    def missing(self) -> bool:
        """Whether it should be connected and is not."""
        return self._publisher is None and not self._disconnected and not self.queue.closed

    def pipes(self) -> list[Pipe]:
        return [self.queue]

    def links(self) -> list[_MemorySubscriber]:
        return [self]

    def connect(self) -> None:
        """Connect if it is not connected and the network allows it."""
        publisher, roads = self._network.publishers.get(self._endpoint), self._network.roads
        if not self.missing or publisher is None:
            return
        if roads is None or roads.joined(self.host, publisher.host):
            self._publisher = publisher
            self._network.connected[self] = publisher.host
            publisher.audience[self] = None
            self.queue.open(publisher.host, self.host)

    def reset(self) -> None:
        """Break the connection; it connects again by itself."""
        publisher, self._publisher = self._publisher, None
        if publisher is not None:
            del self._network.connected[self]
            publisher.audience.pop(self, None)
            self.queue.lose(len(self.queue))
            self._network.attempt(self)

    def disconnect(self) -> None:
        self._disconnected = True
        self.reset()

    def reconnect(self) -> None:
        self._disconnected = False
        self._network.attempt(self)

    async def recv(self) -> list[Frame]:
        return await self.queue.get()

    def close(self) -> None:
        if self in self._peers:
            self._peers.remove(self)
            self.queue.close()
            self.reset()


class _MemoryPublisher:
    def __init__(self, network: MemoryNetwork, host: str, endpoint: str) -> None:
        self.endpoint = endpoint
        self.host = host
        self.audience: dict[_MemorySubscriber, None] = {}
        self._network = network
        network.publishers[endpoint] = self
        for subscriber in self.links():
            network.attempt(subscriber)

    def links(self) -> list[_MemorySubscriber]:
        return list(self._network.subscribers.get(self.endpoint, []))

    def listeners(self) -> list[_MemorySubscriber]:
        """Return the connected subscribers."""
        return list(self.audience)

    async def send(self, frames: Sequence[Frame]) -> None:
        if self._network.publishers.get(self.endpoint) is not self:
            raise Unreachable(f"{self.endpoint}: closed")
        for subscriber in self.listeners():
            if not subscriber.queue.full():
                subscriber.queue.push(list(frames))

    def close(self) -> None:
        if self._network.publishers.get(self.endpoint) is self:
            del self._network.publishers[self.endpoint]
            for subscriber in self.listeners():
                subscriber.queue.end()


class MemoryTransport:
    """The sockets of one simulated process, on a host of the network; `user`: whose key it connects with."""

    def __init__(self, network: MemoryNetwork, host: str = "", user: User = ANYONE) -> None:
        self._network = network
        self._host = host
        self._user = user
        self._made: list[_MemoryRouter | _MemoryDealer | _MemoryPublisher | _MemorySubscriber] = []

    async def router(self, endpoint: str, queue: int | None = None) -> _MemoryRouter:
        """Bind a ROUTER; `ConfigError` when the endpoint is taken."""
        router = _MemoryRouter(self._network, self._host, self._network.claim(endpoint), queue)
        self._made.append(router)
        return router

    async def dealer(self, endpoint: str, identity: bytes) -> _MemoryDealer:
        """Connect a DEALER under `identity`."""
        dealer = _MemoryDealer(self._network, self._host, endpoint, identity)
        dealer.user = self._user
        self._made.append(dealer)
        return dealer

    async def publisher(self, endpoint: str) -> _MemoryPublisher:
        """Bind a PUB; `ConfigError` when the endpoint is taken."""
        publisher = _MemoryPublisher(self._network, self._host, self._network.claim(endpoint))
        self._made.append(publisher)
        return publisher

    async def subscriber(self, endpoint: str) -> _MemorySubscriber:
        """Connect a SUB to everything."""
        subscriber = _MemorySubscriber(self._network, self._host, endpoint)
        self._made.append(subscriber)
        return subscriber

    def disconnect(self) -> None:
        """Break every connection of this process; messages in flight are lost, sends to it fail."""
        for link in self._links():
            link.disconnect()

    def reconnect(self) -> None:
        """Connect again; what its peers tried to send meanwhile arrives, as with ZeroMQ's DEALER."""
        for link in self._links():
            link.reconnect()

    def _links(self) -> list[_MemoryDealer | _MemorySubscriber]:
        return [link for socket in self._made for link in socket.links()]

    async def close(self) -> None:
        """Close every socket made here."""
        for socket in self._made:
            socket.close()
