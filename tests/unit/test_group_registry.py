"""The group registry through its machine: what is held, opened, refused, delivered and forgotten, and to whom it is told."""

import orders
import pytest
from buffer_events import CAPACITY, end, make, pick, run_to_end, submit
from invariants import check

from seer.common import wire
from seer.common.types import TurnSpec
from seer.services.buffer.events import Drained, Tick
from seer.services.buffer.requests import events, instructions, state


def test_what_is_held_counts_against_the_bound_and_keeps_its_deadline():
    machine = make(engines=("a",), max_requests=5, engine_wait_seconds=10.0)
    (refused,) = pick(submit(machine, "p", "q", "s", weight_version=3), wire.Refused)
    assert (refused.prompt_ids, "at most 5" in refused.message) == (["s"], True)
    assert not pick(submit(machine, "p", "q", now=9.0, weight_version=3), wire.Refused)
    machine.apply(orders.joined("b", CAPACITY), 9.5)
    (refused,) = pick(machine.apply(Tick(), 10.5), wire.Refused)
    assert (refused.prompt_ids, refused.code) == (["p", "q"], "failed")
    assert "weights were not live" in refused.message
    check(machine)


def test_more_prompts_than_fit_a_message_are_accepted_in_several(monkeypatch):
    machine = make(engines=())
    for names in (("p", "q"), ("s", "u"), ("v",)):
        submit(machine, *names)
    monkeypatch.setattr(wire, "MAX_PROMPTS", 2)
    out = machine.apply(orders.joined("a", CAPACITY), 1.0)
    assert [item.prompt_ids for item in pick(out, wire.Accepted)] == [["p", "q"], ["s", "u"], ["v"]]


def test_a_full_trainer_keeps_no_other_one_out_until_all_are_full():
    machine = make(engines=(), max_requests=6)
    (refused,) = pick(submit(machine, "p", "q", "s", "u", trainer="t-1", share="t"), wire.Refused)
    assert (refused.prompt_ids, "trainer 't' and takes at most 6" in refused.message) == (["u"], True)
    (refused,) = pick(submit(machine, "p", rollout="2", trainer="t-2", share="t"), wire.Refused)
    for name in "abc":
        assert not pick(submit(machine, "p", "q", "s", rollout=name, trainer=name), wire.Refused)
    (refused,) = pick(submit(machine, "p", rollout="d", trainer="d"), wire.Refused)
    assert "all trainers and takes at most 24" in refused.message
    machine.apply(orders.cancelled("a", "a", ["p"]), 1.0)
    assert not pick(submit(machine, "p", rollout="d", trainer="d"), wire.Refused)
    assert machine.registry.holdings.of["a"].requests == 4


@pytest.mark.parametrize(("weights", "loser"), [({}, "t"), ({"t": 4.0}, "u")])
def test_past_the_bound_on_output_who_has_most_for_its_share_loses(weights, loser):
    machine = make(engines=("a",), unfinished_tokens=80, shares=weights)
    dispatches = [
        *pick(submit(machine, "p", "q", "s", n=1, max_tokens=64, trainer="t"), instructions.Dispatch),
        *pick(submit(machine, "p", "q", n=1, max_tokens=64, trainer="u", rollout="2"), instructions.Dispatch),
    ]
    refused = []
    for dispatch in dispatches:
        refused += pick(end(machine, dispatch), wire.Refused)
    (dispatch,) = pick(
        submit(machine, "v", n=1, max_tokens=64, trainer="v", rollout="3"), instructions.Dispatch
    )
    assert not refused
    (refused,) = pick(end(machine, dispatch), wire.Refused)
    assert refused.prompt_ids == [{"t": "s", "u": "q"}[loser]]
    assert f"most of them trainer {loser!r}'s" in refused.message


def test_past_the_bound_on_results_who_has_most_loses_its_oldest():
    machine = make(engines=("a",), result_tokens=80)
    for trainer, prompts in (("t", "p"), ("u", "pqs")):
        for prompt in prompts:
            out = submit(machine, prompt, n=1, max_tokens=16, trainer=trainer, rollout=trainer)
            run_to_end(machine, out)
    assert set(machine.registry.finished) == {"t/p", "u/q", "u/s"}
    out = submit(
        machine, "v", n=1, max_tokens=48, trainer="v", rollout="v"
    )  # has most itself, but was not seen
    run_to_end(machine, out)
    assert set(machine.registry.finished) == {"v/v"}


