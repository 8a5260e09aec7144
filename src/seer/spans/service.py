"""`seer spans`: follows a buffer's log, and sends what ends as spans to a collector.

The log on the disk is the queue: while the collector is away, nothing more is read, so a batch is all that is
in memory; and a span that ended too long ago when its turn comes is dropped.

Invariants (tests/unit/test_spans_service.py, tests/process/test_spans.py):
- nothing of it runs in the buffer: a collector that is slow, away or refuses costs spans, never a response;
- every span is sent once it has ended, or counted as dropped; after a restart it is sent again, as it was;
- no row stops it: what cannot be read is told and left out, up to the next segment;
- it ends within `FLUSH_SECONDS` and a little of being told to.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections import Counter
from pathlib import Path

from seer.common.clock import Clock
from seer.common.config import Config
from seer.common.errors import InvalidField, Unreachable
from seer.common.net.transport.base import Transport
from seer.common.process.log import get_logger
from seer.services.buffer.log import log_folder, rows
from seer.spans.collector import Answer, Collector
from seer.spans.log_tail import LogTail
from seer.spans.span_reader import Ended, SpanReader

POLL_SECONDS = 0.5
"""The buffer writes its log about as often."""

BATCH = 512
"""Spans of one message, as OpenTelemetry's own exporters have by default: about 300 KB."""

ROWS = 256
"""Read between two looks at what has ended."""

PAUSE_SECONDS = 2.0
"""Between two tries at a collector that is away; the exporter's own tries take 10 s."""

FLUSH_SECONDS = 5.0
"""For what is left when it is told to end."""

PATIENCE_SECONDS = 60.0
"""How long a collector may be away while a log is sent `once`."""

SETTLED_SECONDS = 5.0
"""What happened longer ago than this is in the log."""

SAID_SECONDS = 60.0


class SpanService:
    """Sends the spans of `log`, but those that ended over `oldest` seconds ago.

    `once`: those that are there now; else it follows the log until it is told to end. Raises `InvalidField`.
    """

    def __init__(
        self, _config: Config, _transport: Transport, _clock: Clock, *,
        log: Path, otlp: str, oldest: float, once: bool,
    ) -> None:  # fmt: skip
        if once and not (log.is_file() or (log.is_dir() and log_folder.segments(log))):
            raise InvalidField("LOG", str(log), "holds no log: give a folder or file that buffer.log wrote")
        self._collector = Collector(otlp)
        self._path, self._oldest, self._once = log, oldest, once
        self._log = get_logger()
        self._tail, self._reader = LogTail(log), SpanReader()
        self._items = self._tail.read()
        self._batch: list[Ended] = []
        self._caught_up = False
        self._stopping = threading.Event()
        self._until = math.inf
        self._done, self._told = asyncio.Event(), asyncio.Event()
        self._error: Exception | None = None
        self._sent = 0
        self._dropped: Counter[str] = Counter()
        self._said = -math.inf

    async def start(self) -> dict[str, str]:
        """Begin, on a thread of its own."""
        if not self._path.exists():
            self._log.warning("there is no log yet", log=str(self._path))
        loop = asyncio.get_running_loop()
        thread = threading.Thread(target=self._work, args=(loop,), name="spans", daemon=True)
        thread.start()
        return {"log": str(self._path)}

    async def run(self) -> None:
        """Return when all is sent, or time is up. Raises what went wrong."""
        try:
            await self._told.wait()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FLUSH_SECONDS + 0.5):
                    await self._done.wait()
        finally:
            self._until = 0.0
            self._stopping.set()
            self._collector.close()
        if self._batch:
            self._dropped["unsent"] += len(self._batch)
        self._log.info("spans were sent", sent=self._sent, **self._dropped)
        if self._error is not None:
            raise self._error

    def drain(self) -> None:
        """Send what the log has, and end."""
        self._until = time.monotonic() + FLUSH_SECONDS
        self._stopping.set()
        self._told.set()

    # --- on the thread ---------------------------------------------------------------------

    def _work(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            while time.monotonic() < self._until:
                last = self._once or self._stopping.is_set()  # what is written while it sends is sent, too
                all_read = self._fill()
                self._deliver()
                if all_read and last:
                    break
                if all_read:
                    self._caught_up = True
                    self._stopping.wait(POLL_SECONDS)
        except OSError as error:
            self._error = InvalidField("LOG", str(self._path), f"cannot be read: {error.strerror}")
        except Exception as error:  # noqa: BLE001 - `run` raises it: else a thread ends, and all seems well
            self._error = error
        finally:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._over)

    def _over(self) -> None:
        self._done.set()
        self._told.set()

    def _fill(self) -> bool:
        """Read until there is a batch; return whether all that is there was read before."""
        for number, item in enumerate(self._items, 1):
            self._take(item)
            if number % ROWS == 0:
                self._keep(self._reader.take())
                if len(self._batch) >= BATCH:
                    return False
        self._items = self._tail.read()
        if self._once:
            self._reader.finish()
        self._keep(self._reader.take(0.0 if self._once else time.time() - SETTLED_SECONDS))
        return True

    def _take(self, item: rows.Header | rows.Line | rows.LogError) -> None:
        problem: Exception | None = item if isinstance(item, rows.LogError) else None
        try:
            if isinstance(item, rows.Header):
                self._reader.begin(item)
            elif isinstance(item, rows.Line):
                self._reader.add(item)
        except (LookupError, ValueError, TypeError, ArithmeticError, AttributeError) as error:
            problem = error
        if problem is not None:
            self._tail.close()
            self._reader.skipped()
            self._log.warning("the rest of a file of the log is left out", why=str(problem))

    def _keep(self, ended: list[Ended]) -> None:
        """Put spans into the batch, but those that are too old."""
        self._batch += ended
        earliest = time.time() - self._oldest
        recent = [each for each in self._batch if each.end >= earliest]
        if len(recent) < len(self._batch):
            self._drop("late" if self._caught_up else "before", len(self._batch) - len(recent))
            self._batch = recent

    def _deliver(self) -> None:
        """Send the batch, however often that is to be tried, until it is too old or time is up."""
        away_since: float | None = None
        while self._batch and time.monotonic() < self._until:
            part = self._batch[:BATCH]
            answer = self._collector.send(part)
            if answer is Answer.LATER:
                now = time.monotonic()
                if away_since is None:
                    away_since = now
                    self._log.warning("the collector takes no spans", why=self._collector.why)
                if self._once and now > away_since + PATIENCE_SECONDS:
                    raise Unreachable(f"the collector took no spans for {PATIENCE_SECONDS:g} s")
                if self._stopping.wait(PAUSE_SECONDS):
                    time.sleep(PAUSE_SECONDS / 8)  # tried more often, as time runs out
                self._keep([])
                continue
            if away_since is not None:
                self._log.info(
                    "the collector takes spans again", away_seconds=round(time.monotonic() - away_since)
                )
                away_since = None
            del self._batch[: len(part)]
            lost = len(part) if answer is Answer.REFUSED else self._collector.rejected
            self._sent += len(part) - lost
            if lost:
                self._drop("refused", lost, self._collector.why)

    def _drop(self, why: str, count: int, said: str = "") -> None:
        """Count dropped spans, and say so now and then. Those of `before` nobody waits for."""
        self._dropped[why] += count
        now = time.monotonic()
        if why != "before" and now > self._said + SAID_SECONDS:
            self._said = now
            self._log.warning("spans were dropped", **self._dropped, why=said or why)
