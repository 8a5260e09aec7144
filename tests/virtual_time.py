"""An event loop whose time jumps to the next timer: hours of timeouts run in milliseconds.

Use `@virtual` on an async test, or `run(coroutine)`. When every task waits and no timer is set, nothing
can ever wake: that raises `Deadlock` with the waiting tasks, and so does running past the limit. Threads
and real sockets do not fit in here; use the `memory` transport.
"""

import asyncio
import functools
import math
import selectors
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, NoReturn, ParamSpec, TypeVar

T = TypeVar("T")
A = ParamSpec("A")

LIMIT_SECONDS = 24 * 3600.0
"""Virtual time after which a run fails: periodic timers would keep a stuck test alive for ever."""


class Deadlock(AssertionError):  # noqa: N818 - reads as what it says
    """All tasks wait and no timer is set, or the virtual time limit has passed."""


class _JumpingSelector(selectors.SelectSelector):
    def __init__(self, limit: float) -> None:
        super().__init__()
        self.now = 0.0
        self.limit = limit

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready:
            return ready
        if timeout is None:
            self._fail("nothing can wake")
        elif timeout > 0:
            self.now += timeout
            if self.now > self.limit:
                self._fail(f"{self.limit:g} virtual seconds have passed")
        return []

    def _fail(self, why: str) -> NoReturn:
        self.limit = math.inf  # the loop runs on to cancel the tasks
        waiting = [f"  {task.get_name()}: {task.get_coro()}" for task in asyncio.all_tasks()]
        raise Deadlock("\n".join([f"{why}; tasks that wait:", *waiting]))


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Time starts at 0 and moves only when every task waits."""

    def __init__(self, limit_seconds: float = LIMIT_SECONDS) -> None:
        self._jumping = _JumpingSelector(limit_seconds)
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


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
