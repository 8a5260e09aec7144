"""Rewards beside a rollout that the test plays itself: the invariants of seer.client.rewards and .scorer."""

import asyncio
import math
import re
import threading
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest
from virtual_time import VIRTUAL, virtual

from seer.client import (
    InvalidField,
    RewardFailed,
    Rollout,
    RolloutCancelled,
    SamplingParams,
    Scores,
    per_response,
)
from seer.client.prompts import prepare
from seer.client.reward_calls import measure
from seer.client.used_noise import UsedNoise
from seer.common.wire import GroupDone

pytestmark = VIRTUAL

N = 3


def played(count: int) -> Rollout:
    async def cancel(rollout, prompt_ids):
        rollout.fail(prompt_ids or rollout.unfinished, RolloutCancelled, "cancelled by the trainer")

    prompts = prepare([[1]] * count, None)
    claims = UsedNoise().claim_prompts(0, 0, N, list(prompts.values()), repeat=False)
    return Rollout("r", 0, 0, N, SamplingParams(), prompts, 1, -1, cancel, claims)


def finish(rollout: Rollout, *prompt_ids: str) -> None:
    """Have groups arrive whose responses are 1, 2 and 3 tokens long."""
    for prompt_id in prompt_ids:
        rollout.deliver(
            GroupDone(
                rollout_id="r",
                prompt_id=prompt_id,
                weight_version=0,
                finish_reasons=["stop"] * N,
                stop_reasons=["2"] * N,
                lengths=[1, 2, 3],
                tokens=np.arange(6, dtype=np.int32),
                logprobs=np.zeros(6, np.float32),
            ),
            None,
        )


def lengths(group):
    return [len(response.token_ids) for response in group.responses]


async def lengths_later(group):
    await asyncio.sleep(10 - int(group.prompt_id))
    return lengths(group)


def length(group, response):
    return len(response.token_ids)


async def length_later(group, response):
    await asyncio.sleep(1)
    return len(response.token_ids)


class Judge:
    async def __call__(self, group):
        return np.array(lengths(group), np.float32)


@pytest.mark.parametrize(
    "reward", [lengths, lengths_later, per_response(length), per_response(length_later), Judge()]
)
async def test_any_callable_gives_floats_in_index_order(reward):
    rollout = played(2)
    async with Scores(rollout, reward) as scores:
        finish(rollout, "1", "0")
        result = await scores.result()
    assert [scored.group.prompt_id for scored in result] == ["0", "1"]
    assert [scored.rewards for scored in result] == [(1.0, 2.0, 3.0)] * 2


async def test_they_come_as_they_are_ready_and_in_input_order():
    rollout = played(3)
    async with Scores(rollout, lengths_later) as scores:
        finish(rollout, "0")
        await asyncio.sleep(0)
        finish(rollout, "2", "1")
        assert [scored.group.prompt_id async for scored in scores] == ["2", "1", "0"]
        assert [scored.group.prompt_id async for scored in scores.in_order()] == ["0", "1", "2"]
        assert [scored.group.prompt_id for scored in scores.scored] == ["2", "1", "0"]


async def test_rewards_do_not_wait_for_the_rollout():
    rollout = played(2)
    async with Scores(rollout, lengths_later) as scores:
        finish(rollout, "1")
        first = await anext(aiter(scores))
        assert first.group.prompt_id == "1"
        assert rollout.unfinished == ["0"]
        await asyncio.sleep(1)
        finish(rollout, "0")
        await scores.result()
    assert scores.metrics.calls == 2
    assert scores.metrics.seconds == 19  # nine before the end, ten after it
    assert scores.metrics.hidden_seconds == 9
    assert scores.metrics.after_seconds == 10
    assert scores.metrics.overlap == 9 / 19


def test_the_overlap_of_any_calls():
    calls = [(0.0, 2.0), (1.0, 5.0), (4.5, 5.5)]
    running = measure(calls, None)
    assert (running.seconds, running.hidden_seconds, running.after_seconds) == (7, 7, 0)
    ended = measure(calls, 4.0)
    assert (ended.calls, ended.seconds, ended.hidden_seconds, ended.after_seconds) == (3, 7, 5, 1.5)
    assert measure([], 4.0).overlap == 1


async def test_at_most_max_concurrent_at_once():
    running, most = 0, 0

    async def reward(group):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(1)
        running -= 1
        return [0.0] * N

    rollout = played(7)
    async with Scores(rollout, reward, max_concurrent=2) as scores:
        finish(rollout, *rollout.prompts)
        await scores.result()
    assert most == 2
    assert asyncio.get_running_loop().time() == 4


BAD = {
    "1": (lambda: 1 / 0, "raised ZeroDivisionError"),
    "2": (lambda: [1.0, 2.0], "gave 2 numbers for 3 responses"),
    "3": (lambda: [0.0, math.nan, 0.0], "of response 1 is nan; give a finite number"),
    "4": (lambda: [0.0, 0.0, math.inf], "of response 2 is inf"),
    "5": (lambda: None, "gave None; give 3 numbers"),
    "6": (lambda: [None] * 3, "give 3 numbers"),
    "7": (lambda: next(iter(())), r"raised RuntimeError\('StopIteration'\)"),
    "8": (lambda: 1.0, "gave 1.0; give 3 numbers"),
}


