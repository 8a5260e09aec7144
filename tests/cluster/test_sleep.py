"""Engines that sleep between rollouts, in virtual time: nothing runs, nothing is lost."""

import asyncio

import pytest
from cluster_harness import folder, roll, running
from virtual_time import eventually, virtual

from seer.client import SeerError, WeightsRefused
from seer.common.config import EngineConfig

SLOW = EngineConfig(backend="replay", kv_blocks=200, max_num_seqs=4, replay_step_seconds=0.05)


def sleepers(cluster):
    return {name for name, each in cluster.services.items() if name[0] == "e" and each._updater.sleeping}


@virtual
async def test_what_runs_is_finished_and_what_comes_waits():
    async with running(engines=2, engine=SLOW) as cluster, cluster.client() as client:
        expected = await roll(client)
        first = asyncio.create_task(roll(client))
        await eventually(lambda: cluster.services["buffer"].machine.instances.chunks > 0)
        await client.sleep()
        assert sleepers(cluster) == {"e0", "e1"}
        assert first.done() or not cluster.services["buffer"].machine.requests
        later = asyncio.create_task(roll(client))
        await asyncio.sleep(3600)
        assert not later.done()
        await client.sleep()  # already
        await client.wake()
        assert not sleepers(cluster)
        assert await later == await first == expected


@virtual
async def test_a_late_engine_sleeps_with_the_others_and_a_new_buffer_leaves_them_asleep():
    async with running(engines=1) as cluster, cluster.client() as client:
        expected = await roll(client)
        await client.sleep()
        await cluster.start("e1")
        await eventually(lambda: sleepers(cluster) == {"e0", "e1"})
        await cluster.kill("buffer")
        await cluster.start("buffer")
        later = asyncio.create_task(roll(client))
        await asyncio.sleep(60)
        assert sleepers(cluster) == {"e0", "e1"}
        assert not later.done()
        await client.wake()
        assert await later == expected


@virtual
async def test_weights_and_sleep_wait_for_each_other(tmp_path):
    async with (
        running(engines=2, engine=SLOW) as cluster,
        cluster.client() as client,
        cluster.client() as other,
    ):
        await client.sleep()
        with pytest.raises(WeightsRefused, match="wake them first"):
            await client.update_weights(1, folder(tmp_path / "one", 1.0))
        await client.wake()
        work = asyncio.create_task(roll(client))
        await eventually(lambda: cluster.services["buffer"].machine.instances.chunks > 0)
        update = asyncio.create_task(other.update_weights(1, folder(tmp_path / "one", 1.0)))
        await eventually(lambda: cluster.services["buffer"].weights.updating)
        with pytest.raises(SeerError, match="a weight update is under way"):
            await client.sleep()
        await work
        await update


@virtual
async def test_an_engine_that_cannot_take_its_memory_again_is_lost_alone():
    async with running(engines=2) as cluster, cluster.client() as client:
        expected = await roll(client)
        await client.sleep()
        broken = cluster.services["e1"]._driver

        async def fail(*_):
            raise SeerError("no memory")

        broken.sleep = fail
        waking = asyncio.create_task(client.wake())
        await eventually(lambda: cluster._tasks["e1"].done())
        await waking
        assert set(cluster.services["buffer"].machine.instances) == {"e0"}
        assert await roll(client) == expected
