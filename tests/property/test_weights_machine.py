"""The weights machine's invariants under any order of events, with instances that keep their own books."""

import orders
from hypothesis import example, given, settings
from hypothesis import strategies as st

from seer.common import wire
from seer.common.weights.in_place import is_in_place
from seer.services.buffer.events import FromEngine, Joined, Left, Tick, ToEngine, ToTrainer, Weights
from seer.services.buffer.weights.instructions import Abort, Admit, Expel, Hold, Release
from seer.services.buffer.weights.weights_machine import RETRY_SECONDS, WeightsMachine

NAMES = ("a", "b", "c")
STEPS = st.lists(
    st.tuples(
        st.sampled_from(("register", "lose", "ask", "ask in place", "answer", "tick", "work")),
        st.sampled_from(NAMES),
        st.integers(0, 9),
    ),
    max_size=60,
)


def same(one, other):
    """Whether weights are the same, wherever they come from."""
    return (one.version, one.digest) == (other.version, other.digest)


def weights_of(order):
    return Weights(order.version, order.digest, order.source)


class World:
    def __init__(self):
        self.machine = WeightsMachine(seconds=5.0)
        self.now = 0.0
        self.loaded: dict[str, Weights | None] = {}
        self.orders: dict[str, list] = {}
        self.admitted: set[str] = set()
        self.held = False
        self.idle = True
        self.asked = 0
        self.open: dict[str, int] = {}  # a trainer waits for the answer to what it asked last
        self.told: dict[str, tuple[Weights, float]] = {}
        self.served_versions: set[int] = set()  # of any instance that was admitted

    def excused(self, name, event):
        """Whether this event is a reason to quarantine an instance."""
        live = self.machine.live
        if live is not None and is_in_place(live.source):
            return True
        told, when = self.told.get(name, (None, 0.0))
        if live is not None and told is not None and same(told, live):
            if isinstance(event, FromEngine) and isinstance(event.message, wire.WeightsLoaded):
                return (
                    event.instance == name and event.message.problem and event.message.version == live.version
                )
            if isinstance(event, Tick):
                return when + 5.0 < self.now
        return (live is None or not live.source) and isinstance(event, Joined)

    def handle(self, event):
        before, quarantined = self.machine.live, set(self.machine.quarantined)
        had = bool(self.admitted)
        ran_old = not self.idle
        items = self.machine.apply(event, self.now, idle=self.idle)
        in_place = [
            each.instance for each in items
            if isinstance(each, ToEngine) and is_in_place(getattr(each.message, "source", ""))
            and isinstance(each.message, wire.LoadWeights)
        ]  # fmt: skip
        assert in_place == [name for each in orders.pick(items, wire.WeightsLoading) for name in each.engines]
        for item in items:
            match item:
                case ToEngine(name, wire.PrepareWeights() as order):
                    self.orders[name].append(order)
                case ToEngine(name, wire.LoadWeights() as order):
                    self.orders[name].append(order)
                    assert same(order, self.machine.live)
                    assert name not in self.admitted
                    self.told[name] = weights_of(order), self.now
                case Admit():
                    self.admitted.add(item.instance)
                    self.served_versions.add(self.machine.live.version)
                case Expel():
                    self.admitted.remove(item.instance)
                case Hold() | Release():
                    assert self.held == isinstance(item, Release)
                    self.held = not self.held
                case Abort():
                    self.idle, ran_old = True, False
                case ToTrainer(trainer, wire.WeightsLive() | wire.WeightsFailed() as answer):
                    if self.open.get(trainer) == answer.call_id:
                        del self.open[trainer]
        self.check(event, before, ran_old, quarantined, had)

    def check(self, event, before, ran_old, quarantined, had):
        live = self.machine.live
        if before is not None and not same(live, before):
            failed_in_place = is_in_place(before.source) and before.version not in self.served_versions
            sent_again = before.version == live.version and not had  # nobody has that version any more
            assert live.version > before.version or failed_in_place or sent_again
            assert not ran_old
        assert self.admitted == set(self.machine.admitted)
        for name in self.admitted:
            assert (self.loaded[name].version, self.loaded[name].digest) == (live.version, live.digest)
        for name in self.machine.quarantined.keys() - quarantined:
            assert self.excused(name, event)
        assert self.machine.known == self.loaded.keys()
        assert self.held == self.machine.updating
        assert len(self.open) <= int(self.machine.updating)

    def step(self, what, name, number):
        if what == "register" and name not in self.loaded:
            version = number // 3 - 1  # below, at and above what is live
            source = f"/w{version}" if version else ""
            self.loaded[name], self.orders[name] = Weights(version, f"d{version}", source), []
            self.handle(orders.joined(name, weights=self.loaded[name]))
        elif what == "lose" and name in self.loaded:
            del self.loaded[name], self.orders[name]
            self.admitted.discard(name)
            self.handle(Left([name]))
        elif what == "ask":
            self.asked += 1
            mode = ("finish", "abort", "error")[number % 3]
            trainer = "t" if number % 2 else f"t{self.asked}"  # one asks again and again
            self.open[trainer] = self.asked
            # The same weights may be in two places; where a digest is named, both are one question.
            source, digest = (f"/w{number}", "") if name != "c" else (f"/elsewhere{number}", f"d{number}")
            self.handle(orders.update(trainer, number, source, digest, mode, self.asked))
        elif what == "ask in place":
            self.asked += 1
            self.open[f"t{self.asked}"] = self.asked
            source = f"inplace:spool:{self.asked}"
            self.handle(orders.update(f"t{self.asked}", number, source, source, call_id=self.asked))
        elif what == "answer" and self.orders.get(name):
            self.answer(name, self.orders[name].pop(0), failing=number == 0)
        elif what == "work":
            self.idle = self.held or not self.admitted or not self.idle
            self.handle(Tick())
        elif what == "tick":
            self.now += number / 4
            self.handle(Tick())

    def answer(self, name, order, failing):
        problem = "broken" if failing else ""
        if isinstance(order, wire.PrepareWeights):
            digest = order.source if is_in_place(order.source) else f"d{order.version}"
            self.handle(orders.prepared(name, order.version, digest, problem, order.call_id))
        elif isinstance(order, wire.LoadWeights):
            self.loaded[name] = None if failing else weights_of(order)
            self.handle(orders.loaded(name, order.version, problem, order.call_id))

    def settle(self):
        """Let every instance do all that it was told, with success."""
        self.idle = True
        self.handle(Tick())
        while any(self.orders.values()):
            for name in [name for name, waiting in self.orders.items() if waiting]:
                self.answer(name, self.orders[name].pop(0), failing=False)

    def served(self):
        return {(loaded.version, loaded.digest) for loaded in self.loaded.values()}


