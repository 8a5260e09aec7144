"""Which weights are live, and how all instances come to others: a pure machine.

An update has two phases. Prepare: every instance opens and checks the new weights beside the live
ones; any problem cancels it and all stay as they are. Commit, once no request of the old weights is
left: every instance loads. One that fails is quarantined, never rolled back.

Invariants (tests/unit/test_weights_machine.py and tests/property/test_weights_machine.py):
- an instance that may get work has loaded exactly the live version and digest;
- the live weights change only while nothing runs, and never back to a lower version;
- an update ends in exactly one of `Report` and `Fail`, and submissions are held from its start to
  its end and at no other time;
- nothing is waited for without a deadline.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


@dataclass(frozen=True, slots=True)
class Weights:
    """`source`: a folder that every node sees, or a stream; empty: where the engine's configuration points.

    A negative `version` is an instance whose last load failed.
    """

    version: int
    digest: str
    source: str = ""


class InFlight(Enum):
    """What becomes of unfinished requests when an update is asked for."""

    FINISH = "finish"
    ABORT = "abort"
    ERROR = "error"


# --- events ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Registered:
    """An instance is there, in a new life, with these weights loaded."""

    instance: str
    weights: Weights


@dataclass(frozen=True, slots=True)
class Lost:
    """An instance is gone."""

    instance: str


@dataclass(frozen=True, slots=True)
class UpdateAsked:
    """A trainer wants a version; `digest` is checked if it is given."""

    trainer: str
    version: int
    source: str
    digest: str = ""
    in_flight: InFlight = InFlight.FINISH


@dataclass(frozen=True, slots=True)
class Prepared:
    """An instance checked weights beside its live ones; `problem` is empty when it can load them."""

    instance: str
    version: int
    digest: str
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Loaded:
    """An instance loaded weights; with a `problem` it has none that can be trusted."""

    instance: str
    version: int
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed, or the last running request ended."""


Event = Registered | Lost | UpdateAsked | Prepared | Loaded | Tick


# --- instructions ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Prepare:
    """Have an instance check weights beside its live ones."""

    instance: str
    version: int
    source: str


@dataclass(frozen=True, slots=True)
class Load:
    """Have an instance load weights; it runs nothing meanwhile."""

    instance: str
    weights: Weights


@dataclass(frozen=True, slots=True)
class Admit:
    """Give an instance work."""

    instance: str


@dataclass(frozen=True, slots=True)
class Expel:
    """Give an instance no work."""

    instance: str


@dataclass(frozen=True, slots=True)
class Hold:
    """Keep submissions back."""


@dataclass(frozen=True, slots=True)
class Release:
    """Let submissions in again."""


@dataclass(frozen=True, slots=True)
class Abort:
    """End every unfinished request."""


@dataclass(frozen=True, slots=True)
class Report:
    """Tell the trainer that the weights are live; `quarantined` instances have a reason each."""

    trainer: str
    weights: Weights
    quarantined: dict[str, str]


@dataclass(frozen=True, slots=True)
class Fail:
    """Tell the trainer that nothing changed, and why, by instance (empty name: the update itself)."""

    trainer: str
    version: int
    reasons: dict[str, str]


Instruction = Prepare | Load | Admit | Expel | Hold | Release | Abort | Report | Fail


# --- the machine -----------------------------------------------------------------------------


@dataclass(slots=True)
class _Update:
    asked: UpdateAsked
    deadline: float
    awaited: set[str]
    digest: str = ""
    committing: bool = False


