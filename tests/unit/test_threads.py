"""Work in threads that outlives whoever waits for it."""

import asyncio
import threading

import pytest

from seer.common.process.threads import until_stopped


async def test_work_has_ended_however_often_the_wait_for_it_is_cancelled():
    begun, stop, ended = threading.Event(), threading.Event(), threading.Event()
    stops = []

    def work() -> None:
        begun.set()
        assert stop.wait(10)
        ended.set()

    waiting = asyncio.create_task(until_stopped(lambda: stops.append(1), work))
    await asyncio.to_thread(begun.wait)
    for _ in range(3):
        waiting.cancel()
        await asyncio.sleep(0.05)
        assert not waiting.done()
    stop.set()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert ended.is_set()
    assert stops == [1]
