"""Whose silence ends the sleep that it asked for: those that nobody has heard for a lease.

Silence alone does not: a trainer whose event loop is blocked while it trains says nothing, and needs the
memory. So the server looks whether those that this names are connected, and ends the sleep of the others.
Whoever is connected has a lease again.
"""

from __future__ import annotations

from collections.abc import Collection

from seer.services.buffer.liveness import Liveness


class SleepLeases:
    """By share; `seconds` of silence are allowed, and `tick_seconds` are between two calls of `tick`."""

    def __init__(self, seconds: float, tick_seconds: float) -> None:
        self._heard: Liveness[str] = Liveness(seconds, tick_seconds)
        self._watched: set[str] = set()

    def heard(self, share: str) -> None:
        """Note a message of a trainer whose work counts to `share`."""
        if share in self._watched:
            self._heard.received(share)

    def tick(self, sleepers: Collection[str], now: float) -> list[str]:
        """Watch those that have engines sleep; return whose lease ended. A new one begins."""
        for share in self._watched.difference(sleepers):
            self._heard.forget(share)
        for share in set(sleepers) - self._watched:
            self._heard.received(share)
        silent = self._heard.tick(now)
        self._watched = set(sleepers).difference(silent)
        return silent
