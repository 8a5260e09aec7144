"""What a lost engine and a lost chunk cost a request, and what is held against it."""

import orders
from buffer_events import CAPACITY, LARGE, die, end, make, pick, submit
from invariants import check
from msgspec import structs

from seer.common import wire
from seer.services.buffer.events import Left, Tick
from seer.services.buffer.requests import instructions


def test_a_poison_prompt_runs_alone_in_the_end_and_fails_by_name_while_all_others_finish():
    machine = make(engines=("a", "b"), chunk_size=16)
    out = submit(machine, "poison", "p", "q", "s", n=2, max_tokens=32)
    incarnations, deaths, alone, kept = 10, 0, [], []
    while machine.requests:
        assert deaths < 20
        poison = next((d for d in pick(out, instructions.Dispatch) if d.request_id == "r/poison#0"), None)
        if poison is not None:
            deaths, incarnations = deaths + 1, incarnations + 1
            if machine.requests["r/poison#0"].alone:
                alone.append(machine.instances[poison.instance].chunks)
            news = die(machine, poison.instance, incarnations)
            refused = pick(news, wire.Refused)
            out = [d for d in pick(out, instructions.Dispatch) if d.instance != poison.instance] + news
            if refused:
                (refusal,) = refused
                assert (refusal.prompt_ids, refusal.code) == (["poison"], "failed")
                assert "ran on 5 engines that died" in refusal.message
            continue
        running = [request for request in machine.requests.values() if request.instance]
        request = running[0]
        event = instructions.Dispatch(request.instance, request.view.request_id, request.attempt, 16)
        out = end(machine, event)
        kept += pick(out, instructions.Keep)
    assert deaths == 5
    assert alone == [1, 1]
    assert set(machine.groups) == {"r/p", "r/q", "r/s"}
    assert not machine.scheduler.emptied
    assert not any(view.closed for view in machine.instances.values())


def test_an_engine_whose_connection_alone_broke_did_not_die():
    machine = make(engines=())
    machine.apply(orders.joined("a", CAPACITY, 7), 0.0)
    submit(machine, "p", n=1)
    for _ in range(5):
        die(machine, "a", 7)
        assert not machine.requests["r/p#0"].deaths
        assert not machine.requests["r/p#0"].alone


def test_all_engines_lost_at_once_cost_one_pass():
    machine = make(engines=[f"e{i}" for i in range(50)])
    submit(machine, *(f"p{i}" for i in range(100)), n=2)
    out = machine.apply(Left([f"e{i}" for i in range(50)]), 1.0)
    check(machine)
    assert out == []  # nothing is placed on an engine that is about to be lost, too
    assert machine.waiting == 200


def test_losses_count_in_a_row_and_those_of_engines_not_at_all():
    machine = make(engines=("a",), max_attempts=2)
    (dispatch,) = pick(submit(machine, "p", n=1, max_tokens=64), instructions.Dispatch)
    for _ in range(2):
        for _ in range(2):
            machine.apply(Left(["a"]), 1.0)
            (dispatch,) = pick(machine.apply(orders.joined("a", CAPACITY, 0), 1.0), instructions.Dispatch)
        rejected = orders.rejected("a", "r/p#0", dispatch.attempt, fatal=False, message="no")
        (dispatch,) = pick(machine.apply(rejected, 1.0), instructions.Dispatch)
        (dispatch,) = pick(end(machine, dispatch), instructions.Dispatch)


def test_an_answer_of_another_engine_than_the_one_that_runs_a_chunk_changes_nothing():
    machine = make()
    (dispatch,) = pick(submit(machine, "p", n=1), instructions.Dispatch)
    (other,) = {"a", "b"} - {dispatch.instance}
    assert end(machine, structs.replace(dispatch, instance=other)) == []
    assert pick(end(machine, dispatch), instructions.Keep)


def test_time_set_aside_counts_anew_after_a_chunk_ran():
    machine = make(engines=("small",), engine_wait_seconds=10.0)
    machine.apply(orders.joined("large", LARGE), 0.0)
    submit(machine, "p", n=1, prompt_len=1000)
    for now in (1.0, 9.0):
        machine.apply(Left(["large"]), now)
        assert machine.scheduler.parked
        machine.apply(Tick(), now + 7.0)
        machine.apply(orders.joined("large", LARGE), now + 7.5)
    assert machine.requests["r/p#0"].instance == "large"


def suspects(*prompts):
    """Return a machine with one engine on which the requests are suspects."""
    machine = make(engines=("a",))
    submit(machine, *prompts, n=1)
    for incarnation in (100, 101, 102):
        die(machine, "a", incarnation)
    return machine


