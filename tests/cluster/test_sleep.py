"""Engines that sleep between rollouts, in virtual time: nothing runs, nothing is lost."""

import asyncio
import contextlib

import pytest
from cluster_harness import folder, roll, running
from memory_transport import MemoryTransport
from virtual_time import VIRTUAL, eventually

from seer.client import InvalidField, SeerError, WeightsRefused
from seer.common import wire
from seer.common.config import BufferConfig, EngineConfig, ReplayConfig, SharedConfig
from seer.common.errors import Unreachable
from seer.common.net.keys import User
from seer.common.sleep import SleepState

pytestmark = VIRTUAL

AWAKE, KV_ASLEEP, ASLEEP = SleepState

SLOW = EngineConfig(backend="replay", kv_blocks=200, max_num_seqs=4, replay=ReplayConfig(step_seconds=0.05))


def sleepers(cluster):
    return {name for name, each in cluster.services.items() if name[0] == "e" and each._updater.sleeping}


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


async def cut_off_while_others_wake(cluster, client):
    """Leave e0 asleep and cut off, e1 awake."""
    await client.sleep()
    cluster._transports["e0"].disconnect()
    await eventually(lambda: "e0" not in cluster.services["buffer"].conductor.machine.engines)
    await client.wake()
    assert sleepers(cluster) == {"e0"}


async def test_a_sleeper_that_a_new_buffer_hears_first_puts_nobody_to_sleep():
    async with running(engines=2) as cluster, cluster.client() as client, cluster.client() as other:
        expected = await roll(other)
        await cut_off_while_others_wake(cluster, client)
        await client.close()  # nobody is left who says what was wanted, but the engines
        cluster._transports["e1"].disconnect()
        await cluster.kill("buffer")
        cluster._transports["e0"].reconnect()
        await cluster.start("buffer")
        await eventually(lambda: "e0" in cluster.services["buffer"].conductor.machine.engines)
        cluster._transports["e1"].reconnect()
        assert await roll(other) == expected
        assert not sleepers(cluster)


async def test_a_trainer_tells_a_new_buffer_that_engines_are_to_be_awake():
    async with running(engines=2) as cluster, cluster.client() as client:
        expected = await roll(client)
        await cut_off_while_others_wake(cluster, client)
        await cluster.kill("e1")  # nobody who was woken is left
        await cluster.kill("buffer")
        cluster._transports["e0"].reconnect()
        await cluster.start("buffer")
        assert await roll(client) == expected
        assert not sleepers(cluster)


async def test_a_trainer_that_updates_tells_a_new_buffer_that_engines_are_to_be_awake(tmp_path):
    async with running(engines=2) as cluster, cluster.client() as client:
        await cut_off_while_others_wake(cluster, client)
        cluster._transports["e1"].disconnect()
        update = asyncio.create_task(client.update_weights(1, folder(tmp_path / "one", 1.0)))
        await eventually(lambda: cluster.services["buffer"].weights.updating)
        await cluster.kill("e1")
        await cluster.kill("buffer")
        await cluster.start("buffer")
        await cluster.start("e2")
        await update
        cluster._transports["e0"].reconnect()
        assert await roll(client)
        assert not sleepers(cluster)


async def test_a_trainer_says_its_wish_again_while_another_updates(tmp_path):
    async with running(engines=1) as cluster, cluster.client() as client:
        buffer = cluster.services["buffer"]
        async with cluster.client() as other:
            cluster._transports["e0"].disconnect()
            update = asyncio.create_task(other.update_weights(1, folder(tmp_path / "one", 1.0)))
            await eventually(lambda: buffer.weights.updating)
            again = wire.Sleep(asleep=False, wish=2**40)
            address = buffer._trainers.address_of(client.name)
            assert buffer._from_trainer(client.name, address, again) is None
            assert buffer.conductor.machine.sleep._wish == 2**40
            cluster._transports["e0"].reconnect()
            await update
            assert not sleepers(cluster)


async def test_a_fresh_engine_wakes_nobody_in_a_new_buffer():
    async with running(engines=2) as cluster, cluster.client() as client:
        expected = await roll(client)
        await client.sleep()
        await cluster.kill("buffer")
        for name in ("e0", "e1"):
            cluster._transports[name].disconnect()
        await client.close()
        await cluster.start("buffer")
        await cluster.start("e2")
        await eventually(lambda: "e2" in cluster.services["buffer"].conductor.machine.engines)
        for name in ("e0", "e1"):
            cluster._transports[name].reconnect()
        await eventually(lambda: sleepers(cluster) == {"e0", "e1", "e2"})
        async with cluster.client() as later:
            await later.wake()
            assert await roll(later) == expected


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