@settings(max_examples=500)
@given(STEPS)
@example(
    [  # c joins, and still loads version 1 when version 2 is committed
        ("register", "a", 3), ("ask", "a", 1), ("answer", "a", 1), ("answer", "a", 1), ("register", "c", 3),
        ("ask", "a", 2), ("answer", "a", 1), ("answer", "a", 1), ("answer", "c", 1),
    ]
)  # fmt: skip
@example(
    [("register", "a", 0), ("register", "b", 3), ("ask", "c", 0)]
)  # a loads what nobody can give any more
@example(
    [  # 5 in place fails on a and b, and 1 is loaded again
        ("register", "a", 3), ("register", "b", 3), ("ask", "a", 1), ("answer", "a", 1), ("answer", "b", 1),
        ("answer", "a", 1), ("answer", "b", 1), ("ask in place", "a", 5), ("answer", "a", 1), ("answer", "b", 1),
        ("answer", "a", 0), ("lose", "b", 0),
    ]
)  # fmt: skip
@example(
    [  # 5 in place is live on a; c joins later, then 6 in place fails, and 1 is loaded again
        ("register", "a", 3), ("ask", "a", 1), ("answer", "a", 1), ("answer", "a", 1),
        ("ask in place", "a", 5), ("answer", "a", 1), ("answer", "a", 1), ("register", "c", 3),
        ("ask in place", "a", 6), ("answer", "a", 1), ("answer", "c", 0), ("answer", "a", 0), ("ask", "a", 4),
    ]
)  # fmt: skip
@example(
    [  # 3 in place is live on a, which dies, and is sent again as a stream
        ("register", "a", 0), ("ask in place", "a", 3), ("answer", "a", 1), ("register", "b", 0),
        ("answer", "a", 1), ("lose", "a", 0), ("ask", "a", 3),
    ]
)  # fmt: skip
def test_only_live_weights_work_and_every_update_ends(steps):
    world = World()
    for step in steps:
        world.step(*step)
    world.settle()
    if world.machine.updating:  # nobody is there to check the weights
        assert not world.loaded
        world.now += 900.5
        world.settle()
    assert not world.machine.updating
    assert not world.machine.loading
    assert world.admitted | world.machine.quarantined.keys() == world.loaded.keys()
    live = world.machine.live
    if live is not None and is_in_place(live.source):  # what was loaded in place cannot be had again
        before = set(world.admitted)
        world.now += RETRY_SECONDS
        world.settle()
        assert world.admitted == before
    elif live is not None and live.source:  # what failed is tried again
        world.now += RETRY_SECONDS
        world.settle()
        assert world.admitted == world.loaded.keys()
        assert not world.machine.quarantined
    if world.admitted or not world.loaded or (live is not None and is_in_place(live.source)):
        world.step("ask", "a", 12)  # a later version heals whatever failed before
        if not world.loaded:  # it waits for an engine that comes
            assert world.machine.updating
            world.step("register", "a", 0)
        world.settle()
        assert world.admitted == world.loaded.keys()
        assert world.served() == {(12, "d12")}


@settings(max_examples=100)
@given(STEPS)
def test_no_update_outlives_its_deadlines(steps):
    world = World()
    for step in steps:
        world.step(*step)
    world.idle = True
    for _ in range(2):
        world.now += 100.0
        world.handle(Tick())
    assert not world.machine.updating
    assert world.machine.loading <= world.machine.quarantined.keys()  # they try again