def test_a_second_trainer_of_a_held_rollout_is_refused_at_once():
    machine = make(engines=())
    submit(machine, "p")
    (answer,) = submit(machine, "p", "q", trainer="other", address=b"o")
    assert (answer.address, answer.message.prompt_ids) == (b"o", ["p", "q"])
    assert "another trainer" in answer.message.message
    out = machine.apply(orders.joined("a", CAPACITY), 1.0)
    assert [item.prompt_ids for item in pick(out, wire.Accepted)] == [["p"]]


def test_a_later_use_of_an_id_ends_the_earlier_one_and_answers_name_theirs():
    machine = make(engines=("a",))
    (first,) = pick(
        submit(machine, "p", n=1, submission=1, params_digest=10, address=b"1"), instructions.Dispatch
    )
    out = submit(machine, "p", n=1, submission=2, params_digest=20, address=b"1")
    assert orders.dropped_chunk("a", first.request_id, first.attempt) in out
    assert [kind for kind in out if isinstance(kind, instructions.Forget | instructions.Take)] == [
        instructions.Forget("r/p"), instructions.Take("r/p", "p"),
    ]  # fmt: skip
    assert [item.submission for item in pick(out, wire.Accepted)] == [2]
    assert end(machine, first) == []
    machine.apply(orders.cancelled("t", "r", [], submission=1), 1.0)
    machine.apply(orders.acknowledged("t", "r", ["p"], submission=1), 1.0)
    assert "r/p" in machine.groups
    (refused,) = pick(machine.apply(orders.cancelled("t", "r", [], submission=2), 1.0), wire.Refused)
    assert refused.submission == 2
    assert not machine.groups


def test_the_same_use_cannot_ask_for_two_things():
    machine = make(engines=("a",))
    submit(machine, "p", submission=1, params_digest=10)
    (refused,) = pick(submit(machine, "q", submission=1, params_digest=20), wire.Refused)
    assert "another seed" in refused.message
    (refused,) = pick(submit(machine, "p", submission=1, params_digest=10, same=False), wire.Refused)
    assert "other tokens" in refused.message
    assert set(machine.groups) == {"r/p"}
    out = submit(machine, "p", submission=2, params_digest=10, same=False)
    assert pick(out, instructions.Take) == [instructions.Take("r/p", "p")]


def test_a_rollout_has_one_weight_version():
    machine = make(engines=("a",))
    out = submit(machine, "p", n=1, max_tokens=16)
    run_to_end(machine, out)
    machine.apply(events.WeightsChanged(1), 1.0)
    out = submit(machine, "p", "q", n=1, max_tokens=16, submission=3)
    (refused,) = pick(out, wire.Refused)
    assert refused.prompt_ids == ["q"]
    assert "began under weight version 0" in refused.message
    assert pick(out, instructions.Deliver)
    out = submit(
        machine, "q", n=1, max_tokens=16, submission=4, weight_version=1
    )  # says what it wants: another use
    assert set(machine.groups) == {"r/q"}


def test_draining_finishes_what_was_begun_and_begins_nothing_more():
    machine = make(engines=("a",))
    submit(machine, "p", n=1)
    submit(machine, "h", rollout="held", weight_version=5)
    assert machine.apply(Drained(), 1.0) == []
    out = submit(machine, "p", "q", n=1)  # as after a blip
    assert [item.prompt_ids for item in pick(out, wire.Accepted)] == [["p"]]
    assert not pick(out, wire.Refused)
    for event in (events.WeightsChanged(5), events.SubmissionsHeld(True), events.SubmissionsHeld(False)):
        assert not pick(machine.apply(event, 2.0), instructions.Dispatch)
    assert set(machine.registry.held) == {"r/q", "held/h"}
    assert machine.apply(Tick(), 1e6) == []  # it is not late: it waits for the buffer's end
    (refused,) = pick(submit(machine, "s", n=999_999), wire.Refused)  # its bound holds as ever
    assert "takes at most" in refused.message
    check(machine)


