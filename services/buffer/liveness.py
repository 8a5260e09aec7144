"""How long peers have been silent, counting only time in which this process could receive: pure.

Invariants (tests/unit/test_liveness.py):
- a stall of this process does not count as silence of its peers: a tick counts for `MAX_TICKS` at most,
  however late it is, and messages that arrived during the stall are read before so many ticks are over;
- a silent peer is returned once; then it is unknown until its next message.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

MAX_TICKS = 2.0
"""Ticks that one tick counts for at most: more than one, as a busy loop is a little late."""


class Liveness(Generic[K]):
    """Peers by any key. `seconds`: allowed silence; `tick_seconds`: time between two `tick`s."""

    def __init__(self, seconds: float, tick_seconds: float) -> None:
        self._seconds = seconds
        self._max_step = MAX_TICKS * tick_seconds
        self._elapsed = 0.0
        self._last_tick: float | None = None
        self._last_message: OrderedDict[K, float] = OrderedDict()

    def received(self, peer: K) -> None:
        """Note that a peer sent something."""
        self._last_message[peer] = self._elapsed
        self._last_message.move_to_end(peer)

    def forget(self, peer: K) -> None:
        """Stop watching a peer; an unknown one is ignored."""
        self._last_message.pop(peer, None)

    def tick(self, now: float) -> list[K]:
        """Advance to `now` (monotonic seconds); return the peers that have been silent for too long."""
        passed = 0.0 if self._last_tick is None else now - self._last_tick
        self._last_tick = now
        self._elapsed += min(passed, self._max_step)
        silent: list[K] = []
        for peer, last_message in self._last_message.items():
            if self._elapsed - last_message <= self._seconds:
                break
            silent.append(peer)
        for peer in silent:
            del self._last_message[peer]
        return silent
