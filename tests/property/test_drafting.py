"""What `common/policy/draft_costs.py` and `draft_budget.py` say of themselves, for any costs and chances."""

import itertools

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from seer.common.errors import InvalidField
from seer.common.policy.draft_budget import (
    COST_FACTOR,
    PAUSE_AFTER_STEPS,
    PAUSE_STEPS,
    PROBE_TOKENS,
    REFRESH_STEPS,
    DraftBudget,
    choose_lengths,
)
from seer.common.policy.draft_costs import (
    CELLS,
    PLACES,
    PRIOR,
    Acceptance,
    StepCosts,
    from_percent,
    to_percent,
)

times = st.floats(1e-4, 1.0)
chance = st.floats(0.0, 1.0)


@st.composite
def costs_of(draw):
    batches = sorted(draw(st.sets(st.integers(1, 64), min_size=1, max_size=4)))
    drafts = sorted(draw(st.sets(st.integers(0, 16), min_size=1, max_size=4)))
    grid = [[draw(times) for _ in drafts] for _ in batches]
    return StepCosts(batches=tuple(batches), drafts=tuple(drafts), grid=tuple(map(tuple, grid)))


@st.composite
def steps(draw):
    """A step's chances [n, width], seconds by rows, and the requests without drafts."""
    n, width = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    chances = np.array([draw(st.lists(chance, min_size=width, max_size=width)) for _ in range(n)])
    chances = np.minimum.accumulate(chances, axis=1)
    rising = sorted(draw(st.lists(times, min_size=n * width + 1, max_size=n * width + 1)))
    return chances, np.array(rising), float(draw(st.integers(0, 3)))


def linear(base, row, batches=(1, 64), drafts=(0, 16)):
    grid = tuple(tuple(base + row * batch * (1 + gamma) for gamma in drafts) for batch in batches)
    return StepCosts(batches=batches, drafts=drafts, grid=grid)


# --- costs -----------------------------------------------------------------------------------


@given(costs_of(), st.integers(1, 100), st.integers(1, 100), st.floats(0, 30), st.floats(0, 30))
@example(StepCosts(batches=(1, 2), drafts=(0, 1), grid=((1.0, 2.0), (2.0, 2.0))), 1, 2, 10.0, 10.0)
def test_a_step_never_gets_faster_with_more_requests_or_longer_drafts(costs, b1, b2, g1, g2):
    (b1, b2), (g1, g2) = sorted((b1, b2)), sorted((g1, g2))
    slack = 1 + 1e-9
    assert 0 < costs.seconds(b1, g1) <= costs.seconds(b2, g1) * slack
    assert costs.seconds(b1, g1) <= costs.seconds(b1, g2) * slack


@given(costs_of())
def test_costs_survive_their_file_and_smoothing_is_done_once(costs):
    assert msgspec.json.decode(msgspec.json.encode(costs), type=StepCosts) == costs


@given(costs_of(), st.integers(1, 100), st.integers(0, 40))
def test_seconds_by_rows_are_those_of_the_mean_draft(costs, batch, drafted):
    assert costs.by_rows(batch, drafted)[-1] == pytest.approx(costs.seconds(batch, drafted / batch))


def test_measured_points_are_kept_lines_go_on_and_a_lone_outlier_is_shared_out():
    costs = linear(0.002, 0.0001)
    assert costs.seconds(1, 16) == pytest.approx(0.0037)
    assert costs.seconds(128, 32) == pytest.approx(0.002 + 0.0001 * 128 * 33)
    noisy = StepCosts(batches=(1,), drafts=(0, 1, 2), grid=((1.0, 3.0, 2.0),))
    assert noisy.grid == ((1.0, 2.5, 2.5),)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"batches": (2, 1)}, "costs.batches"),
        ({"batches": (0, 1)}, "costs.batches"),
        ({"drafts": ()}, "costs.drafts"),
        ({"grid": ((1.0, 1.0),)}, "costs.grid"),
        ({"grid": ((1.0, 1.0), (1.0, 0.0))}, "costs.grid"),
        ({"grid": ((1.0, 1.0), (1.0, float("nan")))}, "costs.grid"),
    ],
)
def test_a_profile_that_cannot_be_is_refused_by_name(change, field):
    sound = {"batches": (1, 2), "drafts": (0, 4), "grid": ((1.0, 1.0), (1.0, 1.0))}
    with pytest.raises(InvalidField, match=field):
        StepCosts(**{**sound, **change})