def test_a_trainer_that_is_lost_leaves_no_work():
    machine = make(engines=("a",))
    submit(machine, "p", n=1, address=b"1")
    submit(machine, "q", n=1, rollout="other", address=b"2")
    submit(machine, "h", rollout="held", address=b"1", weight_version=9)
    out = machine.apply(events.TrainerLost(b"1"), 1.0)
    assert len(pick(out, wire.DropChunk)) == 1
    assert set(machine.groups) == {"other/q"}
    check(machine)


def test_past_the_bound_on_unfinished_output_the_youngest_fail():
    machine = make(engines=("a",), unfinished_tokens=40)
    out = submit(machine, "p", "q", "s", n=1, max_tokens=64)
    refused = []
    for dispatch in pick(out, instructions.Dispatch):
        refused += pick(end(machine, dispatch), wire.Refused)
    assert [refusal.prompt_ids for refusal in refused] == [["s"]]
    assert "buffer.unfinished_bytes" in refused[0].message
    assert set(machine.groups) == {"r/p", "r/q"}


def test_what_comes_beside_tokens_counts_as_they_do():
    machine = make(engines=("a",), unfinished_tokens=40)
    (dispatch,) = pick(submit(machine, "p", n=1, max_tokens=64), instructions.Dispatch)
    result = wire.ChunkResult(dispatch.request_id, dispatch.attempt, 1, "", "", 0, beside={"x |u1 1": 8 * 39})
    assert not pick(machine.apply(events.ChunkEnded("a", result), 0.0), wire.Refused)
    check(machine)
    (dispatch,) = machine.requests
    request = machine.requests[dispatch]
    result = wire.ChunkResult(dispatch, request.attempt, 1, "", "", 0)
    refused = pick(machine.apply(events.ChunkEnded("a", result), 0.0), wire.Refused)
    assert [each.prompt_ids for each in refused] == [["p"]]


def test_a_submission_far_beyond_the_bound_is_refused_before_anything_is_built():
    machine = make(engines=("a",), max_requests=1000)
    specs = [events.GroupSpec(str(i), 1) for i in range(4096)]
    out = machine.apply(events.GroupsSubmitted("t", "r", 4096, 8, specs), 0.0)
    refused = pick(out, wire.Refused)
    assert len(refused) == len(out)
    assert sum(len(each.prompt_ids) for each in refused) == 4096
    assert not machine.rollouts


def test_a_group_that_fails_by_its_own_last_chunk_is_not_delivered():
    machine = make(engines=("a",), unfinished_tokens=15)
    (dispatch,) = pick(submit(machine, "p", n=1, max_tokens=16), instructions.Dispatch)
    out = end(machine, dispatch)
    assert [item.prompt_ids for item in pick(out, wire.Refused)] == [["p"]]
    assert not pick(out, instructions.Deliver)
    assert not machine.groups


def finished(machine, *prompts, now=1.0, **how):
    """Submit prompts of one response each and run them to their ends."""
    return run_to_end(machine, submit(machine, *prompts, **{"n": 1, "max_tokens": 16, **how}), now=now)[0]


def test_what_an_update_holds_up_fails_by_no_deadline_of_engines():
    machine = make(engines=("a",), engine_wait_seconds=10.0)
    machine.apply(events.SubmissionsHeld(held=True), 0.0)
    submit(machine, "p")
    assert machine.apply(Tick(), 99.0) == []
    assert pick(machine.apply(events.SubmissionsHeld(held=False), 100.0), instructions.Dispatch)


def test_the_first_version_is_past_like_any_other():
    machine = make(engines=("a",))
    machine.apply(events.WeightsChanged(1), 1.0)
    (refused,) = pick(submit(machine, "p", weight_version=0), wire.Refused)
    assert "weight version 0 is past" in refused.message


@pytest.mark.parametrize(("trainer", "submission"), [("other", 0), ("other", 2), ("t", 1)])
def test_only_its_own_trainer_and_use_acknowledge_a_group_and_only_a_finished_one(trainer, submission):
    machine = make(engines=("a",))
    finished(machine, "p", submission=2)
    submit(machine, "q", n=1, submission=2)
    machine.apply(orders.acknowledged(trainer, "r", ["p", "q"], submission), 2.0)
    assert set(machine.groups) == {"r/p", "r/q"}
    machine.apply(orders.acknowledged("t", "r", ["p", "q"], 2), 2.0)
    assert set(machine.groups) == {"r/q"}
    check(machine)


