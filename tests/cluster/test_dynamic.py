"""Rewards, dynamic sampling and early stop on a whole system in virtual time."""

import asyncio
import itertools

import pytest
from cluster_harness import running
from invariants import check
from virtual_time import VIRTUAL, eventually

from seer.client import (
    BufferLost,
    DeadlineExceeded,
    DynamicSampling,
    InvalidField,
    Prompt,
    RequestRefused,
    RewardFailed,
    RolloutCancelled,
    RolloutFailed,
    SamplingParams,
    Scores,
)
from seer.common.config import BufferConfig, EngineConfig, ReplayConfig

pytestmark = VIRTUAL

SAMPLING = SamplingParams(max_tokens=200)
SLOW = EngineConfig(backend="replay", kv_blocks=200, max_num_seqs=4, replay=ReplayConfig(step_seconds=0.05))
SCHEDULES = (
    {"engines": 1, "buffer": BufferConfig(policy="static")},
    {"engines": 3, "buffer": BufferConfig(policy="migrate", chunk_size=8)},
    {"engines": 2, "engine": SLOW},
)


def stream():
    return ([1 + i, 2, 3] for i in itertools.count())


def parity(group):
    """About half of all groups of two have equal rewards."""
    return [float(len(response.token_ids) % 2) for response in group.responses]


async def slow_parity(group):
    await asyncio.sleep(1 + 7 * (int(group.prompt_id) % 5))
    return parity(group)


def content(scored):
    return [
        (s.group.prompt_id, s.rewards, [response.token_ids.tolist() for response in s.group.responses])
        for s in scored
    ]


def tasks_of(name):
    return sum(name in repr(task.get_coro()) for task in asyncio.all_tasks())


def sampling_of(client, reward=parity, prompts=None, **options):
    options = {"target": 8, "n": 2, "sampling": SAMPLING, **options}
    return DynamicSampling(client, stream() if prompts is None else prompts, reward, **options)


async def test_what_is_accepted_does_not_depend_on_the_schedule():
    seen, drawn = [], set()
    for settings, (reward, oversample) in itertools.product(
        SCHEDULES, [(parity, 1.0), (slow_parity, 1.5), (parity, 4.0)]
    ):
        async with running(**settings) as cluster, cluster.client() as client:
            async with sampling_of(client, reward, oversample=oversample) as sampled:
                accepted = [scored async for scored in sampled]
            assert accepted == sampled.accepted
            assert sampled.complete
            outcomes = sampled.outcomes
            assert list(outcomes) == [str(i) for i in range(len(outcomes))]
            last = int(accepted[-1].group.prompt_id)
            decided = list(outcomes.values())[: last + 1]
            assert sampled.counts["dropped"] == decided.count("dropped") > 0
            assert sampled.unused == list(itertools.islice(stream(), last + 1, len(outcomes)))
            seen.append((content(accepted), decided))
            drawn.add(len(outcomes))
            await eventually(lambda: not cluster.services["buffer"].machine.groups)
            check(cluster.services["buffer"].machine)
    assert all(other == seen[0] for other in seen)
    assert len(drawn) > 1


async def test_they_are_the_same_groups_as_in_a_plain_rollout():
    async with running() as cluster, cluster.client() as client:
        async with sampling_of(client, target=4, rollout_number=7, seed=3) as sampled:
            accepted = await sampled.result()
        last = int(accepted[-1].group.prompt_id)
        prompts = list(itertools.islice(stream(), last + 1))
        rollout = await client.submit(prompts, n=2, sampling=SAMPLING, seed=3, rollout_number=7, repeat=True)
        async with Scores(rollout, parity) as scores:
            everything = await scores.result()
    assert content(accepted) == content([scored for scored in everything if len(set(scored.rewards)) > 1])


async def test_waves_share_a_number_that_nobody_else_gets():
    async with running() as cluster, cluster.client() as client:
        async with sampling_of(client, oversample=1.0) as sampled:
            await eventually(lambda: sampled.rollout_number is not None)
            between = await client.submit([[9]], n=1, sampling=SAMPLING)
            await sampled.result()
            assert len(sampled._waves) > 2
        after = await client.submit([[9]], n=1, sampling=SAMPLING)
    numbers = {wave.rollout_number for wave in sampled._waves}
    assert numbers == {sampled.rollout_number} == {0}
    assert (between.rollout_number, after.rollout_number) == (1, 2)
    ids = [prompt_id for wave in sampled._waves for prompt_id in wave.prompts]
    assert len(ids) == len(set(ids))


async def test_an_exhausted_stream_gives_what_there_is():
    prompts = list(itertools.islice(stream(), 10))
    async with running() as cluster, cluster.client() as client:
        async with sampling_of(client, prompts=prompts, target=9) as sampled:
            accepted = await sampled.result()
        assert not sampled.complete
        assert 0 < len(accepted) < 9
        assert sampled.counts == {"accepted": len(accepted), "dropped": 10 - len(accepted)}
        assert sampled.unused == []
        async with sampling_of(client, lambda group: [1.0, 1.0], target=4, max_prompts=12) as sampled:
            assert await sampled.result() == []
        assert sampled.counts == {"dropped": 12}
        async with sampling_of(client, prompts=[]) as sampled:
            assert await sampled.result() == []


