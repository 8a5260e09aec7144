"""How long peers have been silent, in time that this process could have heard them: pure.

Invariants (tests/unit/test_liveness.py):
- a stall of our own is never taken for the silence of others: however long it took, a tick counts
  for `MOST_TICKS` at most, and what was sent meanwhile is read before that many ticks are over;
- a peer is told silent once; it is unknown then until it is heard again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

MOST_TICKS = 2.0
"""Ticks that one tick counts for at most: a loop that is merely busy is a little late."""


class Liveness(Generic[K]):
    """Peers by any key; `seconds` of silence are too many, `tick_seconds` pass between two `tick`s."""

    def __init__(self, seconds: float, tick_seconds: float) -> None:
        self._seconds = seconds
        self._most = MOST_TICKS * tick_seconds
        self._listened = 0.0
        self._last_tick: float | None = None
        self._heard: OrderedDict[K, float] = OrderedDict()

    def heard(self, peer: K) -> None:
        """Note a sign of life."""
        self._heard[peer] = self._listened
        self._heard.move_to_end(peer)

    def forget(self, peer: K) -> None:
        """Watch a peer no more; an unknown one is ignored."""
        self._heard.pop(peer, None)

    def tick(self, now: float) -> list[K]:
        """Let time pass until `now` (monotonic seconds); return who has been silent for too long."""
        passed = 0.0 if self._last_tick is None else now - self._last_tick
        self._last_tick = now
        self._listened += min(passed, self._most)
        silent: list[K] = []
        for peer, heard in self._heard.items():
            if self._listened - heard <= self._seconds:
                break
            silent.append(peer)
        for peer in silent:
            del self._heard[peer]
        return silent
