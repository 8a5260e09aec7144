"""The trees of a worker's groups and the requests in its slots, as the native `StepDrafter` drafts for them.

Invariants:
- a draft never goes beyond its chunk's limit, has nothing after a stop id, and no placeholder of images;
- what a tree refuses costs drafts alone, and is counted;
- a request that loses its slot, or whose group is forgotten, drafts and teaches nothing more, even in steps
  that were launched before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from seer import _native
from seer.services.engine.vllm.requests import ExtraArgs

if TYPE_CHECKING:
    from seer.services.dgds.client import StreamDelta

TREE_BYTES = 2**30
"""Most memory of one tree; a full one takes no more tokens."""

COMMON_TOKENS = 4_000_000
"""Most tokens of the common tree, 70 MB; it is then rebuilt from what runs."""

_POSITIVE = 2**63 - 1


class TreeDrafter:
    """See the module's docstring; `placeholder`: the token that stands for images, or -1.

    `extras` are the requests by slot, `generations` int64 [slots] their names for `_native.DraftStep`.
    """

    def __init__(self, slots: int, placeholder: int) -> None:
        self.steps = _native.StepDrafter(slots)
        self.counters: Counter[str] = Counter()
        self.extras: list[ExtraArgs | None] = [None] * slots
        self.generations = np.zeros(slots, np.int64)
        self._placeholder = placeholder
        self._trees: dict[str, _native.GroupTree] = {}
        self._common: _native.GroupTree | None = None

    def open(self, group: str, prompt: Sequence[int]) -> None:
        """Create a group's tree, if there is none."""
        if group not in self._trees:
            self._trees[group] = _native.GroupTree(prompt, TREE_BYTES)

    def use_common_tree(self, enabled: bool) -> None:
        """Use, or do not use, one tree of all groups for drafts where a group's own tree has worse ones."""
        self._common = _native.GroupTree((), TREE_BYTES) if enabled else None
        self.steps.use_common(self._common)

    def feed(self, deltas: Iterable[StreamDelta]) -> None:
        """Add tokens of other responses to the trees; those of unknown groups are ignored."""
        for delta in deltas:
            tree = self._trees.get(delta.group_id)
            if tree is None:
                continue
            try:
                self.steps.feed(tree, delta.index, delta.previous, delta.tokens)
                self.counters["fed"] += len(delta.tokens)
            except ValueError:  # the tree is full, or there is a gap after something it refused
                self.counters["refused"] += 1

    def forget(self, groups: Iterable[str]) -> None:
        """Drop the trees of groups that no longer run here."""
        gone = set(groups)
        for group in gone:
            self._trees.pop(group, None)
        for slot, extra in enumerate(self.extras):
            if extra is not None and extra.group in gone:
                self.clear(slot)

    def set(
        self, slot: int, extra: ExtraArgs, stop_ids: Sequence[int], tokens: npt.NDArray[np.int32]
    ) -> None:
        """Give a request of these tokens, int32, prompt first, the slot; its output goes into its trees."""
        if self._common is not None and self._common.tokens > COMMON_TOKENS:
            self.use_common_tree(True)
        self.extras[slot] = extra
        name = hash((extra.group, extra.index)) & _POSITIVE if extra.group else -1
        self.generations[slot] = self.steps.set(
            slot, self._trees.get(extra.group), extra.index, name, extra.prompt_len, tokens, extra.limit,
            list(stop_ids), self._placeholder,
        )  # fmt: skip

    def clear(self, slot: int) -> None:
        """Take the slot's request out of it."""
        self.steps.clear(slot)
        self.extras[slot] = None
        self.generations[slot] = 0


def placeholder_of(vllm_config: object) -> int:
    """Return the token id that stands for images in a model's prompts; -1: it has none."""
    model = getattr(vllm_config, "model_config", None)
    return int(getattr(getattr(model, "hf_config", None), "image_token_id", None) or -1)
