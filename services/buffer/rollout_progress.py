"""A look at all open requests: when rollouts will have ended, and which responses are longest.

There may be 200,000 requests, and the buffer has other work, so `survey` yields between a few of them.

Invariants (tests/cluster/test_observer.py):
- it changes nothing, and groups may come and go between two steps;
- a rollout's estimate is that of its own work, at the rate of its own running requests;
- of the responses to one prompt one is named, the longest that runs, and how many are open and run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import nlargest

from seer.common import ids, wire
from seer.common.policy.eta import SHOWN_FROM, Placed, Room, Work, eta_seconds, first_range, shortened
from seer.common.policy.length import Estimate
from seer.common.policy.remaining_tokens import EVEN, EndRates, Remainders
from seer.services.buffer.requests.request_machine import RequestMachine
from seer.services.buffer.requests.state import GroupState, RequestState, RolloutState
from seer.services.buffer.running_chunks import InFlight
from seer.services.buffer.statistics import Statistics

STEP = 250
"""Requests between two yields: a millisecond, or two while little is known of lengths."""

FRESH = 64
"""Curves that are kept: early, each group needs that of its estimate and that of the `shortened` one."""

GROUP_COSTS = 8
"""A group costs as much as so many requests, beside its own."""


@dataclass(slots=True, eq=False)
class OpenPrompt:
    """The longest response to a prompt that runs, else that waits, with its `tokens`.

    `running` of the `open` responses run.
    """

    longest: RequestState
    tokens: int
    open: int = 0
    running: int = 0


@dataclass(slots=True)
class Survey:
    """What is expected: seconds to the end by rollout and of all, and the prompts with the longest responses.

    `ranges`: by rollout, the least and most seconds, where there is no estimate yet. `made`: the tokens that
    each rollout has, with those of chunks that run. `ratios`: those of `EndRates`.
    """

    etas: dict[str, float | None] = field(default_factory=dict)
    eta: float | None = None
    ranges: dict[str, tuple[float, float] | None] = field(default_factory=dict)
    made: dict[str, int] = field(default_factory=dict)
    longest: list[OpenPrompt] = field(default_factory=list)
    ratios: tuple[float, ...] = EVEN


def newest(machine: RequestMachine) -> list[RolloutState]:
    """Return the rollouts that a `Status` names, the last submitted first."""
    unfinished = {each.rollout.rollout_id for each in machine.groups.values() if not each.done}
    rollouts = [each for each in machine.rollouts.values() if each.rollout_id in unfinished]
    return nlargest(wire.MAX_ROLLOUTS, rollouts, key=lambda each: each.submitted)


def survey(machine: RequestMachine, statistics: Statistics, now: float) -> Iterator[Survey | None]:
    """Look at all open requests; yield None now and then, and the outcome at last."""
    in_flight = InFlight(statistics.running, now)
    rates = statistics.ends.copy()
    for engine in statistics.running.engines:
        requests = statistics.running.requests(engine)
        for at in range(0, len(requests), STEP):  # without admission, an engine may have all
            _add_running(rates, machine, requests[at : at + STEP], engine, in_flight)
            yield None
    look = _Look(machine, rates.ratios())
    rollouts = {each.rollout_id: _Outlook(each) for each in newest(machine)}
    held = {each.rollout.rollout_id for each in machine.registry.held.values()}
    everything, longest = Work(len(machine.requests)), _Longest()
    seen = 0
    for group in [each for each in machine.groups.values() if not each.done and each.held_since is None]:
        estimate = machine.estimates.get(group.group_id)
        if estimate is None:  # it ended meanwhile
            continue
        found = [each for each in _requests(machine, group) if not each.finish]
        seen += GROUP_COSTS + len(found)
        if not found:
            continue
        tokens = [in_flight.tokens(each.instance, each.view.request_id) for each in found]
        of = _Open(found, tokens)
        look.add(everything, estimate, of)
        if outlook := rollouts.get(group.rollout.rollout_id):
            outlook.add(look, estimate, of)
        longest.add(group, of)
        if seen >= STEP:
            seen = 0
            yield None
    pace, room = statistics.pace, _room(machine)
    running = max(everything.running, 1)
    rate = sum(statistics.running.rate(name) for name in machine.instances) / running
    named = {name: each for name, each in rollouts.items() if not each.rollout.open and name not in held}
    yield Survey(
        {
            name: eta_seconds(each.work, room.part(each.work.running / running), pace, each.rollout.finished)
            for name, each in named.items()
        },
        eta_seconds(everything, room, pace, sum(each.finished for each in machine.rollouts.values())),
        {name: each.range(rate) for name, each in named.items()},
        {name: each.rollout.counters["tokens"] + int(each.in_flight) for name, each in rollouts.items()},
        longest.prompts,
        look.ratios,
    )


def _add_running(
    rates: EndRates, machine: RequestMachine, requests: list[str], engine: str, in_flight: InFlight
) -> None:
    """Count what running chunks generated without an end: else only those that end early were counted."""
    for request_id in requests:
        request = machine.requests.get(request_id)
        estimate = machine.estimates.get(request_id.rpartition("#")[0])
        if request is not None and estimate is not None:
            kept = request.view.produced
            rates.lived(estimate, kept, kept + int(in_flight.tokens(engine, request_id)), False)


def _room(machine: RequestMachine) -> Room:
    """Return what all engines have room for."""
    of = [each.capacity for each in machine.instances.values()]
    kv_tokens = sum(each.kv_blocks * each.block_size for each in of)
    return Room(len(of), sum(each.max_num_seqs for each in of), kv_tokens)


class _Open:
    """The open responses of a group: the tokens that each `has` by now, with those of running chunks."""

    def __init__(self, requests: list[RequestState], in_flight: list[float]) -> None:
        self.requests, self.in_flight = requests, sum(in_flight)
        self.has = [each.view.produced + int(more) for each, more in zip(requests, in_flight, strict=True)]
        self.cap = requests[0].view.most
        self.running = sum(bool(each.instance) for each in requests)


class _Look:
    """What is left of groups. Those of which nothing is known have one estimate, and share a curve."""

    def __init__(self, machine: RequestMachine, ratios: tuple[float, ...]) -> None:
        self._machine, self.ratios = machine, ratios
        engines = [each.capacity for each in machine.instances.values()]
        self._block = max((each.block_size for each in engines), default=0)
        parts = sum(each.parts for each in engines)
        self._whole = _room(machine).kv_tokens / parts if parts else math.inf
        self._fresh: dict[tuple[Estimate, int], Remainders] = {}

    def add(self, work: Work, estimate: Estimate, of: _Open) -> None:
        """Add a group's open responses to what is left."""
        view, least = of.requests[0].view, min(of.has)
        remainders = self._fresh.get((estimate, of.cap)) if not least else None
        if remainders is None:
            remainders = Remainders(estimate, of.cap, self.ratios, least)
            if not least:
                if len(self._fresh) == FRESH:
                    self._fresh.clear()
                self._fresh[estimate, of.cap] = remainders
        scheduler = self._machine.scheduler
        placed = Placed()
        if scheduler.policy.admission:
            placed = Placed((scheduler.chunk(view) + self._block) / 2, self._whole)
        work.add(remainders, of.has, view.prompt_len, of.running, placed)


