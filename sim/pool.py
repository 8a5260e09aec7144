"""The KV pool of a simulated cluster: what it holds, what brings it there, and whether fetching it pays.

Engines decide as in production: each asks a `FetchChoice` of its own, which measures its fetches and its
prefills; with at most that many tokens it neither saves nor fetches.

Invariants (tests/unit/test_sim_pool.py asserts them):
- what was not saved, or is still on its way into the pool, is not found there;
- each token of a response is saved once, as its chunk ends;
- an engine that fetches more slowly than it computes fetches nothing, but tries again from time to time.
"""

from __future__ import annotations

from collections.abc import Callable

from seer.common.policy.fetch_choice import FetchChoice
from seer.sim.network import Network, Wake
from seer.sim.workload import Workload

CHOICE_SECONDS = 1.0
"""How long an engine's choice is taken as it is; it changes over tens of loads, and takes time to compute."""


class Pool:
    """See the module's docstring. Instances are numbered from 0, node by node."""

    def __init__(self, load: Workload, wake: Wake) -> None:
        self._load = load
        self._network = Network(-(-load.instances // load.node_instances), wake)
        self._choices = [FetchChoice() for _ in range(load.instances)]
        self._least = [(0.0, 0)] * load.instances  # until when, and up to how many tokens are computed
        self._held: dict[str, int] = {}
        self._ordered: dict[str, int] = {}  # the same, with what is on its way

    def least(self, instance: int, now: float) -> int:
        """Return up to how many tokens an instance computes what it misses."""
        until, least = self._least[instance]
        if now >= until:
            least = self._choices[instance].pull_tokens(now)
            self._least[instance] = (now + CHOICE_SECONDS, least)
        return least

    def found(self, instance: int, response: str, cached: float, now: float) -> float:
        """Return how many tokens of a response an instance fetches, given how many it has cached."""
        tokens = self._held.get(response, 0) - cached
        return tokens if tokens > self.least(instance, now) else 0.0

    def fetch(self, instance: int, tokens: float, now: float, done: Callable[[float], None]) -> None:
        """Bring tokens to an instance; `done` is called with the time when they are there."""
        self._choices[instance].order(now)
        self._least[instance] = (now, 0)  # it may wait for this load now

        def arrived(at: float) -> None:
            self._choices[instance].load(round(tokens), at - now, at)
            done(at)

        node = instance // self._load.node_instances
        self._network.fetch(node, tokens * self._load.model.pull, now, arrived)

    def save(self, instance: int, response: str, tokens: int, now: float) -> None:
        """Save what is new of a response that has so many tokens, all at an instance, if it pays."""
        new = tokens - self._ordered.get(response, 0)
        if new <= 0 or tokens <= self.least(instance, now):
            return
        self._ordered[response] = tokens

        def saved(at: float) -> None:
            self._held[response] = tokens

        node = instance // self._load.node_instances
        self._network.save(node, new * self._load.model.pull, now, saved)

    def computed(self, instance: int, tokens: float, batch: int, step: float) -> None:
        """Count a prefill in a step that takes `step` seconds without it and decodes `batch` requests."""
        scheduled = {"prefill": round(tokens) + 1} | dict.fromkeys(map(str, range(batch)), 1)
        self._choices[instance].step(scheduled, {}, step + tokens * self._load.model.prefill)
