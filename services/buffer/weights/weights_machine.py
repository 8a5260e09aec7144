"""Which weights are live, and how all instances load them: a pure machine.

An update has two phases. Prepare: every instance opens and checks the new weights beside the live ones; if
one of them reports a problem, the update fails and nothing has changed. Commit: once no request of the old
weights is left, the new weights are live and every instance loads them. An instance that fails to load is
quarantined, never rolled back. It tries again every `RETRY_SECONDS`, as the cause, such as a full disk, may
be gone.

Whenever other weights become live, every registered instance gets a `LoadWeights`, also a quarantined one and
one that is still loading the previous weights. What it reports of those is ignored.

An instance that dropped its weights to sleep has to load: those of an update, as soon as its weights are
awake, or else the live ones again, once all of it is awake.

Weights in place (`common/weights/in_place.py`) are written over the live ones while they arrive, and cannot
be loaded again later. Only instances that are there when loading begins take part. If some of them succeed,
the others are quarantined until the next update. If none does, the update has failed, and the last weights
before it that can be loaded again are live again.

Invariants (tests/unit/test_weights_machine.py and tests/property/test_weights_machine.py):
- an instance that may get work has loaded exactly the live version and digest, and all of it is awake when it
  is admitted;
- a `LoadWeights` is sent only to an instance whose weights are awake
  (tests/property/test_weights_and_sleep.py, with the sleep machine);
- the live weights change only while no request runs, and never back to a lower version, but after an update
  in place that failed: then no instance has its version, and later updates are not below any that one had;
- a version that no instance has may be sent again, also with another digest;
- an update for which no instance is there waits for one until its deadline;
- a `LoadWeights` of weights in place is sent only to the instances that `WeightsLoading` names;
- an update ends in exactly one of `WeightsLive` and `WeightsFailed`, unless the buffer drains before engines
  load: the trainer asks its successor. Submissions are held from an update's start to its end, and only then;
- every wait has a deadline.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec
from msgspec import field, structs

from seer.common import wire
from seer.common.weights.digest import BLAKE3, tag_of
from seer.common.weights.in_place import is_in_place
from seer.services.buffer.events import Changed, Drained, FromEngine, FromTrainer, Joined, Left, Tick, Weights
from seer.services.buffer.weights.fan_out import FanOut
from seer.services.buffer.weights.instructions import Abort, Admit, Expel, Hold, Instruction, Release
from seer.services.buffer.weights.update_state import (
    NO_DEADLINE,
    Pending,
    Update,
    discard,
    failed,
    is_for,
    load,
    same,
)

Event = Joined | Left | FromEngine | FromTrainer | Drained | Tick | Changed

RETRY_SECONDS = 30.0
"""Time after which quarantined instances try to load again."""

GONE = "was loaded in place, so it cannot be loaded again: it gets work after the next update"

ASLEEP = "engines sleep: wake them first, or their weights: tags=['weights']"


class WeightsMachine(msgspec.Struct):
    """See the module's docstring. All of its state is in its fields, so it is its own snapshot.

    `seconds`: how long each phase and each load may take.
    """

    seconds: float = 900.0
    live: Weights | None = None
    quarantined: dict[str, str] = field(default_factory=dict)
    """By instance: why it gets no work. The reason stays while the instance tries again."""
    _retry_at: float = 0.0
    _admitted: set[str] = field(default_factory=set)
    _pending: dict[str, Pending] = field(default_factory=dict)
    _update: Update | None = None
    _updates: int = 0
    """Number of updates so far."""
    _updated: bool = False
    """Whether one of them reached its second phase."""
    _draining: bool = False
    _fan_out: FanOut = field(default_factory=FanOut)
    _dropped: set[str] = field(default_factory=set)
    """The instances that dropped their weights, until they load."""
    checked: Weights | None = None
    """While the live weights are in place: the last ones before that were not."""
    _highest: int = -1
    """The highest version that an instance has loaded, or was admitted with."""
    changed_by: str = ""
    """The trainer whose update made the live weights so; empty: engines had them when this buffer started."""
    _failures: int = 0
    """Updates in place that failed. Each frees its version, so versions alone do not tell loads apart."""

    @property
    def updating(self) -> bool:
        """Whether an update is under way."""
        return self._update is not None

    @property
    def digests(self) -> str:
        """The tag of digests of weights that nobody named: that of the live weights' digest."""
        return tag_of(self.live.digest) if self.live is not None and self.live.digest else BLAKE3

    @property
    def awaiting(self) -> str:
        """The trainer whose update waits for work of the old weights; empty: none."""
        return "" if self._update is None or self._update.committing else self._update.trainer

    @property
    def sources(self) -> set[str]:
        """The sources of the live weights, of the checked ones, and of those of the update under way."""
        kept = {weights.source for weights in (self.live, self.checked) if weights is not None}
        return kept | {self._update.request.source} if self._update else kept

    @property
    def admitted(self) -> frozenset[str]:
        """The instances that may get work."""
        return frozenset(self._admitted)

    @property
    def loading(self) -> frozenset[str]:
        """The instances that load at present."""
        return frozenset(name for name in self._to_load if self._is_live(self._pending[name].sent))

    @property
    def reloading(self) -> bool:
        """Whether there is no instance for work, and some that load again what they dropped."""
        return not self._admitted and not self._dropped.isdisjoint(self._to_load)

    @property
    def _to_load(self) -> frozenset[str]:
        """The instances that load, or have to load as soon as they are awake."""
        return frozenset(name for name, pending in self._pending.items() if not self._is_live(pending.loaded))

    @property
    def _loaded_live(self) -> set[str]:
        """The instances that have the live weights; some of them may sleep, and are not admitted yet."""
        return self._admitted | self._pending.keys() - self._to_load

    @property
    def known(self) -> set[str]:
        """All registered instances, whether they may get work or not."""
        return self._admitted | self._pending.keys() | self.quarantined.keys()

    def __contains__(self, instance: object) -> bool:
        """Return whether an instance is registered."""
        return instance in self._admitted or instance in self._pending or instance in self.quarantined

    def apply(
        self, event: Event, now: float, *, idle: bool, awake: Collection[str] | None = None,
        weights_awake: Collection[str] | None = None, asleep: bool = False,
    ) -> list[Instruction]:  # fmt: skip
        """Apply one event at `now` (monotonic seconds).

        `idle`: no unfinished request is left. `awake`: the instances of which nothing sleeps, or is about to
        sleep or to wake; None: all. `weights_awake`: those whose weights are so; None: `awake`.
        `asleep`: all are to sleep.
        """
        loadable = awake if weights_awake is None else weights_awake
        out: list[Instruction] = []
        match event:
            case Joined():
                self._joined(event, idle, out)
            case Left():
                for name in event.instances:
                    self._remove(name)
            case FromTrainer(trainer, wire.UpdateWeights() as request):
                self._update_requested(trainer, request, now, idle, asleep, out)
            case FromEngine(name, wire.WeightsPrepared() as answer):
                self._prepared(name, answer, out)
            case FromEngine(name, wire.WeightsLoaded() as answer):
                self._loaded(name, answer, now)
            case FromEngine(name, wire.Slept(dropped=True)):
                self._weights_dropped(name, out)
            case Drained():
                self._draining = True
                if self._update is not None and not self._update.committing:
                    self._fail({}, out)
            case Tick():
                self._check_deadlines(now, out)
                self._retry(now, awake)
        self._advance_instances(now, awake, loadable, out)
        self._leave_sleepers(asleep, loadable or (), out)
        if self._advance_update(now, idle or any(isinstance(each, Abort) for each in out), out):
            self._advance_instances(now, awake, loadable, out)
            out += self._update.receivers(out) if self._update is not None else []
        return out

    # --- instances -----------------------------------------------------------------------

    def _joined(self, event: Joined, idle: bool, out: list[Instruction]) -> None:
        name, reported = event.instance, event.weights
        self._remove(name)
        self._fan_out.joined(name, event.register.node, event.register.weights_endpoint)
        if reported.version < 0 and self.live is None:
            self.quarantined[name] = "failed to load weights; restart it, or update to a later version"
            return
        if self.live is None or (reported.version > self.live.version and not self._updated):
            # A restarted buffer learns from the engines which weights are live. Requests that began before
            # that have tokens of other weights.
            if self.live is not None and not idle:
                out.append(Abort())
            self._go_live(reported, out)
            if self._update is not None and self._update.request.version <= reported.version:
                self._fail({"": f"must be above the live one: {name} has version {reported.version}"}, out)
        if self._is_live(reported):
            self._fan_out.has(name, reported.source)
        # A digest of another tag does not say whether these are the live weights: loading them does.
        known = not event.dropped and tag_of(reported.digest) == tag_of(self._live_weights().digest)
        self._pending[name] = Pending(reported if known else None)
        if event.dropped:
            self._dropped.add(name)

    def _weights_dropped(self, name: str, out: list[Instruction]) -> None:
        """Have an instance load before it gets work again; a quarantined one has to anyway."""
        if name not in self:
            return
        self._dropped.add(name)
        if name in self._admitted:
            self._admitted.discard(name)
            out.append(Expel(name))
            self._pending[name] = Pending()
        elif name in self._pending:
            self._pending[name] = Pending(source=self._pending[name].source)

    def _go_live(self, weights: Weights, out: list[Instruction], by: str = "") -> None:
        """Make other weights live; every instance has to load them before it gets work."""
        if not is_in_place(weights.source):
            self.checked = None
        elif self.live is not None and not is_in_place(self.live.source):
            self.checked = self.live
        self.live, self.changed_by = weights, by
        self._fan_out.keep(self.sources)
        for name in sorted(self._admitted):
            out.append(Expel(name))
            self._pending[name] = Pending()
        self._pending |= {name: Pending() for name in self.quarantined}
        self._admitted.clear()
        self.quarantined.clear()

    def _advance_instances(
        self, now: float, awake: Collection[str] | None, loadable: Collection[str] | None,
        out: list[Instruction],
    ) -> None:  # fmt: skip
        """Admit instances that have the live weights, and have the others load them."""
        update = self._update if self._update is not None and self._update.committing else None
        able = awake if update is None else loadable  # without an update, one may come before the KV wakes
        for name in sorted(self._pending):
            pending, live = self._pending[name], self._live_weights()
            ready = able is None or name in able
            if self._is_live(pending.loaded):
                if awake is None or name in awake:
                    self._admit(name, out)
            elif self._is_live(pending.sent):
                pass  # it is loading them, from wherever they were when that was sent
            elif not (source := pending.source or live.source) and pending.loaded is not None:
                why = f"has other weights than version {live.version} ({live.digest})"
                self._quarantine(name, f"{why}: start it with the same model", now)
            elif is_in_place(source) and not (ready and update is not None and name in update.awaited):
                self._fan_out.ended(name, source)
                self._quarantine(name, f"version {live.version} {GONE}", now)
            elif ready:
                weights = structs.replace(live, source=source)
                self._pending[name] = Pending(
                    sent=weights, deadline=now + self.seconds, call_id=self._failures
                )
                out.append(load(name, weights, self._fan_out.holders(name, source), self._failures))

    def _admit(self, name: str, out: list[Instruction]) -> None:
        del self._pending[name]
        self._highest = max(self._highest, self._live_weights().version)
        self.quarantined.pop(name, None)
        self._admitted.add(name)
        out.append(Admit(name))
        update = self._update
        if update is not None and not update.committing and name not in update.sent_to:
            self._prepare(update, name, out)

    def _quarantine(self, name: str, why: str, now: float) -> None:
        del self._pending[name]
        self.quarantined[name] = why
        self._retry_at = now + RETRY_SECONDS

    def _retry(self, now: float, awake: Collection[str] | None) -> None:
        """Have quarantined instances that are awake try to load again."""
        if now < self._retry_at or self.live is None or is_in_place(self.live.source):
            return
        for name in self.quarantined.keys() - self._pending.keys():
            possible = self.live.source or name in self._dropped
            if possible and (awake is None or name in awake):
                self._pending[name] = Pending()

    def _remove(self, name: str) -> None:
        self._fan_out.left(name)
        self._admitted.discard(name)
        self._dropped.discard(name)
        self._pending.pop(name, None)
        why = self.quarantined.pop(name, "")
        update = self._update
        if update is not None:
            if update.committing and is_in_place(update.request.source) and (why or name in update.awaited):
                update.left[name] = why or "it ended while it loaded them"
            update.awaited.discard(name)
            update.sent_to.discard(name)

    def _loaded(self, name: str, answer: wire.WeightsLoaded, now: float) -> None:
        pending = self._pending.get(name)
        if pending is None or pending.sent is None or not self._is_live(pending.sent):
            return
        if (answer.version, answer.call_id) != (pending.sent.version, pending.call_id):
            return  # about previous weights: the live ones were sent since
        (self._fan_out.ended if answer.problem else self._fan_out.has)(name, pending.sent.source)
        if not answer.problem:
            self.live = pending.sent  # the same weights, at the source where this instance found them
            self._pending[name] = Pending(loaded=pending.sent)
            self._dropped.discard(name)
            self._highest = max(self._highest, pending.sent.version)
            if self._update is not None and self._update.committing:
                self._update.succeeded = True
        elif (source := self._alternative_source()) not in ("", pending.sent.source):
            self._pending[name] = Pending(source=source)
        else:
            self._quarantine(name, answer.problem, now)

    def _alternative_source(self) -> str:
        """Return the source that a trainer that waits for the live weights gave; empty if none waits."""
        return self._update.request.source if self._update is not None and self._update.committing else ""

    # --- updates -------------------------------------------------------------------------

    def _update_requested(
        self, trainer: str, request: wire.UpdateWeights, now: float, idle: bool, asleep: bool,
        out: list[Instruction],
    ) -> None:  # fmt: skip
        current, live = self._update, self.live
        if current is not None and current.trainer == trainer:
            if structs.replace(current.request, call_id=request.call_id) == request:
                # Sent again: the answer may have been lost, or this is a later incarnation of the trainer.
                current.request = request
                return
            if not current.committing:
                self._fail({"": f"{trainer} asked for another update"}, out)
        again = live is not None and not self.updating and self._loaded_live and is_for(request, live)
        if live is not None and again and not asleep:
            self._requested_again(trainer, request, live, out)
            return
        if self._draining:
            return
        if problem := self._refusal(request, idle) or (ASLEEP if asleep else ""):
            out.append(failed(trainer, request, {"": problem}))
            return
        self._updates += 1
        self._update = update = Update(
            trainer, request, self._updates, now + self.seconds, digest=request.digest
        )
        out.append(Hold())
        if request.in_flight == "abort" and not idle:
            out.append(Abort(update.whose))
        for name in self._instances_to_check():
            self._prepare(update, name, out)

    def _requested_again(
        self, trainer: str, request: wire.UpdateWeights, live: Weights, out: list[Instruction]
    ) -> None:
        """Answer a request for the live weights, as a trainer sends that missed the first answer.

        The answer waits for instances that still load: a restarted buffer has a stream only as long as its
        trainer waits. Quarantined instances try again, from the source in this request.
        """
        if request.source and not is_in_place(request.source):
            self._pending |= {name: Pending(source=request.source) for name in self.quarantined}
            self.quarantined.clear()
        update = Update(
            trainer, request, self._updates + 1, NO_DEADLINE, set(self._pending), committing=True,
            succeeded=True,
        )  # fmt: skip
        if not self._pending:
            out.append(update.succeeded_with(live, dict(self.quarantined)))
            return
        self._updates += 1
        self._update = update
        out.append(Hold())

    def _instances_to_check(self) -> list[str]:
        """Return the instances that check new weights: those that have, or dropped, the live ones.

        If there are none, quarantined ones.
        """
        dropped = self._dropped & self._pending.keys()
        return sorted(self._loaded_live | dropped or self.quarantined)

    def _refusal(self, request: wire.UpdateWeights, idle: bool) -> str:
        """Return why an update cannot begin; empty if it can."""
        version = request.version
        if self._update is not None:
            return f"{self._update.trainer} updates to version {self._update.request.version}: wait for that"
        if not request.source:
            return "give a source"
        known = self._loaded_live or (self._dropped and not (self.live and is_for(request, self.live)))
        if self.live is not None and version < self.live.version + bool(known):
            return f"version {version} must be above the live one, {self.live.version}"
        if self.live is not None and self.live.version < self._highest > version:
            return f"version {version} must not be below {self._highest}, which was live before"
        if request.in_flight == "error" and not idle:
            return "requests are under way: wait for them, or say in_flight='finish' or 'abort'"
        return ""

    def _prepare(self, update: Update, name: str, out: list[Instruction]) -> None:
        update.awaited.add(name)
        update.sent_to.add(name)
        out.append(update.prepare(name, self._fan_out.holders(name, update.request.source)))

    def _prepared(self, name: str, answer: wire.WeightsPrepared, out: list[Instruction]) -> None:
        update = self._update
        if update is None or name not in update.sent_to:
            if name in self and not answer.problem:  # it registered again after `PrepareWeights`
                out.append(discard(name, answer.version, answer.call_id))
            return
        if update.committing or name not in update.awaited:
            return
        if (answer.version, answer.call_id) != (update.request.version, update.number):
            return  # about an earlier update, whose weights may be others
        if problem := update.problem_of(answer):
            self._fail({name: problem}, out)
            return
        update.digest = answer.digest
        update.awaited.discard(name)

    def _fail(self, reasons: dict[str, str], out: list[Instruction]) -> None:
        """End an update of which no instance loads weights yet; without reasons its trainer is not told."""
        update, self._update = self._update, None
        if update is not None:
            request = update.request
            out += [discard(name, request.version, update.number) for name in sorted(update.sent_to)]
            for name in update.sent_to:
                self._fan_out.ended(name, request.source)
            out += [Release(), *([failed(update.trainer, request, reasons)] if reasons else [])]

    def _leave_sleepers(self, asleep: bool, loadable: Collection[str], out: list[Instruction]) -> None:
        """Have no update wait for engines that sleep by a wish of an earlier incarnation of the buffer."""
        if self._update is None or not asleep:
            return
        if self._update.committing:
            self._update.awaited.intersection_update(loadable)
        else:
            self._fail({"": ASLEEP}, out)

    def _advance_update(self, now: float, idle: bool, out: list[Instruction]) -> bool:
        """Begin an update's next phase if all instances have answered; return whether that is loading."""
        update = self._update
        if update is None:
            return False
        if update.committing:
            update.awaited &= self._to_load
        if update.awaited:
            return False
        if update.committing:
            self._update = None
            return self._end(update, out)
        if not update.sent_to:  # all have left, or none was there: those that come check the weights
            for name in self._instances_to_check():
                self._prepare(update, name, out)
        elif self._loaded_live and update.gives_other_bytes(self.live):
            self._fail({"": f"version {update.request.version} must be above the live one"}, out)
        elif idle:
            self._updated = update.committing = True
            self._go_live(update.weights, out, update.trainer)
            update.awaited = set(self._pending)
            return True
        return False

    def _end(self, update: Update, out: list[Instruction]) -> bool:
        """Answer after all instances have; return whether other weights are live again."""
        live = self._live_weights()
        left = {name: why for name, why in update.left.items() if name not in self._loaded_live}
        reasons = self.quarantined | left
        out.append(Release())
        if not is_in_place(live.source) or update.succeeded:
            out.append(update.succeeded_with(live, reasons))
            return False
        out.append(failed(update.trainer, update.request, reasons or {"": "no engine is left"}))
        self._failures += 1
        if self.checked is not None:  # else instances stay quarantined until the next update
            self._go_live(self.checked, out)
        return True

    def _check_deadlines(self, now: float, out: list[Instruction]) -> None:
        for name in [name for name, pending in self._pending.items() if pending.deadline < now]:
            why = f"did not load version {self._live_weights().version} in {self.seconds:g} s"
            self._quarantine(name, why, now)
        update = self._update
        if update is not None and not update.committing and update.deadline < now:
            self._fail(update.late(self.seconds), out)

    def _is_live(self, weights: Weights | None) -> bool:
        return same(weights, self.live)

    def _live_weights(self) -> Weights:
        if self.live is None:
            raise RuntimeError("no weights are live before an engine registered")
        return self.live
