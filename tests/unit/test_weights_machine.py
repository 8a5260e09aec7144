"""The weights machine, event in, instructions out."""

import orders
import pytest

from seer.common import wire
from seer.services.buffer.events import Drained, Left, Tick, Weights
from seer.services.buffer.weights.instructions import Abort, Admit, Expel, Hold, Release
from seer.services.buffer.weights.weights_machine import WeightsMachine

OLD = Weights(0, "d0")
NEW = Weights(1, "d1", "/new")


def make(*names, weights=OLD):
    machine = WeightsMachine(seconds=10.0)
    for name in names:
        machine.apply(orders.joined(name, weights=weights), 0.0, idle=True)
    return machine


def ask(machine, version=1, source="/new", now=0.0, idle=True, **fields):
    return machine.apply(orders.update("t", version, source, **fields), now, idle=idle)


def prepare(machine, *names, digest="d1", idle=True, version=1):
    out = []
    for name in names:
        out += machine.apply(orders.prepared(name, version, digest, "", machine._updates), 1.0, idle=idle)
    return out


def load(machine, *names, problem=""):
    out = []
    for name in names:
        out += machine.apply(orders.loaded(name, machine.live.version, problem), 2.0, idle=True)
    return out


def test_an_update_prepares_everywhere_then_loads_everywhere():
    machine = make("a", "b")
    assert ask(machine) == [Hold(), orders.prepare("a", 1, "/new", 1), orders.prepare("b", 1, "/new", 1)]
    assert prepare(machine, "a") == []
    assert machine.live == OLD
    assert prepare(machine, "b") == [Expel("a"), Expel("b"), orders.load("a", NEW), orders.load("b", NEW)]
    assert not machine.admitted
    assert load(machine, "a") == [Admit("a")]
    assert load(machine, "b") == [Admit("b"), Release(), orders.live("t", NEW, {})]
    assert machine.live == NEW
    assert not machine.updating


def test_one_problem_cancels_it_for_all():
    machine = make("a", "b")
    ask(machine)
    out = machine.apply(orders.prepared("a", 1, "", "lm_head has shape [1, 2], not [3, 4]"), 1.0, idle=True)
    reasons = {"a": "lm_head has shape [1, 2], not [3, 4]"}
    assert out == [
        orders.discard("a", 1, 1),
        orders.discard("b", 1, 1),
        Release(),
        orders.failed("t", 1, reasons),
    ]
    assert machine.live == OLD
    assert machine.admitted == {"a", "b"}
    assert prepare(machine, "b") == [orders.discard("b", 1, 1)]
    assert ask(machine)[0] == Hold()


@pytest.mark.parametrize("asked", ["", "d1"])
def test_all_must_read_the_same_bytes(asked):
    machine = make("a", "b")
    ask(machine, digest=asked)
    first = prepare(machine, "a", digest="d1" if not asked else "other")
    out = first or prepare(machine, "b", digest="other")
    name = "a" if asked else "b"
    assert out[-1] == orders.failed("t", 1, {name: "reads weights with digest other, not d1"})


def test_or_aborted_or_forbids_it():
    machine = make("a")
    assert ask(machine, idle=False, in_flight="abort")[:2] == [Hold(), Abort(" of t to version 1")]
    machine = make("a")
    (fail,) = ask(machine, idle=False, in_flight="error")
    assert "under way" in fail.message.reasons[""]


def test_an_instance_lost_at_any_moment_is_not_waited_for():
    machine = make("a", "b")
    ask(machine)
    prepare(machine, "a")
    out = machine.apply(Left(["b"]), 1.0, idle=True)
    assert orders.load("a", NEW) in out
    out = machine.apply(Left(["a"]), 1.0, idle=True)
    assert out == [Release(), orders.live("t", NEW, {})]
    machine = make("a")
    ask(machine)
    assert machine.apply(Left(["a"]), 1.0, idle=True) == []
    out = machine.apply(orders.joined("a", weights=OLD, incarnation=2), 2.0, idle=True)
    assert orders.kinds(out) == ["Admit", "PrepareWeights"]
    assert orders.load("a", NEW) in prepare(machine, "a")


