import orders
import pytest
from buffer_events import CAPACITY, LARGE, end, make, pick, run_to_end, submit
from invariants import check

from seer.common import wire
from seer.common.policy.length import Estimate
from seer.common.policy.schedule import FAIR_DISPATCHES, POLICIES, STAY
from seer.common.types import Capacity
from seer.services.buffer.events import Left, Tick
from seer.services.buffer.requests import events, instructions, state
from seer.services.buffer.requests.request_machine import RequestMachine


def test_a_group_is_chunked_run_and_delivered_once():
    machine = make()
    out = submit(machine, "p")
    assert pick(out, wire.Accepted) == [wire.Accepted(rollout_id="r", prompt_ids=["p"], weight_version=0)]
    first = pick(out, instructions.Dispatch)
    assert [d.max_new_tokens for d in first] == [16, 16]
    assert {d.instance for d in first} == {"a", "b"}
    last, kept = run_to_end(machine, out)
    assert pick(last, instructions.Deliver) == [instructions.Deliver(b"", "r/p")]
    assert len(kept) == 4
    assert machine.counters["tokens"] == 64
    assert pick(machine.apply(orders.acknowledged("t", "r", ["p"]), 2.0), instructions.Forget) == [
        instructions.Forget("r/p")
    ]
    assert not machine.groups
    assert not machine.rollouts
    check(machine)


def test_a_request_lost_too_often_fails_its_group_and_nothing_else():
    machine = make(engines=("a",), max_attempts=2)
    submit(machine, "p", "q", n=1)
    for _ in range(2):
        request = machine.requests.get("r/p#0")
        assert request is not None
        out = machine.apply(orders.rejected("a", "r/p#0", request.attempt, fatal=False, message="no"), 1.0)
    (refusal,) = pick(out, wire.Refused)
    assert refusal.prompt_ids == ["p"]
    assert refusal.code == "failed"
    assert "lost 2 times" in refusal.message
    assert "r/q" in machine.groups
    check(machine)


def test_a_fatal_rejection_drops_the_siblings():
    machine = make()
    dispatches = pick(submit(machine, "p", n=2), instructions.Dispatch)
    bad = dispatches[0]
    out = machine.apply(
        orders.rejected(bad.instance, bad.request_id, bad.attempt, fatal=True, message="x"), 1.0
    )
    assert [d.request_id for d in pick(out, wire.DropChunk)] == [dispatches[1].request_id]
    assert not machine.groups
    check(machine)


@pytest.mark.parametrize(
    ("prompt_len", "max_tokens", "fits"),
    [(10, 246, True), (10, 247, False), (200, 56, True), (256, 1, False)],
)
def test_what_fits_no_instance_is_refused_at_submission(prompt_len, max_tokens, fits):
    machine = make()
    out = submit(machine, "p", max_tokens=max_tokens, prompt_len=prompt_len)
    assert bool(pick(out, wire.Accepted)) == fits
    if not fits:
        (refusal,) = pick(out, wire.Refused)
        assert "max_model_len 256" in refusal.message
        assert not machine.rollouts


def test_kv_blocks_bound_what_is_placed():
    machine = make(engines=("a",), chunk_size=100)
    # 10 + 100 + 1 tokens = 7 blocks of 16: two fit in 20 blocks
    out = submit(machine, "p", n=8, max_tokens=200)
    assert len(pick(out, instructions.Dispatch)) == 2
    check(machine)
    machine.apply(events.EngineReported("a", pinned_blocks=13), 1.0)
    assert not pick(end(machine, pick(out, instructions.Dispatch)[0]), instructions.Dispatch)
    assert (
        len(pick(machine.apply(events.EngineReported("a", pinned_blocks=0), 1.0), instructions.Dispatch)) == 1
    )


def test_static_places_everything_at_once():
    machine = make("static")
    dispatches = pick(submit(machine, "p", "q", n=20, max_tokens=200), instructions.Dispatch)
    assert len(dispatches) == 40
    assert {d.max_new_tokens for d in dispatches} == {200}
    by_group = {d.request_id.split("#")[0]: d.instance for d in dispatches}
    assert set(by_group.values()) == {"a", "b"}


def test_work_fails_when_no_engine_comes_back():
    machine = make(engines=("a",), engine_wait_seconds=10.0)
    submit(machine, "p")
    machine.apply(Left(["a"]), 1.0)
    assert not pick(machine.apply(Tick(), 10.0), wire.Refused)
    assert pick(machine.apply(Tick(), 12.0), wire.Refused)
    assert not machine.groups


