"""Promises that hostile use broke, each on the whole system: nothing lost, nothing of another use, no hang."""

import asyncio
import contextlib
import contextvars

import pytest
from cluster_harness import PROMPTS, folder, running
from memory_transport import MemoryTransport
from virtual_time import PROCESS, VIRTUAL, eventually

from seer.client import BufferLost, DeadlineExceeded, RequestRefused, SamplingParams
from seer.common.config import BufferConfig, EngineConfig, ReplayConfig
from seer.services.buffer import server as buffer_server

pytestmark = VIRTUAL

SLOW = EngineConfig(backend="replay", kv_blocks=200, max_num_seqs=4, replay=ReplayConfig(step_seconds=0.1))
SAMPLING = SamplingParams(max_tokens=100)


def tokens(groups):
    return {
        (group.prompt_id, response.index): response.token_ids.tolist()
        for group in groups
        for response in group.responses
    }


async def undisturbed(number=0, weights=None, **options):
    async with running() as cluster, cluster.client() as client:
        if weights is not None:
            await client.update_weights(3, weights)
        rollout = await client.submit(PROMPTS, n=2, sampling=SAMPLING, rollout_number=number, **options)
        return tokens(await rollout.result())


def joins(cluster):
    """Count the registrations that the buffer takes from now on."""
    conductor = cluster.services["buffer"].conductor
    seen, join = [], conductor.join

    def counted(name, *rest):
        seen.append(name)
        join(name, *rest)

    conductor.join = counted
    return seen


@pytest.mark.parametrize("seconds", [5.0, 15.0, 45.0, 90.0, 1000.0])
async def test_a_buffer_that_stood_still_loses_no_engine_and_no_prompt(seconds):
    expected = await undisturbed()
    async with running(engine=SLOW) as cluster, cluster.client(silence_seconds=2000.0) as client:
        registered = joins(cluster)
        rollout = await client.submit(PROMPTS, n=2, sampling=SAMPLING, rollout_number=0)
        await asyncio.sleep(2.0)
        await cluster.stand_still("buffer", seconds)
        assert tokens(await rollout.result()) == expected
        assert registered == []
        assert cluster.services["buffer"].machine.counters["lost"] == 0


@pytest.mark.parametrize("seconds", [25.0, 45.0, 90.0])
async def test_an_engine_that_stood_still_registers_once_and_costs_no_attempt(seconds, monkeypatch):
    expected = await undisturbed()
    monkeypatch.setattr(buffer_server, "MAX_ATTEMPTS", 1)
    async with (
        running(engine=SLOW, buffer=BufferConfig(chunk_size=32)) as cluster,
        cluster.client() as client,
    ):
        registered = joins(cluster)
        rollout = await client.submit(PROMPTS, n=2, sampling=SAMPLING, rollout_number=0)
        await asyncio.sleep(2.0)
        await cluster.stand_still("e0", seconds)
        assert tokens(await rollout.result()) == expected
        await asyncio.sleep(30.0)
        assert registered == ["e0"]
        assert len(cluster.services["buffer"].machine.instances) == 2


async def attach(cluster, stack, name="t"):
    """Enter a client as a process of its own, and return it with what ends it as SIGKILL would."""
    transport = MemoryTransport(cluster.network)
    client = cluster.client(transport, name=name)
    scope = contextvars.copy_context()
    scope.run(PROCESS.set, name)
    await asyncio.create_task(client.__aenter__(), context=scope)

    async def kill():
        await transport.close()
        client._task.cancel()
        await asyncio.wait([client._task])

    stack.push_async_callback(kill)
    return client, kill


@pytest.mark.parametrize("pause", [0.0, 3.0])
@pytest.mark.parametrize("update", [False, True])
async def test_a_trainer_that_comes_back_gets_what_it_asked_for(tmp_path, pause, update):
    expected = await undisturbed()
    async with running(engine=SLOW) as cluster, contextlib.AsyncExitStack() as stack:
        client, kill = await attach(cluster, stack)
        options = {"n": 2, "sampling": SAMPLING, "rollout_number": 0, "rollout_id": "r"}
        rollout = await client.submit(PROMPTS, **options)
        await eventually(lambda: len(rollout.groups) >= 2)
        await kill()
        await asyncio.sleep(pause)
        client, _ = await attach(cluster, stack)
        machine = cluster.services["buffer"].machine
        done = machine.counters["tokens"]
        if update:  # it does first what a trainer does: it says which weights it has
            live = (await client.status()).weight_version
            assert live == 0
        await asyncio.sleep(2.0)  # time enough to hear of the rollout before it is asked for
        again = await client.submit(PROMPTS, **options)
        assert tokens(await again.result()) == expected
        assert machine.counters["refused"] == 0
        total = sum(len(each) for each in expected.values())
        assert machine.counters["tokens"] <= total + 4 * len(PROMPTS) * 100
        assert done > 0


