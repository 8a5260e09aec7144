"""Two steps never draw with equal noise, and a step that is run again does: through every door of a client."""

import asyncio

import numpy as np
import pytest
from cluster_harness import folder, running
from virtual_time import VIRTUAL, virtual

from seer.client import Prompt, SamplingParams
from seer.client.dynamic import DynamicSampling
from seer.client.turns import PrefixTrajectories
from seer.common import ids
from seer.common.ids import request_key
from seer.integrations.skyrl.sessions import Sessions
from seer.integrations.submissions import Keys, generate
from seer.integrations.verl.groups import Copies, GroupKey, Request
from seer.integrations.verl.turns import Session, Turns

pytestmark = VIRTUAL

PROMPTS = [Prompt("a", token_ids=[1, 2]), Prompt("b", token_ids=[3])]
SAMPLING = SamplingParams(max_tokens=12)
SAMPLED = {"n": 2, "sampling": SAMPLING}
"""A trainer that is started again sends the same prompts, in the same order."""


async def submit(client, step):
    await (await client.submit(PROMPTS, **SAMPLED)).result()


async def submit_by_step(client, step):
    await (await client.submit(PROMPTS, rollout_number=step, **SAMPLED)).result()


async def open_rollout(client, step):
    rollout = client.open_rollout()
    for asked in [rollout.submit(prompt, **SAMPLED) for prompt in PROMPTS]:
        await asked.result()
    rollout.close()


async def trajectories(client, step):
    async def agent(trajectory):
        await trajectory.generate()
        trajectory.append([9])
        await trajectory.generate()

    async with client.trajectories(PROMPTS, max_context=200, **SAMPLED) as rollout:
        async for group in rollout.run(agent):
            assert all(len(each.turns) == 2 for each in group.trajectories)


async def whole_contexts(client, step):
    rollout = client.open_rollout()
    sessions = PrefixTrajectories(rollout)
    for prompt in PROMPTS:
        context = np.array(prompt.token_ids, np.int32)
        for _ in range(2):
            found = await sessions.generate(prompt.id, context, SAMPLING, group=prompt.id)
            context = np.append(context, [*found.responses[0].token_ids, 9]).astype(np.int32)
    sessions.end_all()
    await rollout.leave()


async def dynamic_sampling(client, step):
    async with DynamicSampling(
        client, PROMPTS, lambda group: [0.0, 1.0], target=2, oversample=1.0, **SAMPLED
    ) as sampled:
        await sampled.result()


async def skyrl(client, step):
    sessions = Sessions()
    sessions.begin(step, "train")
    places = [sessions.place(f"7_{repetition}") for repetition in range(2)]
    await generate(client.open_rollout(), places, [[1, 2]] * 2, SAMPLING, Keys(0, step, -1))


async def verl(client, step):
    [copy] = Copies().number(step, ["17"])
    turns = Turns(client, seed=0, response_length=90, deadline_seconds=None)
    session, context = Session(GroupKey(step, False, "17", copy), 0), [5, 6]
    for _ in range(2):
        found = await turns.generate(session, Request(tuple(context), SAMPLING), -1)
        context += [*found.responses[0].token_ids.tolist(), 9]
    turns.ended(session)


DOORS = [
    submit, submit_by_step, open_rollout, trajectories, whole_contexts, dynamic_sampling, skyrl, verl,
]  # fmt: skip


@pytest.fixture
def keys(monkeypatch):
    """The keys that the buffer has given since this was cleared."""
    found: set[int] = set()

    def noted(*coordinates):
        found.add(key := request_key(*coordinates))
        return key

    monkeypatch.setattr(ids, "request_key", noted)
    return found


@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.__name__)
def test_steps_differ_and_one_that_is_run_again_after_a_restart_does_not(door, keys, tmp_path):
    async def run(client, step):
        keys.clear()
        await door(client, step)
        assert keys
        return set(keys)

    @virtual
    async def check():
        async with running(engines=1) as cluster:
            async with cluster.client() as client:
                first, second = await run(client, 0), await run(client, 1)
                await client.update_weights(2, folder(tmp_path, 1.0))
                third = await run(client, 2)
            assert len(first | second | third) == 3 * len(first)
            async with cluster.client() as later:  # another incarnation, which finds these weights
                assert await run(later, 2) == third
                fourth = await run(later, 3)
            assert not fourth & (first | second | third)
        async with running(engines=1) as cluster, cluster.client() as anew:
            assert await run(anew, 0) == first
            assert await run(anew, 1) == second

    check()


@pytest.mark.parametrize("door", [*DOORS[:2], *DOORS[6:]], ids=lambda door: door.__name__)
async def test_a_buffer_that_is_killed_changes_no_key(door, keys):
    async with running(engines=1) as cluster, cluster.client() as client:
        await door(client, 0)
    expected = set(keys)
    keys.clear()
    async with running(engines=1) as cluster, cluster.client() as client:
        asked = asyncio.create_task(door(client, 0))
        while not keys:
            await asyncio.sleep(0.01)
        await cluster.kill("buffer")
        await cluster.start("buffer")
        await asked
    assert keys == expected
