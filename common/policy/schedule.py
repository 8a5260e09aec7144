"""Scheduling policies: which waiting request goes next, where, and for how many tokens.

A policy is a set of pure functions of what it is shown. The buffer's machine owns the queue and
the books; it asks `order` when a request starts waiting (smaller goes first), `place` for the
request at the head of the queue, and `chunk` for the length of its next run.

Invariants:
- with `admission`, a chunk is placed only where its worst case fits in free blocks and a
  sequence slot is left, so nothing placed under such a policy is ever preempted;
- `divided` leaves no request waiting that fits anywhere, and moves one only if its instance has no
  room or runs more than `BALANCE_SPREAD` chunks beyond the least loaded of those that have;
- `order` ends in the request's own queue number, so it is total and first come, first served
  among equals;
- no policy can change a token: they decide when and where, never what.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

from seer.common.policy.fleet import Fleet
from seer.common.policy.length import Estimate

OrderKey = tuple[float, ...]

BALANCE_SPREAD = 2
"""Chunks that an instance may run beyond the least loaded one before balance beats a cached prefix.

The paper's OSDI version says 32; 2 ended simulated rollouts up to 9 % sooner, with a pool and without
(docs/architecture.md).
"""


@dataclass(slots=True)
class RequestView:
    """A waiting request. `group_number` counts groups in order of arrival.

    `queued` grows with every time any request starts waiting; `last_instance` ran its last chunk.
    """

    request_id: str
    group_number: int
    index: int
    prompt_len: int
    max_tokens: int
    generated: int = 0
    queued: int = 0
    last_instance: str = ""

    @property
    def context(self) -> int:
        """Tokens whose KV the next chunk starts from."""
        return self.prompt_len + self.generated

    @property
    def remaining(self) -> int:
        """Output tokens still allowed."""
        return self.max_tokens - self.generated


Order = Callable[[RequestView, Estimate], OrderKey]
Place = Callable[[RequestView, int, Fleet], str | None]


@dataclass(frozen=True, slots=True)
class Policy:
    """A named bundle of decisions.

    `order(request, estimate)` gets the group's length estimate; `place(request, chunk,
    fleet)` gets the living instances and returns one's name, or None to wait.
    `chunked` policies run at most `chunk_size` tokens at a time; `admission` promises room.
    `estimator` names the entry of `length.ESTIMATORS` that its estimates come from.
    """

    name: str
    order: Order
    place: Place
    chunked: bool
    admission: bool
    estimator: str = "longest"

    def chunk(self, request: RequestView, chunk_size: int) -> int:
        """Return the number of tokens of the next run (paper, 3.2)."""
        return min(chunk_size, request.remaining) if self.chunked else request.remaining


def _arrival(request: RequestView, estimate: Estimate) -> OrderKey:
    return (request.queued,)


def _whole_group(request: RequestView, chunk: int, fleet: Fleet) -> str | None:
    names = fleet.holding(request.context, chunk)
    return names[request.group_number % len(names)] if names else None


def _stay_or_least_loaded(request: RequestView, chunk: int, fleet: Fleet) -> str | None:
    # Siblings are not drawn together for their first chunk: it would save prefills of their prompt,
    # but their lengths are alike, and an instance with the long ones ends late.
    emptiest = fleet.emptiest(request.context, chunk)
    if emptiest is None:
        return None
    home = request.last_instance
    if (
        fleet.has_room(home, request.context, chunk)
        and fleet[home].chunks - emptiest.chunks <= BALANCE_SPREAD
    ):
        return home
    return emptiest.name


def _elsewhere(request: RequestView, chunk: int, fleet: Fleet) -> str | None:
    if request.last_instance not in fleet:
        return _stay_or_least_loaded(request, chunk, fleet)
    following = fleet.names[(bisect_left(fleet.names, request.last_instance) + 1) % len(fleet)]
    return following if fleet.has_room(following, request.context, chunk) else None


POLICIES: dict[str, Policy] = {
    policy.name: policy
    for policy in (
        # veRL's baseline: whole groups round-robin, the engine preempts as it likes.
        Policy("static", order=_arrival, place=_whole_group, chunked=False, admission=False),
        # The paper's "No-Context": chunks, re-queued at the back, placed by KV room.
        Policy("divided", order=_arrival, place=_stay_or_least_loaded, chunked=True, admission=True),
        # Every chunk on another instance than the one before: for `seer verify`.
        Policy("migrate", order=_arrival, place=_elsewhere, chunked=True, admission=True),
    )
}
