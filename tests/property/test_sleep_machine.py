"""The sleep machine's invariants under any order of events, with engines that keep their own books.

Trainers ask for both levels and for every tag, engines and buffers are lost between any two steps, and engines are cut off and come back to this buffer or a later one.
"""

from collections import deque
from dataclasses import dataclass, field

import orders
from hypothesis import example, given, settings
from hypothesis import strategies as st
from wishless import SleepMachine

from seer.common import wire
from seer.common.sleep import SleepState
from seer.services.buffer import sleep_machine
from seer.services.buffer.events import Left, SleeperLost, Tick, ToEngine, ToTrainer

NAMES = ("a", "b", "c")
AWAKE, KV_ASLEEP, ASLEEP = SleepState
KINDS = (
    "join", "lose", "sleep", "sleep 2", "wake", "wake weights", "wake kv", "answer", "work",
    "load", "tick", "restart", "clock back", "cut", "back", "lose trainer",
    "lease",
)  # fmt: skip
STEPS = st.lists(st.tuples(st.sampled_from(KINDS), st.sampled_from(NAMES), st.integers(0, 9)), max_size=60)
TAGS = {"wake": (), "wake weights": ("weights",), "wake kv": ("kv_cache",)}


@dataclass
class Engine:
    """What it has: its state, whether its weights have values, and the orders that it has not obeyed."""

    state: SleepState = AWAKE
    dropped: bool = False
    wish: int = 0
    orders: deque[wire.Sleep] = field(default_factory=deque)

    def obey(self, order):
        if order.asleep:
            assert self.state is not ASLEEP
            self.dropped = self.dropped or order.level == 2
        self.state = ASLEEP if order.asleep else self.state.woken(order.tags)
        self.wish = order.wish or self.wish


class World:
    def __init__(self):
        self.machine = sleep_machine.SleepMachine(seconds=5.0, first_wish=1)
        self.now = 0.0
        self.idle = True
        self.engines: dict[str, Engine] = {}
        self.cut: dict[str, Engine] = {}
        self.answered: tuple[int, SleepState] | None = None
        self.loading: set[str] = set()
        self.asked = None
        self.open = 0

    def handle(self, event):
        for item in self.machine.apply(event, self.now, idle=self.idle, loading=self.loading):
            match item:
                case ToEngine(name, wire.Sleep(asleep=False, wish=wish)) if not self.engines[name].state:
                    self.engines[name].wish = wish
                case ToEngine(name, wire.Sleep() as order):
                    engine = self.engines[name]
                    assert self.idle or not order.asleep
                    assert name not in self.loading
                    assert not engine.orders, "one step after the other"
                    engine.orders.append(order)
                case sleep_machine.GiveUp(name):
                    self.lose(name)
                case ToTrainer(message=wire.Slept(problem="") as told):
                    self.open -= 1
                    for engine in self.engines.values():
                        assert engine.state == self.machine.wanted
                    assert told.asleep == (self.machine.wanted is ASLEEP)
                    assert told.tags == self.machine.wanted.tags
                    self.answered = told.wish, self.machine.wanted
                case ToTrainer(message=told):
                    self.open -= 1
                    unasked = (sleep_machine.NO_ENGINE, sleep_machine.LEASE_ENDED)
                    assert self.asked is not None or told.problem in unasked
        if any(engine.state for engine in self.engines.values()):
            assert self.machine.held
        awake = {name for name, engine in self.engines.items() if not engine.state and not engine.orders}
        assert self.machine.awake == awake
        assert self.machine.awake <= self.machine.weights_awake
        assert not any(self.engines[name].state is ASLEEP for name in self.machine.weights_awake)

    def lose(self, name):
        self.engines.pop(name, None)
        self.loading.discard(name)

    def register(self, name):
        engine = self.engines[name]
        engine.orders.clear()
        tags = tuple(engine.state.tags)
        self.handle(orders.joined(name, sleeping=tags, dropped=engine.dropped, wish=engine.wish))
        self.handle(Tick())

    def ask(self, kind):
        """Ask, and check that a refusal changes nothing."""
        before, level = self.machine.wanted, self.machine._level
        asked = orders.sleep(
            "trainer", kind.startswith("sleep"), 0, 1 + (kind == "sleep 2"), TAGS.get(kind, ())
        )
        deeper = kind == "sleep 2" and before is ASLEEP and level == 1
        alone = kind == "wake kv" and before is ASLEEP
        self.open += 1
        self.asked = refused = deeper or alone
        opened = self.open
        self.handle(asked)
        if refused:
            assert (self.machine.wanted, self.machine._level, self.open) == (before, level, opened - 1)
        else:
            woken = ASLEEP if asked.message.asleep else before.woken(asked.message.tags)
            assert self.machine.wanted == woken
        self.asked = None

    def step(self, kind, name, number):
        match kind:
            case "cut" | "back":
                self.reconnect(name, back=kind == "back")
            case "lose trainer" | "lease":
                self.lose_trainer(lease=kind == "lease")
            case "join" if name not in self.engines and name not in self.cut:
                self.engines[name] = Engine()
                self.register(name)
            case "lose" if name in self.engines:
                self.lose(name)
                self.handle(Left([name]))
            case "sleep" | "sleep 2" | "wake" | "wake weights" | "wake kv" if not self.open:
                self.ask(kind)
            case "answer" if name in self.engines and self.engines[name].orders:
                engine = self.engines[name]
                engine.obey(engine.orders.popleft())
                self.handle(orders.slept(name, bool(engine.state), engine.state.tags, engine.dropped))
            case "load" if name in self.loading:
                self.loading.discard(name)
                self.handle(Tick())
            case "load" if name in self.machine.weights_awake:
                self.loading.add(name)
            case "work":
                self.idle = self.idle is False or self.machine.held
                self.handle(Tick())
            case "tick":
                self.now += number
                self.handle(Tick())
            case "restart" | "clock back":  # a new buffer; its trainers ask it again, its engines register
                self.restart(1 if kind == "clock back" else self.machine.first_wish + 1000)

    def lose_trainer(self, lease):
        """Have nobody say again what was wanted, or end the leases of those who wanted sleep."""
        if not lease:
            self.answered = None
            return
        wanted, shares = self.machine.wanted, list(self.machine.sleepers)
        self.handle(SleeperLost("another"))
        assert (self.machine.wanted, bool(shares)) == (wanted, bool(wanted))
        for share in shares:
            self.handle(SleeperLost(share))
        assert (self.machine.wanted, self.machine.sleepers) == (AWAKE, [])

    def reconnect(self, name, back):
        """Cut an engine off from its buffer, or have it come back, with the state that it had."""
        if back and name in self.cut:
            self.engines[name] = self.cut.pop(name)
            self.register(name)
        elif not back and name in self.engines:
            self.cut[name] = self.engines[name]
            self.lose(name)
            self.handle(Left([name]))

    def restart(self, first_wish):
        was = any(engine.state for engine in self.engines.values())
        wanted, latest = self.machine.wanted, self.machine._wish
        self.machine, self.open, self.idle = (
            sleep_machine.SleepMachine(seconds=5.0, first_wish=first_wish),
            0,
            True,
        )
        self.loading.clear()
        engines, self.engines = self.engines, {}  # the new buffer knows of one after the other
        for name, engine in engines.items():
            self.engines[name] = engine
            self.register(name)
        if self.answered is not None:
            wish, state = self.answered
            again = orders.sleep("trainer", bool(state), tags=tuple(state.tags), wish=wish)
            self.handle(again)
            self.handle(again)
        known = max([*(each.wish for each in engines.values()), self.answered[0] if self.answered else 0])
        if not known:
            assert self.machine.held == was
        elif known == latest:  # some engine came to it, or its trainer says it again
            assert self.machine.wanted is wanted
        assert self.machine._wish == known


