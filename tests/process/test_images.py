"""Images between real processes, over real sockets, while buffer and engines are killed."""

import asyncio
import functools
import os
import signal

import pytest
from prepared_images import placed

from seer.client import Prompt, RolloutClient, SamplingParams
from seer.common import wire
from seer.common.config import load
from seer.local.system import LocalSystem

SETTINGS = [
    "engine.backend=replay", "engine.replay.step_seconds=0.002", "engine.kv_blocks=2000", "log.level=warning",
    "buffer.chunk_size=32", "buffer.policy=migrate",
]  # fmt: skip
SAMPLING = SamplingParams(max_tokens=200, ignore_eos=True)


@functools.cache
def prompts() -> list[Prompt]:
    """Each shows an image of 4 MiB."""
    return [
        Prompt(f"p{seed}", token_ids=[1, 2, 3], images=[placed(seed, 1, 1, wire.IMAGE_PART_BYTES // 2)])
        for seed in range(24)
    ]


async def rolled(client: RolloutClient) -> list[list[int]]:
    rollout = await client.submit(prompts(), n=4, sampling=SAMPLING, rollout_number=0, repeat=True)
    return [response.token_ids.tolist() for group in await rollout.result() for response in group.responses]


@pytest.mark.breadth
async def test_whoever_is_killed_while_images_travel_gets_them_again(monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    async with LocalSystem(load(None, {}, SETTINGS), 2) as system, RolloutClient(system.endpoint) as client:
        task = asyncio.create_task(rolled(client))
        for name in ("buffer", "engine-0", "buffer"):
            async with asyncio.timeout(30):
                while True:
                    counters = (await client.status()).counters
                    if counters["image_received_bytes"] or counters["image_sent_bytes"]:
                        break
                    await asyncio.sleep(0.005)
            os.kill(system.pids[name], signal.SIGKILL)
            await asyncio.sleep(0.5)
        disturbed = await task
        assert await rolled(client) == disturbed
        size = prompts()[0].images[0].image.size
        counters = (await client.status()).counters
        assert counters["image_received_bytes"] <= 24 * size, "to this buffer, each once at most"
        assert counters["image_sent_bytes"] <= 2 * 24 * size
