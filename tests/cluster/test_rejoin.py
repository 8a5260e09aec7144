"""An incarnation of an engine that has not registered yet, in virtual time."""

import asyncio

import pytest
from cluster_harness import running
from memory_transport import MemoryTransport
from virtual_time import VIRTUAL

from seer.common import ids, wire
from seer.common.clock import LoopClock
from seer.common.net.channel import Channel
from seer.common.net.identity import Identity

pytestmark = VIRTUAL


async def test_an_incarnation_that_has_not_registered_yet_is_not_given_up_for_an_earlier_one():
    async with running(engines=1) as cluster:
        await asyncio.sleep(1)
        buffer = cluster.services["buffer"]
        assert "e0" in buffer.machine.instances
        asyncio.get_running_loop().freeze("e0")
        me = Identity(
            role="engine", name="e0", incarnation=ids.new_incarnation(), config_hash=buffer.me.config_hash
        )
        transport, at = MemoryTransport(cluster.network), buffer._config.endpoints.engines
        later = Channel(transport, at, me, wire.BufferToEngine, LoopClock())
        await later.open(5)
        with pytest.raises(TimeoutError):  # no Welcome: nothing happened to this one
            async with asyncio.timeout(60):
                while isinstance(await later.recv(), wire.Ping):
                    pass
        assert "e0" not in buffer.machine.instances, "the earlier incarnation was given up"
        later.close()
        asyncio.get_running_loop().thaw("e0")