# --- acceptance ------------------------------------------------------------------------------

tallies = st.lists(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)).map(sorted), min_size=CELLS, max_size=CELLS),
    max_size=5,
)


@given(tallies)
def test_rates_are_proper_and_lie_between_prior_and_data(many):
    learned = Acceptance()
    assert learned.rates() == pytest.approx(PRIOR)
    for tally in many:
        assert learned.add([drafted for _, drafted in tally], [right for right, _ in tally])
    for cell, rate in enumerate(learned.rates()):
        assert 0 < rate < 1
        if learned.drafted[cell]:
            seen = learned.right[cell] / learned.drafted[cell]
            assert min(seen, PRIOR[cell]) - 1e-9 <= rate <= max(seen, PRIOR[cell]) + 1e-9


@pytest.mark.parametrize(
    "tally", [([1], [1]), ([1] * CELLS, [2] * CELLS), ([1] * CELLS, [-1] * CELLS), ([], [])]
)
def test_counts_that_do_not_fit_change_nothing(tally):
    learned = Acceptance()
    assert not learned.add(*tally)
    assert learned.rates() == pytest.approx(PRIOR)


def test_what_is_old_is_forgotten():
    learned = Acceptance()
    learned.add([100_000] * CELLS, [100_000] * CELLS)
    assert min(learned.rates()) > 0.99
    learned.add([100_000] * CELLS, [0] * CELLS)
    assert max(learned.rates()) < 0.01


@given(st.lists(st.floats(0, 1), min_size=CELLS, max_size=CELLS))
def test_rates_travel_as_percent_and_none_becomes_hopeless(rates):
    back = from_percent(to_percent(rates))
    assert all(0 < got < 1 and abs(got - rate) <= 0.0101 for got, rate in zip(back, rates, strict=True))


@pytest.mark.parametrize("percent", [[], [50], [0] * CELLS, [100] * CELLS])
def test_rates_of_another_kind_are_taken_as_none(percent):
    assert from_percent(percent) == ()


# --- the choice ------------------------------------------------------------------------------


def worth(chances, seconds, weights, others, keep, rate):
    tokens = (
        others
        + weights.sum()
        + sum(w * row[:k].sum() for w, row, k in zip(weights, chances, keep, strict=True))
    )
    return tokens, tokens - COST_FACTOR * rate * seconds[sum(keep)]


@settings(max_examples=300)
@given(steps(), st.lists(st.sampled_from((1.0, 2.0)), min_size=3, max_size=3))
def test_no_other_choice_of_beginnings_is_worth_more(step, weights):
    chances, seconds, others = step
    weights = np.array(weights[: len(chances)])
    every = list(itertools.product(range(chances.shape[1] + 1), repeat=len(chances)))
    rate = max(worth(chances, seconds, weights, others, keep, 0.0)[0] / seconds[sum(keep)] for keep in every)
    most = max(worth(chances, seconds, weights, others, keep, rate)[1] for keep in every)
    got = worth(chances, seconds, weights, others, choose_lengths(chances, seconds, others, weights), rate)[1]
    assert got == pytest.approx(most, rel=1e-9, abs=1e-9 * rate)


@given(steps(), st.floats(0.1, 1.0))
def test_more_is_verified_where_drafts_are_better(step, factor):
    chances, seconds, others = step
    worse = choose_lengths(chances * factor, seconds, others).sum()
    better = choose_lengths(chances, seconds, others).sum()
    assert worse <= better


