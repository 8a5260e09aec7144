"""Open rollouts, named groups and streams in a whole system: the same tokens, however prompts come."""

import asyncio
from itertools import chain

import pytest
from cluster_harness import VOCAB, check_alternatives, check_routes, check_tops, folder, running
from invariants import check
from msgspec import structs
from virtual_time import VIRTUAL, eventually

from seer.client import Prompt, RequestRefused, SamplingParams
from seer.common.config import BufferConfig
from seer.services.engine.replay.backend import made_up_alternatives

pytestmark = VIRTUAL

SAMPLING = SamplingParams(max_tokens=100)
PROMPTS = {f"p{number}": [*range(1, 3 + number)] for number in range(6)}
N = 4

Tokens = dict[tuple[str, int], list[int]]


async def submitted(client) -> Tokens:
    """All responses of one rollout of whole groups."""
    prompts = [Prompt(name, token_ids=tokens) for name, tokens in PROMPTS.items()]
    rollout = await client.submit(prompts, n=N, sampling=SAMPLING, rollout_number=3)
    return {
        (group.prompt_id, response.index): response.token_ids.tolist()
        for group in await rollout.result()
        for response in group.responses
    }


def asked(rollout, name, first=0, n=1, **more):
    """Some responses of one of the groups, under an id of their own."""
    prompt = Prompt(f"{name}+{first}", token_ids=PROMPTS[name])
    given = {"n": n, "sampling": SAMPLING, "rollout_number": 3, "group": name, "first_index": first}
    return rollout.submit(prompt, **{**given, **more})


async def tokens_of(prompts) -> Tokens:
    found = {}
    for (name, first), prompt in prompts.items():
        for response in (await prompt.result()).responses:
            found[name, first + response.index] = response.token_ids.tolist()
    return found


async def test_single_requests_halves_and_late_siblings_are_the_groups_responses():
    async with running(engines=2) as cluster, cluster.client() as client:
        expected = await submitted(client)
        assert len(expected) == 24
        assert len({tuple(tokens) for tokens in expected.values()}) > 20
        rollout = client.open_rollout(repeat=True)
        singles = {(name, index): asked(rollout, name, index) for name in PROMPTS for index in range(N)}
        assert await tokens_of(singles) == expected
        halves = {(name, first): asked(rollout, name, first, n=2) for name in PROMPTS for first in (0, 2)}
        assert await tokens_of(halves) == expected
        most = {(name, 0): asked(rollout, name, n=N - 1) for name in PROMPTS}
        await asyncio.sleep(1.0)
        late = {(name, N - 1): asked(rollout, name, N - 1) for name in PROMPTS}
        assert await tokens_of(most | late) == expected
        check(cluster.services["buffer"].machine)


async def test_halves_from_two_trainers_are_one_group_and_never_repeat_noise():
    async with running(engines=2) as cluster, cluster.client() as one, cluster.client() as other:
        halves = {
            ("p5", first): asked(client.open_rollout(repeat=True), "p5", first, n=2, group="/step 3/p5")
            for client, first in ((one, 0), (other, 2))
        }
        machine = cluster.services["context"].machine
        await eventually(lambda: any(len(groups) == 2 for groups in machine._sharing.values()))
        found = await tokens_of(halves)
        assert len({tuple(tokens) for tokens in found.values()}) == N


async def test_prompts_of_one_group_share_drafts_and_estimates_without_a_change():
    async with running(engines=2, buffer=BufferConfig(chunk_size=8)) as cluster, cluster.client() as client:
        rollout = client.open_rollout()
        turns = {
            name: rollout.submit(
                tokens, sampling=SAMPLING, group="turn 2", first_index=index, rollout_number=1
            )
            for index, (name, tokens) in enumerate(PROMPTS.items())
        }
        machine = cluster.services["context"].machine
        await eventually(lambda: any(len(groups) == 6 for groups in machine._sharing.values()))
        assert len({id(group.known) for group in machine._groups.values()}) == 1
        for prompt in turns.values():
            await prompt.result()
        await eventually(lambda: not machine._groups)
        assert not machine._sharing


async def test_an_open_rollout_goes_on_under_new_weights_and_a_pinned_prompt_does_not(tmp_path):
    async with running(engines=2) as cluster, cluster.client() as client:
        rollout = client.open_rollout()
        first = asked(rollout, "p1", weight_version=-1)
        assert (await first.result()).weight_version == 0
        await client.update_weights(1, folder(tmp_path / "one", 1.0))
        assert (await asked(rollout, "p2", weight_version=-1).result()).weight_version == 1
        assert (await asked(rollout, "p3").result()).weight_version == 1
        with pytest.raises(RequestRefused, match="weight version 0 is past"):
            await asked(rollout, "p4", weight_version=0).result()
        early = asked(rollout, "p5", weight_version=2)
        await asyncio.sleep(2.0)
        await client.update_weights(2, folder(tmp_path / "two", 2.0))
        assert (await early.result()).weight_version == 2


async def test_streamed_tokens_are_those_of_the_group_whatever_is_killed():
    config = BufferConfig(chunk_size=8)
    async with running(engines=2, buffer=config) as cluster, cluster.client() as client:
        expected = await submitted(client)
        rollout = client.open_rollout(repeat=True)
        sampling = structs.replace(SAMPLING, routed_experts_from=1, top_logprobs=2, prompt_logprobs=0)
        prompts = {name: asked(rollout, name, n=N, stream=True, sampling=sampling) for name in PROMPTS}
        pieces: dict[tuple[str, int], list[list[int]]] = {}

        async def read(name):
            async for delta in prompts[name].tokens():
                tokens, logprobs = delta.token_ids.tolist(), delta.logprobs.tolist()
                pieces.setdefault((name, delta.index), []).append(tokens)
                check_tops(delta.top_logprobs, made_up_alternatives(tokens, logprobs, 2, VOCAB))

        reading = [asyncio.create_task(read(name)) for name in PROMPTS]
        await eventually(lambda: sum(map(len, pieces.values())) > 20)
        assert max(len(piece) for parts in pieces.values() for piece in parts) < 8  # before their chunks end
        await cluster.kill("e0")
        await cluster.kill("buffer")
        await cluster.start("buffer")
        await cluster.start("e0")
        await asyncio.gather(*reading)
        assert {key: [*chain(*parts)] for key, parts in pieces.items()} == expected
        assert max(map(len, pieces.values())) > 4  # not all at the end
        for prompt in prompts.values():
            check_routes(await prompt.result(), 1)
            check_alternatives(await prompt.result(), 2, 0)


async def test_nothing_is_streamed_to_who_did_not_ask():
    async with running(buffer=BufferConfig(chunk_size=8)) as cluster, cluster.client() as client:
        prompt = asked(client.open_rollout(), "p5", n=N)
        lengths = [len(delta.token_ids) async for delta in prompt.tokens()]
        assert len(lengths) == N  # each whole, with its group


async def test_another_place_or_parameter_under_an_id_in_use_is_refused_and_harms_nobody():
    async with running() as cluster, cluster.client() as client, cluster.client() as other:
        expected = await submitted(client)
        rollout = client.open_rollout("mine", repeat=True)
        good = asked(rollout, "p5", n=N)
        await eventually(lambda: cluster.services["buffer"].machine.rollouts)
        stranger = other.open_rollout("mine")
        assert len((await asked(stranger, "p5", n=1).result()).responses) == 1, "another trainer's is another"
        assert await tokens_of({("p5", 0): good}) == {
            key: tokens for key, tokens in expected.items() if key[0] == "p5"
        }
