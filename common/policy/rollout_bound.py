"""The least time that a rollout's work can take, by speeds: how close to that it came is its efficiency.

`sim/bound.py` has sharper bounds, for modelled engines.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

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


def bound_seconds(
    tokens: int, longest: int, instances: Iterable[tuple[InstanceStats, float]]
) -> float | None:
    """Return a lower bound on the time for responses of so many tokens, at each instance's best speed.

    An instance comes with the share of the time in which the instance was there: an instance may have died,
    or have come late. An instance that never ran for a second counts as fast as the fastest. None: no
    instance ran for a second.
    """
    there = [(stats, share) for stats, share in instances if share > 0]
    fastest = max((stats.best_rate for stats, _ in there), default=0.0)
    if not tokens or not fastest:
        return None
    capacity = sum(share * (stats.best_rate or fastest) for stats, share in there)
    alone = min((stats.token_seconds_alone for stats, _ in there if stats.token_seconds_alone), default=0.0)
    return lower_bound(tokens, longest, capacity, alone)


def best_of_incarnations(stats: InstanceStats, before: InstanceStats | None) -> InstanceStats:
    """Return an instance's statistics with the best speeds that this incarnation has shown, or `before`."""
    if before is None:
        return stats
    alone = [each.token_seconds_alone for each in (stats, before) if each.token_seconds_alone]
    return replace(
        stats, best_rate=max(stats.best_rate, before.best_rate), token_seconds_alone=min(alone, default=0.0)
    )
