"""What a key is for, in a whole system: whoever may not change what all have goes on with its own rollouts."""

import numpy as np
import pytest
from cluster_harness import folder, roll, running
from virtual_time import VIRTUAL

from seer.client import SeerError, WeightsRefused
from seer.common import wire
from seer.common.net.keys import ROLES, User

pytestmark = VIRTUAL

GENERATOR, TRAINER = User("generator", "agents"), User("trainer", "run")


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
