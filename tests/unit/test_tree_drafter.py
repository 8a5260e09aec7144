"""The trees of a worker's groups: who drafts from which, and what becomes of requests and groups that go."""

from types import SimpleNamespace

import numpy as np
import pytest

from seer import _native
from seer.services.engine.vllm.drafts import tree_drafter
from seer.services.engine.vllm.drafts.tree_drafter import TreeDrafter, placeholder_of
from seer.services.engine.vllm.requests import ExtraArgs

PROMPT = [1, 2, 3]
SAID = [5, 6, 7, 8, 9, 5, 6, 7, 8, 9]


def extra(group: str = "g", index: int = 0, limit: int = 100) -> ExtraArgs:
    return ExtraArgs(sampling=None, group=group, index=index, prompt_len=len(PROMPT), limit=limit)


def delta(tokens: list[int], group: str = "g", index: int = 9, previous: int = 0) -> SimpleNamespace:
    return SimpleNamespace(group_id=group, index=index, previous=previous, tokens=np.array(tokens, np.int32))


@pytest.fixture
def trees() -> TreeDrafter:
    trees = TreeDrafter(4, placeholder=-1)
    trees.open("g", PROMPT)
    return trees


def join(
    trees: TreeDrafter, slot: int, request: ExtraArgs, said: list[int] = (), stops: list[int] = ()
) -> None:
    trees.set(slot, request, stops, np.array([*PROMPT, *said], np.int32))


def draft(trees: TreeDrafter, slot: int, drew: list[int], k: int = 4) -> list[int]:
    """Return what a slot drafts after a step that drew these tokens."""
    drafts, counts = np.zeros((1, k), np.int32), np.zeros(1, np.int32)
    slots = np.array([slot], np.int32)
    step = _native.DraftStep(
        trees.steps, slots, trees.generations[slots], np.array([drew], np.int32),
        np.array([len(drew)], np.int32), drafts, counts, np.zeros((1, k), np.float32),
    )  # fmt: skip
    step.run()
    return drafts[0, : counts[0]].tolist()


def test_siblings_draft_for_each_other(trees: TreeDrafter) -> None:
    join(trees, 0, extra(index=0), SAID)
    join(trees, 1, extra(index=1))
    assert draft(trees, 1, [5]) == [6, 7, 8, 9]


def test_what_is_fed_is_drafted(trees: TreeDrafter) -> None:
    join(trees, 1, extra(index=1))
    trees.feed([delta(SAID), delta([1, 2], group="unknown")])
    assert draft(trees, 1, [5]) == [6, 7, 8, 9]
    assert trees.counters == {"fed": len(SAID)}


def test_a_gap_in_what_is_fed_costs_that_alone(trees: TreeDrafter) -> None:
    trees.feed([delta([1, 2], previous=7), delta(SAID, index=8)])
    assert trees.counters == {"refused": 1, "fed": len(SAID)}


def test_limits_and_stops_end_drafts(trees: TreeDrafter) -> None:
    trees.feed([delta(SAID)])
    join(trees, 0, extra(index=0, limit=len(PROMPT) + 4))
    assert draft(trees, 0, [5]) == [6, 7]  # the fourth is sampled
    join(trees, 1, extra(index=1), stops=[7])
    assert draft(trees, 1, [5]) == [6, 7]


def test_a_request_without_a_group_has_no_drafts(trees: TreeDrafter) -> None:
    trees.use_common_tree(True)
    trees.feed([delta(SAID)])
    join(trees, 0, extra(group=""))
    assert draft(trees, 0, [5]) == []


def test_the_common_tree_drafts_across_groups(trees: TreeDrafter) -> None:
    trees.open("h", PROMPT)
    join(trees, 0, extra(index=0), SAID)
    join(trees, 1, extra(group="h", index=0))
    assert draft(trees, 1, [5]) == []
    trees.use_common_tree(True)
    assert draft(trees, 1, [6]) == [7, 8, 9, 5]


def test_the_common_tree_begins_anew_once_it_is_large(
    trees: TreeDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tree_drafter, "COMMON_TOKENS", 15)
    trees.use_common_tree(True)
    first = trees._common
    join(trees, 0, extra(index=0), SAID)
    join(trees, 1, extra(index=1), SAID)
    assert trees._common is first
    join(trees, 2, extra(index=2))
    assert trees._common is not first
    assert trees._common.tokens == 2 * len(SAID), "what runs is in it"


def test_a_forgotten_group_neither_drafts_nor_learns(trees: TreeDrafter) -> None:
    join(trees, 0, extra(index=0), SAID)
    generation = trees.generations[0]
    trees.forget(["g", "unknown"])
    assert (trees.extras[0], trees.generations[0]) == (None, 0)
    assert draft(trees, 0, [5]) == []
    trees.generations[0] = generation  # as in a step that was launched before
    assert draft(trees, 0, [5]) == []


def test_a_slot_is_its_new_requests_alone(trees: TreeDrafter) -> None:
    join(trees, 0, extra(index=0), SAID)
    before = trees.generations[0]
    join(trees, 0, extra(index=1))
    after, trees.generations[0] = trees.generations[0], before
    assert draft(trees, 0, [5]) == []
    trees.generations[0] = after
    assert draft(trees, 0, [5]) == [6, 7, 8, 9]


def test_placeholders_of_images_are_never_drafted() -> None:
    trees = TreeDrafter(
        1,
        placeholder_of(
            SimpleNamespace(model_config=SimpleNamespace(hf_config=SimpleNamespace(image_token_id=7)))
        ),
    )
    trees.open("g", PROMPT)
    trees.feed([delta(SAID)])
    join(trees, 0, extra())
    assert draft(trees, 0, [5]) == [6]