@pytest.mark.parametrize("kind", ["plain", "async"])
def test_a_bad_reward_is_named_and_loses_no_other(kind):
    def plain(group):
        return BAD[group.prompt_id][0]() if group.prompt_id in BAD else lengths(group)

    async def asynchronous(group):
        await asyncio.sleep(1)
        if group.prompt_id == "7":
            raise RuntimeError("StopIteration")
        return plain(group)

    @virtual
    async def run():
        rollout = played(10)
        async with Scores(rollout, plain if kind == "plain" else asynchronous) as scores:
            finish(rollout, *rollout.prompts)
            got = []
            with pytest.raises(RewardFailed, match="8 of 10 prompts have no rewards") as caught:
                async for scored in scores:
                    got += [scored.group.prompt_id]
            assert got == ["0", "9"]
            with pytest.raises(RewardFailed):
                await scores.result()
            assert [group.prompt_id for group in scores.unrewarded] == list(BAD)
        assert caught.value.prompt_ids == tuple(BAD)
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        for prompt_id, (_, why) in BAD.items():
            told = str(caught.value).split(f" (prompts {prompt_id})")[0].rpartition("(prompts ")[2]
            assert re.search(why, told)

    run()


async def test_a_reward_has_its_time():
    async def reward(group):
        if group.prompt_id == "0":
            await asyncio.sleep(1000)
        elif group.prompt_id == "1":
            raise TimeoutError("its own")
        return [0.0] * N

    rollout = played(3)
    async with Scores(rollout, reward, timeout_seconds=5) as scores:
        finish(rollout, *rollout.prompts)
        with pytest.raises(RewardFailed, match=r"no reward within 5 s \(prompts 0\)") as caught:
            await scores.result()
    assert "raised TimeoutError('its own') (prompts 1)" in str(caught.value)
    assert asyncio.get_running_loop().time() == 5


async def test_one_error_names_what_either_lost():
    async def reward(group):
        return [math.nan] * N if group.prompt_id == "2" else [0.0] * N

    rollout = played(4)
    async with Scores(rollout, reward) as scores:
        finish(rollout, "2", "0")
        await rollout.cancel(["1", "3"])
        got = []
        with pytest.raises(RewardFailed, match="2 of 4 prompts: cancelled by the trainer") as caught:
            async for scored in scores:
                got += [scored.group.prompt_id]
    assert got == ["0"]
    assert caught.value.prompt_ids == ("1", "2", "3")


async def test_a_cancelled_rollout_ends_it_with_the_rollouts_error():
    rollout = played(2)
    async with Scores(rollout, lengths_later) as scores:
        finish(rollout, "0")
        await asyncio.sleep(1)
        await rollout.cancel()
        with pytest.raises(RolloutCancelled) as caught:
            await scores.result()
        assert [scored.group.prompt_id for scored in scores.scored] == ["0"]
    assert caught.value.prompt_ids == ("1",)
    assert not isinstance(caught.value, RewardFailed)


async def test_leaving_the_scope_ends_every_reward_and_not_the_rollout():
    ended = []

    async def reward(group):
        try:
            await asyncio.sleep(5 if group.prompt_id == "0" else 1000)
        finally:
            ended.append(group.prompt_id)
        return [0.0] * N

    rollout = played(4)
    async with Scores(rollout, reward) as scores:
        finish(rollout, "0", "1", "2")
        assert (await anext(aiter(scores))).group.prompt_id == "0"
    assert sorted(ended) == ["0", "1", "2"]
    assert len(asyncio.all_tasks()) == 1
    assert rollout.unfinished == ["3"]
    with pytest.raises(RewardFailed, match="was cancelled") as caught:
        async for scored in scores:
            assert scored.group.prompt_id == "0"
    assert caught.value.prompt_ids == ("1", "2")


@pytest.mark.real_time
async def test_a_plain_reward_runs_in_a_thread():
    rollout, loop = played(2), asyncio.get_running_loop()
    both = threading.Barrier(2, timeout=20)

    def reward(group):
        both.wait()
        ticked = threading.Event()
        loop.call_soon_threadsafe(ticked.set)
        return [float(ticked.wait(20))] * N

    async with Scores(rollout, reward, max_concurrent=2) as scores:
        finish(rollout, "0", "1")
        assert [scored.rewards for scored in await scores.result()] == [(1.0,) * N] * 2


@pytest.mark.real_time
async def test_a_thread_that_hangs_is_given_up():
    rollout, stuck = played(2), threading.Event()

    def reward(group):
        if group.prompt_id == "0":
            stuck.wait(60)
        return lengths(group)

    try:
        async with Scores(rollout, reward, timeout_seconds=0.2) as scores:
            finish(rollout, "0", "1")
            with pytest.raises(RewardFailed, match="no reward within") as caught:
                await scores.result()
        assert caught.value.prompt_ids == ("0",)
        assert len(scores.scored) == 1
    finally:
        stuck.set()


@pytest.mark.real_time
async def test_a_process_pool_scores_groups():
    rollout = played(3)
    with ProcessPoolExecutor(1) as pool:
        async with Scores(rollout, per_response(length), executor=pool, max_concurrent=1) as scores:
            finish(rollout, *rollout.prompts)
            assert [scored.rewards for scored in await scores.result()] == [(1.0, 2.0, 3.0)] * 3
        async with Scores(rollout, lambda group: [0.0], executor=pool) as scores:
            with pytest.raises(RewardFailed, match=r"3 of 3 prompts have no rewards: .*pickle"):
                await scores.result()


@pytest.mark.real_time
async def test_bounds_that_cannot_be():
    for options, field in (
        ({"max_concurrent": 0}, "max_concurrent"),
        ({"timeout_seconds": 0}, "timeout_seconds"),
        ({"timeout_seconds": math.nan}, "timeout_seconds"),
    ):
        with pytest.raises(InvalidField) as caught:
            Scores(played(1), lengths, **options)
        assert caught.value.field == field
    with ProcessPoolExecutor(1) as pool, pytest.raises(InvalidField, match="an async one runs in the loop"):
        Scores(played(1), lengths_later, executor=pool)