def test_a_restarted_buffer_takes_the_highest_version_it_meets():
    machine = make("a")
    out = machine.apply(orders.joined("b", weights=NEW), 1.0, idle=True)
    assert out == [Expel("a"), orders.load("a", NEW), Admit("b")]
    assert machine.live == NEW
    out = make("a").apply(orders.joined("b", weights=NEW), 1.0, idle=False)
    assert out[0] == Abort()


def test_one_with_other_weights_of_the_same_version_gets_no_work():
    machine = make("a")
    assert machine.apply(orders.joined("b", weights=Weights(0, "other")), 1.0, idle=True) == []
    assert machine.admitted == {"a"}
    assert "start it with the same model" in machine.quarantined["b"]


@pytest.mark.parametrize("live", [OLD, Weights(0, "blake3-d0")])
def test_one_whose_digest_has_another_tag_shows_by_loading_which_weights_it_has(live):
    (other,) = {OLD, Weights(0, "blake3-d0")} - {live}
    machine = make("a", weights=live)
    assert machine.apply(orders.joined("b", weights=other), 1.0, idle=True) == [orders.load("b", live)]
    assert machine.admitted == {"a"}
    assert load(machine, "b") == [Admit("b")]


def test_digests_that_nobody_names_are_as_that_of_the_live_weights():
    machine = make()
    assert machine.digests == "blake3-"
    machine.apply(orders.joined("a", weights=OLD), 0.0, idle=True)
    assert machine.digests == ""
    ask(machine, digest="blake3-d1")
    prepare(machine, "a", digest="blake3-d1")
    assert machine.digests == "blake3-"


@pytest.mark.parametrize("version", [0, 1])
def test_versions_rise(version):
    machine = make("a", weights=NEW)
    (fail,) = ask(machine, version=version, source="/elsewhere")
    assert "must be above the live one, 1" in fail.message.reasons[""]
    assert ask(machine, version=1) == [orders.live("t", NEW, {})]


def test_an_update_waits_for_an_engine_that_comes_but_not_for_ever():
    machine = make()
    assert ask(machine) == [Hold()]
    out = machine.apply(orders.joined("a", weights=OLD), 5.0, idle=True)
    assert orders.kinds(out) == ["Admit", "PrepareWeights"]
    assert machine.apply(Left(["a"]), 6.0, idle=True) == []
    assert machine.apply(Tick(), 9.0, idle=True) == []
    release, fail = machine.apply(Tick(), 10.5, idle=True)
    assert release == Release()
    assert fail == orders.failed("t", 1, {"": "no engine is there to take weights: start one"})


def test_one_that_could_not_load_what_was_live_takes_an_update_that_waits():
    machine = make("a")
    ask(machine)
    prepare(machine, "a")
    load(machine, "a", problem="no memory")
    machine.apply(Left(["a"]), 1.0, idle=True)
    ask(machine, version=2, source="/newer", now=1.0)
    machine.apply(orders.joined("a", weights=OLD, incarnation=2), 2.0, idle=True)
    out = load(machine, "a", problem="no memory")
    assert [each.version for each in orders.pick(out, wire.PrepareWeights)] == [2]
    out = prepare(machine, "a", digest="d2", version=2)
    assert orders.load("a", Weights(2, "d2", "/newer")) in out


def test_engines_that_are_to_sleep_take_no_update():
    machine = make("a")
    asked = orders.update("t", 1, "/new")
    (fail,) = machine.apply(asked, 0.0, idle=True, asleep=True)
    assert "engines sleep: wake them first" in fail.message.reasons[""]
    ask(machine)  # and then the wish of an earlier incarnation is heard of
    *_, fail = machine.apply(Tick(), 0.0, idle=True, awake=["a"], asleep=True)
    assert "engines sleep: wake them first" in fail.message.reasons[""]
    assert not machine.updating


