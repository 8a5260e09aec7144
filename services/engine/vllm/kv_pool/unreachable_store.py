"""Calls to a Mooncake store that may fail, hang or be unreachable.

Invariants:
- `wait_for` returns within `seconds`, or raises `PoolAway`;
- no call begins while the pool is away: during a pause after a failure (`CircuitBreaker`), and while a call
  has been running for longer than `seconds`;
- every failure is counted, and begins a pause, which doubles up to `LONGEST_SECONDS`: a success afterwards
  resets the pause, a failure begins a longer one.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from seer.common.process.log import get_logger

T = TypeVar("T")

CALL_SECONDS = 2.0
"""An engine's deadline of a call into the pool, later it counts as a miss: computing is faster by then."""

FIRST_SECONDS = 0.5
LONGEST_SECONDS = 15.0
"""Longest pause: a restarted pool is used again within it; a dead one costs one call's deadline each time."""

MAX_WAITING = 1024
"""Most queued calls; the memory that they hold is bounded by the staging buffer."""

_log = get_logger()


@dataclass(slots=True)
class CircuitBreaker:
    """No call is allowed before `until`, in monotonic seconds. Time is an argument."""

    until: float = 0.0
    pause: float = FIRST_SECONDS

    def allows(self, now: float) -> bool:
        """Say whether a call may be tried."""
        return now >= self.until

    def failed(self, now: float) -> None:
        """Note a failed call. Calls that fail during a pause do not lengthen it."""
        if self.allows(now):
            self.until = now + self.pause
            self.pause = min(2 * self.pause, LONGEST_SECONDS)

    def succeeded(self) -> None:
        """Note a successful call."""
        self.until, self.pause = 0.0, FIRST_SECONDS


class CallThread:
    """A daemon thread that makes one call after the other, which may hang.

    Unlike the threads of `concurrent.futures`, it is not joined when the process exits: a call that hangs
    would keep the process from ending.

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


class PoolAway(Exception):  # noqa: N818 - a state of the pool
    """The pool did not answer, or is not used for a while after it failed."""


class StoreCalls:
    """Calls to the store that `connect` returns: reads on one thread, writes on another."""

    def __init__(self, seconds: float, connect: Callable[[], Any]) -> None:
        self.seconds = seconds
        self._connect = connect
        self._store: Any = None
        self._closed = False
        self._reads, self._writes = CallThread("kv-pool-reads"), CallThread("kv-pool-writes")
        self._breaker = CircuitBreaker()
        self._counts: Counter[str] = Counter()
        self._counting = threading.Lock()

    @property
    def connected(self) -> bool:
        """Whether the store is connected."""
        return self._store is not None

    @property
    def allowed(self) -> bool:
        """Whether calls may begin: no pause, and no call that hangs."""
        now = time.monotonic()
        hangs = any(thread.busy_since + self.seconds < now for thread in (self._reads, self._writes))
        return not hangs and self._breaker.allows(now)

    def start_read(self, call: Callable[[Any], list[int]], count: int) -> Future[list[int]]:
        """Begin a read that returns `count` codes. Raises `PoolAway`."""
        store = self._store
        if store is None or not self.allowed:
            raise PoolAway

        def read() -> list[int]:
            codes = call(store)
            if len(codes) != count:
                raise PoolAway(f"Mooncake returned {len(codes)} codes for {count} keys")
            return codes

        try:
            return self._reads.submit(read)
        except queue.Full as error:
            raise PoolAway from error

    def wait_for(self, future: Future[list[int]]) -> list[int]:
        """Return the codes of a read. Raises `PoolAway`."""
        try:
            return future.result(self.seconds)
        except Exception as error:
            self.failed(error if future.done() else f"no answer in {self.seconds:g} s")
            raise PoolAway from error

    def write_later(self, call: Callable[[Any], object], after: Callable[[], object] = lambda: None) -> None:
        """Queue a write, which is skipped if the pool is away then; `after` is called in any case."""

        def write() -> None:
            try:
                if self._closed or not self._breaker.allows(time.monotonic()):
                    return
                if self._store is None:
                    self._store = self._connect()
                call(self._store)
            except Exception as error:  # noqa: BLE001 - native code: whatever it is, the pool is at fault
                self.failed(error)
            finally:
                after()

        try:
            self._writes.submit(write)
        except queue.Full:
            after()
            self.failed("too many writes are queued")

    def record(self, codes: Sequence[int], *harmless: int) -> None:
        """Count codes as a success, or as a failure if one is negative and not `harmless`."""
        bad = Counter(code for code in codes if code < 0 and code not in harmless)
        if bad:
            self.failed(f"Mooncake returned code {bad.most_common(1)[0][0]}")
        else:
            self._breaker.succeeded()

    def failed(self, why: object) -> None:
        """Count a failure, and begin a pause."""
        now = time.monotonic()
        self.count("failures", 1)
        if self._breaker.allows(now):
            _log.warning("the KV pool failed: not used for a while", why=str(why))
        self._breaker.failed(now)

    def count(self, name: str, number: int) -> None:
        """Add to a counter."""
        with self._counting:
            self._counts[name] += number

    def counts(self) -> dict[str, int]:
        """Return all counters."""
        with self._counting:
            return dict(self._counts)

    def close(self) -> None:
        """Close the store after queued writes; wait `seconds` at most."""
        with suppress(queue.Full):
            wait([self._writes.submit(self._end)], self.seconds)

    def _end(self) -> None:
        self._closed = True
        store, self._store = self._store, None
        if store is not None:
            store.close()
