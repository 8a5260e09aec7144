"""Trajectories in a whole system: the tokens of requests that send the whole context, whatever happens."""

import asyncio
import itertools

import numpy as np
import pytest
from cluster_harness import folder, running
from invariants import check
from memory_transport import MemoryTransport
from virtual_time import VIRTUAL, eventually

from seer.client import Prompt, RequestRefused, SamplingParams
from seer.client.turns import PrefixTrajectories, TrajectoryFailed
from seer.common.config import BufferConfig, EngineConfig, ReplayConfig

pytestmark = VIRTUAL

SAMPLING = SamplingParams(max_tokens=24)
PROMPTS = [Prompt(f"p{number}", token_ids=[*range(1, 4 + number)]) for number in range(3)]
N, TURNS = 4, 3


def tool(tokens, turn):
    """What the environment says to a turn: a function of what was generated."""
    return [int(tokens.sum()) % 90 + 1, 7, turn + 1]


async def agent(trajectory):
    for turn in range(TURNS):
        done = await trajectory.generate()
        if turn < TURNS - 1:
            trajectory.append(tool(done.token_ids, turn))
    return len(trajectory.turns)


def found_in(groups):
    return {
        (each.prompt_id, each.index): (
            each.token_ids.tolist(),
            each.logprobs.tolist(),
            each.loss_mask.tolist(),
        )
        for group in groups
        for each in group.trajectories
    }


async def rolled(client, how=agent, **options):
    given = {"n": N, "sampling": SAMPLING, "max_context": 200, "rollout_number": 3, **options}
    async with client.trajectories(PROMPTS, **given) as rollout:
        return [group async for group in rollout.run(how)]


async def resent():
    """The same by single requests that know nothing of trajectories."""
    found = {}
    async with running() as cluster, cluster.client() as client:
        rollout = client.open_rollout()
        for prompt, index in itertools.product(PROMPTS, range(N)):
            context, mask, logprobs = np.array(prompt.token_ids), [], []
            for turn in range(TURNS):
                request = rollout.submit(
                    Prompt(f"{prompt.id}/{index}/{turn}", token_ids=context), sampling=SAMPLING,
                    rollout_number=3, group=prompt.id, first_index=index,
                )  # fmt: skip
                response = (await request.result()).responses[0]
                said = tool(response.token_ids, turn) if turn < TURNS - 1 else []
                context = np.concatenate([context, response.token_ids, np.array(said, np.int32)])
                mask += [True] * len(response.token_ids) + [False] * len(said)
                logprobs += response.logprobs.tolist() + [0.0] * len(said)
            found[prompt.id, index] = (context[len(prompt.token_ids) :].tolist(), logprobs, mask)
    return found


def away(cluster):
    return cluster.services["buffer"].machine.registry.trajectories.away


async def test_turns_are_the_responses_to_the_whole_context():
    expected = await resent()
    assert len({tuple(tokens) for tokens, _, _ in expected.values()}) == len(expected)
    async with running(engines=2) as cluster, cluster.client() as client:
        groups = await rolled(client)
        assert found_in(groups) == expected
        assert [each.result for group in groups for each in group.trajectories] == [TURNS] * 12
        await eventually(lambda: not away(cluster))
        assert cluster.services["buffer"].machine.idle
        assert not len(cluster.services["context"].machine)
        check(cluster.services["buffer"].machine)


@pytest.mark.parametrize("name", ["buffer", "e0", "context", "dgds"])
async def test_whoever_is_killed_while_trajectories_are_away(name):
    expected = await resent()
    async with running(engines=2) as cluster, cluster.client() as client:
        killed = asyncio.Event()

        async def slow(trajectory):
            for turn in range(TURNS):
                done = await trajectory.generate()
                await asyncio.sleep(5.0)
                if not killed.is_set():
                    killed.set()
                    await cluster.kill(name)
                    await cluster.start(name)
                if turn < TURNS - 1:
                    trajectory.append(tool(done.token_ids, turn))

        assert found_in(await rolled(client, slow)) == expected
        await eventually(lambda: cluster.services["buffer"].machine.idle)


async def test_an_update_waits_for_those_that_are_away_and_opens_only_their_turns(tmp_path):
    async with running(engines=1) as cluster, cluster.client() as client, cluster.client() as other:
        went = asyncio.Event()

        async def slow(trajectory):
            await trajectory.generate()
            went.set()
            await asyncio.sleep(60.0)
            trajectory.append([1, 2])
            await trajectory.generate()

        rolling = asyncio.create_task(rolled(client, slow))
        await went.wait()
        await asyncio.sleep(1.0)
        assert len(away(cluster)) == 12
        update = asyncio.create_task(other.update_weights(1, folder(tmp_path, 1)))
        await asyncio.sleep(10.0)
        assert not update.done()
        late = await other.submit([[5, 6]], n=1, sampling=SAMPLING, weight_version=-1)
        groups = await rolling
        assert {each.weight_version for group in groups for each in group.trajectories} == {0}
        await update
        assert (await late.result())[0].weight_version == 1


