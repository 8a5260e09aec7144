"""Trajectories between two turns: what the buffer knows of them while an environment is at work.

A turn is a prompt like any other: its tokens are the context so far, and it is submitted, repeated, delivered
and acknowledged as all are. Here is only what must outlast it: how much was generated, where, and that more
is to come. So a trajectory that is forgotten costs time, never a token.

Invariants (tests/unit/test_away_trajectories.py, tests/property/test_buffer_machine.py):
- a trajectory is away from the end of a turn until its next turn is opened, it ends, `idle_seconds` have
  passed, or its trainer is lost; it is never away while its latest turn is open. Its latest turn is the one
  that was submitted last;
- a trajectory with `idle_seconds` 0 is never away: only the instance of its last turn is kept, as of those
  that stay away for too long; at most `MAX_PLACES` such are known;
- one turn at a time continues a trajectory; others of its place are prompts like any other;
- the context service knows a trajectory under the group of its latest turn, from the first turn until it is
  not away any more: its tokens so far are a bound from below, and its length once it has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from seer.common import ids
from seer.common.policy.length import Estimate
from seer.common.wire import Cancel, GroupClosed, GroupOpened, RequestProgress
from seer.services.buffer.requests.holdings import Holdings
from seer.services.buffer.requests.instructions import Instruction
from seer.services.buffer.requests.state import GroupState

Out = list[Instruction]
Key = tuple[str, str, int]
"""Trainer, id of the named group and index in it; or no trainer, the trajectory's own name and -1."""

MAX_PLACES = 10_000
"""Trajectories that nobody awaits, but of which it is known where they ran last."""


@dataclass(slots=True)
class Away:
    """A trajectory whose last turn has finished, `since` when (monotonic seconds).

    `opened` is what was published of that turn, `submission` its number; `address` is the trainer's.
    `generated` counts all turns so far. `estimate` and `acceptance` are those of its group; `last_instance`
    ran the turn. `share`: whose request it counts as.
    """

    opened: GroupOpened
    key: Key
    address: bytes
    submission: int
    generated: int
    since: float
    idle_seconds: float
    last_instance: str
    estimate: Estimate
    acceptance: list[int] = field(default_factory=list)
    share: str = ""

    @property
    def group_id(self) -> str:
        """The group of its last turn."""
        return self.opened.group_id


def progress_of_turns(group_id: str, generated: int, *, finished: bool = False) -> RequestProgress:
    """Return how far a trajectory is, under the group of a turn: `generated` counts all turns so far."""
    return RequestProgress(group_id=group_id, index=0, generated=generated, finished=finished)


def key_of(group: GroupState) -> Key:
    """Return which trajectory a turn is of."""
    if group.turn is not None and group.turn.trajectory:
        return "", group.turn.trajectory, -1
    return group.rollout.trainer, group.shared_id, group.first_index


