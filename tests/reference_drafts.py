"""What `StepDrafter` drafts, one row after the other, in plain Python around `GroupTree`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from seer._native import GroupTree, StepDrafter

Tree = tuple[list[int], list[int], list[float]]
"""Tokens, their parents and their scores."""


def cut_tree(made: Tree, stops: Collection[int], placeholder: int) -> Tree:
    """Return a drafted tree without placeholders and what follows a stop id."""
    tokens, parents, scores = made
    kept: dict[int, int] = {}  # old places to new ones; parents come before their children
    for place, parent in enumerate(parents):
        goes_on = parent < 0 or (parent in kept and tokens[parent] not in stops)
        if goes_on and tokens[place] != placeholder:
            kept[place] = len(kept)
    above = [kept.get(parents[place], -1) for place in kept]
    return [tokens[place] for place in kept], above, [scores[place] for place in kept]


@dataclass
class Row:
    """A request: its prompt and output, and of the output, how much its trees were given."""

    tree: GroupTree | None
    index: int
    name: int
    prompt: int
    tokens: list[int]
    limit: int
    stops: Collection[int]
    placeholder: int
    told: int = 0
    learns: bool | None = None  # not known yet, whether its tree is full

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt :]


def _appended_and_drafted(tree: GroupTree, name: int, row: Row, most: int) -> Tree:
    if name >= 0:
        tree.append(name, row.told, row.output[row.told :])
    made = tree.draft(row.tokens, most, own=name)
    return made.token_ids, made.parents, made.scores


def _expected(made: Tree) -> float:
    """Return the sum of a draft's scores, added up as float32."""
    return float(np.add.accumulate(np.array([0.0, *made[2]], np.float32))[-1])


class ReferenceDrafts:
    """See `StepDrafter`; trees take `most_bytes`."""

    def __init__(self, most_bytes: int) -> None:
        self.rows: dict[int, Row] = {}
        self.common: GroupTree | None = None
        self.refused = 0
        self._most_bytes = most_bytes

    def set(self, slot: int, row: Row) -> None:
        """Give a request the slot; trees are given its output."""
        learnt = row.tree is None or self._full(row.tree) or self._teach(row.tree, row.index, row.output)
        learnt &= self._teach(self.common, row.name, row.output)
        row.told = len(row.output) if learnt else 0
        self.rows[slot] = row

    def clear(self, slot: int) -> None:
        self.rows.pop(slot, None)

    def use_common(self, tree: GroupTree | None) -> None:
        """Use this tree of all groups, which is given all outputs."""
        self.common = tree
        for _, row in sorted(self.rows.items()):
            if not self._teach(tree, row.name, row.output):
                row.told = 0

    def step(self, sampled: dict[int, list[int]], k: int) -> dict[int, tuple[list[int], list[float]]]:
        """Return drafts and scores by slot, after these tokens."""
        return {slot: self._draft(self.rows[slot], tokens, k) for slot, tokens in sampled.items()}

    def _draft(self, row: Row, sampled: Sequence[int], k: int) -> tuple[list[int], list[float]]:
        if not sampled:  # an unfinished prefill
            return [], []
        row.tokens += sampled
        if row.learns is None:
            row.learns = row.tree is not None and not self._full(row.tree)
        most = min(max(row.limit - 1 - len(row.tokens), 0), k)
        try:
            made = self._grow(row, most)
        except ValueError:  # the whole output is shown again in the next step
            row.told, row.learns = 0, None
            self.refused += 1
            return [], []
        row.told = len(row.output)
        tokens, _, scores = cut_tree(made, row.stops, row.placeholder)
        return tokens, scores

    def _grow(self, row: Row, most: int) -> Tree:
        """Give the trees what is new; return the better of their drafts."""
        made: Tree = [], [], []
        if row.tree is not None:
            made = _appended_and_drafted(row.tree, row.index if row.learns else -1, row, most)
        if self.common is None or row.name < 0:
            return made
        other = _appended_and_drafted(self.common, row.name, row, most)
        return other if _expected(other) > _expected(made) else made

    def _teach(self, tree: GroupTree | None, name: int, output: list[int]) -> bool:
        try:
            if tree is not None and name >= 0 and output:
                StepDrafter(1).feed(tree, name, 0, output)  # in pieces: a tree may be full in between
        except ValueError:
            self.refused += 1
            return False
        return True

    def _full(self, tree: GroupTree) -> bool:
        return tree.bytes >= self._most_bytes