def test_a_result_larger_than_the_bound_is_kept_alone():
    machine = make(engines=("a",), result_tokens=10)
    assert pick(finished(machine, "p"), instructions.Deliver)
    assert set(machine.groups) == {"r/p"}


def test_a_results_time_begins_when_it_is_finished():
    machine = make(engines=("a",), result_ttl_seconds=10.0)
    finished(machine, "p", now=9.0)
    machine.apply(Tick(), 18.0)
    assert machine.groups
    machine.apply(Tick(), 20.0)
    assert not machine.groups


def half_collected():
    """Return a machine with a later version live; of a rollout one group was collected, one failed."""
    machine = make(engines=("a",))
    finished(machine, "p", params_digest=7)
    submit(machine, "q", n=1, params_digest=7)
    machine.apply(orders.acknowledged("t", "r", ["p"]), 2.0)
    machine.apply(orders.cancelled("t", "r", ["q"]), 2.0)
    assert not machine.rollouts
    return machine


def test_what_is_left_of_a_half_collected_rollout_has_its_weights_or_is_refused():
    machine = half_collected()
    machine.apply(events.WeightsChanged(1), 2.0)
    (refused,) = pick(submit(machine, "q", n=1, params_digest=7), wire.Refused)
    assert "began under weight version 0" in refused.message
    assert pick(submit(machine, "q", n=1, params_digest=8), instructions.Dispatch), (
        "another question under its id"
    )


def test_a_rollout_that_was_collected_in_the_end_leaves_its_id_free():
    machine = half_collected()
    finished(machine, "q", params_digest=7)
    machine.apply(orders.acknowledged("t", "r", ["q"]), 2.0)
    machine.apply(events.WeightsChanged(1), 2.0)
    assert pick(submit(machine, "q", n=1, params_digest=7), instructions.Dispatch)


def test_neither_an_abort_nor_a_lost_trainer_costs_more_than_what_runs():
    machine = make(engines=("a",))
    finished(machine, "done", address=b"1")
    submit(machine, "runs", address=b"1")
    submit(machine, "held", rollout="later", weight_version=3, address=b"2")
    machine.apply(events.RolloutsAborted("an update"), 1.0)
    assert set(machine.groups) == {"r/done", "later/held"}
    machine.apply(events.TrainerLost(b"1"), 1.0)
    assert set(machine.groups) == {"r/done", "later/held"}


def test_what_many_rollouts_hold_is_opened_in_one_pass():
    machine = make(engines=())
    for number in range(60):
        submit(machine, "p", "q", n=1, rollout=f"r{number}")
    opened = state.GroupState.rollout
    looks = []

    class Looked:
        def __get__(self, group, owner=None):
            looks.append(group)
            return opened.__get__(group, owner)

        def __set__(self, group, rollout):
            opened.__set__(group, rollout)

    state.GroupState.rollout = Looked()
    try:
        out = machine.apply(orders.joined("a", CAPACITY), 1.0)
    finally:
        state.GroupState.rollout = opened
    assert [item.prompt_ids for item in pick(out, wire.Accepted)] == [["p", "q"]] * 60
    assert len(looks) < 60 * 60  # each group a few times, not once for each rollout


def test_what_is_held_waits_for_the_weights_that_were_asked_for_last():
    machine = make(engines=("a",))
    submit(machine, "p", n=1, weight_version=7, submission=1)
    out = submit(machine, "p", n=1, weight_version=0, submission=2)
    (accepted,) = pick(out, wire.Accepted)
    assert (accepted.submission, accepted.weight_version) == (2, 0)
    assert len(pick(out, instructions.Dispatch)) == 1
    submit(machine, "q", n=1, weight_version=7, submission=2, rollout="s")
    submit(machine, "q", n=1, weight_version=5, submission=3, rollout="s")
    out = machine.apply(events.WeightsChanged(5), 2.0)
    check(machine)
    assert [item.prompt_ids for item in pick(out, wire.Accepted)] == [["q"]]


