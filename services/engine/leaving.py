"""How an engine leaves: when it is told that its machine goes, and what it hands back before.

Invariants (tests/unit/test_leaving.py, tests/unit/test_engine_server.py):
- what chunks have stands, and the KV pool gets their KV if it takes it in time; nothing waits longer;
- a notice that cannot be read is none, and is logged once; one that is there is never missed for another.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import stat
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path

from seer.common.clock import Clock
from seer.common.errors import EngineError
from seer.common.process.log import get_logger
from seer.services.engine.chunks import RunningChunk
from seer.services.engine.driver import Driver

HAND_BACK_SECONDS = 10.0
"""Longest wait, after SIGTERM, until the KV pool has what chunks computed: Kubernetes kills after 30 s."""

LEAST_NOTICE_SECONDS = 30.0
"""How long a machine lives after a notice that does not say it: no cloud gives less."""

MOST_SECONDS = 600.0
"""Longest wait for the KV pool, however long the notice is."""

GOODBYE_SECONDS = 5.0
"""Kept of a notice for all that follows once the pool has the KV."""

LOOK_SECONDS = 1.0
"""How often a notice is looked for, and how long an answer may take."""

_HEADERS = {"Metadata-Flavor": "Google", "Metadata": "true"}  # Google's and Azure's: else they do not answer
_MOST_BYTES = 65_536
_UNREADABLE = (
    OSError, ValueError, TypeError, AttributeError, OverflowError, RecursionError, http.client.HTTPException
)  # fmt: skip
_PAUSE_SECONDS = 0.02
_log = get_logger()


class Leaving:
    """Whether an engine leaves, and how long it may take; `notice`: where to look for one, or empty."""

    def __init__(self, notice: str, driver: Driver, clock: Clock) -> None:
        self._notice, self._driver, self._clock = notice, driver, clock
        self._seconds = HAND_BACK_SECONDS
        self._begun = asyncio.Event()

    @property
    def begun(self) -> bool:
        """Whether the engine leaves: it takes no new chunk."""
        return self._begun.is_set()

    def begin(self) -> None:
        """Leave."""
        self._begun.set()

    async def wait(self) -> None:
        """Wait until the engine is told to leave, or finds a notice that its machine goes."""
        if not self._notice:
            await self._begun.wait()
            return
        looking = asyncio.create_task(noticed(self._notice, self._clock))
        told = asyncio.create_task(self._begun.wait())
        try:
            await asyncio.wait([looking, told], return_when=asyncio.FIRST_COMPLETED)
            if looking.done():
                left = looking.result()
                _log.warning("this machine is about to go: this engine leaves", seconds=round(left, 1))
                self._seconds = min(max(0.0, left - GOODBYE_SECONDS), MOST_SECONDS)
                self.begin()
        finally:
            looking.cancel()
            told.cancel()

    async def hand_back(self, running: Mapping[str, RunningChunk], drop: Callable[[str, int], None]) -> None:
        """End all chunks where they stand, those without a token by `drop`, and wait for their KV's saves."""
        for request_id, run in list(running.items()):
            if run.tokens:
                self._driver.end(request_id, run.serial)
            else:
                drop(request_id, run.attempt)
        with contextlib.suppress(TimeoutError, EngineError):
            async with asyncio.timeout(self._seconds):
                while running or self._driver.stats.pinned_blocks:
                    await self._clock.sleep(_PAUSE_SECONDS)
                    await self._driver.call(lambda: None)  # so that its figures are later than the ends


def seconds_left(notice: str, now: datetime) -> float | None:
    """Return how long the machine lives by the text of a notice; None: the text says that nothing is due.

    The text is empty, TRUE (Google) or a number of seconds, or JSON: an object with a `time` (AWS), or with
    `Events` (Azure), of which those that preempt or terminate count. Raises `ValueError` for other text.
    """
    text = notice.strip()
    if text.upper() in ("FALSE", "NONE"):
        return None
    if text.upper() in ("", "TRUE"):
        return LEAST_NOTICE_SECONDS
    told = json.loads(text)
    if isinstance(told, int | float):
        return float(told)
    if isinstance(told, dict) and isinstance(told.get("time"), str):
        return _seconds(now, datetime.fromisoformat(told["time"]))
    if isinstance(told, dict) and isinstance(told.get("Events"), list):
        ends = [each for each in told["Events"] if each.get("EventType") in ("Preempt", "Terminate")]
        times = [parsedate_to_datetime(each["NotBefore"]) for each in ends if each.get("NotBefore")]
        if not ends:
            return None
        return min((_seconds(now, time) for time in times), default=LEAST_NOTICE_SECONDS)
    raise ValueError("neither seconds, nor TRUE, nor JSON with `time` or `Events`")


def _seconds(now: datetime, time: datetime) -> float:
    return ((time if time.tzinfo else time.replace(tzinfo=UTC)) - now).total_seconds()


async def noticed(where: str, clock: Clock) -> float:
    """Look for a notice at `where`, a file or an http URL, until there is one; return `seconds_left`."""
    problem = ""
    while True:
        await clock.sleep(LOOK_SECONDS)
        try:
            text = await asyncio.to_thread(_ask, where) if where.startswith("http://") else _read(where)
            left = None if text is None else seconds_left(text, datetime.now(UTC))
        except _UNREADABLE as error:
            if str(error) != problem:
                problem = str(error)
                _log.warning("engine.leave_notice cannot be read", notice=where, why=problem)
        else:
            if left is not None:
                return left


def _read(where: str) -> str | None:
    """Return the text of a file; None: there is none."""
    try:
        if not stat.S_ISREG(Path(where).stat().st_mode):  # a FIFO would have the engine wait for its writer
            raise OSError(f"{where} is not a regular file")
        with Path(where).open("rb") as file:
            return file.read(_MOST_BYTES).decode()
    except FileNotFoundError:
        return None


def _ask(where: str) -> str | None:
    """Return what a machine's metadata service says; None: nothing."""
    try:
        asked = urllib.request.Request(where, headers=_HEADERS)  # noqa: S310 - `noticed` checks it
        with urllib.request.urlopen(asked, timeout=LOOK_SECONDS) as answer:  # noqa: S310
            text: str = answer.read(_MOST_BYTES).decode()
    except urllib.error.HTTPError as error:
        if error.code == 404:  # AWS's word for "nothing is due"
            return None
        raise
    return text or None
