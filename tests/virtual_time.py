"""An event loop whose time jumps to the next timer: hours of timeouts run in milliseconds.

All async tests of a module with `pytestmark = VIRTUAL` run in virtual time, but those that are marked
`real_time`; elsewhere use `@virtual` on a test, or `run(coroutine)`. When every task waits and no timer is set, nothing
can ever wake: that raises `Deadlock` with the waiting tasks, and so does running past the limit. Threads
and real sockets do not fit in here; use the `memory` transport.

A task started in a context where `PROCESS` is set belongs, with all it starts, to that simulated process,
which the loop can `freeze` as SIGSTOP would: not one callback of it runs until it is thawed.
"""

import asyncio
import functools
import heapq
import itertools
import math
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import ContextVar
from typing import Any, NoReturn, ParamSpec, TypeVar

import pytest

VIRTUAL = pytest.mark.virtual

T = TypeVar("T")
A = ParamSpec("A")

LIMIT_SECONDS = 24 * 3600.0
"""Virtual time after which a run fails: periodic timers would keep a stuck test alive for ever."""

PROCESS: ContextVar[str] = ContextVar("PROCESS", default="")


class Deadlock(AssertionError):  # noqa: N818 - reads as what it says
    """All tasks wait and no timer is set, or the virtual time limit has passed."""


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Time starts at 0 and moves only when every task waits."""

    def __init__(self, limit_seconds: float = LIMIT_SECONDS) -> None:
        super().__init__()
        self._now = 0.0
        self._limit = limit_seconds
        self._frozen: dict[str, list[asyncio.Handle]] = {}
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._count = itertools.count()

    def call_at(self, when, callback, *args, context=None):
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self._count), handle))  # cheaper to compare than handles
        return handle

    def time(self) -> float:
        return self._now

    def freeze(self, process: str) -> None:
        """Let nothing of a process run until it is thawed."""
        self._frozen.setdefault(process, [])

    def thaw(self, process: str) -> None:
        """Let a process go on with whatever became due meanwhile, in the order in which it did."""
        self._ready.extend(self._frozen.pop(process, []))

    def _run_once(self) -> None:
        # asyncio's own, without the selector that would be asked in vain each time.
        timers, ready = self._timers, self._ready
        while timers and timers[0][2]._cancelled:
            heapq.heappop(timers)
        if not ready and not self._stopping:
            self._now = max(self._now, timers[0][0]) if timers else self._fail("nothing can wake")
            if self._now > self._limit:
                self._fail(f"{self._limit:g} virtual seconds have passed")
        while timers and timers[0][0] <= self._now:
            ready.append(heapq.heappop(timers)[2])
        for _ in range(len(ready)):
            handle = ready.popleft()
            if handle._cancelled:
                continue
            if self._frozen and (waiting := self._frozen.get(handle._context.get(PROCESS))) is not None:
                waiting.append(handle)
            else:
                handle._run()

    def run_in_executor(self, executor, func, *args):
        """Run it here and now: a thread would finish at no time that a seed could repeat."""
        done = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - as an executor would
            done.set_exception(error)
        return done

    def _fail(self, why: str) -> NoReturn:
        self._limit = math.inf  # the loop runs on to cancel the tasks
        waiting = [f"  {task.get_name()}: {task.get_coro()}" for task in asyncio.all_tasks(self)]
        raise Deadlock("\n".join([f"{why}; tasks that wait:", *waiting]))


def run(main: Coroutine[Any, Any, T], limit_seconds: float = LIMIT_SECONDS) -> T:
    """Run a coroutine on a fresh virtual-time loop."""

    with asyncio.Runner(loop_factory=lambda: VirtualTimeLoop(limit_seconds)) as runner:
        return runner.run(main)


def virtual(test: Callable[A, Coroutine[Any, Any, T]]) -> Callable[A, T]:
    """Run an async test in virtual time; its fixtures must be synchronous."""

    @functools.wraps(test)
    def synchronous(*args: A.args, **kwargs: A.kwargs) -> T:
        return run(test(*args, **kwargs))

    return synchronous


async def eventually(
    holds: Callable[[], bool] | Callable[[], Awaitable[bool]], seconds: float = 60.0
) -> None:
    """Wait until a condition holds, polling; fails after `seconds` of the running loop's time."""
    async with asyncio.timeout(seconds):
        while True:
            value = holds()
            if await value if isinstance(value, Awaitable) else value:
                return
            await asyncio.sleep(0.01)