def test_an_update_that_is_loaded_does_not_wait_for_engines_that_are_to_sleep():
    machine = make("a")
    ask(machine)
    prepare(machine, "a")
    machine.apply(orders.joined("b", weights=OLD), 2.0, idle=True, awake=["a"], asleep=True)
    assert machine.updating
    out = machine.apply(orders.loaded("a", 1), 2.0, idle=True, awake=["a"], asleep=True)
    assert out[-1] == orders.live("t", NEW, {})
    out = machine.apply(Tick(), 3.0, idle=True, awake=["a", "b"])
    assert out == [orders.load("b", NEW)]


def test_one_update_at_a_time():
    machine = make("a")
    ask(machine)
    assert ask(machine) == []  # the same again
    (fail,) = machine.apply(orders.update("other", 2, "/new"), 0.0, idle=True)
    assert "t updates to version 1" in fail.message.reasons[""]
    (fail,) = ask(make("a"), source="")
    assert "give a source" in fail.message.reasons[""]


def test_deadlines():
    machine = make("a", "b")
    ask(machine)
    prepare(machine, "a")
    assert machine.apply(Tick(), 9.0, idle=True) == []
    assert machine.apply(Tick(), 11.0, idle=True)[-1] == orders.failed(
        "t", 1, {"b": "did not answer in 10 s"}
    )
    ask(machine, now=20.0)
    prepare(machine, "a", "b")
    load(machine, "a")
    out = machine.apply(Tick(), 40.0, idle=True)
    assert out[-1] == orders.live("t", NEW, {"b": "did not load version 1 in 10 s"})
    machine = make("a")
    ask(machine, idle=False)
    prepare(machine, "a", idle=False)
    out = machine.apply(Tick(), 11.0, idle=False)
    assert "went on for 10 s" in out[-1].message.reasons[""]


def test_undefined_weights_never_become_live():
    machine = WeightsMachine()
    broken = Weights(-1, "")
    assert machine.apply(orders.joined("a", weights=broken), 0.0, idle=True) == []
    assert machine.live is None
    assert machine.apply(orders.joined("b", weights=OLD), 0.0, idle=True) == [
        orders.load("a", OLD),  # the model that it was started with, if that is the same
        Admit("b"),
    ]
    machine.apply(orders.joined("a", weights=broken), 0.0, idle=True)
    assert machine.admitted == {"b"}
    machine = make("b", weights=NEW)
    assert machine.apply(orders.joined("a", weights=broken), 0.0, idle=True) == [orders.load("a", NEW)]


# --- whoever comes to other weights while they change --------------------------------------------


def loaded(machine, name, version, problem=""):
    return machine.apply(orders.loaded(name, version, problem), 3.0, idle=True)


def test_one_that_loads_has_all_the_time_again_when_it_is_told_of_another_version():
    machine = make("a", weights=NEW)
    machine.apply(orders.joined("b", weights=OLD), 0.0, idle=True)
    ask(machine, version=2, source="/2", now=9.0)
    machine.apply(orders.prepared("a", 2, "d2"), 9.0, idle=True)
    machine.apply(Tick(), 15.0, idle=True)
    assert "b" in machine.loading
    machine.apply(Tick(), 20.0, idle=True)
    assert machine.quarantined["b"] == "did not load version 2 in 10 s"


def test_an_update_below_what_a_restarted_buffer_learns_is_off():
    machine = make("a")
    ask(machine, version=3)
    out = machine.apply(orders.joined("c", weights=Weights(7, "d7", "/7")), 1.0, idle=True)
    (fail,) = orders.pick(out, wire.WeightsFailed)
    assert "c has version 7" in fail.reasons[""]
    assert machine.live.version == 7


def test_one_admitted_while_others_prepare_prepares_too():
    machine = make("a", weights=NEW)
    machine.apply(orders.joined("b", weights=OLD), 0.0, idle=True)
    ask(machine, version=2, source="/2")
    assert loaded(machine, "b", 1) == [Admit("b"), orders.prepare("b", 2, "/2", 1)]
    assert prepare(machine, "a", digest="d2", version=2) == []
    assert orders.load("b", Weights(2, "d2", "/2")) in prepare(machine, "b", digest="d2", version=2)


