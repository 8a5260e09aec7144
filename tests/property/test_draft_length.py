"""The length of all drafts of a step: the best of those on offer, and never stuck at a short one."""

from hypothesis import given, settings
from hypothesis import strategies as st

from seer.common.policy.draft_costs import StepCosts
from seer.common.policy.draft_length import DraftLength

MOST = 8


def costs(first: float, token: float) -> StepCosts:
    """A step of n requests with k drafts each takes `first` seconds, and `token` for each of n (1 + k) tokens."""
    batches, drafts = (1, 4, 16, 64, 256), (0, 1, 2, 4, 8)
    grid = tuple(tuple(first + token * batch * (1 + each) for each in drafts) for batch in batches)
    return StepCosts(batches=batches, drafts=drafts, grid=grid)


def taught(length: DraftLength, rate: float, drafted: int, drafts: int = 400) -> DraftLength:
    """Teach it drafts whose every token is right with this chance after a right one, evenly spread."""
    for i in range(drafts):
        accepted, chance = 0, i * 0.618034 % 1
        while accepted < drafted and chance < rate ** (accepted + 1):
            accepted += 1
        length.learn(drafted, accepted)
    return length


rates, firsts = st.floats(0.02, 0.98), st.floats(1e-4, 1.0)
tokens, requests = st.floats(1e-7, 1e-2), st.integers(1, 300)


@settings(max_examples=200, deadline=None)
@given(rate=rates, first=firsts, token=tokens, n=requests)
def test_no_other_length_is_expected_to_be_faster(rate: float, first: float, token: float, n: int) -> None:
    length = taught(DraftLength(costs(first, token), MOST), rate, MOST)
    chosen, expected = length.choose(n), length.expected()
    speeds = {k: (1 + expected[k - 1]) / costs(first, token).seconds(n, k) for k in length.lengths}
    assert speeds[chosen] == max(speeds.values())


@settings(max_examples=200, deadline=None)
@given(rate=rates, better=rates, first=firsts, token=tokens, n=requests)
def test_better_drafts_are_never_shorter(
    rate: float, better: float, first: float, token: float, n: int
) -> None:
    low, high = sorted((rate, better))
    profile = costs(first, token)
    short = taught(DraftLength(profile, MOST), low, MOST).choose(n)
    assert short <= taught(DraftLength(profile, MOST), high, MOST).choose(n)


@settings(max_examples=100, deadline=None)
@given(rate=rates, first=firsts, token=tokens, cheaper=st.floats(0.0, 1.0), n=requests)
def test_cheaper_drafts_are_never_shorter(
    rate: float, first: float, token: float, cheaper: float, n: int
) -> None:
    dear, cheap = (
        taught(DraftLength(costs(first, each), MOST), rate, MOST) for each in (token, token * cheaper)
    )
    assert dear.choose(n) <= cheap.choose(n)


def test_expected_follows_what_was_accepted() -> None:
    length = taught(DraftLength(costs(1e-2, 1e-6), MOST), 0.5, MOST, drafts=4000)
    expected = length.expected()
    assert all(abs(got - sum(0.5**j for j in range(1, k + 2))) < 0.05 for k, got in enumerate(expected))


def test_one_token_is_enough_to_find_long_drafts_again() -> None:
    length = taught(DraftLength(costs(1e-2, 1e-5), MOST), 0.03, MOST, drafts=4000)
    assert length.choose(64) == 1
    for _ in range(200):  # drafts of one token are always right now
        length.learn(1, 1, times=1000)
    assert length.choose(64) == MOST


def test_a_step_that_costs_by_the_token_drafts_little() -> None:
    length = taught(DraftLength(costs(1e-4, 1e-3), MOST), 0.6, MOST)
    assert length.choose(256) == 1
    assert taught(DraftLength(costs(1.0, 1e-7), MOST), 0.6, MOST).choose(256) == MOST
