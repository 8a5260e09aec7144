"""Updates in place in the weights machine: who takes part, what is live after a failure, what later ones get."""

import msgspec
import orders

from seer.services.buffer.events import Left, Tick, Weights
from seer.services.buffer.weights.instructions import Admit, Expel, Hold, Release
from seer.services.buffer.weights.weights_machine import GONE, RETRY_SECONDS, WeightsMachine

CHECKED = Weights(1, "d1", "spool:one")
PLAN = "inplace:spool:five"
FIVE = Weights(5, "d5", PLAN)


def make(*names, weights=CHECKED):
    machine = WeightsMachine(seconds=100.0)
    for name in names:
        machine.apply(orders.joined(name, weights=weights), 0.0, idle=True)
    return machine


def begin(machine, *names, version=5, source=PLAN, call_id=7, awake=None):
    """Ask for an update in place, and have these instances prepare it; return what was said last."""
    event = orders.update("t", version, source, f"d{version}", call_id=call_id)
    out = machine.apply(event, 1.0, idle=True, awake=awake)
    for name in names:
        prepared = orders.prepared(name, version, f"d{version}", "", machine._updates)
        out = machine.apply(prepared, 1.0, idle=True, awake=awake)
    return out


def loaded(machine, name, problem="", version=5, call_id=0):
    return machine.apply(orders.loaded(name, version, problem, call_id), 2.0, idle=True)


def test_the_trainer_hears_who_loads_and_nobody_else_does():
    machine = make("a", "b")
    out = begin(machine, "a", "b")
    assert out[-3:] == [orders.load("a", FIVE), orders.load("b", FIVE), orders.loading("t", 5, ["a", "b"], 7)]
    assert machine.apply(orders.joined("c", weights=CHECKED), 1.5, idle=True) == []
    assert machine.quarantined == {"c": f"version 5 {GONE}"}
    assert loaded(machine, "a") == [Admit("a")]
    out = loaded(machine, "b", "no room")
    assert out[-1] == orders.live("t", FIVE, {"b": "no room", "c": f"version 5 {GONE}"}, 7)
    assert machine.apply(Tick(), 2.0 + RETRY_SECONDS, idle=True) == []
    assert machine.admitted == {"a"}
    assert machine.quarantined["b"] == "no room"  # it did not try again


def test_one_that_is_not_awake_takes_no_part():
    machine = make("a", "b")
    out = begin(machine, "a", "b", awake={"a"})
    assert out[-1] == orders.loading("t", 5, ["a"], 7)
    assert machine.quarantined == {"b": f"version 5 {GONE}"}


def test_if_none_has_them_the_checked_ones_are_live_again_and_loaded_everywhere():
    machine = make("a", "b")
    begin(machine, "a", "b")
    assert loaded(machine, "a", "the trainer is gone") == []
    out = loaded(machine, "b", "the trainer is gone, too")
    reasons = {"a": "the trainer is gone", "b": "the trainer is gone, too"}
    assert out == [
        Release(),
        orders.failed("t", 5, reasons, 7),
        orders.load("a", CHECKED, call_id=1),
        orders.load("b", CHECKED, call_id=1),
    ]
    assert machine.live == CHECKED
    assert loaded(machine, "a") == []  # about the update that failed
    assert loaded(machine, "a", version=1) == []  # about these weights, ordered before that
    assert loaded(machine, "a", version=1, call_id=1) == [Admit("a")]


def test_an_answer_to_a_try_that_failed_is_not_taken_for_one_to_the_next():
    machine = make("a", "b")
    begin(machine, "a", "b")
    late = 2.0 + machine.seconds  # a does not answer
    loaded(machine, "b", "the trainer is gone")
    assert machine.apply(Tick(), late, idle=True)[1] == orders.failed(
        "t", 5, {"a": "did not load version 5 in 100 s", "b": "the trainer is gone"}, 7
    )
    loaded(machine, "b", version=1, call_id=1)
    again = begin(machine, "b", source="inplace:spool:again", call_id=8)
    five = Weights(5, "d5", "inplace:spool:again")
    assert orders.load("a", five, call_id=1) in again
    assert loaded(machine, "a") == []  # it got the first ones after all
    assert not machine.admitted
    assert loaded(machine, "a", call_id=1) == [Admit("a")]


def test_one_that_said_why_before_it_ended_is_quoted():
    machine = make("a", "b")
    begin(machine, "a", "b")
    loaded(machine, "a")
    machine.apply(orders.joined("b", weights=Weights(-1, "")), 2.0, idle=True)
    assert not machine.updating
    machine = make("a", "b")
    begin(machine, "a", "b")
    loaded(machine, "b", "stuck")
    machine.apply(Left(["b"]), 2.0, idle=True)
    assert loaded(machine, "a")[-1] == orders.live("t", FIVE, {"b": "stuck"}, 7)


