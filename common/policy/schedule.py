"""Scheduling policies: which waiting request goes next, where, and for how many tokens.

A policy is a set of pure functions of what it is shown. The buffer's machine owns the queue and
the books; it asks `order` when a request starts waiting or its group's estimate changes (smaller goes
first), `place` for the request at the head of the queue, and `chunk` for the length of its next run.
docs/scheduling.md says why each is as it is, and what it measured.

Invariants (tests/property/test_schedule.py and test_buffer_machine.py assert them):
- with `admission`, a chunk is placed only where its worst case fits in free blocks and a
  sequence slot is left, so nothing placed under such a policy is ever preempted;
- `order` ends in the request's own queue number, so it is total and first come, first served
  among equals;
- under `fair` policies a request that waits is dispatched at the latest with the
  `FAIR_DISPATCHES` x (1 + requests that have waited longer)-th dispatch from now;
- no policy can change a token: they decide when and where, never what.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import NormalDist

from seer.common.policy.length import Estimate
from seer.common.policy.placement import Place, elsewhere, least_loaded, stay_or_least_loaded, whole_group
from seer.common.policy.request import RequestView

OrderKey = tuple[float, ...]
Order = Callable[[RequestView, Estimate], OrderKey]

CHUNKS_TO_CAP = 32
LEAST_CHUNK = 256
"""A response that reaches its cap takes so many chunks, of so many tokens or more, unless a size is given.

Shorter ones promise less room that stays unused, and come back more often: 256 of 40,960 tokens ended a
rollout of Qwen's 5 % sooner than 2,048 with a KV pool, but moved 7 times as much KV, and 60 % later
without one. 8,192 took 3 to 19 % longer (bench/scheduling/placement.py).
"""

FAIR_DISPATCHES = 512
"""One dispatch in so many goes to whoever has waited longest: a bound on waiting for 0.2 % of them."""

LONGER = 1e-6
"""Chance with which a response may be longer than `plausible` says: one in a hundred rollouts of the paper's.

The end of a rollout is that of its longest response, so what counts is who could be that one: a single
response held back by mistake may cost a tenth of the time. At 1e-6 groups that tell much are sorted as by
Algorithm 2, those that tell little as by least generated first. Over ten seeds of Qwen's workload 1e-4 took
4 % longer than the latter and 0.01 12 % (prompt's share of the variance 0.65, outliers;
bench/scheduling/orders.py).
"""

_NORMAL = NormalDist()
_SURE = 1e-12
"""Chances below are not told apart from 0: a response of which nothing else is known may reach its cap."""


@dataclass(frozen=True, slots=True)
class Policy:
    """A named bundle of decisions.

    `order(request, estimate)` gets the group's length estimate; `place(request, chunk,
    fleet)` gets the living instances and returns one's name, or None to wait.
    `chunked` policies run at most a chunk's tokens at a time; `admission` promises room;
    `fair` ones bound waiting. `estimator` names the entry of `length.ESTIMATORS` that its estimates
    come from; of each group the first `probes` responses are probes, whose drafts come first.
    """

    name: str
    order: Order
    place: Place
    chunked: bool
    admission: bool
    estimator: str = "longest"
    fair: bool = False
    probes: int = 0

    def chunk(self, request: RequestView, chunk_size: int | None) -> int:
        """Return the number of tokens of the next run (paper, 3.2)."""
        if not self.chunked:
            return request.remaining
        return min(chunk_size or default_chunk(request.max_tokens), request.remaining)


def default_chunk(cap: int) -> int:
    """Return a chunk's tokens where no size is given."""
    return max(LEAST_CHUNK, cap // CHUNKS_TO_CAP)


def plausible(estimate: Estimate, generated: int, cap: int, chance: float = LONGER) -> float:
    """Return the length that a response passes with this chance, given that it passed `generated`.

    Without a spread the estimate is believed until it is passed; then the response may reach its cap.
    """
    if not estimate.spread:
        return min(estimate.tokens, cap) if generated < estimate.tokens else cap
    typical = math.log(estimate.tokens)
    left = 1.0
    if generated > 0:
        left = _NORMAL.cdf((typical - math.log(generated)) / estimate.spread)
    if left * chance < _SURE:
        return cap
    # Compared as logarithms: what came over the wire may be beyond any float.
    log = typical - estimate.spread * _NORMAL.inv_cdf(left * chance)
    return math.exp(log) if log < math.log(cap) else cap


def _arrival(request: RequestView, estimate: Estimate) -> OrderKey:
    return (request.queued,)


def _least_generated(request: RequestView, estimate: Estimate) -> OrderKey:
    return (request.generated, request.queued)


def _probes_then_longest(request: RequestView, estimate: Estimate) -> OrderKey:
    # Algorithm 2: probes shortest first, the rest by the longest finished sibling.
    if request.index == 0:
        return (0, request.generated, request.queued)
    return (1, -estimate.tokens, request.queued)


def _longest_plausible(request: RequestView, estimate: Estimate) -> OrderKey:
    # Whole tokens, and the least generated first among equals: before anything is known all are equal.
    still = plausible(estimate, request.generated, request.max_tokens) - request.generated
    return (-round(still), request.generated, request.queued)


def oracle(lengths: Mapping[str, int]) -> Policy:
    """Return the policy that knows all output lengths: longest remaining first. For simulations."""

    def longest_remaining(request: RequestView, estimate: Estimate) -> OrderKey:
        return (request.generated - lengths[request.request_id], request.queued)

    return Policy("oracle", longest_remaining, stay_or_least_loaded, chunked=True, admission=True)


POLICIES: dict[str, Policy] = {
    policy.name: policy
    for policy in (
        # Ours: whoever could still take longest goes first.
        Policy("seer", _longest_plausible, stay_or_least_loaded, True, True, "posterior", fair=True),
        # The paper's Algorithm 2, to the letter.
        Policy("seer-paper", _probes_then_longest, stay_or_least_loaded, True, True, fair=True, probes=1),
        # Keeps everyone progressing and asks nobody's context.
        Policy("least-generated", _least_generated, stay_or_least_loaded, True, True),
        # The paper's "No-Context": chunks, re-queued at the back, placed by KV room.
        Policy("divided", _arrival, stay_or_least_loaded, True, True),
        # A router in front of engines: each request where the fewest are, the engine preempts as it likes.
        Policy("least-loaded", _arrival, least_loaded, chunked=False, admission=False),
        # veRL's baseline: whole groups in turn, the engine preempts as it likes.
        Policy("static", _arrival, whole_group, chunked=False, admission=False),
        # Every chunk on another instance than the one before: for `seer verify`.
        Policy("migrate", _arrival, elsewhere, chunked=True, admission=True),
    )
}
