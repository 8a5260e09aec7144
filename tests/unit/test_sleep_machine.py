"""Whether engines sleep: what each question and answer comes to."""

from wishless import SleepMachine

from seer.services.buffer import sleep
from seer.services.buffer.events import Joined, Left, Tick


def machine(*engines, wanted=None):
    """Return a machine with engines that are awake, or, if sleep was asked for, asleep."""
    made = SleepMachine(seconds=600.0)
    for name in engines:
        made.apply(Joined(name, asleep=False), 0.0, idle=True)
    if wanted:
        made.apply(sleep.SleepAsked("t", True), 0.0, idle=True)
        for name in engines:
            made.apply(sleep.SleepAnswered(name, True), 0.0, idle=True)
    return made


def test_an_engine_that_joins_asleep_is_woken_if_that_was_asked_for_last():
    made = machine()
    assert (
        made.apply(sleep.SleepAsked("t", False), 0.0, idle=True) == []
    )  # an earlier life's engines are not back yet
    made.apply(Joined("a", asleep=True), 1.0, idle=True)
    assert made.apply(Tick(), 1.0, idle=True) == [sleep.Order("a", False)]
    assert made.apply(sleep.SleepAnswered("a", False), 2.0, idle=True) == [sleep.Tell("t", False)]


def test_a_question_is_answered_in_the_end_though_no_engine_is_there():
    made = machine()
    assert made.apply(sleep.SleepAsked("t", True, 1), 5.0, idle=True) == []
    assert made.apply(sleep.SleepAsked("t", True, 2), 14.0, idle=True) == []
    assert made.apply(Tick(), 15.0, idle=True) == []
    assert made.apply(Tick(), 15.5, idle=True) == [sleep.Tell("t", True, "", 2)]
    assert made.apply(sleep.SleepAsked("t", False, 3), 20.0, idle=True) == []
    assert made.apply(Tick(), 31.0, idle=True) == [sleep.Tell("t", False, sleep.NO_ENGINE, 3)]


def test_nobody_is_awake_when_all_who_sleep_are_gone():
    made = machine("a", wanted=True)
    assert made.apply(sleep.SleepAsked("t", False, 1), 1.0, idle=True) == [sleep.Order("a", False)]
    assert made.apply(Left(["a"]), 2.0, idle=True) == [sleep.Tell("t", False, sleep.NO_ENGINE, 1)]
    made.apply(Joined("a", asleep=True), 3.0, idle=True)
    assert made.apply(Tick(), 3.0, idle=True) == [sleep.Order("a", False)]


def test_a_question_is_answered_when_nobody_is_on_the_way_any_more():
    made = machine("a")
    assert made.apply(sleep.SleepAsked("t", True, 7), 2.0, idle=True, loading=["a"]) == []
    assert made.apply(sleep.SleepAsked("t", True, 8), 3.0, idle=True, loading=["a"]) == []
    assert made.apply(Tick(), 4.0, idle=True) == [sleep.Order("a", True)]
    assert made.apply(sleep.SleepAnswered("a", True), 5.0, idle=True) == [sleep.Tell("t", True, "", 8)]


def test_a_new_life_has_a_deadline_of_its_own():
    made = machine("a")
    assert made.apply(sleep.SleepAsked("t", True), 0.0, idle=True) == [sleep.Order("a", True)]
    made.apply(Joined("a", asleep=False), 590.0, idle=True)
    assert made.apply(Tick(), 601.0, idle=True) == [sleep.Order("a", True)]
    assert made.apply(Tick(), 1201.0, idle=True) == []
    assert made.apply(Tick(), 1202.0, idle=True)[0] == sleep.GiveUp("a")


def test_who_was_told_to_sleep_is_not_awake_and_an_earlier_answer_changes_nothing():
    made = machine("a", "b")
    assert made.awake == {"a", "b"}
    assert len(made.apply(sleep.SleepAsked("t", True), 0.0, idle=True)) == 2
    assert made.awake == set()
    assert made.apply(sleep.SleepAnswered("a", False), 1.0, idle=True) == []


AT_WORK = Joined("a", asleep=False, sleep_levels=True)


def asleep_by(wish):
    return Joined("b", asleep=True, sleeping=("kv_cache", "weights"), sleep_levels=True, wish=wish)


def test_what_this_life_was_asked_is_later_than_all_wishes_even_after_a_clock_went_back():
    made = SleepMachine(first_wish=5)
    made.apply(AT_WORK, 0.0, idle=True)
    made.apply(sleep.SleepAsked("t", False), 0.0, idle=True)
    made.apply(asleep_by(900), 0.0, idle=True)
    assert made.apply(Tick(), 0.0, idle=True) == [sleep.Order("b", False)]
    made.apply(sleep.SleepAsked("late", True, tags=("kv_cache", "weights"), wish=950), 0.0, idle=True)
    assert not made.wanted
    assert made._wish > 950, "the next life is to follow it"


def test_a_trainer_repeats_its_wish_to_a_buffer_whose_clock_went_back():
    made = SleepMachine(first_wish=5)
    made.apply(AT_WORK, 0.0, idle=True)
    made.apply(asleep_by(900), 0.0, idle=True)
    assert made.wanted
    made.apply(sleep.SleepAsked("t", False, wish=901), 0.0, idle=True)
    assert not made.wanted


def test_a_wish_that_no_buffer_gave_is_not_followed():
    made = SleepMachine()
    made.apply(AT_WORK, 0.0, idle=True)
    made.apply(sleep.SleepAsked("t", True, tags=("kv_cache", "weights"), wish=2**63 - 1), 0.0, idle=True)
    assert not made.wanted


def test_a_fresh_engine_is_told_by_which_wish_it_is_awake():
    made = sleep.SleepMachine(first_wish=5)
    made.apply(AT_WORK, 0.0, idle=True)
    made.apply(sleep.SleepAsked("t", False), 0.0, idle=True)
    fresh = Joined("fresh", asleep=False, sleep_levels=True)
    assert made.apply(fresh, 0.0, idle=True) == [sleep.Order("fresh", False, wish=5)]


def test_the_level_of_an_earlier_life_is_that_of_any_engine_that_dropped_weights():
    made = SleepMachine(first_wish=1000)
    made.apply(asleep_by(5), 0.0, idle=True)
    tags = ("kv_cache", "weights")
    dropped = Joined("c", asleep=True, sleeping=tags, sleep_levels=True, dropped=True, wish=5)
    made.apply(dropped, 0.0, idle=True)
    answers = made.apply(sleep.SleepAsked("t", True, level=2), 0.0, idle=True)
    assert answers == [sleep.Tell("t", True)]
