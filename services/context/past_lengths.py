"""Response lengths of earlier groups of the same prompts, which only order work: no token depends on them.

Invariants (tests/unit/test_past_lengths.py asserts them):
- only groups whose responses all finished are remembered: in other groups the short responses finished first;
- at most `bound` prompts are remembered, the most recently opened or closed ones;
- a group weighs `DECAY` times as much as the next group of its prompt, whatever the sizes of both.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from seer.common.policy.length import PastLengths

DECAY = 0.5
"""Weight of a group relative to the next one of its prompt: lengths drift as the model is trained."""


class PastPrompts:
    """Remembers prompts by id; a prompt id must be the same prompt in all rollouts."""

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._prompts: dict[str, PastLengths] = {}  # least recently used first

    def __len__(self) -> int:
        return len(self._prompts)

    def recall(self, prompt_id: str) -> PastLengths | None:
        """Return what is remembered of a prompt."""
        known = self._prompts.pop(prompt_id, None)
        if known is not None:
            self._prompts[prompt_id] = known
        return known

    def keep(self, prompt_id: str, lengths: Collection[int]) -> None:
        """Add a whole group: its responses' lengths in tokens."""
        if not self._bound or not lengths:
            return
        mean, count = math.fsum(math.log(max(tokens, 1)) for tokens in lengths) / len(lengths), len(lengths)
        known = self._prompts.pop(prompt_id, None)
        if known is None:
            self._prompts[prompt_id] = PastLengths(mean, count)
        else:
            old = DECAY * known.responses
            total = old + count
            self._prompts[prompt_id] = PastLengths((old * known.mean + count * mean) / total, total)
        while len(self._prompts) > self._bound:
            del self._prompts[next(iter(self._prompts))]
