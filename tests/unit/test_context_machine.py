"""The context machine's invariants, as its docstring lists them."""

import math

import orders
import pytest

from seer.common.policy.draft_costs import CELLS
from seer.common.policy.length import Estimate, Longest, Posterior
from seer.services.context import context_machine as machine_module
from seer.services.context.context_machine import EstimateMachine

PROMPT, CAP = 100, 1000


def machine_with(*events):
    machine = EstimateMachine()
    for event in events:
        machine.apply(event)
    return machine


def opened(group_id="r/a", size=4):
    return orders.opened(group_id, size, PROMPT, CAP)


def done(index, generated, group_id="r/a"):
    return orders.progress(group_id, index, generated, finished=True)


def at(index, generated, group_id="r/a"):
    return orders.progress(group_id, index, generated, finished=False)


def test_estimate_is_the_cap_until_a_response_finishes_then_the_longest_finished():
    machine = machine_with(opened())
    assert (machine.changes(), machine.estimates()) == ({}, {})
    machine.apply(at(0, 600))
    assert machine.changes() == {}
    machine.apply(done(1, 100))
    assert machine.changes() == {"r/a": Estimate(100.0)}
    machine.apply(done(2, 70))
    assert machine.changes() == {}
    machine.apply(done(0, 900))
    assert machine.changes() == machine.estimates() == {"r/a": Estimate(900.0)}


def test_changes_are_said_once_and_only_the_latest():
    machine = machine_with(opened(), opened("r/b"), done(0, 10), done(1, 20), done(0, 30, "r/b"))
    assert machine.dirty
    assert machine.changes() == {"r/a": Estimate(20.0), "r/b": Estimate(30.0)}
    assert not machine.dirty
    assert machine.changes() == {}


@pytest.mark.parametrize("length", [CAP, CAP + 5])
def test_an_estimate_never_passes_the_cap(length):
    machine = machine_with(opened(), done(0, length))
    assert (machine.changes(), machine.estimates()) == ({}, {})


def test_events_of_unknown_groups_and_responses_are_counted():
    machine = machine_with(done(0, 10), orders.closed("r/a"), opened(), done(4, 10), done(-1, 10))
    assert (machine.changes(), machine.ignored) == ({}, 4)


def test_replace_says_every_group_once_whatever_was_said_before():
    machine = machine_with(opened(), opened("r/gone"), done(0, 10), done(0, 10, "r/gone"))
    machine.changes()
    machine.replace([opened(), opened("r/b"), done(0, 10)])
    assert machine.estimates() == {}
    assert machine.changes() == {"r/a": Estimate(10.0), "r/b": Estimate(CAP)}
    assert machine.changes() == {}
    assert machine.estimates() == {"r/a": Estimate(10.0)}


def test_another_estimator_sees_finished_and_unfinished_lengths():
    seen = []

    class Curious(Longest):
        def estimates(self, groups):
            seen.extend((group.cap, dict(group.finished), dict(group.unfinished)) for group in groups)
            return super().estimates(groups)

    machine = EstimateMachine(Curious())
    for event in (opened(), at(3, 40), done(0, 10), at(1, 5), done(1, 20)):
        machine.apply(event)
    machine.changes()
    assert seen == [(CAP, {0: 10, 1: 20}, {3: 40})]


def test_only_notable_changes_are_said():
    machine = machine_with(opened(), done(0, 100))
    machine.changes()
    machine.apply(done(1, 104))
    assert machine.changes() == {}
    machine.apply(done(2, 106))
    assert machine.changes() == {"r/a": Estimate(106.0)}


def test_posterior_estimates_are_said_of_all_groups_after_a_fit():
    machine = EstimateMachine(Posterior())
    for event in (opened("r/a", 8), opened("r/b", 8)):
        machine.apply(event)
    first = machine.changes()
    assert first["r/a"] == first["r/b"] == machine.estimates()["r/b"]
    assert first["r/a"].tokens == pytest.approx(CAP / 6, rel=0.03)
    machine.apply(at(0, 990))
    assert machine.changes()["r/a"].tokens > first["r/a"].tokens  # unfinished ones count
    for index in range(8):
        machine.apply(done(index, 40))
    changed = machine.changes()
    assert changed["r/a"].tokens < 100
    assert changed["r/b"].tokens < first["r/b"].tokens  # of which nothing was heard
    assert machine.changes() == {}


