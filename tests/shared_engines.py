"""Engines that several tests use one after the other: each test has a buffer of its own, and engines as if new.

Invariants (tests/e2e/test_shared_engines.py):
- a test finds the model's own weights, no KV and no work of those before it, whatever they left;
- engines keep their process ids: nothing is started but the buffer.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from seer.client import RolloutClient
from seer.client.loop_thread import LoopThread
from seer.common.config import BufferConfig, load
from seer.common.wire import Status
from seer.local.system import LocalSystem

if TYPE_CHECKING:
    import torch

EXAMPLE = Path(__file__).parents[1] / "examples" / "countdown"
MODEL = EXAMPLE / "model"

JOIN_SECONDS = 120.0

ONE_CORE = (f"engine.cpu_cores={min(os.sched_getaffinity(0))}",)
"""For an engine by itself: threads that wait for each other are slow beside other work."""


def texts(count: int) -> list[str]:
    """Return the first prompts of the example."""
    lines = (EXAMPLE / "prompts.jsonl").read_text().splitlines()[:count]
    return [json.loads(line)["prompt"] for line in lines]


def tensors(scale: float = 1.0) -> dict[str, torch.Tensor]:
    """Return the shipped model's weights, all as many times as large."""
    from safetensors.torch import load_file

    return {name: tensor * scale for name, tensor in load_file(MODEL / "model.safetensors").items()}


def changed_model(folder: Path, scale: float = 1.02) -> Path:
    """Write the shipped model with other weights into a new folder."""
    from safetensors.torch import save_file

    shutil.copytree(MODEL, folder)
    save_file(tensors(scale), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


async def until_generated(client: RolloutClient, tokens: int) -> None:
    """Wait until the buffer has had so many tokens more than now: what `Progress` tells once a second is late."""
    before = (await client.status()).counters.get("tokens", 0)
    async with asyncio.timeout(JOIN_SECONDS):
        while (await client.status()).counters.get("tokens", 0) < before + tokens:
            await asyncio.sleep(0.01)


class SharedEngines:
    """`settings` are those of the configuration, `engine.kv_blocks=48`; close it at the end.

    Tests call from any thread or loop: the system has a loop of its own.
    """

    def __init__(self, model: Path, instances: int, *settings: str) -> None:
        self._model = model
        self._instances = instances
        usual = [f"shared.model={model}", "pool.kind=none", "drafts.source=off"]
        config = load(None, {}, [*usual, *(ONE_CORE if instances == 1 else ()), *settings])
        self.system = LocalSystem(config, instances)
        self._thread = LoopThread().start()
        self._thread.call(self.system.__aenter__())
        self._digest = self._thread.call(self._live()).weights_digest

    def anew(self, **buffer: object) -> str:
        """Have a buffer with these settings, and engines as if new; return where trainers connect."""
        self._thread.call(self._anew(BufferConfig(**buffer)))
        return self.system.endpoint

    def close(self) -> None:
        self._thread.call(self.system.__aexit__(None, None, None))
        self._thread.stop()

    async def _anew(self, buffer: BufferConfig) -> None:
        await self.system.restart_buffer(buffer)
        async with RolloutClient(self.system.endpoint) as client:
            await client.wake()
            status = await self._live()
            if status.weights_digest != self._digest:
                await client.update_weights(status.weight_version + 1, self._model)
            await client.sleep()  # drops all KV
            await client.wake()

    async def _live(self) -> Status:
        """Wait until all engines are there, and awake."""
        async with asyncio.timeout(JOIN_SECONDS), RolloutClient(self.system.endpoint) as client:
            while len((status := await client.status()).instances) < self._instances:
                await asyncio.sleep(0.1)
            return status
