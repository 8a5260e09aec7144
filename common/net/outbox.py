"""Queues of what a server sends through a `Hub`, one per peer: a peer that does not read delays no other.

Invariants:
- messages to one address are sent in the order of `put`; what was put before its peer was dismissed is not
  sent after that: the peer has started over;
- at most `MAX_QUEUED` messages and `MAX_BYTES` wait for one peer, a single larger message apart. A peer with
  more, or that reads nothing for `SEND_SECONDS`, or that is gone, is dismissed: it shakes hands again, and
  then learns that something was lost.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from seer.common.net.hub import Hub
from seer.common.net.transport.base import FAIR_EVERY, Frame
from seer.common.wire import Message
from seer.common.wire.codec import encode

Out = TypeVar("Out", bound=Message)

MAX_QUEUED = 50_000
"""Bound on messages that wait for one peer: several times the groups of a large rollout."""

MAX_BYTES = 256 * 2**20
"""Bound on bytes that wait for one peer: several times an engine's chunks at full context."""


@dataclass(slots=True)
class _PeerQueue:
    """Messages for one peer: (session, frames, bytes). `blocked`: its socket is full; `failed`: dismiss
    it.
    """

    messages: deque[tuple[int, list[Frame], int]] = field(default_factory=deque)
    size: int = 0
    blocked: bool = False
    failed: bool = False


class Outbox(Generic[Out]):
    """`failed(address)` is called, from `run`, for each peer that was dismissed."""

    def __init__(self, hub: Hub[Out, Any], failed: Callable[[bytes], None]) -> None:
        self._hub = hub
        self._failed = failed
        self._queues: dict[bytes, _PeerQueue] = {}
        self._due: asyncio.Queue[bytes] = asyncio.Queue()  # each address at most once
        self._sent = 0

    @property
    def idle(self) -> bool:
        """Whether nothing waits, except for peers whose sockets are full."""
        return all(queue.blocked for queue in self._queues.values())

    def keeps_up(self, address: bytes) -> bool:
        """Return whether a peer reads what it is sent. Callers skip updates that can be spared if not."""
        queue = self._queues.get(address)
        return queue is None or not (queue.blocked or queue.failed)

    def put(self, address: bytes, message: Out) -> None:
        """Queue a message; never waits. A peer that is not admitted gets none."""
        session = self._hub.session(address)
        if not session:
            return
        queue = self._queues.get(address)
        if queue is None:
            queue = self._queues[address] = _PeerQueue()
            self._due.put_nowait(address)
        if queue.failed:
            return
        frames = encode(message)
        size = sum(len(frame) for frame in frames)
        if len(queue.messages) >= MAX_QUEUED or (queue.size and queue.size + size > MAX_BYTES):
            queue.failed, queue.size = True, 0
            queue.messages.clear()
            return
        queue.messages.append((session, frames, size))
        queue.size += size

    async def flush(self) -> None:
        """Wait until `run` has sent all that waits, except for peers whose sockets are full."""
        while not self.idle:  # noqa: ASYNC110 - `run` is sending: it ends within a few turns
            await asyncio.sleep(0)

    async def run(self) -> None:
        """Send until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                address = await self._due.get()
                if await self._send_now(address):
                    self._finish(address)
                else:
                    self._queues[address].blocked = True
                    tasks.create_task(self._send_blocked(address))

    async def _send_now(self, address: bytes) -> bool:
        """Send a peer's messages; False when its socket is full, and a message waits."""
        queue = self._queues[address]
        while queue.messages:
            session, frames, size = queue.messages[0]
            if session == self._hub.session(address) and not await self._hub.offer_frames(address, frames):
                return False
            self._dequeue(queue, size)
            self._sent += 1
            if self._sent % FAIR_EVERY == 0:  # no send that finds room suspends, to whichever peer
                await asyncio.sleep(0)
        return True

    async def _send_blocked(self, address: bytes) -> None:
        queue = self._queues[address]
        while queue.messages:
            session, frames, size = queue.messages[0]
            if session == self._hub.session(address) and not await self._hub.send_frames(address, frames):
                queue.failed = queue.failed or session == self._hub.session(address)
            if queue.failed:
                break
            self._dequeue(queue, size)
        self._finish(address)

    def _dequeue(self, queue: _PeerQueue, size: int) -> None:
        if queue.messages:  # else it failed meanwhile
            queue.messages.popleft()
            queue.size -= size

    def _finish(self, address: bytes) -> None:
        if self._queues.pop(address).failed:
            self._hub.dismiss(address)
            self._failed(address)
