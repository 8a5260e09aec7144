"""Whether engines sleep: what each question and answer comes to."""

import orders
from wishless import SleepMachine

from seer.services.buffer import sleep_machine
from seer.services.buffer.events import Left, Tick

ALL = ("kv_cache", "weights")


def machine(*engines, wanted=None):
    """Return a machine with engines that are awake, or, if sleep was asked for, asleep."""
    made = SleepMachine(seconds=600.0)
    for name in engines:
        made.apply(orders.joined(name), 0.0, idle=True)
    if wanted:
        made.apply(orders.sleep("t", True), 0.0, idle=True)
        for name in engines:
            made.apply(orders.slept(name, True), 0.0, idle=True)
    return made


def test_a_question_is_answered_in_the_end_though_no_engine_is_there():
    made = machine()
    assert made.apply(orders.sleep("t", True, 1), 5.0, idle=True) == []
    assert made.apply(orders.sleep("t", True, 2), 14.0, idle=True) == []
    assert made.apply(Tick(), 15.0, idle=True) == []
    assert made.apply(Tick(), 15.5, idle=True) == [orders.rests("t", True, "", 2)]
    assert made.apply(orders.sleep("t", False, 3), 20.0, idle=True) == []
    assert made.apply(Tick(), 31.0, idle=True) == [orders.rests("t", False, sleep_machine.NO_ENGINE, 3)]


def test_nobody_is_awake_when_all_who_sleep_are_gone():
    made = machine("a", wanted=True)
    assert made.apply(orders.sleep("t", False, 1), 1.0, idle=True) == [orders.rest("a", False)]
    assert made.apply(Left(["a"]), 2.0, idle=True) == [orders.rests("t", False, sleep_machine.NO_ENGINE, 1)]
    made.apply(orders.joined("a", sleeping=ALL), 3.0, idle=True)
    assert made.apply(Tick(), 3.0, idle=True) == [orders.rest("a", False)]


def test_a_new_incarnation_has_a_deadline_of_its_own():
    made = machine("a")
    assert made.apply(orders.sleep("t", True), 0.0, idle=True) == [orders.rest("a", True)]
    made.apply(orders.joined("a"), 590.0, idle=True)
    assert made.apply(Tick(), 601.0, idle=True) == [orders.rest("a", True)]
    assert made.apply(Tick(), 1201.0, idle=True) == []
    assert made.apply(Tick(), 1202.0, idle=True)[0] == sleep_machine.GiveUp("a")


AT_WORK = orders.joined("a")


def asleep_by(wish):
    return orders.joined("b", sleeping=ALL, wish=wish)


def test_what_this_incarnation_was_asked_is_later_than_all_wishes_even_after_a_clock_went_back():
    made = SleepMachine(first_wish=5)
    made.apply(AT_WORK, 0.0, idle=True)
    made.apply(orders.sleep("t", False), 0.0, idle=True)
    made.apply(asleep_by(900), 0.0, idle=True)
    assert made.apply(Tick(), 0.0, idle=True) == [orders.rest("b", False)]
    made.apply(orders.sleep("late", True, tags=ALL, wish=950), 0.0, idle=True)
    assert not made.wanted
    assert made._wish > 950, "the next incarnation is to follow it"


def test_a_wish_that_no_buffer_gave_is_not_followed():
    made = SleepMachine()
    made.apply(AT_WORK, 0.0, idle=True)
    made.apply(orders.sleep("t", True, tags=ALL, wish=2**63 - 1), 0.0, idle=True)
    assert not made.wanted


def test_a_fresh_engine_is_told_by_which_wish_it_is_awake():
    made = sleep_machine.SleepMachine(first_wish=5)
    made.apply(AT_WORK, 0.0, idle=True)
    made.apply(orders.sleep("t", False), 0.0, idle=True)
    fresh = orders.joined("fresh")
    assert made.apply(fresh, 0.0, idle=True) == [orders.rest("fresh", False, wish=5)]


def test_the_level_of_an_earlier_incarnation_is_that_of_any_engine_that_dropped_weights():
    made = SleepMachine(first_wish=1000)
    made.apply(asleep_by(5), 0.0, idle=True)
    dropped = orders.joined("c", sleeping=ALL, dropped=True, wish=5)
    made.apply(dropped, 0.0, idle=True)
    answers = made.apply(orders.sleep("t", True, level=2), 0.0, idle=True)
    assert answers == [orders.rests("t", True)]
