"""What drafts bring in the simulator: never less than nothing, never more than was published."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seer.sim.drafting import (
    ACCEPTANCE_LENGTH,
    CLASSES,
    GAINS,
    MAX_DRAFT,
    SIBLINGS,
    Drafting,
    RecordedDrafting,
    kind_of,
)
from seer.sim.workload import WORKLOADS, Accepted

MODELS = [make().model for make in WORKLOADS.values()]
COUNTS = st.lists(st.sampled_from((0, 0, 1, 2, 7, 40)), min_size=CLASSES, max_size=CLASSES).filter(any)
PLAIN = len(SIBLINGS)


def only(kind: int, number: int) -> list[int]:
    return [number * (kind == other) for other in range(CLASSES)]


def test_the_tables_are_the_published_ones():
    for kind in range(CLASSES):
        assert GAINS[kind, MAX_DRAFT] == pytest.approx(ACCEPTANCE_LENGTH[kind % PLAIN])
        assert GAINS[kind, 0] == 1
        assert all(GAINS[kind, k] < GAINS[kind, k + 1] for k in range(MAX_DRAFT))


def test_recorded_drafts_are_those_of_the_nearest_batch_and_context():
    known = [Accepted(60, 50, 1.5, 0.5), Accepted(60, 400, 3.0, 2.0), Accepted(4, 400, 4.0, 6.0)]
    drafting = RecordedDrafting(known)
    for batch, context, each in ((55, 40, 0), (64, 500, 1), (2, 300, 2), (1, 200, 2)):
        rates, drafted = drafting.rates(MODELS[0], only(3, batch), batch * context)
        assert rates == [known[each].tokens] * CLASSES
        assert drafted == batch * known[each].drafted


def test_kinds_go_by_siblings_begun():
    assert [kind_of(siblings, probe=False) for siblings in (0, 1, 4, 5, 14, 15, 99)] == [0, 1, 1, 2, 2, 3, 3]
    assert kind_of(5, probe=True) == kind_of(5, probe=False) + PLAIN


@settings(max_examples=60)
@given(st.sampled_from(MODELS), COUNTS, st.integers(1, 10**6))
def test_rates_are_between_one_and_the_published_length(model, counts, kv_tokens):
    rates, drafted = Drafting().rates(model, counts, float(kv_tokens))
    for kind, rate in enumerate(rates):
        assert 1 <= rate <= ACCEPTANCE_LENGTH[kind % PLAIN] + 1e-9
        assert counts[kind] or rate == 1
    assert 0 <= drafted <= MAX_DRAFT * sum(counts)
    assert (drafted == 0) == (max(rates) == 1)
    for plain in range(PLAIN):
        if counts[plain] and counts[plain + PLAIN]:
            assert rates[plain + PLAIN] >= rates[plain] - 1e-9, "probes come first"


@pytest.mark.parametrize("model", MODELS, ids=WORKLOADS)
def test_who_is_alone_drafts_deepest(model):
    for kind in range(CLASSES):
        alone = Drafting().rates(model, only(kind, 1), 5_000.0)
        for batch in (8, 64, 512):
            rates, drafted = Drafting().rates(model, only(kind, batch), 5_000.0 * batch)
            assert rates[kind] <= alone[0][kind] + 1e-9
            assert drafted / batch <= alone[1]
    assert alone[1] > 0


def test_batches_that_differ_little_draft_alike():
    drafting, model = Drafting(), MODELS[0]
    rates, drafted = drafting.rates(model, only(0, 100), 400_000.0)
    again, more = drafting.rates(model, only(0, 101), 401_000.0)
    assert again is rates
    assert more / 101 == pytest.approx(drafted / 100), "every request's drafts are charged"
    assert drafting.rates(model, only(0, 10), 400_000.0)[0] is not rates
