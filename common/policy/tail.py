"""The tail of a rollout: from the finish of nine tenths of its responses to the finish of the last."""

from __future__ import annotations

import math
from collections.abc import Sequence

TAIL_SHARE = 0.1
"""The tail is the last tenth of the responses to finish."""


def before_tail(responses: int) -> int:
    """Return how many of so many responses finish before the tail."""
    return math.ceil((1 - TAIL_SHARE) * responses)


def tail_seconds(finish_times: Sequence[float]) -> float:
    """Return how long the tail took, of responses that finished at these times."""
    if not finish_times:
        return 0.0
    times = sorted(finish_times)
    return times[-1] - times[before_tail(len(times)) - 1]