@contextlib.asynccontextmanager
async def of_model(tmp_path, **settings):
    """Yield a cluster whose engines were started with a model folder, and its client."""
    shared = SharedConfig(model=str(folder(tmp_path / "model", 0.5)))
    async with running(engines=2, shared=shared, **settings) as cluster, cluster.client() as client:
        yield cluster, client


def states(cluster):
    found = {name: each._updater for name, each in cluster.services.items() if name[0] == "e"}
    return {(each.sleeping, each.live.version, each._driver._backend._has_weights) for each in found.values()}


async def test_weights_are_updated_while_the_kv_cache_sleeps(tmp_path):
    async with of_model(tmp_path) as (cluster, client):
        await client.update_weights(1, folder(tmp_path / "one", 1.0))
        never_slept = await roll(client)
        await client.update_weights(2, folder(tmp_path / "two", 2.0))
        await client.sleep(level=2)
        assert states(cluster) == {(ASLEEP, -1, False)}
        later = asyncio.create_task(roll(client, weight_version=3))
        with pytest.raises(WeightsRefused, match=r"tags=\['weights'\]"):
            await client.update_weights(3, folder(tmp_path / "one", 1.0))
        with pytest.raises(SeerError, match="the weights sleep: wake them first"):
            await client.wake(tags=["kv_cache"])
        await client.wake(tags=["weights"])
        await asyncio.sleep(100)
        assert states(cluster) == {(KV_ASLEEP, -1, False)}  # an update may come
        live = await client.update_weights(3, folder(tmp_path / "one", 1.0))
        assert not live.quarantined
        assert states(cluster) == {(KV_ASLEEP, 3, True)}
        await asyncio.sleep(100)
        assert not later.done()
        await client.wake(tags=["kv_cache"])
        tokens, (version, digest) = await later
        assert (tokens, digest) == (never_slept[0], never_slept[1][1])
        assert version == 3


@pytest.mark.parametrize("updated", [False, True], ids=["started with", "updated to"])
async def test_engines_that_no_update_gave_weights_load_the_live_ones_again(tmp_path, updated):
    async with of_model(tmp_path) as (cluster, client):
        if updated:
            await client.update_weights(1, folder(tmp_path / "one", 1.0))
        expected = await roll(client)
        await client.sleep(level=2)
        assert states(cluster) == {(ASLEEP, -1, False)}
        await client.wake()
        assert await roll(client) == expected
        assert states(cluster) == {(AWAKE, int(updated), True)}
        await client.sleep()
        assert states(cluster) == {(ASLEEP, int(updated), True)}  # level 1 keeps them
        await client.wake(tags=["weights"])
        await client.sleep(level=2)
        await client.wake(tags=["weights", "kv_cache"])
        assert await roll(client) == expected


async def test_work_waits_while_weights_are_loaded_again_and_no_longer(tmp_path):
    impatient = BufferConfig(chunk_size=32, engine_wait_seconds=5)
    async with of_model(tmp_path, buffer=impatient) as (cluster, client):
        expected = await roll(client)
        for name, seconds in (("e0", 20), ("e1", 60)):
            slow_loads(cluster.services[name]._driver, seconds)
        await client.sleep(level=2)
        await client.wake()
        begun = asyncio.get_running_loop().time()
        assert await roll(client) == expected
        assert 20 <= asyncio.get_running_loop().time() - begun < 40  # by the one that is ready


def slow_loads(driver, seconds):
    load = driver.load_weights

    async def slow(*arguments):
        await asyncio.sleep(seconds)
        await load(*arguments)

    driver.load_weights = slow


@pytest.mark.parametrize("woken", [None, "weights", "update", "all"])
async def test_a_buffer_killed_while_weights_are_dropped_learns_what_they_were(tmp_path, woken):
    async with of_model(tmp_path) as (cluster, client):
        await client.update_weights(1, folder(tmp_path / "one", 1.0))
        expected = await roll(client)
        await client.sleep(level=2)
        if woken in ("weights", "update"):
            await client.wake(tags=["weights"])
        if woken == "update":
            await client.update_weights(2, tmp_path / "one")
        if woken == "all":
            await client.wake()
        before = states(cluster) if woken != "all" else None
        await cluster.kill("buffer")
        await cluster.start("buffer")
        server = cluster.services["buffer"]
        await eventually(lambda: len(server.weights.known) == 2)
        await asyncio.sleep(60)
        version = 2 if woken == "update" else 1
        assert server.weights.live.version == version
        assert before in (None, states(cluster))
        assert server.conductor.machine.sleep.held == (woken != "all")
        if woken == "update":  # its answer may have been lost; and others may follow
            await client.update_weights(2, tmp_path / "one")
            version = (await client.update_weights(3, tmp_path / "one")).version
        await client.wake()
        tokens, (found, _) = await roll(client, weight_version=version)
        assert (tokens, found) == (expected[0], version)


