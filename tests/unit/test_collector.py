"""What lives is set aside, and garbage in cycles is collected all the same."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest
from virtual_time import VIRTUAL

from seer.common.clock import LoopClock
from seer.common.process import collector

pytestmark = VIRTUAL


class Cycle:
    """Refers to itself."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def unfrozen():
    yield
    gc.unfreeze()


async def test_what_has_lived_for_a_moment_is_in_no_automatic_collection():
    task = asyncio.create_task(collector.collect(LoopClock()))
    old = [[] for _ in range(1000)]
    await asyncio.sleep(2 * collector.FREEZE_SECONDS)
    looked_at = {id(each) for each in gc.get_objects()}
    assert not looked_at & {id(each) for each in old}
    task.cancel()


@pytest.mark.parametrize("few", [True, False])
async def test_a_cycle_that_was_set_aside_is_collected_once_there_is_little(monkeypatch, few):
    monkeypatch.setattr(collector, "MOST_OBJECTS", 10**9 if few else 0)
    task = asyncio.create_task(collector.collect(LoopClock()))
    cycle = Cycle()
    gone = weakref.ref(cycle)
    await asyncio.sleep(2 * collector.FREEZE_SECONDS)
    del cycle
    gc.collect()
    assert gone() is not None  # else nothing was set aside
    await asyncio.sleep(2 * collector.FULL_SECONDS)
    assert (gone() is None) == few
    task.cancel()
