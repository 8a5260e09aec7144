"""The whole system in one process and in virtual time: what a trainer gets, whatever the schedule."""

import asyncio
from dataclasses import replace

import pytest
from cluster_harness import running
from invariants import check
from virtual_time import VIRTUAL, eventually

from seer.client import SamplingParams
from seer.common.config import BufferConfig, EngineConfig
from seer.common.errors import RolloutCancelled
from seer.common.policy.length import Estimate
from seer.common.policy.schedule import POLICIES

pytestmark = VIRTUAL

PROMPTS = [list(range(1, 2 + i)) for i in range(12)]


async def tokens_of(cluster, n=4, max_tokens=100, seed=0, number=0, prompts=PROMPTS):
    async with cluster.client() as client:
        rollout = await client.submit(
            prompts, n=n, sampling=SamplingParams(max_tokens=max_tokens), seed=seed, rollout_number=number
        )
        groups = await rollout.result()
    return {
        (group.prompt_id, response.index): response.token_ids.tolist()
        for group in groups
        for response in group.responses
    }


async def tokens_under(policy, **settings):
    async with running(engines=1, buffer=BufferConfig(policy=policy)) as cluster:
        return await tokens_of(cluster, **settings)


async def test_the_same_tokens_whatever_the_schedule():
    expected = await tokens_under("static")
    lengths = {len(tokens) for tokens in expected.values()}
    assert len(expected) == 48
    assert len(lengths) > 10
    tight = EngineConfig(backend="replay", kv_blocks=12, max_num_seqs=16)
    for settings in (
        {"engines": 1, "buffer": BufferConfig(chunk_size=1)},
        {"engines": 2, "buffer": BufferConfig(chunk_size=7)},
        {"engines": 3, "buffer": BufferConfig(policy="migrate", chunk_size=16)},
        {"engines": 1, "buffer": BufferConfig(policy="static"), "engine": tight},
        {"engines": 2, "buffer": BufferConfig(chunk_size=32), "engine": tight},
    ):
        async with running(**settings) as cluster:
            assert await tokens_of(cluster) == expected
            buffer = cluster.services["buffer"]
            check(buffer.machine)
            preempted = buffer.machine.counters["preemptions"]
            static = settings["buffer"].policy == "static"
            assert (preempted > 0) == (static and "engine" in settings)


async def test_another_seed_or_rollout_number_gives_other_tokens():
    async with running() as cluster:
        runs = [
            await tokens_of(cluster, seed=seed, number=number)
            for seed, number in ((0, 0), (1, 0), (0, 1), (0, 0))
        ]
    assert runs[0] == runs[3]
    assert runs[0] != runs[1] != runs[2] != runs[0]


async def test_cancel_frees_everything():
    async with running() as cluster, cluster.client() as client:
        rollout = await client.submit(PROMPTS, n=4, sampling=SamplingParams(max_tokens=2000))
        machine = cluster.services["buffer"].machine
        await eventually(lambda: machine.counters["chunks"] > 20)
        await rollout.cancel()
        with pytest.raises(RolloutCancelled):
            await rollout.result()
        await eventually(lambda: not machine.groups and not cluster.services["buffer"].store)
        check(machine)


async def test_a_policy_gets_spreads_where_it_asks_for_the_posterior(monkeypatch):
    ordered = []

    def order(request, estimate):
        ordered.append(estimate)
        return (-estimate.tokens, request.queued)

    policy = replace(POLICIES["divided"], name="sure", order=order, estimator="posterior")
    monkeypatch.setitem(POLICIES, "sure", policy)
    async with running(buffer=BufferConfig(policy="sure", chunk_size=16)) as cluster:
        tokens = await tokens_of(cluster, n=8, max_tokens=2000)
        error = cluster.services["context"].machine.error
    assert ordered[0] == Estimate(2000.0)
    spreads = {estimate.spread for estimate in ordered}
    assert len(spreads) > 10
    assert 0.2 < max(spreads) < 1.5
    assert error.responses > error.unpredicted
    assert error.absolute / error.responses < 1
    assert tokens == await tokens_under("static", n=8, max_tokens=2000)


async def test_a_draining_buffer_finishes_its_work_but_waits_for_no_dead_trainer():
    async with running() as cluster:
        sampling = SamplingParams(max_tokens=100)
        dead = cluster.client()
        await dead.__aenter__()
        await dead.submit(PROMPTS, n=4, sampling=sampling)
        async with cluster.client() as client:
            rollout = await client.submit(PROMPTS, n=4, sampling=sampling)
            await dead._transport.close()
            draining = asyncio.create_task(cluster.drain("buffer"))
            assert len(await rollout.result()) == len(PROMPTS)
        await draining
