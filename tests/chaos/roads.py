"""The network between simulated processes: base latency, cuts that TCP bears for a while, resets.

What real ones do, as `common/net/transport/zmq.py` sets them up: a live connection loses nothing and keeps
its order; a road that is cut, even one way, holds up what is sent; after `GONE_SECONDS` without an
acknowledgement both ends give the connection up, what was under way is lost, and ZeroMQ connects again
without a word. A stopped process's kernel acknowledges for it.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence

from memory_transport import MemoryNetwork

from chaos.conversations import Way, named
from chaos.plan import Catch
from seer.common.net.transport.base import Frame
from seer.common.net.transport.zmq import GONE_SECONDS

CAUGHT_SECONDS = 0.001
"""A message that is caught is under way for at least this long, else nothing could befall it."""

BACKOFF_SECONDS = 3.0
"""Longest pause of TCP before it sends again what a cut held up for less than `GONE_SECONDS`."""


class ChaosRoads:
    """`memory.Roads` by seed. `seen` counts fates (`sent`, `held`, `lost`) by way.

    `on_catch` is called with a catch, source and target when its message has left and not arrived.
    """

    def __init__(self, seed: int, latency: float, jitter: float, catches: Sequence[Catch] = ()) -> None:
        self.network: MemoryNetwork
        self.seen: Counter[tuple[str, Way]] = Counter()
        self._random = random.Random(f"roads {seed}")
        self._latency, self._jitter = latency, jitter
        self._cuts: Counter[tuple[str, str]] = Counter()
        self.catches = [[each.nth, each] for each in catches]
        self.on_catch: Callable[[Catch, str, str], None]
        self._leaving: list[Catch] = []

    def arrival(self, source: str, target: str) -> float:
        """Return when a message that leaves now arrives."""
        if self._cuts[source, target]:
            return math.inf
        delay = self._latency + (self._random.random() * self._jitter if self._jitter else 0.0)
        caught, self._leaving = self._leaving, []
        for each in caught:
            self.on_catch(each, source, target)
            delay = max(delay, CAUGHT_SECONDS)
        return asyncio.get_running_loop().time() + delay

    @property
    def cut_off(self) -> bool:
        """Whether any road is cut now."""
        return any(self._cuts.values())

    def joined(self, one: str, other: str) -> bool:
        """Say whether a connection can be made now."""
        return not self._cuts[one, other] and not self._cuts[other, one]

    def pause(self) -> float:
        """Return the seconds until a missing connection is made."""
        return 2 * self._latency + self._random.choice((0.0, 0.0, 0.1, 0.3, 2.0))

    def kept(self, unread: int) -> int:
        """Return how many of the messages that arrived unread survive a reset."""
        return self._random.choice((0, unread, unread // 2))

    def saw(self, fate: str, endpoint: str, upward: bool, frames: list[Frame]) -> None:
        """Count a message."""
        way = (endpoint, upward, tag_of(frames))
        self.seen[fate, way] += 1
        if fate == "sent" and self.catches:
            self._catch(named(way))

    def _catch(self, way: Way) -> None:
        """Note what catches this message, if a connection takes it now."""
        self._leaving = []
        for pending in [each for each in self.catches if each[1].way == way]:
            pending[0] -= 1
            if not pending[0]:
                self.catches.remove(pending)
                self._leaving.append(pending[1])

    async def cut(self, pairs: list[tuple[str, str]], seconds: float) -> None:
        """Cut roads, each from one host to another, for a while."""
        loop = asyncio.get_running_loop()
        for pair in pairs:
            self._cuts[pair] += 1
            self.network.halt(*pair)
        if seconds > GONE_SECONDS:
            await asyncio.sleep(GONE_SECONDS)
            for pair in pairs:
                self.network.reset(*pair)
            await asyncio.sleep(seconds - GONE_SECONDS)
        else:
            began = loop.time()
            await asyncio.sleep(seconds)
            await asyncio.sleep(self._random.random() * min(loop.time() - began, BACKOFF_SECONDS))
        for pair in pairs:
            self._cuts[pair] -= 1
        for pair in pairs:
            if not self._cuts[pair]:
                self.network.resume(*pair)


def tag_of(frames: list[Frame]) -> str:
    """Return the name of a message; that of a published one follows a `Sequenced`."""
    head = bytes(frames[0][:32])
    at = head.find(b"\xa4type") + 5
    tag = head[at + 1 : at + 1 + (head[at] & 0x1F)].decode()
    return tag_of(frames[1:]) if tag == "Sequenced" and len(frames) > 1 else tag
