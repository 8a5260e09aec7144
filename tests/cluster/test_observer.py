"""Who looks at a whole system, in virtual time: what a `Status` tells, and what an observer makes of it."""

import asyncio

import pytest
from cluster_harness import PROMPTS, folder, roll, running
from memory_transport import MemoryTransport
from virtual_time import VIRTUAL

from seer.client import SamplingParams
from seer.common import wire
from seer.common.clock import LoopClock
from seer.common.config import BufferConfig, Config, EngineConfig, ReplayConfig
from seer.common.errors import Unreachable
from seer.observe.observer import Observer
from seer.services.buffer.status import LAG_WINDOW_SECONDS, LoopLag

pytestmark = VIRTUAL

AT = Config().endpoints.trainers


def observer(cluster):
    return Observer(AT, MemoryTransport(cluster.network), None, LoopClock())


async def test_a_status_tells_what_ran_what_was_lost_and_what_ended():
    async with running(2) as cluster, cluster.client() as client:
        looking = observer(cluster)
        await roll(client)
        seen = await looking.look(5.0)
        status = seen.status
        assert seen.services.keys() == {"context", "dgds"}
        assert seen.services["context"].figures["predicted"] > 0
        assert seen.services["dgds"].figures["tokens"] > 0
        requests, chunks = 2 * len(PROMPTS), status.counters["chunks"]
        assert (
            sum(status.finished.values()) == status.finished["stop"] + status.finished["length"] == requests
        )
        assert sum(status.histograms["response_tokens"].counts) == requests
        assert status.histograms["response_tokens"].total == status.counters["tokens"]
        for name in ("chunk_seconds", "chunk_wait_seconds"):
            assert len(status.histograms[name].bounds) == 12
            assert sum(status.histograms[name].counts) == chunks
        ended = status.last_rollout
        assert ended.requests == requests
        assert ended.tokens == status.counters["tokens"]
        assert 0 <= ended.tail_seconds < ended.seconds <= status.uptime_seconds
        assert not status.open_rollouts
        assert status.eta_seconds is None
        rolling = asyncio.create_task(roll(client, 1))
        await asyncio.sleep(0.05)
        await cluster.kill("e1")
        await rolling
        after = (await looking.look(5.0)).status
        assert after.lost_chunks == {"e1": after.counters["lost"]}
        assert after.counters["lost"] > 0
        assert (
            sum(after.histograms["chunk_seconds"].counts) == after.counters["chunks"] - after.counters["lost"]
        )
        assert (await looking.look(5.0)).status.lost_chunks == after.lost_chunks, "to look takes nothing away"
        assert set(after.messages) == {"trainers", "engines", "events"}
        looking.close()


async def test_what_a_trainer_says_of_its_logprobs_is_told():
    async with running(1) as cluster, cluster.client() as client:
        groups = await (await client.submit(PROMPTS, n=2)).result()
        assert (await client.status()).mismatch is None
        responses = [response for group in groups for response in group.responses]
        found = await client.report_mismatch(responses, [each.logprobs + 0.5 for each in responses])
        assert found.mean == pytest.approx(0.5, abs=1e-6)
        assert found.tokens == sum(len(response.token_ids) for response in responses)
        assert (await client.status()).mismatch == found


async def test_efficiency_counts_engines_that_are_gone_and_no_work_of_an_earlier_incarnation(tmp_path):
    engines = EngineConfig(backend="replay", kv_blocks=4000, max_num_seqs=64)
    settings = BufferConfig(chunk_size=32, log=str(tmp_path), keep_chunks=True)
    prompts, sampling = (
        [[1, number] for number in range(1, 65)],
        SamplingParams(max_tokens=400, ignore_eos=True),
    )

    async def rolled(client, name):
        return await (await client.submit(prompts, n=2, sampling=sampling, rollout_id=name)).result()

    async with running(2, engine=engines, buffer=settings) as cluster, cluster.client() as client:
        await rolled(client, "all")
        first = (await client.status()).last_rollout
        assert 0.5 < first.efficiency <= 1.0
        rolling = asyncio.create_task(rolled(client, "killed"))
        await asyncio.sleep(0.8 * first.seconds)
        await cluster.kill("e1")
        await rolling
        ended = (await client.status()).last_rollout
        assert ended.rollout_id == "killed"
        assert 0.5 < ended.efficiency <= 1.0, "the engine that is gone did most of its work"
        rolling = asyncio.create_task(rolled(client, "restarted"))
        await asyncio.sleep(1.5 * first.seconds)
        await cluster.kill("buffer")
        await cluster.start("buffer")
        await rolling
        ended = (await client.status()).last_rollout
        assert ended.rollout_id == "restarted"
        assert ended.efficiency <= 1.0, "not all of its tokens are of this incarnation"


