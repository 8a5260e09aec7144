"""The context service's sockets: the buffer's event stream in, estimates and acceptance out.

Invariants:
- every estimate is the machine's; this file only passes events on and publishes;
- a snapshot of the buffer (when this service joins, after a gap, after a restart) replaces all state;
- changes are collected for `PUBLISH_SECONDS`, so a burst of events causes one message.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator

from seer.common import wire
from seer.common.clock import Clock
from seer.common.config import Config
from seer.common.errors import ConfigError
from seer.common.net.identity import this_process
from seer.common.net.stream import QUEUE_PAGES, StreamPublisher, StreamSubscriber, page_count, page_of
from seer.common.net.transport.base import Transport
from seer.common.policy.length import ESTIMATORS, Estimate
from seer.common.policy.schedule import POLICIES
from seer.common.process.log import get_logger
from seer.common.process.tasks import serve_until
from seer.services.context.context_machine import EstimateMachine

BATCH = 500
"""Most groups per message: the buffer sorts their waiting requests again, and does nothing else meanwhile."""

PUBLISH_SECONDS = 0.05
"""How long changed estimates are collected before they are published: a few steps of an engine."""

MOST_OF_TIME = 0.2
"""Share of its time that this service works out estimates, at most: there may be 100,000 groups."""


def make(config: Config, transport: Transport, clock: Clock) -> ContextServer:
    """Build the service for `service.run_process`."""
    return ContextServer(config, transport, clock)


class ContextServer:
    """One context service. Raises `ConfigError` for an unknown policy."""

    def __init__(self, config: Config, transport: Transport, clock: Clock) -> None:
        name = config.buffer.policy
        if name not in POLICIES:
            raise ConfigError(f"buffer.policy = {name!r}: choose one of {', '.join(POLICIES)}")
        remember = config.context.remember_prompts
        self.machine = EstimateMachine(ESTIMATORS[POLICIES[name].estimator](), remember)
        self._at = config.endpoints
        self._transport = transport
        self._clock = clock
        self._me = this_process("context", "context", config)
        self._log = get_logger()
        self._changed, self._drained = asyncio.Event(), asyncio.Event()

    async def start(self) -> dict[str, str]:
        """Bind; return the endpoints bound. The buffer may come later."""
        publisher = await self._transport.publisher(self._at.estimates)
        router = await self._transport.router(self._at.estimate_snapshots, QUEUE_PAGES)
        self._estimates: StreamPublisher[wire.Estimates, wire.ContextSnapshot] = StreamPublisher(
            publisher, router, self._me, self._snapshot, self._status
        )
        self._events: StreamSubscriber[wire.BufferPublished, wire.BufferSnapshot] = StreamSubscriber(
            self._transport,
            self._at.events,
            self._at.event_snapshots,
            self._me,
            wire.BufferPublished,
            wire.BufferSnapshotReply,
            self._clock,
        )
        return {"estimates": publisher.endpoint, "estimate_snapshots": router.endpoint}

    async def run(self) -> None:
        """Serve until drained."""
        await serve_until(self._drained.wait(), self._follow(), self._publish(), self._estimates.serve())
        self._log.info("served", **self._estimates.counters, **self.machine.error.summary())

    def _status(self) -> wire.ServiceStatus:
        figures = {**self.machine.error.summary(), "groups": len(self.machine)}
        return wire.ServiceStatus(figures=figures, messages=self._estimates.counters)

    def drain(self) -> None:
        """Stop at once: the buffer schedules on with the estimates it has."""
        self._drained.set()

    async def _follow(self) -> None:
        while True:
            message = await self._events.recv()
            if isinstance(message, wire.BufferSnapshot):
                self.machine.replace((*message.opened, *message.progress))
            else:
                self.machine.apply(message)
            if self.machine.dirty:
                self._changed.set()

    async def _publish(self) -> None:
        pause = PUBLISH_SECONDS
        while True:
            await self._changed.wait()
            await self._clock.sleep(pause)
            self._changed.clear()
            began = self._clock.now()
            changes = list(self.machine.changes().items())
            rates = list(self.machine.acceptance_changes().items())
            for start in range(0, max(len(changes), len(rates)), BATCH):
                end = start + BATCH
                message = wire.Estimates(
                    estimates={group_id: estimate.tokens for group_id, estimate in changes[start:end]},
                    acceptance=dict(rates[start:end]),
                    spreads=_spreads(changes[start:end]),
                )
                await self._estimates.publish(message)
            if self.machine.dirty:
                self._changed.set()
            pause = max(PUBLISH_SECONDS, (self._clock.now() - began) * (1 / MOST_OF_TIME - 1))

    def _snapshot(self, incarnation: int, sequence: int) -> Iterator[wire.ContextSnapshot]:
        estimates, rates = list(self.machine.estimates().items()), list(self.machine.acceptance().items())
        pages = page_count(len(estimates), len(rates))
        return (
            wire.ContextSnapshot(
                incarnation=incarnation,
                sequence=sequence,
                estimates={group_id: estimate.tokens for group_id, estimate in page_of(estimates, page)},
                acceptance=dict(page_of(rates, page)),
                spreads=_spreads(page_of(estimates, page)),
                page=page,
                pages=pages,
            )
            for page in range(pages)
        )


def _spreads(estimates: Iterable[tuple[str, Estimate]]) -> dict[str, float]:
    return {group_id: estimate.spread for group_id, estimate in estimates if estimate.spread}