@given(steps())
def test_a_likelier_token_is_never_dropped_for_a_less_likely_one(step):
    chances, seconds, others = step
    kept = np.arange(chances.shape[1]) < choose_lengths(chances, seconds, others)[:, None]
    assert chances[kept].min(initial=1.0) >= chances[~kept].max(initial=0.0)


@given(st.lists(chance, min_size=1, max_size=4), st.floats(1e-4, 0.1), st.floats(0, 0.1))
def test_high_priority_is_never_served_after_low(draft, base, row):
    draft = np.minimum.accumulate(np.array(draft))
    chances, seconds = np.stack([draft, draft]), base + row * np.arange(2 * len(draft) + 1)
    low, high = choose_lengths(chances, seconds, 0.0, np.array([1.0, 2.0]))
    assert high >= low


def test_all_is_verified_where_rows_are_free_and_nothing_where_they_cost_as_much_as_steps():
    chances = np.full((4, 8), 0.1)
    assert choose_lengths(chances, np.full(33, 0.01), 0.0).tolist() == [8] * 4
    assert choose_lengths(chances, 0.001 * np.arange(4, 37), 0.0).tolist() == [0] * 4


def test_a_row_may_pay_for_high_priority_alone():
    chances, seconds = np.full((2, 1), 0.5), np.array([1.0, 1.1, 1.3])
    assert choose_lengths(chances, seconds, 0.0, np.array([1.0, 2.0])).tolist() == [0, 1]


def test_nothing_is_verified_past_a_drafts_end():
    chances = np.array([[0.9, 0.8, 0.0], [0.0, 0.0, 0.0]])
    assert choose_lengths(chances, np.full(7, 0.01), 0.0).tolist() == [2, 0]


# --- an engine's budget ----------------------------------------------------------------------


def step_of(budget, score, right, n=4, width=4, group="g"):
    """One step of n requests whose drafts all have this score; return what was chosen."""
    slots = np.full(n, budget.slot(group))
    scores = np.full((n, width), score, dtype=np.float32)
    choice = budget.choose(slots, scores, np.full(n, width, dtype=np.int32), n)
    budget.learn(choice, np.minimum(choice.keep, right).astype(np.int32))
    return choice


def test_drafts_that_are_never_right_end_and_are_tried_again_now_and_then():
    budget = DraftBudget(linear(0.0001, 0.001), 4)
    verified = [
        int(step_of(budget, 0.95, right=0).keep.sum()) if budget.should_draft() else -1 for _ in range(3000)
    ]
    tail = verified[-330:]
    assert tail.count(PROBE_TOKENS) == 330 // (PAUSE_STEPS + 1)
    assert tail.count(-1) == 330 - tail.count(PROBE_TOKENS)
    assert verified.index(-1) >= PAUSE_AFTER_STEPS


def test_what_became_good_is_used_again():
    budget = DraftBudget(linear(0.004, 0.0002), 4)
    for _ in range(3000):
        if budget.should_draft():
            step_of(budget, 0.95, right=0)
    for _ in range(3000):
        if budget.should_draft():
            choice = step_of(budget, 0.95, right=4)
    assert choice.keep.tolist() == [4] * 4


def test_an_empty_tree_is_no_reason_to_rest():
    budget = DraftBudget(linear(0.001, 0.0001), 4)
    for _ in range(3 * PAUSE_AFTER_STEPS):
        assert budget.should_draft()
        none = np.zeros(2, dtype=np.int32)
        budget.choose(np.full(2, budget.slot("g")), np.zeros((2, 4), dtype=np.float32), none, 2)


def test_a_group_is_judged_by_itself_then_by_what_it_was_told_then_by_all():
    budget = DraftBudget(linear(0.004, 0.0005), 4)
    for _ in range(400):
        step_of(budget, 0.7, right=4, group="good")
        step_of(budget, 0.7, right=0, group="bad") if budget.should_draft() else None
    assert step_of(budget, 0.7, right=4, group="good").keep.sum() == 16
    assert step_of(budget, 0.7, right=0, group="bad").keep.sum() <= PROBE_TOKENS
    budget.slot("told", from_percent([99] * CELLS))
    assert step_of(budget, 0.7, right=4, group="told").keep.sum() == 16


