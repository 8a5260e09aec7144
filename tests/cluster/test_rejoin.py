"""An engine that was given up registers once, and its work is done once; in virtual time, with latency."""

import asyncio
from collections import Counter

import pytest
from cluster_harness import SERVERS, Cluster, engine_make, roll
from lag import LaggedTransport
from memory_transport import MemoryTransport
from virtual_time import PROCESS, virtual

from seer.common import ids, wire
from seer.common.clock import LoopClock
from seer.common.net.channel import Channel
from seer.common.net.identity import Identity


class Stopping(Cluster):
    """Each service is a process of its own, which can be stopped; engines have latency."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.joins: Counter[str] = Counter()

    async def start(self, name: str) -> None:
        token = PROCESS.set(name)
        lag = 0.0 if name in SERVERS else self.seconds
        transport = self._transports[name] = LaggedTransport(self.network, lag, lag)
        service = self.services[name] = SERVERS.get(name, engine_make)(
            self.config(name), transport, LoopClock()
        )
        await service.start()
        self._tasks[name] = asyncio.create_task(service.run(), name=name)
        PROCESS.reset(token)
        if name == "buffer":
            join = service.conductor.join
            service.conductor.join = lambda name, *facts: (self.joins.update([name]), join(name, *facts))

    async def stop_for(self, name: str, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        loop.freeze(name)
        await asyncio.sleep(seconds)
        loop.thaw(name)


@pytest.mark.parametrize("seconds", [0.0, 0.5, 3.0])
@pytest.mark.parametrize("stopped", ["buffer", "e0"])
def test_a_stall_costs_at_most_one_registration(stopped, seconds):
    @virtual
    async def check():
        cluster = Stopping(seconds)
        try:
            for name in [*SERVERS, "e0", "e1"]:
                await cluster.start(name)
            async with cluster.client(silence_seconds=600) as client:
                expected, _ = await roll(client)
                assert cluster.joins == {"e0": 1, "e1": 1}
                rolling = asyncio.create_task(roll(client))
                await asyncio.sleep(0.1)
                await cluster.stop_for(stopped, 45)
                assert (await rolling)[0] == expected
                await asyncio.sleep(30)
                assert max(cluster.joins.values()) <= 2
                if stopped == "e0":
                    assert cluster.joins == {"e0": 2, "e1": 1}
                assert set(cluster.services["buffer"].machine.instances) == {"e0", "e1"}
        finally:
            await cluster.stop()

    check()


@virtual
async def test_a_life_that_has_not_registered_yet_is_not_given_up_for_an_earlier_one():
    cluster = Stopping(0.0)
    try:
        for name in [*SERVERS, "e0"]:
            await cluster.start(name)
        await asyncio.sleep(1)
        buffer = cluster.services["buffer"]
        assert "e0" in buffer.machine.instances
        asyncio.get_running_loop().freeze("e0")
        me = Identity(
            role="engine", name="e0", incarnation=ids.new_incarnation(), config_hash=buffer.me.config_hash
        )
        later = Channel(
            MemoryTransport(cluster.network),
            buffer._config.endpoints.engines,
            me,
            wire.BufferToEngine,
            LoopClock(),
        )
        await later.open(5)
        with pytest.raises(TimeoutError):  # no Welcome: nothing happened to this one
            async with asyncio.timeout(60):
                while isinstance(await later.recv(), wire.Ping):
                    pass
        assert "e0" not in buffer.machine.instances, "the earlier life was given up"
        later.close()
    finally:
        asyncio.get_running_loop().thaw("e0")
        await cluster.stop()