# --- answers that nobody waits for ---------------------------------------------------------------


def test_prepared_counts_only_from_who_was_asked_and_once():
    machine = make("a", "b")
    machine.apply(orders.joined("bad", weights=Weights(0, "other")), 0.0, idle=True)
    ask(machine)
    for stranger, told in (("nobody", []), ("bad", [orders.discard("bad", 1, 1)])):
        assert machine.apply(orders.prepared(stranger, 1, "dx"), 1.0, idle=True) == told
        assert machine.apply(orders.prepared(stranger, 1, "", "broken"), 1.0, idle=True) == []
    assert machine.updating
    prepare(machine, "a")
    assert machine.apply(orders.prepared("a", 1, "", "broken"), 1.0, idle=True) == []
    assert machine.updating
    prepare(machine, "b")
    assert machine.live == NEW
    assert machine.apply(orders.prepared("b", 1, "", "broken"), 1.0, idle=True) == []
    assert machine.updating


def test_prepared_of_another_version_or_another_update_is_not_this_ones():
    machine = make("a", "b")
    ask(machine, version=2)
    assert machine.apply(orders.prepared("a", 3, "", "broken"), 1.0, idle=True) == []
    assert machine.apply(orders.prepared("a", 1, "dx"), 1.0, idle=True) == []
    assert machine.updating
    machine.apply(orders.prepared("b", 2, "", "full disk", 1), 1.0, idle=True)
    assert not machine.updating
    assert orders.prepare("a", 2, "/again", 2) in ask(machine, version=2, source="/again")
    assert machine.apply(orders.prepared("a", 2, "dx", "", 1), 1.0, idle=True) == []  # of the first update
    assert machine.apply(orders.prepared("a", 2, "", "broken", 1), 1.0, idle=True) == []
    for name in ("a", "b"):
        machine.apply(orders.prepared(name, 2, "d2", "", 2), 1.0, idle=True)
    assert machine.live == Weights(2, "d2", "/again")


def test_loaded_counts_only_from_who_was_told_and_for_what_is_live():
    machine = make("a", "b")
    for problem in ("", "broken"):
        assert loaded(machine, "a", 0, problem) == []  # it was told nothing
        assert loaded(machine, "nobody", 0, problem) == []
    assert machine.admitted == {"a", "b"}
    ask(machine)
    prepare(machine, "a", "b")
    for version in (0, 2):
        for problem in ("", "broken"):
            assert loaded(machine, "a", version, problem) == []
    assert not machine.admitted
    assert not machine.quarantined
    assert loaded(machine, "a", 1) == [Admit("a")]
    assert loaded(machine, "a", 1, "broken") == []
    loaded(machine, "b", 1, "no memory")
    assert loaded(machine, "b", 1) == []
    assert (machine.admitted, machine.quarantined) == ({"a"}, {"b": "no memory"})


# --- a trainer that asks again -------------------------------------------------------------------


def test_what_was_prepared_for_an_update_that_ended_while_its_engine_registered_anew_is_discarded():
    machine = make("a")
    ask(machine)
    machine.apply(Left(["a"]), 1.0, idle=True)
    assert "no engine is there" in machine.apply(Tick(), 10.5, idle=True)[-1].message.reasons[""]
    machine.apply(orders.joined("a", weights=OLD), 11.0, idle=True)
    assert machine.apply(orders.prepared("a", 1, "d1", "", 1), 1.0, idle=True) == [orders.discard("a", 1, 1)]
    assert machine.apply(orders.prepared("a", 1, "", "broken", 1), 1.0, idle=True) == []


