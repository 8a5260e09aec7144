"""Weight updates of a whole system in virtual time: one version per response, or an error that says why."""

import asyncio

import numpy as np
import pytest
from cluster_harness import folder, roll, running
from virtual_time import VIRTUAL, eventually

from seer.client import RequestRefused, RolloutCancelled, WeightsRefused
from seer.common.config import EngineConfig, ReplayConfig
from seer.common.errors import EngineError

pytestmark = VIRTUAL

SLOW = EngineConfig(backend="replay", kv_blocks=200, max_num_seqs=4, replay=ReplayConfig(step_seconds=0.05))


async def test_every_rollout_has_the_weights_its_trainer_set(tmp_path):
    async with running(engines=2) as cluster, cluster.client() as client:
        before, (version, _) = await roll(client)
        assert version == 0
        live = await client.update_weights(1, folder(tmp_path / "one", 1.0))
        assert not live.quarantined
        first, seen = await roll(client)
        assert seen == (1, live.digest)
        assert first != before
        second = await client.update_weights(2, folder(tmp_path / "two", 2.0))
        assert second.digest != live.digest
        again = await client.update_weights(3, folder(tmp_path / "one", 1.0))
        assert again.digest == live.digest
        assert (await roll(client))[0] == first


async def test_what_is_in_flight_keeps_its_version(tmp_path):
    async with running(engines=2, engine=SLOW) as cluster, cluster.client() as one, cluster.client() as two:
        alone, _ = await roll(one)
        work = asyncio.create_task(roll(one))
        machine = cluster.services["buffer"].machine
        await eventually(lambda: machine.counters["chunks"] > 40)
        update = asyncio.create_task(two.update_weights(1, folder(tmp_path / "one", 1.0)))
        await eventually(lambda: cluster.services["buffer"].weights.updating)
        later = asyncio.create_task(roll(two))
        tokens, (version, _) = await work
        assert (tokens, version) == (alone, 0)
        await update
        assert (await later)[1][0] in (0, 1)
        assert (await roll(two))[1][0] == 1
        assert (await roll(one))[1][0] == 1


async def test_it_may_be_aborted_or_forbid_the_update(tmp_path):
    async with running(engines=2, engine=SLOW) as cluster, cluster.client() as client:
        work = asyncio.create_task(roll(client))
        machine = cluster.services["buffer"].machine
        await eventually(lambda: machine.counters["chunks"] > 5)
        new = folder(tmp_path / "one", 1.0)
        with pytest.raises(WeightsRefused, match="requests are under way"):
            await client.update_weights(1, new, in_flight="error")
        assert (await client.update_weights(1, new, in_flight="abort")).version == 1
        with pytest.raises(RolloutCancelled, match="aborted by a weight update"):
            await work
        assert (await roll(client))[1][0] == 1


async def test_bad_weights_change_nothing(tmp_path):
    async with running(engines=2) as cluster, cluster.client() as client:
        await client.update_weights(1, folder(tmp_path / "one", 1.0))
        expected = await roll(client)
        with pytest.raises(WeightsRefused, match=r"e[01]: source = .* has no weights"):
            await client.update_weights(2, tmp_path / "missing")
        with pytest.raises(WeightsRefused, match="digest"):
            await client.update_weights(2, folder(tmp_path / "two", 2.0), digest="other")
        broken = folder(tmp_path / "broken", 3.0) / "model.safetensors"
        broken.write_bytes(broken.read_bytes()[:-1])
        with pytest.raises(WeightsRefused, match=r"model\.safetensors"):
            await client.update_weights(2, tmp_path / "broken")
        with pytest.raises(WeightsRefused, match="above the live one"):
            await client.update_weights(0, tmp_path / "two")
        assert await roll(client) == expected


async def test_weights_that_are_no_numbers_are_refused_by_name_and_the_next_ones_go_in(tmp_path):
    async with running(engines=2) as cluster, cluster.client() as client:
        await client.update_weights(1, folder(tmp_path / "one", 1.0))
        expected = await roll(client)
        for value in (np.nan, np.inf, -np.inf):
            weights = {"w": np.array([1.0, value, 2.0], np.float32)}
            refused = pytest.raises(WeightsRefused, match=r"e[01]: .*tensor w has values that are not finite")
            with refused:
                await client.update_weights(2, folder(tmp_path / f"{value}", value))
            with refused:
                await client.update_weights(2, weights)
            assert await roll(client) == expected
        tiny = np.full((2, 3), np.finfo(np.float32).smallest_subnormal)
        assert not (await client.update_weights(2, {"w": tiny})).quarantined
        assert (await roll(client))[1][0] == 2


