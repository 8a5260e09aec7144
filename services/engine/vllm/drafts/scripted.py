"""Drafts on order, in the place of those from trees: for measuring step times, and for checkers.

Whatever is drafted, the tokens are the same: checkers order drafts that are right, wrong, or both.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from seer.common.policy.draft_paths import join
from seer.services.engine.vllm.requests import Extra

Kind = Literal["none", "random", "right", "wrong", "truncated"]


class DraftScript(msgspec.Struct, frozen=True, kw_only=True):
    """What to draft. `known` has output tokens by response index: what is right.

    `random` drafts tokens under `vocab`, `right` the known ones, `wrong` others, `truncated` some right
    ones, then wrong ones. `count` tokens each time; without it, any number. `siblings` are the kinds
    of further paths, verified beside the first; all share what may be drafted.
    """

    kind: Kind
    vocab: int
    known: dict[int, list[int]] = {}
    count: int | None = None
    siblings: tuple[Kind, ...] = ()

    def draft(self, extra: Extra, length: int, most: int) -> list[int]:
        """Return a flat draft of at most `most` entries after the first `length` tokens, prompt included."""
        each = (most + 1) // (1 + len(self.siblings)) - 1 if self.siblings else most
        kinds = enumerate((self.kind, *self.siblings))
        return join(self._path(kind, place, extra, length, each) for place, kind in kinds)

    def _path(self, kind: Kind, place: int, extra: Extra, length: int, most: int) -> list[int]:
        if kind == "none" or most <= 0:
            return []
        # The same for the same place.
        dice = (extra.index * 1_000_003 + length + place * 7_919) * 2_654_435_761 % 2**32
        count = min(most, dice // 7 % (most + 1) if self.count is None else self.count)
        if kind == "random":
            return [(dice + i * 40_503) % self.vocab for i in range(count)]
        right = self.known.get(extra.index, [])[length - extra.prompt_len :][:count]
        keep = {"right": len(right), "wrong": 0, "truncated": dice // 101 % (len(right) + 1)}[kind]
        return right[:keep] + [(token + 1 + place) % self.vocab for token in right[keep:]]