def test_after_two_in_place_the_last_checked_ones_are_live_again_and_the_lost_version_may_be_repeated():
    machine = make("a")
    begin(machine, "a")
    loaded(machine, "a")
    assert machine.sources == {PLAN, CHECKED.source}
    begin(machine, "a", version=6, source="inplace:spool:six")
    out = loaded(machine, "a", "broken", version=6)
    assert out[-1] == orders.load("a", CHECKED, call_id=1)
    loaded(machine, "a", version=1, call_id=1)
    why = "version 4 must not be below 5, which was live before"
    assert begin(machine, version=4)[-1] == orders.failed("t", 4, {"": why}, 7)
    assert Hold() in begin(machine, version=5)  # as a trainer repeats its last update


def test_with_nothing_to_go_back_to_all_wait_for_the_next_update():
    machine = make("a", weights=FIVE)  # a restarted buffer
    begin(machine, "a", version=6, source="inplace:spool:six")
    out = loaded(machine, "a", "broken", version=6)
    assert out[-1] == orders.failed("t", 6, {"a": "broken"}, 7)
    assert machine.quarantined == {"a": "broken"}
    event = orders.update("t", 7, "/seven", "d7")
    assert orders.prepare("a", 7, "/seven", 2, "d7") in machine.apply(event, 3.0, idle=True)


def test_asked_again_it_is_answered_and_loaded_nowhere():
    machine = make("a", "b")
    begin(machine, "a", "b")
    loaded(machine, "a")
    loaded(machine, "b", "no room")
    out = begin(machine)
    assert out == [orders.live("t", FIVE, {"b": "no room"}, 7)]


def test_a_later_checked_update_forgets_the_ones_before():
    machine = make("a")
    begin(machine, "a")
    loaded(machine, "a")
    event = orders.update("t", 6, "/six", "d6")
    machine.apply(event, 3.0, idle=True)
    machine.apply(orders.prepared("a", 6, "d6", "", 2), 3.0, idle=True)
    assert machine.live == Weights(6, "d6", "/six")
    assert machine.sources == {"/six"}


def test_a_snapshot_has_all_of_it_and_an_older_one_can_be_read():
    machine = make("a", "b")
    begin(machine, "a", "b")
    machine.apply(Left(["b"]), 2.0, idle=True)
    encoded = msgspec.json.encode(machine)
    again = msgspec.json.decode(encoded, type=WeightsMachine)
    assert loaded(again, "a", "broken") == loaded(machine, "a", "broken")
    assert again == machine
    older = msgspec.json.decode(encoded)
    for name in ("checked", "_highest"):
        del older[name]
    del older["_update"]["left"]
    restored = msgspec.json.decode(msgspec.json.encode(older), type=WeightsMachine)
    assert (restored.checked, restored.live) == (None, FIVE)


def test_ones_that_dropped_weights_in_place_take_the_next_ones_while_their_kv_sleeps():
    machine = make("a", "b")
    begin(machine, "a", "b")
    for name in ("a", "b"):
        loaded(machine, name)
    for name in ("a", "b"):
        dropped = orders.lost_weights(name)
        assert machine.apply(dropped, 3.0, idle=True, awake=()) == [Expel(name)]
    assert machine.quarantined == dict.fromkeys("ab", f"version 5 {GONE}")
    assert not machine.reloading, "nothing is to be loaded again, so nothing waits for it"
    # The weights wake: a takes those of the next update, b does not answer any more.
    asleep = {"idle": True, "awake": (), "weights_awake": ("a", "b")}
    event = orders.update("t", 6, "inplace:spool:six", "d6", call_id=8)
    assert len(machine.apply(event, 4.0, **asleep)) == 3  # to hold submissions, and to prepare
    for name in ("a", "b"):
        out = machine.apply(orders.prepared(name, 6, "d6", "", 2), 4.0, **asleep)
    assert out[-1] == orders.loading("t", 6, ["a", "b"], 8)
    assert machine.apply(orders.loaded("a", 6), 5.0, **asleep) == []
    out = machine.apply(Left(["b"]), 5.0, **asleep)
    six = Weights(6, "d6", "inplace:spool:six")
    assert out[-1] == orders.live("t", six, {"b": "it ended while it loaded them"}, 8)
    assert not machine.admitted, "the KV cache sleeps on"
    awake = {"idle": True, "awake": ("a",), "weights_awake": ("a",)}
    assert machine.apply(Tick(), 6.0, **awake) == [Admit("a")]
