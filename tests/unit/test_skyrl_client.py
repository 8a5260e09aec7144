"""The connection of SkyRL's client. No SkyRL."""

from __future__ import annotations

import asyncio
import importlib
import sys
from unittest.mock import AsyncMock, MagicMock

import pytest


async def test_first_calls_that_come_together_open_one_client(monkeypatch: pytest.MonkeyPatch) -> None:
    name, base = "seer.integrations.skyrl.client", "skyrl.backends.skyrl_train.inference_servers.base"
    with monkeypatch.context() as alone:
        alone.setitem(sys.modules, base, MagicMock(InferenceEngineInterface=object))
        alone.delitem(sys.modules, name, raising=False)
        module = importlib.import_module(name)
    sys.modules.pop(name, None)  # it was made without SkyRL

    async def connected() -> MagicMock:
        await asyncio.sleep(0)
        return MagicMock()

    opened = MagicMock(return_value=AsyncMock(__aenter__=AsyncMock(side_effect=connected)))
    monkeypatch.setattr(module, "RolloutClient", opened)
    client = module.SeerInferenceClient("tcp://127.0.0.1:1", None, "model", 0)
    found = await asyncio.gather(*(client._connected() for _ in range(3)))
    assert opened.call_count == 1
    assert found[0] is found[1] is found[2] is await client._connected()
