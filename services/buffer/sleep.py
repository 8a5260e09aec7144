"""Whether engines hold memory for KV: a pure machine.

A trainer that shares devices with engines has them sleep while it trains, and wakes them afterwards.

Invariants (tests/property/test_sleep_machine.py):
- an engine is told to sleep only while no request is unfinished, and never while it loads weights, or
  has to (`loading`): it is woken for that, and put to sleep again afterwards;
- submissions are held exactly from the question for sleep until every engine that is there is awake;
- every question ends in one `Tell`; an engine that does not answer by its deadline is given up, and a
  trainer is told that engines are awake only if one is there;
- until a first engine joins, a question waits for `GRACE_SECONDS`: those that an earlier life of the buffer
  had come back within that, and an answer that reached none of them would be lost with the next life;
- an engine that joins is brought to what was last asked for; a buffer that nobody has asked yet
  learns it from the engines, as long as all of them sleep.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec
from msgspec import field

from seer.services.buffer import events
from seer.services.buffer.events import Drained, Joined, Left, Tick

NOBODY = "no engine is there to wake: start one, and ask again"

GRACE_SECONDS = 10.0
"""Twice as long as an idle engine takes to notice that its buffer is another one."""


class SleepAsked(events.Row, frozen=True):
    """A trainer wants all engines asleep, or awake. `call_id`: its own number for the answer."""

    trainer: str
    asleep: bool
    call_id: int = 0


class SleepAnswered(events.Row, frozen=True):
    """An engine did as it was told: it sleeps, or is awake."""

    instance: str
    asleep: bool


Event = Joined | Left | SleepAsked | SleepAnswered | Drained | Tick


class Order(events.Row, frozen=True):
    """Have an engine sleep, or wake."""

    instance: str
    asleep: bool


class GiveUp(events.Row, frozen=True):
    """An engine did not answer."""

    instance: str


class Tell(events.Row, frozen=True):
    """Answer a trainer; with a `problem` nothing was done."""

    trainer: str
    asleep: bool
    problem: str = ""
    call_id: int = 0


Instruction = Order | GiveUp | Tell


class SleepMachine(msgspec.Struct):
    """See the module's docstring. All of its state is in its fields: it is its own snapshot.

    `seconds`: how long an engine may take.
    """

    seconds: float = 600.0
    _wanted: bool = False
    _decided: bool = False
    _asked_at: float = 0.0
    _met: bool = False
    _asleep: dict[str, bool] = field(default_factory=dict)
    _ordered: dict[str, float] = field(default_factory=dict)
    _waiting: dict[str, int] = field(default_factory=dict)

    @property
    def wanted(self) -> bool:
        """Whether engines sleep as soon as they can."""
        return self._wanted

    @property
    def held(self) -> bool:
        """Whether submissions have to wait."""
        return self._wanted or any(self._asleep.values()) or bool(self._ordered)

    @property
    def awake(self) -> frozenset[str]:
        """The engines that are awake and were not told to sleep."""
        return frozenset(name for name, asleep in self._asleep.items() if not asleep) - self._ordered.keys()

    def apply(
        self, event: Event, now: float, *, idle: bool, loading: Collection[str] = ()
    ) -> list[Instruction]:
        """Apply one event at `now` (monotonic seconds).

        `idle`: no unfinished request is left. `loading`: the engines that load weights, or have to.
        """
        out: list[Instruction] = []
        match event:
            case Joined():
                self._forget(event.instance)
                self._met = True
                learnt = not self._decided and all(self._asleep.values())
                self._asleep[event.instance] = event.asleep
                self._wanted = self._wanted or (event.asleep and learnt)
                return out  # whether it has to load is known when its weights are: see the next event
            case Left():
                for name in event.instances:
                    self._forget(name)
            case SleepAsked():
                self._asked(event, now, out)
            case SleepAnswered(name, asleep):
                if name in self._ordered and asleep != self._asleep[name]:
                    self._asleep[name] = asleep
                    del self._ordered[name]
            case Tick():
                for late in [name for name, deadline in self._ordered.items() if deadline < now]:
                    self._forget(late)
                    out.append(GiveUp(late))
        self._go_on(now, idle, loading, out)
        return out

    def _forget(self, instance: str) -> None:
        self._asleep.pop(instance, None)
        self._ordered.pop(instance, None)

    def _asked(self, event: SleepAsked, now: float, out: list[Instruction]) -> None:
        if self._waiting and event.asleep != self._wanted:
            doing = "puts engines to sleep" if self._wanted else "wakes engines"
            problem = f"{next(iter(self._waiting))} {doing}: wait for that"
            out.append(Tell(event.trainer, event.asleep, problem, event.call_id))
            return
        self._wanted, self._decided = event.asleep, True
        if not self._waiting:
            self._asked_at = now
        self._waiting[event.trainer] = event.call_id

    def _go_on(self, now: float, idle: bool, loading: Collection[str], out: list[Instruction]) -> None:
        for name, asleep in sorted(self._asleep.items()):
            target = self._wanted and name not in loading
            if asleep != target and name not in self._ordered and (idle or not target):
                self._ordered[name] = now + self.seconds
                out.append(Order(name, target))
        there = self._met or now > self._asked_at + GRACE_SECONDS
        if there and not self._ordered and all(asleep == self._wanted for asleep in self._asleep.values()):
            # Who is gone is as good as asleep, but not awake: it may be back, asleep, after this buffer.
            problem = "" if self._wanted or self._asleep else NOBODY
            out += [
                Tell(trainer, self._wanted, problem, call_id) for trainer, call_id in self._waiting.items()
            ]
            self._waiting.clear()