class Trajectories:
    """See the module's docstring. `away` is by the group of the turn that finished last."""

    def __init__(self, holdings: Holdings) -> None:
        self._holdings = holdings
        self.away: dict[str, Away] = {}
        self.latest: dict[Key, str] = {}  # the group of each trajectory's latest turn, open or away
        self.returning: dict[str, str] = {}  # by the latest group: that of the next turn, not opened yet
        self.places: dict[Key, str] = {}  # where trajectories that nobody awaits ran last, the oldest first

    def continues(self, group: GroupState) -> bool:
        """Return whether a group is the next turn of a trajectory that is away, the first that came."""
        latest = self._latest(group)
        return latest in self.away and self.returning.get(latest, group.group_id) == group.group_id

    def counted(self, group: GroupState) -> bool:
        """Return whether a group takes the place of a trajectory that counts as a request of its trainer."""
        return self.continues(group) and self.away[self._latest(group)].share == group.rollout.share

    def _latest(self, group: GroupState) -> str:
        return "" if group.turn is None else self.latest.get(key_of(group), "")

    # --- turns ---------------------------------------------------------------------------

    def submitted(self, group: GroupState, out: Out) -> None:
        """Note that a group waits to be opened; a trajectory whose last turn had its id is forgotten."""
        known = self.away.get(group.group_id)
        if known is not None and (group.turn is None or known.key != key_of(group)):
            self._forget(known, out)
        if self.continues(group):
            latest = self._latest(group)
            self.returning[latest] = group.group_id
            self._holdings.add(self.away[latest].share, requests=-1)

    def withdrawn(self, group: GroupState) -> None:
        """Note that a group ended before it was opened."""
        latest = self._latest(group)
        if self.returning.get(latest) == group.group_id:
            del self.returning[latest]
            self._holdings.add(self.away[latest].share, requests=1)

    def opened(self, group: GroupState) -> Away | None:
        """Note that a turn begins; return what is known of its trajectory if that was away."""
        if group.turn is None:
            return None
        latest = self._latest(group)
        away = self.away.pop(latest, None)
        if self.returning.pop(latest, None) is None and away is not None:
            self._holdings.add(away.share, requests=-1)
        self.latest[key_of(group)] = group.group_id
        return away

    def repeated(self, group: GroupState, now: float, out: Out, *, room: bool) -> None:
        """Note that a turn is submitted again: by an incarnation that took those before it again, too.

        It is its trajectory's latest then. `room`: one more may be away.
        """
        latest = self._latest(group)
        if latest == group.group_id and latest in self.away:  # who took it up is awaited now, not who had it
            taken_up = self.away[latest]
            taken_up.address, taken_up.submission = group.rollout.address, group.submission
        if group.turn is None or latest == group.group_id or latest in self.returning:
            return
        if latest not in self.away and (latest or (group.done and not room)):
            return  # another turn is open
        away = self.opened(group)
        if group.done:
            estimate = away.estimate if away else Estimate(float(group.opened.cap))
            if self.ended(group, estimate, now):
                out += [group.opened, group.results[0].progress()]
        if away is not None:
            out.append(GroupClosed(group_id=away.group_id))

    def place(self, group: GroupState) -> str:
        """Return the instance that last ran a trajectory that nobody awaited; empty: none is known."""
        return "" if group.turn is None else self.places.pop(key_of(group), "")

    def ended(self, group: GroupState, estimate: Estimate, now: float) -> bool:
        """Note that a group has finished; return whether it was a turn, and its trajectory is away now."""
        if group.turn is None or self._latest(group) != group.group_id:
            return False
        view = group.results[0].view
        if not group.turn.idle_seconds:
            del self.latest[key_of(group)]
            self._keep_place(key_of(group), view.last_instance)
            return False
        self.away[group.group_id] = Away(
            group.opened, key_of(group), group.rollout.address, group.submission, view.produced, now,
            group.turn.idle_seconds, view.last_instance, estimate, group.acceptance, group.rollout.share,
        )  # fmt: skip
        self._holdings.add(group.rollout.share, requests=1)
        return True

    def dropped(self, group: GroupState) -> None:
        """Note that an open group ended early; if it was a turn, its trajectory is not known any more."""
        if self._latest(group) == group.group_id:
            del self.latest[key_of(group)]

    # --- ends ----------------------------------------------------------------------------

    def finished(self, trainer: str, named: Cancel, out: Out) -> None:
        """End trajectories that have no more turns, by their last turn."""
        for prompt_id in named.prompt_ids:
            away = self.away.get(ids.group_id(named.rollout_id, prompt_id))
            if away is None or away.key[0] != trainer:
                continue
            if named.submission == 0 or away.submission <= named.submission:
                out.append(progress_of_turns(away.group_id, away.generated, finished=True))
                self._forget(away, out)

    def trainer_lost(self, address: bytes, out: Out) -> None:
        """Forget those of a trainer that is gone."""
        self._forget_all(lambda away: away.address == address, out)

    def aborted(self, out: Out) -> None:
        """Forget all: their weights are about to change."""
        self._forget_all(lambda away: True, out)

    def tick(self, now: float, out: Out) -> None:
        """Forget those that have been away for too long, but for where they ran."""
        for away in self._forget_all(lambda away: now - away.since > away.idle_seconds, out):
            self._keep_place(away.key, away.last_instance)

    def estimates_changed(
        self, estimates: Mapping[str, Estimate], acceptance: Mapping[str, list[int]]
    ) -> None:
        """Keep what the context service published of trajectories that are away."""
        for group_id in estimates.keys() & self.away.keys():
            self.away[group_id].estimate = estimates[group_id]
        for group_id in acceptance.keys() & self.away.keys():
            self.away[group_id].acceptance = acceptance[group_id]

    def _keep_place(self, key: Key, instance: str) -> None:
        self.places.pop(key, None)
        self.places[key] = instance
        while len(self.places) > MAX_PLACES:
            del self.places[next(iter(self.places))]

    def _forget_all(self, of: Callable[[Away], bool], out: Out) -> list[Away]:
        """Forget some of those that are away, and return them."""
        forgotten = [away for away in self.away.values() if of(away)]
        for away in forgotten:
            self._forget(away, out)
        return forgotten

    def _forget(self, away: Away, out: Out) -> None:
        del self.away[away.group_id]
        del self.latest[away.key]
        if self.returning.pop(away.group_id, None) is None:
            self._holdings.add(away.share, requests=-1)
        out.append(GroupClosed(group_id=away.group_id))
