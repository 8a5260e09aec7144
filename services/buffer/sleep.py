"""How far engines sleep, so that a trainer can use their memory: a pure machine.

A trainer that shares devices with engines puts them to sleep while it trains, and wakes them afterwards: all
at once, or the weights first, which are then loaded while the KV cache still sleeps.

Invariants (tests/property/test_sleep_machine.py):
- an engine is put to sleep only while no request is unfinished, and gets no order while it loads weights
  (`loading`);
- submissions are held from a request for sleep until every registered engine is awake, and at no other
  time;
- an engine is brought to the state that was last requested in single steps, each answered before the next;
- every request is answered by one `Tell`; an engine that does not answer by its deadline is removed, and a
  trainer gets the answer that engines are awake only if one is registered;
- until a first engine joins, a request waits for `GRACE_SECONDS`: engines of an earlier life of the buffer
  register again within that time, and an answer before that would say nothing about them;
- an engine that joins is brought to the state that was last requested, in this life of the buffer or an
  earlier one: every request that is taken is a wish with a number, greater than all before it. Engines report
  the last wish that they came to, trainers repeat the last one that was answered, and the greatest counts;
  but a request to this life counts before all of earlier ones;
- where no engine knows of a wish (earlier releases), a buffer that got no request takes over the state of its
  engines: as long as all of them sleep, that of the one that sleeps least;
- an engine of an earlier release, which knows neither levels nor tags, sleeps at level 1, and is awake as
  soon as the weights are to be; a request that it cannot fulfil is refused by its name.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec
from msgspec import field

from seer.common.errors import InvalidField, SeerError
from seer.common.sleep import SleepLevel, SleepState, SleepTag, state_of
from seer.services.buffer import events
from seer.services.buffer.events import Drained, Joined, Left, Tick

NO_ENGINE = "no engine is there to wake: start one, and ask again"

GRACE_SECONDS = 10.0
"""Twice the time after which an idle engine notices that its buffer was restarted."""

WISHES_END = 2**62
"""Greater ones are no buffer's, whose clock counts nanoseconds; beyond the wire's bound none could follow."""


class SleepAsked(events.Row, frozen=True):
    """A trainer requests that all engines sleep at a `level`, or that `tags` wake (empty: all).

    The answer repeats `call_id`. With a `wish` it repeats one that an earlier life of the buffer answered, of
    which `tags` still sleep, and gets no answer.
    """

    trainer: str
    asleep: bool
    call_id: int = 0
    level: SleepLevel = 1
    tags: tuple[SleepTag, ...] = ()
    wish: int = 0


class SleepAnswered(events.Row, frozen=True):
    """An engine answered an `Order`: what sleeps now, see `state_of`; it may have `dropped` its weights."""

    instance: str
    asleep: bool
    tags: tuple[SleepTag, ...] = ()
    dropped: bool = False


Event = Joined | Left | SleepAsked | SleepAnswered | Drained | Tick


class Order(events.Row, frozen=True):
    """Put an engine to sleep at a `level`, or wake `tags` of it (empty: all that sleeps).

    `wish`: the one that it comes to by this; 0: more steps follow.
    """

    instance: str
    asleep: bool
    level: SleepLevel = 1
    tags: tuple[SleepTag, ...] = ()
    wish: int = 0


class GiveUp(events.Row, frozen=True):
    """Remove an engine that did not answer in time."""

    instance: str


class Tell(events.Row, frozen=True):
    """Answer a trainer; with a `problem`, its request had no effect. `kv_asleep`: that alone sleeps on.

    `wish`: the number under which the trainer may repeat the request in another life of the buffer.
    """

    trainer: str
    asleep: bool
    problem: str = ""
    call_id: int = 0
    kv_asleep: bool = False
    wish: int = 0


Instruction = Order | GiveUp | Tell


class SleepMachine(msgspec.Struct):
    """See the module's docstring. All of its state is in its fields, so it is its own snapshot.

    `seconds`: how long an engine may take to sleep or to wake. Wishes of this life are numbered from
    `first_wish` on, which is greater in later lives.
    """

    seconds: float = 600.0
    # Fields are encoded under the names that they have in earlier logs, and take those logs' bools.
    _wanted: SleepState | bool = SleepState.AWAKE
    """What is to sleep: as last requested, or as it is with the engines of an earlier life."""
    _requested: bool = field(default=False, name="_decided")
    """Whether a trainer has requested anything yet."""
    _requested_at: float = field(default=0.0, name="_asked_at")
    _any_joined: bool = field(default=False, name="_met")
    _states: dict[str, SleepState | bool] = field(default_factory=dict, name="_asleep")
    """By engine."""
    _ordered: dict[str, float] = field(default_factory=dict)
    """By engine that has not answered its `Order` yet: the deadline."""
    _waiting: dict[str, int] = field(default_factory=dict)
    """By trainer that waits for an answer: its `call_id`."""
    _level: SleepLevel = 1
    """The level at which engines are put to sleep."""
    _earlier: set[str] = field(default_factory=set)
    """The engines of earlier releases."""
    first_wish: int = 1
    _wish: int = 0
    """The number of what is wanted; 0: nobody has said."""

    def __post_init__(self) -> None:
        self._wanted = _of_log(self._wanted)
        self._states = {name: _of_log(state) for name, state in self._states.items()}

    @property
    def wanted(self) -> SleepState:
        """What is to sleep as soon as it can."""
        return SleepState(self._wanted)

    @property
    def held(self) -> bool:
        """Whether submissions are held."""
        return bool(self._wanted) or any(self._states.values()) or bool(self._ordered)

    @property
    def awake(self) -> frozenset[str]:
        """The engines that are awake and have no `Order` to sleep."""
        return self._at_most(SleepState.AWAKE)

    @property
    def weights_awake(self) -> frozenset[str]:
        """The engines whose weights are awake, and that have no `Order`: these can load."""
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
            case SleepAsked(wish=0):
                self._sleep_requested(event, now, out)
            case SleepAsked(wish=wish):
                self._learn(wish, state_of(asleep=event.asleep, tags=event.tags), event.level)
            case SleepAnswered(name, asleep, tags):
                state = state_of(asleep=asleep, tags=tags)
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
        state = state_of(asleep=event.asleep, tags=event.sleeping)
        self._states[event.instance] = state
        if not event.sleep_levels:
            self._earlier.add(event.instance)
        level: SleepLevel = 2 if event.dropped else 1
        if event.wish:
            self._learn(event.wish, state, level)
        elif not (self._wish or self._requested) and none_awake and state:
            self._take_over(0, SleepState(min(self._states.values())), level)

    def _informed(self, event: Joined) -> list[Instruction]:
        """Return what tells an engine that is awake, as is wanted, by which wish; it is not waited for."""
        awake = not (event.asleep or self._wanted)
        if awake and event.sleep_levels and event.wish < self._wish:
            return [Order(event.instance, False, wish=self._wish)]
        return []

    def _learn(self, wish: int, state: SleepState, level: SleepLevel) -> None:
        """Follow a wish of an earlier life, unless a later one is known.

        What this life was asked is later, even if a clock that was set back gave it the smaller number.
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
        """Want what was wanted in an earlier life."""
        self._wish, self._wanted, self._level = wish, state, level

    def _forget(self, instance: str) -> None:
        self._states.pop(instance, None)
        self._ordered.pop(instance, None)
        self._earlier.discard(instance)

    def _sleep_requested(self, event: SleepAsked, now: float, out: list[Instruction]) -> None:
        try:
            target = SleepState.ASLEEP if event.asleep else self.wanted.woken(event.tags)
            self._check(event, target)
        except SeerError as error:
            out.append(Tell(event.trainer, event.asleep, str(error), event.call_id))
            return
        if event.asleep and self._wanted is not SleepState.ASLEEP:
            self._level = event.level
        self._wanted, self._requested = target, True
        self._wish = max(self._wish + 1, self.first_wish)
        if not self._waiting:
            self._requested_at = now
        self._waiting[event.trainer] = event.call_id

    def _check(self, event: SleepAsked, target: SleepState) -> None:
        """Raise `SeerError` for a request that cannot be fulfilled now."""
        if self._waiting and target != self._wanted:
            doing = "puts engines to sleep" if self._wanted is SleepState.ASLEEP else "wakes engines"
            raise SeerError(f"{next(iter(self._waiting))} {doing}: wait for that")
        if event.level > self._level and event.asleep and self._wanted is SleepState.ASLEEP:
            fix = "engines sleep at level 1, and keep their weights: wake the weights first"
            raise InvalidField("level", event.level, fix)
        if self._earlier and ((event.asleep and event.level > 1) or target is SleepState.KV_ASLEEP):
            name, value = ("level", event.level) if event.asleep else ("tags", list(event.tags))
            fix = f"engine {min(self._earlier)} is of an earlier release, and knows level 1 and no tags"
            raise InvalidField(name, value, fix)

    def _next_order(self, name: str) -> Order | None:
        """Return the next step of an engine to the state that is wanted; None: it is there."""
        state, target = self._states[name], self._target(name)
        if state == target:
            return None
        if state > target:
            only_weights = target is SleepState.KV_ASLEEP
            return Order(name, False, tags=("weights",) if only_weights else (), wish=self._wish)
        # To have its KV alone asleep, all of it is put to sleep before its weights are woken.
        if target is SleepState.KV_ASLEEP:
            return Order(name, True)
        return Order(name, True, 1 if name in self._earlier else self._level, wish=self._wish)

    def _target(self, name: str) -> SleepState:
        if self._wanted is SleepState.KV_ASLEEP and name in self._earlier:
            return SleepState.AWAKE
        return self.wanted

    def _advance(self, now: float, idle: bool, loading: Collection[str], out: list[Instruction]) -> None:
        arrived = True
        for name in sorted(self._states):
            order = self._next_order(name)
            arrived = arrived and order is None
            if order is None or name in self._ordered or name in loading or (order.asleep and not idle):
                continue
            self._ordered[name] = now + self.seconds
            out.append(order)
        ready = self._any_joined or now > self._requested_at + GRACE_SECONDS
        if ready and arrived and not self._ordered:
            asleep = self._wanted is SleepState.ASLEEP
            # An engine that left uses no memory, as if asleep; but it may register again, and still sleep.
            problem = "" if asleep or self._states else NO_ENGINE
            kv_asleep = self._wanted is SleepState.KV_ASLEEP
            out += [
                Tell(trainer, asleep, problem, call_id, kv_asleep, self._wish)
                for trainer, call_id in self._waiting.items()
            ]
            self._waiting.clear()


def _of_log(state: SleepState | bool) -> SleepState:
    """Return a state as logs of this release or of earlier ones have it."""
    return state_of(asleep=state) if isinstance(state, bool) else state
