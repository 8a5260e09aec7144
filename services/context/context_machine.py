"""Statistics of all open groups: events in, changed length estimates and acceptance rates of drafts out.

Invariants (tests/unit/test_context_machine.py asserts them):
- estimates are the estimator's; `changes` returns each estimate that moved by `MIN_CHANGE` from the last one
  published (at first the cap), once, and `estimates` returns those published last;
- after `replace` no earlier estimate is left, and every group's is published once; acceptance rates of groups
  still open are kept, as snapshots do not have them, and published once more;
- a group of a remembered prompt has an estimate when it opens; prompts are remembered only if configured;
- groups of one shared id have one evidence, and so one estimate, while any of them is open;
- `error` compares the length of each finished response with its group's last published estimate;
- a group's acceptance is published when a rate moved by `MIN_RATE_CHANGE` from the last one published, or, if
  there is none, from that of all groups, which engines learn themselves; drafts are counted once, of known
  requests that advanced;
- events of unknown groups change nothing; repeated or reordered events of a request change nothing twice: a
  finished request stays finished, progress never shrinks.

Memory is one entry per open group and one number per request, plus what the estimator keeps of past groups
and what is remembered of prompts, which are bounded.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from seer.common.policy.draft_costs import GROUP_WEIGHT, Acceptance, to_percent
from seer.common.policy.length import Estimate, EstimateError, Estimator, Evidence, Longest
from seer.common.wire import BufferPublished, GroupClosed, GroupOpened, RequestProgress
from seer.services.context.past_lengths import PastPrompts

MIN_RATE_CHANGE = 5
"""Percentage points by which an acceptance rate must move to be published again."""

MIN_CHANGE = 0.05
"""Change of an estimate's log tokens, or of its spread, that publishes it again.

Lengths have a spread of 0.3 or more within any group, so smaller changes improve no decision, while for every
published estimate the buffer sorts the group's waiting requests again.
"""


REVISED = 64
"""Groups that are estimated anew at a time after a fit. Of 100,000, all at once would be most of a second's
work here, and seconds' in the buffer, which has to sort a million requests."""


@dataclass(slots=True)
class _Group:
    size: int
    known: Evidence
    published: Estimate | None
    shared: tuple[str, int] | None = None  # groups of this id and cap have the same evidence
    first: int = 0  # where its responses begin in the evidence
    acceptance: Acceptance = field(default_factory=Acceptance)
    rates: list[int] = field(default_factory=list)  # as published

    @property
    def estimate(self) -> Estimate | None:
        """The published estimate; None if there is none but the cap."""
        return None if self.published == _default(self.known.cap) else self.published