def test_a_use_of_which_nothing_was_known_begins_with_what_is_live():
    machine = make(engines=("a",))
    run_to_end(machine, submit(machine, "p", n=1, submission=1))
    machine.apply(events.WeightsChanged(1), 2.0)
    out = submit(machine, "p", n=1, submission=2, same=False)
    check(machine)
    assert not pick(out, wire.Refused)
    assert [(item.submission, item.weight_version) for item in pick(out, wire.Accepted)] == [(2, 1)]
    assert (machine.rollouts["r"].groups, machine.rollouts["r"].finished) == (1, 0)


def test_a_submission_of_an_earlier_use_that_comes_late_changes_nothing():
    machine = make(engines=("a",))
    submit(machine, "p", n=1, submission=5, params_digest=1, address=b"1")
    for params_digest in (1, 2):
        assert submit(machine, "p", n=1, submission=4, params_digest=params_digest, address=b"1") == []
    run_to_end(machine, [instructions.Dispatch("a", "r/p#0", machine.requests["r/p#0"].attempt, 16)])
    assert machine.groups["r/p"].submission == 5
    assert pick(
        submit(machine, "p", n=1, submission=4, params_digest=1, address=b"2"), instructions.Deliver
    )  # another incarnation counts anew


def test_a_prompt_id_of_an_open_rollout_is_another_prompts_once_it_comes_with_other_content():
    machine = make(engines=("a",))
    open_ = {"n": 1, "open": True, "address": b"1"}
    submit(machine, "p", "q", submission=5, **open_)
    out = submit(machine, "p", submission=6, same=False, **open_)
    assert pick(out, instructions.Take) == [instructions.Take("r/p", "p")]
    machine.apply(orders.cancelled("t", "r", ["p"], submission=5), 1.0)  # of the earlier prompt
    assert set(machine.groups) == {"r/p", "r/q"}
    submit(machine, "q", submission=7, **open_)
    (refused,) = pick(machine.apply(orders.cancelled("t", "r", [], submission=6), 1.0), wire.Refused)
    assert (refused.prompt_ids, refused.submission) == (["p"], 6)
    assert set(machine.groups) == {"r/q"}
    machine.apply(orders.cancelled("t", "r", []), 1.0)
    assert not machine.groups
    check(machine)


def test_groups_of_an_open_rollout_are_delivered_to_the_incarnation_that_asked_for_them():
    machine = make(engines=("a",))
    open_ = {"n": 1, "max_tokens": 16, "open": True}
    first, early = pick(submit(machine, "p", "q", submission=5, address=b"1", **open_), instructions.Dispatch)
    submit(machine, "s", submission=6, address=b"1", **open_)
    assert pick(end(machine, first), instructions.Deliver) == [instructions.Deliver(b"1", "r/p")]
    submit(machine, "u", submission=8, address=b"2", **open_)
    submit(machine, "v", submission=9, address=b"2", **open_)
    assert not pick(end(machine, early), instructions.Deliver)  # not asked for yet in this incarnation
    out = submit(machine, "q", submission=10, address=b"2", **open_)
    assert pick(out, instructions.Deliver) == [instructions.Deliver(b"2", "r/q")]


def test_a_prompt_that_is_cancelled_twice_at_once_ends_once():
    machine = make(engines=("a",))
    submit(machine, "p")
    submit(machine, "h", rollout="held", weight_version=9)
    for rollout, prompt in (("r", "p"), ("held", "h")):
        out = machine.apply(orders.cancelled("t", rollout, [prompt, prompt]), 1.0)
        assert [each.prompt_ids for each in pick(out, wire.Refused)] == [[prompt]]
    assert not machine.groups
    check(machine)


def test_a_trajectory_whose_last_turn_had_an_id_that_is_used_again_is_forgotten():
    machine = make(engines=("a",))
    for number in range(4):
        turn = TurnSpec(10, 0, 100, idle_seconds=600.0)
        spec = events.GroupSpec("p", 10, shared_id=f"r/g{number}", turn=turn)
        out = machine.apply(events.GroupsSubmitted("t", "r", 1, 16, [spec], open=True), 0.0)
        run_to_end(machine, out)
        machine.apply(orders.acknowledged("t", "r", ["p"]), 1.0)
        assert machine.registry.holdings.all.requests == len(machine.registry.trajectories.away) == 1
        check(machine)
    machine.apply(Tick(), 1000.0)
    assert not machine.registry.holdings.of
