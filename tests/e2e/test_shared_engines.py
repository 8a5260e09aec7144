"""That tests may share engines: whatever one leaves behind, the next finds them as if new."""

import asyncio
from pathlib import Path

import pytest
from shared_engines import SharedEngines, changed_model

from seer.client import RolloutClient, SamplingParams
from seer.common.types import InstanceStats
from seer.common.wire import Status
from seer.services.engine.server import STATUS_SECONDS

pytestmark = [pytest.mark.timeout(600)]

PROMPTS = [[10 + i] * 70 for i in range(6)]
SAMPLING = SamplingParams(max_tokens=24, ignore_eos=True)
SETTLED_SECONDS = 3 * STATUS_SECONDS


def computed(status: Status) -> int:
    """How many tokens of prompts the engines have computed so far."""
    return sum(each.stats.prompt_tokens - each.stats.cached_tokens for each in status.instances)


async def roll(endpoint: str) -> tuple[list[list[int]], Status]:
    """Return the tokens, and the status once all engines have reported what they computed for them."""
    async with RolloutClient(endpoint) as client:
        rollout = await client.submit(PROMPTS, n=1, sampling=SAMPLING, rollout_number=0)
        tokens = [group.responses[0].token_ids.tolist() for group in await rollout.result()]
        stats: list[InstanceStats] = []
        while True:
            earlier, status = stats, await client.status()
            stats = [each.stats for each in status.instances]
            if stats == earlier and all(each.steps and not each.running for each in stats):
                return tokens, status
            await asyncio.sleep(SETTLED_SECONDS)  # engines report from time to time: these may be of before


@pytest.mark.breadth
async def test_engines_are_as_if_new_whatever_was_left(pair: SharedEngines, tmp_path: Path) -> None:
    changed = changed_model(tmp_path / "model")
    first, before = await roll(pair.anew(policy="static"))
    pids = pair.system.pids
    async with RolloutClient(pair.system.endpoint) as client:
        await client.update_weights(before.weight_version + 1, changed)
        assert (await roll(pair.system.endpoint))[0] != first
        await client.submit(PROMPTS, n=4, sampling=SamplingParams(max_tokens=300), rollout_number=1)
        await client.sleep()  # nobody wakes them
    _, left = await roll(pair.anew(policy="static"))
    again, after = await roll(pair.anew(chunk_size=64))
    assert again == first
    assert (after.policy, after.weights_digest) == ("seer", before.weights_digest)
    assert computed(after) - computed(left) == sum(map(len, PROMPTS))
    changed_pids = {name for name, pid in pair.system.pids.items() if pid != pids[name]}
    assert changed_pids == {"buffer"}
