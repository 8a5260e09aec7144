"""Which weights are live, and how all instances come to others: a pure machine.

An update has two phases. Prepare: every instance opens and checks the new weights beside the live
ones; any problem cancels it and all stay as they are. Commit, once no request of the old weights is
left: every instance loads. One that fails is quarantined, never rolled back, and tries again now and then:
what stood in its way, as a full disk, may be over.

Whenever other weights become live, every instance that is there is told: also one that is quarantined,
and one that still loads what was live before. What it says of those changes nothing any more.

Invariants (tests/unit/test_weights_machine.py and tests/property/test_weights_machine.py):
- an instance that may get work has loaded exactly the live version and digest, and is awake;
- an instance is told to load only while it is awake (`awake`; property: with the sleep machine,
  tests/property/test_weights_and_sleep.py);
- the live weights change only while nothing runs, and never back to a lower version;
- an update ends in exactly one of `Report` and `Fail`, and submissions are held from its start to
  its end and at no other time;
- nothing is waited for without a deadline.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec
from msgspec import field, structs

from seer.services.buffer.events import Drained, Joined, Left, Tick, Weights
from seer.services.buffer.weights.events import (
    Event,
    InFlight,
    Loaded,
    Prepared,
    UpdateAsked,
)
from seer.services.buffer.weights.instructions import (
    Abort,
    Admit,
    Discard,
    Expel,
    Fail,
    Hold,
    Instruction,
    Load,
    Prepare,
    Release,
    Report,
)

NEVER = 1e300
"""A deadline that does not pass; JSON, which the log is written in, has no infinity."""


class _Update(msgspec.Struct):
    asked: UpdateAsked
    number: int
    deadline: float
    awaited: set[str] = field(default_factory=set)
    told: set[str] = field(default_factory=set)
    digest: str = ""
    committing: bool = False


AGAIN_SECONDS = 30.0
"""How often instances that could not load the live weights try again."""

_SHUTTING_DOWN = "this buffer is shutting down: ask its successor"


class _Coming(msgspec.Struct):
    """An instance without work yet: what it has, as far as that is known, and what it was told to load.

    `source`, if given, is where it is to find the live weights, since it did not where they came from.
    """

    has: Weights | None = None
    told: Weights | None = None
    source: str = ""
    deadline: float = NEVER


class WeightsMachine(msgspec.Struct):
    """See the module's docstring. All of its state is in its fields: it is its own snapshot.

    `seconds` is the deadline of each phase and of each load.
    """

    seconds: float = 900.0
    live: Weights | None = None
    quarantined: dict[str, str] = field(default_factory=dict)
    """By instance: why it has no work. It keeps that while it tries again."""
    _again_at: float = 0.0
    _admitted: set[str] = field(default_factory=set)
    _coming: dict[str, _Coming] = field(default_factory=dict)
    _update: _Update | None = None
    _updates: int = 0
    _updated: bool = False
    _draining: bool = False

    @property
    def updating(self) -> bool:
        """Whether an update is under way."""
        return self._update is not None

    @property
    def sources(self) -> set[str]:
        """Where weights that are live, or will be, come from."""
        live = {self.live.source} if self.live else set()
        return live | {self._update.asked.source} if self._update else live

    @property
    def admitted(self) -> frozenset[str]:
        """The instances that may get work."""
        return frozenset(self._admitted)

    @property
    def loading(self) -> frozenset[str]:
        """The instances that load, or will as soon as they are awake."""
        return frozenset(name for name, coming in self._coming.items() if not self._is_live(coming.has))

    @property
    def known(self) -> set[str]:
        """The instances that are there, with or without work."""
        return self._admitted | self._coming.keys() | self.quarantined.keys()

    def __contains__(self, instance: object) -> bool:
        """Say whether an instance is there, with or without work."""
        return instance in self._admitted or instance in self._coming or instance in self.quarantined

    def apply(
        self, event: Event, now: float, *, idle: bool, awake: Collection[str] | None = None
    ) -> list[Instruction]:
        """Apply one event at `now` (monotonic seconds).

        `idle`: no unfinished request is left. `awake`: the instances that neither sleep nor are on their
        way there or back; None: all.
        """
        out: list[Instruction] = []
        match event:
            case Joined():
                self._joined(event, idle, out)
            case Left():
                for name in event.instances:
                    self._lost(name)
            case UpdateAsked():
                self._asked(event, now, idle, out)
            case Prepared():
                self._prepared(event, out)
            case Loaded():
                self._loaded(event, now)
            case Drained():
                self._draining = True
                if self._update is not None and not self._update.committing:
                    self._fail({"": _SHUTTING_DOWN}, out)
            case Tick():
                self._overdue(now, out)
                self._try_again(now, awake)
        self._bring(now, awake, out)
        if self._go_on(now, idle or Abort() in out, out):
            self._bring(now, awake, out)
        return out

    # --- instances -----------------------------------------------------------------------

    def _joined(self, event: Joined, idle: bool, out: list[Instruction]) -> None:
        name, theirs = event.instance, event.weights
        self._lost(name)
        if theirs.version < 0 and self.live is None:
            self.quarantined[name] = "failed to load weights; restart it, or update to a later version"
            return
        if self.live is None or (theirs.version > self.live.version and not self._updated):
            # A buffer that was restarted learns from the engines what is live. What began before it
            # knew has tokens of other weights.
            if self.live is not None and not idle:
                out.append(Abort())
            self._go_live(theirs, out)
            if self._update is not None and self._update.asked.version <= theirs.version:
                self._fail({"": f"must be above the live one: {name} has version {theirs.version}"}, out)
        self._coming[name] = _Coming(theirs)

    def _go_live(self, weights: Weights, out: list[Instruction]) -> None:
        """Have every instance that is there come to other weights."""
        self.live = weights
        for name in sorted(self._admitted):
            out.append(Expel(name))
            self._coming[name] = _Coming()
        for name in self.quarantined:
            self._coming[name] = _Coming()
        self._admitted.clear()
        self.quarantined.clear()

    def _bring(self, now: float, awake: Collection[str] | None, out: list[Instruction]) -> None:
        """Give work to instances that have the live weights, and tell the others to load them."""
        for name in sorted(self._coming):
            coming, live = self._coming[name], self._current()
            ready = awake is None or name in awake
            if self._is_live(coming.has):
                if ready:
                    self._admit(name, out)
            elif not (source := coming.source or live.source):
                why = f"has other weights than version {live.version} ({live.digest})"
                self._quarantine(name, f"{why}: start it with the same model", now)
            elif not self._is_live(coming.told) and ready:
                told = structs.replace(live, source=source)
                self._coming[name] = _Coming(told=told, deadline=now + self.seconds)
                out.append(Load(name, told))

    def _admit(self, name: str, out: list[Instruction]) -> None:
        del self._coming[name]
        self.quarantined.pop(name, None)
        self._admitted.add(name)
        out.append(Admit(name))
        update = self._update
        if update is not None and not update.committing and name not in update.told:
            self._prepare(update, name, out)

    def _quarantine(self, name: str, why: str, now: float) -> None:
        del self._coming[name]
        self.quarantined[name] = why
        self._again_at = now + AGAIN_SECONDS

    def _try_again(self, now: float, awake: Collection[str] | None) -> None:
        """Have instances load that could not; none is woken for that."""
        if now < self._again_at or self.live is None or not self.live.source:
            return
        for name in self.quarantined.keys() - self._coming.keys():
            if awake is None or name in awake:
                self._coming[name] = _Coming()

    def _lost(self, name: str) -> None:
        self._admitted.discard(name)
        self._coming.pop(name, None)
        self.quarantined.pop(name, None)
        if self._update is not None:
            self._update.awaited.discard(name)
            self._update.told.discard(name)

    def _loaded(self, event: Loaded, now: float) -> None:
        coming = self._coming.get(event.instance)
        if coming is None or coming.told is None or not self._is_live(coming.told):
            return
        if event.version != coming.told.version:
            return  # of what was live before: it was told of the live weights since
        if not event.problem:
            self.live = coming.told  # the same weights: they are where this one found them
            self._coming[event.instance] = _Coming(has=coming.told)
        elif (source := self._named_again()) not in ("", coming.told.source):
            self._coming[event.instance] = _Coming(source=source)
        else:
            self._quarantine(event.instance, event.problem, now)

    def _named_again(self) -> str:
        """Return where the trainer that waits says the live weights are; empty if none waits for them."""
        return self._update.asked.source if self._update is not None and self._update.committing else ""

    # --- updates -------------------------------------------------------------------------

    def _asked(self, event: UpdateAsked, now: float, idle: bool, out: list[Instruction]) -> None:
        busy, live = self._update, self.live
        if busy is not None:
            if structs.replace(busy.asked, call_id=event.call_id) == event:
                # Said again, as to a buffer that may have lost it, or by a later life of the trainer.
                busy.asked = event
                return
            if busy.asked.trainer == event.trainer and not busy.committing:
                self._fail({"": f"{event.trainer} asked for another update"}, out)
        if live is not None and not self.updating and self._admitted and _names(event, live):
            self._ask_again(event, live, out)
            return
        if problem := self._objection(event, idle):
            out.append(Fail(event.trainer, event.version, {"": problem}, event.call_id))
            return
        self._updates += 1
        self._update = update = _Update(event, self._updates, now + self.seconds, digest=event.digest)
        out.append(Hold())
        if event.in_flight is InFlight.ABORT and not idle:
            out.append(Abort())
        for name in self._able():
            self._prepare(update, name, out)

    def _ask_again(self, event: UpdateAsked, live: Weights, out: list[Instruction]) -> None:
        """Answer as after a lost answer, or to a trainer that was killed and came back.

        Instances that still load are waited for: a buffer that was restarted has a stream only as long as
        its trainer waits. Those that could not load try again, from the source named now.
        """
        if event.source:
            self._coming |= {name: _Coming(source=event.source) for name in self.quarantined}
            self.quarantined.clear()
        if not self._coming:
            out.append(Report(event.trainer, live, dict(self.quarantined), event.call_id))
            return
        self._updates += 1
        self._update = _Update(event, self._updates, NEVER, set(self._coming), committing=True)
        out.append(Hold())

    def _able(self) -> list[str]:
        """Return who checks new weights: those at work, or, where none is, those whose last load failed."""
        return sorted(self._admitted or self.quarantined)

    def _objection(self, event: UpdateAsked, idle: bool) -> str:
        """Say why an update cannot begin; empty when it can."""
        if self._update is not None:
            busy = self._update.asked
            return f"{busy.trainer} updates to version {busy.version}: wait for that"
        if self._draining:
            return _SHUTTING_DOWN
        if not self._able():
            return "no engine is there to take weights: start one"
        if not event.source:
            return "give a source"
        if self.live is not None and event.version < self.live.version + bool(self._admitted):
            return f"version {event.version} must be above the live one, {self.live.version}"
        if event.in_flight is InFlight.ERROR and not idle:
            return "requests are under way: wait for them, or say in_flight='finish' or 'abort'"
        return ""

    def _prepare(self, update: _Update, name: str, out: list[Instruction]) -> None:
        update.awaited.add(name)
        update.told.add(name)
        out.append(Prepare(name, update.asked.version, update.asked.source, update.number))

    def _prepared(self, event: Prepared, out: list[Instruction]) -> None:
        update = self._update
        if update is None or event.instance not in update.told:
            if event.instance in self and not event.problem:  # it registered anew, and kept what it was told
                out.append(Discard(event.instance, event.version, event.call_id))
            return
        if update.committing or event.instance not in update.awaited:
            return
        if event.version != update.asked.version or event.call_id not in (0, update.number):
            return  # of an update that is over: its weights may be others
        problem = event.problem
        if not problem and update.digest not in ("", event.digest):
            problem = f"reads weights with digest {event.digest}, not {update.digest}"
        if problem:
            self._fail({event.instance: problem}, out)
            return
        update.digest = event.digest
        update.awaited.discard(event.instance)

    def _fail(self, reasons: dict[str, str], out: list[Instruction]) -> None:
        """End an update that nobody loads yet."""
        update, self._update = self._update, None
        if update is not None:
            asked = update.asked
            out += [Discard(name, asked.version, update.number) for name in sorted(update.told)]
            out += [Release(), Fail(asked.trainer, asked.version, reasons, asked.call_id)]

    def _go_on(self, now: float, idle: bool, out: list[Instruction]) -> bool:
        """Enter the next phase of an update whose instances have all answered; say if that was to load."""
        update = self._update
        if update is None:
            return False
        if update.committing:
            update.awaited &= self._coming.keys()
        if update.awaited:
            return False
        if update.committing:
            self._update = None
            asked = update.asked
            out += [Release(), Report(asked.trainer, self._current(), dict(self.quarantined), asked.call_id)]
        elif not update.told:
            self._fail({"": "no engine is left"}, out)
        elif idle:
            self._updated = update.committing = True
            self._go_live(Weights(update.asked.version, update.digest, update.asked.source), out)
            update.awaited = set(self._coming)
            return True
        return False

    def _overdue(self, now: float, out: list[Instruction]) -> None:
        for name in [name for name, coming in self._coming.items() if coming.deadline < now]:
            why = f"did not load version {self._current().version} in {self.seconds:g} s"
            self._quarantine(name, why, now)
        update = self._update
        if update is not None and not update.committing and update.deadline < now:
            late = dict.fromkeys(sorted(update.awaited), f"did not answer in {self.seconds:g} s")
            self._fail(late or {"": f"requests of the old version went on for {self.seconds:g} s"}, out)

    def _is_live(self, weights: Weights | None) -> bool:
        live = self.live
        if weights is None or live is None:
            return False
        return (weights.version, weights.digest) == (live.version, live.digest)

    def _current(self) -> Weights:
        if self.live is None:
            raise RuntimeError("no weights are live before an engine registered")
        return self.live


def _names(event: UpdateAsked, live: Weights) -> bool:
    """Say whether what is asked for is what is live."""
    same = event.digest == live.digest if event.digest else event.source == live.source
    return event.version == live.version and same
