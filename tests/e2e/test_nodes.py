"""One real engine whose two ranks are on two nodes, network namespaces of this machine, over Gloo."""

import asyncio
import re
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
from chaos import network
from node_system import NODES, NodeSystem
from shared_engines import MODEL, SharedEngines, changed_model, tensors, until_generated

from seer.client import RolloutClient, SamplingParams, SharedTensors

if why := network.problem():
    pytest.skip(why, allow_module_level=True)

pytestmark = [pytest.mark.slow, pytest.mark.ranks, pytest.mark.timeout(900)]

SMALL = ("engine.max_num_seqs=16", "engine.max_model_len=128", "buffer.chunk_size=32")
ALONE = ("pool.kind=none", "drafts.source=off", "engine.kv_blocks=200")

Tokens = list[list[int]]


async def roll(client: RolloutClient, number: int = 0, n: int = 4) -> Tokens:
    sampling = SamplingParams(max_tokens=60)
    prompts = [[1 + i, 5, 9, 12] for i in range(4)]
    rollout = await client.submit(prompts, n=n, sampling=sampling, rollout_number=number, repeat=True)
    groups = await rollout.result()
    return [response.token_ids.tolist() for group in groups for response in group.responses]


async def of_one_rank(pair: SharedEngines) -> dict[float, Tokens]:
    """Return the tokens of engines of one rank, by the scale of their weights."""
    async with RolloutClient(pair.anew(chunk_size=32)) as client:
        before, version = await roll(client), (await client.status()).weight_version
        await client.update_weights(version + 1, tensors(1.02))
        return {1.0: before, 1.02: await roll(client)}


def ranks_of(system: NodeSystem) -> list[psutil.Process]:
    """Return the ranks of all nodes."""
    found = [psutil.Process(system.processes[name].pid).children(recursive=True) for name in NODES]
    return [process for each in found for process in each if "Worker" in " ".join(process.cmdline())]


async def gone(processes: list[psutil.Process], seconds: float) -> None:
    async with asyncio.timeout(seconds):
        while [each for each in processes if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]:
            await asyncio.sleep(0.1)


async def test_ranks_on_two_nodes_draw_what_one_draws_and_end_together(pair: SharedEngines) -> None:
    expected = await of_one_rank(pair)
    async with NodeSystem(MODEL, *SMALL, *ALONE) as system:
        client = system.client
        assert (await client.status()).instances[0].versions["tensor_parallel"] == "2"
        assert await roll(client) == expected[1.0]
        await client.update_weights(1, tensors(1.02))  # a stream: the other node has it from the leader
        assert await roll(client) == expected[1.02]
        assert shares(system) == []  # it had all of it
        await client.update_weights(2, tensors(1.0))
        ((read, of),) = shares(system)
        assert of - read == unread()
        assert read < 0.52 * of
        assert await roll(client) == expected[1.0]
        ranks = ranks_of(system)
        assert len(ranks) == 2
        rolling = asyncio.create_task(roll(client, 1, n=64))  # takes many times as long as is waited for
        await until_generated(client, 100)
        await client.update_weights(3, tensors(1.02), in_flight="abort")  # laid out beside steps
        assert shares(system) == [(read, of)] * 2
        assert await roll(client) == expected[1.02]
        await asyncio.gather(rolling, return_exceptions=True)
        await client.update_weights(4, tensors(1.0))
        assert shares(system) == [(read, of)] * 3
        assert await roll(client) == expected[1.0]
        rolling = asyncio.create_task(roll(client, 1, n=64))
        await until_generated(client, 100)
        system.signal("other", signal.SIGKILL)
        assert await system.ended("leader", 60) in (2, 70)  # a collective broke, or the connection was missed
        await gone(ranks, 30)
        assert not rolling.done()  # it waits for an engine
        rolling.cancel()
        await asyncio.gather(rolling, return_exceptions=True)