def test_the_answer_says_the_number_of_the_question():
    machine = make("a")
    ask(machine, call_id=4)
    assert ask(machine, call_id=5) == []  # it stopped waiting, or was killed
    prepare(machine, "a")
    assert load(machine, "a")[-1] == orders.live("t", NEW, {}, 5)
    assert ask(machine, call_id=6) == [orders.live("t", NEW, {}, 6)]
    (fail,) = ask(machine, version=0, call_id=7)
    assert fail.message.call_id == 7


def test_who_asks_again_waits_for_those_that_still_load():
    machine = make("a", weights=NEW)  # as a restarted buffer finds it
    machine.apply(orders.joined("b", weights=OLD), 1.0, idle=True)
    assert ask(machine, call_id=6) == [Hold()]
    assert ask(machine, call_id=7) == []
    assert load(machine, "b") == [Admit("b"), Release(), orders.live("t", NEW, {}, 7)]


def test_who_asks_again_has_those_that_could_not_load_try_again():
    machine = make("a", "b")
    ask(machine)
    prepare(machine, "a", "b")
    load(machine, "a")
    load(machine, "b", problem="disk full")
    again = Weights(1, "d1", "/again")
    assert ask(machine, source="/again", digest="d1", call_id=6) == [Hold(), orders.load("b", again)]
    assert machine.admitted == {"a"}
    reason = {"b": "disk still full"}
    assert load(machine, "b", problem=reason["b"]) == [Release(), orders.live("t", NEW, reason, 6)]
    ask(machine, source="/again", digest="d1", call_id=7)
    assert load(machine, "b") == [Admit("b"), Release(), orders.live("t", again, {}, 7)]


def test_who_cannot_load_from_where_the_weights_came_tries_where_a_trainer_has_them_now():
    machine = make("a", weights=NEW)  # as a restarted buffer finds it
    machine.apply(orders.joined("b", weights=OLD), 1.0, idle=True)
    assert ask(machine, source="spool:v1", digest="d1", call_id=6) == [Hold()]
    assert machine.sources == {"/new", "spool:v1"}
    there = Weights(1, "d1", "spool:v1")
    assert load(machine, "b", problem="/new is gone") == [orders.load("b", there)]
    assert load(machine, "b") == [Admit("b"), Release(), orders.live("t", there, {}, 6)]
    assert machine.sources == {"spool:v1"}


def test_a_trainer_may_ask_for_something_else_until_engines_load():
    machine = make("a")
    ask(machine, call_id=5)
    out = ask(machine, source="/other", call_id=6)
    assert [item.call_id for item in orders.pick(out, wire.WeightsFailed)] == [5]
    assert out[-1] == orders.prepare("a", 1, "/other", 2)
    machine.apply(orders.prepared("a", 1, "d1", "", 2), 1.0, idle=True)
    (fail,) = ask(machine, version=2, source="/third", call_id=7)
    assert (fail.message.call_id, "wait for that" in fail.message.reasons[""]) == (7, True)


# --- who sleeps ----------------------------------------------------------------------------------


def test_one_that_sleeps_is_told_to_load_once_it_is_awake():
    machine = make("a", weights=NEW)
    machine.apply(orders.joined("b", weights=OLD), 0.0, idle=True, awake={"a"})
    assert machine.loading == set()
    assert machine.apply(Tick(), 99.0, idle=True, awake={"a"}) == []  # to wake has a deadline of its own
    assert machine.apply(Tick(), 99.0, idle=True, awake={"a", "b"}) == [orders.load("b", NEW)]
    machine.apply(orders.joined("c", weights=NEW), 99.0, idle=True, awake={"a", "b"})
    assert machine.loading == {"b"}  # what sleeps with the live weights may sleep on
    assert "c" not in machine.admitted
    assert machine.apply(Tick(), 99.0, idle=True, awake={"a", "b", "c"}) == [Admit("c")]


def test_draining_leaves_an_update_that_nobody_loads_yet_to_its_successor():
    machine = make("a")
    ask(machine)
    out = machine.apply(Drained(), 1.0, idle=True)
    assert orders.kinds(out) == ["DiscardWeights", "Release"]
    assert ask(machine) == []  # its trainer asks the successor, too
    assert not machine.updating


