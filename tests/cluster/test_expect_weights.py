"""Who says which weights it expects gets tokens of those or an error that says who changed them, never others."""

import asyncio

import numpy as np
import pytest
from cluster_harness import PROMPTS, folder, roll, running
from virtual_time import VIRTUAL, eventually

from seer.client import InvalidField, RequestRefused, RolloutCancelled, SamplingParams
from seer.common import wire
from seer.common.config import EngineConfig, ReplayConfig

pytestmark = VIRTUAL

SLOW = EngineConfig(backend="replay", kv_blocks=200, max_num_seqs=4, replay=ReplayConfig(step_seconds=0.05))
LATER = (
    r"expects weight version 1, and version 2 is live, by an update of two: update, or expect that version"
)


def now():
    return asyncio.get_running_loop().time()


async def test_the_expected_weights_generate_and_others_are_refused_with_who_made_them_live(tmp_path):
    async with (
        running(engines=2) as cluster,
        cluster.client(name="one") as one,
        cluster.client(name="two") as two,
    ):
        new = folder(tmp_path / "one", 1.0)
        await one.update_weights(1, new)
        assert (await roll(two, expect_weights=1))[1][0] == 1
        await two.update_weights(2, new)
        began = now()
        with pytest.raises(RequestRefused, match=LATER):
            await roll(one, expect_weights=1)
        with pytest.raises(RequestRefused, match=LATER):
            await one.open_rollout(expect_weights=1).submit([1, 2]).result()
        assert now() - began < 1.0, "at once"
        with pytest.raises(
            RequestRefused, match="expects weight version 7, and version 2 is live, by an update"
        ):
            await roll(one, expect_weights=7)
        assert now() - began < 15.0, "it is not waited for"
        assert (await roll(one, expect_weights=2))[1][0] == 2
        group = await one.open_rollout(expect_weights=2).submit([1, 2], n=2).result()
        assert group.weight_version == 2


async def test_trajectories_expect_weights_at_every_turn(tmp_path):
    async with running(engines=2) as cluster, cluster.client(name="one") as client:

        async def two_turns(trajectory):
            for _ in range(2):
                await trajectory.generate(max_tokens=8)
                trajectory.append([7])

        async def run(version):
            async with client.trajectories([[1, 2]], n=1, max_context=64, expect_weights=version) as rollout:
                (group,) = [group async for group in rollout.run(two_turns)]
                return group.trajectories[0]

        assert (await run(0)).weight_version == 0
        await client.update_weights(1, folder(tmp_path / "one", 1.0))
        assert "expects weight version 0, and version 1 is live, by an update of one" in str(await run(0))


@pytest.mark.parametrize("in_flight", ["finish", "abort"])
async def test_whoever_waits_while_another_changes_the_weights_hears_of_it(tmp_path, in_flight):
    async with (
        running(engines=1, engine=SLOW) as cluster,
        cluster.client(name="one") as one,
        cluster.client(name="two") as two,
    ):
        new = folder(tmp_path / "one", 1.0)
        await one.update_weights(1, new)
        buffer = cluster.services["buffer"]
        runs = asyncio.create_task(roll(one, expect_weights=1))
        await eventually(lambda: buffer.machine.counters["chunks"] > 2)
        update = asyncio.create_task(two.update_weights(2, new, in_flight=in_flight))
        if in_flight == "finish":
            await eventually(lambda: buffer.weights.updating)
        later = asyncio.create_task(roll(one, number=1, expect_weights=1))
        if in_flight == "abort":
            with pytest.raises(RolloutCancelled, match="aborted by a weight update of two to version 2"):
                await runs
        else:
            assert (await runs)[1][0] == 1
        await update
        with pytest.raises(RequestRefused, match=LATER):
            await later


async def test_a_buffer_that_is_started_again_learns_which_weights_are_live_before_it_refuses(tmp_path):
    async with running(engines=2, engine=SLOW) as cluster, cluster.client(name="one") as one:
        await one.update_weights(1, folder(tmp_path / "one", 1.0))
        expected = await roll(one, expect_weights=1)
        runs = asyncio.create_task(roll(one, expect_weights=1))
        await eventually(lambda: cluster.services["buffer"].machine.counters["chunks"] > 60)
        await cluster.kill("buffer")
        for name in ("e0", "e1"):
            cluster._transports[name].disconnect()
        await cluster.start("buffer")
        await cluster.start("e2")  # has the weights that it began with, of version 0
        await asyncio.sleep(3.0)
        cluster._transports["e0"].reconnect()
        assert await runs == expected
        await cluster.kill("buffer")
        await cluster.start("buffer")
        with pytest.raises(RequestRefused, match=r"expects weight version 2, and version 1 is live: update"):
            await roll(one, expect_weights=2)


async def test_values_that_make_no_sense_are_refused():
    async with running(engines=1) as cluster, cluster.client(name="one") as client:
        for wrong in (-1, 2**63, True, "1", 1.0):
            with pytest.raises(InvalidField, match="expect_weights"):
                await client.submit(PROMPTS, expect_weights=wrong)
            with pytest.raises(InvalidField, match="expect_weights"):
                client.open_rollout(expect_weights=wrong)
        with pytest.raises(InvalidField, match="weight_version says 2: give one of them"):
            await client.submit(PROMPTS, expect_weights=1, weight_version=2)
        with pytest.raises(InvalidField, match="give one of them"):
            client.open_rollout(expect_weights=0).submit([1, 2], weight_version=2)
        nothing = wire.Submit(
            rollout_id="r", rollout_number=0, seed=0, n=1, sampling=SamplingParams(max_tokens=4), lengths=[1],
            prompt_ids=["p"], tokens=np.array([1], np.int32), expects=True,
        )  # fmt: skip
        await client._channel.send(nothing)  # it expects whatever is live
        await eventually(lambda: cluster.services["buffer"].machine.counters["tokens"] > 0)
