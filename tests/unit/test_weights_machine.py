"""The weights machine, event in, instructions out."""

import pytest

from seer.services.buffer import weights as w

OLD = w.Weights(0, "d0")
NEW = w.Weights(1, "d1", "/new")


def make(*names, weights=OLD):
    machine = w.WeightsMachine(seconds=10.0)
    for name in names:
        machine.handle(w.Registered(name, weights), 0.0, idle=True)
    return machine


def ask(machine, version=1, source="/new", now=0.0, idle=True, **fields):
    return machine.handle(w.UpdateAsked("t", version, source, **fields), now, idle=idle)


def prepare(machine, *names, digest="d1", idle=True, version=1):
    out = []
    for name in names:
        out += machine.handle(w.Prepared(name, version, digest), 1.0, idle=idle)
    return out


def load(machine, *names, problem=""):
    out = []
    for name in names:
        out += machine.handle(w.Loaded(name, machine.live.version, problem), 2.0, idle=True)
    return out


def test_an_update_prepares_everywhere_then_loads_everywhere():
    machine = make("a", "b")
    assert ask(machine) == [w.Hold(), w.Prepare("a", 1, "/new"), w.Prepare("b", 1, "/new")]
    assert prepare(machine, "a") == []
    assert machine.live == OLD
    assert prepare(machine, "b") == [w.Expel("a"), w.Load("a", NEW), w.Expel("b"), w.Load("b", NEW)]
    assert not machine.admitted
    assert load(machine, "a") == [w.Admit("a")]
    assert load(machine, "b") == [w.Admit("b"), w.Release(), w.Report("t", NEW, {})]
    assert machine.live == NEW
    assert not machine.updating


def test_one_problem_cancels_it_for_all():
    machine = make("a", "b")
    ask(machine)
    out = machine.handle(w.Prepared("a", 1, "", "lm_head has shape [1, 2], not [3, 4]"), 1.0, idle=True)
    reasons = {"a": "lm_head has shape [1, 2], not [3, 4]"}
    assert out == [w.Release(), w.Fail("t", 1, reasons)]
    assert machine.live == OLD
    assert machine.admitted == {"a", "b"}
    assert prepare(machine, "b") == []
    assert ask(machine)[0] == w.Hold()


@pytest.mark.parametrize("asked", ["", "d1"])
def test_all_must_read_the_same_bytes(asked):
    machine = make("a", "b")
    ask(machine, digest=asked)
    prepare(machine, "a")
    out = prepare(machine, "b", digest="other")
    assert out[-1] == w.Fail("t", 1, {"b": "reads weights with digest other, not d1"})


def test_what_is_in_flight_is_finished_first():
    machine = make("a")
    ask(machine, idle=False)
    assert prepare(machine, "a", idle=False) == []
    assert machine.live == OLD
    assert machine.handle(w.Tick(), 2.0, idle=True) == [w.Expel("a"), w.Load("a", NEW)]


def test_or_aborted_or_forbids_it():
    machine = make("a")
    assert ask(machine, idle=False, in_flight=w.InFlight.ABORT)[:2] == [w.Hold(), w.Abort()]
    machine = make("a")
    (fail,) = ask(machine, idle=False, in_flight=w.InFlight.ERROR)
    assert "under way" in fail.reasons[""]


def test_what_cannot_load_is_quarantined_not_rolled_back():
    machine = make("a", "b")
    ask(machine)
    prepare(machine, "a", "b")
    load(machine, "a")
    assert load(machine, "b", problem="out of memory")[-1] == w.Report("t", NEW, {"b": "out of memory"})
    assert machine.admitted == {"a"}
    ask(machine, version=2, source="/newer")
    out = prepare(machine, "a", digest="d2", version=2)
    assert w.Load("b", w.Weights(2, "d2", "/newer")) in out