class _Outlook:
    """What is left of a rollout; early, also if lengths are short, and if all reach their caps."""

    def __init__(self, rollout: RolloutState) -> None:
        self.rollout = rollout
        left = rollout.requests - rollout.finished
        self.work, self.short, self.capped = Work(left), Work(left), Work(left)
        self.early = not rollout.open and rollout.finished < SHOWN_FROM * rollout.requests
        self.in_flight = 0.0

    def add(self, look: _Look, estimate: Estimate, of: _Open) -> None:
        """Add the open responses of a group."""
        look.add(self.work, estimate, of)
        self.in_flight += of.in_flight
        if self.early:
            look.add(self.short, shortened(estimate), of)
            self.capped.add_capped(of.has, of.cap, of.running)

    def range(self, rate: float) -> tuple[float, float] | None:
        """Return the range of its end. `rate`: tokens/s of a running request, by what engines report."""
        return first_range(self.short, self.capped, rate * self.short.running) if self.early else None


class _Longest:
    """The prompts with the longest open responses, the longest first; groups of one name are one prompt."""

    def __init__(self) -> None:
        self.prompts: list[OpenPrompt] = []
        self._shared: dict[str, OpenPrompt] = {}

    def add(self, group: GroupState, of: _Open) -> None:
        runs, tokens, first = max(
            (bool(each.instance), tokens, -number)
            for number, (each, tokens) in enumerate(zip(of.requests, of.has, strict=True))
        )
        request = of.requests[-first]
        prompt = self._shared.get(group.shared_id) if group.shared_id else None
        if prompt is None:
            prompt = OpenPrompt(request, tokens)
            if group.shared_id:
                self._shared[group.shared_id] = prompt
        elif (runs, tokens) > _order(prompt):
            prompt.longest, prompt.tokens = request, tokens
        prompt.open += len(of.requests)
        prompt.running += of.running
        if prompt not in self.prompts:
            if len(self.prompts) == wire.MAX_LONGEST and _order(prompt) <= _order(self.prompts[-1]):
                return
            self.prompts.append(prompt)
        self.prompts = nlargest(wire.MAX_LONGEST, self.prompts, key=_order)


def _order(prompt: OpenPrompt) -> tuple[bool, int]:
    """Sort those that run first, then by tokens."""
    return prompt.running > 0, prompt.tokens


def _requests(machine: RequestMachine, group: GroupState) -> Iterator[RequestState]:
    for index in range(group.size):
        request = machine.requests.get(ids.request_id(group.group_id, index))
        if request is not None:
            yield request