def test_draining_lets_engines_finish_to_load():
    machine = make("a")
    ask(machine)
    prepare(machine, "a")
    assert machine.apply(Drained(), 1.0, idle=True) == []
    assert machine.updating
    load(machine, "a")
    assert not machine.updating


def test_after_an_update_of_its_own_a_buffer_learns_no_weights_from_engines():
    machine = make("a")
    ask(machine)
    prepare(machine, "a")
    load(machine, "a")
    assert machine.apply(orders.joined("b", weights=Weights(5, "d5", "/5")), 3.0, idle=True) == [
        orders.load("b", NEW)
    ]
    assert machine.live == NEW


def test_only_who_was_told_to_load_what_is_live_now_is_believed():
    machine = make("a", weights=NEW)
    machine.apply(orders.joined("asleep", weights=OLD), 1.0, idle=True, awake={"a"})
    machine.apply(orders.loaded("asleep", 1), 2.0, idle=True, awake={"a", "asleep"})
    assert machine.admitted == {"a"}
    machine.apply(
        orders.joined("later", weights=Weights(5, "d5", "/5")), 3.0, idle=True, awake={"a", "later"}
    )
    machine.apply(orders.loaded("asleep", 1, "broken"), 4.0, idle=True, awake={"a", "later"})
    assert not machine.quarantined


def quarantined(problem="disk full"):
    """One instance at work with version 1, and "b", whose load of it failed at 2.0."""
    machine = make("a", "b")
    ask(machine)
    prepare(machine, "a", "b")
    load(machine, "a")
    load(machine, "b", problem=problem)
    return machine


def test_what_could_not_load_tries_again_now_and_then():
    machine = quarantined()
    assert machine.apply(Tick(), 31.9, idle=False) == []
    assert machine.apply(Tick(), 32.0, idle=False) == [orders.load("b", NEW)]
    assert machine.apply(Tick(), 33.0, idle=False) == []
    assert machine.quarantined == {"b": "disk full"}
    assert machine.apply(orders.loaded("b", 1, "disk still full"), 34.0, idle=False) == []
    assert machine.quarantined == {"b": "disk still full"}
    assert machine.apply(Tick(), 63.9, idle=False) == []
    assert machine.apply(Tick(), 64.0, idle=False) == [orders.load("b", NEW)]
    assert machine.apply(orders.loaded("b", 1), 65.0, idle=False) == [Admit("b")]
    assert (machine.admitted, machine.quarantined) == ({"a", "b"}, {})


def test_an_update_that_waits_for_requests_of_a_version_that_none_has_goes_on_once_one_has_it():
    machine = quarantined()
    machine.apply(Left(["a"]), 3.0, idle=False)
    assert ask(machine, version=2, source="/newer", now=30.0, idle=False) == [
        Hold(), orders.prepare("b", 2, "/newer", 2),
    ]  # fmt: skip
    assert prepare(machine, "b", digest="d2", version=2, idle=False) == []
    assert machine.apply(Tick(), 33.0, idle=False) == [orders.load("b", NEW)]
    assert machine.apply(orders.loaded("b", 1), 34.0, idle=False) == [Admit("b")]  # it has checked version 2
    newer = Weights(2, "d2", "/newer")
    assert machine.apply(Tick(), 35.0, idle=True) == [Expel("b"), orders.load("b", newer)]


# --- who dropped its weights ---------------------------------------------------------------------


def dropped(*names, weights=OLD):
    """Return a machine whose engines have dropped their weights, which are awake while KV sleeps."""
    machine = make(*names, weights=weights)
    for name in names:
        out = machine.apply(orders.lost_weights(name), 0.0, idle=True, awake=())
        assert out == [Expel(name)]
    return machine


def partly(machine, event, *names):
    """Apply an event while the weights of these are awake, and their KV sleeps."""
    return machine.apply(event, 1.0, idle=True, awake=(), weights_awake=names)


