"""What a server sends through a `Hub`, in order per peer: one that does not read delays no other.

Invariants:
- messages to one address leave in the order in which they were put;
- a peer that has no room is waited for apart from the rest, and at most `MAX_LATE` messages wait
  with it; one that takes none for `SEND_SECONDS`, or is gone, is dismissed: it shakes hands again,
  and then hears that something was lost.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from seer.common.channel import Hub
from seer.common.wire.messages import Message

Out = TypeVar("Out", bound=Message)

MAX_LATE = 50_000
"""Bound on messages that wait for one slow peer: the groups of a large rollout, several times."""


class Outbox(Generic[Out]):
    """`failed(address)` is told of a peer that was dismissed.

    Its own queue is as long as its caller lets it be; it empties as fast as the loop turns.
    """

    def __init__(self, hub: Hub[Out, Any], failed: Callable[[bytes], None]) -> None:
        self._hub = hub
        self._failed = failed
        self._queue: asyncio.Queue[tuple[bytes, Out]] = asyncio.Queue()
        self._late: dict[bytes, deque[Out]] = {}

    @property
    def idle(self) -> bool:
        """Whether nothing waits, slow peers apart."""
        return self._queue.empty()

    def keeps_up(self, address: bytes) -> bool:
        """Say whether a peer takes what it is sent: to one that does not, news can be spared."""
        return address not in self._late

    def put(self, address: bytes, message: Out) -> None:
        """Send a message soon; never waits."""
        self._queue.put_nowait((address, message))

    async def run(self) -> None:
        """Send until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                address, message = await self._queue.get()
                late = self._late.get(address)
                if late is not None:
                    late.append(message)
                elif not await self._hub.offer(address, message):
                    self._late[address] = deque([message], MAX_LATE + 1)
                    tasks.create_task(self._catch_up(address, self._late[address]))

    async def _catch_up(self, address: bytes, late: deque[Out]) -> None:
        try:
            while late:
                if len(late) > MAX_LATE or not await self._hub.send(address, late.popleft()):
                    self._hub.dismiss(address)
                    self._failed(address)
                    return
        finally:
            del self._late[address]
