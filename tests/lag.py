"""A transport whose DEALERs have latency, either way, and lose what a test says; in virtual time."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Coroutine, Sequence

from memory_transport import MemoryNetwork, MemoryTransport

from seer.common.errors import Unreachable
from seer.common.net.transport.base import Frame, Socket

Loses = Callable[[Sequence[Frame]], bool]


class LaggedTransport(MemoryTransport):
    """Nothing overtakes anything. `lose_up` and `lose_down` say of each message whether it is lost."""

    def __init__(self, network: MemoryNetwork, up_seconds: float, down_seconds: float) -> None:
        super().__init__(network)
        self.seconds = (up_seconds, down_seconds)
        self.lose_up: Loses = lambda _: False
        self.lose_down: Loses = lambda _: False

    async def dealer(self, endpoint: str, identity: bytes) -> Socket:
        return _Lagged(await super().dealer(endpoint, identity), self)


class _Lagged:
    problem = ""

    def __init__(self, inner: Socket, node: LaggedTransport) -> None:
        self._inner, self._node = inner, node
        self._up: asyncio.Queue[tuple[float, list[Frame]]] = asyncio.Queue()
        self._down: deque[tuple[float, list[Frame]]] = deque()
        self._arrived = asyncio.Event()
        self._tasks = [
            asyncio.create_task(self._until_closed(work)) for work in (self._send(), self._listen())
        ]

    async def send(self, frames: Sequence[Frame]) -> None:
        await self._up.put((_now() + self._node.seconds[0], list(frames)))

    async def recv(self) -> list[Frame]:
        while not self._down:
            self._arrived.clear()
            await self._arrived.wait()
        if (wait := self._down[0][0] - _now()) > 0:  # not taken yet: cancelling loses nothing
            await asyncio.sleep(wait)
        return self._down.popleft()[1]

    def close(self) -> None:
        self._inner.close()
        for task in self._tasks:
            task.cancel()

    async def _until_closed(self, work: Coroutine[object, object, None]) -> None:
        with contextlib.suppress(Unreachable):
            await work

    async def _send(self) -> None:
        while True:
            at, frames = await self._up.get()
            await asyncio.sleep(max(0.0, at - _now()))
            if not self._node.lose_up(frames):
                await self._inner.send(frames)

    async def _listen(self) -> None:
        while True:
            frames = await self._inner.recv()
            if not self._node.lose_down(frames):
                self._down.append((_now() + self._node.seconds[1], frames))
                self._arrived.set()


def _now() -> float:
    return asyncio.get_running_loop().time()


def first(tag: str, count: int = 1) -> Loses:
    """Lose the first messages of a kind."""
    left = count

    def loses(frames: Sequence[Frame]) -> bool:
        nonlocal left
        if left and tag.encode() in bytes(frames[0]):
            left -= 1
            return True
        return False

    return loses
