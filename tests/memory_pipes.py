"""Queues of `memory_transport.py`, and the simulated network that messages pass between hosts.

Invariants:
- a pipe is one direction of a connection: in order, and bounded, messages in flight included;
- with `Roads`, a model of the network between hosts, messages take time; a cut road delays them and loses
  none; a reset loses messages in flight, and of those that were not read yet as many as the roads decide.
"""

from __future__ import annotations

import asyncio
import contextvars
import math
from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from seer.common.errors import Unreachable
from seer.common.net.transport.base import FAIR_EVERY, SEND_SECONDS, Frame

T = TypeVar("T")


class Roads(Protocol):
    """A model of the network between hosts: latency, cuts, resets. Times are the running loop's."""

    def arrival(self, source: str, target: str) -> float:
        """Return when a message that is sent now arrives; `math.inf` while the road is cut."""
        ...

    def joined(self, one: str, other: str) -> bool:
        """Return whether these hosts can connect now."""
        ...

    def pause(self) -> float:
        """Return the seconds until the next attempt to connect."""
        ...

    def kept(self, unread: int) -> int:
        """Return how many of the messages that arrived unread survive a reset."""
        ...

    def saw(self, fate: str, endpoint: str, upward: bool, frames: list[Frame]) -> None:
        """Record a message that was `sent`, is `held` by a cut, or was `lost` in a reset."""
        ...


class Network(Protocol):
    """What a pipe needs of its network: its roads, and a context that belongs to no simulated process."""

    roads: Roads | None
    context: contextvars.Context


class Queue(Generic[T]):
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
        """Return whether a sender has to wait."""
        return self.bound is not None and len(self._items) >= self.bound

    def push(self, item: T) -> None:
        """Add an item, whatever the bound."""
        self._items.append(item)
        self._wake()

    def pop(self) -> T:
        """Take the oldest item; there must be one."""
        item = self._items.popleft()
        self._wake()
        return item

    def discard(self, item: T, count: int) -> None:
        """Remove the last `count` entries that are this very item."""
        kept: deque[T] = deque()
        while self._items:
            other = self._items.pop()
            if other is item and count > 0:
                count -= 1
            else:
                kept.appendleft(other)
        self._items = kept

    async def put(self, item: T) -> None:
        """Add an item once there is room. Raises `Unreachable`: closed, or full for `SEND_SECONDS`."""
        if self.full():
            await self._room()
        if self.closed:
            raise Unreachable(f"{self._name}: closed")
        self.push(item)

    async def get(self) -> T:
        """Take the oldest item once there is one. Raises `Unreachable` when closed."""
        self._taken += 1
        if self._taken % FAIR_EVERY == 0:
            await asyncio.sleep(0)
        while not self._items and not self.closed:
            await self._change()
        if self.closed:
            raise Unreachable(f"{self._name}: closed")
        return self.pop()

    def close(self) -> None:
        """Close the queue: all waiting `put` and `get` raise `Unreachable`."""
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


class Pipe(Queue[list[Frame]]):
    """One direction of a connection: the queue holds what arrived; other messages are in flight, or wait for
    a connection.

    `on_arrival` is called for each message that arrives, `on_end` after the last message of a closed sender.
    """

    def __init__(self, network: Network, endpoint: str, bound: int, *, upward: bool) -> None:
        super().__init__(endpoint, bound)
        self.on_arrival: Callable[[], None] = _nothing
        self.on_end: Callable[[], None] = _nothing
        self._network = network
        self._upward = upward
        self._road: tuple[str, str] | None = None
        self._under_way: deque[tuple[float, list[Frame] | None]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def full(self) -> bool:
        """See `Queue.full`; messages in flight count."""
        return self.bound is not None and len(self._items) + len(self._under_way) >= self.bound

    def push(self, item: list[Frame]) -> None:
        """Send a message, whatever the bound."""
        self._tell("sent", item)
        self._send(item)

    def end(self) -> None:
        """Close the sender's side: what was sent still arrives, and then `on_end` is called."""
        if self._road is None:
            self.lose(len(self._items))
        else:
            self._send(None)

    def open(self, source: str, target: str) -> None:
        """Connect: messages that waited are sent first."""
        self._road = (source, target)
        waiting, self._under_way = self._under_way, deque()
        for _, item in waiting:
            self._send(item)

    def clear(self) -> None:
        """Drop what arrived and was not read."""
        self._items.clear()
        self._wake()

    def travels(self, source: str, target: str) -> bool:
        """Return whether this pipe is connected from `source` to `target`."""
        return self._road == (source, target)

    def halt(self) -> None:
        """Hold messages in flight: the road was cut."""
        self._under_way = deque((math.inf, item) for _, item in self._under_way)
        for _, item in self._under_way:
            self._tell("held", item)

    def resume(self) -> None:
        """Send what was held: the road is repaired."""
        if self._road is not None:
            self.open(*self._road)

    def lose(self, kept: int = 0) -> int:
        """Disconnect: messages in flight are lost, and unread ones but the first `kept`; return how many
        of these.
        """
        self._road = None
        for _, item in self._under_way:
            self._tell("lost", item)
        self._under_way.clear()
        gone = max(0, len(self._items) - kept)
        for _ in range(gone):
            self._tell("lost", self._items.pop())
        self._wake()
        return gone

    def _send(self, item: list[Frame] | None) -> None:
        roads = self._network.roads
        when = asyncio.get_running_loop().time()
        if self._road is None:
            when = math.inf
        elif roads is not None:
            when = max(roads.arrival(*self._road), self._under_way[-1][0] if self._under_way else when)
        if when <= asyncio.get_running_loop().time() and not self._under_way:
            self._arrive(item)
            return
        if when == math.inf and self._road is not None:
            self._tell("held", item)
        self._under_way.append((when, item))
        self._await_next()

    def _await_next(self) -> None:
        if self._timer is None and self._under_way and self._under_way[0][0] < math.inf:
            # Not in a simulated process's context: the network runs on while processes are stopped.
            self._timer = asyncio.get_running_loop().call_at(
                self._under_way[0][0], self._due, context=self._network.context
            )

    def _due(self) -> None:
        self._timer = None
        now = asyncio.get_running_loop().time()
        while self._under_way and self._under_way[0][0] <= now:
            self._arrive(self._under_way.popleft()[1])
        self._await_next()

    def _arrive(self, item: list[Frame] | None) -> None:
        if item is None:
            self.on_end()
        else:
            super().push(item)
            self.on_arrival()

    def _tell(self, fate: str, item: list[Frame] | None) -> None:
        if self._network.roads is not None and item is not None:
            self._network.roads.saw(fate, self._name, self._upward, item)


def _nothing() -> None:
    pass