def test_what_was_dropped_is_loaded_again_once_all_is_awake():
    for weights in (OLD, NEW):
        machine = dropped("a", weights=weights)
        assert partly(machine, Tick(), "a") == []
        assert not machine.loading
        assert machine.reloading
        assert machine.apply(Tick(), 2.0, idle=True, awake=["a"]) == [orders.load("a", weights)]
        assert machine.loading == {"a"}
        assert load(machine, "a") == [Admit("a")]
        assert not machine.reloading


def test_updates_one_after_the_other_are_loaded_while_kv_sleeps():
    machine = dropped("a", "b")
    for version in (1, 2):
        asked = orders.update("t", version, f"/w{version}")
        out = partly(machine, asked, "a", "b")
        assert orders.kinds(out) == ["Hold", "PrepareWeights", "PrepareWeights"]
        new = Weights(version, "d", f"/w{version}")
        for name in ("a", "b"):
            out = partly(machine, orders.prepared(name, version, "d", "", version), "a", "b")
        assert out == [orders.load("a", new), orders.load("b", new)]
        assert partly(machine, orders.loaded("a", version), "a", "b") == []
        out = partly(machine, orders.loaded("b", version), "a", "b")
        assert out == [Release(), orders.live("t", new, {})]
        assert not machine.admitted
    again = partly(machine, orders.update("t", 2, "/w2"), "a", "b")
    assert again[-1] == orders.live("t", new, {})
    out = machine.apply(Tick(), 2.0, idle=True, awake=["a", "b"])
    assert out == [Admit("a"), Admit("b")]


def test_a_version_that_was_dropped_is_not_taken_by_other_weights():
    machine = dropped("a", weights=NEW)
    [failed] = partly(machine, orders.update("t", 1, "/other", "other"), "a")
    assert "must be above the live one, 1" in failed.message.reasons[""]
    assert partly(machine, orders.update("t", 1, "/elsewhere", "d1"), "a")[0] == (Hold())


def test_an_engine_that_does_not_find_its_own_model_tries_again():
    machine = dropped("a")
    machine.apply(Tick(), 2.0, idle=True, awake=["a"])
    load(machine, "a", problem="no such folder")
    assert machine.quarantined == {"a": "no such folder"}
    assert not machine.reloading
    assert machine.apply(Tick(), 20.0, idle=True, awake=["a"]) == []
    out = machine.apply(Tick(), 40.0, idle=True, awake=["a"])
    assert out == [orders.load("a", OLD)]


def test_what_engines_dropped_is_live_for_a_restarted_buffer():
    machine = WeightsMachine()
    machine.apply(orders.joined("a", weights=NEW, dropped=True), 0.0, idle=True, awake=())
    assert machine.live == NEW
    assert machine.apply(orders.joined("b", weights=OLD), 0.0, idle=True, awake=["b"]) == [
        orders.load("b", NEW)
    ]
    assert machine.apply(Left(["a"]), 0.0, idle=True) == []
    assert not machine._dropped


def test_who_comes_back_with_a_version_keeps_others_from_giving_it_other_bytes():
    machine = make("a", "b")
    machine.apply(Left(["b"]), 1.0, idle=True)
    machine.apply(orders.joined("a", weights=Weights(-1, "")), 1.0, idle=True)
    machine.apply(orders.loaded("a", 0, "its model is gone"), 1.0, idle=True)
    assert not machine.admitted
    # Nobody has version 0, so it may be sent, also with another digest; but then b comes back with it.
    machine.apply(orders.update("t", 0, "/other", "d"), 2.0, idle=True)
    assert Admit("b") in machine.apply(orders.joined("b", weights=OLD), 2.0, idle=True)
    machine.apply(orders.prepared("a", 0, "d"), 2.0, idle=True)
    out = machine.apply(orders.prepared("b", 0, "d"), 2.0, idle=True)
    assert out[-1] == orders.failed("t", 0, {"": "version 0 must be above the live one"})
    assert machine.admitted == {"b"}
