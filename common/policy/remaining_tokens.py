"""How many more tokens open responses will have: by their groups' estimates, and by how these did so far.

An estimate says how probable it is that a response is longer than so many tokens: lengths are log-normal.
Real lengths are not quite: many responses never end by themselves and reach the cap. So for each octave of
lengths the ends that came are counted beside those that were expected (the cumulative hazard), and
`EndRates.ratios` says how much less often responses end there than estimates say. It says never "more often":
of chunks that run, those that end early are known first.

Invariants (tests/property/test_remaining_tokens.py asserts them):
- an expected remainder is positive and leads to no length beyond the cap, whatever estimates and counts are;
- without counts it is the mean of what is left of a log-normal length, cut at the cap;
- where responses end less often than expected, remainders grow, and only there and below.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from seer.common.policy.length import Estimate

OCTAVES = 25
"""Octaves of lengths: a response has at most 2^24 tokens (`wire.drafts.Count`)."""

PRIOR_ENDS = 16.0
"""Ends that the octave below counts as, where few have been seen: estimates err alike in neighbours."""

REMEMBERED_ENDS = 4096
"""Ends after which all counts are halved: lengths drift as weights change."""

_LEAST = 1e-12
"""Smaller probabilities count as this: nothing is known of lengths that are less probable."""

_ROOT = math.sqrt(0.5)

EVEN = (1.0,) * OCTAVES
"""Ratios before anything is known: responses end as estimates say."""


def _log_above(estimate: Estimate, tokens: float) -> float:
    """Return the log of the probability that a response of this estimate is longer than `tokens`."""
    z = (math.log(tokens) - math.log(estimate.tokens)) / estimate.spread
    return math.log(max(0.5 * math.erfc(z * _ROOT), _LEAST))


def _octave(tokens: int) -> int:
    return min(max(tokens, 1).bit_length(), OCTAVES) - 1


class EndRates:
    """Ends of responses by octave of their lengths: those seen, and those that estimates had expected."""

    def __init__(self) -> None:
        self._expected = [0.0] * OCTAVES
        self._seen = [0.0] * OCTAVES

    def lived(self, estimate: Estimate, start: int, end: int, ended: bool) -> None:
        """Count what a response generated from `start` to `end` tokens; it ended there, or goes on.

        One that ends at its cap has not `ended`. An estimate without a spread expects nothing.
        """
        if not estimate.spread:
            return
        at = max(start, 1)
        while at < end:
            octave = _octave(at)
            upto = min(end, 2 << octave) if octave < OCTAVES - 1 else end
            self._expected[octave] += _log_above(estimate, at) - _log_above(estimate, upto)
            at = upto
        if ended:
            self._seen[_octave(end - 1)] += 1
            if sum(self._seen) > REMEMBERED_ENDS:
                self._expected = [each / 2 for each in self._expected]
                self._seen = [each / 2 for each in self._seen]

    def copy(self) -> EndRates:
        """Return counts to add to, which these do not see."""
        other = EndRates()
        other._expected, other._seen = self._expected.copy(), self._seen.copy()
        return other

    def ratios(self) -> tuple[float, ...]:
        """Return, for each octave, how often responses end there beside what was expected, 1 at most."""
        found, ratio = [], 1.0
        for expected, seen in zip(self._expected, self._seen, strict=True):
            ratio = min((seen + PRIOR_ENDS * ratio) / (expected + PRIOR_ENDS), 1.0)
            found.append(ratio)
        return tuple(found)


class Left(NamedTuple):
    """What a response still generates: `tokens` are expected, and so many `lengths`, the sum over these
    tokens of the response's length at each. Its KV is as large as that, beside the prompt's.
    """

    tokens: float
    lengths: float


class Remainders:
    """What responses with one estimate and one cap still generate, by the tokens that they have."""

    def __init__(self, estimate: Estimate, cap: int, ratios: Sequence[float] = EVEN, least: int = 0) -> None:
        """Take it for responses that have `least` tokens or more; the ratios are those of `EndRates`."""
        self._estimate, self._cap = estimate, cap
        self._edges, self._above = [float(max(min(least, cap), 1))], [1.0]
        if estimate.spread:
            self._follow(ratios)
        self._tails = self._integrals()

    def _follow(self, ratios: Sequence[float]) -> None:
        """Find how many are longer than each edge, two an octave: those are straight lines between edges."""
        log_above, before = 0.0, _log_above(self._estimate, self._edges[0])
        while (last := self._edges[-1]) < self._cap:
            octave = _octave(int(last))
            middle, upper = math.sqrt(2) * (1 << octave), float(2 << octave)
            edge = min(middle if last < middle else upper, self._cap) if octave < OCTAVES - 1 else self._cap
            now = _log_above(self._estimate, edge)
            log_above, before = log_above - ratios[octave] * (before - now), now
            self._edges.append(float(edge))
            self._above.append(math.exp(log_above))

    def _integrals(self) -> list[Left]:
        """Return for each edge, up to the cap, the integrals of what is above, and of it times length."""
        edges, above, tails = self._edges, self._above, [Left(0.0, 0.0)]
        for i in range(len(edges) - 2, -1, -1):
            tokens = (edges[i + 1] - edges[i]) * (above[i] + above[i + 1]) / 2
            after = tails[-1]
            tails.append(Left(after.tokens + tokens, after.lengths + tokens * (edges[i] + edges[i + 1]) / 2))
        return tails[::-1]

    def left(self, generated: int) -> Left:
        """Return what a response that has so many tokens is expected to generate."""
        room = float(max(self._cap - generated, 1))
        at, i, above = self._at(generated)
        if above < _LEAST:
            tokens = self._expected(generated, room) or room / 2
            return Left(tokens, tokens * (generated + tokens / 2))
        first = (self._edges[i + 1] - at) * (above + self._above[i + 1]) / 2
        after = self._tails[i + 1]
        tokens = min(max((first + after.tokens) / above, 1.0), room)
        lengths = (first * (at + self._edges[i + 1]) / 2 + after.lengths) / above
        return Left(tokens, min(max(lengths, tokens * generated), tokens * max(self._cap, 1)))

    def longest(self, generated: int, chance: float) -> float:
        """Return how many more tokens a response generates with this chance, or more."""
        room = float(max(self._cap - generated, 1))
        at, i, above = self._at(generated)
        if above < _LEAST:
            return self._expected(generated, room) or room
        for j in range(i + 1, len(self._edges)):
            if self._above[j] <= chance * above:
                low, high = max(at, self._edges[j - 1]), self._edges[j]
                of = above if j == i + 1 else self._above[j - 1]
                part = (of - chance * above) / max(of - self._above[j], _LEAST)
                return min(max(low + part * (high - low) - generated, 1.0), room)
        return room

    def _expected(self, generated: int, room: float) -> float:
        """Return the rest to an estimate without a spread; 0 for responses longer than the estimate knows."""
        rest = self._estimate.tokens - generated
        return 0.0 if self._estimate.spread or rest <= 0 else min(max(rest, 1.0), room)

    def _at(self, generated: int) -> tuple[float, int, float]:
        """Return a length, the edge at or below it, and the part that is above; 0: not known."""
        at = min(max(float(generated), self._edges[0]), self._edges[-1])
        i = bisect_right(self._edges, at) - 1
        if i >= len(self._edges) - 1:
            return at, i, 0.0
        part = (at - self._edges[i]) / (self._edges[i + 1] - self._edges[i])
        return at, i, self._above[i] + (self._above[i + 1] - self._above[i]) * part
