"""Every prompt from its submission until it is removed: held, open, finished or refused.

The registry has rollouts and groups. The request machine runs the requests of open groups: the registry
returns groups that are to be opened, the machine reports what was kept and finished, and ends requests of
groups that the registry removes.

Invariants (tests/invariants.py asserts them after every event):
- a group is held, open or finished; a rollout exists as long as one of its groups does;
- a rollout id belongs to one trainer and to one use of it: a later submission with other parameters ends the
  earlier use. Answers have the number of their submission and go to the incarnation that submitted last;
- all groups of a rollout are opened under one weight version, unless it is an open one, whose groups have
  parameters and weights of their own; while submissions are held, and once the buffer drains, no group is
  opened but next turns of trajectories that are away: those that a drained buffer held, clients submit to its
  successor, as all that is unfinished;
- what trainers hold is counted by trainer (`holdings.py`): requests, those of held groups too, are at most
  `max_requests` of one, and `ALL` times that of all; finished groups have at most `result_tokens`, or there
  is only one, and open groups `unfinished_tokens`: who has most for its share loses what is beyond that;
- a group is held as long as images of it are missing; a held group's deadline counts from its arrival,
  however often it is checked, but for images;
- every group ends in one delivery, which is repeated if the group is submitted again, or in one refusal.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

from seer.common import ids, wire
from seer.common.policy.fleet import Fleet
from seer.common.policy.length import Estimate
from seer.services.buffer.events import ToIncarnation
from seer.services.buffer.requests.admission import never_fits
from seer.services.buffer.requests.events import GroupSpec, GroupsSubmitted, ImagesStalled
from seer.services.buffer.requests.holdings import Holdings
from seer.services.buffer.requests.instructions import Deliver, Forget, Instruction, Take
from seer.services.buffer.requests.state import GroupState, Limits, RolloutState
from seer.services.buffer.requests.turn_placement import Trajectories

MAX_PROMPTS_PER_REFUSAL = 1000
"""Bound on the prompts of one `Refused`: their ids must fit into a message."""

MAX_PARTIAL = 1000
"""Bound on rollouts remembered after a part was collected: the rest must have the same weights."""

EXPECT_SECONDS = 10.0
"""How long weights that a trainer expects to be live may be missing: engines tell a buffer that was restarted
within that time which ones are."""

Out = list[Instruction]
_Key = tuple[str, str, int]


class GroupRegistry:
    """See the module's docstring. `drop(group, out)` ends the unfinished requests of an open group."""

    def __init__(
        self, limits: Limits, fleet: Fleet, counters: dict[str, int], drop: Callable[[GroupState, Out], None]
    ) -> None:
        self.rollouts: dict[str, RolloutState] = {}
        self.groups: dict[str, GroupState] = {}
        self.held: dict[str, GroupState] = {}  # in order of arrival
        self.finished: dict[str, GroupState] = {}  # in the order in which they finished
        self.holdings = Holdings(limits)
        self.trajectories = Trajectories(self.holdings)
        self.weight_version = 0
        self.weights_digest = self.weights_by = ""
        self.holding = False
        self.draining = False
        self._limits = limits
        self._fleet = fleet
        self._counters = counters
        self._drop = drop
        self._partial: OrderedDict[_Key, int] = OrderedDict()

    # --- submissions ---------------------------------------------------------------------

    def submitted(self, event: GroupsSubmitted, now: float, out: Out) -> list[GroupState]:
        """Register a submission; return the new groups that are to be opened."""
        rollout = self._rollout_of(event, now, out)
        if rollout is None:
            return []
        earlier = [
            spec for spec in event.groups if ids.group_id(event.rollout_id, spec.prompt_id) in self.groups
        ]
        known, new = self._match(rollout, event, out)
        if earlier and not rollout.members and not any(spec.same for spec in earlier):  # all were removed
            rollout = self._begin(event, now)
        if rollout.address != event.address:
            rollout.first_submission = event.submission
        rollout.address, rollout.submission = event.address, event.submission
        accepted = []
        for group in known:
            group.submission = event.submission
            if group.held_since is None:
                accepted.append(group.prompt_id)
                self.trajectories.repeated(group, now, out, room=self.holdings.room(rollout.share) > 0)
            if group.done:
                out.append(Deliver(event.address, group.group_id))
        opened = self._admit(rollout, event, new, now, out) if new else []
        self._accept(rollout, accepted + [group.prompt_id for group in opened], out)
        return opened

    def _rollout_of(self, event: GroupsSubmitted, now: float, out: Out) -> RolloutState | None:
        """Return the rollout of a submission, a new one if necessary; None: it is refused or outdated."""
        rollout = self.rollouts.get(event.rollout_id)
        if rollout is not None and rollout.trainer != event.trainer:
            self._refuse(event, event.groups, "another trainer uses this rollout id: give another", out)
            return None
        if (
            rollout is not None
            and rollout.address == event.address
            and 0 < event.submission < rollout.submission
        ):
            return None  # a later submission was received before it: no client waits for this one
        if rollout is not None and _conflict(rollout, event):
            if rollout.submission == event.submission:
                fix = "already submitted with another seed, rollout number, n, sampling or weight version"
                self._refuse(event, event.groups, f"rollout_id = {event.rollout_id!r}: {fix}", out)
                return None
            for group in list(rollout.members.values()):  # no client waits for the earlier use
                self.remove(group, out)
            rollout = None
        if rollout is None:
            rollout = self._begin(event, now)
            if event.weight_version < 0:  # its collected part fixes the weights of the rest
                rollout.weight_version = self._partial.get(_key(rollout), -1)
        return rollout

    def _begin(self, event: GroupsSubmitted, now: float) -> RolloutState:
        return RolloutState(
            event.rollout_id, event.trainer, event.address, event.submission,
            0 if event.open else event.params_digest, now, open=event.open, first_submission=event.submission,
            share=event.share or event.trainer,
        )  # fmt: skip

    def _match(
        self, rollout: RolloutState, event: GroupsSubmitted, out: Out
    ) -> tuple[list[GroupState], list[GroupSpec]]:
        """Return the groups of a submission that are known, and the prompts that are new."""
        known: list[GroupState] = []
        new: list[GroupSpec] = []
        conflicting: list[GroupSpec] = []
        for spec in event.groups:
            group = self.groups.get(ids.group_id(rollout.rollout_id, spec.prompt_id))
            if group is None:
                new.append(spec)
            elif not spec.same and group.submission == event.submission:
                conflicting.append(spec)
            elif not spec.same or (group.held_since is not None and group.awaits != event.weight_version):
                self.remove(group, out)
                new.append(spec)
            else:
                known.append(group)
        fix = "already submitted with other tokens, or another group or index: give it another id"
        self._refuse(event, conflicting, fix, out)
        return known, new

    def _admit(
        self, rollout: RolloutState, event: GroupsSubmitted, new: list[GroupSpec], now: float, out: Out
    ) -> list[GroupState]:
        """Hold new groups, or return them to be opened; refuse those that cannot be accepted."""
        room = self.holdings.room(rollout.share)
        opened: list[GroupState] = []
        problems: dict[str, list[GroupSpec]] = {}
        for spec in new:
            group = GroupState(
                ids.group_id(rollout.rollout_id, spec.prompt_id), spec.prompt_id, rollout, event.n,
                spec.prompt_len, event.max_tokens, event.weight_version, event.submission, earlier=spec.kept,
                shared_id=spec.shared_id, first_index=spec.first_index, turn=spec.turn,
                image_tokens=spec.image_tokens, missing=list(spec.missing), unfinished=event.n,
                stream=spec.stream, expects=event.expects,
            )  # fmt: skip
            counted = self.trajectories.counted(group)
            full = room < event.n and not counted
            problem = self.holdings.too_many(rollout.share) if full else self._problem_of(group)
            if problem:
                problems.setdefault(problem, []).append(spec)
                continue
            room -= 0 if counted else event.n
            self._add(group, out)
            if self._must_hold(group) or group.missing:
                group.held_since = now
                self.held[group.group_id] = group
            else:
                opened.append(self._open(group))
        for problem, specs in problems.items():
            self._refuse(event, specs, problem, out)
        return opened

    def open_held(self, out: Out) -> list[GroupState]:
        """Check held groups; return those that are to be opened now."""
        opened: list[GroupState] = []
        problems: dict[str, list[GroupState]] = {}
        for group in [each for each in self.held.values() if not (each.missing or self._must_hold(each))]:
            problem = self._problem_of(group)
            if problem:
                problems.setdefault(problem, []).append(group)
            else:
                del self.held[group.group_id]
                opened.append(self._open(group))
        for problem, groups in problems.items():
            self.fail(groups, "refused", problem, out)
        accepted: dict[str, list[GroupState]] = {}
        for group in opened:
            accepted.setdefault(group.rollout.rollout_id, []).append(group)
        for groups in accepted.values():
            self._accept(groups[0].rollout, [group.prompt_id for group in groups], out)
        return opened

    def arrived(self, image: str, out: Out) -> list[GroupState]:
        """Note that an image is there; return the groups that are to be opened now."""
        waited = [group for group in self.held.values() if image in group.missing]
        for group in waited:
            group.missing.remove(image)
        return self.open_held(out) if waited else []

    def stalled(self, event: ImagesStalled, out: Out) -> None:
        """End groups whose images do not come."""
        waiting = [self.held[group_id] for group_id in event.groups if group_id in self.held]
        self.fail([group for group in waiting if group.missing], "refused", event.message, out)

    def _must_hold(self, group: GroupState) -> bool:
        held = (self.holding or self.draining) and not self.trajectories.continues(group)
        return held or not self._fleet or group.awaits > self.weight_version

    def _problem_of(self, group: GroupState) -> str:
        """Return why a group can never be opened; empty: no reason is known."""
        begun, live = group.rollout.weight_version, self.weight_version
        if 0 <= group.awaits < live:
            return (
                self._unexpected(group)
                if group.expects
                else f"weight version {group.awaits} is past: {self._live}"
            )
        if 0 <= begun < live:
            fix = "submit what is left under another rollout id"
            return f"its rollout began under weight version {begun}, and {self._live}: {fix}"
        if self._must_hold(group):
            return ""
        return never_fits(self._fleet, group.prompt_len, group.max_tokens, group.image_tokens)

    @property
    def _live(self) -> str:
        by = f", by an update of {self.weights_by}" if self.weights_by else ""
        return f"version {self.weight_version} is live{by}"

    def _unexpected(self, group: GroupState) -> str:
        return f"expects weight version {group.awaits}, and {self._live}: update, or expect that version"

    def _add(self, group: GroupState, out: Out) -> None:
        rollout = group.rollout
        self.rollouts[rollout.rollout_id] = rollout
        rollout.members[group.group_id] = self.groups[group.group_id] = group
        self.holdings.add(rollout.share, requests=group.size)
        self.trajectories.submitted(group, out)
        out.append(Take(group.group_id, group.prompt_id))

    def _open(self, group: GroupState) -> GroupState:
        group.held_since = None
        if not group.rollout.open:
            group.rollout.weight_version = self.weight_version
        group.rollout.groups += 1
        group.rollout.requests += group.size
        return group

    def _accept(self, rollout: RolloutState, prompt_ids: list[str], out: Out) -> None:
        for start in range(0, len(prompt_ids), wire.MAX_PROMPTS):  # more may be held, and fit no message
            accepted = wire.Accepted(
                rollout_id=rollout.rollout_id,
                prompt_ids=prompt_ids[start : start + wire.MAX_PROMPTS],
                submission=rollout.submission,
                weight_version=rollout.weight_version,
            )
            out.append(ToIncarnation(rollout.address, accepted))

    # --- open and finished groups --------------------------------------------------------

    def keep(self, group: GroupState, count: int, out: Out, beside: int = 0) -> None:
        """Count output tokens of an open group; over the limit, young groups of who has most fail.

        The bytes `beside` them count as tokens of 8 bytes each.
        """
        group.kept += count
        group.beside += beside // 8
        self.holdings.add(group.rollout.share, tokens=count + beside // 8)
        most = self._limits.unfinished_tokens
        while self.holdings.all.tokens > most:
            share = self.holdings.most_tokens()
            begun = (each for each in reversed(self.groups.values()) if each.held and not each.done)
            young = next(each for each in begun if each.rollout.share == share)
            message = (
                f"unfinished responses hold over {most} tokens, most of them trainer {share!r}'s, and this "
                "prompt of it was the last to begin: submit less at a time, or raise buffer.unfinished_bytes"
            )
            self.fail([young], "failed", message, out)

    def finish(self, group: GroupState, estimate: Estimate, now: float, out: Out) -> None:
        """Keep a group whose requests have all finished, and deliver it to the latest submitter."""
        group.finished_at = now
        group.rollout.groups_finished += 1
        share = group.rollout.share
        self.holdings.add(share, requests=-group.size, tokens=-group.held, results=group.tokens)
        self.finished[group.group_id] = group
        if not self.trajectories.ended(group, estimate, now):
            out.append(wire.GroupClosed(group_id=group.group_id))
        # If there was a later submission without it, its trainer is about to submit it again, or never will.
        if group.submission >= _earliest_awaited(group.rollout):
            out.append(Deliver(group.rollout.address, group.group_id))
        while self.holdings.all.results > self._limits.result_tokens and len(self.finished) > 1:
            most = self.holdings.most_results(
                but=(share, group.tokens)
            )  # its trainer has not seen this one yet
            oldest = next(each for each in self.finished.values() if each.rollout.share == most)
            self._expire(oldest, out)

    def acknowledged(self, trainer: str, named: wire.Acknowledge, out: Out) -> None:
        """Remove finished groups that their trainer has received."""
        rollout = self.rollouts.get(named.rollout_id)
        if rollout is None or rollout.trainer != trainer:
            return
        for prompt_id in named.prompt_ids:
            group = self.groups.get(ids.group_id(named.rollout_id, prompt_id))
            if group is not None and group.done and named.submission in (0, group.submission):
                rollout.collected = True
                self.remove(group, out)

    # --- groups that end early -----------------------------------------------------------

    def cancelled(self, trainer: str, named: wire.Cancel, out: Out) -> None:
        """End the unfinished groups that a trainer cancels, and trajectories by their last turn."""
        self.trajectories.finished(trainer, named, out)
        rollout = self.rollouts.get(named.rollout_id)
        if rollout is None or rollout.trainer != trainer:
            return
        if not rollout.open and named.submission not in (0, rollout.submission):
            return
        of = [ids.group_id(named.rollout_id, prompt_id) for prompt_id in dict.fromkeys(named.prompt_ids)]
        groups = [rollout.members[name] for name in of or list(rollout.members) if name in rollout.members]
        if rollout.open and named.submission:  # later ones are other prompts, or wanted again
            groups = [group for group in groups if group.submission <= named.submission]
        self.fail([group for group in groups if not group.done], "cancelled", "cancelled by its trainer", out)

    def trainer_lost(self, address: bytes, out: Out) -> None:
        """End the unfinished groups of an incarnation that said goodbye, or has been silent for too long."""
        self.trajectories.trainer_lost(address, out)
        for rollout in [rollout for rollout in self.rollouts.values() if rollout.address == address]:
            left = [group for group in rollout.members.values() if not group.done]
            message = "its trainer has left, or given no sign of life for buffer.trainer_lease_seconds"
            self.fail(left, "cancelled", message, out)

    def aborted(self, message: str, out: Out) -> None:
        """End all open groups."""
        self.trajectories.aborted(out)
        open_ = [group for group in self.groups.values() if not group.done and group.held_since is None]
        self.fail(open_, "cancelled", message, out)

    def tick(self, now: float, out: Out) -> None:
        """Check the deadlines of held and of finished groups, and of trajectories that are away."""
        self.trajectories.tick(now, out)
        waited = self._limits.engine_wait_seconds
        since = now - waited  # images have a deadline of their own
        overdue = [
            each for each in self.held.values() if (each.held_since or 0.0) < since and not each.missing
        ]
        if not (self.holding or self.draining):
            self._refuse_unexpected(now, out)
        if overdue and not (self.holding or self.draining):  # they have deadlines of their own, or end
            late = [group for group in overdue if self._fleet]
            self.fail([group for group in overdue if not self._fleet], "failed", no_engine(waited), out)
            message = f"its weights were not live within {waited:g} s: update to them, then submit"
            self.fail(late, "failed", message, out)
        for group in list(self.finished.values()):
            if now - (group.finished_at or 0.0) <= self._limits.result_ttl_seconds:
                break
            self._expire(group, out)

    def _refuse_unexpected(self, now: float, out: Out) -> None:
        """End held groups that expect a later version than is live, though engines are there."""
        since = now - EXPECT_SECONDS
        early = [each for each in self.held.values() if each.expects and (each.held_since or 0.0) < since]
        for group in early if self._fleet else ():
            if group.awaits > self.weight_version:
                self.fail([group], "refused", self._unexpected(group), out)

    def fail(self, groups: Iterable[GroupState], code: str, message: str, out: Out) -> None:
        """End unfinished groups with an error."""
        by_submission: dict[tuple[str, int], list[GroupState]] = {}
        for group in groups:
            by_submission.setdefault((group.rollout.rollout_id, group.submission), []).append(group)
        for (rollout_id, submission), failed in by_submission.items():
            kept = {group.prompt_id: group.kept for group in failed}
            self._send_refusal(failed[0].rollout.address, rollout_id, kept, code, message, submission, out)
            for group in failed:
                group.rollout.failed = True
                self.remove(group, out)

    def _refuse(self, event: GroupsSubmitted, specs: list[GroupSpec], message: str, out: Out) -> None:
        none = {spec.prompt_id: 0 for spec in specs}
        self._send_refusal(event.address, event.rollout_id, none, "refused", message, event.submission, out)

    def _send_refusal(
        self,
        address: bytes,
        rollout_id: str,
        kept: dict[str, int],
        code: str,
        message: str,
        submission: int,
        out: Out,
    ) -> None:
        self._counters["refused"] += len(kept)
        names = list(kept)
        for start in range(0, len(names), MAX_PROMPTS_PER_REFUSAL):
            part = names[start : start + MAX_PROMPTS_PER_REFUSAL]
            discarded = [kept[name] for name in part] if any(kept.values()) else []
            refused = wire.Refused(
                code=code,
                message=message,
                rollout_id=rollout_id,
                prompt_ids=part,
                submission=submission,
                discarded=discarded,
            )
            out.append(ToIncarnation(address, refused))

    def _expire(self, group: GroupState, out: Out) -> None:
        self._counters["expired"] += 1
        self.remove(group, out)

    def remove(self, group: GroupState, out: Out) -> None:
        """Remove a group in any state."""
        if group.held_since is not None:
            del self.held[group.group_id]
            self.trajectories.withdrawn(group)
        elif group.done:
            del self.finished[group.group_id]
            self.holdings.add(group.rollout.share, results=-group.tokens)
        else:
            self._drop(group, out)
            self.trajectories.dropped(group)
            out.append(wire.GroupClosed(group_id=group.group_id))
        if not group.done:
            self.holdings.add(group.rollout.share, requests=-group.size, tokens=-group.held)
        group.results = []  # they refer to the group: a cycle would wait for the garbage collector
        del self.groups[group.group_id]
        del group.rollout.members[group.group_id]
        if not group.rollout.members:
            self._close(group.rollout)
        out.append(Forget(group.group_id))

    def _close(self, rollout: RolloutState) -> None:
        self.rollouts.pop(rollout.rollout_id, None)
        if rollout.collected and rollout.failed and not rollout.open:
            self._partial[_key(rollout)] = rollout.weight_version
            if len(self._partial) > MAX_PARTIAL:
                self._partial.popitem(last=False)
        else:
            self._partial.pop(_key(rollout), None)


def _key(rollout: RolloutState) -> _Key:
    return rollout.trainer, rollout.rollout_id, rollout.params_digest


def _earliest_awaited(rollout: RolloutState) -> int:
    """Return the first submission whose answers its trainer still awaits."""
    return rollout.first_submission if rollout.open else rollout.submission


def no_engine(seconds: float) -> str:
    """Return the error for groups that no engine could run in time."""
    return f"no engine that fits registered within {seconds:g} s: start one"


def _conflict(rollout: RolloutState, event: GroupsSubmitted) -> bool:
    """Return whether a submission has other parameters or weights than its rollout's groups must have."""
    if rollout.open or event.open:
        return rollout.open != event.open
    other_weights = -1 not in (rollout.weight_version, event.weight_version) and (
        rollout.weight_version != event.weight_version
    )
    return rollout.params_digest != event.params_digest or other_weights