def test_what_expires_together_expires_in_the_order_of_ids():
    """Not in that of a set, which differs from process to process: the same events, the same instructions."""
    machine = make(engines=("a",), engine_wait_seconds=10.0)
    prompts = [f"p{number:02}" for number in range(30)]
    large = Capacity(kv_blocks=200, block_size=16, max_num_seqs=8, max_model_len=2560)
    machine.apply(orders.joined("b", large), 0.0)
    submit(machine, *prompts, n=1, prompt_len=250)
    machine.apply(Left(["b"]), 0.0)
    check(machine)
    refused = pick(machine.apply(Tick(), 20.0), wire.Refused)
    assert [refusal.prompt_ids for refusal in refused] == [prompts]
    check(machine)


def test_cancel_drops_what_runs_and_keeps_what_is_finished():
    machine = make()
    run_to_end(machine, submit(machine, "p", n=1))
    submit(machine, "q", "s", n=1)
    out = machine.apply(orders.cancelled("t", "r", []), 2.0)
    assert [(refusal.prompt_ids, refusal.code) for refusal in pick(out, wire.Refused)] == [
        (["q", "s"], "cancelled")
    ]
    assert len(pick(out, wire.DropChunk)) == 2
    assert set(machine.groups) == {"r/p"}
    assert not pick(machine.apply(orders.cancelled("other", "r", []), 2.0), instructions.Forget)
    check(machine)


def test_past_the_bound_the_oldest_result_goes_and_is_made_again_on_demand():
    machine = make(result_tokens=90)
    forgotten = []
    for prompt_id in ("p", "q", "s"):
        out, _ = run_to_end(machine, submit(machine, prompt_id, n=1))
        forgotten += pick(out, instructions.Forget)
        check(machine)
    assert [item.group_id for item in forgotten] == ["r/p"]
    assert machine.counters["expired"] == 1
    assert not pick(submit(machine, "q", n=1), instructions.Dispatch)
    assert pick(submit(machine, "p", n=1), instructions.Dispatch)


def test_a_chunk_without_progress_or_beyond_its_limit_is_not_believed():
    machine = make(engines=("a",))
    (dispatch,) = pick(submit(machine, "p", n=1), instructions.Dispatch)
    event = orders.ended("a", dispatch.request_id, dispatch.attempt, 0)
    (again,) = pick(machine.apply(event, 1.0), instructions.Dispatch)
    event = orders.ended("a", again.request_id, again.attempt, 33)
    out = machine.apply(event, 1.0)
    assert not pick(out, instructions.Keep)
    assert machine.counters["lost"] == 2


def test_estimates_reach_the_policys_order():
    machine = make(engines=())
    machine.scheduler.policy = e_policy = POLICIES["divided"]
    assert e_policy.order(machine_request(), Estimate(3.0)) == e_policy.order(
        machine_request(), Estimate(9.0)
    )
    machine.apply(orders.joined("a", CAPACITY), 0.0)
    submit(machine, "p", n=30)
    machine.apply(events.EstimatesChanged({"r/p": Estimate(12.0, 0.5), "gone": Estimate(1.0)}), 1.0)
    assert machine.estimates == {"r/p": Estimate(12.0, 0.5)}
    check(machine)


def machine_request():
    from seer.common.policy.request import RequestView

    return RequestView("r", 0, 0, 1, 2, queued=7)


def test_a_submission_that_waits_for_an_engine_is_held_once():
    machine = make(engines=(), engine_wait_seconds=10.0)
    assert submit(machine, "p", "q", now=0.0) == [
        instructions.Take("r/p", "p"),
        instructions.Take("r/q", "q"),
    ]
    assert submit(machine, "p", "q", "s", now=6.0) == [instructions.Take("r/s", "s")]
    (refused,) = pick(machine.apply(Tick(), 11.0), wire.Refused)
    assert refused.prompt_ids == ["p", "q"]
    out = machine.apply(orders.joined("a", CAPACITY), 12.0)
    assert pick(out, wire.Accepted) == [wire.Accepted(rollout_id="r", prompt_ids=["s"], weight_version=0)]
    check(machine)


def test_part_of_a_submission_that_waits_for_an_engine_can_be_cancelled():
    machine = make(engines=())
    submit(machine, "p", "q")
    assert pick(machine.apply(orders.cancelled("another", "r", []), 1.0), wire.Refused) == []
    (refused,) = pick(machine.apply(orders.cancelled("t", "r", ["p"]), 1.0), wire.Refused)
    assert (refused.prompt_ids, refused.code) == (["p"], "cancelled")
    out = machine.apply(orders.joined("a", CAPACITY), 2.0)
    assert pick(out, wire.Accepted) == [wire.Accepted(rollout_id="r", prompt_ids=["q"], weight_version=0)]
    check(machine)


