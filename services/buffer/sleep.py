"""Whether engines sleep, so that they hold no memory for KV: a pure machine.

A trainer that shares devices with engines puts them to sleep while it trains, and wakes them afterwards.

Invariants (tests/property/test_sleep_machine.py):
- an engine is put to sleep only while no request is unfinished, and never while it loads weights or has to
  (`loading`): it is woken for that, and put to sleep again afterwards;
- submissions are held from a request for sleep until every registered engine is awake, and at no other time;
- every request is answered by one `Tell`; an engine that does not answer by its deadline is removed, and a
  trainer gets the answer that engines are awake only if one is registered;
- until a first engine joins, a request waits for `GRACE_SECONDS`: engines of an earlier life of the buffer
  register again within that time, and an answer before that would say nothing about them;
- an engine that joins is brought to the state that was last requested. A buffer that got no request yet takes
  over the state of its engines: sleep, as long as all of them sleep.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec
from msgspec import field

from seer.services.buffer import events
from seer.services.buffer.events import Drained, Joined, Left, Tick

NO_ENGINE = "no engine is there to wake: start one, and ask again"

GRACE_SECONDS = 10.0
"""Twice the time after which an idle engine notices that its buffer was restarted."""


class SleepAsked(events.Row, frozen=True):
    """A trainer requests that all engines sleep, or wake. The answer repeats `call_id`."""

    trainer: str
    asleep: bool
    call_id: int = 0


class SleepAnswered(events.Row, frozen=True):
    """An engine answered an `Order`: it sleeps, or is awake."""

    instance: str
    asleep: bool


Event = Joined | Left | SleepAsked | SleepAnswered | Drained | Tick


class Order(events.Row, frozen=True):
    """Put an engine to sleep, or wake it."""

    instance: str
    asleep: bool


class GiveUp(events.Row, frozen=True):
    """Remove an engine that did not answer in time."""

    instance: str


class Tell(events.Row, frozen=True):
    """Answer a trainer; with a `problem`, its request had no effect."""

    trainer: str
    asleep: bool
    problem: str = ""
    call_id: int = 0


Instruction = Order | GiveUp | Tell


class SleepMachine(msgspec.Struct):
    """See the module's docstring. All of its state is in its fields, so it is its own snapshot.

    `seconds`: how long an engine may take to sleep or to wake.
    """

    seconds: float = 600.0
    _wanted: bool = False
    """Whether engines are to sleep: as last requested, or as the engines of an earlier life do."""
    # Fields are encoded under the names that they have in earlier logs.
    _requested: bool = field(default=False, name="_decided")
    """Whether a trainer has requested anything yet."""
    _requested_at: float = field(default=0.0, name="_asked_at")
    _any_joined: bool = field(default=False, name="_met")
    _asleep: dict[str, bool] = field(default_factory=dict)
    """By engine."""
    _ordered: dict[str, float] = field(default_factory=dict)
    """By engine that has not answered its `Order` yet: the deadline."""
    _waiting: dict[str, int] = field(default_factory=dict)
    """By trainer that waits for an answer: its `call_id`."""

    @property
    def wanted(self) -> bool:
        """Whether engines are to sleep as soon as they can."""
        return self._wanted

    @property
    def held(self) -> bool:
        """Whether submissions are held."""
        return self._wanted or any(self._asleep.values()) or bool(self._ordered)

    @property
    def awake(self) -> frozenset[str]:
        """The engines that are awake and have no `Order` to sleep."""
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
                self._any_joined = True
                taken_over = not self._requested and all(self._asleep.values())
                self._asleep[event.instance] = event.asleep
                self._wanted = self._wanted or (event.asleep and taken_over)
                return out  # whether it has to load is known only at the next event
            case Left():
                for name in event.instances:
                    self._forget(name)
            case SleepAsked():
                self._sleep_requested(event, now, out)
            case SleepAnswered(name, asleep):
                if name in self._ordered and asleep != self._asleep[name]:
                    self._asleep[name] = asleep
                    del self._ordered[name]
            case Tick():
                for late in [name for name, deadline in self._ordered.items() if deadline < now]:
                    self._forget(late)
                    out.append(GiveUp(late))
        self._advance(now, idle, loading, out)
        return out

    def _forget(self, instance: str) -> None:
        self._asleep.pop(instance, None)
        self._ordered.pop(instance, None)

    def _sleep_requested(self, event: SleepAsked, now: float, out: list[Instruction]) -> None:
        if self._waiting and event.asleep != self._wanted:
            doing = "puts engines to sleep" if self._wanted else "wakes engines"
            problem = f"{next(iter(self._waiting))} {doing}: wait for that"
            out.append(Tell(event.trainer, event.asleep, problem, event.call_id))
            return
        self._wanted, self._requested = event.asleep, True
        if not self._waiting:
            self._requested_at = now
        self._waiting[event.trainer] = event.call_id

    def _advance(self, now: float, idle: bool, loading: Collection[str], out: list[Instruction]) -> None:
        for name, asleep in sorted(self._asleep.items()):
            target = self._wanted and name not in loading
            if asleep != target and name not in self._ordered and (idle or not target):
                self._ordered[name] = now + self.seconds
                out.append(Order(name, target))
        ready = self._any_joined or now > self._requested_at + GRACE_SECONDS
        if ready and not self._ordered and all(asleep == self._wanted for asleep in self._asleep.values()):
            # An engine that left uses no memory, as if asleep; but it may register again, and still sleep.
            problem = "" if self._wanted or self._asleep else NO_ENGINE
            out += [
                Tell(trainer, self._wanted, problem, call_id) for trainer, call_id in self._waiting.items()
            ]
            self._waiting.clear()
