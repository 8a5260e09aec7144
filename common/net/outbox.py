"""What a server sends through a `Hub`, in order per peer: one that does not read delays no other.

Invariants:
- messages to one address leave in the order in which they were put, and none that was put before its
  peer was dismissed leaves after that: it would reach one that starts over;
- at most `MAX_LATE` messages and `MAX_BYTES` wait for one peer, a single larger message apart. A peer
  for which more would, that takes none for `SEND_SECONDS`, or that is gone, is dismissed: it shakes
  hands again, and then hears that something was lost.
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

MAX_LATE = 50_000
"""Bound on messages that wait for one peer: the groups of a large rollout, several times."""

MAX_BYTES = 256 * 2**20
"""Bound on the bytes that wait for one peer: an engine's chunks at full context, several times."""


@dataclass(slots=True)
class _Line:
    """What waits for one peer: (session, frames, bytes). `late`: it has no room, and is waited for."""

    messages: deque[tuple[int, list[Frame], int]] = field(default_factory=deque)
    size: int = 0
    late: bool = False
    over: bool = False


class Outbox(Generic[Out]):
    """`failed(address)` is told, from `run`, of a peer that was dismissed."""

    def __init__(self, hub: Hub[Out, Any], failed: Callable[[bytes], None]) -> None:
        self._hub = hub
        self._failed = failed
        self._lines: dict[bytes, _Line] = {}
        self._due: asyncio.Queue[bytes] = asyncio.Queue()  # each address at most once

    @property
    def idle(self) -> bool:
        """Whether nothing waits, slow peers apart."""
        return all(line.late for line in self._lines.values())

    def keeps_up(self, address: bytes) -> bool:
        """Say whether a peer takes what it is sent: to one that does not, news can be spared."""
        line = self._lines.get(address)
        return line is None or not (line.late or line.over)

    def put(self, address: bytes, message: Out) -> None:
        """Send a message soon; never waits. To a peer that is not admitted nothing is sent."""
        session = self._hub.session(address)
        if not session:
            return
        line = self._lines.get(address)
        if line is None:
            line = self._lines[address] = _Line()
            self._due.put_nowait(address)
        if line.over:
            return
        frames = encode(message)
        size = sum(len(frame) for frame in frames)
        if len(line.messages) >= MAX_LATE or (line.size and line.size + size > MAX_BYTES):
            line.over, line.size = True, 0
            line.messages.clear()
            return
        line.messages.append((session, frames, size))
        line.size += size

    async def run(self) -> None:
        """Send until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                address = await self._due.get()
                if await self._send_on(address):
                    self._end(address)
                else:
                    self._lines[address].late = True
                    tasks.create_task(self._catch_up(address))

    async def _send_on(self, address: bytes) -> bool:
        """Send what waits for a peer; False when it has no room, and a message waits."""
        line, sent = self._lines[address], 0
        while line.messages:
            session, frames, size = line.messages[0]
            if session == self._hub.session(address) and not await self._hub.offer_frames(address, frames):
                return False
            self._took(line, size)
            sent += 1
            if sent % FAIR_EVERY == 0:
                await asyncio.sleep(0)
        return True

    async def _catch_up(self, address: bytes) -> None:
        line = self._lines[address]
        while line.messages:
            session, frames, size = line.messages[0]
            if session == self._hub.session(address) and not await self._hub.send_frames(address, frames):
                line.over = line.over or session == self._hub.session(address)
            if line.over:
                break
            self._took(line, size)
        self._end(address)

    def _took(self, line: _Line, size: int) -> None:
        if line.messages:  # else it was over meanwhile
            line.messages.popleft()
            line.size -= size

    def _end(self, address: bytes) -> None:
        if self._lines.pop(address).over:
            self._hub.dismiss(address)
            self._failed(address)