async def test_models_with_infinities_on_purpose_are_taken_if_that_is_said(tmp_path):
    engine = EngineConfig(backend="replay", finite_weights=False)
    async with running(engines=1, engine=engine) as cluster, cluster.client() as client:
        assert (await client.update_weights(1, folder(tmp_path / "one", np.inf))).version == 1
        assert (await roll(client))[1][0] == 1


@pytest.mark.parametrize("streamed", [False, True])
async def test_an_update_waits_for_engines_that_are_started_again(tmp_path, streamed):
    """All of them died, as by weights that nothing can run: the good ones that follow go in all the same."""
    async with running(engines=2) as cluster, cluster.client() as client:
        first = await client.update_weights(1, folder(tmp_path / "one", 1.0))
        for name in ("e0", "e1"):
            await cluster.kill(name)
        await eventually(lambda: not cluster.services["buffer"].machine.instances)
        new = {"w": np.full((2, 3), 2, np.float32)} if streamed else folder(tmp_path / "two", 2.0)
        update = asyncio.create_task(client.update_weights(2, new))
        await asyncio.sleep(400)
        assert not update.done()
        await cluster.start("e0")
        live = await update
        assert (live.version, live.quarantined) == (2, {})
        assert live.digest != first.digest
        assert (await roll(client))[1] == (2, live.digest)


async def test_trainers_take_turns_and_a_past_version_is_refused(tmp_path):
    async with running(engines=2) as cluster, cluster.client() as one, cluster.client() as two:
        await one.update_weights(1, folder(tmp_path / "one", 1.0))
        mine = await roll(one)
        await two.update_weights(2, folder(tmp_path / "two", 2.0))
        assert (await roll(two))[1][0] == 2
        with pytest.raises(RequestRefused, match="version 1 is past: version 2 is live, by an update of"):
            await roll(one)
        await one.update_weights(3, tmp_path / "one")
        assert (await roll(one))[0] == mine[0]


async def test_an_engine_that_cannot_load_gets_no_work_until_it_can(tmp_path):
    async with running(engines=2) as cluster, cluster.client() as client:
        server, broken = cluster.services["buffer"], cluster.services["e1"]
        load, broken._driver.load_weights = broken._driver.load_weights, _fail
        live = await client.update_weights(1, folder(tmp_path / "one", 1.0))
        assert live.quarantined == {"e1": "no memory"}
        assert set(server.machine.instances) == {"e0"}
        expected = await roll(client)
        await cluster.kill("buffer")
        await cluster.start("buffer")
        server = cluster.services["buffer"]
        await eventually(lambda: "e1" in server.weights and server.weights.live is not None)
        assert "e1" not in server.machine.instances
        assert await roll(client) == expected
        broken._driver.load_weights = load
        await client.update_weights(2, folder(tmp_path / "two", 2.0))
        assert set(server.machine.instances) == {"e0", "e1"}
        assert (await roll(client))[1][0] == 2


async def _fail(folder, digest, base=None):
    raise EngineError("no memory")


async def test_an_engine_killed_while_it_loads_is_not_waited_for(tmp_path):
    async with running(engines=2) as cluster, cluster.client() as client:
        loading = asyncio.Event()

        async def hang(folder, digest, base=None):
            loading.set()
            await asyncio.Event().wait()

        cluster.services["e1"]._driver.load_weights = hang
        update = asyncio.create_task(client.update_weights(1, folder(tmp_path / "one", 1.0)))
        await loading.wait()
        await asyncio.sleep(60)
        assert not update.done()
        await cluster.kill("e1")
        live = await update
        assert (live.version, live.quarantined) == (1, {})
        expected = await roll(client)
        await cluster.start("e1")
        server = cluster.services["buffer"]
        await eventually(lambda: server.weights.admitted == {"e0", "e1"})
        await cluster.kill("e0")
        assert await roll(client) == expected
        assert expected[1] == (1, live.digest)


async def test_an_engine_refuses_a_folder_that_changed_after_it_was_checked_elsewhere(tmp_path):
    async with running(engines=1) as cluster, cluster.client() as client:
        one = folder(tmp_path / "one", 1.0)
        await client.update_weights(1, one)
        expected = await roll(client)
        folder(tmp_path / "one", 2.0)
        await cluster.start("e1")
        server = cluster.services["buffer"]
        await eventually(lambda: "e1" in server.weights.quarantined)
        assert "now has digest" in server.weights.quarantined["e1"]
        assert await roll(client) == expected