def test_others_do_not_change_what_a_group_was_told():
    budget = DraftBudget(linear(0.004, 0.0005), 4)
    budget.slot("told", from_percent([99] * CELLS))
    for _ in range(4 * REFRESH_STEPS - 1):
        step_of(budget, 0.7, right=0, group="bad")
    for _ in range(2):  # before and after the refresh
        assert step_of(budget, 0.7, right=4, n=1, group="told").keep.sum() == 4


def test_a_path_is_no_likelier_than_its_beginning():
    budget = DraftBudget(linear(0.004, 0.0005), 4)
    first = CELLS // len(PLACES)
    budget.slot("g", from_percent([1] * first + [99] * (CELLS - first)))
    assert step_of(budget, 0.7, right=0).keep.tolist() == [0] * 4


def test_each_batch_has_its_own_costs():
    grid = ((0.01, 0.01), (0.01, 0.1))
    budget = DraftBudget(StepCosts(batches=(1, 4), drafts=(0, 4), grid=grid), 4)
    slots, scores, lengths = np.zeros(1, dtype=np.intp), np.full((1, 4), 0.3, dtype=np.float32), np.array([4])
    budget.slot("g")
    kept = [int(budget.choose(slots, scores, lengths, batch).keep.sum()) for batch in (4, 1, 4)]
    assert kept == [0, 4, 0]


def test_long_contexts_make_drafts_pay_that_cost_more_than_they_bring_in_short_ones():
    """Attention makes the step longer, a drafted token hardly; where it does, drafts pay less."""
    slots, lengths = np.zeros(4, dtype=np.intp), np.full(4, 4, dtype=np.int32)
    scores = np.full((4, 4), 0.3, dtype=np.float32)

    def kept(reading: tuple[float, float], context: float) -> int:
        base = linear(0.004, 0.002)
        budget = DraftBudget(msgspec.structs.replace(base, context=16, reading=reading), 4)
        budget.slot("g")
        budget.context = context
        return int(budget.choose(slots, scores, lengths, 4).keep.sum())

    assert kept((4e-6, 0.0), 16) == kept((0.0, 0.0), 8000) == 0
    assert kept((4e-6, 0.0), 8000) > 0
    assert kept((4e-6, 1e-6), 8000) == 0


def test_what_a_context_adds_is_counted_by_requests_and_drafted_tokens():
    costs = msgspec.structs.replace(linear(0.004, 0.002), context=16, reading=(1e-6, 1e-7))
    assert costs.longer(4, 10) == (0.0, 0.0), "never faster than measured"
    assert costs.longer(4, 1016) == pytest.approx((4e-3, 1e-4))
    budget = DraftBudget(costs, 4)
    short = budget.seconds(4, 16).copy()
    budget.context = 1016
    np.testing.assert_allclose(budget.seconds(4, 16), short + 4e-3 + 1e-4 * np.arange(17))
    for wrong in ((-1e-9, 0.0), (0.0, float("inf"))):
        with pytest.raises(InvalidField, match="reading"):
            msgspec.structs.replace(costs, reading=wrong)


def test_what_was_learned_of_a_group_adds_up_to_what_an_acceptance_takes():
    budget = DraftBudget(linear(0.01, 0.0), 4)
    slots = np.array([budget.slot(f"g{i}") for i in range(3)])
    scores, lengths = np.full((3, 4), 0.7, dtype=np.float32), np.array([4, 2, 4], dtype=np.int32)
    choice = budget.choose(slots, scores, lengths, 3)
    assert choice.keep.tolist() == [4, 2, 4]
    budget.learn(choice, np.array([1, 2, -1], dtype=np.int32))
    learned = [budget.take_learned(f"g{i}") for i in range(3)]
    assert [(sum(drafted), sum(right)) for drafted, right in learned] == [(4, 1), (2, 2), (0, 0)]
    assert Acceptance().add(*learned[0])
    assert budget.take_learned("g0") == ([0] * CELLS, [0] * CELLS)
    assert budget.take_learned("never known") == ([], [])