@settings(max_examples=600)
@given(STEPS)
@example(
    [
        *(("join", "a", 0), ("join", "b", 0), ("sleep", "a", 0), ("answer", "a", 0), ("answer", "b", 0)),
        *(("cut", "a", 0), ("wake", "a", 0), ("answer", "b", 0), ("lose trainer", "a", 0)),
        *(("restart", "a", 0), ("back", "a", 0)),
    ]
)
@example([("join", "a", 0), ("join", "b", 0), ("sleep", "a", 0), ("answer", "b", 0), ("restart", "a", 0)])
@example(
    [
        *(("join", "a", 0), ("join", "b", 0), ("sleep 2", "a", 0), ("answer", "a", 0), ("answer", "b", 0)),
        *(
            ("wake weights", "a", 0),
            ("answer", "a", 0),
            ("lose", "b", 0),
            ("restart", "a", 0),
            ("wake kv", "a", 0),
        ),
    ]
)
def test_engines_hold_memory_as_was_last_asked(steps):
    world = World()
    for step in steps:
        world.step(*step)
    world.idle = True
    world.loading.clear()
    for name in list(world.cut):
        world.step("back", name, 0)
    wanted = world.machine.wanted
    for _ in range(4):
        world.handle(Tick())
        for name in list(world.engines):
            world.step("answer", name, 0)
    world.now += sleep_machine.GRACE_SECONDS + 1
    world.handle(Tick())
    assert world.open == 0
    assert world.machine.wanted == wanted
    assert all(engine.state == wanted for engine in world.engines.values())
    assert world.machine.held == bool(wanted)


def join(machine, name="a", state=AWAKE, **changes):
    """Have an engine join in a state."""
    event = orders.joined(name, sleeping=tuple(state.tags), **changes)
    assert machine.apply(event, 0.0, idle=True) == []


def answer(machine, name, state, now=1.0, **options):
    event = orders.slept(name, bool(state), tuple(state.tags))
    return machine.apply(event, now, **{"idle": True} | options)