def test_who_runs_alone_on_an_engine_that_falls_silent_is_tried_again():
    machine = suspects("p")
    assert machine.requests["r/p#0"].alone
    out = machine.apply(Left(["a"]), 2.0)
    assert not pick(out, wire.Refused)
    (dispatch,) = pick(machine.apply(orders.joined("a", CAPACITY, 50), 3.0), instructions.Dispatch)
    check(machine)
    out = end(machine, dispatch)
    assert pick(out, instructions.Keep)
    assert not machine.requests["r/p#0"].alone


def test_a_suspect_that_is_cancelled_is_forgotten():
    machine = suspects("p", "q")
    (waiting,) = machine.scheduler.suspects
    group = machine.requests[waiting].group
    machine.apply(orders.cancelled("t", "r", [group.prompt_id]), 2.0)
    check(machine)
    assert machine.waiting == 0


def test_a_suspect_that_was_set_aside_runs_alone_in_the_end():
    machine = make(engines=("small",))
    machine.apply(orders.joined("large", LARGE, 1), 0.0)
    submit(machine, "p", "q", n=1, prompt_len=1000)
    for incarnation in (2, 3, 4):
        machine.apply(Left(["large"], died=True), 1.0)
        assert len(machine.scheduler.parked) == 2
        machine.apply(orders.joined("large", LARGE, incarnation), 2.0)
        check(machine)
    assert machine.instances["large"].chunks == 1
    assert len(machine.scheduler.suspects) == 1


def test_only_so_many_dead_engines_are_remembered(monkeypatch):
    monkeypatch.setattr("seer.services.buffer.requests.engine_deaths.MAX_DEAD_INCARNATIONS", 1)
    machine = make(engines=("a", "b"))
    submit(machine, "p", n=2)
    for name, incarnation in (("a", 0), ("b", -1)):
        machine.apply(Left([name], died=True), 1.0)
        dead = machine.deaths._dead_incarnations[incarnation]
        assert all(incarnation in machine.requests[name].deaths for name in dead)
        check(machine)
    assert set().union(*(request.deaths for request in machine.requests.values())) == {-1}


def ticks(machine, begin, end):
    """Let seconds pass; return what is refused meanwhile."""
    out = []
    for second in range(begin, end):
        out += pick(machine.apply(Tick(), float(second)), wire.Refused)
        check(machine)
    return out


def test_who_was_lost_alone_with_an_engine_that_stays_away_fails():
    machine = make(engines=("a", "b"))
    submit(machine, "p", n=1)
    for incarnation in (11, 12, 13):
        die(machine, machine.requests["r/p#0"].instance, incarnation)
    request = machine.requests["r/p#0"]
    assert request.alone
    machine.apply(Left([request.instance], died=True), 10.0)
    assert ticks(machine, 11, 40) == []
    assert request.instance == ""
    assert ticks(machine, 40, 42) == []
    assert request.alone  # the engine may have been dead before it came
    machine.apply(Left([request.instance], died=True), 50.0)
    assert ticks(machine, 51, 80) == []
    (refused,) = ticks(machine, 80, 82)
    assert "on the last two alone" in refused.message
    check(machine)
    assert not machine.deaths._dead_incarnations


def followed(machine):
    """Have one run alone, end early, and another follow it on the same engine; return that one."""
    submit(machine, "p", "q", n=1)
    for incarnation in (1, 2, 3):
        die(machine, "a", incarnation)
    assert machine.requests["r/p#0"].alone
    machine.apply(orders.cancelled("t", "r", ["p"]), 1.0)
    request = machine.requests["r/q#0"]
    assert (request.instance, request.alone) == ("a", False)
    return request


def test_who_follows_one_that_ended_early_is_not_accused_of_its_death():
    machine = make(engines=("a",))
    request = followed(machine)
    die(machine, "a", 4)  # the first one had killed it, and nobody knew yet
    assert not machine.deaths.lost_alone
    assert request.alone


def test_an_engine_that_ends_a_chunk_is_above_doubt():
    machine = make(engines=("a",))
    request = followed(machine)
    end(machine, instructions.Dispatch("a", "r/q#0", request.attempt, 16))
    assert not machine.deaths._maybe_damaged


def test_a_stall_of_ones_own_accuses_nobody():
    machine = make(engines=("a",))
    submit(machine, "p", n=1)
    for incarnation in (1, 2, 3):
        die(machine, "a", incarnation)
    assert machine.requests["r/p#0"].alone
    machine.apply(Left(["a"], died=True), 1.0)
    machine.apply(Tick(), 1.5)
    assert not pick(
        machine.apply(Tick(), 50.0), wire.Refused
    )  # it stood still: who came back is not read yet
    machine.apply(orders.joined("a", CAPACITY, 3), 50.1)
    check(machine)
    assert machine.requests["r/p#0"].alone
