"""Scheduling policies: which waiting request goes next, where, and for how many tokens.

A policy is a set of pure functions. The buffer's machine owns the queue and counts what is reserved; it
calls `order` when a request starts waiting or its group's estimate changes (smaller goes first), `place` for
the request at the head of the queue, and `chunk` for the length of its next chunk. docs/scheduling.md has
the reasons and the measurements.

Invariants (tests/property/test_schedule.py and test_buffer_machine.py assert them):
- with `admission`, a chunk is placed only where its worst case fits in free blocks and fewer than
  `max_num_seqs` chunks run, so nothing placed under such a policy is ever preempted;
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

from seer.common.policy.chunk_size import default_chunk
from seer.common.policy.length import Estimate
from seer.common.policy.placement import (
    Place,
    always_migrate,
    least_loaded,
    stay_or_least_loaded,
    stay_or_spare_room,
    whole_group,
)
from seer.common.policy.request import RequestView

OrderKey = tuple[float, ...]
Order = Callable[[RequestView, Estimate], OrderKey]

FAIR_DISPATCHES = 512
"""One dispatch in this many goes to the request that has waited longest, which bounds waiting."""

STAY = 0.3
"""`Policy.stay` of `seer`. A request that gives way to a longer one has its KV moved when it comes back.

With 0 requests take turns chunk by chunk: rollouts end up to 0.9 % sooner, and move 6 to 8 times as much KV
(bench/scheduling/moves.py).
"""

TAIL_PROBABILITY = 1e-6
"""Requests are ordered by the length that they exceed with this probability.

A rollout ends with its longest response, so what counts is which requests could be that one: a single
response that starts late may cost a tenth of the time. At 1e-6, one in a hundred of the paper's rollouts
has a longer one. Groups that say much of their responses' lengths are then ordered as by Algorithm 2, those
that say little by least generated first. Over ten seeds of Qwen's workload 1e-4 took 4 % longer than the
latter, and 0.01 12 % (prompt's share of the variance 0.65, outliers;
bench/scheduling/orders.py).
"""

_NORMAL = NormalDist()
_SMALLEST = 1e-12
"""Smaller probabilities count as 0: then nothing is known but the cap, and the response may reach it."""


@dataclass(frozen=True, slots=True)
class Policy:
    """A scheduling policy.

    `order(request, estimate)` gets the group's length estimate; `place(request, chunk, fleet)` gets the
    living instances and returns the name of one, or None to wait. `chunked`: requests run a chunk at a time,
    else to their end. `admission`: only where the worst case fits. `fair`: waiting is bounded.
    `estimator` names the entry of `length.ESTIMATORS` that estimates come from; the first `probes`
    responses of each group are probes, whose drafts come first. `stay`: a request whose chunk has ended goes
    on before all that wait until, since it came to its instance, it has generated this share of what it
    could still generate.
    """

    name: str
    order: Order
    place: Place
    chunked: bool
    admission: bool
    estimator: str = "longest"
    fair: bool = False
    probes: int = 0
    stay: float = 0.0

    def goes_on(self, request: RequestView, estimate: Estimate) -> bool:
        """Return whether a request whose chunk has ended goes on before those that wait, if there is room."""
        return request.produced - request.came_with < self.stay * _still(request, estimate)

    def chunk(self, request: RequestView, chunk_size: int | None) -> int:
        """Return the number of tokens of the request's next chunk (paper, 3.2)."""
        if not self.chunked:
            return request.remaining
        return min(chunk_size or default_chunk(request.max_tokens), request.remaining)


def length_quantile(estimate: Estimate, generated: int, cap: int, chance: float = TAIL_PROBABILITY) -> float:
    """Return the length that a response exceeds with this probability, given that it exceeds `generated`.

    Without a spread that length is the estimate until the response is longer; then the length is the cap.
    """
    if not estimate.spread:
        return min(estimate.tokens, cap) if generated < estimate.tokens else cap
    typical = math.log(estimate.tokens)
    left = 1.0
    if generated > 0:
        left = _NORMAL.cdf((typical - math.log(generated)) / estimate.spread)
    if left * chance < _SMALLEST:
        return cap
    # Compared as logarithms: what came over the wire may be beyond any float.
    log = typical - estimate.spread * _NORMAL.inv_cdf(left * chance)
    return math.exp(log) if log < math.log(cap) else cap


def _arrival(request: RequestView, estimate: Estimate) -> OrderKey:
    return (request.queued,)


def _least_generated(request: RequestView, estimate: Estimate) -> OrderKey:
    return (request.produced, request.queued)


def _probes_then_longest(request: RequestView, estimate: Estimate) -> OrderKey:
    # Algorithm 2: probes shortest first, the rest by the longest finished sibling.
    if request.index == 0:
        return (0, request.produced, request.queued)
    return (1, -estimate.tokens, request.queued)


def _longest_first(request: RequestView, estimate: Estimate) -> OrderKey:
    # Whole tokens, and the least generated first among equals: without any evidence all are equal.
    return (-round(_still(request, estimate)), request.produced, request.queued)


def _still(request: RequestView, estimate: Estimate) -> float:
    """Return how many tokens a request could still generate."""
    return length_quantile(estimate, request.produced, request.most) - request.produced


def oracle(lengths: Mapping[str, int]) -> Policy:
    """Return a policy that knows the output of all turns: longest remaining first. For simulations."""

    def longest_remaining(request: RequestView, estimate: Estimate) -> OrderKey:
        return (request.produced - lengths[request.request_id], request.queued)

    return Policy("oracle", longest_remaining, stay_or_least_loaded, chunked=True, admission=True)


POLICIES: dict[str, Policy] = {
    policy.name: policy
    for policy in (
        # Ours: the request that could still generate most goes first.
        Policy("seer", _longest_first, stay_or_spare_room, True, True, "posterior", fair=True, stay=STAY),
        # The paper's Algorithm 2, to the letter.
        Policy("seer-paper", _probes_then_longest, stay_or_least_loaded, True, True, fair=True, probes=1),
        # All requests advance at the same pace; uses no estimates.
        Policy("least-generated", _least_generated, stay_or_least_loaded, True, True),
        # The paper's "No-Context": chunks, re-queued at the back, placed by KV room.
        Policy("divided", _arrival, stay_or_least_loaded, True, True),
        # A router in front of engines: least loaded instance, whole requests; engines preempt.
        Policy("least-loaded", _arrival, least_loaded, chunked=False, admission=False),
        # veRL's way: whole groups, instances in turn; engines preempt.
        Policy("static", _arrival, whole_group, chunked=False, admission=False),
        # Every chunk on another instance than the one before: for `seer verify`.
        Policy("migrate", _arrival, always_migrate, chunked=True, admission=True),
    )
}