def test_an_instance_lost_at_any_moment_is_not_waited_for():
    machine = make("a", "b")
    ask(machine)
    prepare(machine, "a")
    out = machine.handle(w.Lost("b"), 1.0, idle=True)
    assert w.Load("a", NEW) in out
    out = machine.handle(w.Lost("a"), 1.0, idle=True)
    assert out == [w.Release(), w.Report("t", NEW, {})]
    machine = make("a")
    ask(machine)
    out = machine.handle(w.Lost("a"), 1.0, idle=True)
    assert out[-1] == w.Fail("t", 1, {"": "no engine is left"})


def test_a_late_joiner_loads_before_it_gets_work():
    machine = make("a")
    ask(machine)
    prepare(machine, "a")
    load(machine, "a")
    assert machine.handle(w.Registered("b", OLD), 3.0, idle=False) == [w.Load("b", NEW)]
    assert load(machine, "b") == [w.Admit("b")]
    assert machine.handle(w.Registered("c", NEW), 3.0, idle=False) == [w.Admit("c")]


def test_one_that_joins_during_prepare_prepares_too():
    machine = make("a")
    ask(machine)
    assert machine.handle(w.Registered("b", OLD), 1.0, idle=True) == [w.Admit("b"), w.Prepare("b", 1, "/new")]
    assert prepare(machine, "a") == []
    assert w.Load("b", NEW) in prepare(machine, "b")


def test_a_restarted_buffer_takes_the_highest_version_it_meets():
    machine = make("a")
    out = machine.handle(w.Registered("b", NEW), 1.0, idle=True)
    assert out == [w.Expel("a"), w.Load("a", NEW), w.Admit("b")]
    assert machine.live == NEW
    out = make("a").handle(w.Registered("b", NEW), 1.0, idle=False)
    assert out[0] == w.Abort()


def test_one_with_other_weights_of_the_same_version_gets_no_work():
    machine = make("a")
    assert machine.handle(w.Registered("b", w.Weights(0, "other")), 1.0, idle=True) == []
    assert machine.admitted == {"a"}
    assert "start it with the same model" in machine.quarantined["b"]


@pytest.mark.parametrize(
    ("version", "problem"), [(0, "must be above the live one, 1"), (1, "must be above the live one, 1")]
)
def test_versions_rise(version, problem):
    machine = make("a", weights=NEW)
    (fail,) = ask(machine, version=version, source="/elsewhere")
    assert problem in fail.reasons[""]
    assert ask(machine, version=1) == [w.Report("t", NEW, {})]


def test_one_update_at_a_time_and_none_without_engines():
    machine = make("a")
    ask(machine)
    assert ask(machine) == []  # the same again
    (fail,) = ask(machine, version=2)
    assert "t updates to version 1" in fail.reasons[""]
    (fail,) = ask(make(), version=1)
    assert "no engine" in fail.reasons[""]


def test_deadlines():
    machine = make("a", "b")
    ask(machine)
    prepare(machine, "a")
    assert machine.handle(w.Tick(), 9.0, idle=True) == []
    assert machine.handle(w.Tick(), 11.0, idle=True)[-1] == w.Fail("t", 1, {"b": "did not answer in 10 s"})
    ask(machine, now=20.0)
    prepare(machine, "a", "b")
    load(machine, "a")
    out = machine.handle(w.Tick(), 40.0, idle=True)
    assert out[-1] == w.Report("t", NEW, {"b": "did not load version 1 in 10 s"})
    machine = make("a")
    ask(machine, idle=False)
    prepare(machine, "a", idle=False)
    out = machine.handle(w.Tick(), 11.0, idle=False)
    assert "went on for 10 s" in out[-1].reasons[""]


def test_undefined_weights_never_become_live():
    machine = w.WeightsMachine()
    broken = w.Weights(-1, "")
    assert machine.handle(w.Registered("a", broken), 0.0, idle=True) == []
    assert machine.live is None
    assert machine.handle(w.Registered("b", OLD), 0.0, idle=True) == [w.Admit("b")]
    machine.handle(w.Registered("a", broken), 0.0, idle=True)
    assert machine.admitted == {"b"}
    machine = make("b", weights=NEW)
    assert machine.handle(w.Registered("a", broken), 0.0, idle=True) == [w.Load("a", NEW)]
