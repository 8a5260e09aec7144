"""The least time that a rollout can take."""

from __future__ import annotations

from seer.common.errors import InvalidField


def lower_bound(tokens: int, longest: int, capacity: float, seconds_per_token: float) -> float:
    """Return the seconds below which no schedule gets: all work at full speed, or the longest response alone.

    `tokens` of all responses and of the `longest` one; `capacity`: tokens/s of all instances together,
    each at the best batch that its KV holds; `seconds_per_token` of a request that has an instance to
    itself. Both are the best that the engines reach with the drafts they make. Raises `InvalidField`.
    """
    for name, value in (("tokens", tokens), ("longest", longest), ("seconds_per_token", seconds_per_token)):
        if value < 0:
            raise InvalidField(name, value, "must not be negative")
    if not capacity > 0:
        raise InvalidField("capacity", capacity, "must be positive")
    if longest > tokens:
        raise InvalidField("longest", longest, f"cannot exceed tokens = {tokens}")
    return max(tokens / capacity, longest * seconds_per_token)
