"""Clocks that are set back or forth between two incarnations: the new one gets its name all the same."""

import asyncio

import pytest
from cluster_harness import PROMPTS, running
from memory_transport import MemoryTransport
from virtual_time import PROCESS, VIRTUAL, eventually

from seer.client import RolloutClient, SamplingParams
from seer.common import ids
from seer.common.clock import LoopClock
from seer.common.config import BufferConfig, Config, Endpoints, EngineConfig
from seer.common.errors import SeerError
from seer.common.net.transport.zmq import ZmqTransport
from seer.services.buffer import server as buffer
from seer.services.engine import server as engine

pytestmark = VIRTUAL

SAMPLING = SamplingParams(max_tokens=60)
HOUR = 3600


def jump(monkeypatch, seconds):
    """Set the clock of the processes that start from now on."""
    real = ids.time.time_ns
    monkeypatch.setattr(ids.time, "time_ns", lambda: real() + seconds * 10**9)


@pytest.mark.parametrize("stopped", [False, True])
@pytest.mark.parametrize("seconds", [-HOUR, HOUR])
async def test_a_trainer_comes_back(seconds, stopped, monkeypatch):
    async with running(engines=1) as cluster:
        transport = MemoryTransport(cluster.network)
        token = PROCESS.set("stopped")
        past = await cluster.client(transport, name="t").__aenter__()
        PROCESS.reset(token)
        await past.submit(PROMPTS, n=2, sampling=SAMPLING, rollout_id="r")
        if stopped:
            asyncio.get_running_loop().freeze("stopped")
        else:
            await transport.close()
        jump(monkeypatch, seconds)
        async with cluster.client(name="t") as client, asyncio.timeout(25 if stopped else 4):
            rollout = await client.submit(PROMPTS, n=2, sampling=SAMPLING, rollout_id="r")
            assert len(await rollout.result()) == len(PROMPTS)
        if stopped:
            asyncio.get_running_loop().thaw("stopped")
            await past.close()


async def test_a_trainer_whose_name_is_in_use_hears_so(monkeypatch):
    async with running(engines=1) as cluster, cluster.client(name="t") as first:
        jump(monkeypatch, -HOUR)
        async with cluster.client(name="t") as second, asyncio.timeout(12):
            rollout = await second.submit(PROMPTS, n=2, sampling=SAMPLING)
            with pytest.raises(SeerError, match="another incarnation of trainer t is connected"):
                await rollout.result()
        rollout = await first.submit(PROMPTS, n=2, sampling=SAMPLING)
        assert len(await rollout.result()) == len(PROMPTS)


@pytest.mark.parametrize("stopped", [False, True])
@pytest.mark.parametrize("seconds", [-HOUR, HOUR])
async def test_an_engine_comes_back(seconds, stopped, monkeypatch):
    async with running(engines=0) as cluster:
        token = PROCESS.set("stopped")
        await cluster.start("e0")
        PROCESS.reset(token)
        machine = cluster.services["buffer"].machine
        await eventually(lambda: set(machine.instances) == {"e0"})
        past = cluster._transports["e0"], cluster._tasks["e0"]
        if stopped:
            asyncio.get_running_loop().freeze("stopped")
        else:
            await cluster.kill("e0")
        jump(monkeypatch, seconds)
        await cluster.start("e0")
        async with cluster.client() as client, asyncio.timeout(25 if stopped else 4):
            rollout = await client.submit(PROMPTS, n=2, sampling=SAMPLING)
            assert len(await rollout.result()) == len(PROMPTS)
        if stopped:
            asyncio.get_running_loop().thaw("stopped")
            await past[0].close()
            past[1].cancel()


@pytest.mark.parametrize("seconds", [-HOUR, HOUR])
@pytest.mark.real_time
async def test_killed_incarnations_are_followed_over_zeromq(seconds, monkeypatch, tmp_path):
    at = Endpoints(**{
        name: f"ipc://{tmp_path}/{name}"
        for name in ("trainers", "engines", "events", "event_snapshots", "estimates", "estimate_snapshots")
    } | {"dgds": f"ipc://{tmp_path}/dgds"})  # fmt: skip
    settings = EngineConfig(backend="replay", name="e0", kv_blocks=200, max_num_seqs=16)
    config = Config(endpoints=at, engine=settings, buffer=BufferConfig(chunk_size=32))
    made, tasks = [], []

    def transport():
        made.append(ZmqTransport())
        return made[-1]

    async def start(make):
        service = make(config, transport(), LoopClock())
        await service.start()
        tasks.append(asyncio.create_task(service.run()))
        return tasks[-1], made[-1]

    async with asyncio.timeout(30):
        await start(buffer.make)
        serving, wires = await start(engine.make)
        first = transport()
        killed = RolloutClient(at.trainers, name="t", transport=first)
        await killed.__aenter__()
        rollout = await killed.submit(PROMPTS, n=2, sampling=SAMPLING)
        assert len(await rollout.result()) == len(PROMPTS)
        for dead in (first, wires):
            for socket in dead._sockets:
                socket.close(linger=0)
        serving.cancel()
        await asyncio.wait([serving])
        jump(monkeypatch, seconds)
        await start(engine.make)
        async with RolloutClient(at.trainers, name="t", transport=transport()) as client:
            rollout = await client.submit(PROMPTS, n=2, sampling=SAMPLING)
            assert len(await rollout.result()) == len(PROMPTS)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        for each in made:
            await each.close()
