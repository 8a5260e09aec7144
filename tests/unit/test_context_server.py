"""The context service around its machine: what it gathers, broadcasts, and takes from settings."""

import asyncio
import contextlib
from dataclasses import replace
from itertools import pairwise

import pytest
from memory_transport import MemoryNetwork, MemoryTransport
from virtual_time import VIRTUAL, eventually

from seer.common import wire
from seer.common.clock import LoopClock
from seer.common.config import BufferConfig, Config, ContextConfig, shared_hash
from seer.common.errors import ConfigError
from seer.common.net.identity import Identity
from seer.common.net.stream import StreamPublisher, StreamSubscriber
from seer.common.policy.draft_costs import CELLS
from seer.common.policy.length import Estimate
from seer.common.policy.schedule import POLICIES
from seer.services.context import server as context_server
from seer.services.context.context_machine import EstimateMachine
from seer.services.context.server import MOST_OF_TIME, make

pytestmark = VIRTUAL

CAP = 1000


def identity(config, incarnation):
    shared = shared_hash(config.shared)
    return Identity(role="buffer", name="buffer", incarnation=incarnation, config_hash=shared)


class Served:
    """A context service, a buffer that publishes to it, without a real machine's snapshots, and who follows it."""

    def __init__(self, policy="divided", clock=None, **context):
        self.config = Config(buffer=BufferConfig(policy=policy), context=ContextConfig(**context))
        self.network = MemoryNetwork()
        self.server = make(self.config, MemoryTransport(self.network), clock or LoopClock())
        self.tasks = []

    async def begin(self, incarnation, opened=(), progress=()):
        """Start an incarnation of the buffer, which holds this."""
        self.transport, at = MemoryTransport(self.network), self.config.endpoints
        publisher = await self.transport.publisher(at.events)
        router = await self.transport.router(at.event_snapshots)

        def snapshot(incarnation, sequence):
            held = {"opened": list(opened), "progress": list(progress)}
            return [wire.BufferSnapshot(incarnation=incarnation, sequence=sequence, **held)]

        self.stream = StreamPublisher(publisher, router, identity(self.config, incarnation), snapshot)
        self.serving = asyncio.create_task(self.stream.serve())

    async def end(self):
        self.serving.cancel()
        await self.transport.close()

    async def say(self, *events):
        for event in events:
            await self.stream.publish(event)

    def follow(self):
        """Return what a new subscriber hears from now on."""
        heard, at = [], self.config.endpoints
        subscriber = StreamSubscriber(
            MemoryTransport(self.network), at.estimates, at.estimate_snapshots, identity(self.config, 77),
            wire.ContextPublished, wire.ContextSnapshotReply, LoopClock(),
        )  # fmt: skip

        async def listen():
            while True:
                heard.append(await subscriber.recv())

        self.tasks.append(asyncio.create_task(listen()))
        return heard


@contextlib.asynccontextmanager
async def served(policy="divided", **options):
    """Yield a service that runs, and what is heard of it, of which the first snapshot is there."""
    it = Served(policy, **options)
    await it.begin(1)
    assert set(await it.server.start()) == {"estimates", "estimate_snapshots"}
    running = asyncio.create_task(it.server.run())
    heard = it.follow()
    await eventually(lambda: len(heard) == 1)
    yield it, heard
    it.server.drain()
    await running
    for task in it.tasks:
        task.cancel()
    await it.end()


def wire_opened(group_id):
    return wire.GroupOpened(group_id=group_id, size=4, prompt_len=3, cap=CAP)


def wire_done(group_id, index, generated):
    return wire.RequestProgress(group_id=group_id, index=index, generated=generated, finished=True)


def wire_drafts(group_id, accepted):
    return wire.RequestProgress(
        group_id=group_id, index=3, generated=9, finished=False,
        drafted=[1000] * CELLS, accepted=[accepted] * CELLS,
    )  # fmt: skip


