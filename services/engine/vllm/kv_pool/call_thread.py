"""A thread for calls that may hang.

Unlike the threads of `concurrent.futures`, it is not joined when the process exits: a call that hangs would
keep the process from ending.
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
"""Most queued calls; the memory that they hold is bounded by the staging buffer."""


class CallThread:
    """A daemon thread that makes one call after the other.

    `busy_since`: when the running call began, in monotonic seconds; infinite if none is running.
    """

    def __init__(self, name: str) -> None:
        self.busy_since = math.inf
        self._calls: queue.Queue[Callable[[], None]] = queue.Queue(MAX_WAITING)
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Queue a call. Raises `queue.Full` when `MAX_WAITING` are queued."""
        future: Future[T] = Future()

        def make() -> None:
            try:
                future.set_result(call())
            except Exception as error:  # noqa: BLE001 - the caller gets whatever a native call raises
                future.set_exception(error)

        self._calls.put_nowait(make)
        return future

    def _run(self) -> None:
        while True:
            call = self._calls.get()
            self.busy_since = time.monotonic()
            call()
            self.busy_since = math.inf
            del call  # frees what it holds
