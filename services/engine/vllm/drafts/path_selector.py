"""Turns drafted trees into flat drafts of several paths, where that pays.

Invariants (tests/unit/test_draft_path_selector.py asserts them):
- the first path is chosen as if there were no others, and acceptance is learnt from it alone;
- a flat draft is no longer than its request allows, and every other path has scratch blocks;
- after `PAUSE_AFTER_STEPS` steps in which no other path paid, none are tried for `PAUSE_STEPS`.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from seer.common.policy.draft_budget import HIGH_WEIGHT, PAUSE_AFTER_STEPS, PAUSE_STEPS, Choice, DraftBudget
from seer.common.policy.draft_paths import Fork, extra_paths, join, paths_of
from seer.common.policy.draft_shape import MAX_REQUESTS

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class _Tree:
    tokens: list[int]
    scores: npt.NDArray[np.float32]
    parents: list[int]
    paths: list[list[int]]


class PathSelector:
    """Selects at most `most_paths` paths per request, and `max_extra` per step besides first ones."""

    most_paths = 1

    def __init__(self, max_extra: int) -> None:
        self._max_extra = max_extra
        self._barren = self._rested = 0
        self._trees: list[_Tree] = []
        self._firsts: dict[Hashable, list[int]] = {}

    def wanted(self, batch: int) -> bool:
        """Whether to draft trees for a step of `batch` requests; call it once a step, after `accepted`."""
        self._firsts = {}
        if self.most_paths == 1 or batch > MAX_REQUESTS:
            return False
        if self._barren >= PAUSE_AFTER_STEPS:
            self._rested += 1
            if self._rested <= PAUSE_STEPS:
                return False
            self._barren = self._rested = 0
        return True

    def split_first_paths(
        self, tokens: Ints, scores: npt.NDArray[np.float32], parents: Ints, counts: Ints
    ) -> None:
        """Keep drafted trees [n, width], and cut the arrays to the trees' first paths."""
        self._trees = []
        for row, count in enumerate(counts.tolist()):
            above = parents[row, :count].tolist()
            paths = paths_of(above)
            self._trees.append(_Tree(tokens[row, :count].tolist(), scores[row, :count].copy(), above, paths))
            first = paths[0] if paths else []
            counts[row] = len(first)
            tokens[row, : len(first)] = tokens[row, first]
            scores[row, : len(first)] = scores[row, first]

    def flatten(
        self,
        ids: Sequence[Hashable],
        budget: DraftBudget,
        choice: Choice,
        most: Ints,
        high: npt.NDArray[np.bool_] | None,
    ) -> list[list[int]]:
        """Return flat drafts of the kept trees, of at most `most` entries; `choice` cuts the first paths."""
        forks = self._forks(budget, choice, most, high)
        batch = len(ids)
        seconds = budget.seconds(batch, int(most.sum())).tolist()
        chosen = extra_paths(forks, seconds, budget.sibling_seconds, batch, self._max_extra)
        self._barren = 0 if any(chosen) else self._barren + 1
        drafts, self._firsts = [], {}
        for request, tree, fork, others in zip(ids, self._trees, forks, chosen, strict=True):
            first = [tree.tokens[i] for i in fork.paths[0][: fork.keep]] if fork.paths else []
            if others:
                self._firsts[request] = first
            drafts.append(join([first, *([tree.tokens[i] for i in path] for path in others)]))
        return drafts

    @property
    def has_others(self) -> bool:
        """Whether the last drafts have more than their first paths."""
        return bool(self._firsts)

    def accepted(self, requests: Sequence[Hashable], sampled: Sequence[Sequence[int]]) -> Ints:
        """Return how many tokens of each request's first path its last step accepted: int32 [requests].

        `sampled` are the tokens of that step; -1 where there are none.
        """
        counts = np.fromiter(map(len, sampled), np.int32, len(sampled)) - 1
        if self._firsts:
            for row, (request, tokens) in enumerate(zip(requests, sampled, strict=True)):
                first = self._firsts.get(request)
                if first is not None and tokens:
                    pairs = enumerate(zip(first, tokens, strict=False))
                    wrong = (place for place, (draft, token) in pairs if draft != token)
                    counts[row] = next(wrong, min(len(first), len(tokens)))
        return counts

    def _forks(
        self, budget: DraftBudget, choice: Choice, most: Ints, high: npt.NDArray[np.bool_] | None
    ) -> list[Fork]:
        sizes = [len(tree.tokens) for tree in self._trees]
        places = np.array([place for tree in self._trees for place in _places(tree.parents)], np.intp)
        scores = np.concatenate([tree.scores for tree in self._trees])
        chances = budget.chances(np.repeat(choice.slots, sizes), scores, places).tolist()
        forks, start = [], 0
        for row, (tree, keep) in enumerate(zip(self._trees, choice.keep.tolist(), strict=True)):
            mine = chances[start : start + len(tree.tokens)]
            start += len(tree.tokens)
            for index, parent in enumerate(tree.parents):
                if parent >= 0:
                    mine[index] = min(mine[index], mine[parent])
            forks.append(
                Fork(
                    paths=tree.paths,  # the tree has at most `most_paths`
                    chances=mine,
                    keep=keep,
                    room=int(most[row]) - keep if keep else 0,
                    weight=HIGH_WEIGHT if high is not None and high[row] else 1.0,
                )
            )
        return forks


def _places(parents: Sequence[int]) -> list[int]:
    """Return each token's place in its path, from 0."""
    places: list[int] = []
    for parent in parents:
        places.append(places[parent] + 1 if parent >= 0 else 0)
    return places