def test_a_finished_group_is_delivered_again_without_any_engine():
    machine = make(engines=("a",))
    run_to_end(machine, submit(machine, "p"))
    machine.apply(Left(["a"]), 2.0)
    out = submit(machine, "p", "q", now=3.0)
    assert pick(out, instructions.Deliver) == [instructions.Deliver(b"", "r/p")]
    assert pick(out, wire.Accepted) == [wire.Accepted(rollout_id="r", prompt_ids=["p"], weight_version=0)]
    assert pick(machine.apply(orders.joined("a", CAPACITY), 4.0), wire.Accepted) == [
        wire.Accepted(rollout_id="r", prompt_ids=["q"], weight_version=0)
    ]


def test_a_request_that_fits_no_engine_left_fails_in_time():
    machine = make(engines=("a",), engine_wait_seconds=10.0)
    machine.apply(orders.joined("large", LARGE), 0.0)
    submit(machine, "p", n=2, max_tokens=32, prompt_len=1000)
    machine.apply(Left(["large"]), 1.0)
    machine.apply(orders.joined("b", CAPACITY), 9.0)  # no help: the wait goes on
    assert machine.scheduler.parked == {"r/p#0", "r/p#1"}
    assert machine.apply(Tick(), 10.9) == []
    (refused,) = pick(machine.apply(Tick(), 11.1), wire.Refused)
    assert (refused.prompt_ids, refused.code) == (["p"], "failed")
    assert not machine.requests
    check(machine)


def test_attempts_of_two_incarnations_never_meet():
    first, second = (
        RequestMachine(POLICIES["divided"], state.Limits(chunk_size=16), first_attempt=base)
        for base in (10**6, 2 * 10**6)
    )
    for machine in (first, second):
        machine.apply(orders.joined("a", CAPACITY), 0.0)
    (old,) = pick(submit(first, "p", n=1), instructions.Dispatch)
    (new,) = pick(submit(second, "p", n=1), instructions.Dispatch)
    assert end(second, old) == []
    assert second.counters["late"] == 1
    assert pick(end(second, new), instructions.Keep)


def test_acceptance_travels_from_ended_chunks_and_back_with_the_next():
    machine = make(engines=("a",))
    out = submit(machine, "p", "q", n=1, max_tokens=48)
    first, other = pick(out, instructions.Dispatch)
    assert first.acceptance == []
    known = {"r/p": [70], "r/unknown": [1]}
    machine.apply(events.EstimatesChanged({}, known), 0.5)
    out = end(machine, first, drafted=[8, 2], accepted=[4, 0])
    (progress,) = pick(out, wire.RequestProgress)
    assert (progress.drafted, progress.accepted) == ([8, 2], [4, 0])
    assert [dispatch.acceptance for dispatch in pick(out, instructions.Dispatch)] == [[70]]
    assert [dispatch.acceptance for dispatch in pick(end(machine, other), instructions.Dispatch)] == [[]]


def kept(*responses, version=0, digest=""):
    """What an earlier incarnation kept: (index, count) or (index, count, finish) of each response."""
    return events.Kept(version, digest, [events.KeptResponse(*each) for each in responses])


def test_requests_go_on_where_an_earlier_incarnation_had_them():
    machine = make(engines=("a",))
    out = submit(machine, "p", n=3, kept=kept((0, 20), (2, 7, "stop", "END")))
    assert pick(out, instructions.Restore) == [instructions.Restore("r/p")]
    assert {(d.request_id, d.max_new_tokens) for d in pick(out, instructions.Dispatch)} == {
        ("r/p#0", 12), ("r/p#1", 16),
    }  # fmt: skip
    news = {(each.index, each.generated, each.finished) for each in pick(out, wire.RequestProgress)}
    assert news == {(0, 20, False), (2, 7, True)}
    last, _ = run_to_end(machine, out)
    assert pick(last, instructions.Deliver) == [instructions.Deliver(b"", "r/p")]
    results = machine.groups["r/p"].results
    assert [(each.view.generated, each.finish, each.stop_reason) for each in results] == [
        (32, "length", ""), (32, "length", ""), (7, "stop", "END"),
    ]  # fmt: skip
    assert (machine.counters["restored"], machine.counters["tokens"]) == (27, 12 + 32)
    check(machine)


def test_a_group_that_had_ended_is_delivered_at_once():
    machine = make()
    out = submit(machine, "p", kept=kept((0, 3, "stop"), (1, 32, "length")))
    assert pick(out, instructions.Deliver) == [instructions.Deliver(b"", "r/p")]
    assert not pick(out, instructions.Dispatch)
    check(machine)


