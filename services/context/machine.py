"""What all open groups teach: events in, changed length estimates and acceptance of drafts out.

Invariants (tests/unit/test_context_machine.py asserts them):
- a group's estimate is its cap until one of its responses finished, then the estimator's word;
- `changes` returns exactly what differs from what it (or `cap`) said last, once;
- after `replace` nothing of the earlier estimates is left, and every group's is said once; acceptance
  of groups still open is kept and said once more, as snapshots do not tell it;
- acceptance is said when a rate moved by `NOTABLE` from what was said, of a group or, before that, of
  all groups; it counts drafts of known requests that came further, once;
- events of unknown groups change nothing; repeated or reordered events of a request change
  nothing twice: a finished request stays finished, progress never shrinks.

Its size follows the buffer's: one entry per open group, one number per request.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from seer.common.policy.drafting import ALL_GROUPS, GROUP_WEIGHT, Acceptance, to_percent
from seer.common.policy.length import Estimator, longest_finished

NOTABLE = 5
"""Percent points by which a rate of acceptance must move to be said again."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A group of `size` requests began; no response is longer than `cap` tokens."""

    group_id: str
    size: int
    cap: int


@dataclass(frozen=True, slots=True)
class Progressed:
    """Response `index` has `generated` tokens, and no more to come if `finished`.

    `drafted` tokens were verified on the way, `accepted` of them right, both by cell.
    """

    group_id: str
    index: int
    generated: int
    finished: bool
    drafted: Sequence[int] = ()
    accepted: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Closed:
    """A group is over."""

    group_id: str


Event = Opened | Progressed | Closed


@dataclass(slots=True)
class _Group:
    size: int
    cap: int
    told: float | None
    finished: dict[int, int] = field(default_factory=dict)
    unfinished: dict[int, int] = field(default_factory=dict)
    acceptance: Acceptance = field(default_factory=Acceptance)
    rates: list[int] = field(default_factory=list)  # as said


class Machine:
    """See the module's docstring. `ignored` counts events of unknown groups or responses."""

    def __init__(self, estimator: Estimator = longest_finished) -> None:
        self._estimator = estimator
        self._groups: dict[str, _Group] = {}
        self._dirty: dict[str, None] = {}  # in order: a run replays exactly
        self._drafted: dict[str, None] = {}  # likewise
        self._acceptance = Acceptance()
        self._rates = to_percent(self._acceptance.rates())  # as said, or as anyone assumes
        self.ignored = 0

    def __len__(self) -> int:
        return len(self._groups)

    def handle(self, event: Event) -> None:
        """Apply one event."""
        match event:
            case Opened():
                self._open(event)
            case Progressed():
                self._progress(event)
            case Closed():
                self._dirty.pop(event.group_id, None)
                self._drafted.pop(event.group_id, None)
                if self._groups.pop(event.group_id, None) is None:
                    self.ignored += 1

    def replace(self, events: Iterable[Event]) -> None:
        """Start over from a snapshot: the open groups and their requests' progress."""
        before, self._groups, self._dirty, self._drafted = self._groups, {}, {}, {}
        for event in events:
            self.handle(event)
        # Subscribers may hold anything: a restarted buffer forgot, others remember another life.
        for group_id, group in self._groups.items():
            group.told = None
            self._dirty[group_id] = self._drafted[group_id] = None
            if group_id in before:
                group.acceptance = before[group_id].acceptance
        self._rates = to_percent(Acceptance().rates())

    def changes(self) -> dict[str, float]:
        """Return the estimates that changed since the last call: group id -> tokens."""
        changed = {}
        for group_id in self._dirty:
            group = self._groups[group_id]
            estimate = self._estimate(group)
            if estimate != group.told:
                group.told = changed[group_id] = estimate
        self._dirty.clear()
        return changed

    @property
    def dirty(self) -> bool:
        """Whether `changes` may have something to return."""
        return bool(self._dirty or self._drafted)

    def estimates(self) -> dict[str, float]:
        """Return all estimates that differ from their cap: what a new subscriber must know."""
        now = {group_id: self._estimate(group) for group_id, group in self._groups.items()}
        return {group_id: tokens for group_id, tokens in now.items() if tokens != self._groups[group_id].cap}

    def acceptance_changes(self) -> dict[str, list[int]]:
        """Return the acceptance that changed notably since the last call: group id -> percent by cell."""
        changed: dict[str, list[int]] = {}
        if not self._drafted:
            return changed
        rates = self._acceptance.rates()
        if _notable(common := to_percent(rates), self._rates):
            self._rates = changed[ALL_GROUPS] = common
        for group_id in self._drafted:
            group = self._groups[group_id]
            own = to_percent(group.acceptance.rates(rates, GROUP_WEIGHT))
            if _notable(own, group.rates or self._rates):
                group.rates = changed[group_id] = own
        self._drafted.clear()
        return changed

    def acceptance(self) -> dict[str, list[int]]:
        """Return all acceptance as said: what a new subscriber must know."""
        said = {group_id: group.rates for group_id, group in self._groups.items() if group.rates}
        return {ALL_GROUPS: self._rates, **said}

    def _open(self, event: Opened) -> None:
        if event.group_id not in self._groups:
            self._groups[event.group_id] = _Group(event.size, event.cap, float(event.cap))

    def _progress(self, event: Progressed) -> None:
        group = self._groups.get(event.group_id)
        if group is None or not 0 <= event.index < group.size or event.index in group.finished:
            self.ignored += 1
            return
        self._count(group, event)
        if event.finished:
            group.unfinished.pop(event.index, None)
            group.finished[event.index] = event.generated
        else:
            known = group.unfinished.get(event.index, 0)
            group.unfinished[event.index] = max(known, event.generated)
        self._dirty[event.group_id] = None

    def _count(self, group: _Group, event: Progressed) -> None:
        ahead = event.generated > group.unfinished.get(event.index, 0)
        if event.drafted and ahead and group.acceptance.add(event.drafted, event.accepted):
            self._acceptance.add(event.drafted, event.accepted)
            self._drafted[event.group_id] = None

    def _estimate(self, group: _Group) -> float:
        return min(
            self._estimator(group.cap, group.finished.values(), group.unfinished.values()), float(group.cap)
        )


def _notable(now: Sequence[int], said: Sequence[int]) -> bool:
    return any(abs(new - old) >= NOTABLE for new, old in zip(now, said, strict=True))