async def test_an_id_that_is_used_again_gives_the_tokens_of_its_own_seed():
    expected = await undisturbed(seed=1)
    async with running(engine=SLOW) as cluster, cluster.client() as client:
        options = {"n": 2, "sampling": SAMPLING, "rollout_number": 0, "rollout_id": "r"}
        for seconds in (0.2, 1.0, 3.0):
            before = await client.submit(PROMPTS, seed=0, deadline_seconds=seconds, **options)
            with pytest.raises(DeadlineExceeded):
                await before.result()
        rollout = await client.submit(PROMPTS, seed=1, **options)
        assert tokens(await rollout.result()) == expected


async def test_a_drain_finishes_what_was_begun_through_a_blip_and_its_successor_does_the_rest(tmp_path):
    expected = await undisturbed()
    async with running(engine=SLOW) as cluster, contextlib.AsyncExitStack() as stack:
        transport = MemoryTransport(cluster.network)
        client = cluster.client(transport)
        await stack.enter_async_context(client)
        rollout = await client.submit(PROMPTS, n=2, sampling=SAMPLING, rollout_number=0)
        held = await client.submit(PROMPTS, n=2, sampling=SAMPLING, rollout_number=1, weight_version=3)
        await eventually(lambda: len(rollout.groups) >= 2)
        draining = asyncio.create_task(cluster.drain("buffer", 600.0))
        await asyncio.sleep(0.5)
        transport.disconnect()
        await asyncio.sleep(1.0)
        transport.reconnect()
        assert tokens(await rollout.result()) == expected
        updating = asyncio.create_task(client.update_weights(3, folder(tmp_path / "w3", 1.0)))
        later = await client.submit(PROMPTS, n=2, sampling=SAMPLING, rollout_number=2, weight_version=3)
        await draining
        await asyncio.sleep(20.0)
        assert not held.groups
        assert not later.groups
        assert not updating.done()
        await cluster.start("buffer")
        assert (await updating).version == 3
        for number, each in ((1, held), (2, later)):
            groups = await each.result()
            assert {group.weight_version for group in groups} == {3}
            assert tokens(groups) == await undisturbed(number, tmp_path / "w3")


async def test_who_has_a_deadline_waits_that_long_for_the_successor_of_a_buffer_that_drained():
    async with running(engine=SLOW) as cluster, cluster.client(silence_seconds=30.0) as client:
        first = await client.submit(PROMPTS, n=2, sampling=SAMPLING, rollout_number=0)
        await eventually(lambda: len(first.groups) >= 2)
        draining = asyncio.create_task(cluster.drain("buffer", 600.0))
        await asyncio.sleep(0.5)
        patient = await client.submit(
            PROMPTS, n=2, sampling=SAMPLING, rollout_number=1, deadline_seconds=1000.0
        )
        brief = await client.submit(PROMPTS, n=2, sampling=SAMPLING, rollout_number=2, deadline_seconds=150.0)
        other = await client.submit(PROMPTS, n=2, sampling=SAMPLING, rollout_number=3)
        assert (await client.status()).draining
        await draining
        assert len(first.groups) == len(PROMPTS)
        with pytest.raises(BufferLost, match="it was draining, and no successor answered"):
            await other.result()
        with pytest.raises(DeadlineExceeded):
            await brief.result()
        await cluster.start("buffer")
        assert tokens(await patient.result()) == await undisturbed(1)
        assert not (await client.status()).draining


async def test_a_rollout_never_mixes_weights(tmp_path):
    """A trainer is killed, another one updates, the first comes back for the rest without naming a version."""
    async with running(engine=SLOW) as cluster, contextlib.AsyncExitStack() as stack:
        client, kill = await attach(cluster, stack)
        options = {"n": 2, "sampling": SAMPLING, "rollout_number": 0, "rollout_id": "r"}
        rollout = await client.submit(PROMPTS, **options)
        await eventually(lambda: len(rollout.groups) >= 2)
        await kill()
        async with cluster.client() as other:
            await other.update_weights(1, str(folder(tmp_path / "new", 1.0)), in_flight="abort")
        client, _ = await attach(cluster, stack)
        again = await client.submit(PROMPTS, **options)
        with pytest.raises(RequestRefused, match="began under weight version 0"):
            await again.result()
        assert {group.weight_version for group in again.groups} <= {0}
