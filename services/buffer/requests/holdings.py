"""What each trainer holds of what is bounded: requests, output of unfinished groups, results that wait.

One trainer's work must not take the room of another's: a trainer has bounds of its own, by the name whose
share of the engines it has (`RolloutState.share`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from seer.services.buffer.requests.state import Limits

ALL = 4
"""All trainers' requests together are at most so many times those that one may have."""


@dataclass(slots=True)
class Holding:
    """`requests`: unfinished ones, and trajectories that are away and have no next turn that waits.

    `tokens`: output of unfinished groups, `results`: finished groups with their prompts, in 8 bytes.
    """

    requests: int = 0
    tokens: int = 0
    results: int = 0

    def add(self, requests: int, tokens: int, results: int) -> None:
        """Add to each."""
        self.requests += requests
        self.tokens += tokens
        self.results += results


class Holdings:
    """`all`: of all trainers; `of`: by trainer, of those that hold anything."""

    def __init__(self, limits: Limits) -> None:
        self.all = Holding()
        self.of: dict[str, Holding] = {}
        self._shares, self._most_requests = limits.shares, limits.max_requests

    def add(self, trainer: str, requests: int = 0, tokens: int = 0, results: int = 0) -> None:
        """Add to what a trainer holds; negative numbers take away."""
        mine = self.of.get(trainer) or self.of.setdefault(trainer, Holding())
        mine.add(requests, tokens, results)
        self.all.add(requests, tokens, results)
        if not (mine.requests or mine.tokens or mine.results):
            del self.of[trainer]

    def room(self, trainer: str) -> int:
        """Return how many more requests a trainer may have."""
        mine, most = self.of.get(trainer) or Holding(), self._most_requests
        return min(most - mine.requests, ALL * most - self.all.requests)

    def too_many(self, trainer: str) -> str:
        """Return why a trainer that has no room is refused."""
        mine, most = self.of.get(trainer) or Holding(), self._most_requests
        if self.all.requests - mine.requests > (ALL - 1) * most:
            whose, held, bound = "all trainers", self.all.requests, ALL * most
        else:
            whose, held, bound = f"trainer {trainer!r}", mine.requests, most
        fix = "submit fewer at a time, or raise buffer.max_requests"
        return f"the buffer holds {held} unfinished requests of {whose} and takes at most {bound}: {fix}"

    def most_tokens(self) -> str:
        """Return the trainer whose unfinished groups have most output for its weight."""
        return self._most({name: mine.tokens for name, mine in self.of.items()})

    def most_results(self, but: tuple[str, int]) -> str:
        """Return the trainer whose results are most for its weight; `but`: a trainer's result that stays."""
        results = {name: mine.results for name, mine in self.of.items()}
        results[but[0]] -= but[1]
        return self._most(results)

    def _most(self, held: Mapping[str, int]) -> str:
        return max(held, key=lambda name: (held[name] / self._shares.get(name, 1.0), name))
