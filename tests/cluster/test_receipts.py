"""Receipts in a whole system: every chunk is named with its engine, versions and place in the buffer's log."""

import asyncio
import json

import pytest
from cluster_harness import folder, running
from virtual_time import VIRTUAL, eventually

from seer.client import SamplingParams
from seer.common.config import BufferConfig, EngineConfig, ReplayConfig
from seer.common.ids import request_id
from seer.common.receipt import problems

pytestmark = VIRTUAL

PROMPTS = [list(range(1, 2 + i)) for i in range(6)]
SAMPLING = SamplingParams(max_tokens=300, receipt=True)
SLOW = EngineConfig(backend="replay", kv_blocks=200, max_num_seqs=16, replay=ReplayConfig(mean_tokens=150))
N = 3


def check(receipt, response):
    """A receipt fits, has the response, and names chunks of which none is left out."""
    assert problems(receipt) == []
    assert receipt.token_ids == response.token_ids.tolist()
    assert receipt.logprobs == response.logprobs.tolist()
    assert (receipt.finish_reason, receipt.stop_reason) == (response.finish_reason, response.stop_reason)
    for chunk in receipt.chunks:
        assert chunk.engine in ("e0", "e1")
        assert chunk.versions == {"backend": "replay"}


def check_log(receipt, log, rollout_id):
    """Each chunk's row in the log is that of its end, with as many tokens."""
    name = request_id(f"{rollout_id}/{receipt.group}", receipt.index)
    for chunk in receipt.chunks:
        file, _, offset = chunk.log.partition(":")
        row = (log / file).read_bytes()[int(offset) :].splitlines()[0]
        kind, engine, result = json.loads(row)[1]
        assert (kind, engine, result[0], result[2]) == ("ChunkEnded", chunk.engine, name, chunk.count)


async def collect(client, **options):
    rollout = await client.submit(PROMPTS, n=N, sampling=SAMPLING, rollout_id="r", seed=5, **options)
    return rollout.rollout_number, await rollout.result()


async def test_each_response_has_a_receipt_also_when_engine_and_buffer_were_killed(tmp_path):
    log = tmp_path / "log"
    settings = BufferConfig(chunk_size=16, policy="migrate", log=str(log), keep_chunks=True)
    async with running(engines=2, engine=SLOW, buffer=settings) as cluster, cluster.client() as client:
        await client.update_weights(4, folder(tmp_path / "w", 1.0))
        work = asyncio.create_task(collect(client))
        await eventually(lambda: cluster.services["buffer"].machine.counters["tokens"] > 400)
        await cluster.kill("e0")
        await cluster.start("e0")
        await eventually(lambda: cluster.services["buffer"].machine.counters["tokens"] > 900)
        await cluster.kill("buffer")
        await cluster.start("buffer")
        number, groups = await work
    assert len(groups) == len(PROMPTS)
    engines, files = set(), set()
    for group in groups:
        for response in group.responses:
            receipt = response.receipt
            check(receipt, response)
            check_log(receipt, log, "r")
            assert receipt.prompt_token_ids == group.prompt_token_ids.tolist()
            assert receipt.weights_digest == group.weights_digest != ""
            place = receipt.seed, receipt.rollout_number, receipt.group, receipt.index
            assert place == (5, number, group.prompt_id, response.index)
            assert {chunk.weight_version for chunk in receipt.chunks} == {4}
            engines.add(tuple(chunk.engine for chunk in receipt.chunks))
            files |= {chunk.log.partition(":")[0] for chunk in receipt.chunks}
    assert any(len(set(each)) == 2 for each in engines)
    assert len(files) == 2  # of both incarnations of the buffer


async def test_a_streamed_response_has_a_record_for_each_chunk_alone():
    settings = BufferConfig(chunk_size=8)
    async with running(engines=2, engine=SLOW, buffer=settings) as cluster, cluster.client() as client:
        rollout = client.open_rollout()
        asked = rollout.submit(PROMPTS[2], n=12, sampling=SAMPLING, stream=True, group="g", first_index=7)
        deltas = [delta async for delta in asked.tokens()]
        group = await asked.result()
    assert len(deltas) > sum(len(each.receipt.chunks) for each in group.responses) > 12
    for response in group.responses:
        check(response.receipt, response)
        counts = [chunk.count for chunk in response.receipt.chunks]
        assert counts[:-1] == [8] * (len(counts) - 1)
        assert {chunk.log for chunk in response.receipt.chunks} == {""}
        assert (response.receipt.group, response.receipt.index) == ("g", 7 + response.index)


async def test_the_turns_of_a_trajectory_have_receipts_with_the_whole_context():
    async def agent(trajectory):
        await trajectory.generate(max_tokens=20)
        trajectory.append([3, 4])
        await trajectory.generate(max_tokens=20)

    async with running() as cluster, cluster.client() as client:
        given = {"n": 2, "sampling": SAMPLING, "max_context": 100, "rollout_number": 3, "seed": 9}
        async with client.trajectories(PROMPTS[:1], **given) as rollout:
            groups = [group async for group in rollout.run(agent)]
    for trajectory in groups[0].trajectories:
        whole = [*trajectory.prompt_token_ids.tolist(), *trajectory.token_ids.tolist()]
        for turn in trajectory.turns:
            assert problems(turn.receipt) == []
            assert turn.receipt.prompt_token_ids == whole[: turn.start]
            assert turn.receipt.token_ids == turn.token_ids.tolist()
            place = turn.receipt.seed, turn.receipt.rollout_number, turn.receipt.group, turn.receipt.index
            assert place == (9, 3, trajectory.prompt_id, trajectory.index)


@pytest.mark.parametrize("asked", [True, False])
async def test_records_are_counted_in_the_buffers_memory_and_cost_nothing_unless_asked_for(asked):
    sampling = SAMPLING if asked else SamplingParams(max_tokens=300)
    settings = BufferConfig(chunk_size=16)
    async with running(engines=1, engine=SLOW, buffer=settings) as cluster, cluster.client() as client:
        rollout = await client.submit([PROMPTS[0]], n=12, sampling=sampling)
        machine = cluster.services["buffer"].machine
        await eventually(lambda: machine.counters["chunks"] > 20)
        beside = [group.beside for group in machine.groups.values()]
        (group,) = await rollout.result()
    assert [each > 0 for each in beside] == [asked]
    assert (group.responses[0].receipt is not None) == asked