async def test_sleep_waits_for_those_that_are_away_and_no_longer_than_idle_seconds():
    async with running(engines=1) as cluster, cluster.client() as client, cluster.client() as other:

        async def slow(trajectory):
            await trajectory.generate()
            await asyncio.sleep(20.0)
            await trajectory.generate()

        rolling = asyncio.create_task(rolled(client, slow, idle_seconds=30.0))
        await asyncio.sleep(5.0)
        await other.sleep(200)
        assert asyncio.get_running_loop().time() > 19.0
        assert not any(isinstance(e, TrajectoryFailed) for g in await rolling for e in g.trajectories)
        await other.wake(60)
        began = asyncio.get_running_loop().time()
        rolling = asyncio.create_task(rolled(client, slow, idle_seconds=10.0, rollout_number=4))
        await asyncio.sleep(5.0)
        await other.sleep(200)
        assert asyncio.get_running_loop().time() < began + 19.0
        await other.wake(60)  # what came back meanwhile was held, and goes on
        assert not any(isinstance(e, TrajectoryFailed) for g in await rolling for e in g.trajectories)


async def test_a_trainer_that_was_killed_is_awaited_no_longer_than_idle_seconds(tmp_path):
    async with running(engines=1) as cluster, cluster.client() as other:
        transport = MemoryTransport(cluster.network)
        client = await cluster.client(transport, name="trainer").__aenter__()
        await one_turn(client)
        await transport.close()  # as SIGKILL would: no goodbye
        assert len(away(cluster)) == 1
        await other.update_weights(1, folder(tmp_path, 1))
        assert 15.0 < asyncio.get_running_loop().time() < 30.0
        assert cluster.services["buffer"].machine.idle


async def test_an_update_awaits_nothing_that_an_earlier_incarnation_of_its_trainer_left(tmp_path):
    async with running(engines=1) as cluster:
        transport = MemoryTransport(cluster.network)
        client = await cluster.client(transport, name="trainer").__aenter__()
        await one_turn(client)
        await transport.close()  # as SIGKILL would: no goodbye
        async with cluster.client(name="trainer") as again:
            await one_turn(again)
            assert len(away(cluster)) == 2
            updating = asyncio.create_task(again.update_weights(1, folder(tmp_path, 1)))
            await eventually(lambda: len(away(cluster)) == 1)  # its own is awaited
            assert asyncio.get_running_loop().time() < 15.0
            await updating
            assert 15.0 < asyncio.get_running_loop().time() < 30.0


async def test_an_update_awaits_no_trajectory_whose_turn_was_under_way_when_its_trainer_was_killed(tmp_path):
    slow = EngineConfig(backend="replay", replay=ReplayConfig(step_seconds=0.5))
    async with running(engines=1, engine=slow) as cluster:
        machine = cluster.services["buffer"].machine
        transport = MemoryTransport(cluster.network)
        client = await cluster.client(transport, name="trainer").__aenter__()
        turn = asyncio.create_task(one_turn(client))
        await eventually(lambda: machine.requests)
        await transport.close()  # as SIGKILL would: no goodbye
        async with cluster.client(name="trainer") as again:
            updating = asyncio.create_task(again.update_weights(1, folder(tmp_path, 1)))
            await eventually(lambda: cluster.services["buffer"].weights.updating)
            assert machine.requests, "the turn goes on"
            await eventually(lambda: not machine.requests)
            ended = asyncio.get_running_loop().time()
            await updating
            assert asyncio.get_running_loop().time() < ended + 5.0
        turn.cancel()


async def test_a_trainer_that_left_is_awaited_no_longer(tmp_path):
    async with running(engines=1) as cluster, cluster.client() as other:
        async with cluster.client() as client:
            await one_turn(client)
            assert len(away(cluster)) == 1
        await other.update_weights(1, folder(tmp_path, 1))
        assert asyncio.get_running_loop().time() < 15.0
        assert cluster.services["buffer"].machine.idle


async def one_turn(client):
    sessions = PrefixTrajectories(client.open_rollout(), idle_seconds=20.0)
    await sessions.generate("s", np.array([1, 2], np.int32), SAMPLING, group="g")


