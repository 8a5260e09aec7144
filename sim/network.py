"""The links of a cluster's nodes, with all transfers that share them.

Each node has an incoming and an outgoing link of the same speed. The KV pool's memory lies on all nodes, and
its blocks anywhere in it, as Mooncake places them. So a fetch occupies the incoming link of the node that
asked, and an equal part of each outgoing link. A save occupies the outgoing link of its node, and the
incoming link of some node, each in turn. A transfer is done when each of its links has carried its part.

Invariants (tests/property/test_sim_network.py asserts them):
- a link is busy while something is left to carry, and transfers that share it advance at the same pace;
- every transfer is done once, and not before each of its links alone could have carried its part;
- time never goes back, and the same calls have the same results.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count, cycle

_EPSILON = 1e-9  # seconds: rounding errors


@dataclass(slots=True, eq=False)
class Transfer:
    """A transfer: the number of links that it still occupies, and what to call with the time of its end."""

    links: int
    done: Callable[[float], None]


class Link:
    """One direction of a node's link: what it carries shares its bandwidth equally."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._now = 0.0
        self._clock = 0.0  # seconds of the whole link that each transfer on it has had, if always on it
        self._ends: list[tuple[float, int, Transfer]] = []
        self._order = count()

    def add(self, transfer: Transfer, seconds: float) -> None:
        """Carry a part that takes this many seconds of the whole link, from the last `settle` on."""
        heapq.heappush(self._ends, (self._clock + seconds, next(self._order), transfer))

    def next_event(self) -> float:
        """Return when the next part has been carried; infinity if there is none."""
        if not self._ends:
            return math.inf
        return self._now + max(self._ends[0][0] - self._clock, 0.0) * len(self._ends)

    def settle(self, now: float) -> list[Transfer]:
        """Let time pass until `now`, not after `next_event`; return those whose part has been carried."""
        if self._ends:
            self._clock += (now - self._now) / len(self._ends)
        self._now = now
        carried = []
        while self._ends and self._ends[0][0] <= self._clock + _EPSILON:
            carried.append(heapq.heappop(self._ends)[2])
        return carried


class Network:
    """The links of so many `nodes`.

    `wake(network, link)` is called when a link's `next_event` may have changed; call `settle` at that time.
    """

    def __init__(self, nodes: int, wake: Wake) -> None:
        self._incoming = [Link(f"in {node}") for node in range(nodes)]
        self._outgoing = [Link(f"out {node}") for node in range(nodes)]
        self._places = cycle(self._incoming)
        self._wake = wake

    def fetch(self, node: int, seconds: float, now: float, done: Callable[[float], None]) -> None:
        """Bring KV to a node; `seconds`: what one link takes for all this KV."""
        part = seconds / len(self._outgoing)
        parts = [(self._incoming[node], seconds), *((link, part) for link in self._outgoing)]
        self._start(parts, now, done)

    def save(self, node: int, seconds: float, now: float, done: Callable[[float], None]) -> None:
        """Take KV from a node to the pool; `seconds`: what one link takes for all this KV."""
        self._start([(self._outgoing[node], seconds), (next(self._places), seconds)], now, done)

    def _start(self, parts: list[tuple[Link, float]], now: float, done: Callable[[float], None]) -> None:
        transfer = Transfer(len(parts), done)
        for link, seconds in parts:
            self._finish(link.settle(now), now)
            link.add(transfer, seconds)
            self._wake(self, link)

    def settle(self, link: Link, now: float) -> None:
        """Let time pass on a link until its `next_event`, and finish what is done then."""
        carried = link.settle(now)
        self._wake(self, link)
        self._finish(carried, now)

    def _finish(self, carried: list[Transfer], now: float) -> None:
        for transfer in carried:
            transfer.links -= 1
            if not transfer.links:
                transfer.done(now)


Wake = Callable[[Network, Link], None]
