"""Keeps Python's garbage collector from stopping a service that has millions of objects.

A full collection looks at every object: two seconds with a million requests, while every message waits. What
has lived for a moment mostly lives on, so it is set aside (`gc.freeze`). Reference counts still free it; only
cycles of references stay, until all is looked at again, which happens while little is there.

Invariants (tests/unit/test_collector.py):
- what was there before the last `FREEZE_SECONDS` is in no automatic collection;
- cycles are collected within about `FULL_SECONDS` once the process has fewer than `MOST_OBJECTS` objects.
"""

from __future__ import annotations

import gc

from seer.common.clock import Clock

FREEZE_SECONDS = 0.5

FULL_SECONDS = 60.0

MOST_OBJECTS = 400_000
"""A full collection of so many takes a fifth of a second; an idle buffer has half of them."""


async def collect(clock: Clock) -> None:
    """Set aside what lives, until cancelled."""
    full_at = clock.now() + FULL_SECONDS
    while True:
        await clock.sleep(FREEZE_SECONDS)
        few = False
        if clock.now() >= full_at:
            full_at = clock.now() + FULL_SECONDS
            few = gc.get_freeze_count() < MOST_OBJECTS
        if few:
            gc.unfreeze()
        gc.collect(2 if few else 1)
        gc.freeze()
