"""Which trainer's request goes next where several wait: that of the one that had least for its weight.

What a trainer has is measured in engines: each chunk of its requests has the share of its engine's seats, or
of the engine's KV blocks if that is greater. A trainer's level is what it had so far, in engine-seconds, and
what it has now for `HORIZON` seconds more, over its weight; the lowest level goes first. The second part lets
a trainer that comes take freed room until it has its share, with little more than that in the end; the first
part makes shares exact over time, also where there are fewer seats than trainers, or weights differ much.

A trainer that waits and has less than half of its part of the engines does not wait until chunks end by
themselves: chunks of those that have more than their part end where they stand (`lacks`, `beyond`). What
these computed is kept, so that costs no more than a chunk's end does.

Invariants (tests/property/test_shares.py asserts them):
- trainers that wait all the time have engine-seconds in proportion to their weights, up to a bound that does
  not grow with time;
- whoever did not wait has no claim to what others had meanwhile: a trainer that begins to wait stands at
  least where the last one stood that was served (`floor`), under whatever name it comes; but never behind
  those that wait;
- while one trainer is known, only what that has is counted: nothing else is needed;
- memory is bounded by the trainers that wait or run, or by `MAX_REMEMBERED` names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from seer.common.types import Capacity

UNIT = 2**20
"""One engine; whole numbers, as sums and differences of them are exact."""

HORIZON = 10.0
"""Seconds, as long as a chunk of a large model takes. Were it much less than a chunk, shares would swing."""

MAX_REMEMBERED = 1024
"""Names of trainers that neither wait nor run and had more than others, so that they do not come back as new
ones. Beyond it they are forgotten."""


def cost(capacity: Capacity, blocks: int) -> int:
    """Return how much of its engine a chunk has that reserves so many KV blocks, in `UNIT`s."""
    return max(UNIT // capacity.max_num_seqs, UNIT * blocks // capacity.kv_blocks, 1)


class Share(msgspec.Struct, array_like=True):
    """What a trainer `has`, and `had` until `since` (monotonic seconds); `waits`: some request does."""

    weight: float
    had: float = 0.0
    has: int = 0
    since: float = 0.0
    waits: bool = False

    @property
    def active(self) -> bool:
        """Whether it waits or runs."""
        return self.waits or self.has > 0

    @property
    def level(self) -> float:
        """See the module's docstring."""
        return (self.had + HORIZON * self.has) / self.weight

    def settle(self, now: float) -> None:
        """Count what it has as had, until `now`."""
        self.had += self.has * max(0.0, now - self.since)
        self.since = now


class Shares(msgspec.Struct):
    """See the module's docstring. All of its state is in its fields, so it is its own snapshot.

    `weights` by trainer; others have 1. `floor`: the greatest of what trainers had, over their weight, when
    they were last served in their turn. `active` counts trainers that wait or run.
    """

    weights: dict[str, float] = {}
    floor: float = 0.0
    active: int = 0
    _of: dict[str, Share] = {}
    _most: int = MAX_REMEMBERED
    _active_weight: float = 0.0  # of all that are active; 0: it is to be summed

    def level(self, trainer: str) -> float:
        """Return what orders trainers: the lowest goes first."""
        share = self._of.get(trainer)
        return self.floor if share is None else share.level

    def lacks(self, trainer: str, total: int) -> int:
        """Return what a trainer that waits lacks of its part of `total`, if it has less than half of that."""
        part, has = self._part(trainer, total), self._of[trainer].has
        return part - has if 2 * has < part else 0

    def beyond(self, first: str, total: int, ending: Mapping[str, int]) -> dict[str, int]:
        """Return what trainers may give to `first`: what they have beyond their parts, and is not ending.

        But no trainer gives so much that it would be before `first` then, and take the same room again.
        """
        level, found = self.level(first), {}
        for name, share in self._of.items():
            if share.has:
                ahead = int((share.level - level) * share.weight / HORIZON) - 1
                more = min(share.has - self._part(name, total), ahead) - ending.get(name, 0)
                if more > 0:
                    found[name] = more
        return found

    def _part(self, trainer: str, total: int) -> int:
        if not self._active_weight:
            self._active_weight = sum(share.weight for share in self._of.values() if share.active)
        return int(total * self._of[trainer].weight / self._active_weight)

    def wants(self, trainer: str, now: float) -> None:
        """Note that a trainer's requests begin to wait."""
        share = self._of.get(trainer) or self._share(trainer, now)
        if share.waits:
            return
        if len(self._of) > 1:
            share.settle(now)
            share.had = max(share.had, self.floor * share.weight)
        if not share.active:
            self._enter()
        share.waits = True

    def content(self, trainer: str) -> None:
        """Note that a trainer has no more requests that wait."""
        share = self._of[trainer]
        share.waits = False
        if not share.has:
            self._leave()

    def takes(self, trainer: str, cost: int, now: float, lowest: float = math.inf) -> None:
        """Note that a chunk of a trainer begins; `lowest`: the level of another whose turn it is."""
        share = self._of.get(trainer)
        if share is None:
            share = self._share(trainer, now)
        if len(self._of) > 1:
            share.settle(now)
            self.floor = max(self.floor, min(share.had / share.weight, lowest))
        if not share.active:
            self._enter()
        share.has += cost

    def gives(self, trainer: str, cost: int, now: float) -> None:
        """Note that a chunk which began with this cost has ended."""
        if not cost:
            return  # it began before there were shares
        share = self._of[trainer]
        if len(self._of) > 1:
            share.settle(now)
        share.has -= cost
        if not share.has and not share.waits:
            self._leave()

    def _enter(self) -> None:
        self.active, self._active_weight = self.active + 1, 0.0

    def _leave(self) -> None:
        self.active, self._active_weight = self.active - 1, 0.0
        if not self.active:  # nobody had anything at the cost of others
            self._of, self.floor, self._most = {}, 0.0, MAX_REMEMBERED

    def _share(self, trainer: str, now: float) -> Share:
        """Return a new trainer's share."""
        if len(self._of) == 1:
            for alone in self._of.values():  # what it had, it had at nobody's cost
                alone.since = now
                self.floor = max(self.floor, alone.had / alone.weight)
        if len(self._of) >= self._most:
            self._forget()
        weight = self.weights.get(trainer, 1.0)
        share = self._of[trainer] = Share(weight, self.floor * weight, since=now)
        return share

    def _forget(self) -> None:
        """Forget who is not active and would come back as it was; if many are left, all not active."""
        ahead = {
            name: each
            for name, each in self._of.items()
            if each.active or each.had / each.weight > self.floor
        }
        if len(ahead) - self.active > MAX_REMEMBERED // 2:
            ahead = {name: each for name, each in ahead.items() if each.active}
        self._of = ahead
        self._most = max(MAX_REMEMBERED, 2 * len(ahead))