def test_after_a_fit_many_groups_are_gone_through_in_parts_and_none_is_left_out(monkeypatch):
    monkeypatch.setattr(machine_module, "REVISED", 4)
    machine = EstimateMachine(Posterior())
    for number in range(20):
        machine.apply(opened(f"r/{number}", 8))
    assert len(machine.changes()) == 20  # all are new
    said: dict[str, Estimate] = {}
    for index in range(8):  # fits that come before the earlier ones are through
        for number in range(2):
            machine.apply(done(index, 40 + index, f"r/{number}"))
        before = machine.changes()
        assert len(before) <= 4 + 2
        said |= before
    while machine.dirty:
        before = machine.changes()
        assert len(before) <= 4
        said |= before
    assert set(said) == {f"r/{number}" for number in range(20)}
    assert all(estimate.tokens < 100 for estimate in machine.estimates().values())
    machine.apply(orders.closed("r/19"))
    assert "r/19" not in machine.estimates()


def test_progress_that_is_heard_twice_or_late_changes_no_estimate():
    events = [opened("r/a", 8), at(0, 200), at(1, 300), at(1, 500), done(0, 400), done(2, 30), at(3, 90)]
    once = EstimateMachine(Posterior())
    twice = EstimateMachine(Posterior())
    for event in events:
        once.apply(event)
    for event in (*events, *events, at(1, 10), at(0, 800), at(3, 90)):
        twice.apply(event)
    assert twice.changes() == once.changes() != {}


def test_what_finishes_is_compared_with_what_was_said_before():
    machine = machine_with(opened(), done(0, 100), done(1, 100))
    assert (machine.error.unpredicted, machine.error.responses) == (2, 0)  # nothing was said yet
    machine.changes()
    machine.apply(done(2, 200))
    machine.apply(done(2, 900))  # known
    error = machine.error
    assert (error.unpredicted, error.responses, error.beyond) == (2, 1, 1)
    assert error.signed == error.absolute == pytest.approx(math.log(2))
    machine.replace([opened(), done(0, 100), done(1, 100), done(2, 200)])
    assert machine.error is error
    assert (error.unpredicted, error.responses) == (2, 1)


def test_a_snapshot_counts_no_evidence_twice():
    events = [opened("r/a", 8), *(done(index, 20 * index + 5) for index in range(8))]
    fresh, again = EstimateMachine(Posterior()), EstimateMachine(Posterior())
    for event in events:
        again.apply(event)
    fresh.replace(events)
    again.replace(events)
    assert again.changes() == fresh.changes()
    assert again.estimator.parameters == fresh.estimator.parameters


# --- acceptance ------------------------------------------------------------------------------


def tally(drafted, right):
    """A chunk's counts, the same in every cell."""
    return [drafted] * CELLS, [right] * CELLS


def with_drafts(index, generated, drafted, right, group_id="r/a"):
    return orders.progress(group_id, index, generated, False, *tally(drafted, right))


def test_acceptance_is_said_when_it_is_not_that_of_all_groups_or_moved_notably():
    machine = machine_with(opened(), with_drafts(0, 10, 1000, 950))
    assert machine.acceptance_changes() == {}  # the group is what all groups are
    machine.apply(opened("r/b"))
    machine.apply(with_drafts(0, 10, 100, 5, "r/b"))
    assert machine.dirty
    changed = machine.acceptance_changes()
    assert max(changed["r/b"]) < 40
    assert machine.acceptance()["r/b"] == changed["r/b"]
    machine.apply(with_drafts(0, 20, 1, 0, "r/b"))
    assert machine.acceptance_changes() == {}
    machine.changes()
    assert not machine.dirty


def test_drafts_count_once_and_only_of_known_requests_that_came_further():
    machine = machine_with(opened(), opened("r/b"), with_drafts(0, 10, 1000, 0, "r/b"))
    machine.apply(with_drafts(0, 10, 100, 90))
    once = machine.acceptance_changes()
    strange = orders.progress("r/a", 1, 5, False, [1], [1])
    wrong = with_drafts(2, 5, 10, 20)
    again = (
        with_drafts(0, 10, 10_000, 0),
        with_drafts(0, 10, 10_000, 0, "r/unknown"),
        with_drafts(9, 10, 10_000, 0),
    )
    for event in (*again, strange, wrong):
        machine.apply(event)
    assert once
    assert machine.acceptance_changes() == {}


