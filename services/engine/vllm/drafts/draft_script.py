"""Drafts made by a script instead of from trees: for measuring step times, and for checkers.

Whatever is drafted, the output tokens are the same: checkers have right drafts, wrong ones, or both verified.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from seer.common.policy.draft_paths import join
from seer.services.engine.vllm.requests import ExtraArgs

Kind = Literal["none", "random", "right", "wrong", "truncated"]


class DraftScript(msgspec.Struct, frozen=True, kw_only=True):
    """What to draft. `known` has the output tokens of responses, by index.

    `random` drafts arbitrary tokens below `vocab`, `right` the known ones, `wrong` others, `truncated` some
    right ones followed by wrong ones. Each draft has `count` tokens, those of the first `longer` responses
    one more, or a varying number without it. `others` are the kinds of further paths, verified beside the
    first; all paths share the limit on drafts.
    """

    kind: Kind
    vocab: int
    known: dict[int, list[int]] = {}
    count: int | None = None
    longer: int = 0
    others: tuple[Kind, ...] = ()

    def draft(self, extra: ExtraArgs, length: int, most: int) -> list[int]:
        """Return a flat draft of at most `most` entries after the first `length` tokens, prompt included."""
        each = (most + 1) // (1 + len(self.others)) - 1 if self.others else most
        kinds = enumerate((self.kind, *self.others))
        return join(self._path(kind, place, extra, length, each) for place, kind in kinds)

    def _path(self, kind: Kind, place: int, extra: ExtraArgs, length: int, most: int) -> list[int]:
        if kind == "none" or most <= 0:
            return []
        # The same place in a response always has the same draft.
        dice = (extra.index * 1_000_003 + length + place * 7_919) * 2_654_435_761 % 2**32
        wanted = dice // 7 % (most + 1) if self.count is None else self.count + (extra.index < self.longer)
        count = min(most, wanted)
        if kind == "random":
            return [(dice + i * 40_503) % self.vocab for i in range(count)]
        right = self.known.get(extra.index, [])[length - extra.prompt_len :][:count]
        keep = {"right": len(right), "wrong": 0, "truncated": dice // 101 % (len(right) + 1)}[kind]
        return right[:keep] + [(token + 1 + place) % self.vocab for token in right[keep:]]
