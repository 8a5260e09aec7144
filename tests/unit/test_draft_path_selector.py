"""Trees become flat drafts: first paths as ever, siblings where they pay, and each taught by its own."""

import numpy as np
import pytest

from seer.common.policy.draft_budget import PAUSE_AFTER_STEPS, PAUSE_STEPS, Choice, DraftBudget
from seer.common.policy.draft_costs import StepCosts
from seer.common.policy.draft_paths import SEPARATOR as S
from seer.common.policy.draft_shape import MAX_REQUESTS
from seer.services.engine.vllm.drafts.path_selector import PathSelector

WIDTH = 8
# Two paths 10 11 12 and 10 20 21, and a third one, 30.
TOKENS, PARENTS, SCORES = [10, 11, 20, 30, 12, 21], [-1, 0, 0, -1, 1, 2], [0.9, 0.5, 0.4, 0.3, 0.3, 0.2]


def costs(row: float, sibling: float = 0.0) -> StepCosts:
    return StepCosts(batches=(1, 8), drafts=(0, 8), grid=((1.0, 1.0 + 8 * row),) * 2, sibling=sibling)


class Trees:
    """What the speculator holds after a step of n requests alike."""

    def __init__(self, n: int = 1) -> None:
        self.tokens, self.scores = np.zeros((n, WIDTH), np.int32), np.zeros((n, WIDTH), np.float32)
        self.parents, self.counts = np.zeros((n, WIDTH), np.int32), np.full(n, len(TOKENS), np.int32)
        size = len(TOKENS)
        self.tokens[:, :size], self.scores[:, :size], self.parents[:, :size] = TOKENS, SCORES, PARENTS

    def flatten(
        self, selector: PathSelector, budget: DraftBudget, room: int = WIDTH
    ) -> tuple[Choice, list[list[int]]]:
        n = len(self.counts)
        selector.split_first_paths(self.tokens, self.scores, self.parents, self.counts)
        slots = np.array([budget.slot(str(i)) for i in range(n)])
        choice = budget.choose(slots, self.scores, self.counts, n)
        ids = [str(i) for i in range(n)]
        return choice, selector.flatten(ids, budget, choice, np.full(n, room, np.int32), None)


def made(most_paths: int = 3, max_extra: int = 16) -> PathSelector:
    selector = PathSelector(max_extra)
    selector.most_paths = most_paths
    return selector


def test_where_rows_cost_nothing_all_paths_are_drafted():
    trees = Trees()
    choice, (draft,) = trees.flatten(made(), DraftBudget(costs(0.0), WIDTH), room=12)
    assert draft == [10, 11, 12, S, 10, 20, 21, S, 30]
    assert trees.tokens[0, :3].tolist() == [10, 11, 12]
    assert trees.counts.tolist() == choice.keep.tolist() == [3]


@pytest.mark.parametrize(
    ("row", "sibling", "room", "most", "expected"),
    [
        (0.0, 9.0, 12, 16, [10, 11, 12]),  # a row's bookkeeping costs more than it brings
        (0.0, 0.0, 7, 16, [10, 11, 12, S, 10, 20, 21]),
        (0.0, 0.0, 6, 16, [10, 11, 12, S, 10, 20]),
        (0.0, 0.0, 3, 16, [10, 11, 12]),
        (0.0, 0.0, 12, 1, [10, 11, 12, S, 10, 20, 21]),
        (9.0, 0.0, 12, 16, []),  # nothing pays, not even a first path
    ],
)
def test_a_flat_draft_is_as_long_as_pays_and_fits(row, sibling, room, most, expected):
    _, (draft,) = Trees().flatten(made(max_extra=most), DraftBudget(costs(row, sibling), WIDTH), room=room)
    assert draft == expected


def test_a_first_path_learns_what_became_of_it_alone():
    selector = made()

    def accepted(*sampled):
        return selector.accepted(["0", "1"], [list(sampled), []]).tolist()

    assert accepted(7, 7, 7) == [2, -1], "it was the only path"
    Trees().flatten(selector, DraftBudget(costs(0.0), WIDTH), room=12)
    assert accepted(10, 20, 21, 5) == [1, -1], "another path won"
    assert accepted(10, 11, 12, 5) == [3, -1]
    assert accepted(30, 5) == [0, -1]
    assert accepted() == [-1, -1], "a request that is gone says nothing"
    assert selector.wanted(1)
    assert accepted(10, 20, 21) == [2, -1], "in the step after, there were no siblings"


def test_siblings_of_a_step_have_scratch():
    _, drafts = Trees(4).flatten(made(max_extra=5), DraftBudget(costs(0.0), WIDTH), room=12)
    assert sum(draft.count(S) for draft in drafts) == 5
    assert all(draft[:3] == [10, 11, 12] for draft in drafts)


def test_large_batches_and_single_paths_are_left_alone():
    assert made().wanted(MAX_REQUESTS)
    assert not made().wanted(MAX_REQUESTS + 1)
    assert not made(1).wanted(1)


def test_where_no_sibling_pays_none_is_looked_for_for_a_while():
    selector, budget = made(), DraftBudget(costs(0.0, 9.0), WIDTH)
    for _ in range(PAUSE_AFTER_STEPS):
        assert selector.wanted(1)
        Trees().flatten(selector, budget)
    assert [selector.wanted(1) for _ in range(PAUSE_STEPS + 1)] == [False] * PAUSE_STEPS + [True]
