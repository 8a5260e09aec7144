"""Where a request's next chunk runs: pure functions (request, chunk, fleet) -> an instance's name, or None.

None: no instance has room, the request waits.

Invariants (tests/property/test_placement.py asserts them):
- `stay_or_least_loaded` leaves no request waiting that fits anywhere, and moves a request only if its
  instance has no room, or runs more than `BALANCE_SPREAD` chunks beyond the least loaded instance that has
  room;
- so does `stay_or_spare_room`, but a request from elsewhere fits only where room is left for the requests
  that run there, or where nothing runs;
- a placement is a function of what the fleet holds, not of the order in which instances joined.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

from seer.common.policy.fleet import Fleet
from seer.common.policy.request import RequestView

Place = Callable[[RequestView, int, Fleet], str | None]

BALANCE_SPREAD = 2
"""Chunks that an instance may run beyond the least loaded one before balance beats a cached prefix.

The paper's OSDI version says 32; 2 ended simulated rollouts 0.2 to 3 % sooner, with a pool and without
(bench/scheduling/placement.py).
"""

SPARE_CHUNKS = 3
"""Chunks' worth of room that `stay_or_spare_room` leaves free: a request that comes into the last free blocks
takes them from one that runs there, which must leave at its next chunk (bench/scheduling/moves.py)."""


def whole_group(request: RequestView, chunk: int, fleet: Fleet) -> str | None:
    """Keep a group on one instance, groups in turn (round robin). The engine preempts if KV runs out."""
    names = fleet.holding(request.context, chunk, request.image_tokens)
    if not names:
        return None
    name = names[request.group_number % len(names)]
    return None if fleet[name].closed else name


def least_loaded(request: RequestView, chunk: int, fleet: Fleet) -> str | None:
    """Take the instance with the fewest chunks below `max_num_seqs`. The engine preempts if KV runs out."""
    view = fleet.least_loaded(request.context, chunk, request.image_tokens)
    return view.name if view else None


def stay_or_least_loaded(request: RequestView, chunk: int, fleet: Fleet) -> str | None:
    """Stay where the prefix is cached, unless the least loaded instance with room has far fewer chunks."""
    return _stay_or_move(request, chunk, fleet, 0)


def stay_or_spare_room(request: RequestView, chunk: int, fleet: Fleet) -> str | None:
    """As `stay_or_least_loaded`, but move only to where the chunks that run there can go on as well."""
    return _stay_or_move(request, chunk, fleet, min(SPARE_CHUNKS * chunk, request.remaining - chunk))


def _stay_or_move(request: RequestView, chunk: int, fleet: Fleet, spare: int) -> str | None:
    # The first chunks of a group are not placed together: that would save prefills of their prompt, at most
    # half a percent of the time, but an instance with a group of long responses ends late.
    emptiest = fleet.emptiest(request.context, chunk, spare, request.image_tokens)
    home = request.last_instance
    if fleet.has_room(home, request.context, chunk, request.image_tokens) and (
        emptiest is None or fleet[home].chunks - emptiest.chunks <= BALANCE_SPREAD
    ):
        return home
    return emptiest.name if emptiest else None


def always_migrate(request: RequestView, chunk: int, fleet: Fleet) -> str | None:
    """Take the instance whose name follows that of the last one: every chunk migrates. For tests."""
    if request.last_instance not in fleet:
        return stay_or_least_loaded(request, chunk, fleet)
    following = fleet.names[(bisect_left(fleet.names, request.last_instance) + 1) % len(fleet)]
    able = fleet.has_room(following, request.context, chunk, request.image_tokens)
    return following if able else None
