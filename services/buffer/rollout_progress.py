"""A look at all open requests: when rollouts will have ended, and which responses are longest.

There may be 200,000 requests, and the buffer has other work, so `survey` yields between a few of them.

Invariants (tests/cluster/test_observer.py):
- it changes nothing, and groups may come and go between two steps;
- a rollout's estimate is that of its own work, at the rate of its own running requests.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import nlargest

from seer.common import ids, wire
from seer.common.policy.eta import Pace, Work, eta_seconds, expected_remainder
from seer.services.buffer.requests.request_machine import RequestMachine
from seer.services.buffer.requests.state import GroupState, RequestState, RolloutState

STEP = 500
"""Requests between two yields: one or two milliseconds."""


@dataclass(slots=True)
class Survey:
    """What is expected: seconds to the end by rollout and of all, and requests with most tokens first."""

    etas: dict[str, float | None] = field(default_factory=dict)
    eta: float | None = None
    longest: list[RequestState] = field(default_factory=list)


def newest(machine: RequestMachine) -> list[RolloutState]:
    """Return the rollouts that a `Status` names, the last submitted first."""
    unfinished = {each.rollout.rollout_id for each in machine.groups.values() if not each.done}
    rollouts = [each for each in machine.rollouts.values() if each.rollout_id in unfinished]
    return nlargest(wire.MAX_ROLLOUTS, rollouts, key=lambda each: each.submitted)


def survey(machine: RequestMachine, pace: Pace) -> Iterator[Survey | None]:
    """Look at all open requests; yield None now and then, and the outcome at last."""
    held = {each.rollout.rollout_id for each in machine.registry.held.values()}
    named = {
        each.rollout_id: each for each in newest(machine) if not each.open and each.rollout_id not in held
    }
    works = {name: Work(each.requests - each.finished) for name, each in named.items()}
    everything = Work(len(machine.requests))
    longest: list[RequestState] = []
    seen = 0
    for group in [each for each in machine.groups.values() if not each.done and each.held_since is None]:
        estimate = machine.estimates.get(group.group_id)
        if estimate is None:  # it ended meanwhile
            continue
        found = [each for each in _requests(machine, group) if not each.finish]
        seen += 1 + len(found)
        if not found:
            continue
        generated, cap = [each.view.produced for each in found], found[0].view.most
        remainder = sum(expected_remainder(estimate, each, cap) for each in generated)
        running = sum(bool(each.instance) for each in found)
        everything.add(estimate, generated, cap, remainder, running)
        work = works.get(group.rollout.rollout_id) if not group.rollout.open else None
        if work is not None:
            work.add(estimate, generated, cap, remainder, running)
        if len(longest) < wire.MAX_LONGEST or max(generated) > _tokens(longest[-1]):
            longest = nlargest(wire.MAX_LONGEST, [*longest, *found], key=_tokens)
        if seen >= STEP:
            seen = 0
            yield None
    etas = {name: eta_seconds(works[name], pace, each.finished) for name, each in named.items()}
    finished = sum(each.finished for each in machine.rollouts.values())
    yield Survey(etas, eta_seconds(everything, pace, finished), longest)


def _requests(machine: RequestMachine, group: GroupState) -> Iterator[RequestState]:
    for index in range(group.size):
        request = machine.requests.get(ids.request_id(group.group_id, index))
        if request is not None:
            yield request


def _tokens(request: RequestState) -> int:
    return request.view.produced
