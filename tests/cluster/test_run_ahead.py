"""Prompts that are named before they are submitted, in a whole system on virtual time."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from cluster_harness import PROMPTS, folder, roll, running
from virtual_time import VIRTUAL, eventually

from seer.client import InvalidField, Prompt, RequestRefused, SamplingParams
from seer.common.config import BufferConfig, Config, DgdsConfig, EngineConfig, ReplayConfig
from seer.common.wire import MAX_GROUP_SIZE
from seer.services.dgds.packing import group_digest, pack, prompt_digest

pytestmark = VIRTUAL

LONG = SamplingParams(max_tokens=1000, ignore_eos=True)
SLOW = EngineConfig(backend="replay", kv_blocks=200, max_num_seqs=16, replay=ReplayConfig(step_seconds=0.05))


def runs_ahead(cluster):
    """Return what runs ahead, by engine, as the buffer has it."""
    return {name: len(runs) for name, runs in cluster.services["buffer"].conductor._ahead._running.items()}


def chunks(cluster, name="e0"):
    return cluster.services[name].running


def remembered(cluster):
    """Return the tokens that the dgds has for the prompts' next groups, or will have."""
    dgds = cluster.services["dgds"]
    dgds.store.remember_all()
    return sum(len(stream) // 3 for _, streams in dgds._past.items() for stream in streams)


async def test_idle_engines_generate_what_is_named_for_the_dgds_and_nobody_else():
    async with running() as cluster, cluster.client() as client:
        await client.next_prompts(PROMPTS, n=2, sampling=SamplingParams(max_tokens=60), rollout_number=7)
        before = await client.status()
        await eventually(lambda: not cluster.services["buffer"].conductor._ahead.addresses, 60.0)
        await asyncio.sleep(3)  # statuses tell, and tokens come to the dgds
        after = await client.status()
        ahead = sum(each.stats.ahead_tokens for each in after.instances)
        assert ahead == sum(each.stats.generated_tokens for each in after.instances) > 100
        assert remembered(cluster) == ahead
        for status in (before, after):
            assert not any(status.counters.values()), status.counters
            assert (status.rollouts, status.requests_running, status.requests_waiting) == (0, 0, 0)
            assert status.eta_seconds is None or status.eta_seconds == 0.0
        assert after.finished == dict.fromkeys(after.finished, 0)
        assert len(cluster.services["buffer"].store) == 0
        # They have the noise of the rollout that was named, so they are its responses: all drafts are right.
        named = {bytes(stream) for _, streams in cluster.services["dgds"]._past.items() for stream in streams}
        tokens, _ = await roll(client, 7)
        await asyncio.sleep(1)
        cluster.services["dgds"].store.remember_all()
        assert {
            bytes(stream) for _, streams in cluster.services["dgds"]._past.items() for stream in streams
        } == named
        assert sum(map(len, tokens)) == ahead


async def test_tokens_are_the_same_and_nothing_waits_with_run_ahead_that_ends_in_the_middle(tmp_path):
    async with running(engine=SLOW) as cluster, cluster.client() as client:
        loop = asyncio.get_running_loop()
        took, found = [], []
        for ahead in (False, True):
            tokens = [await roll(client, 3)]
            if ahead:
                await client.next_prompts(PROMPTS, n=8, sampling=LONG, rollout_number=4)
                await eventually(lambda: runs_ahead(cluster) == {"e0": 16, "e1": 16})
            began = loop.time()
            tokens.append(await roll(client, 4))
            took.append(loop.time() - began)
            found.append(tokens)
            assert not cluster.services["buffer"].conductor._ahead.addresses
        assert found[0] == found[1]
        assert took[1] <= took[0] + 0.1  # a step that had begun


@pytest.mark.parametrize("end", ["update", "sleep", "leave", "drain", "submit", "open", "engine", "again"])
async def test_run_ahead_ends_at_once(end, tmp_path):
    async with running(engine=SLOW) as cluster:
        client, other = cluster.client(name="a"), cluster.client(name="b")
        async with client, other:
            await client.next_prompts(PROMPTS, n=8, sampling=LONG)
            await eventually(lambda: len(chunks(cluster)) == len(chunks(cluster, "e1")) == 16)
            await asyncio.sleep(2.0)
            named = set(chunks(cluster))
            loop = asyncio.get_running_loop()
            began = loop.time()
            match end:
                case "update":
                    await client.update_weights(1, str(folder(tmp_path / "w1", 1.0)))
                case "sleep":
                    await other.sleep()
                case "leave":
                    await client.close()
                case "drain":
                    cluster.services["buffer"].drain()
                case "submit":
                    await (await client.submit([[1]], n=1, sampling=SamplingParams(max_tokens=5))).result()
                case "open":
                    opened = client.open_rollout()
                    await opened.submit([1], sampling=SamplingParams(max_tokens=5)).result()
                    opened.close()
                case "engine":
                    await cluster.kill("e1")
                case "again":
                    await client.next_prompts([[5]], n=1, sampling=LONG)
            await eventually(lambda: not named & set(chunks(cluster)), 12.0)
            if end != "engine":
                assert loop.time() - began < 2.0
            await asyncio.sleep(2.0)
            assert runs_ahead(cluster) == ({"e0": 1} if end == "again" else {})
            if end not in ("drain",):
                assert remembered(cluster) >= 12 * 30  # what was generated stays


async def test_another_trainers_requests_take_the_engine_that_they_need_and_no_other():
    async with running(engine=SLOW) as cluster:
        client, other = cluster.client(name="a"), cluster.client(name="b")
        async with client, other:
            await client.next_prompts(PROMPTS, n=8, sampling=LONG)
            await eventually(lambda: runs_ahead(cluster) == {"e0": 16, "e1": 16})
            rollout = await other.submit([[1, 2]], n=1, sampling=SamplingParams(max_tokens=40))
            await eventually(lambda: len(runs_ahead(cluster)) == 1)
            await asyncio.sleep(0.1)
            [busy] = {"e0", "e1"} - runs_ahead(cluster).keys()
            assert len(chunks(cluster, busy)) == 1, "a request has no run-ahead beside it"
            await rollout.result()
            await eventually(lambda: len(runs_ahead(cluster)) == 2)


async def test_groups_that_a_trainer_named_have_what_ran_ahead_and_leave_what_they_said():
    prompt = list(range(5))
    async with running() as cluster, cluster.client() as client:
        store, past = cluster.services["dgds"].store, cluster.services["dgds"]._past

        def left():
            store.remember_all()
            return past.get(prompt_digest(np.array(prompt))).streams

        await client.next_prompts([prompt], n=2, sampling=SamplingParams(max_tokens=60))
        await eventually(lambda: not cluster.services["buffer"].conductor._ahead.addresses, 60.0)
        await asyncio.sleep(1)
        ahead = left()
        opened = client.open_rollout("r")
        asked = [
            opened.submit(
                Prompt(f"p{index}", token_ids=prompt), n=1, sampling=SamplingParams(max_tokens=60),
                group="g", first_index=index,
            )
            for index in range(3)
        ]  # fmt: skip
        await eventually(lambda: group_digest("r/g") in store._groups)
        found = store.deltas(group_digest("r/g"), {}, 10**6, asyncio.get_running_loop().time()).deltas
        assert [each.tokens for each in found if each.index >= MAX_GROUP_SIZE] == list(ahead)
        said = [(await each.result()).responses[0].token_ids for each in asked]
        await asyncio.sleep(1)
        assert sorted(left()) == sorted(bytes(pack(tokens)) for tokens in said)


async def test_what_cannot_run_ahead_is_refused_by_name():
    async with running(buffer=BufferConfig(chunk_size=32, max_requests=20)) as cluster:
        async with cluster.client() as client:
            for asked, error in (
                (
                    {"n": 21},
                    r"prompts = 21: run-ahead takes at most 20 responses .* raise buffer.max_requests",
                ),
                ({"sampling": SamplingParams(max_tokens=2**20)}, "fits no instance"),
            ):
                with pytest.raises(RequestRefused, match=error):
                    await client.next_prompts([[1, 2]], **{"n": 1, "sampling": LONG} | asked)
            with pytest.raises(InvalidField, match="timeout_seconds"):
                await client.next_prompts([[1]], timeout_seconds=0)
            with pytest.raises(InvalidField, match="prompts"):
                await client.next_prompts([])
        buffer = cluster.services["buffer"]
        buffer._config = Config(dgds=DgdsConfig(remember_tokens=0))
        async with cluster.client() as client:
            with pytest.raises(RequestRefused, match=r"dgds\.remember_tokens = 0: nothing is remembered"):
                await client.next_prompts([[1]], sampling=LONG)
        await cluster.kill("buffer")
