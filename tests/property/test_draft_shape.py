"""The shape of all drafts of a step: the best of those on offer, with further paths only where they pay."""

from hypothesis import given, settings
from hypothesis import strategies as st

from seer.common.policy.draft_costs import StepCosts
from seer.common.policy.draft_paths import Entries, paths_in
from seer.common.policy.draft_shape import MAX_REQUESTS, DraftShape

MOST, PATHS, ROWS = 11, 3, 16


def costs(first: float, token: float, sibling: float = 0.0) -> StepCosts:
    """A step of n requests with k entries each takes `first` seconds, and `token` for each of n (1 + k) tokens."""
    batches, drafts = (1, 4, 16, 64, 256), (0, 1, 2, 4, 8, MOST)
    grid = tuple(tuple(first + token * batch * (1 + each) for each in drafts) for batch in batches)
    return StepCosts(batches=batches, drafts=drafts, grid=grid, sibling=sibling)


def accepted(rate: float, drafted: int, first: float, chance: float) -> int:
    """How many tokens are right of which the first is with chance `first`, and others at this rate."""
    right, probability = 0, first
    while right < drafted and chance < probability:
        right, probability = right + 1, probability * rate
    return right


def taught(shape: DraftShape, rate: float, saved: float, drafts: int = 400) -> DraftShape:
    """Teach it drafts of all numbers of paths, of which each further one saves so many wrong first tokens."""
    for paths in range(1, PATHS + 1):
        each, first = (MOST + 1) // paths - 1, 1 - (1 - rate) * (1 - saved) ** (paths - 1)
        for i in range(drafts):
            shape.learn(paths, each, accepted(rate, each, first, i * 0.618034 % 1))
    return shape


rates, firsts, saves = st.floats(0.02, 0.98), st.floats(1e-4, 1.0), st.floats(0.0, 1.0)
tokens, requests, siblings = st.floats(1e-7, 1e-2), st.integers(1, 300), st.floats(0.0, 1e-2)


def taught_one(profile: StepCosts, rate: float, drafts: int = 400) -> DraftShape:
    """Return a choice among single paths that was taught drafts whose tokens are right at this rate."""
    shape = DraftShape(profile, MOST)
    for i in range(drafts):
        shape.learn(1, MOST, accepted(rate, MOST, rate, i * 0.618034 % 1))
    return shape


@settings(max_examples=200, deadline=None)
@given(rate=rates, better=rates, first=firsts, token=tokens, n=requests)
def test_better_drafts_are_never_shorter(rate, better, first, token, n) -> None:
    profile = costs(first, token)
    low, high = (taught_one(profile, each).choose(n) for each in sorted((rate, better)))
    assert low <= high
    assert paths_in(high) == 1


@settings(max_examples=100, deadline=None)
@given(rate=rates, first=firsts, token=tokens, cheaper=st.floats(0.0, 1.0), n=requests)
def test_cheaper_drafts_are_never_shorter(rate, first, token, cheaper, n) -> None:
    dear, cheap = (taught_one(costs(first, each), rate).choose(n) for each in (token, token * cheaper))
    assert dear <= cheap


def test_expected_follows_what_was_accepted() -> None:
    expected = taught_one(costs(1e-2, 1e-6), 0.5, drafts=4000).expected()
    assert all(abs(got - sum(0.5**j for j in range(1, k + 2))) < 0.05 for k, got in enumerate(expected))


def test_one_token_is_enough_to_find_long_drafts_again() -> None:
    shape = taught_one(costs(1e-2, 1e-5), 0.03, drafts=4000)
    assert shape.choose(64) == 1
    for _ in range(200):  # drafts of one token are always right now
        shape.learn(1, 1, 1, times=1000)
    assert shape.choose(64) == MOST


def test_a_step_that_costs_by_the_token_drafts_little() -> None:
    assert taught_one(costs(1e-4, 1e-3), 0.6).choose(256) == 1
    assert taught_one(costs(1.0, 1e-7), 0.6).choose(256) == MOST


@settings(max_examples=200, deadline=None)
@given(rate=rates, saved=saves, first=firsts, token=tokens, sibling=siblings, n=requests)
def test_no_other_shape_is_expected_to_be_faster(rate, saved, first, token, sibling, n) -> None:
    profile = costs(first, token, sibling)
    shape = taught(DraftShape(profile, MOST, PATHS, ROWS), rate, saved)
    chosen = shape.choose(n)

    def speed(each: Entries) -> float:
        further = n * (each.paths - 1)
        return (1 + shape.expected(each.paths)[each.each - 1]) / (
            profile.seconds(n, each) + sibling * further
        )

    allowed = [
        each for each in shape.shapes
        if each.paths == 1 or (n <= MAX_REQUESTS and n * (each.paths - 1) <= ROWS)
    ]  # fmt: skip
    assert chosen in allowed
    assert speed(chosen) == max(map(speed, allowed))
    assert chosen <= MOST


def test_further_paths_are_tried_kept_where_they_save_and_else_given_up() -> None:
    profile = costs(1e-2, 1e-5, 1e-5)  # where they are nearly free
    assert DraftShape(profile, MOST, PATHS, ROWS).choose(1).paths > 1
    assert taught(DraftShape(profile, MOST, PATHS, ROWS), 0.4, 0.5).choose(1).paths > 1
    shape, tried = DraftShape(profile, MOST, PATHS, ROWS), 0
    for i in range(2000):
        chosen = shape.choose(1)
        tried += chosen.paths > 1
        shape.learn(chosen.paths, chosen.each, accepted(0.5, chosen.each, 0.5, i * 0.618034 % 1))
    assert 0 < tried < 200
    assert shape.choose(1).paths == 1


def test_dear_rows_are_never_tried() -> None:
    assert DraftShape(costs(1e-2, 1e-5, 1e-2), MOST, PATHS, ROWS).choose(1).paths == 1


def test_too_few_entries_have_one_path() -> None:
    assert [(shape, shape.paths) for shape in DraftShape(costs(1.0, 0.0), 3, 5).shapes] == [
        (1, 1), (2, 1), (3, 1), (3, 2),
    ]  # fmt: skip