def test_an_engine_that_does_not_answer_is_given_up():
    machine = SleepMachine(seconds=5.0)
    join(machine, "a")
    join(machine, "b")
    asked = machine.apply(orders.sleep("t", True), 0.0, idle=True)
    assert asked == [orders.rest("a", True), orders.rest("b", True)]
    assert answer(machine, "b", ASLEEP) == []
    assert machine.apply(Tick(), 5.5, idle=True) == [sleep_machine.GiveUp("a"), orders.rests("t", True)]


def test_another_trainer_is_told_to_wait():
    machine = SleepMachine()
    join(machine)
    machine.apply(orders.sleep("one", True), 0.0, idle=True)
    (told,) = machine.apply(orders.sleep("two", False), 0.0, idle=True)
    assert told == orders.rests("two", False, "one puts engines to sleep: wait for that")


def test_one_sleeper_among_engines_that_are_awake_is_woken():
    machine = SleepMachine()
    join(machine, "a")
    join(machine, "b", ASLEEP)
    assert machine.apply(Tick(), 0.0, idle=False) == [orders.rest("b", False)]


def test_one_that_loads_is_left_alone_until_it_has_loaded():
    machine = SleepMachine()
    join(machine, "a")
    assert machine.apply(orders.sleep("t", True), 0.0, idle=True, loading={"a"}) == []
    assert machine.apply(Tick(), 1.0, idle=True, loading={"a"}) == []
    assert machine.apply(Tick(), 2.0, idle=True) == [orders.rest("a", True)]
    assert answer(machine, "a", ASLEEP, 3.0) == [orders.rests("t", True)]


def test_an_answer_that_nobody_waits_for_changes_nothing():
    machine = SleepMachine()
    join(machine)
    answer(machine, "a", ASLEEP)
    assert machine.awake == {"a"}
    machine.apply(orders.sleep("t", True), 0.0, idle=True)
    assert answer(machine, "a", AWAKE) == []  # it was told to sleep
    assert answer(machine, "a", ASLEEP) == [orders.rests("t", True)]


def test_weights_wake_before_the_kv_cache():
    machine = SleepMachine()
    join(machine)
    asked = orders.sleep("t", True, level=2)
    assert machine.apply(asked, 0.0, idle=True) == [orders.rest("a", True, 2)]
    assert answer(machine, "a", ASLEEP) == [orders.rests("t", True)]
    (told,) = machine.apply(orders.sleep("t", False, tags=("kv_cache",)), 1.0, idle=True)
    assert "the weights sleep: wake them first" in told.message.problem
    woken = machine.apply(orders.sleep("t", False, tags=("weights",)), 1.0, idle=True)
    assert woken == [orders.rest("a", False, tags=("weights",))]
    assert (machine.awake, machine.weights_awake) == (set(), set())
    assert answer(machine, "a", KV_ASLEEP) == [orders.rests("t", False, kv_asleep=True)]
    assert (machine.awake, machine.weights_awake, machine.held) == (set(), {"a"}, True)
    woken = machine.apply(orders.sleep("t", False, tags=("kv_cache",)), 2.0, idle=True)
    assert woken == [orders.rest("a", False)]
    assert answer(machine, "a", AWAKE) == [orders.rests("t", False)]
    assert not machine.held


def test_a_deeper_level_is_refused_while_weights_sleep_and_a_lesser_one_is_there_already():
    machine = SleepMachine()
    join(machine)
    machine.apply(orders.sleep("t", True), 0.0, idle=True)
    answer(machine, "a", ASLEEP)
    (told,) = machine.apply(orders.sleep("t", True, level=2), 1.0, idle=True)
    assert told.message.problem.startswith("level = 2: engines sleep at level 1")
    machine.apply(orders.sleep("t", False, tags=("weights",)), 2.0, idle=True)
    answer(machine, "a", KV_ASLEEP)
    assert machine.apply(orders.sleep("t", True, level=2), 3.0, idle=True) == [orders.rest("a", True, 2)]
    answer(machine, "a", ASLEEP)
    assert machine.apply(orders.sleep("t", True, 7), 4.0, idle=True) == [orders.rests("t", True, "", 7)]


def test_engines_of_an_earlier_incarnation_that_all_slept_at_first_sleep_on():
    machine = SleepMachine()
    join(machine, "a", ASLEEP)
    join(machine, "b")
    join(machine, "c", ASLEEP)
    assert machine.wanted is ASLEEP


def test_a_restarted_buffer_is_asked_for_the_same_level_again():
    machine = SleepMachine()
    join(machine, "a", ASLEEP, dropped=True)
    join(machine, "b")
    machine.apply(Tick(), 0.0, idle=False)
    assert machine.apply(orders.sleep("t", True, level=2), 0.0, idle=True) == [orders.rest("b", True, 2)]
    assert answer(machine, "b", ASLEEP) == [orders.rests("t", True)]
