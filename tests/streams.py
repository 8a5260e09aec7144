"""A publisher of estimates, and a follower that applies what it hears."""

import asyncio

from seer.common.clock import LoopClock
from seer.common.net.identity import Identity
from seer.common.net.stream import StreamPublisher, StreamSubscriber, page_count, page_of
from seer.common.wire import ContextPublished, ContextSnapshot, ContextSnapshotReply, Estimates

PUB, SNAPSHOTS = "tcp://127.0.0.1:7105", "tcp://127.0.0.1:7106"


class Publisher:
    """Holds estimates, publishes their changes."""

    def __init__(self, transport, incarnation=1, config_hash="abc"):
        self.transport = transport
        self.me = Identity(role="context", name="context", incarnation=incarnation, config_hash=config_hash)
        self.state = {}

    def snapshot(self, incarnation, sequence):
        rows = list(self.state.items())
        pages = page_count(len(rows))
        return (
            ContextSnapshot(
                incarnation=incarnation,
                sequence=sequence,
                estimates=dict(page_of(rows, page)),
                page=page,
                pages=pages,
            )
            for page in range(pages)
        )

    async def start(self, pub=PUB, snapshots=SNAPSHOTS):
        self.publisher = await self.transport.publisher(pub)
        self.router = await self.transport.router(snapshots)
        self.stream = StreamPublisher(self.publisher, self.router, self.me, self.snapshot)
        self.task = asyncio.create_task(self.stream.serve())
        return self

    async def put(self, group, value):
        self.state[group] = value
        await self.stream.publish(Estimates(estimates={group: value}))

    async def stop(self):
        self.task.cancel()
        await self.transport.close()


class Follower:
    """Applies what a subscriber yields and checks that deltas follow without a gap."""

    def __init__(self, transport, pub=PUB, snapshots=SNAPSHOTS, config_hash="abc", incarnation=9):
        me = Identity(role="buffer", name="buffer", incarnation=incarnation, config_hash=config_hash)
        self.stream = StreamSubscriber(
            transport, pub, snapshots, me, ContextPublished, ContextSnapshotReply, LoopClock()
        )
        self.state = {}
        self.kinds = []
        self.deltas = []
        self.task = asyncio.create_task(self.follow())

    async def follow(self):
        while True:
            message = await self.stream.recv()
            self.kinds.append(type(message).__name__)
            if isinstance(message, ContextSnapshot):
                self.state = message.estimates
            else:
                self.state.update(message.estimates)
                self.deltas.append(message.estimates)
