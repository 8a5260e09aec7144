"""Restarts the program that a pool's service runs whenever it ends or hangs.

Invariants:
- the program is restarted for as long as the service lives, with pauses of at most `LONGEST_SECONDS`;
- the service itself ends only when it is drained, so systemd or compose never counts a stall as a failure.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NoReturn

from seer.common.clock import Clock
from seer.common.errors import SeerError
from seer.common.pool_metrics import ANSWER_SECONDS
from seer.common.process.log import get_logger

PROBE_SECONDS = 2.0
"""Pause between two probes."""

MAX_PROBE_SECONDS = PROBE_SECONDS + ANSWER_SECONDS
"""Longest time from one probe to the next, unless this process stalled."""

FIRST_SECONDS, LONGEST_SECONDS = 0.5, 15.0
"""Pauses before a restart: the first, and the longest of those that double."""

HEALTHY_SECONDS = 60.0
"""After having run for so long, the next restart waits only the first pause again."""


async def supervise(
    what: str, restart: Callable[[], Awaitable[None]], lost: Callable[[], Awaitable[str]], clock: Clock
) -> NoReturn:
    """Restart a process after each loss. `lost` waits for the loss and returns why; `restart` may fail."""
    log = get_logger()
    pause = FIRST_SECONDS
    while True:
        since = clock.now()
        why = await lost()
        if clock.now() - since >= HEALTHY_SECONDS:
            pause = FIRST_SECONDS
        while why:
            log.warning(f"{what} is lost: restarting it", why=why, seconds=pause)
            await clock.sleep(pause)
            pause = min(2 * pause, LONGEST_SECONDS)
            try:
                await restart()
                why = ""
            except (SeerError, OSError) as error:
                why = str(error) or repr(error)
        log.info(f"{what} is back")
