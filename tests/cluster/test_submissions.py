"""Samples as parts of groups, in a whole system: the list in `seer.integrations.submissions`."""

from __future__ import annotations

import asyncio

import pytest
from cluster_harness import running
from virtual_time import VIRTUAL, eventually

from seer.client import InvalidField, Prompt, RequestRefused, SamplingParams
from seer.integrations.submissions import Keys, Place, Submission, generate, submissions

pytestmark = VIRTUAL

SAMPLING = SamplingParams(max_tokens=60)
KEYS = Keys(seed=5, rollout_number=2, weight_version=-1)


def test_equal_prompts_in_a_row_are_one_submission():
    places = [Place("a", 0), Place("a", 1), Place("a", 3), Place("a", 4), Place("b", 5)]
    prompts = [[1], [1], [1], [2], [2]]
    assert submissions(places, prompts) == [
        Submission("a", 0, 2, (1,)), Submission("a", 3, 1, (1,)), Submission("a", 4, 1, (2,)),
        Submission("b", 5, 1, (2,)),
    ]  # fmt: skip


async def test_responses_are_those_of_whole_groups_in_the_order_of_the_samples():
    async with running() as cluster, cluster.client() as client:
        whole = await client.submit(
            [Prompt("a", token_ids=[1, 2]), Prompt("b", token_ids=[3])], n=3, sampling=SAMPLING, seed=5,
            rollout_number=2,
        )  # fmt: skip
        expected = [each.token_ids.tolist() for group in await whole.result() for each in group.responses]
        order = [4, 0, 1, 2, 5, 3]
        places = [Place("ab"[i // 3], i % 3) for i in order]
        prompts = [[[1, 2], [3]][i // 3] for i in order]
        got = await generate(client.open_rollout(repeat=True), places, prompts, SAMPLING, KEYS)
        assert [each.token_ids.tolist() for each in got] == [expected[i] for i in order]


async def test_a_failure_is_raised_and_nothing_goes_on():
    async with running() as cluster, cluster.client() as client:
        rollout = client.open_rollout()
        long = SamplingParams(max_tokens=2**20)
        for prompts, error in (([[1], [1] * 3], RequestRefused), ([[1], []], InvalidField)):
            with pytest.raises(error):
                await generate(rollout, [Place("a", 0), Place("a", 1)], prompts, long, KEYS)
            await eventually(lambda: not rollout.unfinished)
        task = asyncio.create_task(generate(rollout, [Place("a", 0)], [[1]], SAMPLING, KEYS))
        await eventually(lambda: rollout.unfinished)
        failed = rollout.counts.failed
        task.cancel()
        await eventually(lambda: not rollout.unfinished)
        assert (rollout.counts.failed, rollout.counts.finished) == (failed + 1, 0)
