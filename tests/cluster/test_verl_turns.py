"""Turns of veRL's loops in a whole system: their tokens, groups, segments and ends. No veRL."""

import asyncio
from dataclasses import replace

import pytest
from cluster_harness import folder, running
from virtual_time import VIRTUAL, eventually

from seer.client import DeadlineExceeded, Prompt, SamplingParams
from seer.integrations.verl.groups import FIRST, SEGMENT, TURN, GroupKey, Request, prompt_id
from seer.integrations.verl.turns import Session, Turns

pytestmark = VIRTUAL

KEY = GroupKey(step=2, validate=False, index="17", copy=0)
TOKENS = (5, 6, 7, 8)
SAMPLING = SamplingParams(max_tokens=20)
N, SEED = 4, 42


def turns_of(client, **options):
    return Turns(client, seed=SEED, **({"response_length": 120, "deadline_seconds": None} | options))


def away(cluster):
    return cluster.services["buffer"].machine.registry.trajectories.away


async def loop(turns, index, asks=3, *, seconds=0.0, rewrites=False, version=0, key=KEY):
    """Run a session; return the kinds of its requests, and what each got."""
    session, context, kinds, found = Session(key, index), list(TOKENS), [], []
    for _ in range(asks):
        request = Request(tuple(context), SAMPLING)
        kinds.append(turns.kind(session, request))
        group = await turns.generate(session, request, version)
        found.append(group.responses[0].token_ids.tolist())
        await asyncio.sleep(seconds)
        context += [*found[-1], sum(found[-1]) % 90 + 1, 9]
        if rewrites:
            context.pop(2)
    turns.ended(session)
    return kinds, found


async def test_first_turns_are_a_whole_group_and_later_ones_its_responses_that_go_on():
    async with running(engines=2) as cluster, cluster.client() as client, cluster.client() as other:
        prompt = Prompt(prompt_id(KEY, TOKENS), token_ids=TOKENS)
        [whole] = await (
            await other.submit([prompt], n=N, sampling=SAMPLING, seed=SEED, rollout_number=KEY.step)
        ).result()
        turns = turns_of(client)
        ran = await asyncio.gather(*(loop(turns, index) for index in range(N)))
        assert [kinds for kinds, _ in ran] == [[FIRST, TURN, TURN]] * N
        assert [found[0] for _, found in ran] == [each.token_ids.tolist() for each in whole.responses]
        async with cluster.client() as third:
            turns = turns_of(third)
            again = await asyncio.gather(*(loop(turns, index, seconds=index) for index in range(N)))
        assert again == ran
        context = [*TOKENS, *ran[1][1][0], sum(ran[1][1][0]) % 90 + 1, 9]
        single = other.open_rollout(repeat=True).submit(
            Prompt("x", token_ids=context), sampling=SAMPLING, seed=SEED, rollout_number=KEY.step,
            group=prompt.id, first_index=1,
        )  # fmt: skip
        assert (await single.result()).responses[0].token_ids.tolist() == ran[1][1][1]
        await eventually(lambda: not away(cluster))


async def test_a_rewritten_history_is_a_segment_whose_tokens_are_the_same_each_time():
    async with running(engines=2) as cluster, cluster.client() as client:
        kinds, found = await loop(turns_of(client), 0, rewrites=True)
        assert kinds == [FIRST, SEGMENT, SEGMENT]
        async with cluster.client() as other:
            assert found[0] == (await loop(turns_of(other), 0, asks=1))[1][0]
        async with cluster.client() as other:
            assert (await loop(turns_of(other), 0, rewrites=True))[1] == found
        await eventually(lambda: not away(cluster))


async def test_a_session_may_ask_for_the_same_twice_at_once():
    async with running() as cluster, cluster.client() as client:
        turns, session, request = turns_of(client), Session(KEY, 0), Request(TOKENS, SAMPLING)
        found = await asyncio.gather(*(turns.generate(session, request, 0) for _ in range(3)))
        assert len({tuple(group.responses[0].token_ids) for group in found}) == 3
        turns.ended(session)
        await eventually(lambda: not away(cluster))


async def test_a_turn_that_takes_too_long_fails_and_leaves_nothing():
    async with running(engines=0) as cluster, cluster.client() as client:
        session = Session(KEY, 1)
        with pytest.raises(DeadlineExceeded, match="-s1: a turn took longer"):
            await turns_of(client, deadline_seconds=3.0).generate(session, Request(TOKENS, SAMPLING), 0)
        await eventually(lambda: not cluster.services["buffer"].machine.groups)


async def test_new_weights_wait_for_no_session_that_has_ended(tmp_path):
    async with running() as cluster, cluster.client() as client:
        turns = turns_of(client)
        _, before = await loop(turns, 0)
        began = asyncio.get_running_loop().time()
        await client.update_weights(1, folder(tmp_path, 1))
        assert asyncio.get_running_loop().time() - began < 60
        kinds, after = await loop(turns, 0, version=1, key=replace(KEY, step=3))
        assert kinds == [FIRST, TURN, TURN]
        assert len(after) == len(before)
