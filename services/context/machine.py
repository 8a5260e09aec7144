"""What all open groups teach: events in, changed length estimates and acceptance of drafts out.

Invariants (tests/unit/test_context_machine.py asserts them):
- estimates are the estimator's; `changes` returns exactly those that differ notably from what it (or
  the cap, when the group opened) said last, once, and `estimates` what was said;
- after `replace` nothing of the earlier estimates is left, and every group's is said once; acceptance
  of groups still open is kept and said once more, as snapshots do not tell it;
- what a group of a remembered prompt is like is known when it opens; nothing is remembered unless asked;
- `error` compares each response that finishes with what was said of its group before;
- acceptance is said when a rate moved by `NOTABLE` from what was said, of a group or, before that, of
  all groups; it counts drafts of known requests that came further, once;
- events of unknown groups change nothing; repeated or reordered events of a request change
  nothing twice: a finished request stays finished, progress never shrinks.

Its size follows the buffer's, one entry per open group and one number per request, apart from what an
estimator keeps of past groups and what is remembered of prompts, which are bounded.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from seer.common.group_events import GroupClosed, GroupEvent, GroupOpened, RequestProgress
from seer.common.policy.draft_costs import ALL_GROUPS, GROUP_WEIGHT, Acceptance, to_percent
from seer.common.policy.length import Estimate, EstimateError, Estimator, Evidence, Longest
from seer.services.context.past_prompts import PastPrompts

NOTABLE = 5
"""Percent points by which a rate of acceptance must move to be said again."""

NOTABLE_LOG = 0.05
"""By which the log of an estimate's tokens, or its spread, must move to be said again.

Lengths spread by 0.3 or more within any group: 5 % changes no decision for the better, and every
estimate that is said has the buffer sort that group's waiting requests anew.
"""


@dataclass(slots=True)
class _Group:
    size: int
    known: Evidence
    told: Estimate | None
    acceptance: Acceptance = field(default_factory=Acceptance)
    rates: list[int] = field(default_factory=list)  # as said

    @property
    def foretold(self) -> bool:
        """Whether more was said of it than its cap."""
        return self.told is not None and self.told != _assumed(self.known.cap)


class EstimateMachine:
    """See the module's docstring. `ignored` counts events of unknown groups or responses.

    At most `remember_prompts` prompts are remembered beyond their groups.
    """

    def __init__(self, estimator: Estimator | None = None, remember_prompts: int = 0) -> None:
        self.estimator = Longest() if estimator is None else estimator
        self.memory = PastPrompts(remember_prompts)
        self.error = EstimateError()
        self._groups: dict[str, _Group] = {}
        self._dirty: dict[str, None] = {}  # in order: a run replays exactly
        self._drafted: dict[str, None] = {}  # likewise
        self._acceptance = Acceptance()
        self._rates = to_percent(self._acceptance.rates())  # as said, or as anyone assumes
        self.ignored = 0

    def __len__(self) -> int:
        return len(self._groups)

    def handle(self, event: GroupEvent) -> None:
        """Apply one event."""
        match event:
            case GroupOpened():
                self._open(event)
            case RequestProgress():
                self._progress(event)
            case GroupClosed():
                self._dirty.pop(event.group_id, None)
                self._drafted.pop(event.group_id, None)
                group = self._groups.pop(event.group_id, None)
                if group is None:
                    self.ignored += 1
                else:
                    self._remember(event.group_id, group)

    def replace(self, events: Iterable[GroupEvent]) -> None:
        """Start over from a snapshot: the open groups and their requests' progress."""
        before, self._groups, self._dirty, self._drafted = self._groups, {}, {}, {}
        for group_id, group in before.items():
            self._remember(group_id, group)
            group.known.forget()  # it comes again, and must not count twice
        error, self.error = self.error, EstimateError()
        for event in events:
            self.handle(event)
        self.error = error  # what was finished before was not foretold
        # Subscribers may hold anything: a restarted buffer forgot, others remember another life.
        for group_id, group in self._groups.items():
            group.told = None
            self._dirty[group_id] = self._drafted[group_id] = None
            if group_id in before:
                group.acceptance = before[group_id].acceptance
        self._rates = to_percent(Acceptance().rates())

    def changes(self) -> dict[str, Estimate]:
        """Return the estimates that changed notably since the last call, by group id."""
        dirty = list(self._groups if self.estimator.refit() else self._dirty)
        self._dirty.clear()
        now = self.estimator.estimates([self._groups[group_id].known for group_id in dirty])
        changed = {}
        for group_id, estimate in zip(dirty, now, strict=True):
            group = self._groups[group_id]
            if group.told is None or _moved(estimate, group.told):
                group.told = changed[group_id] = estimate
        return changed

    @property
    def dirty(self) -> bool:
        """Whether `changes` may have something to return."""
        return bool(self._dirty or self._drafted)

    def estimates(self) -> dict[str, Estimate]:
        """Return all estimates said that differ from the cap: what a new subscriber must know."""
        said = {group_id: group.told for group_id, group in self._groups.items() if group.foretold}
        return {group_id: told for group_id, told in said.items() if told is not None}

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

    def _open(self, event: GroupOpened) -> None:
        if event.group_id not in self._groups:
            known = Evidence(event.cap, past=self.memory.recall(_prompt(event.group_id)))
            self._groups[event.group_id] = _Group(event.size, known, _assumed(event.cap))
            self.estimator.opened(known)
            self._dirty[event.group_id] = None

    def _progress(self, event: RequestProgress) -> None:
        group = self._groups.get(event.group_id)
        if group is None or not 0 <= event.index < group.size or event.index in group.known.finished:
            self.ignored += 1
            return
        self._count(group, event)
        known = group.known
        if event.finished:
            known.unfinished.pop(event.index, None)
            known.finished[event.index] = event.generated
            self.estimator.ended()
            self.error.count(group.told if group.foretold else None, event.generated)
        else:
            before = known.unfinished.get(event.index, 0)
            known.unfinished[event.index] = max(before, event.generated)
        self._dirty[event.group_id] = None

    def _remember(self, group_id: str, group: _Group) -> None:
        if len(group.known.finished) == group.size:
            self.memory.keep(_prompt(group_id), group.known.finished.values())

    def _count(self, group: _Group, event: RequestProgress) -> None:
        ahead = event.generated > group.known.unfinished.get(event.index, 0)
        if event.drafted and ahead and group.acceptance.add(event.drafted, event.accepted):
            self._acceptance.add(event.drafted, event.accepted)
            self._drafted[event.group_id] = None


def _prompt(group_id: str) -> str:
    return group_id.partition("/")[2]  # rollout ids have none (ids.group_id)


def _assumed(cap: int) -> Estimate:
    """Return what anyone takes for granted of a group of which nothing was said."""
    return Estimate(float(cap))


def _moved(now: Estimate, said: Estimate) -> bool:
    return (
        abs(math.log(now.tokens / said.tokens)) > NOTABLE_LOG or abs(now.spread - said.spread) > NOTABLE_LOG
    )


def _notable(now: Sequence[int], said: Sequence[int]) -> bool:
    return any(abs(new - old) >= NOTABLE for new, old in zip(now, said, strict=True))