async def test_server_gathers_changes_and_follows_a_restarted_buffer(monkeypatch):
    monkeypatch.setattr(context_server, "PUBLISH_SECONDS", 0.5)
    async with served() as (it, heard):
        await it.say(wire_opened("r/a"))
        for index, generated in enumerate((10, 30, 20)):
            await it.say(wire_done("r/a", index, generated))
            await asyncio.sleep(0.1)
        await eventually(lambda: len(heard) == 2)
        assert heard[1].estimates == {"r/a": 30.0}

        await it.say(wire_opened("r/a"), wire_drafts("r/a", 900), wire_opened("r/c"), wire_drafts("r/c", 100))
        await eventually(lambda: len(heard) == 3)
        assert set(heard[2].estimates) <= {"r/c"}
        assert set(heard[2].acceptance) == {"r/a", "r/c"}
        assert all(80 <= rate <= 91 for rate in heard[2].acceptance["r/a"])

        await it.end()
        await it.begin(2, [wire_opened("r/b"), wire_opened("r/c")], [wire_done("r/b", 0, 5)])
        await eventually(lambda: len(heard) == 4)
        assert heard[3].estimates["r/b"] == 5.0
        assert it.server.machine.estimates()["r/b"] == Estimate(5.0)

        late = it.follow()
        await eventually(lambda: bool(late))
        assert late[0].estimates["r/b"] == 5.0
        assert late[0].acceptance == heard[3].acceptance == {"r/c": heard[2].acceptance["r/c"]}


async def test_changes_of_many_groups_are_broadcast_in_parts(monkeypatch):
    monkeypatch.setattr(context_server, "BATCH", 2)
    groups = [f"r/{name}" for name in "abcde"]
    async with served() as (it, heard):
        for group_id in groups:
            await it.say(wire_opened(group_id), wire_done(group_id, 0, 7))
        await asyncio.sleep(5)
        told = [sorted(news.estimates) for news in heard[1:]]
        assert sorted(group_id for part in told for group_id in part) == groups
        assert max(map(len, told)) <= 2


class LateClock(LoopClock):
    """A clock on which work takes time, too: `late` seconds so far."""

    late = 0.0

    def now(self):
        return super().now() + self.late


async def test_estimating_takes_a_small_part_of_the_time_however_long_it_takes(monkeypatch):
    clock, began = LateClock(), []

    def changes(machine):
        began.append(clock.now())
        clock.late += 1.0
        return {}

    monkeypatch.setattr(EstimateMachine, "changes", changes)
    monkeypatch.setattr(EstimateMachine, "dirty", True)
    async with served(clock=clock):
        await asyncio.sleep(30)
    pauses = [after - before for before, after in pairwise(began)]
    assert len(pauses) > 4
    assert min(pauses) >= 1.0 / MOST_OF_TIME - 0.01
    assert max(pauses) < 1.5 / MOST_OF_TIME


async def test_server_takes_the_policys_estimator_and_tells_spreads(monkeypatch):
    monkeypatch.setitem(POLICIES, "sure", replace(POLICIES["divided"], name="sure", estimator="posterior"))
    async with served("sure", remember_prompts=5) as (it, heard):
        await it.say(wire_opened("r/a"))
        await eventually(lambda: len(heard) == 2)
        assert heard[1].estimates["r/a"] < CAP
        assert heard[1].spreads["r/a"] > 0.5
        late = it.follow()
        await eventually(lambda: bool(late))
        assert (late[0].estimates, late[0].spreads) == (heard[1].estimates, heard[1].spreads)
        await it.say(*(wire_done("r/a", index, 30) for index in range(4)), wire.GroupClosed(group_id="r/a"))
        await eventually(lambda: len(it.server.machine.memory) == 1)


def test_server_refuses_what_it_cannot_use():
    with pytest.raises(ConfigError, match=r"buffer\.policy = 'divide': choose one of seer, seer-paper"):
        Served("divide")