def test_slots_are_given_out_again_clean():
    budget = DraftBudget(linear(0.004, 0.0005), 4)
    slots = {budget.slot(f"g{i}") for i in range(40)}
    assert len(slots) == 40
    for _ in range(300):
        step_of(budget, 0.7, right=0, group="g3") if budget.should_draft() else None
    used = budget.slot("g3")
    budget.forget("g3")
    budget.forget("never known")
    assert budget.slot("new", from_percent([99] * CELLS)) == used
    assert step_of(budget, 0.7, right=4, group="new").keep.sum() == 16


# --- a head's drafts beside those of trees ----------------------------------------------------


def beside(budget, trees, head, n=4, width=4, length=4, group="g"):
    """Return what is chosen of n trees' drafts and a head's, three tokens each, all with these scores."""
    slots, lengths = np.full(n, budget.slot(group)), np.full(n, length, dtype=np.int32)
    scores = np.full((n, width), trees, dtype=np.float32)
    own = np.full((n, 3), head, dtype=np.float32), np.full(n, 3, dtype=np.int32)
    return budget.choose(slots, scores, lengths, n, head=own)


def test_a_draft_is_of_whichever_promises_more():
    budget = DraftBudget(linear(0.004, 0.0001), 4)
    assert not beside(budget, 0.95, 0.3).by_head.any()
    better = beside(budget, 0.3, 0.95)
    assert better.by_head.all()
    assert better.keep.tolist() == [3] * 4  # as many as the head drafted
    assert beside(budget, 0.95, 0.95, length=0).by_head.all(), "an empty tree"
    assert not beside(budget, 0.95, 0.95).by_head.any(), "a fourth token is worth more"


def test_a_head_is_judged_by_its_own_drafts():
    budget = DraftBudget(linear(0.004, 0.0001), 4)
    for _ in range(10 * REFRESH_STEPS):  # it is sure of itself, and wrong
        choice = beside(budget, 0.5, 0.97)
        right = np.where(choice.by_head, 0, choice.keep)
        budget.learn(choice, right.astype(np.int32))
    assert not beside(budget, 0.5, 0.97).by_head.any()
    assert beside(budget, 0.5, 0.97).keep.tolist() == [4] * 4
    assert not beside(budget, 0.5, 0.97, group="new").by_head.any(), "of other groups, too"


def test_what_a_head_taught_is_not_told_as_a_trees():
    budget = DraftBudget(linear(0.004, 0.0001), 4)
    budget.learn(beside(budget, 0.3, 0.95), np.full(4, 2, dtype=np.int32))
    assert budget.take_learned("g") == ([0] * CELLS, [0] * CELLS)
    budget.slot("told", from_percent([99] * CELLS))
    for _ in range(4 * REFRESH_STEPS):  # what was told is of trees
        budget.learn(beside(budget, 0.01, 0.97, group="told"), np.zeros(4, dtype=np.int32))
    assert not beside(budget, 0.5, 0.97, group="told").by_head.any()


def test_a_head_saves_the_time_in_which_its_tokens_would_have_come():
    budget = DraftBudget(linear(0.1, 0.0), 4)
    assert beside(budget, 0.95, 0.3).saves == 0
    alone = beside(budget, 0.95, 0.95, length=0)
    more = 4 * 3 * PRIOR[-1]  # of four requests, three tokens each
    assert alone.saves == pytest.approx(0.1 * more / (4 + more), rel=1e-3)
    assert 0 < beside(budget, 0.5, 0.95).saves < alone.saves, "trees have some already"
    slow = DraftBudget(linear(0.2, 0.0), 4)
    assert beside(slow, 0.95, 0.95, length=0).saves == pytest.approx(2 * alone.saves)