async def test_an_incarnation_that_takes_all_turns_again_ends_what_the_one_before_had_begun():
    expected = await resent()
    async with running(engines=1) as cluster:
        for seconds in (2.5, 12.5, 30.0):  # killed with the first turn away, with the second, and not at all

            async def paced(trajectory, pause=10.0 if seconds < 30.0 else 0.0):
                for turn in range(TURNS):
                    done = await trajectory.generate()
                    await asyncio.sleep(pause)
                    if turn < TURNS - 1:
                        trajectory.append(tool(done.token_ids, turn))

            transport = MemoryTransport(cluster.network)
            client = cluster.client(transport, name="trainer")
            await client.__aenter__()
            rolling = asyncio.create_task(rolled(client, paced, rollout_id="agents"))
            await asyncio.wait([rolling], timeout=seconds)
            await transport.close()  # as a process that is killed: nothing is told any more
            if seconds == 30.0:
                assert found_in(rolling.result()) == expected
                assert not away(cluster)
            rolling.cancel()
            await asyncio.wait([rolling])
            await asyncio.sleep(1.0)


async def test_who_stays_away_too_long_delays_no_update_and_fails_by_name(tmp_path):
    async with running(engines=1) as cluster, cluster.client() as client, cluster.client() as other:

        async def lazy(trajectory):
            await trajectory.generate()
            await asyncio.sleep(100.0 if trajectory.index else 0.0)
            trajectory.append([3])
            await trajectory.generate()

        rolling = asyncio.create_task(rolled(client, lazy, idle_seconds=20.0))
        await asyncio.sleep(2.0)
        await other.update_weights(1, folder(tmp_path, 1))
        assert asyncio.get_running_loop().time() < 60.0
        for group in await rolling:
            first, *others = group.trajectories
            assert not isinstance(first, TrajectoryFailed)
            assert all("weight version 0 is past" in str(each) for each in others), others
            assert {each.index for each in others} == {1, 2, 3}


async def test_aborted_ones_fail_by_name(tmp_path):
    async with running(engines=1) as cluster, cluster.client() as client, cluster.client() as other:

        async def slow(trajectory):
            await trajectory.generate()
            await asyncio.sleep(30.0)
            await trajectory.generate()

        rolling = asyncio.create_task(rolled(client, slow))
        await asyncio.sleep(5.0)
        await other.update_weights(1, folder(tmp_path, 1), in_flight="abort")
        assert asyncio.get_running_loop().time() < 25.0
        failed = [each for group in await rolling for each in group.trajectories]
        assert all("weight version 0 is past" in str(each) for each in failed)


async def test_a_trainer_that_is_started_again_asks_no_environment_twice(tmp_path):
    expected = await resent()
    calls = []

    def paced(seconds):
        async def journaled(trajectory):
            for turn in range(TURNS):
                done = await trajectory.generate()
                if turn == TURNS - 1:
                    return

                async def environment(call_id, done=done, turn=turn):
                    calls.append(call_id)
                    await asyncio.sleep(seconds)
                    return tool(done.token_ids, turn)

                trajectory.append(await trajectory.once(environment))

        return journaled

    path = tmp_path / "journal"
    async with running(engines=2) as cluster:
        async with cluster.client() as client:
            first = asyncio.create_task(rolled(client, paced(10.0), journal=path))
            await asyncio.sleep(15.0)
            first.cancel()
            await asyncio.wait([first])
        before = set(calls)
        assert len(before) == len(calls) == 24  # all of the first turn were answered, none of the second
        async with cluster.client() as client:
            assert found_in(await rolled(client, paced(0.1), journal=path)) == expected
        again = calls[24:]
        assert len(again) == 12
        assert set(again) < before  # under way when it was killed: the same ids
        async with cluster.client() as client:
            assert found_in(await rolled(client, paced(0.1), journal=path)) == expected
        assert len(calls) == 36


