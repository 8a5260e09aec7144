"""The KV pool under the real engine: chunks move with their KV, and whatever befalls it changes no token."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("mooncake.store", reason="needs Mooncake and libibverbs1", exc_type=ImportError)

from shared_engines import MODEL, SharedEngines, changed_model, texts, until_generated

from seer.client import RolloutClient, SamplingParams
from seer.common.pool_metrics import ask_master
from seer.common.types import InstanceStats
from seer.local.system import LocalSystem

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PROMPTS, GROUP, TOKENS = 6, 4, 160
ROLLOUTS = 16

Tokens = list[list[int]]


class System:
    """A running system, of which others may have been clients, and a client of it."""

    def __init__(self, local: LocalSystem, client: RolloutClient) -> None:
        self.local = local
        self.client = client

    async def roll(
        self, number: int, meanwhile: Callable[[], None] | None = None, after: int = TOKENS // 2
    ) -> Tokens:
        """Return all tokens of a rollout; do something once responses have `after` tokens on average.

        Each number has tokens of its own: no KV of an earlier rollout is in the engines' own caches.
        """
        sampling = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
        rollout = await self.client.submit(
            texts(PROMPTS), n=GROUP, sampling=sampling, rollout_number=number, repeat=True
        )
        done = asyncio.create_task(rollout.result())
        if meanwhile is not None:
            await until_generated(self.client, PROMPTS * GROUP * after)
            assert not done.done()
            meanwhile()
        return [response.token_ids.tolist() for group in await done for response in group.responses]

    async def stats(self, engines: tuple[str, ...] = ("engine-0", "engine-1")) -> InstanceStats:
        """Return these engines' counters, added up, once they have reported."""
        await asyncio.sleep(1.5)
        every = [each.stats for each in (await self.client.status()).instances if each.name in engines]
        names = [name for name in InstanceStats.__struct_fields__ if name.startswith(("pool_", "preempt"))]
        return InstanceStats(**{name: sum(getattr(stats, name) for stats in every) for name in names})

    def signal(self, child: str, number: signal.Signals) -> None:
        """Signal a child and all that it started."""
        os.killpg(self.local.pids[child], number)


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return changed_model(tmp_path_factory.mktemp("changed") / "model")


async def undisturbed(pair: SharedEngines, numbers: list[int], weights: Path | None = None) -> list[Tokens]:
    """Return the tokens of these rollouts without a pool or a move."""
    async with RolloutClient(await asyncio.to_thread(pair.anew, policy="static"), tokenizer=MODEL) as client:
        if weights is not None:
            await client.update_weights((await client.status()).weight_version + 1, weights)
        quiet = System(pair.system, client)
        return [await quiet.roll(number) for number in numbers]


@pytest.fixture(scope="module")
def engines() -> Iterator[SharedEngines]:
    settings = {
        "engine.max_model_len": 400, "engine.kv_blocks": 300, "engine.max_num_seqs": 16,
        "pool.kind": "mooncake", "pool.pull_tokens": 0, "pool.dram_gib": 0.25,
        "pool.lease_seconds": 1,
    }  # fmt: skip
    shared = SharedEngines(MODEL, 2, *(f"{key}={value}" for key, value in settings.items()))
    yield shared
    shared.close()


@pytest.fixture
async def moving(engines: SharedEngines) -> AsyncIterator[System]:
    """A system with a pool in which every chunk moves; the pool has what earlier tests left there."""
    endpoint = engines.anew(chunk_size=32, policy="migrate")
    async with RolloutClient(endpoint, tokenizer=MODEL) as client:
        yield System(engines.system, client)


async def test_a_moving_chunk_brings_its_kv(pair: SharedEngines, moving: System) -> None:
    assert [await moving.roll(0)] == await undisturbed(pair, [0])
    stats = await moving.stats()
    assert (stats.pool_failures, stats.pool_corrupt, stats.pool_dropped_blocks, stats.preemptions) == (0,) * 4
    assert stats.pool_tokens > 0
    assert stats.pool_saved_blocks > 0


async def test_after_an_update_old_kv_is_neither_found_nor_kept(
    pair: SharedEngines, changed: Path, moving: System
) -> None:
    (expected,) = await undisturbed(pair, [0], changed)
    assert await moving.roll(0) != expected
    old = await namespaces(moving)
    await moving.client.update_weights((await moving.client.status()).weight_version + 1, changed)
    before = (await moving.stats()).pool_tokens
    assert await moving.roll(0) == expected
    assert (await moving.stats()).pool_tokens > before
    async with asyncio.timeout(30):
        while old & await namespaces(moving):
            await asyncio.sleep(0.5)
    assert await namespaces(moving)


async def test_an_engine_that_leaves_hands_its_chunks_back_with_their_kv(
    engines: SharedEngines, pair: SharedEngines
) -> None:
    endpoint = engines.anew(chunk_size=TOKENS // 2)
    async with RolloutClient(endpoint, tokenizer=MODEL) as client:
        system = System(engines.system, client)
        before = await system.stats(("engine-0",))
        rolled = await system.roll(5, lambda: system.signal("engine-1", signal.SIGTERM), after=TOKENS // 8)
        after = await system.stats(("engine-0",))
        assert after.pool_tokens > before.pool_tokens
        assert after.pool_failures == before.pool_failures
    assert [rolled] == await undisturbed(pair, [5])


@pytest.mark.parametrize(
    ("what", "children"),
    [
        ("killed", ("pool-owner",)),
        pytest.param("killed", ("pool-master",), marks=pytest.mark.breadth),
        pytest.param("stopped", ("pool-owner", "pool-master"), marks=pytest.mark.breadth),
    ],
)
async def test_whatever_befalls_the_pool_changes_no_token(
    pair: SharedEngines, moving: System, what: str, children: tuple[str, ...]
) -> None:
    rolled: list[Tokens] = []

    async def pulls(meanwhile: Callable[[], None] | None = None) -> bool:
        """Roll on, and say whether KV came from the pool."""
        assert len(rolled) < ROLLOUTS, "the pool does not come back"
        before = await moving.stats()
        rolled.append(await moving.roll(len(rolled), meanwhile))
        return (await moving.stats()).pool_tokens > before.pool_tokens

    async def recovers() -> None:
        while not await pulls():
            pass

    await recovers()
    for child in children if what == "killed" else ():
        before = moving.local.restarts[child]
        await pulls(lambda child=child: moving.signal(child, signal.SIGKILL))
        async with asyncio.timeout(60):
            while moving.local.restarts[child] == before:
                await asyncio.sleep(0.1)
        await recovers()
    for child in children if what == "stopped" else ():
        failures = (await moving.stats()).pool_failures
        await pulls(lambda child=child: moving.signal(child, signal.SIGSTOP))
        while True:  # a put that hangs is a failure once it ends
            stats = await moving.stats()
            if stats.pool_failures > failures or stats.pool_away:
                break
            await pulls()
        moving.signal(child, signal.SIGCONT)
        await recovers()
    assert (await moving.stats()).pool_corrupt == 0
    assert rolled == await undisturbed(pair, list(range(len(rolled))))


async def namespaces(running: System) -> set[str]:
    """Return what the keys in the pool begin with."""
    keys = await ask_master(running.local.config.pool.metrics, "/get_all_keys", 60)
    return {key.partition("/")[0] for key in keys.split()}
