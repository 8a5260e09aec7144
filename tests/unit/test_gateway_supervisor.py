"""The gateway's supervisor, with processes played by the test."""

from __future__ import annotations

import asyncio

import pytest
from memory_transport import MemoryNetwork, MemoryTransport
from virtual_time import VIRTUAL

from seer.common.config import Config
from seer.gateway.supervisor import WorkerSupervisor

pytestmark = VIRTUAL


async def test_a_drain_does_not_wait_for_the_pause_before_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    supervisor = WorkerSupervisor(Config(), MemoryTransport(MemoryNetwork()))
    ran = []

    async def ends_at_once(ready: asyncio.Future[None], began: list[float]) -> str:
        ran.append(began)
        return "it ended"

    monkeypatch.setattr(supervisor, "_run_one", ends_at_once)
    ready = loop.create_future()
    ready.set_result(None)
    keeper = asyncio.create_task(supervisor._keep(ready))
    await asyncio.sleep(1.5)  # within the third pause
    assert len(ran) == 3
    supervisor.drain()
    await keeper
    assert (len(ran), loop.time()) == (3, 1.5)
