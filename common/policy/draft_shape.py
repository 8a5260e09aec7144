"""How far every request of a step drafts, on how many paths, where that is decided before drafts are known.

A step that is scheduled ahead has its size before the step's first tokens are drawn, so all requests of the
step draft equally many tokens: the paper's Algorithm 1, by the mean acceptance of each place of a draft. Each
number of paths has an acceptance of its own: the acceptance of the path that wins. Where drafts are known,
`draft_budget` chooses token by token.

Invariants (tests/property/test_draft_shape.py asserts them):
- the chosen shape has the most tokens/s of all shapes on offer, as far as acceptance and costs are known;
- better or cheaper drafts never make the chosen length shorter;
- a length that paid once is found again, whatever was learnt since: while nothing is known of a place, its
  rate is the rate of the place before;
- there are several paths only in steps of at most `MAX_REQUESTS`, and never more further ones than have rows;
- where further paths bring nothing they are given up after a few hundred tokens, and cost what those did.
"""

from __future__ import annotations

from seer.common.policy.draft_costs import HALF_LIFE, StepCosts
from seer.common.policy.draft_paths import Entries

PRIOR_RATE, PRIOR_WEIGHT = 0.6, 16.0
"""How often the first token is taken to be right before anything is known, and the weight of that in tokens.
The same weight carries a place's rate to the next one."""

MAX_REQUESTS = 8
"""Largest step with several paths: in larger ones a row costs more than a path saves."""

SAVED = 0.25
"""How many of the first tokens that are wrong on all other paths are taken to be right on one more, before it
is known."""


class DraftShape:
    """One engine's choice of a shape: `most` entries at most, on `paths` paths at most.

    `costs`: how long steps take; `rows`: further paths that a step may have in all.
    """

    def __init__(self, costs: StepCosts, most: int, paths: int = 1, rows: int = 0) -> None:
        self._costs, self._rows = costs, rows
        self._places = [(most + 1) // count - 1 for count in range(1, paths + 1)]
        self._places = [places for places in self._places if places > 0]
        self.shapes = [
            Entries(count * (each + 1) - 1, count)
            for count, places in enumerate(self._places, 1)
            for each in sorted({places, *(2**power for power in range(places.bit_length()))})
        ]
        self._tried = [[0.0] * places for places in self._places]  # tokens whose path was right before them
        self._right = [[0.0] * places for places in self._places]

    def learn(self, paths: int, drafted: int, accepted: int, times: int = 1) -> None:
        """Count drafts of `drafted` tokens on each of so many paths, of which one had `accepted` right."""
        if not 0 < paths <= len(self._places):
            return
        tried, right = self._tried[paths - 1], self._right[paths - 1]
        keep = 0.5 ** (drafted * times / HALF_LIFE)
        tried[:], right[:] = ([count * keep for count in each] for each in (tried, right))
        for place in range(min(drafted, accepted + 1, len(tried))):
            tried[place] += times
            right[place] += times * (place < accepted)

    def expected(self, paths: int = 1) -> list[float]:
        """Return how many of 1, 2, ... tokens of the path that wins are expected to be right."""
        rates: list[float] = []
        for count in range(1, paths + 1):
            fewer, rate, rates = rates, PRIOR_RATE, []
            learnt = zip(self._tried[count - 1], self._right[count - 1], strict=True)
            for place, (tried, good) in enumerate(learnt):
                if fewer:  # further paths begin in other ways, and go on as well as others
                    rate = fewer[place] if place else fewer[0] + SAVED * (1.0 - fewer[0])
                rate = (good + PRIOR_WEIGHT * rate) / (tried + PRIOR_WEIGHT)
                rates.append(rate)
        chance, right, found = 1.0, 0.0, []
        for rate in rates:
            chance *= rate
            right += chance
            found.append(right)
        return found

    def choose(self, requests: int, context: float = 0.0) -> Entries:
        """Return the shape for a step of so many requests, with `context` tokens on average: not empty."""
        requests = max(1, requests)
        whole, each = self._costs.longer(requests, context)
        expected = [self.expected(count) for count in range(1, len(self._places) + 1)]

        def rate(shape: Entries) -> float:
            seconds = self._costs.seconds(requests, shape) + whole + each * requests * shape
            further = requests * (shape.paths - 1)
            if further and (requests > MAX_REQUESTS or further > self._rows):
                return 0.0
            return (1 + expected[shape.paths - 1][shape.each - 1]) / (seconds + self._costs.sibling * further)

        return max(self.shapes, key=rate)