async def test_early_stop_takes_what_finishes_first_and_cancels_the_rest():
    async with running(engines=1, engine=SLOW) as cluster, cluster.client() as client:
        options = {"keep": lambda scored: True, "oversample": 2.0, "first_finished_biased": True}
        async with sampling_of(client, prompts=stream(), **options) as sampled:
            accepted = await sampled.result()
        (wave,) = sampled._waves
        assert [scored.group for scored in accepted] == wave.groups[:8]
        assert sampled.counts["accepted"] == 8
        assert sampled.counts["cancelled"] + sampled.counts["surplus"] == 8
        assert sampled.counts["cancelled"] > 0
        kept = {int(scored.group.prompt_id) for scored in accepted}
        assert kept != set(range(8))
        rest = [prompt for i, prompt in enumerate(itertools.islice(stream(), 16)) if i not in kept]
        assert sampled.unused == rest
        machine = cluster.services["buffer"].machine
        await eventually(lambda: not machine.groups)
        check(machine)


async def test_failed_prompts_are_named_and_lose_no_other():
    def reward(group):
        return [1.0] if group.prompt_id == "2" else [0.0, 1.0]

    prompts = [[1], list(range(100_000)), [3], [4], [5]]
    async with running() as cluster, cluster.client() as client:
        async with sampling_of(client, reward, prompts, target=3, oversample=1.0) as sampled:
            got = []
            with pytest.raises(RewardFailed, match=r"gave 1 numbers for 2 responses.*prompts 2") as caught:
                async for scored in sampled:
                    got += [scored.group.prompt_id]
        assert got == ["0", "3", "4"]
        assert caught.value.prompt_ids == ("1", "2")
        assert sampled.counts == {"accepted": 3, "failed": 2}
        with pytest.raises(RequestRefused, match="fits no instance") as caught:
            async with sampling_of(client, reward, prompts[:2], target=1) as sampled:
                await sampled.result()
            async with sampling_of(client, reward, prompts[1:2], target=1) as sampled:
                await sampled.result()
        assert not isinstance(caught.value, RolloutFailed)
        assert sampled.outcomes == {"0": "failed"}


async def test_leaving_the_scope_frees_everything():
    async with running(engines=1, engine=SLOW) as cluster, cluster.client() as client:
        async with sampling_of(client, slow_parity, target=20) as sampled:
            await anext(aiter(sampled))
            assert tasks_of("DynamicSampling") > 2
        assert tasks_of("DynamicSampling") == 0
        with pytest.raises(RolloutFailed, match="of DynamicSampling has ended"):
            await sampled.result()
        counts = sampled.counts
        assert counts["accepted"] >= 1
        assert counts["cancelled"] > 0
        assert counts.total() == len(sampled.outcomes)
        machine = cluster.services["buffer"].machine
        await eventually(lambda: not machine.groups and not cluster.services["buffer"].store)
        check(machine)


async def test_what_ends_a_sampling_is_raised():
    async with running(engines=1, engine=SLOW) as cluster, cluster.client(silence_seconds=20) as client:
        with pytest.raises(InvalidField, match=r"prompts\[12\]\.token_ids"):
            async with sampling_of(client, prompts=[[1]] * 12 + [[-1]]) as sampled:
                await sampled.result()
        assert len(sampled.unused) + len(sampled.accepted) + sampled.counts["dropped"] == 13
        with pytest.raises(InvalidField, match=r"prompts\[1\]\.id = '7'.*given before"):
            async with sampling_of(client, prompts=[Prompt("7", token_ids=[1])] * 2) as sampled:
                await sampled.result()
        one = [Prompt("7", token_ids=[1])]
        with pytest.raises(InvalidField, match=r"prompts\[1\]\.id = '7'.*drawn before"):
            async with sampling_of(
                client, lambda group: [0.0, 0.0], one * 2, target=1, oversample=1
            ) as sampled:
                await sampled.result()
        with pytest.raises(InvalidField, match="give 2 or more"):
            sampling_of(client, n=1)
        with pytest.raises(DeadlineExceeded):
            async with sampling_of(client, deadline_seconds=2.0) as sampled:
                await sampled.result()
        with pytest.raises(ZeroDivisionError):
            async with sampling_of(client, keep=lambda scored: 1 / 0) as sampled:
                await sampled.result()
        async with sampling_of(client) as sampled:
            await eventually(lambda: bool(sampled._waves))
            await sampled._waves[0].cancel()
            with pytest.raises(RolloutCancelled):
                await sampled.result()
        async with sampling_of(client, target=100) as sampled:
            await eventually(lambda: bool(sampled._waves))
            await cluster.kill("buffer")
            with pytest.raises(BufferLost):
                await sampled.result()


async def test_one_version_of_weights(tmp_path):
    head = b'{"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
    (tmp_path / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + b"0")
    async with (
        running(engines=1, engine=SLOW) as cluster,
        cluster.client() as client,
        sampling_of(client, target=12, oversample=1.0) as sampled,
    ):
        await anext(aiter(sampled))
        await client.update_weights(1, tmp_path)
        with pytest.raises(RolloutFailed, match="from version 0 to 1 during one sampling"):
            await sampled.result()