async def test_loops_that_send_whole_contexts_have_trajectories_and_segments():
    expected = await resent()
    async with running(engines=2) as cluster, cluster.client() as client:
        sessions = PrefixTrajectories(client.open_rollout(repeat=True))
        opened = []

        async def loop(prompt, index, *, rewrites=False):
            context, found = np.array(prompt.token_ids, np.int32), []
            for turn in range(TURNS):
                group = await sessions.generate(
                    f"{prompt.id}-{index}", context, SAMPLING, group=prompt.id, index=index, rollout_number=3
                )
                opened.append(len(away(cluster)))
                tokens = group.responses[0].token_ids
                found.append(tokens.tolist())
                context = np.concatenate([context, tokens, np.array(tool(tokens, turn), np.int32)])
                if rewrites:
                    context = np.delete(context, 2)
            return found

        asked = [(prompt, index) for prompt in PROMPTS for index in range(N)]
        for (prompt, index), turns in zip(
            asked, await asyncio.gather(*(loop(*each) for each in asked)), strict=True
        ):
            tokens, _, mask = expected[prompt.id, index]
            assert [token for turn in turns for token in turn] == [
                t for t, m in zip(tokens, mask, strict=True) if m
            ]
        assert (sessions.turns, sessions.segments) == (36, 0)
        assert len(away(cluster)) == 12
        for prompt, index in asked:
            sessions.end(f"{prompt.id}-{index}")
        await eventually(lambda: not away(cluster))
        once = await loop(PROMPTS[0], 0, rewrites=True)
        assert sessions.segments == 2
        sessions.end("p0-0")
        assert await loop(PROMPTS[0], 0, rewrites=True) == once
        await eventually(lambda: len(away(cluster)) == 1)


async def slow(trajectory):
    for _ in range(3):
        await trajectory.generate()
        await asyncio.sleep(5.0)


async def test_a_small_buffer_takes_the_next_turns_of_what_it_has():
    async with (
        running(buffer=BufferConfig(chunk_size=32, max_requests=12)) as cluster,
        cluster.client() as client,
    ):
        rolling = asyncio.create_task(rolled(client, slow))
        await asyncio.sleep(2.0)
        with pytest.raises(RequestRefused, match="at most 12"):
            await (await client.submit([[1]], n=1, sampling=SAMPLING)).result()
        for group in await rolling:
            assert not any(isinstance(each, TrajectoryFailed) for each in group.trajectories)


async def test_a_draining_buffer_finishes_trajectories():
    async with running() as cluster, cluster.client() as client:
        rolling = asyncio.create_task(rolled(client, slow))
        await asyncio.sleep(2.0)
        cluster.services["buffer"].drain()
        for group in await rolling:
            assert not any(isinstance(each, TrajectoryFailed) for each in group.trajectories)
        await eventually(lambda: cluster.services["buffer"].conductor.drained.is_set())


async def test_turns_that_nobody_awaits_go_where_the_last_one_ran_and_hold_up_nothing(tmp_path):
    """Turns of a session, from two clients as from two gateways: the buffer finds which goes on from which."""
    async with running(engines=3) as cluster, cluster.client() as client, cluster.client() as other:
        rollout, machine = client.open_rollout(), cluster.services["buffer"].machine
        rollouts = [rollout, other.open_rollout(rollout_number=rollout.rollout_number)]

        def ask(number, context):
            """One turn, in a group of its own."""
            return rollouts[number % 2].submit(
                Prompt(f"{number}", token_ids=context), sampling=SAMPLING, group=f"g{number}", seed=number,
                session="s",
            )  # fmt: skip

        async def turn(number, context):
            return (await ask(number, context).result()).responses[0].token_ids.tolist()

        context, places, busy = [1, 2, 3], [], []
        endless = SamplingParams(max_tokens=4000, ignore_eos=True)
        for number in range(4):
            said = await turn(number, context)
            plain = other.open_rollout(repeat=True).submit(
                Prompt("x", token_ids=context), sampling=SAMPLING, group=f"g{number}", seed=number,
                rollout_number=0,
            )  # fmt: skip
            assert (await plain.result()).responses[0].token_ids.tolist() == said
            context += said
            [place] = machine.registry.trajectories.places.values()
            places.append(place)
            assert machine.idle or busy
            if not busy:  # from now on, engines that run nothing would be chosen first
                busy = [rollout.submit(Prompt("busy", token_ids=[9]), sampling=endless, group="busy")]
                await eventually(lambda: any(each.instance for each in machine.requests.values()))
        assert len(set(places)) == 1
        counters = (await client.status()).counters
        assert (counters["later_turns"], counters["segments"]) == (3, 0)
        given_up = ask(4, context)  # a turn that is given up, and one that is refused, may come again
        await eventually(lambda: given_up.request.session and len(machine.groups) > 1)
        await given_up.cancel()
        with pytest.raises(RequestRefused, match="cancelled"):
            await given_up.result()
        with pytest.raises(RequestRefused, match="KV blocks"):
            await ask(6, [*context, *range(100_000)]).result()
        await turn(8, context)
        counters = (await client.status()).counters
        assert (counters["later_turns"], counters["segments"]) == (6, 0)
        await busy[0].cancel()
        await eventually(lambda: machine.idle)
        await other.update_weights(1, folder(tmp_path, 1), in_flight="error")
        check(machine)
