"""Drafts on order, in the place of those from trees: for measuring step times, and for checkers.

Whatever is drafted, the tokens are the same: checkers order drafts that are right, wrong, or both.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from seer.services.engine.vllm.requests import Extra

Kind = Literal["none", "random", "right", "wrong", "truncated"]


class Script(msgspec.Struct, frozen=True, kw_only=True):
    """What to draft. `known` has output tokens by response index: what is right.

    `random` drafts tokens under `vocab`, `right` the known ones, `wrong` others, `truncated` some right
    ones, then wrong ones. `count` tokens each time; without it, any number.
    """

    kind: Kind
    vocab: int
    known: dict[int, list[int]] = {}
    count: int | None = None

    def draft(self, extra: Extra, length: int, most: int) -> list[int]:
        """Return a draft of at most `most` tokens after the first `length`, prompt included."""
        if self.kind == "none" or most <= 0:
            return []
        dice = (extra.index * 1_000_003 + length) * 2_654_435_761 % 2**32  # the same for the same place
        count = min(most, dice // 7 % (most + 1) if self.count is None else self.count)
        if self.kind == "random":
            return [(dice + i * 40_503) % self.vocab for i in range(count)]
        right = self.known.get(extra.index, [])[length - extra.prompt_len :][:count]
        keep = {"right": len(right), "wrong": 0, "truncated": dice // 101 % (len(right) + 1)}[self.kind]
        return right[:keep] + [(token + 1) % self.vocab for token in right[keep:]]