async def test_two_trainers_ask_for_different_sleep(tmp_path):
    async with of_model(tmp_path) as (cluster, client), cluster.client() as other:
        expected = await roll(client)
        await client.sleep()
        with pytest.raises(SeerError, match="level = 2: engines sleep at level 1"):
            await other.sleep(level=2)
        await other.wake(tags=["weights"])
        await other.sleep(level=2)
        await client.sleep()  # all of level 1 is free already
        assert states(cluster) == {(ASLEEP, -1, False)}
        asking = asyncio.create_task(client.wake(tags=["weights"]))
        await other.wake(tags=["weights"])
        await asking
        driver, gate = cluster.services["e0"]._driver, asyncio.Event()
        load = driver.load_weights

        async def slow(*arguments):
            await gate.wait()
            await load(*arguments)

        driver.load_weights = slow
        update = asyncio.create_task(other.update_weights(1, folder(tmp_path / "one", 1.0)))
        await eventually(lambda: cluster.services["buffer"].weights.loading == {"e0"})
        for call in (client.sleep(level=2), client.wake(tags=["kv_cache"])):
            with pytest.raises(SeerError, match="a weight update is under way"):
                await call
        gate.set()
        await update
        await client.wake()
        assert (await roll(client))[0] != expected[0]


async def test_bad_levels_and_tags_are_refused_by_name():
    async with running(engines=1) as cluster, cluster.client() as client:
        for level in (0, 3, "2"):
            with pytest.raises(InvalidField, match="level"):
                await client.sleep(level=level)
        for tags in ([], ["kv"], ["weights", "kv"]):
            with pytest.raises(InvalidField, match="tags"):
                await client.wake(tags=tags)
        assert not sleepers(cluster)


LEASE = BufferConfig(trainer_lease_seconds=20.0)
RUN = User("trainer", "run")


@contextlib.asynccontextmanager
async def put_to_sleep(tmp_path, level=1):
    """A system that a trainer put to sleep before it was killed, and the rollout of another that waits."""
    async with (
        running(engines=2, buffer=LEASE) as cluster,
        cluster.client(user=User("trainer", "b")) as other,
    ):
        transport = MemoryTransport(cluster.network, user=RUN)
        dying = cluster.client(transport, name="run-1")
        await dying.__aenter__()
        await dying.update_weights(1, folder(tmp_path / "one", 1.0))
        expected = await roll(other)
        await dying.sleep(level=level)
        await transport.close()
        with contextlib.suppress(Unreachable):
            await dying.close()
        waits = asyncio.create_task(roll(other))
        yield cluster, waits
        assert await asyncio.wait_for(waits, 30.0) == expected


@pytest.mark.parametrize("level", [1, 2])
async def test_sleep_ends_with_the_lease_of_a_trainer_that_was_killed(tmp_path, level):
    async with put_to_sleep(tmp_path, level) as (cluster, waits):
        await asyncio.sleep(LEASE.trainer_lease_seconds - 4.0)
        assert not waits.done()
        assert sleepers(cluster) == {"e0", "e1"}


async def test_sleep_ends_also_if_the_buffer_was_restarted_after_its_trainer_was_killed(tmp_path):
    async with put_to_sleep(tmp_path) as (cluster, waits):
        await cluster.kill("buffer")
        await cluster.start("buffer")
        await asyncio.sleep(LEASE.trainer_lease_seconds - 4.0)
        assert not waits.done()
        assert sleepers(cluster) == {"e0", "e1"}


async def test_a_trainer_that_is_back_within_its_lease_has_engines_sleep_on(tmp_path):
    async with put_to_sleep(tmp_path) as (cluster, waits):
        await asyncio.sleep(LEASE.trainer_lease_seconds - 4.0)
        async with cluster.client(user=RUN, name="run-2") as back:
            await asyncio.sleep(600.0)
            assert not waits.done()
            assert sleepers(cluster) == {"e0", "e1"}
            await cluster.kill("buffer")
            await cluster.start("buffer")
            await back.sleep()  # already
            await asyncio.sleep(600.0)
            assert not waits.done()
            await back.wake()


async def test_sleep_that_two_asked_for_ends_with_the_second(tmp_path):
    async with (
        put_to_sleep(tmp_path) as (cluster, waits),
        cluster.client(user=User("trainer", "c")) as second,
    ):
        await second.sleep()
        await asyncio.sleep(600.0)
        assert not waits.done()
        await second.close()
