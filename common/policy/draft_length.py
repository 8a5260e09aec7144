"""How many tokens every request of a step drafts, where that is decided before any draft is known.

A step that is scheduled ahead has its size before the tokens that it continues are drawn, so all of its
requests draft as many: the paper's Algorithm 1, by the mean acceptance of each place of a draft. Where drafts
are known, `draft_budget` chooses token by token.

Invariants (tests/property/test_draft_length.py asserts them):
- of the lengths on offer it is the one with the most tokens/s, as far as acceptance and costs are known;
- better drafts, or cheaper ones, never make it shorter;
- a length that paid once is found again, whatever was learnt since: while nothing is known of a place, its
  rate is that of the place before it.
"""

from __future__ import annotations

from seer.common.policy.draft_costs import HALF_LIFE, StepCosts

PRIOR_RATE, PRIOR_WEIGHT = 0.6, 16.0
"""How often the first token is taken to be right before anything is known, and the weight of that in tokens.
The same weight carries a place's rate to the next one."""


class DraftLength:
    """One engine's choice of a length, at most `most` tokens; `costs`: how long its steps take."""

    def __init__(self, costs: StepCosts, most: int) -> None:
        self._costs = costs
        self._most = most
        self.lengths = [*(2**power for power in range(most.bit_length()) if 2**power < most), most]
        self._tried = [0.0] * most  # tokens at each place whose draft was right before it
        self._right = [0.0] * most

    def learn(self, drafted: int, accepted: int, times: int = 1) -> None:
        """Count so many verified drafts of `drafted` tokens, of which the first `accepted` were right."""
        keep = 0.5 ** (drafted * times / HALF_LIFE)
        self._tried = [count * keep for count in self._tried]
        self._right = [count * keep for count in self._right]
        for place in range(min(drafted, accepted + 1, self._most)):
            self._tried[place] += times
            self._right[place] += times * (place < accepted)

    def expected(self) -> list[float]:
        """Return how many tokens of a draft of 1, 2, ... tokens are expected to be right."""
        rate, chance, right, found = PRIOR_RATE, 1.0, 0.0, []
        for tried, good in zip(self._tried, self._right, strict=True):
            rate = (good + PRIOR_WEIGHT * rate) / (tried + PRIOR_WEIGHT)
            chance *= rate
            right += chance
            found.append(right)
        return found

    def choose(self, requests: int, context: float = 0.0) -> int:
        """Return the length for a step of so many requests, with `context` tokens on average: 1 at least."""
        requests, expected = max(1, requests), self.expected()
        whole, each = self._costs.longer(requests, context)

        def rate(length: int) -> float:
            seconds = self._costs.seconds(requests, length) + whole + each * requests * length
            return (1 + expected[length - 1]) / seconds

        best: int = max(self.lengths, key=rate)
        return best
