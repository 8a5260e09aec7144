"""Length estimates: how long a group's longest response will be.

An estimator is a pure function of what is known of one group. It never changes a token: a bad
estimate costs time, not correctness.

Invariants of `longest_finished`: the estimate is `cap` until a response finishes, then the
longest finished one; so it falls once, and only rises from there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

Estimator = Callable[[int, Collection[int], Collection[int]], float]
"""(cap, lengths of finished responses, tokens so far of unfinished ones) -> tokens, at most cap."""


def longest_finished(cap: int, finished: Collection[int], unfinished: Collection[int]) -> float:
    """Return the paper's estimate (Algorithm 2); it takes no account of unfinished responses."""
    return float(max(finished, default=cap))
