"""Which engines copy a stream of weights from which: a tree, since the buffer should not feed all. Pure.

Nodes fetch a stream in the order in which their first engines were told to. The buffer feeds the first
`FAN_OUT` nodes, and each node the next `FAN_OUT` that no other feeds. On each node one engine fetches, and
the others take its copy. Engines that have loaded a stream keep their place, as they keep their copy: those
that join later go on with the tree, and may ask `SPARE` more, as the buffer may have lost the stream.

Invariants (tests/unit/test_fan_out.py and tests/property/test_fan_out.py):
- an engine's holders were told before it, so nobody waits for an engine that waits for it;
- until an engine has loaded the stream or leaves, at most `FAN_OUT` nodes have an engine with no holder, and
  at most `FAN_OUT` nodes name an engine of another node first;
- an engine that says no endpoint, as one on the buffer's own machine, is nobody's holder, and has none;
- a stream's order is forgotten with the last engine of it, or once other weights are live.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import msgspec
from msgspec import field

from seer.common.weights.lora import inner_source
from seer.common.wire import MAX_HOLDERS, SPOOL_SCHEME

FAN_OUT = 2
"""Nodes that the buffer feeds, and that each node feeds."""

SIBLINGS = 2
"""Engines of its own node that an engine asks: the one that fetches, and the next one if that is lost."""


SPARE = 2
"""Nodes beyond its branch that have all of a stream, and that an engine asks, too."""


class Place(msgspec.Struct, frozen=True):
    """Where an engine is, and where it sends its copies."""

    node: str
    endpoint: str


class FanOut(msgspec.Struct):
    """`_orders`: by source, the engines that have been told to fetch it and have not failed, in order.

    `_whole`: by source, those of them that have all of it.
    """

    _places: dict[str, Place] = field(default_factory=dict)
    _orders: dict[str, list[str]] = field(default_factory=dict)
    _whole: dict[str, set[str]] = field(default_factory=dict)
    _turn: int = 0

    def joined(self, name: str, node: str, endpoint: str) -> None:
        """Note where an engine is."""
        if node and endpoint:
            self._places[name] = Place(node, endpoint)

    def left(self, name: str) -> None:
        """Forget an engine."""
        self._places.pop(name, None)
        for source in list(self._orders):
            self.ended(name, source)

    def has(self, name: str, source: str) -> None:
        """Note that an engine has loaded a source, and keeps its copy."""
        if name in self._places and inner_source(source).startswith(SPOOL_SCHEME):
            order = self._orders.setdefault(source, [])
            if name not in order:
                order.append(name)
            self._whole.setdefault(source, set()).add(name)

    def ended(self, name: str, source: str) -> None:
        """Note that an engine has no copy of a source any more."""
        order = self._orders.get(source, [])
        if name in order:
            order.remove(name)
            self._whole.get(source, set()).discard(name)
        if not order:
            self._forget(source)

    def keep(self, sources: Collection[str]) -> None:
        """Forget all sources but these: engines delete their copies of others."""
        for source in self._orders.keys() - sources:
            self._forget(source)

    def _forget(self, source: str) -> None:
        self._orders.pop(source, None)
        self._whole.pop(source, None)

    def holders(self, name: str, source: str) -> tuple[str, ...]:
        """Return the endpoints of the engines to copy a stream from, in turn, and note that `name` does."""
        mine = self._places.get(name)
        if mine is None or not inner_source(source).startswith(SPOOL_SCHEME):
            return ()
        order = self._orders.setdefault(source, [])
        if name not in order:
            order.append(name)
        earlier = [self._places[each] for each in order[: order.index(name)]]
        siblings = [place.endpoint for place in earlier if place.node == mine.node]
        above = [place.endpoint for place in _above(mine, earlier)]
        whole = self._whole.get(source, set())
        others = {
            self._places[each].node: self._places[each].endpoint
            for each in reversed(order[: order.index(name)])
            if each in whole
        }
        spare = [each for each in others.values() if each not in (*siblings, *above)]
        if spare:  # not the same ones for all, nor for one that asks again
            self._turn = (self._turn + 1) % len(spare)
            spare = spare[self._turn :] + spare[: self._turn]
        return (*siblings[:SIBLINGS], *above, *spare[:SPARE])[:MAX_HOLDERS]


def _above(mine: Place, earlier: list[Place]) -> Iterator[Place]:
    """Return the first engine of each node between this one and the buffer, the nearest first."""
    first = {place.node: place for place in [mine, *reversed(earlier)]}
    nodes = list(dict.fromkeys(place.node for place in [*earlier, mine]))
    number = nodes.index(mine.node)
    while number >= FAN_OUT:
        number = number // FAN_OUT - 1
        yield first[nodes[number]]