class EstimateMachine:
    """See the module's docstring. `ignored` counts events of unknown groups or responses.

    The lengths of at most `remember_prompts` prompts are remembered after their groups have closed.
    """

    def __init__(self, estimator: Estimator | None = None, remember_prompts: int = 0) -> None:
        self.estimator = Longest() if estimator is None else estimator
        self.memory = PastPrompts(remember_prompts)
        self.error = EstimateError()
        self._groups: dict[str, _Group] = {}
        self._sharing: dict[tuple[str, int], dict[str, None]] = {}  # groups by shared id and cap
        self._dirty: dict[str, None] = {}  # a dict for its order: runs are reproducible
        self._drafted: dict[str, None] = {}  # groups with newly counted drafts, likewise
        self._stale: dict[str, None] = {}  # groups estimated before the last fit, the next ones first
        self._acceptance = Acceptance()
        self.ignored = 0

    def __len__(self) -> int:
        return len(self._groups)

    def apply(self, event: BufferPublished) -> None:
        """Apply one event."""
        match event:
            case GroupOpened():
                self._open(event)
            case RequestProgress():
                self._progress(event)
            case GroupClosed():
                self._dirty.pop(event.group_id, None)
                self._drafted.pop(event.group_id, None)
                self._stale.pop(event.group_id, None)
                group = self._groups.pop(event.group_id, None)
                if group is None:
                    self.ignored += 1
                else:
                    self._remember(event.group_id, group)
                    self._leave(event.group_id, group)

    def replace(self, events: Iterable[BufferPublished]) -> None:
        """Start over from a snapshot: the open groups and their requests' progress."""
        before, self._groups, self._dirty, self._drafted = self._groups, {}, {}, {}
        self._sharing, self._stale = {}, {}
        for group_id, group in before.items():
            self._remember(group_id, group)
            group.known.forget()  # the snapshot has it again, and it must not count twice
        error, self.error = self.error, EstimateError()
        for event in events:
            self.apply(event)
        self.error = error  # responses of the snapshot were finished before: no estimate is compared
        # Subscribers may have anything: a restarted buffer has nothing, others have earlier estimates.
        for group_id, group in self._groups.items():
            group.published = None
            self._dirty[group_id] = self._drafted[group_id] = None
            if group_id in before:
                group.acceptance = before[group_id].acceptance

    def changes(self) -> dict[str, Estimate]:
        """Return the estimates that changed by `MIN_CHANGE`, by group id: they count as published then.

        After a fit, all groups are gone through in several calls: `dirty` until that is done.
        """
        if self.estimator.refit():
            self._stale.update(dict.fromkeys(self._groups))
        self._dirty.update(dict.fromkeys(islice(self._stale, REVISED)))
        due = list(self._dirty_and_sharing())
        self._dirty.clear()
        known = {id(each): each for each in (self._groups[group_id].known for group_id in due)}
        now = dict(zip(known, self.estimator.estimates(list(known.values())), strict=True))
        changed = {}
        for group_id in due:
            self._stale.pop(group_id, None)
            group = self._groups[group_id]
            estimate = now[id(group.known)]
            if group.published is None or _estimate_moved(estimate, group.published):
                group.published = changed[group_id] = estimate
        return changed

    def _dirty_and_sharing(self) -> Iterable[str]:
        """Return the groups whose evidence changed: here, as there may be many with that of one event."""
        found: dict[str, None] = {}
        for group_id in self._dirty:
            shared = self._groups[group_id].shared
            if group_id not in found:
                found.update(dict.fromkeys([group_id] if shared is None else self._sharing[shared]))
        return found

    @property
    def dirty(self) -> bool:
        """Whether `changes` may have something to return."""
        return bool(self._dirty or self._drafted or self._stale)

    def estimates(self) -> dict[str, Estimate]:
        """Return all published estimates that differ from the cap, for a new subscriber."""
        known = {group_id: group.estimate for group_id, group in self._groups.items()}
        return {group_id: estimate for group_id, estimate in known.items() if estimate is not None}

    def acceptance_changes(self) -> dict[str, list[int]]:
        """Return the rates that changed by `MIN_RATE_CHANGE`: group id -> percent by cell."""
        changed: dict[str, list[int]] = {}
        if not self._drafted:
            return changed
        rates = self._acceptance.rates()
        common = to_percent(rates)
        for group_id in self._drafted:
            group = self._groups[group_id]
            own = to_percent(group.acceptance.rates(rates, GROUP_WEIGHT))
            if _rates_moved(own, group.rates or common):
                group.rates = changed[group_id] = own
        self._drafted.clear()
        return changed

    def acceptance(self) -> dict[str, list[int]]:
        """Return all published acceptance rates, for a new subscriber."""
        return {group_id: group.rates for group_id, group in self._groups.items() if group.rates}

    def _open(self, event: GroupOpened) -> None:
        if event.group_id in self._groups:
            return
        shared = (event.shared_id, event.cap) if event.shared_id else None
        sharing = {} if shared is None else self._sharing_of(shared)
        if sharing:
            known = self._groups[next(iter(sharing))].known
        else:
            past = None if shared else self.memory.recall(_prompt(event.group_id))
            known = Evidence(event.cap, past=past)
            self.estimator.opened(known)
        sharing[event.group_id] = None
        group = _Group(event.size, known, _default(event.cap), shared, event.first)
        self._groups[event.group_id] = group
        self._dirty[event.group_id] = None

    def _sharing_of(self, shared: tuple[str, int]) -> dict[str, None]:
        """Return the groups of a shared id and cap; a group of that very id may have been opened unnamed."""
        if shared not in self._sharing:
            group_id, cap = shared
            self._sharing[shared] = {}
            base = self._groups.get(group_id)
            if base is not None and base.known.cap == cap and base.shared is None:
                base.shared = shared
                self._sharing[shared][group_id] = None
        return self._sharing[shared]

    def _leave(self, group_id: str, group: _Group) -> None:
        """Leave the other groups of a shared evidence what is finished, not what will never be."""
        if group.shared is not None:
            for index in range(group.first, group.first + group.size):
                group.known.unfinished.pop(index, None)
            sharing = self._sharing[group.shared]
            del sharing[group_id]
            if sharing:
                self._dirty[next(iter(sharing))] = None  # what it has changed
            else:
                del self._sharing[group.shared]

    def _progress(self, event: RequestProgress) -> None:
        group = self._groups.get(event.group_id)
        index = event.index + (0 if group is None else group.first)
        if group is None or not 0 <= event.index < group.size or index in group.known.finished:
            self.ignored += 1
            return
        known = group.known
        if not (known.finished or known.unfinished):
            self.estimator.began(known)
        before = known.unfinished.get(index, 0)
        self._count(group, event, before)
        if event.finished:
            known.unfinished.pop(index, None)
            known.finished[index] = event.generated
            self.estimator.ended()
            self.error.count(group.estimate, event.generated)
        else:
            known.unfinished[index] = max(before, event.generated)
        self._dirty[event.group_id] = None

    def _remember(self, group_id: str, group: _Group) -> None:
        if group.shared is None and len(group.known.finished) == group.size:
            self.memory.keep(_prompt(group_id), group.known.finished.values())

    def _count(self, group: _Group, event: RequestProgress, before: int) -> None:
        ahead = event.generated > before
        if event.drafted and ahead and group.acceptance.add(event.drafted, event.accepted):
            self._acceptance.add(event.drafted, event.accepted)
            self._drafted[event.group_id] = None


def _prompt(group_id: str) -> str:
    return group_id.partition("/")[2]  # rollout ids have none (ids.group_id)


def _default(cap: int) -> Estimate:
    """Return the estimate that subscribers assume for a group until one is published."""
    return Estimate(float(cap))


def _estimate_moved(now: Estimate, before: Estimate) -> bool:
    moved = abs(math.log(now.tokens / before.tokens)), abs(now.spread - before.spread)
    return max(moved) > MIN_CHANGE


def _rates_moved(now: Sequence[int], before: Sequence[int]) -> bool:
    return any(abs(new - old) >= MIN_RATE_CHANGE for new, old in zip(now, before, strict=True))