@dataclass(slots=True)
class WeightsMachine:
    """See the module's docstring. `seconds` is the deadline of each phase and of each load."""

    seconds: float = 900.0
    live: Weights | None = None
    quarantined: dict[str, str] = field(default_factory=dict)
    _admitted: set[str] = field(default_factory=set)
    _loading: dict[str, float] = field(default_factory=dict)
    _update: _Update | None = None
    _updated: bool = False

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
    def known(self) -> set[str]:
        """The instances that are there, with or without work."""
        return self._admitted | self._loading.keys() | self.quarantined.keys()

    def __contains__(self, instance: object) -> bool:
        """Say whether an instance is there, with or without work."""
        return instance in self._admitted or instance in self._loading or instance in self.quarantined

    def handle(self, event: Event, now: float, *, idle: bool) -> list[Instruction]:
        """Apply one event at `now` (monotonic seconds); `idle`: no unfinished request is left."""
        out: list[Instruction] = []
        match event:
            case Registered():
                self._registered(event, now, idle, out)
            case Lost():
                self._lost(event.instance)
            case UpdateAsked():
                self._asked(event, now, idle, out)
            case Prepared():
                self._prepared(event, out)
            case Loaded():
                self._loaded(event, out)
            case Tick():
                self._overdue(now, out)
        self._go_on(now, idle or Abort() in out, out)
        return out

    # --- instances -----------------------------------------------------------------------

    def _registered(self, event: Registered, now: float, idle: bool, out: list[Instruction]) -> None:
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
            self.live = theirs
            for other in sorted(self._admitted):
                self._load(other, now, out)
        if (theirs.version, theirs.digest) != (self.live.version, self.live.digest):
            self._load(name, now, out)
            return
        self._admitted.add(name)
        out.append(Admit(name))
        update = self._update
        if update is not None and not update.committing:
            update.awaited.add(name)
            update.digest = update.digest or update.asked.digest
            out.append(Prepare(name, update.asked.version, update.asked.source))

    def _load(self, name: str, now: float, out: list[Instruction]) -> None:
        """Have an instance come to the live weights before it gets work."""
        live = self._current()
        if name in self._admitted:
            self._admitted.discard(name)
            out.append(Expel(name))
        if not live.source:
            self.quarantined[name] = (
                f"has other weights than version {live.version} ({live.digest}): start it with the same model"
            )
            return
        self._loading[name] = now + self.seconds
        out.append(Load(name, live))

    def _lost(self, name: str) -> None:
        self._admitted.discard(name)
        self._loading.pop(name, None)
        self.quarantined.pop(name, None)
        if self._update is not None:
            self._update.awaited.discard(name)

    def _loaded(self, event: Loaded, out: list[Instruction]) -> None:
        name = event.instance
        if name not in self._loading or event.version != self._current().version:
            return
        del self._loading[name]
        if event.problem:
            self.quarantined[name] = event.problem
        else:
            self._admitted.add(name)
            out.append(Admit(name))
        if self._update is not None:
            self._update.awaited.discard(name)

    # --- updates -------------------------------------------------------------------------

    def _asked(self, event: UpdateAsked, now: float, idle: bool, out: list[Instruction]) -> None:
        live, problem = self.live, ""
        if self._update is not None:
            busy = self._update.asked
            if busy == event:
                return  # said again, as to a buffer that may have lost it
            problem = f"{busy.trainer} updates to version {busy.version}: wait for that"
        elif live is None or not self._admitted:
            problem = "no engine is there to take weights: start one"
        elif event.version == live.version and (
            event.digest == live.digest if event.digest else event.source == live.source
        ):
            # Asked again, as after a lost answer, or by a trainer that was killed and came back.
            out.append(Report(event.trainer, live, dict(self.quarantined)))
            return
        elif event.version <= live.version:
            problem = f"version {event.version} must be above the live one, {live.version}"
        elif event.in_flight is InFlight.ERROR and not idle:
            problem = "requests are under way: wait for them, or say in_flight='finish' or 'abort'"
        if problem:
            out.append(Fail(event.trainer, event.version, {"": problem}))
            return
        self._update = _Update(event, now + self.seconds, set(self._admitted), event.digest)
        out.append(Hold())
        if event.in_flight is InFlight.ABORT and not idle:
            out.append(Abort())
        out += [Prepare(name, event.version, event.source) for name in sorted(self._admitted)]

    def _prepared(self, event: Prepared, out: list[Instruction]) -> None:
        update = self._update
        if update is None or update.committing or event.instance not in update.awaited:
            return
        if event.version != update.asked.version:
            return
        problem = event.problem
        if not problem and update.digest not in ("", event.digest):
            problem = f"reads weights with digest {event.digest}, not {update.digest}"
        if problem:
            self._fail({event.instance: problem}, out)
            return
        update.digest = event.digest
        update.awaited.discard(event.instance)

    def _fail(self, reasons: dict[str, str], out: list[Instruction]) -> None:
        update, self._update = self._update, None
        if update is not None:
            out += [Release(), Fail(update.asked.trainer, update.asked.version, reasons)]

    def _go_on(self, now: float, idle: bool, out: list[Instruction]) -> None:
        """Enter the next phase of an update whose instances have all answered."""
        update = self._update
        if update is None or update.awaited:
            return
        if update.committing:
            self._update = None
            live = self._current()
            out += [Release(), Report(update.asked.trainer, live, dict(self.quarantined))]
        elif not self._admitted:
            self._fail({"": "no engine is left"}, out)
        elif idle:
            self.live = Weights(update.asked.version, update.digest, update.asked.source)
            self._updated, update.committing = True, True
            update.awaited, update.deadline = set(self._admitted), now + self.seconds
            for name in [*sorted(self._admitted), *sorted(self.quarantined)]:
                self.quarantined.pop(name, None)
                update.awaited.add(name)
                self._load(name, now, out)

    def _overdue(self, now: float, out: list[Instruction]) -> None:
        for name in [name for name, deadline in self._loading.items() if deadline < now]:
            del self._loading[name]
            self.quarantined[name] = f"did not load version {self._current().version} in {self.seconds:g} s"
            if self._update is not None:
                self._update.awaited.discard(name)
        update = self._update
        if update is not None and not update.committing and update.deadline < now:
            late = dict.fromkeys(sorted(update.awaited), f"did not answer in {self.seconds:g} s")
            self._fail(late or {"": f"requests of the old version went on for {self.seconds:g} s"}, out)

    def _current(self) -> Weights:
        if self.live is None:
            raise RuntimeError("no weights are live before an engine registered")
        return self.live
