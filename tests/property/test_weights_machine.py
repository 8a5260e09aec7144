"""The weights machine's invariants under any order of events, with instances that keep their own books."""

from hypothesis import given, settings
from hypothesis import strategies as st

from seer.services.buffer import weights as w

NAMES = ("a", "b", "c")
STEPS = st.lists(
    st.tuples(
        st.sampled_from(("register", "lose", "ask", "answer", "tick", "work")),
        st.sampled_from(NAMES),
        st.integers(0, 9),
    ),
    max_size=60,
)


class World:
    def __init__(self):
        self.machine = w.WeightsMachine(seconds=5.0)
        self.now = 0.0
        self.loaded: dict[str, w.Weights | None] = {}
        self.orders: dict[str, list] = {}
        self.admitted: set[str] = set()
        self.held = False
        self.idle = True
        self.asked = self.ended = 0

    def handle(self, event):
        before = self.machine.live
        ran_old = not self.idle
        for item in self.machine.handle(event, self.now, idle=self.idle):
            match item:
                case w.Prepare() | w.Load():
                    self.orders[item.instance].append(item)
                    if isinstance(item, w.Load):
                        self.loaded[item.instance] = None
                        assert item.instance not in self.admitted
                case w.Admit():
                    self.admitted.add(item.instance)
                case w.Expel():
                    self.admitted.remove(item.instance)
                case w.Hold() | w.Release():
                    assert self.held == isinstance(item, w.Release)
                    self.held = not self.held
                case w.Abort():
                    self.idle, ran_old = True, False
                case w.Report() | w.Fail():
                    self.ended += 1
        live = self.machine.live
        if before is not None and live != before:
            assert live.version > before.version
            assert not ran_old
        assert self.admitted == set(self.machine.admitted)
        for name in self.admitted:
            assert (self.loaded[name].version, self.loaded[name].digest) == (live.version, live.digest)
        assert self.held == self.machine.updating
        assert self.asked - self.ended == int(self.machine.updating)

    def step(self, what, name, number):
        if what == "register" and name not in self.loaded:
            self.loaded[name], self.orders[name] = (
                w.Weights(number // 8, f"d{number // 8}", f"/w{number // 8}"),
                [],
            )
            self.handle(w.Registered(name, self.loaded[name]))
        elif what == "lose" and name in self.loaded:
            del self.loaded[name], self.orders[name]
            self.admitted.discard(name)
            self.handle(w.Lost(name))
        elif what == "ask":
            self.asked += 1
            mode = list(w.InFlight)[number % 3]
            self.handle(w.UpdateAsked(f"t{self.asked}", number, f"/w{number}", in_flight=mode))
        elif what == "answer" and self.orders.get(name):
            self.answer(name, self.orders[name].pop(0), failing=number == 0)
        elif what == "work":
            self.idle = self.held or not self.admitted or not self.idle
            self.handle(w.Tick())
        elif what == "tick":
            self.now += number / 4
            self.handle(w.Tick())

    def answer(self, name, order, failing):
        problem = "broken" if failing else ""
        if isinstance(order, w.Prepare):
            self.handle(w.Prepared(name, order.version, f"d{order.version}", problem))
        elif isinstance(order, w.Load):
            self.loaded[name] = None if failing else order.weights
            self.handle(w.Loaded(name, order.weights.version, problem))


@settings(max_examples=500)
@given(STEPS)
def test_only_live_weights_work_and_every_update_ends(steps):
    world = World()
    for step in steps:
        world.step(*step)
    world.idle = True
    world.now += 100.0
    world.handle(w.Tick())
    world.now += 100.0
    world.handle(w.Tick())
    assert not world.machine.updating
