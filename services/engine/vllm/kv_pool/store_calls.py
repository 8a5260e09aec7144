"""Calls of a Mooncake store that may fail, hang or be away.

Invariants:
- whoever waits for an answer has it, or `Away`, within `seconds`;
- nothing is asked while the pool is away: for a pause after a failure (`Breaker`), and while a call
  has been under way for longer than `seconds`;
- every failure is counted.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from queue import Full
from typing import Any

from seer.common.process.log import get_logger
from seer.services.engine.vllm.kv_pool.breaker import Breaker
from seer.services.engine.vllm.kv_pool.lane import Lane

_log = get_logger()


class Away(Exception):  # noqa: N818 - what it says of the pool
    """The pool did not answer, or is being left alone."""


class Calls:
    """Calls of the store that `connect` returns: one thread for those waited for, one for others."""

    def __init__(self, seconds: float, connect: Callable[[], Any]) -> None:
        self.seconds = seconds
        self._connect = connect
        self._store: Any = None
        self._closed = False
        self._reads, self._writes = Lane("kv-pool-reads"), Lane("kv-pool-writes")
        self._breaker = Breaker()
        self._counts: Counter[str] = Counter()
        self._counting = threading.Lock()

    @property
    def connected(self) -> bool:
        """Whether there is a store to ask."""
        return self._store is not None

    @property
    def allowed(self) -> bool:
        """Whether the pool may be asked: no pause, no call that hangs."""
        now = time.monotonic()
        hangs = any(lane.busy_since + self.seconds < now for lane in (self._reads, self._writes))
        return not hangs and self._breaker.allows(now)

    def ask(self, call: Callable[[Any], list[int]], count: int) -> Future[list[int]]:
        """Begin a call of the store that gives so many codes. Raises `Away`."""
        store = self._store
        if store is None or not self.allowed:
            raise Away

        def read() -> list[int]:
            codes = call(store)
            if len(codes) != count:
                raise Away(f"{len(codes)} answers to {count} questions")
            return codes

        try:
            return self._reads.submit(read)
        except Full as error:
            raise Away from error

    def answer(self, future: Future[list[int]]) -> list[int]:
        """Return what a call gave. Raises `Away`."""
        try:
            return future.result(self.seconds)
        except Exception as error:
            self.failed(error if future.done() else f"no answer in {self.seconds:g} s")
            raise Away from error

    def tell(self, call: Callable[[Any], object], after: Callable[[], object] = lambda: None) -> None:
        """Have a call made later, unless the pool is away then; nobody waits. Then `after`, in any case."""

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
        except Full:
            after()
            self.failed("too many calls wait for it")

    def note(self, codes: Sequence[int], *harmless: int) -> None:
        """Take codes as a success, or as a failure where one is negative and not harmless."""
        bad = Counter(code for code in codes if code < 0 and code not in harmless)
        if bad:
            self.failed(f"Mooncake says {bad.most_common(1)[0][0]}")
        else:
            self._breaker.worked()

    def failed(self, why: object) -> None:
        """Count a failure, and leave the pool alone for a while."""
        now = time.monotonic()
        self.count("failures", 1)
        if self._breaker.allows(now):
            _log.warning("the KV pool failed: left alone for a while", why=str(why))
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
        """Let go of the store, after what is under way, within `seconds`."""
        with suppress(Full):
            wait([self._writes.submit(self._end)], self.seconds)

    def _end(self) -> None:
        self._closed = True
        store, self._store = self._store, None
        if store is not None:
            store.close()
