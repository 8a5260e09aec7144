"""The sleep machine's invariants under any order of events, with engines that keep their own books."""

from hypothesis import example, given, settings
from hypothesis import strategies as st

from seer.services.buffer import sleep
from seer.services.buffer.events import Joined, Left, Tick

NAMES = ("a", "b", "c")
STEPS = st.lists(
    st.tuples(
        st.sampled_from(("join", "lose", "sleep", "wake", "answer", "work", "tick", "restart")),
        st.sampled_from(NAMES),
        st.integers(0, 9),
    ),
    max_size=60,
)


class World:
    def __init__(self):
        self.machine = sleep.SleepMachine(seconds=5.0)
        self.now = 0.0
        self.idle = True
        self.asleep: dict[str, bool] = {}
        self.orders: dict[str, list[bool]] = {}
        self.open = 0

    def handle(self, event):
        for item in self.machine.apply(event, self.now, idle=self.idle):
            match item:
                case sleep.Order():
                    assert self.idle or not item.asleep
                    self.orders[item.instance].append(item.asleep)
                case sleep.GiveUp():
                    self.lose(item.instance)
                case sleep.Tell(problem=""):
                    self.open -= 1
                    assert set(self.asleep.values()) <= {item.asleep}
                case sleep.Tell():
                    self.open -= 1
        if any(self.asleep.values()):
            assert self.machine.held

    def lose(self, name):
        self.asleep.pop(name, None)
        self.orders.pop(name, None)

    def step(self, kind, name, number):
        match kind:
            case "join" if name not in self.asleep:
                self.asleep[name], self.orders[name] = False, []
                self.handle(Joined(name, asleep=False))
                self.handle(Tick())
            case "lose" if name in self.asleep:
                self.lose(name)
                self.handle(Left([name]))
            case "sleep" | "wake" if not self.open:
                self.open += 1
                self.handle(sleep.SleepAsked("trainer", kind == "sleep"))
            case "answer" if self.orders.get(name):
                self.asleep[name] = self.orders[name].pop(0)
                self.handle(sleep.SleepAnswered(name, self.asleep[name]))
            case "work":
                self.idle = self.idle is False or self.machine.held
                self.handle(Tick())
            case "tick":
                self.now += number
                self.handle(Tick())
            case "restart":  # a new buffer; its trainers ask it again, its engines register
                was = any(self.asleep.values())
                self.machine, self.open, self.idle = sleep.SleepMachine(seconds=5.0), 0, True
                engines, self.asleep = self.asleep, {}  # the new buffer knows of one after the other
                for engine, asleep in engines.items():
                    self.asleep[engine], self.orders[engine] = asleep, []
                    self.handle(Joined(engine, asleep=asleep))
                    self.handle(Tick())
                assert self.machine.held == was


@settings(max_examples=300)
@given(STEPS)
@example([("join", "a", 0), ("join", "b", 0), ("sleep", "a", 0), ("answer", "b", 0), ("restart", "a", 0)])
def test_engines_hold_memory_as_was_last_asked(steps):
    world = World()
    for step in steps:
        world.step(*step)
    world.idle = True
    wanted = world.machine._wanted
    for _ in range(3):
        world.handle(Tick())
        for name in list(world.orders):
            while world.orders.get(name):
                world.step("answer", name, 0)
    world.now += sleep.GRACE_SECONDS + 1
    world.handle(Tick())
    assert world.open == 0
    assert set(world.asleep.values()) <= {wanted}
    assert world.machine.held == wanted


def test_an_engine_that_does_not_answer_is_given_up():
    machine = sleep.SleepMachine(seconds=5.0)
    machine.apply(Joined("a", asleep=False), 0.0, idle=True)
    machine.apply(Joined("b", asleep=False), 0.0, idle=True)
    asked = machine.apply(sleep.SleepAsked("t", True), 0.0, idle=True)
    assert asked == [sleep.Order("a", True), sleep.Order("b", True)]
    assert machine.apply(sleep.SleepAnswered("b", True), 1.0, idle=True) == []
    assert machine.apply(Tick(), 5.5, idle=True) == [sleep.GiveUp("a"), sleep.Tell("t", True)]


def test_another_trainer_is_told_to_wait():
    machine = sleep.SleepMachine()
    machine.apply(Joined("a", asleep=False), 0.0, idle=True)
    machine.apply(sleep.SleepAsked("one", True), 0.0, idle=True)
    (told,) = machine.apply(sleep.SleepAsked("two", False), 0.0, idle=True)
    assert told == sleep.Tell("two", False, "one puts engines to sleep: wait for that")


def test_one_sleeper_among_engines_that_are_awake_is_woken():
    machine = sleep.SleepMachine()
    machine.apply(Joined("a", asleep=False), 0.0, idle=True)
    assert machine.apply(Joined("b", asleep=True), 0.0, idle=False) == []
    assert machine.apply(Tick(), 0.0, idle=False) == [sleep.Order("b", False)]


def test_a_lost_engine_is_not_waited_for():
    machine = sleep.SleepMachine()
    for name in ("a", "b"):
        machine.apply(Joined(name, asleep=False), 0.0, idle=True)
    machine.apply(sleep.SleepAsked("t", True, 4), 0.0, idle=True)
    machine.apply(sleep.SleepAnswered("b", True), 1.0, idle=True)
    assert machine.apply(Left(["a"]), 1.0, idle=True) == [sleep.Tell("t", True, "", 4)]


def test_one_that_has_to_load_is_woken_for_it_and_put_to_sleep_again():
    machine = sleep.SleepMachine()
    machine.apply(Joined("a", asleep=True), 0.0, idle=True)
    assert machine.wanted
    machine.apply(Joined("b", asleep=True), 0.0, idle=True)
    assert machine.apply(Tick(), 0.0, idle=True, loading={"b"}) == [sleep.Order("b", False)]
    assert machine.awake == set()
    machine.apply(sleep.SleepAnswered("b", False), 1.0, idle=True, loading={"b"})
    assert machine.awake == {"b"}
    assert machine.apply(sleep.SleepAsked("t", True), 1.0, idle=True, loading={"b"}) == []
    assert machine.apply(Tick(), 2.0, idle=True) == [sleep.Order("b", True)]
    assert machine.apply(sleep.SleepAnswered("b", True), 3.0, idle=True) == [sleep.Tell("t", True)]


def test_an_answer_that_nobody_waits_for_changes_nothing():
    machine = sleep.SleepMachine()
    machine.apply(Joined("a", asleep=False), 0.0, idle=True)
    machine.apply(sleep.SleepAnswered("a", True), 0.0, idle=True)
    assert machine.awake == {"a"}
    machine.apply(sleep.SleepAsked("t", True), 0.0, idle=True)
    machine.apply(sleep.SleepAnswered("a", False), 0.0, idle=True)  # it was told to sleep
    assert machine.apply(sleep.SleepAnswered("a", True), 0.0, idle=True) == [sleep.Tell("t", True)]
