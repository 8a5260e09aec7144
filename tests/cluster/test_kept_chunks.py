"""A buffer that is killed goes on from what it had kept: the same tokens, few of them made again."""

import asyncio
from dataclasses import dataclass

import pytest
from cluster_harness import check_alternatives, check_routes, running
from virtual_time import VIRTUAL, eventually

from seer.client import SamplingParams
from seer.common.config import BufferConfig, EngineConfig, ReplayConfig

pytestmark = VIRTUAL

PROMPTS = [list(range(1, 2 + i)) for i in range(12)]
SLOW = EngineConfig(backend="replay", kv_blocks=200, max_num_seqs=16, replay=ReplayConfig(mean_tokens=300))


@dataclass
class Ran:
    tokens: dict
    logprobs: dict
    generated: int
    restored: int


async def collect(client, **options):
    rollout = await client.submit(
        PROMPTS,
        n=4,
        sampling=SamplingParams(max_tokens=600, routed_experts_from=0, top_logprobs=3, prompt_logprobs=2),
        rollout_id="r",
        **options,
    )
    return await rollout.result()


def ran(groups, cluster, generated=0):
    counters = cluster.services["buffer"].machine.counters
    responses = {(g.prompt_id, r.index): r for g in groups for r in g.responses}
    for group in groups:
        check_routes(group)
        check_alternatives(group, 3, 2)
    return Ran(
        {key: (r.token_ids.tolist(), r.finish_reason) for key, r in responses.items()},
        {key: r.logprobs.tolist() for key, r in responses.items()},
        generated + counters["tokens"],
        counters["restored"],
    )


def settings(path, keep=True):
    return BufferConfig(chunk_size=32, log=str(path / "log"), keep_chunks=keep)


async def undisturbed():
    async with (
        running(engines=2, engine=SLOW, buffer=BufferConfig(chunk_size=32)) as cluster,
        cluster.client() as client,
    ):
        return ran(await collect(client), cluster)


async def killed(path, *, keep=True, kills=1, between=None):
    """Kill the buffer `kills` times in mid-rollout."""
    async with (
        running(engines=2, engine=SLOW, buffer=settings(path, keep)) as cluster,
        cluster.client() as client,
    ):
        work = asyncio.create_task(collect(client))
        generated = 0
        for _ in range(kills):
            machine = cluster.services["buffer"].machine
            await eventually(lambda machine=machine: machine.counters["tokens"] > 2500)
            generated += machine.counters["tokens"]
            await cluster.kill("buffer")
            if between is not None:
                between(path / "log" / "chunks")
            await cluster.start("buffer")
        found = ran(await work, cluster, generated)
        chunks = path / "log" / "chunks"
        if keep and between is None:  # else a damaged file may lack that a group was acknowledged
            await eventually(lambda: not list(chunks.iterdir()))
        return found


async def test_a_killed_buffer_makes_few_tokens_again(tmp_path):
    expected = await undisturbed()
    with_log = await killed(tmp_path / "a", kills=2)
    without = await killed(tmp_path / "b", keep=False, kills=2)
    assert with_log.tokens == without.tokens == expected.tokens
    assert with_log.logprobs == expected.logprobs
    assert with_log.restored > 4000
    assert without.restored == 0
    again, again_without = (each.generated - expected.generated for each in (with_log, without))
    assert again < 0.15 * again_without


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "garbage", "gone"])
async def test_a_damaged_log_costs_time_alone(damage, tmp_path):
    expected = await undisturbed()

    def spoil(chunks):
        for path in chunks.iterdir():
            data = bytearray(path.read_bytes())
            if damage == "gone":
                path.unlink()
                continue
            if damage == "cut":
                data = data[: len(data) * 2 // 3]
            elif damage == "flip":
                data[len(data) // 2] ^= 4
            path.write_bytes({"empty": b"", "garbage": b"\xff" * 1000}.get(damage, bytes(data)))

    spoilt = await killed(tmp_path, between=spoil)
    assert spoilt.tokens == expected.tokens
    assert spoilt.logprobs == expected.logprobs
    assert (spoilt.restored > 0) == (damage in ("cut", "flip"))
