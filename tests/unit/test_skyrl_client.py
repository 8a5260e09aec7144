"""The connection of SkyRL's client. No SkyRL."""

from __future__ import annotations

import asyncio
import importlib
import sys
from types import ModuleType
from unittest.mock import AsyncMock, MagicMock

import pytest


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the client's module, without SkyRL."""
    name, base = "seer.integrations.skyrl.client", "skyrl.backends.skyrl_train.inference_servers.base"
    with monkeypatch.context() as alone:
        alone.setitem(sys.modules, base, MagicMock(InferenceEngineInterface=object))
        alone.delitem(sys.modules, name, raising=False)
        module = importlib.import_module(name)
    sys.modules.pop(name, None)
    return module


async def test_first_calls_that_come_together_open_one_client(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def connected() -> MagicMock:
        await asyncio.sleep(0)
        return MagicMock()

    opened = MagicMock(return_value=AsyncMock(__aenter__=AsyncMock(side_effect=connected)))
    monkeypatch.setattr(module, "RolloutClient", opened)
    client = module.SeerInferenceClient("tcp://127.0.0.1:1", None, "model", 0)
    found = await asyncio.gather(*(client._connected() for _ in range(3)))
    assert opened.call_count == 1
    assert found[0] is found[1] is found[2] is await client._connected()


async def test_a_teardown_during_the_first_connect_leaves_no_connection(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, opened = asyncio.Event(), MagicMock(close=AsyncMock())

    async def connected() -> MagicMock:
        await there.wait()
        return opened

    connecting = AsyncMock(__aenter__=AsyncMock(side_effect=connected))
    monkeypatch.setattr(module, "RolloutClient", MagicMock(return_value=connecting))
    client = module.SeerInferenceClient("tcp://127.0.0.1:1", None, "model", 0)
    call = asyncio.create_task(client._connected())
    await asyncio.sleep(0)
    ending = asyncio.create_task(client.teardown())
    await asyncio.sleep(0)
    there.set()
    await asyncio.gather(call, ending)
    assert client._connection is None
    assert opened.close.await_count == 1
