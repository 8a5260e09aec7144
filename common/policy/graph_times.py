"""Step times where vLLM replays CUDA graphs: the times jump from one captured size to the next.

Invariants (tests/property/test_graph_times.py asserts them):
- a step costs what its graph costs, to which the step is padded: all numbers of tokens of one graph cost the
  same;
- a step of a larger graph, and a step beyond the largest graph, is never faster than a smaller step. Only the
  step in which every request has all its drafts may be faster;
- times are positive for every batch and number of drafts, also beyond what was measured.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise

import msgspec
import numpy as np
from numpy.typing import NDArray

from seer.common.errors import InvalidField

Axis = tuple[int, ...]

MOST_SIZES = 6
"""Most step sizes that are measured for a batch, besides the step in which all requests have all drafts."""


class Graphs(msgspec.Struct, frozen=True, kw_only=True):
    """Steps for which vLLM has captured CUDA graphs, by their number of tokens: rising numbers.

    `mixed` serve any step of at most so many tokens, `full` those alone in which each request has all its
    drafts. Without either there are no graphs.
    """

    mixed: Axis = ()
    full: Axis = ()

    def padded(self, tokens: int) -> int:
        """Return the tokens that a step of `tokens` takes as long as."""
        at = bisect_left(self.mixed, tokens)
        return self.mixed[at] if at < len(self.mixed) else tokens

    def sizes(self, batch: int, most: int) -> list[int]:
        """Return the sizes of steps to measure, of `batch` requests with at most `most` drafts each.

        The smallest and the largest step, the largest graph and the step just above it, and of the other
        graphs as many as there is room for, with equal steps between.
        """
        # The largest has a draft less than all: the step with all is measured apart.
        least, last = self.padded(batch), self.padded(max(batch, batch * (most + 1) - 1))
        inner = [size for size in self.mixed if least < size < last]
        top = self.mixed[-1] if self.mixed else 0
        kept = {least, last} | {size for size in (top, top + 1) if least < size < last}
        others = [size for size in inner if size not in kept]
        room = min(MOST_SIZES - len(kept), len(others))
        kept |= {others[(2 * place + 1) * len(others) // (2 * room)] for place in range(room)}
        return sorted(kept)


class GraphTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of steps as measured: `seconds[i][j]` of `tokens[i][j]` tokens in batch i of the profile.

    `full[i]` is the step in which all requests of batch i have `draft` drafts each.
    Raises `InvalidField` for shapes that do not fit, sizes that do not rise, and times that are not positive.
    """

    graphs: Graphs
    draft: int
    tokens: tuple[Axis, ...]
    seconds: tuple[tuple[float, ...], ...]
    full: tuple[float, ...]

    def __post_init__(self) -> None:
        shapes = [len(line) for line in self.seconds] == [len(line) for line in self.tokens]
        if not shapes or not all(self.tokens) or len(self.full) != len(self.tokens):
            raise InvalidField(
                "graphs.tokens", self.tokens, "give a time for each size, and `full` for each line"
            )
        if any(b <= a for line in self.tokens for a, b in pairwise(line)):
            raise InvalidField("graphs.tokens", self.tokens, "give rising numbers")
        if not all(0 < each < float("inf") for line in (*self.seconds, self.full) for each in line):
            raise InvalidField("graphs.seconds", self.seconds, "times must be positive seconds")

    def by_rows(self, batches: Axis, batch: int, most: int) -> NDArray[np.float64]:
        """Return the seconds of steps of `batch` requests with 0 to `most` drafts in all: [most + 1].

        `batches` are the measured batches. Between two measured batches times are linear.
        """
        sizes = np.arange(batch, batch + most + 1)
        at = np.searchsorted(self.graphs.mixed, sizes)
        padded = np.append(np.array(self.graphs.mixed, np.int64), 0)[at]
        sizes = np.where(at < len(self.graphs.mixed), padded, sizes)
        right = min(bisect_left(batches, batch), len(batches) - 1)
        left = max(0, right - 1) if batch < batches[right] else right
        share = (batch - batches[left]) / (batches[right] - batches[left]) if left < right else 0.0
        weights = ((left, 1.0 - max(0.0, share)), (right, max(0.0, share)))
        times = np.zeros(most + 1)
        for line, weight in weights:
            times += weight * self._line(line, sizes)
        every = batch * self.draft
        if every <= most and batch + every <= max(self.graphs.full, default=0):
            times[every] = sum(weight * self.full[line] for line, weight in weights)
        return times

    def _line(self, line: int, sizes: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return seconds of steps of these sizes of a measured batch: linear between what was measured."""
        tokens, seconds = self.tokens[line], np.maximum.accumulate(self.seconds[line])
        # Beyond, the mean slope: that of the last two sizes may be the jump behind the largest graph.
        slope = float(seconds[-1] - seconds[0]) / max(1, tokens[-1] - tokens[0])
        times: NDArray[np.float64] = np.interp(sizes, tokens, seconds)
        return times + slope * np.maximum(0, sizes - tokens[-1])
