"""What a buffer logs of prompts that it refuses, or that fail: one line per rollout and reason. Pure.

Invariants (tests/unit/test_failed_prompts.py):
- the first ones are due at once, further ones `FOLD_SECONDS` after the last lines;
- there are at most `MOST_REASONS` lines at a time and one for the rest, each with at most `MOST_IDS` ids and
  `MOST_TEXT` characters of its reason: any number of prompts may fail;
- every prompt is counted in one line.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from seer.common import ids, wire

FOLD_SECONDS = 10.0
MOST_REASONS, MOST_IDS, MOST_TEXT = 8, 10, 400

EXPECTED = frozenset({"cancelled"})
"""Codes of prompts that ended as their trainer wanted."""


@dataclass(slots=True)
class Fold:
    """Prompts that ended for one reason: how many, and the ids of the first, as `seer trace` takes them."""

    rollout_id: str
    code: str
    why: str
    prompts: int = 0
    first: list[str] = field(default_factory=list)

    def add(self, refused: wire.Refused) -> None:
        """Count the prompts of a refusal."""
        self.prompts += len(refused.prompt_ids)
        for prompt_id in refused.prompt_ids[: MOST_IDS - len(self.first)]:
            self.first.append(ids.group_id(refused.rollout_id, prompt_id))

    @property
    def expected(self) -> bool:
        """Whether nobody needs to look at it."""
        return self.code in EXPECTED


class FailedPrompts:
    """Call `add` with each refusal, and log what `due` returns."""

    def __init__(self) -> None:
        self._folds: dict[tuple[str, str, str], Fold] = {}
        self._quiet_until = 0.0

    def add(self, refused: wire.Refused) -> None:
        """Take note of prompts that were refused, or failed."""
        key = refused.rollout_id, refused.code, refused.message[:MOST_TEXT]
        if key not in self._folds and len(self._folds) >= MOST_REASONS:
            key = "", "refused", "of other rollouts, or for other reasons"
        self._folds.setdefault(key, Fold(*key)).add(refused)

    def due(self, now: float, *, last: bool = False) -> list[Fold]:
        """Return the lines to be logged at `now`, in monotonic seconds; all with `last`."""
        if not self._folds or (now < self._quiet_until and not last):
            return []
        found, self._folds = list(self._folds.values()), {}
        self._quiet_until = now + FOLD_SECONDS
        return found
