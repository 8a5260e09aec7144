"""Answers `StatusRequest`s: what the machines hold and did (`statistics.py`, `rollout_progress.py`).

Invariants (tests/cluster/test_observer.py):
- whoever asks is answered, after a look at all open requests, but not later than `LEAST_SECONDS` because of
  it; those who ask at the same time share it;
- such looks take at most `MOST_OF_TIME` of the buffer's time, however many ask: until the next one, answers
  have what the last one saw;
- an answer takes nothing from the next one: any number of observers see the same.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from seer import __version__
from seer.common import wire
from seer.common.clock import Clock
from seer.common.net.hub import MAX_PEERS
from seer.common.net.identity import Identity
from seer.common.policy.remaining_tokens import Remainders
from seer.common.policy.rollout_bound import bound_seconds
from seer.common.types import InstanceStats
from seer.services.buffer.buffer_machine import BufferMachine
from seer.services.buffer.log.outage import Outage
from seer.services.buffer.requests.state import RolloutState
from seer.services.buffer.response_store import TOKEN_BYTES
from seer.services.buffer.rollout_progress import OpenPrompt, Survey, newest, survey
from seer.services.buffer.statistics import Statistics

MOST_OF_TIME = 0.05
LEAST_SECONDS = 0.5
"""A look at all requests is used for as long, and for as long as it took / `MOST_OF_TIME`."""

LAG_SECONDS = 0.1
"""How often the event loop's lag is measured."""

LAG_WINDOW_SECONDS = 60.0
"""The largest lag within so long is told: no observer has to know when another one asked."""


class LoopLag:
    """How late the event loop woke up, at most, within the last `LAG_WINDOW_SECONDS`."""

    def __init__(self) -> None:
        self._rising: deque[tuple[float, float]] = deque()  # lags fall from left to right

    def add(self, now: float, lag: float) -> None:
        """Note a lag."""
        while self._rising and self._rising[-1][1] <= lag:
            self._rising.pop()
        self._rising.append((now, lag))
        self.largest(now)

    def largest(self, now: float) -> float:
        """Return the largest lag of the window."""
        while self._rising and self._rising[0][0] < now - LAG_WINDOW_SECONDS:
            self._rising.popleft()
        return self._rising[0][1] if self._rising else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """What the rest of the buffer knows: by engine, statistics and incarnations so far; and more."""

    me: Identity
    services: dict[str, str]
    stats: Mapping[str, InstanceStats]
    incarnations: Mapping[str, int]
    counters: Mapping[str, int]
    uptime: Callable[[], float]
    sockets: Callable[[], Mapping[str, Mapping[str, int]]]
    outages: Callable[[], Mapping[str, Outage | None]]


