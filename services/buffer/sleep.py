"""Whether engines hold memory for KV: a pure machine.

A trainer that shares devices with engines has them sleep while it trains, and wakes them afterwards.

Invariants (tests/property/test_sleep_machine.py):
- an engine is told to sleep only while no request is unfinished;
- submissions are held exactly from the question for sleep until every engine that is there is awake;
- every question ends in one `Tell`; an engine that does not answer by its deadline is given up;
- an engine that joins is brought to what was last asked for; a buffer that nobody has asked yet
  learns it from the engines, as long as all of them sleep.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Joined:
    """An engine is there, in a new life or to a new buffer."""

    instance: str
    asleep: bool


@dataclass(frozen=True, slots=True)
class Lost:
    """An engine is gone."""

    instance: str


@dataclass(frozen=True, slots=True)
class Asked:
    """A trainer wants all engines asleep, or awake."""

    trainer: str
    asleep: bool


@dataclass(frozen=True, slots=True)
class Answered:
    """An engine sleeps, or is awake."""

    instance: str
    asleep: bool


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed, or the last running request ended."""


Event = Joined | Lost | Asked | Answered | Tick


@dataclass(frozen=True, slots=True)
class Order:
    """Have an engine sleep, or wake."""

    instance: str
    asleep: bool


@dataclass(frozen=True, slots=True)
class GiveUp:
    """An engine did not answer."""

    instance: str


@dataclass(frozen=True, slots=True)
class Tell:
    """Answer a trainer; with a `problem` nothing was done."""

    trainer: str
    asleep: bool
    problem: str = ""


Instruction = Order | GiveUp | Tell


@dataclass(slots=True)
class SleepMachine:
    """See the module's docstring. `seconds`: how long an engine may take."""

    seconds: float = 600.0
    _wanted: bool = False
    _decided: bool = False
    _asleep: dict[str, bool] = field(default_factory=dict)
    _ordered: dict[str, float] = field(default_factory=dict)
    _waiting: list[str] = field(default_factory=list)

    @property
    def held(self) -> bool:
        """Whether submissions have to wait."""
        return self._wanted or any(self._asleep.values()) or bool(self._ordered)

    def handle(self, event: Event, now: float, *, idle: bool) -> list[Instruction]:
        """Apply one event at `now` (monotonic seconds); `idle`: no unfinished request is left."""
        out: list[Instruction] = []
        match event:
            case Joined():
                self._forget(event.instance)
                learnt = not self._decided and all(self._asleep.values())
                self._asleep[event.instance] = event.asleep
                self._wanted = self._wanted or (event.asleep and learnt)
            case Lost():
                self._forget(event.instance)
            case Asked():
                self._asked(event, out)
            case Answered():
                if event.instance in self._asleep:
                    self._asleep[event.instance] = event.asleep
                    self._ordered.pop(event.instance, None)
            case Tick():
                for late in [name for name, deadline in self._ordered.items() if deadline < now]:
                    self._forget(late)
                    out.append(GiveUp(late))
        self._go_on(now, idle, out)
        return out

    def _forget(self, instance: str) -> None:
        self._asleep.pop(instance, None)
        self._ordered.pop(instance, None)

    def _asked(self, event: Asked, out: list[Instruction]) -> None:
        if self._waiting and event.asleep != self._wanted:
            doing = "puts engines to sleep" if self._wanted else "wakes engines"
            problem = f"{self._waiting[0]} {doing}: wait for that"
            out.append(Tell(event.trainer, event.asleep, problem))
            return
        self._wanted, self._decided = event.asleep, True
        if event.trainer not in self._waiting:
            self._waiting.append(event.trainer)

    def _go_on(self, now: float, idle: bool, out: list[Instruction]) -> None:
        wrong = [name for name, asleep in self._asleep.items() if asleep != self._wanted]
        if idle or not self._wanted:
            for name in sorted(set(wrong) - self._ordered.keys()):
                self._ordered[name] = now + self.seconds
                out.append(Order(name, self._wanted))
        if not wrong and not self._ordered:
            out += [Tell(trainer, self._wanted) for trainer in self._waiting]
            self._waiting.clear()