def shares(system: NodeSystem) -> list[tuple[int, int]]:
    """Return what the other node read of streams of which it did not read all: bytes, and of how many."""
    lines = re.findall(r"share of new weights.*?bytes=(\d+) of=(\d+)", system.log("other"))
    return [(int(read), int(of)) for read, of in lines]


def unread() -> int:
    """Return the bytes of the model that the second of two ranks does not need."""
    found = 0
    for name, tensor in tensors().items():
        if "embed" in name or "lm_head" in name:
            found += tensor[2:].nbytes  # vLLM gives each rank a multiple of 64 tokens: there are 66
        elif tensor.ndim == 2:
            found += tensor.nbytes // 2  # rows or columns; norms are read whole
    return found


@asynccontextmanager
async def with_pool(*settings: str) -> AsyncIterator[NodeSystem]:
    """Have a KV pool on the leader's node, and an engine that must use it: it holds a few responses."""
    pool = ("pool.kind=mooncake", "pool.master=10.77.0.1:7108", "pool.metrics=10.77.0.1:7109")
    system = NodeSystem(MODEL, *SMALL, *pool, "pool.dram_gib=0.2", "pool.pull_tokens=1", *settings)
    for name in ("pool-master", "pool-owner"):
        await system.service(name)
    async with system:
        yield system


@pytest.mark.breadth
async def test_pool_drafts_and_all_kinds_of_updates_on_two_nodes(pair: SharedEngines, tmp_path: Path) -> None:
    expected = await of_one_rank(pair)
    folder = changed_model(tmp_path / "model")
    settings = ("engine.kv_blocks=12", "buffer.policy=migrate", "engine.in_place_updates=true")
    async with with_pool(*settings) as system:
        client = system.client
        for number in (0, 1, 0):
            tokens = await roll(client, number)
        assert tokens == expected[1.0]
        await client.update_weights(1, folder)
        assert await roll(client) == expected[1.02]
        await client.sleep(level=2)
        await client.wake(tags=["weights"])
        await client.update_weights(2, tensors(1.0))
        await client.wake(tags=["kv_cache"])
        assert await roll(client) == expected[1.0]
        live = await client.update_weights(3, SharedTensors(tensors(1.02)))
        assert live.quarantined == {}
        assert await roll(client) == expected[1.02]
        await asyncio.sleep(1.5)  # a report comes once a second
        stats = (await client.status()).instances[0].stats
        assert stats.accepted_tokens > 0
        assert stats.pool_tokens > 0
        assert stats.pool_failures == 0


@pytest.mark.breadth
async def test_whatever_ends_a_node_ends_the_engine_and_both_come_back(pair: SharedEngines) -> None:
    expected = await of_one_rank(pair)
    async with NodeSystem(MODEL, *SMALL, *ALONE) as system:
        for node, number, codes in (
            ("leader", signal.SIGKILL, (-9, 2)),
            ("other", signal.SIGSTOP, (70, None)),
            ("other", signal.SIGTERM, (0, 0)),
            ("leader", signal.SIGTERM, (0, 0)),
        ):
            assert await roll(system.client) == expected[1.0]
            ranks = ranks_of(system)
            system.signal(node, number)
            assert await system.ended("leader", 60) == codes[0]
            if number == signal.SIGSTOP:
                system.signal(node, signal.SIGCONT)
            code = await system.ended("other", 60)
            assert codes[1] in (code, None)
            await gone(ranks, 30)
            for name in NODES:
                await system.start(name)
            await system.registered(after=True)


@pytest.mark.breadth
async def test_nodes_that_are_cut_off_from_each_other_end(pair: SharedEngines) -> None:
    async with NodeSystem(MODEL, *SMALL, *ALONE) as system:
        ranks = ranks_of(system)
        system.network.cut("leader", "other")
        system.network.cut("other", "leader")
        assert await system.ended("leader", 60) == 70
        assert await system.ended("other", 60) == 2
        await gone(ranks, 30)