@pytest.mark.parametrize("tokens", [30, 100, 200, 400])
async def test_engines_can_at_least_what_they_did(tokens):
    engines = EngineConfig(backend="replay", kv_blocks=4000, max_num_seqs=64)
    async with running(2, engine=engines) as cluster, cluster.client() as client:
        for prompts, most in ((1, 1500), (64, tokens)):  # first, their best is that of a lone request
            sampling = SamplingParams(max_tokens=most, ignore_eos=True)
            rollout = await client.submit([[1]] * prompts, n=1, sampling=sampling)
            await rollout.result()
            ended = (await client.status()).last_rollout
            assert ended.rollout_id == rollout.id
            assert 0.5 < ended.efficiency <= 1.0


async def test_progress_and_the_estimate_are_of_the_rollout_that_runs():
    async with running(1) as cluster, cluster.client() as client:
        looking = observer(cluster)
        prompts = [[1, number] for number in range(1, 31)]
        sampling = SamplingParams(max_tokens=2000)
        rollout = await client.submit(prompts, n=2, sampling=sampling, rollout_id="long")
        result = asyncio.create_task(rollout.result())
        begun, etas, last, made = asyncio.get_running_loop().time(), [], 0, 0
        while not result.done():
            await asyncio.sleep(0.5)
            status = await looking.status(5.0)
            if not status.open_rollouts:
                continue
            (mine,) = status.open_rollouts
            assert (mine.rollout_id, mine.requests, mine.open) == ("long", 60, False)
            assert last <= (last := mine.finished)
            assert (mine.eta_seconds is None) or mine.finished >= 6
            assert (mine.tail_seconds is not None) == (mine.finished >= 54)
            assert len(status.longest_open) <= wire.MAX_LONGEST
            tokens = [(each.running > 0, each.generated) for each in status.longest_open]
            assert tokens == sorted(tokens, reverse=True), "those that run come first"
            assert all(each.running == 0 or each.engine for each in status.longest_open)
            assert all(each.rollout_id == "long" and each.expected <= 2000 for each in status.longest_open)
            assert all(each.chunks > 0 for each in status.longest_open if each.generated)
            prompts = [each.prompt_id for each in status.longest_open]
            assert len(set(prompts)) == len(prompts), "siblings are one row"
            assert all(2 >= each.open >= each.running >= 0 < each.open for each in status.longest_open)
            assert made <= (made := mine.generated)
            assert mine.generated >= mine.tokens
            if mine.finished >= 6:
                assert mine.eta_least is mine.eta_most is None
            if mine.eta_seconds is not None:
                etas.append((asyncio.get_running_loop().time(), mine.eta_seconds))
        end = asyncio.get_running_loop().time()
        assert etas, "it ended with nothing said"
        middle, eta = etas[len(etas) // 2]
        assert 0.4 * (end - middle) < eta < 2.5 * (end - middle), (begun, middle, eta, end)
        looking.close()


async def test_tokens_and_a_range_are_told_before_any_chunk_has_ended():
    slow = ReplayConfig(step_seconds=0.05)
    engines = EngineConfig(backend="replay", kv_blocks=4000, max_num_seqs=64, replay=slow)
    async with running(2, engine=engines) as cluster, cluster.client() as client:
        looking, loop = observer(cluster), asyncio.get_running_loop()
        sampling = SamplingParams(max_tokens=2000)
        rollout = await client.submit([[1, number] for number in range(30)], n=8, sampling=sampling)
        result, begun = asyncio.create_task(rollout.result()), loop.time()
        ranges = []
        while not result.done():
            await asyncio.sleep(0.5)
            status = await looking.status(5.0)
            if status.open_rollouts and status.open_rollouts[0].eta_least is not None:
                mine = status.open_rollouts[0]
                now = loop.time() - begun
                ranges.append((now, mine.eta_least, mine.eta_most, mine.tokens, mine.generated))
        took = loop.time() - begun
        assert any(made > kept + 1000 for *_, kept, made in ranges), "it told what running chunks have"
        assert ranges[0][0] < 4.0
        for now, least, most, _, _ in ranges:
            assert now + least < took < now + most, (ranges, took)
        looking.close()


async def test_the_phases_of_an_update_are_timed(tmp_path):
    async with running(2) as cluster, cluster.client() as client:
        await roll(client)
        rolling = asyncio.create_task(roll(client, 1))
        await asyncio.sleep(0.05)
        await client.update_weights(1, str(folder(tmp_path / "new", 1.0)))
        await rolling
        status = await client.status()
        counts = {name: sum(each.counts) for name, each in status.histograms.items() if "update" in name}
        assert counts == {f"weight_update_seconds_{phase}": 1 for phase in ("check", "drain", "load")}
        assert status.histograms["weight_update_seconds_drain"].total > 0


async def test_a_buffer_that_was_away_is_found_again_and_an_old_answer_is_no_new_one():
    async with running(1) as cluster:
        looking = observer(cluster)
        first = await looking.status(5.0)
        await cluster.kill("buffer")
        with pytest.raises(Unreachable, match="did not answer within 1 s"):
            await looking.status(1.0)
        await cluster.start("buffer")
        second = await looking.status(5.0)
        assert second.incarnation != first.incarnation
        cluster_loop = asyncio.get_running_loop()
        cluster_loop.freeze("buffer")
        with pytest.raises(Unreachable):
            await looking.status(2.0)
        cluster_loop.thaw("buffer")
        assert (await looking.status(5.0)).uptime_seconds >= second.uptime_seconds + 2.0
        looking.close()


async def test_many_who_ask_at_once_are_all_answered():
    async with running(1) as cluster:
        observers = [observer(cluster) for _ in range(20)]
        answers = await asyncio.gather(*(each.status(5.0) for each in observers for _ in range(3)))
        assert len(answers) == 60
        for each in observers:
            each.close()


async def test_a_service_that_is_away_is_left_out_and_nobody_waits_for_it_for_long():
    async with running(1) as cluster:
        looking, loop = observer(cluster), asyncio.get_running_loop()
        assert (await looking.look(5.0)).services.keys() == {"context", "dgds"}
        await cluster.kill("dgds")
        for _ in range(2):
            began = loop.time()
            assert (await looking.look(5.0)).services.keys() == {"context"}
            assert loop.time() - began <= 1.0
        began = loop.time()
        assert (await looking.look(5.0)).services.keys() == {"context"}
        assert loop.time() - began < 0.1
        await cluster.start("dgds")
        await asyncio.sleep(2.0)
        for _ in range(2):
            await looking.look(5.0)
            await asyncio.sleep(1.0)
        assert (await looking.look(5.0)).services.keys() == {"context", "dgds"}
        looking.close()


async def test_all_who_look_at_once_see_all_services():
    async with running(1) as cluster:
        looking = observer(cluster)
        seen = await asyncio.gather(*(looking.look(5.0) for _ in range(3)))
        assert [each.services.keys() for each in seen] == [{"context", "dgds"}] * 3
        looking.close()


async def test_who_waits_less_long_takes_nobody_s_answer():
    async with running(1) as cluster:
        looking = observer(cluster)
        await looking.status(5.0)
        asyncio.get_running_loop().freeze("buffer")
        patient = asyncio.create_task(looking.status(10.0))
        await asyncio.sleep(0.1)
        with pytest.raises(Unreachable, match="within 1 s"):
            await looking.status(1.0)
        left = asyncio.create_task(looking.status(10.0))
        asyncio.get_running_loop().thaw("buffer")
        uptime = (await patient).uptime_seconds
        await left
        asyncio.get_running_loop().freeze("buffer")
        cancelled = asyncio.create_task(looking.status(10.0))
        await asyncio.sleep(0.1)
        cancelled.cancel()
        asyncio.get_running_loop().thaw("buffer")
        await asyncio.sleep(3.0)
        assert (await looking.status(5.0)).uptime_seconds > uptime + 3.0, "an answer to an earlier question"
        looking.close()


def test_the_lag_is_the_largest_of_the_last_minute_whoever_asks():
    lag = LoopLag()
    for now, late in ((0.0, 0.5), (10.0, 0.1), (20.0, 0.3), (30.0, 0.2)):
        lag.add(now, late)
    assert lag.largest(30.0) == lag.largest(30.0) == 0.5
    assert lag.largest(LAG_WINDOW_SECONDS + 5.0) == 0.3
    assert lag.largest(LAG_WINDOW_SECONDS + 25.0) == 0.2
    assert lag.largest(LAG_WINDOW_SECONDS + 31.0) == 0.0
