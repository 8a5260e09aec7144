"""What a key is for, in a whole system: whoever may not change what all have goes on with its own rollouts."""

import asyncio

import numpy as np
import pytest
from cluster_harness import folder, roll, running
from virtual_time import VIRTUAL, eventually

from seer.client import SamplingParams, SeerError, WeightsRefused
from seer.common import wire
from seer.common.config import EngineConfig, ReplayConfig
from seer.common.net.keys import ROLES, User

pytestmark = VIRTUAL

GENERATOR, TRAINER, OTHER = User("generator", "agents"), User("trainer", "run"), User("trainer", "other")
SAMPLING = SamplingParams(max_tokens=200)
SLOW = EngineConfig(backend="replay", kv_blocks=200, max_num_seqs=4, replay=ReplayConfig(step_seconds=0.05))


def of(cluster, user):
    return cluster.client(user=user, name=f"{user.name}-1")


async def test_a_generator_generates_and_changes_neither_weights_nor_sleep(tmp_path):
    path = folder(tmp_path / "one", 1.0)
    async with running(engines=1) as cluster, of(cluster, GENERATOR) as client:
        expected, buffer = await roll(client), cluster.services["buffer"]
        machine = buffer.conductor.machine
        for source in (path, {"w": np.zeros((2, 3), np.float32)}):
            with pytest.raises(
                WeightsRefused, match=r"generator:agents.*no right.*a key trainer:NAME has it"
            ):
                await client.update_weights(1, source)
        with pytest.raises(
            SeerError, match=r"generator:agents.*no right to update weights or to have engines"
        ):
            await client.sleep(level=2)
        with pytest.raises(SeerError, match="no right"):
            await client.wake()
        await client._channel.send(wire.Sleep(asleep=True, wish=2**40))  # what nobody is told of
        assert (await client.status()).weight_version == 0
        assert (machine.sleep._wish, machine.sleep.held, buffer._spool._streams) == (0, False, {})
        assert await roll(client) == expected
        async with of(cluster, TRAINER) as trainer:
            await trainer.sleep()
            with pytest.raises(SeerError, match="no right"):
                await client.wake()
            await trainer.wake()
            await trainer.update_weights(1, path)


def test_whose_keys_have_the_right():
    assert [role for role in ROLES if not User(role, "x").lacks] == ["trainer", "gateway", "operator"]


async def test_an_id_that_two_trainers_use_means_a_rollout_of_each_also_in_a_new_buffer():
    async with (
        running(engines=2, engine=SLOW) as cluster,
        of(cluster, TRAINER) as one,
        of(cluster, OTHER) as two,
    ):
        expected = [await roll(client) for client in (one, two)]
        assert expected[0] == expected[1], "no name is part of the noise"
        mine = asyncio.create_task(roll(one, rollout_id="mine"))
        await eventually(lambda: "mine" in cluster.services["buffer"].machine.rollouts)
        theirs = asyncio.create_task(roll(two, rollout_id="mine"))
        await eventually(lambda: "mine¦other-1" in cluster.services["buffer"].machine.rollouts)
        await cluster.kill("buffer")
        await cluster.start("buffer")
        assert [await mine, await theirs] == expected


async def test_a_cancel_of_one_trainer_ends_nothing_of_another():
    async with (
        running(engines=1, engine=SLOW) as cluster,
        of(cluster, TRAINER) as one,
        of(cluster, OTHER) as two,
    ):
        expected = await roll(two)
        rollout = await one.submit([[1]] * 4, n=2, sampling=SAMPLING, rollout_id="mine", rollout_number=9)
        theirs = asyncio.create_task(roll(two, rollout_id="mine"))
        await eventually(lambda: "mine¦other-1" in cluster.services["buffer"].machine.rollouts)
        await rollout.cancel()
        await eventually(lambda: "mine" not in cluster.services["buffer"].machine.rollouts)
        assert await theirs == expected
