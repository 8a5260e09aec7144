"""Keeps what a pool's service runs: what is lost is begun anew, in place.

Invariants:
- time without a sign counts by our own looks, each worth at most `LOOK_SECONDS`: a stall of this process,
  or of the whole machine, is one look, however long it took;
- whatever is lost is begun anew for as long as the service lives, at most every `LONGEST_SECONDS`;
- the service itself ends only when it is drained, so no supervisor counts a stall as a failure.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import NoReturn

from seer.common.clock import Clock
from seer.common.errors import SeerError
from seer.common.pool import ANSWER_SECONDS
from seer.common.process.log import get_logger

PROBE_SECONDS = 2.0
"""Pause between two looks."""

LOOK_SECONDS = PROBE_SECONDS + ANSWER_SECONDS
"""A look takes no longer, but for a stall of our own."""

FIRST_SECONDS, LONGEST_SECONDS = 0.5, 15.0
"""Pauses before what was lost is begun anew; they double."""

HEALTHY_SECONDS = 60.0
"""What lived for so long begins again after the first pause."""


@dataclass(slots=True)
class Absence:
    """Whether something is gone: missing for `limit` seconds of looks in a row. `looked`: the last one."""

    limit: float
    looked: float
    seconds: float = 0.0

    def gone(self, now: float, *, missing: bool) -> bool:
        """Take a look's result; one that says nothing is as good as one that found it."""
        passed = min(now - self.looked, LOOK_SECONDS)
        self.looked = now
        self.seconds = self.seconds + passed if missing else 0.0
        return self.seconds >= self.limit


async def keep(
    what: str, begin: Callable[[], Awaitable[None]], lost: Callable[[], Awaitable[str]], clock: Clock
) -> NoReturn:
    """Begin it again whenever it is lost. `lost` returns why, once it is; `begin` may fail."""
    log = get_logger()
    pause = FIRST_SECONDS
    while True:
        since = clock.now()
        why = await lost()
        if clock.now() - since >= HEALTHY_SECONDS:
            pause = FIRST_SECONDS
        while why:
            log.warning(f"{what} is lost: begun anew", why=why, seconds=pause)
            await clock.sleep(pause)
            pause = min(2 * pause, LONGEST_SECONDS)
            try:
                await begin()
                why = ""
            except (SeerError, OSError) as error:
                why = str(error) or repr(error)
        log.info(f"{what} is back")