class StatusDesk:
    """`reply(address, status)` sends an answer; `mismatch` is what a trainer told last."""

    def __init__(
        self,
        clock: Clock,
        machine: BufferMachine,
        statistics: Statistics,
        sources: Sources,
        reply: Callable[[bytes, wire.Status], Awaitable[None]],
    ) -> None:
        self._clock, self._machine, self._statistics = clock, machine, statistics
        self._sources, self._reply = sources, reply
        self._asking: dict[bytes, None] = {}
        self._asked = asyncio.Event()
        self._survey = Survey()
        self._seen_at, self._good_until = 0.0, float("-inf")
        self._lag = LoopLag()
        self.mismatch: wire.Mismatch | None = None

    def ask(self, address: bytes) -> None:
        """Have a peer answered soon; beyond `MAX_PEERS` at a time, the message is dropped."""
        if len(self._asking) < MAX_PEERS:
            self._asking[address] = None
            self._asked.set()

    async def run(self) -> None:
        """Answer until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            looking: asyncio.Task[None] | None = None
            while True:
                await self._asked.wait()
                self._asked.clear()
                if looking is None and self._clock.now() >= self._good_until:
                    looking = tasks.create_task(self._look())
                if looking is not None:
                    await asyncio.wait([looking], timeout=LEAST_SECONDS)
                    looking = None if looking.done() else looking
                asking, self._asking = self._asking, {}
                status = self.status()
                for address in asking:
                    await self._reply(address, status)

    async def watch_lag(self) -> None:
        """Measure the event loop's lag until cancelled."""
        while True:
            due = self._clock.now() + LAG_SECONDS
            await self._clock.sleep(LAG_SECONDS)
            now = self._clock.now()
            self._lag.add(now, max(0.0, now - due))

    async def _look(self) -> None:
        took = 0.0
        looking = survey(self._machine.requests, self._statistics, self._clock.now())
        seen: Survey | None = None
        while seen is None:
            before = self._clock.now()
            seen = next(looking)
            took += self._clock.now() - before
            await asyncio.sleep(0)
        self._survey, self._seen_at = seen, self._clock.now()
        self._good_until = self._seen_at + max(LEAST_SECONDS, took / MOST_OF_TIME)

    # --- the answer ------------------------------------------------------------------------

    def status(self) -> wire.Status:
        """Return the state, with what the last look saw."""
        machine, weights, of = self._machine.requests, self._machine.weights, self._sources
        statistics, now = self._statistics, self._clock.now()
        return wire.Status(
            name=of.me.name,
            incarnation=of.me.incarnation,
            policy=machine.policy.name,
            instances=self._instances(),
            rollouts=len(machine.rollouts),
            requests_waiting=machine.waiting,
            requests_running=machine.instances.chunks,
            counters=machine.counters | dict(of.counters),
            uptime_seconds=of.uptime(),
            weight_version=weights.live.version if weights.live else 0,
            weights_digest=weights.live.digest if weights.live else "",
            quarantined=weights.quarantined,
            services=of.services,
            asleep=self._machine.sleep.held,
            requests_held=sum(group.size for group in machine.registry.held.values()),
            engines=len(weights.known),
            open_rollouts=[self._rollout(each, now) for each in newest(machine)],
            longest_open=[self._open(each) for each in self._survey.longest if not each.longest.finish],
            eta_seconds=self._since(self._survey.eta, now) if machine.requests else None,
            lost_chunks=dict(statistics.lost),
            finished=dict(statistics.finished),
            histograms=_histograms(statistics),
            messages={socket: _kinds(counters) for socket, counters in of.sockets().items()},
            loop_lag_seconds=self._lag.largest(now),
            last_rollout=self._last_rollout(),
            groups_open=len(machine.groups) - len(machine.registry.finished) - len(machine.registry.held),
            results_held_bytes=machine.registry.holdings.all.results * TOKEN_BYTES,
            loading=len(weights.loading - weights.quarantined.keys()),
            version=__version__,
            unwritten={
                name: wire.Unwritten(seconds=now - each.since, problem=each.why)
                for name, each in of.outages().items()
                if each is not None
            },
            mismatch=self.mismatch,
            draining=machine.registry.draining,
        )

    def _instances(self) -> list[wire.InstanceStatus]:
        of = self._sources
        return [
            wire.InstanceStatus(
                name=view.name,
                capacity=view.capacity,
                stats=of.stats.get(view.name, InstanceStats()),
                chunks=view.chunks,
                reserved_blocks=view.reserved_blocks,
                versions=self._machine.engines[view.name].register.versions,
                restarts=of.incarnations[view.name] - 1,
            )
            for view in self._machine.requests.instances.values()
        ]

    def _since(self, eta: float | None, now: float) -> float | None:
        return None if eta is None else max(0.0, eta - (now - self._seen_at))

    def _rollout(self, rollout: RolloutState, now: float) -> wire.RolloutStatus:
        unfinished = [group for group in rollout.members.values() if not group.done]
        least, most = self._survey.ranges.get(rollout.rollout_id) or (None, None)
        return wire.RolloutStatus(
            rollout_id=rollout.rollout_id,
            requests=rollout.requests,
            finished=rollout.finished,
            tokens=rollout.counters["tokens"],
            groups_open=len(unfinished),
            seconds=now - rollout.submitted,
            eta_seconds=self._since(self._survey.etas.get(rollout.rollout_id), now),
            tail_seconds=None
            if rollout.open
            else self._statistics.tail(rollout.rollout_id, rollout.requests, now),
            open=rollout.open,
            generated=max(rollout.counters["tokens"], self._survey.made.get(rollout.rollout_id, 0)),
            eta_least=self._since(least, now),
            eta_most=self._since(most, now),
        )

    def _open(self, prompt: OpenPrompt) -> wire.OpenRequest:
        request = prompt.longest
        view, group = request.view, request.group
        tokens = max(view.produced, prompt.tokens)
        estimate = self._machine.requests.estimates.get(group.group_id)
        left = Remainders(estimate, view.most, self._survey.ratios, tokens).left(tokens) if estimate else None
        return wire.OpenRequest(
            rollout_id=group.rollout.rollout_id,
            prompt_id=group.prompt_id,
            index=view.index - group.first_index,
            generated=tokens,
            expected=tokens + (left.tokens if left else 0.0),
            engine=request.instance,
            chunks=self._statistics.chunks(request),
            open=prompt.open,
            running=prompt.running,
        )

    def _last_rollout(self) -> wire.RolloutEnd | None:
        ended = self._statistics.ended
        if ended is None:
            return None
        stats = self._sources.stats
        there = [(stats.get(name, InstanceStats()), share) for name, share in ended.there.items()]
        bound = bound_seconds(ended.made, ended.longest_made, there)
        if bound is not None:  # what was measured may be of less work at once: engines can what they did here
            bound = min(bound, ended.seconds)
        return wire.RolloutEnd(
            seconds=ended.seconds,
            tail_seconds=ended.tail_seconds,
            requests=ended.requests,
            tokens=ended.tokens,
            longest=ended.longest,
            rollout_id=ended.rollout_id,
            efficiency=bound / ended.seconds if bound is not None and ended.seconds else None,
        )


def _histograms(statistics: Statistics) -> dict[str, wire.Histogram]:
    updates = {
        f"weight_update_seconds_{phase}": each for phase, each in statistics.weight_update_seconds.items()
    }
    return {
        "response_tokens": statistics.response_tokens,
        "chunk_seconds": statistics.chunk_seconds,
        "chunk_wait_seconds": statistics.chunk_wait_seconds,
        **updates,
    }


def _kinds(counters: Mapping[str, int]) -> dict[str, int]:
    return {kind: counters[kind] for kind in ("malformed", "strangers", "refused", "undeliverable")}
