"""How far engines sleep, so that a trainer can use their memory: a pure machine.

A trainer that shares devices with engines puts them to sleep while it trains, and wakes them afterwards: all
at once, or the weights first, which are then loaded while the KV cache still sleeps.

Invariants (tests/property/test_sleep_machine.py):
- an engine is put to sleep only while no request is unfinished, and gets no order while it loads weights
  (`loading`);
- submissions are held from a request for sleep until every registered engine is awake, and at no other
  time;
- an engine is brought to the state that was last requested in single steps, each answered before the next;
- every request is answered by one `Slept`; an engine that does not answer by its deadline is removed, and a
  trainer gets the answer that engines are awake only if one is registered;
- until a first engine joins, a request waits for `GRACE_SECONDS`: engines of an earlier incarnation of the
  buffer register again within that time, and an answer before that would say nothing about them;
- an engine that joins is brought to the state that was last requested, in this incarnation of the buffer or
  an earlier one: every request that is taken is a wish with a number, greater than all before it. Engines
  report the last wish that they came to, trainers repeat the last one that was answered, and the greatest
  counts; but a request to this incarnation counts before all of earlier ones;
- sleep ends with the last of those who asked for it (`sleepers`), as if somebody asked for engines to wake;
- where no engine knows of a wish (on its way to its first one), a buffer that got no request takes over the
  state of its engines: as long as all of them sleep, the state of the engine that sleeps least.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec
from msgspec import field

from seer.common import wire
from seer.common.errors import InvalidField, SeerError
from seer.common.sleep import SleepLevel, SleepState, SleepTag, state_of
from seer.services.buffer.events import (
    Changed,
    Drained,
    FromEngine,
    FromTrainer,
    Joined,
    Left,
    Row,
    SleeperLost,
    Tick,
    ToEngine,
    ToTrainer,
)

NO_ENGINE = "no engine is there to wake: start one, and ask again"

LEASE_ENDED = "nobody of this name was there for buffer.trainer_lease_seconds: ask again"

MAX_SLEEPERS = 64
"""Bound on those who have engines sleep: of more, the last ones count."""

GRACE_SECONDS = 10.0
"""Twice the time after which an idle engine notices that its buffer was restarted."""

WISHES_END = 2**62
"""Greater ones are no buffer's, whose clock counts nanoseconds; beyond the wire's bound none could follow."""


class GiveUp(Row, frozen=True):
    """Remove an engine that did not answer in time."""

    instance: str


Event = Joined | Left | FromTrainer | SleeperLost | FromEngine | Drained | Tick | Changed
Instruction = ToEngine | ToTrainer | GiveUp


class SleepMachine(msgspec.Struct):
    """See the module's docstring. All of its state is in its fields, so it is its own snapshot.

    `seconds`: how long an engine may take to sleep or to wake. Wishes of this incarnation are numbered from
    `first_wish` on, which is greater in later incarnations.
    """

    seconds: float = 600.0
    wanted: SleepState = SleepState.AWAKE
    """What is to sleep as soon as it can: as last requested, or as engines of an earlier incarnation are."""
    _requested: bool = False
    """Whether a trainer has requested anything yet."""
    _requested_at: float = 0.0
    _any_joined: bool = False
    _states: dict[str, SleepState] = field(default_factory=dict)
    """By engine."""
    _ordered: dict[str, float] = field(default_factory=dict)
    """By engine that has not answered its order yet: the deadline."""
    _waiting: dict[str, int] = field(default_factory=dict)
    """By trainer that waits for an answer: its `call_id`."""
    _level: SleepLevel = 1
    """The level at which engines are put to sleep."""
    first_wish: int = 1
    _wish: int = 0
    """The number of what is wanted; 0: nobody has said."""
    sleepers: list[str] = field(default_factory=list)
    """Who has engines sleep, by share; empty text: a trainer that has not told this incarnation yet."""

    @property
    def held(self) -> bool:
        """Whether submissions are held."""
        return bool(self.wanted) or any(self._states.values()) or bool(self._ordered)

    @property
    def awake(self) -> frozenset[str]:
        """The engines that are awake and have no order to sleep."""
        return self._at_most(SleepState.AWAKE)

    @property
    def weights_awake(self) -> frozenset[str]:
        """The engines whose weights are awake, and that have no order: these can load."""
        return self._at_most(SleepState.KV_ASLEEP)

    def _at_most(self, most: SleepState) -> frozenset[str]:
        return frozenset(name for name, state in self._states.items() if state <= most) - self._ordered.keys()

    def apply(
        self, event: Event, now: float, *, idle: bool, loading: Collection[str] = ()
    ) -> list[Instruction]:
        """Apply one event at `now` (monotonic seconds).

        `idle`: no unfinished request is left. `loading`: the engines that load weights at present.
        """
        out: list[Instruction] = []
        match event:
            case Joined():
                self._joined(event)
                return self._informed(event)  # whether it has to load is known only at the next event
            case Left():
                for name in event.instances:
                    self._forget(name)
            case FromTrainer(trainer, wire.Sleep(wish=0) as request, share):
                self._sleep_requested(trainer, request, share or trainer, now, out)
            case FromTrainer(trainer, wire.Sleep() as again, share):
                self._said_again(again, share or trainer)
            case SleeperLost(share):
                self._sleeper_lost(share, out)
            case FromEngine(name, wire.Slept() as answer):
                state = state_of(asleep=answer.asleep, tags=answer.tags)
                if name in self._ordered and state != self._states[name]:
                    self._states[name] = state
                    del self._ordered[name]
            case Tick():
                for late in [name for name, deadline in self._ordered.items() if deadline < now]:
                    self._forget(late)
                    out.append(GiveUp(late))
        self._advance(now, idle, loading, out)
        return out

    def _joined(self, event: Joined) -> None:
        self._forget(event.instance)
        self._any_joined = True
        none_awake = all(self._states.values())
        register = event.register
        state = state_of(asleep=bool(register.sleeping), tags=register.sleeping)
        self._states[event.instance] = state
        level: SleepLevel = 2 if event.dropped else 1
        if register.wish:
            self._learn(register.wish, state, level)
        elif not (self._wish or self._requested) and none_awake and state:
            self._take_over(0, min(self._states.values()), level)

    def _informed(self, event: Joined) -> list[Instruction]:
        """Return what tells an engine that is awake, as is wanted, by which wish; it is not waited for."""
        awake = not (event.register.sleeping or self.wanted)
        if awake and event.register.wish < self._wish:
            return [ToEngine(event.instance, wire.Sleep(asleep=False, wish=self._wish))]
        return []

    def _learn(self, wish: int, state: SleepState, level: SleepLevel) -> None:
        """Follow a wish of an earlier incarnation, unless a later one is known.

        What this incarnation was asked is later, even if a clock set back gave it the smaller number.
        """
        if wish == self._wish and not self._requested:
            self._level = max(self._level, level)  # an engine that had no weights dropped none
        if not self._wish < wish < WISHES_END:
            return
        if self._requested:
            self._wish = wish + 1
        else:
            self._take_over(wish, state, level)

    def _take_over(self, wish: int, state: SleepState, level: SleepLevel) -> None:
        """Want what was wanted in an earlier incarnation."""
        self._wish, self.wanted, self._level = wish, state, level
        self.sleepers = [""] if state else []

    def _said_again(self, again: wire.Sleep, share: str) -> None:
        """Hear from a trainer what it has engines do since an earlier incarnation."""
        state = state_of(asleep=again.asleep, tags=again.tags)
        self._learn(again.wish, state, again.level)
        if self.wanted and state:
            self._sleeps(share)

    def _sleeps(self, share: str) -> None:
        others = [each for each in self.sleepers if each not in ("", share)]
        self.sleepers = [*others[1 - MAX_SLEEPERS :], share]

    def _sleeper_lost(self, share: str, out: list[Instruction]) -> None:
        """Have engines wake if nobody is left who has them sleep."""
        left = [each for each in self.sleepers if each != share]
        ended, self.sleepers = len(left) < len(self.sleepers), left
        if not ended or left or not self.wanted:
            return
        out += [_told(*who, SleepState.ASLEEP, LEASE_ENDED) for who in self._waiting.items()]
        self._waiting.clear()
        self._want(SleepState.AWAKE)

    def _want(self, target: SleepState) -> None:
        self.wanted, self._requested = target, True
        self._wish = max(self._wish + 1, self.first_wish)

    def _forget(self, instance: str) -> None:
        self._states.pop(instance, None)
        self._ordered.pop(instance, None)

    def _sleep_requested(
        self, trainer: str, request: wire.Sleep, share: str, now: float, out: list[Instruction]
    ) -> None:
        try:
            target = SleepState.ASLEEP if request.asleep else self.wanted.woken(request.tags)
            self._check(request, target)
        except SeerError as error:
            state = SleepState.ASLEEP if request.asleep else SleepState.AWAKE
            out.append(_told(trainer, request.call_id, state, str(error)))
            return
        if request.asleep and self.wanted is not SleepState.ASLEEP:
            self._level = request.level
        self._want(target)
        if request.asleep:
            self._sleeps(share)
        elif not target:
            self.sleepers = []
        if not self._waiting:
            self._requested_at = now
        self._waiting[trainer] = request.call_id

    def _check(self, request: wire.Sleep, target: SleepState) -> None:
        """Raise `SeerError` for a request that cannot be fulfilled now."""
        if self._waiting and target != self.wanted:
            doing = "puts engines to sleep" if self.wanted is SleepState.ASLEEP else "wakes engines"
            raise SeerError(f"{next(iter(self._waiting))} {doing}: wait for that")
        if request.level > self._level and request.asleep and self.wanted is SleepState.ASLEEP:
            fix = "engines sleep at level 1, and keep their weights: wake the weights first"
            raise InvalidField("level", request.level, fix)

    def _next_order(self, name: str) -> wire.Sleep | None:
        """Return the next step of an engine to the state that is wanted; None: it is there."""
        state, target = self._states[name], self.wanted
        if state == target:
            return None
        if state > target:
            tags: list[SleepTag] = ["weights"] if target is SleepState.KV_ASLEEP else []
            return wire.Sleep(asleep=False, tags=tags, wish=self._wish)
        # To have its KV alone asleep, all of it is put to sleep before its weights are woken.
        if target is SleepState.KV_ASLEEP:
            return wire.Sleep(asleep=True)
        return wire.Sleep(asleep=True, level=self._level, wish=self._wish)

    def _advance(self, now: float, idle: bool, loading: Collection[str], out: list[Instruction]) -> None:
        arrived = True
        for name in sorted(self._states):
            order = self._next_order(name)
            arrived = arrived and order is None
            if order is None or name in self._ordered or name in loading or (order.asleep and not idle):
                continue
            self._ordered[name] = now + self.seconds
            out.append(ToEngine(name, order))
        ready = self._any_joined or now > self._requested_at + GRACE_SECONDS
        if ready and arrived and not self._ordered:
            # An engine that left uses no memory, as if asleep; but it may register again, and still sleep.
            problem = "" if self.wanted is SleepState.ASLEEP or self._states else NO_ENGINE
            out += [
                _told(trainer, call_id, self.wanted, problem, self._wish)
                for trainer, call_id in self._waiting.items()
            ]
            self._waiting.clear()


def _told(trainer: str, call_id: int, state: SleepState, problem: str, wish: int = 0) -> ToTrainer:
    """Return a trainer's answer: what sleeps now; with a `problem`, its request had no effect."""
    asleep = state is SleepState.ASLEEP
    answer = wire.Slept(asleep=asleep, problem=problem, call_id=call_id, tags=state.tags, wish=wish)
    return ToTrainer(trainer, answer)
