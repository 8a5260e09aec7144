"""The least time that a rollout's work can take, by speeds: how close to that it came is its efficiency.

`sim/bound.py` has sharper bounds, for modelled engines.
"""

from __future__ import annotations

from collections.abc import Sequence

from seer.common.errors import InvalidField
from seer.common.types import InstanceStats


def lower_bound(tokens: int, longest: int, capacity: float, seconds_per_token: float) -> float:
    """Return the larger of the seconds for all work at full capacity, and for the longest response alone.

    `tokens` of all responses, and of the `longest` one; `capacity`: tokens/s of all instances together,
    each at the best batch that its KV holds; `seconds_per_token`: of a request that runs alone on an
    instance. Both with the drafts that the engines use. Raises `InvalidField`.
    """
    for name, value in (("tokens", tokens), ("longest", longest), ("seconds_per_token", seconds_per_token)):
        if value < 0:
            raise InvalidField(name, value, "must not be negative")
    if not capacity > 0:
        raise InvalidField("capacity", capacity, "must be positive")
    if longest > tokens:
        raise InvalidField("longest", longest, f"cannot exceed tokens = {tokens}")
    return max(tokens / capacity, longest * seconds_per_token)


def bound_seconds(tokens: int, longest: int, stats: Sequence[InstanceStats]) -> float | None:
    """Return a lower bound on the time for responses of so many tokens, at each instance's best speed.

    An instance that never ran for a second counts as fast as the fastest. None: none of them did.
    """
    fastest = max((each.best_rate for each in stats), default=0.0)
    if not tokens or not fastest:
        return None
    capacity = sum(each.best_rate or fastest for each in stats)
    alone = min((each.token_seconds_alone for each in stats if each.token_seconds_alone), default=0.0)
    return lower_bound(tokens, longest, capacity, alone)