@pytest.mark.parametrize(
    "bad",
    [
        kept((0, 5), version=1),
        kept((0, 5), digest="other"),
        kept((0, 33)),
        kept((2, 5)),
        kept((0, 0)),
        kept((-1, 5)),
    ],
)
def test_what_cannot_be_of_this_group_restores_nothing(bad):
    machine = make()
    out = submit(machine, "p", kept=bad)
    assert not pick(out, instructions.Restore)
    assert [each.max_new_tokens for each in pick(out, instructions.Dispatch)] == [16, 16]
    assert machine.counters["restored"] == 0
    check(machine)


def test_what_waits_for_its_weights_is_restored_once_they_are_live():
    machine = make()
    machine.apply(events.WeightsChanged(0, "d0"), 0.0)
    assert not pick(
        submit(machine, "p", weight_version=1, kept=kept((0, 5), version=1, digest="d1")),
        instructions.Restore,
    )
    out = machine.apply(events.WeightsChanged(1, "d1"), 1.0)
    assert pick(out, instructions.Restore) == [instructions.Restore("r/p")]
    check(machine)


def test_restored_tokens_count_as_unfinished_ones():
    machine = make(unfinished_tokens=30)
    submit(machine, "old", kept=kept((0, 20)))
    out = submit(machine, "young", kept=kept((0, 20)))
    (refused,) = pick(out, wire.Refused)
    assert refused.prompt_ids == ["young"]
    assert set(machine.groups) == {"r/old"}
    check(machine)


def seer_machine(seats: int = 2, blocks: int = 1000) -> RequestMachine:
    machine = RequestMachine(POLICIES["seer"], state.Limits(chunk_size=16))
    capacity = Capacity(kv_blocks=blocks, block_size=16, max_num_seqs=seats, max_model_len=4096)
    machine.apply(orders.joined("a", capacity), 0.0)
    return machine


def test_who_runs_goes_on_before_who_waits_and_gives_way_after_its_share():
    machine = seer_machine(seats=1)
    (chunk,) = pick(submit(machine, "p", n=2, max_tokens=256, prompt_len=16), instructions.Dispatch)
    first, ran = chunk.request_id, 0
    while chunk.request_id == first:
        ran += 16
        (chunk,) = pick(end(machine, chunk), instructions.Dispatch)
        assert machine.requests[first].view.came_with == 0
        check(machine)
    assert ran - 16 < STAY * (256 - (ran - 16)), "it went on as long as it had not run its share"
    assert ran >= STAY * (256 - ran), "then the other one had its turn"
    # The other one has generated nothing, so it goes on for as long; then the first one comes again.
    while chunk.request_id != first:
        (chunk,) = pick(end(machine, chunk), instructions.Dispatch)
    assert machine.requests[first].view.came_with == ran


def test_who_runs_waits_where_there_is_no_room_for_its_next_chunk():
    machine = seer_machine(seats=3, blocks=6)
    first, second, _ = pick(submit(machine, "p", n=3, max_tokens=94, prompt_len=1), instructions.Dispatch)
    assert not pick(end(machine, first), instructions.Dispatch), "3 blocks needed, 2 are free"
    view = machine.requests[first.request_id].view
    assert machine.policy.goes_on(view, machine.estimates["r/p"]), "but for that it would"
    (third,) = pick(end(machine, second, finish="stop"), instructions.Dispatch)
    assert third.request_id == first.request_id
    assert view.came_with == 16, "it waited: it may have lost its KV"


def test_nobody_goes_on_when_it_is_the_turn_of_who_waited_longest():
    machine = seer_machine(seats=1)
    (chunk,) = pick(submit(machine, "p", n=2, max_tokens=256, prompt_len=16), instructions.Dispatch)
    machine.counters["chunks"] = FAIR_DISPATCHES - 1
    (following,) = pick(end(machine, chunk), instructions.Dispatch)
    assert following.request_id != chunk.request_id


def test_who_has_no_room_where_it_runs_does_not_overtake_elsewhere():
    machine = seer_machine(seats=3, blocks=6)
    first, *_ = pick(submit(machine, "p", n=3, max_tokens=94, prompt_len=1), instructions.Dispatch)
    machine.apply(
        orders.joined("b", Capacity(kv_blocks=20, block_size=16, max_num_seqs=3, max_model_len=400)), 0.0
    )
    assert pick(submit(machine, "q", n=1, max_tokens=94, prompt_len=200), instructions.Dispatch)
    assert not pick(submit(machine, "r", n=1, max_tokens=100, prompt_len=100), instructions.Dispatch)
    assert machine.instances["b"].has_room(17, 16)
    assert not pick(end(machine, first), instructions.Dispatch), "who waits for room comes first"
