"""Calls that may hang, made on a thread of their own.

`concurrent.futures` would do but for one thing: at exit it joins its threads, and with them the call
that hangs.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")

MAX_WAITING = 1024
"""Bound on calls that wait for their turn; what they hold is bounded by the staging memory."""


class Lane:
    """One daemon thread that makes one call after the other.

    `busy_since` is when the call under way began, in monotonic seconds; infinite when there is none.
    """

    def __init__(self, name: str) -> None:
        self.busy_since = math.inf
        self._calls: queue.Queue[Callable[[], None]] = queue.Queue(MAX_WAITING)
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Have a call made. Raises `queue.Full` when too many wait."""
        future: Future[T] = Future()

        def make() -> None:
            try:
                future.set_result(call())
            except Exception as error:  # noqa: BLE001 - whatever a native call raises is its caller's
                future.set_exception(error)

        self._calls.put_nowait(make)
        return future

    def _run(self) -> None:
        while True:
            call = self._calls.get()
            self.busy_since = time.monotonic()
            call()
            self.busy_since = math.inf
            del call  # with what it holds, while there is nothing to do