def test_acceptance_survives_a_snapshot_and_is_said_once_more():
    machine = machine_with(opened(), opened("r/gone"), with_drafts(0, 10, 1000, 950))
    machine.apply(with_drafts(0, 10, 1000, 50, "r/gone"))
    machine.acceptance_changes()
    before = machine.acceptance()
    assert set(before) == {"r/a", "r/gone"}
    machine.replace([opened(), opened("r/b"), at(0, 10)])
    changed = machine.acceptance_changes()
    assert changed == machine.acceptance() == {"r/a": before["r/a"]}
    assert machine.acceptance_changes() == {}


def test_a_closed_groups_acceptance_is_forgotten():
    machine = machine_with(opened(), opened("r/b"), with_drafts(0, 10, 1000, 950))
    machine.apply(with_drafts(0, 10, 1000, 0, "r/b"))
    machine.apply(orders.closed("r/b"))
    assert set(machine.acceptance_changes()) <= {"r/a"}
    assert set(machine.acceptance()) <= {"r/a"}


def test_groups_of_one_shared_id_have_one_estimate():
    machine = EstimateMachine()
    for group, first in (("r/a", 0), ("r/b", 2)):
        machine.apply(orders.opened(group, 2, 5, CAP, "/g", first))
    machine.apply(orders.opened("r/c", 2, 5, CAP))
    machine.changes()
    for event in (done(0, 30), done(0, 50, "r/b"), at(1, 20)):
        machine.apply(event)
    assert machine.changes() == {"r/a": Estimate(50.0), "r/b": Estimate(50.0)}
    (evidence,) = {
        id(machine._groups[name].known): machine._groups[name].known for name in ("r/a", "r/b")
    }.values()
    assert (evidence.finished, evidence.unfinished) == ({0: 30, 2: 50}, {1: 20})
    machine.apply(orders.closed("r/a"))
    assert (evidence.finished, evidence.unfinished) == ({0: 30, 2: 50}, {})
    machine.apply(orders.opened("r/d", 1, 5, CAP, "/g", 4))
    assert machine.changes()["r/d"] == Estimate(50.0)
    for group in ("r/b", "r/d"):
        machine.apply(orders.closed(group))
    assert not machine._sharing


def test_many_groups_of_one_name_cost_one_estimate_and_each_event_one_mark():
    asked = []

    class Counting(Longest):
        def estimates(self, groups):
            asked.append(len(groups))
            return super().estimates(groups)

    machine = EstimateMachine(Counting())
    names = [f"r/{number}" for number in range(50)]
    for number, name in enumerate(names):
        machine.apply(orders.opened(name, 1, 5, CAP, "/g", number))
    machine.changes()
    machine.apply(done(0, 30, names[7]))
    assert len(machine._dirty) == 1
    assert machine.changes() == dict.fromkeys(names, Estimate(30.0))
    assert asked == [1, 1]


def test_what_a_group_showed_before_it_closed_is_published_for_the_others_of_its_name():
    machine = EstimateMachine()
    for group, first in (("r/a", 0), ("r/b", 1)):
        machine.apply(orders.opened(group, 1, 5, CAP, "/g", first))
    machine.changes()
    machine.apply(done(0, 30))
    machine.apply(orders.closed("r/a"))
    assert machine.changes() == {"r/b": Estimate(30.0)}


def test_a_late_sibling_joins_a_group_that_was_opened_unnamed():
    machine = machine_with(opened(), done(0, 70))
    machine.apply(orders.opened("r/late", 1, 5, CAP, "r/a", 4))
    assert machine.changes() == {"r/a": Estimate(70.0), "r/late": Estimate(70.0)}
    machine.apply(done(0, 90, "r/late"))
    assert machine.changes() == {"r/a": Estimate(90.0), "r/late": Estimate(90.0)}


def test_shared_groups_with_other_caps_share_nothing():
    machine = machine_with(opened(), done(0, 70), orders.opened("r/late", 1, 5, CAP + 1, "r/a", 4))
    assert machine.changes() == {"r/a": Estimate(70.0)}
