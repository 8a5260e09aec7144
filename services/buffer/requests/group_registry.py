"""Every prompt from its submission until it is forgotten: held, opened, finished, or refused.

The registry keeps rollouts and groups. What runs of an open group is the machine's: it opens the groups that
the registry hands it, tells it what was kept and finished, and drops the rest when asked.

Invariants (tests/invariants.py asserts them after every event):
- a group is held, open or finished; a rollout is there as long as one of its groups is;
- a rollout id belongs to one trainer, and to one use of it: what asks for something else under a later
  use ends the earlier one; answers name the use they belong to, and go to the life that asked last;
- all groups of a rollout are opened under one weight version; while submissions are held, none is;
- unfinished requests, those of held groups among them, are at most `max_requests`; finished groups hold
  at most `result_tokens`, or are one; open ones at most `unfinished_tokens`;
- a held group's deadline counts from its arrival, however often it is looked at;
- every group ends in one delivery, repeated when it is asked for again, or in one refusal.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

from seer.common import ids
from seer.common.group_events import GroupClosed
from seer.common.policy.fleet import Fleet
from seer.services.buffer.requests.admission import misfit
from seer.services.buffer.requests.events import (
    GroupsAcknowledged,
    GroupSpec,
    GroupsSubmitted,
    RolloutCancelled,
)
from seer.services.buffer.requests.instructions import (
    Accept,
    Deliver,
    Forget,
    Instruction,
    Refuse,
    Take,
)
from seer.services.buffer.requests.state import GroupState, Limits, RolloutState

REFUSED_AT_ONCE = 1000
"""Prompts that one `Refuse` names at most: their ids must fit a message."""

PARTIAL = 1000
"""Bound on rollouts remembered for a part that was collected: what is left has its weights, or is refused."""

Out = list[Instruction]
_Key = tuple[str, str, int]


class GroupRegistry:
    """See the module's docstring. `drop(group, out)` ends what runs and waits of an open group."""

    def __init__(
        self, limits: Limits, fleet: Fleet, counters: dict[str, int], drop: Callable[[GroupState, Out], None]
    ) -> None:
        self.rollouts: dict[str, RolloutState] = {}
        self.groups: dict[str, GroupState] = {}
        self.held: dict[str, GroupState] = {}  # in order of arrival
        self.finished: dict[str, GroupState] = {}  # in the order in which they finished
        self.finished_tokens = 0
        self.unfinished_tokens = 0
        self.unfinished_requests = 0
        self.weight_version = 0
        self.weights_digest = ""
        self.holding = False
        self.draining = False
        self._limits = limits
        self._fleet = fleet
        self._counters = counters
        self._drop = drop
        self._partial: OrderedDict[_Key, int] = OrderedDict()

    # --- submissions ---------------------------------------------------------------------

    def submitted(self, event: GroupsSubmitted, now: float, out: Out) -> list[GroupState]:
        """Take a submission; return the new groups that are to be opened."""
        rollout = self._rollout_of(event, now, out)
        if rollout is None:
            return []
        known = [
            spec for spec in event.groups if ids.group_id(event.rollout_id, spec.prompt_id) in self.groups
        ]
        again, fresh = self._sort(rollout, event, out)
        if known and not rollout.members and not any(spec.same for spec in known):  # nothing is left to match
            rollout = self._begin(event, now)
        rollout.life, rollout.submission = event.life, event.submission
        accepted = []
        for group in again:
            group.submission = event.submission
            if group.held_since is None:
                accepted.append(group.prompt_id)
            if group.done:
                out.append(Deliver(event.life, group.group_id))
        opened = self._admit(rollout, event, fresh, now, out) if fresh else []
        self._accept(rollout, accepted + [group.prompt_id for group in opened], out)
        return opened

    def _rollout_of(self, event: GroupsSubmitted, now: float, out: Out) -> RolloutState | None:
        """Return the rollout that a submission belongs to, a new one if need be; None: it has none."""
        rollout = self.rollouts.get(event.rollout_id)
        if rollout is not None and rollout.trainer != event.trainer:
            self._refuse(event, event.groups, "another trainer uses this rollout id: give another", out)
            return None
        if rollout is not None and rollout.life == event.life and 0 < event.submission < rollout.submission:
            return None  # it was overtaken, and nobody waits for it any more
        if rollout is not None and _conflict(rollout, event):
            if rollout.submission == event.submission:
                fix = "already submitted with another seed, rollout number, n, sampling or weight version"
                self._refuse(event, event.groups, f"rollout_id = {event.rollout_id!r}: {fix}", out)
                return None
            for group in list(rollout.members.values()):  # nobody waits for the earlier use any more
                self.remove(group, out)
            rollout = None
        if rollout is None:
            rollout = self._begin(event, now)
            if event.weight_version < 0:  # what is left of it has the weights of what was collected
                rollout.weight_version = self._partial.get(_key(rollout), -1)
        return rollout

    def _begin(self, event: GroupsSubmitted, now: float) -> RolloutState:
        return RolloutState(
            event.rollout_id, event.trainer, event.life, event.submission, event.params_digest, now
        )

    def _sort(
        self, rollout: RolloutState, event: GroupsSubmitted, out: Out
    ) -> tuple[list[GroupState], list[GroupSpec]]:
        """Return the groups that are known, and what is new."""
        again: list[GroupState] = []
        fresh: list[GroupSpec] = []
        clashing: list[GroupSpec] = []
        for spec in event.groups:
            known = self.groups.get(ids.group_id(rollout.rollout_id, spec.prompt_id))
            if known is None:
                fresh.append(spec)
            elif not spec.same and known.submission == event.submission:
                clashing.append(spec)
            elif not spec.same or (known.held_since is not None and known.awaits != event.weight_version):
                self.remove(known, out)
                fresh.append(spec)
            else:
                again.append(known)
        self._refuse(event, clashing, "already submitted with other tokens: give it another id", out)
        return again, fresh

    def _admit(
        self, rollout: RolloutState, event: GroupsSubmitted, fresh: list[GroupSpec], now: float, out: Out
    ) -> list[GroupState]:
        """Hold new groups, or return them to be opened; refuse what cannot be taken."""
        if self.draining:
            self._refuse(event, fresh, "this buffer is shutting down: submit to its successor", out)
            return []
        room = max(0, self._limits.max_requests - self.unfinished_requests) // event.n
        self._refuse(event, fresh[room:], self._too_many(), out)
        opened: list[GroupState] = []
        problems: dict[str, list[GroupSpec]] = {}
        for spec in fresh[:room]:
            group = GroupState(
                ids.group_id(rollout.rollout_id, spec.prompt_id), spec.prompt_id, rollout, event.n,
                spec.prompt_len, event.max_tokens, event.weight_version, event.submission, earlier=spec.kept,
            )  # fmt: skip
            problem = self._obstacle(group)
            if problem:
                problems.setdefault(problem, []).append(spec)
                continue
            self._enter(group, out)
            if self._must_wait(group):
                group.held_since = now
                self.held[group.group_id] = group
            else:
                opened.append(self._open(group))
        for problem, specs in problems.items():
            self._refuse(event, specs, problem, out)
        return opened

    def check_again(self, out: Out) -> list[GroupState]:
        """Look again at what is held; return what is to be opened now."""
        if self.holding or not self._fleet:
            return []
        opened: list[GroupState] = []
        problems: dict[str, list[GroupState]] = {}
        for group in [group for group in self.held.values() if not self._must_wait(group)]:
            problem = self._obstacle(group)
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

    def _must_wait(self, group: GroupState) -> bool:
        return self.holding or not self._fleet or group.awaits > self.weight_version

    def _obstacle(self, group: GroupState) -> str:
        """Return why a group can never be opened; "": nothing is known that speaks against it."""
        begun, live = group.rollout.weight_version, self.weight_version
        if 0 <= group.awaits < live:
            return f"weight version {group.awaits} is past: version {live} is live"
        if 0 <= begun < live:
            fix = "submit what is left under another rollout id"
            return f"its rollout began under weight version {begun}, and version {live} is live: {fix}"
        return "" if self._must_wait(group) else misfit(self._fleet, group.prompt_len, group.max_tokens)

    def _too_many(self) -> str:
        return (
            f"the buffer holds {self.unfinished_requests} unfinished requests and takes at most "
            f"{self._limits.max_requests}: submit fewer at a time, or raise buffer.max_requests"
        )

    def _enter(self, group: GroupState, out: Out) -> None:
        rollout = group.rollout
        self.rollouts[rollout.rollout_id] = rollout
        rollout.members[group.group_id] = self.groups[group.group_id] = group
        self.unfinished_requests += group.size
        out.append(Take(group.group_id, group.prompt_id))

    def _open(self, group: GroupState) -> GroupState:
        group.held_since = None
        group.rollout.weight_version = self.weight_version
        group.rollout.groups += 1
        group.rollout.requests += group.size
        return group

    def _accept(self, rollout: RolloutState, prompt_ids: list[str], out: Out) -> None:
        if prompt_ids:
            version = rollout.weight_version
            out.append(Accept(rollout.life, rollout.rollout_id, prompt_ids, rollout.submission, version))

    # --- what becomes of open groups -----------------------------------------------------

    def keep(self, group: GroupState, count: int, out: Out) -> None:
        """Count output tokens of an open group; past the limit, the youngest groups that have any fail."""
        group.kept += count
        self.unfinished_tokens += count
        if self.unfinished_tokens <= self._limits.unfinished_tokens:
            return
        most = self._limits.unfinished_tokens
        message = (
            f"unfinished responses hold over {most} tokens, and this prompt was the last to begin: "
            "submit less at a time, or raise buffer.unfinished_bytes"
        )
        for young in [group for group in reversed(self.groups.values()) if group.kept and not group.done]:
            if self.unfinished_tokens <= most:
                break
            self.fail([young], "failed", message, out)

    def finish(self, group: GroupState, now: float, out: Out) -> None:
        """Keep a group whose requests have all finished, and have it delivered to who asked last."""
        group.finished_at = now
        group.rollout.groups_finished += 1
        self.unfinished_requests -= group.size
        self.unfinished_tokens -= group.kept
        self.finished[group.group_id] = group
        self.finished_tokens += group.tokens
        out.append(GroupClosed(group.group_id))
        if (
            group.submission == group.rollout.submission
        ):  # else its trainer is about to ask for it again, or never will
            out.append(Deliver(group.rollout.life, group.group_id))
        while self.finished_tokens > self._limits.result_tokens and len(self.finished) > 1:
            self._expire(next(iter(self.finished.values())), out)

    def acknowledged(self, event: GroupsAcknowledged, out: Out) -> None:
        """Forget finished groups that their trainer holds."""
        rollout = self.rollouts.get(event.rollout_id)
        if rollout is None or rollout.trainer != event.trainer:
            return
        for prompt_id in event.prompt_ids:
            group = self.groups.get(ids.group_id(event.rollout_id, prompt_id))
            if group is not None and group.done and event.submission in (0, group.submission):
                rollout.collected = True
                self.remove(group, out)

    # --- what ends early -----------------------------------------------------------------

    def cancelled(self, event: RolloutCancelled, out: Out) -> None:
        """End what a trainer gives up; what is finished stays."""
        rollout = self.rollouts.get(event.rollout_id)
        if (
            rollout is None
            or rollout.trainer != event.trainer
            or event.submission not in (0, rollout.submission)
        ):
            return
        named = [ids.group_id(event.rollout_id, prompt_id) for prompt_id in event.prompt_ids]
        groups = [rollout.members[name] for name in named or list(rollout.members) if name in rollout.members]
        self.fail([group for group in groups if not group.done], "cancelled", "cancelled by its trainer", out)

    def trainer_lost(self, life: bytes, out: Out) -> None:
        """End what a trainer that gives no sign of life has unfinished."""
        for rollout in [rollout for rollout in self.rollouts.values() if rollout.life == life]:
            left = [group for group in rollout.members.values() if not group.done]
            message = "its trainer has given no sign of life for buffer.trainer_lease_seconds"
            self.fail(left, "cancelled", message, out)

    def aborted(self, message: str, out: Out) -> None:
        """End every open group."""
        open_ = [group for group in self.groups.values() if not group.done and group.held_since is None]
        self.fail(open_, "cancelled", message, out)

    def drain(self, out: Out) -> None:
        """Take nothing new any more, and give back what is held."""
        self.draining = True
        message = "this buffer is shutting down, and had not begun it: submit to its successor"
        self.fail(list(self.held.values()), "refused", message, out)

    def tick(self, now: float, out: Out) -> None:
        """Look at the deadlines of held and of finished groups."""
        waited = self._limits.engine_wait_seconds
        overdue = [group for group in self.held.values() if (group.held_since or 0.0) < now - waited]
        if overdue and not self.holding:  # an update and sleep have deadlines of their own
            late = [group for group in overdue if self._fleet]
            self.fail([group for group in overdue if not self._fleet], "failed", no_engine(waited), out)
            message = f"its weights were not live within {waited:g} s: update to them, then submit"
            self.fail(late, "failed", message, out)
        for group in list(self.finished.values()):
            if now - (group.finished_at or 0.0) <= self._limits.result_ttl_seconds:
                break
            self._expire(group, out)

    def fail(self, groups: Iterable[GroupState], code: str, message: str, out: Out) -> None:
        """End unfinished groups in an error."""
        by_submission: dict[tuple[str, int], list[GroupState]] = {}
        for group in groups:
            by_submission.setdefault((group.rollout.rollout_id, group.submission), []).append(group)
        for (rollout_id, submission), failed in by_submission.items():
            names = [group.prompt_id for group in failed]
            self._tell_refused(failed[0].rollout.life, rollout_id, names, code, message, submission, out)
            for group in failed:
                group.rollout.failed = True
                self.remove(group, out)

    def _refuse(
        self, event: GroupsSubmitted, specs: list[GroupSpec], message: str, out: Out, code: str = "refused"
    ) -> None:
        names = [spec.prompt_id for spec in specs]
        self._tell_refused(event.life, event.rollout_id, names, code, message, event.submission, out)

    def _tell_refused(
        self,
        life: bytes,
        rollout_id: str,
        names: list[str],
        code: str,
        message: str,
        submission: int,
        out: Out,
    ) -> None:
        self._counters["refused"] += len(names)
        for start in range(0, len(names), REFUSED_AT_ONCE):
            part = names[start : start + REFUSED_AT_ONCE]
            out.append(Refuse(life, rollout_id, part, code, message, submission))

    def _expire(self, group: GroupState, out: Out) -> None:
        self._counters["expired"] += 1
        self.remove(group, out)

    def remove(self, group: GroupState, out: Out) -> None:
        """Forget a group, whatever became of it."""
        if group.held_since is not None:
            del self.held[group.group_id]
        elif group.done:
            del self.finished[group.group_id]
            self.finished_tokens -= group.tokens
        else:
            self._drop(group, out)
            out.append(GroupClosed(group.group_id))
        if not group.done:
            self.unfinished_requests -= group.size
            self.unfinished_tokens -= group.kept
        del self.groups[group.group_id]
        del group.rollout.members[group.group_id]
        if not group.rollout.members:
            self._close(group.rollout)
        out.append(Forget(group.group_id))

    def _close(self, rollout: RolloutState) -> None:
        self.rollouts.pop(rollout.rollout_id, None)
        if rollout.collected and rollout.failed:
            self._partial[_key(rollout)] = rollout.weight_version
            if len(self._partial) > PARTIAL:
                self._partial.popitem(last=False)
        else:
            self._partial.pop(_key(rollout), None)


def _key(rollout: RolloutState) -> _Key:
    return rollout.trainer, rollout.rollout_id, rollout.params_digest


def no_engine(seconds: float) -> str:
    """Say that no engine came in time."""
    return f"no engine that fits registered within {seconds:g} s: start one"


def _conflict(rollout: RolloutState, event: GroupsSubmitted) -> bool:
    """Say whether a submission asks for something else than its rollout's groups have."""
    other_weights = -1 not in (rollout.weight_version, event.weight_version) and (
        rollout.weight_version != event.weight_version
    )
    return rollout.params_digest != event.params_digest or other_weights
