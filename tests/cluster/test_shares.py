"""A whole system that one trainer floods: another has its share of the engines at once, and the same tokens."""

import asyncio

import numpy as np
import pytest
from cluster_harness import running
from invariants import check
from memory_transport import MemoryTransport
from virtual_time import eventually, virtual

from seer.client import Prompt, SamplingParams
from seer.common.config import BufferConfig, Config, EngineConfig, ReplayConfig
from seer.common.net.keys import User
from seer.gateway.buffer_client import BufferClient, Question
from seer.gateway.group_names import Place

ENGINE = EngineConfig(
    backend="replay", kv_blocks=4000, max_num_seqs=8, replay=ReplayConfig(step_seconds=0.02, mean_tokens=400)
)
"""A chunk of 512 tokens takes ten seconds."""

SAMPLING = SamplingParams(max_tokens=1000)


def prompts(name, count):
    return [Prompt(f"{name}{number}", token_ids=[1, 2, 3, number + 4]) for number in range(count)]


async def tokens(client):
    rollout = await client.submit(prompts("s", 2), n=8, sampling=SAMPLING, rollout_number=1)
    return [each.token_ids.tolist() for group in await rollout.result() for each in group.responses]


def engines_of(machine):
    had = {}
    for each in machine.requests.values():
        name = each.group.rollout.share
        had[name] = had.get(name, 0) + each.cost
    return had


async def watch(machine, seconds, of):
    """Return a trainer's part of what runs, over the next seconds."""
    parts = []
    for _ in range(int(seconds * 10)):
        await asyncio.sleep(0.1)
        had = engines_of(machine)
        parts.append(had.get(of, 0) / sum(had.values()))
    return sum(parts) / len(parts)


async def flooded(**shares):
    buffer = BufferConfig(chunk_size=512, shares=shares)
    async with running(engines=2, engine=ENGINE, buffer=buffer) as cluster:
        machine = cluster.services["buffer"].machine
        async with cluster.client(name="flood") as flood, cluster.client(name="small-1") as small:
            await flood.submit(prompts("f", 100), n=8, sampling=SAMPLING)
            await asyncio.sleep(5.0)
            assert machine.waiting > 700
            mine = asyncio.create_task(tokens(small))
            part = await watch(machine, 10.0, of="small" if shares else "small-1")
            found = await asyncio.wait_for(mine, 120.0)
            assert machine.waiting > 600, "it did not wait for what came before it"
            check(machine)
            return part, found


@virtual
async def test_a_small_rollout_beside_a_full_queue_has_half_of_the_engines_at_once():
    part, found = await flooded()
    assert part >= 0.45
    async with running(engines=1, engine=ENGINE) as cluster, cluster.client() as client:
        assert found == await tokens(client)


@virtual
async def test_weights_of_shares_are_those_of_names_and_of_what_begins_with_them():
    part, _ = await flooded(small=1.0, flood=3.0)
    assert 0.2 < part < 0.3


@virtual
@pytest.mark.parametrize("role", ["gateway", "trainer"])
async def test_clients_of_a_gateway_have_shares_of_their_own_and_the_same_tokens(role):
    """A gateway's key says by whose share it submits; with a trainer's key all have its own."""
    buffer = BufferConfig(chunk_size=32, shares={"agents": 2.0})
    async with running(engines=1, engine=ENGINE, buffer=buffer) as cluster:
        machine = cluster.services["buffer"].machine
        transport = MemoryTransport(cluster.network, user=User(role, "*"))
        async with BufferClient(Config(), transport) as gateway:
            await eventually(lambda: gateway._client is not None and not gateway._problem)

            async def ask(client, count):
                places = {Place(f"{client}-{i}"): np.array([1, 2, i], np.int32) for i in range(count)}
                return await gateway.generate(places, Question(8, SAMPLING, 0, client=client))

            async def sample(client):
                place = Place("/shared", 3)
                found = await gateway.generate(
                    {place: np.array([5], np.int32)}, Question(2, SAMPLING, 7, client=client)
                )
                return [each.token_ids.tolist() for each in found.groups[place].responses]

            asking = [asyncio.create_task(ask(name, 100)) for name in ("web", "agents")]
            await asyncio.sleep(5.0)
            expected = {"web", "agents"} if role == "gateway" else {gateway.client.name}
            assert {each.group.rollout.share for each in machine.requests.values()} == expected
            if role == "gateway":
                assert 0.55 < await watch(machine, 30.0, of="agents") < 0.78
            check(machine)
            for task in asking:
                task.cancel()
            assert await sample("web") == await sample("agents") == await sample("")
