"""Agents against a buffer that is scripted: what a trajectory holds, how it ends, and what is asked for once."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest
from fake_buffer import FakeBuffer, connected, turns
from msgspec import structs

from seer.client import InvalidField, Prompt, RolloutCancelled, SamplingParams, Unreachable
from seer.client.turns import NoRoom, Trajectory, TrajectoryFailed, TrajectoryGroup
from seer.common.wire import Cancel, Message, Refused, Submit

SAMPLING = SamplingParams(max_tokens=3)


def generous(message: Message) -> list[Any]:
    return list(turns(message)) if isinstance(message, Submit) else []


class Letters:
    """A token for each character, and one that begins a prompt."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [1] * add_special_tokens + [ord(letter) for letter in text]

    def decode(self, token_ids: list[int]) -> str:
        return "".join(map(chr, token_ids))


@contextlib.asynccontextmanager
async def agents(
    script: Callable[[Message], list[Any]] = generous, tokenizer: object = None, **options: Any
) -> AsyncIterator[tuple[FakeBuffer, Callable[..., Any]]]:
    """Yield a buffer, and what runs an agent there: it returns the groups in order."""
    async with connected() as (buffer, client):
        buffer.script = script
        client.tokenizer = client._active._tokenizer = tokenizer

        async def run(agent: Callable[[Trajectory], Any], **more: Any) -> list[TrajectoryGroup]:
            asked = {"n": 1, "sampling": SAMPLING, "max_context": 100, "rollout_number": 3, **options, **more}
            prompts = asked.pop("prompts", [[1, 2]])
            async with client.trajectories(prompts, **asked) as rollout:
                found = [each async for each in rollout.run(agent)]
            return sorted(found, key=lambda each: each.prompt_id)

        yield buffer, run


async def one(run: Callable[..., Any], agent: Callable[[Trajectory], Any], **options: Any) -> Any:
    ((found,),) = [each.trajectories for each in await run(agent, **options)]
    return found


# --- what it holds ---------------------------------------------------------------------------------


async def test_tokens_masks_and_logprobs_have_an_entry_for_each_token_after_the_prompt():
    async def agent(trajectory: Trajectory) -> str:
        first = await trajectory.generate(max_tokens=2)
        trajectory.append([7, 8])
        trajectory.append([])
        second = await trajectory.generate()
        assert (first.start, second.start) == (2, 6)
        return "done"

    async with agents() as (buffer, run):
        found = await one(run, agent)
        assert found.context.tolist() == [1, 2, 100, 101, 7, 8, 100, 101, 102]
        assert found.token_ids.tolist() == found.context[2:].tolist()
        assert found.loss_mask.tolist() == [True, True, False, False, True, True, True]
        assert found.logprobs.tolist() == [-0.5, -0.5, 0, 0, -1.5, -1.5, -1.5]
        assert (found.context.dtype, found.logprobs.dtype) == (np.int32, np.float32)
        assert (found.result, found.room, found.weight_version) == ("done", 91, 3)
        first, second = buffer.of(Submit)
        assert first.tokens.tolist() == [1, 2]
        assert second.tokens.tolist() == [1, 2, 100, 101, 7, 8]
        assert [(s.groups, s.first_indices, s.weight_version) for s in (first, second)] == [
            (["0"], [0], -1),
            (["0"], [0], 3),  # what generated the first turn
        ]
        assert [(t.prompt_len, t.generated, t.cap) for s in (first, second) for t in s.turns] == [
            (2, 0, 98),
            (2, 2, 98),
        ]


async def test_one_that_never_generates_is_its_prompt():
    async def agent(trajectory: Trajectory) -> None:
        assert trajectory.weight_version == -1

    async with agents() as (buffer, run):
        found = await one(run, agent)
        assert (found.token_ids.size, found.loss_mask.size, found.logprobs.size) == (0, 0, 0)
        assert not buffer.of(Submit)
        assert not buffer.of(Cancel)


@pytest.mark.parametrize("tokenizer", [None, Letters()])
async def test_a_full_context_ends_turns_by_name_and_sends_none(tokenizer: object):
    async def agent(trajectory: Trajectory) -> None:
        assert (await trajectory.generate()).finish_reason == "length"
        assert trajectory.room == 2
        cut = await trajectory.generate(min_tokens=3)
        assert (cut.finish_reason, len(cut.token_ids)) == ("context", 2)
        empty = await trajectory.generate()
        assert (empty.finish_reason, len(empty.token_ids), empty.start) == ("context", 0, 7)
        assert empty.text == (None if tokenizer is None else "")
        before = trajectory.context.tolist(), trajectory.loss_mask.tolist()
        with pytest.raises(NoRoom, match=r"^tokens = '1 tokens': max_context = 7 has room for 0"):
            trajectory.append([5])
        assert (trajectory.context.tolist(), trajectory.loss_mask.tolist()) == before
        assert (await trajectory.generate()).start == 7

    async with agents(tokenizer=tokenizer, max_context=7) as (buffer, run):
        found = await one(run, agent)
        assert len(found.turns) == 4
        assert [submit.sampling.max_tokens for submit in buffer.of(Submit)] == [3, 2]
        assert buffer.of(Submit)[1].sampling.min_tokens == 2
        (cancel,) = await buffer.until(Cancel)
        assert cancel.prompt_ids == buffer.of(Submit)[1].prompt_ids  # the last turn that the buffer had


async def test_a_turn_that_stops_where_it_would_be_cut_has_stopped():
    def stops(message: Message) -> list[Any]:
        return list(turns(message, finish_reasons=["stop"])) if isinstance(message, Submit) else []

    async def agent(trajectory: Trajectory) -> None:
        assert (await trajectory.generate(max_tokens=9)).finish_reason == "stop"

    async with agents(stops, max_context=7) as (_, run):
        assert (await one(run, agent)).room == 2 - 2


async def test_text_is_added_without_special_tokens_and_needs_a_tokenizer():
    async def agent(trajectory: Trajectory) -> None:
        trajectory.append("hi")

    async with agents(tokenizer=Letters()) as (_, run):
        assert (await one(run, agent)).token_ids.tolist() == [104, 105]
    async with agents() as (_, run):
        assert "tokens = 'hi': give the client a tokenizer" in str(await one(run, agent))


async def test_one_thing_is_under_way_at_a_time():
    async def agent(trajectory: Trajectory) -> None:
        async def early(call_id: str) -> int:
            for each in (trajectory.generate(), trajectory.once(early)):
                with pytest.raises(InvalidField, match="await the turn or call before this one"):
                    await each
            with pytest.raises(InvalidField, match=r"^append = "):
                trajectory.append([1])
            return 0

        turn = asyncio.create_task(trajectory.generate())
        await asyncio.sleep(0)
        await early("")
        await turn
        assert await trajectory.once(early) == 0
        trajectory.append([4])

    async with agents() as (_, run):
        assert (await one(run, agent)).token_ids.tolist() == [100, 101, 102, 4]


async def test_parameters_of_a_turn_are_checked_before_it_is_sent():
    async def agent(trajectory: Trajectory) -> None:
        await trajectory.generate(top_p=2.0)

    async with agents() as (buffer, run):
        assert "sampling.top_p = 2.0" in str(await one(run, agent))
        assert not buffer.of(Submit)


# --- weights ---------------------------------------------------------------------------------------


async def test_all_trajectories_have_the_same_weights_or_fail_and_are_not_awaited():
    def drifting(message: Message) -> list[Any]:
        if not isinstance(message, Submit):
            return []
        return [
            structs.replace(done, weights_digest=f"w{submit_place}")
            for submit_place, done in zip(message.first_indices, turns(message), strict=True)
        ]

    async def agent(trajectory: Trajectory) -> None:
        await asyncio.sleep(0.01 * trajectory.index)
        await trajectory.generate()

    async with agents(drifting, n=2) as (buffer, run):
        ((first, second),) = [each.trajectories for each in await run(agent)]
        assert (first.weight_version, first.weights_digest) == (3, "w0")
        assert "has weights of version 3 (w1), and its rollout version 3 (w0)" in str(second)
        cancels = await buffer.until(Cancel, 2)
        assert sorted(name for each in cancels for name in each.prompt_ids) == ["0#0.0", "0#1.0"]


# --- ends ------------------------------------------------------------------------------------------


async def test_each_ends_once_and_a_failure_is_its_own():
    def refusing(message: Message) -> list[Any]:
        if isinstance(message, Submit) and "b#1.0" in message.prompt_ids:
            refused = Refused(
                code="refused", message="too long", rollout_id=message.rollout_id,
                prompt_ids=["b#1.0"], submission=message.submission,
            )  # fmt: skip
            return [refused, *(each for each in turns(message) if each.prompt_id != "b#1.0")]
        return generous(message)

    async def agent(trajectory: Trajectory) -> int:
        await trajectory.generate()
        if trajectory.prompt_id == "a" and trajectory.index == 0:
            raise ConnectionError("the sandbox is gone")
        if trajectory.prompt_id == "a" and trajectory.index == 2:
            raise asyncio.CancelledError  # as of an environment whose task was cancelled
        return trajectory.index

    prompts = [Prompt("a", token_ids=[1]), Prompt("b", token_ids=[2])]
    async with agents(refusing, n=3, prompts=prompts) as (_, run):
        a, b = await run(agent)
        assert [each.prompt_id for each in (a, b)] == ["a", "b"]
        assert [getattr(each, "result", str(each)) for each in a.trajectories] == [
            "trajectory 0 of prompt a: ConnectionError('the sandbox is gone')",
            1,
            "trajectory 2 of prompt a: CancelledError()",
        ]
        assert isinstance(a.trajectories[0].__cause__, ConnectionError)
        assert [getattr(each, "result", str(each)) for each in b.trajectories] == [
            0,
            "trajectory 1 of prompt b: too long",
            2,
        ]


async def test_a_turn_that_is_given_up_is_cancelled_and_can_be_asked_for_again():
    def reluctant(message: Message) -> list[Any]:
        return [] if len(buffer.of(Submit)) < 2 else generous(message)

    async def agent(trajectory: Trajectory) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await trajectory.generate()
        assert not trajectory.turns
        await trajectory.generate()

    async with agents(reluctant) as (buffer, run):
        assert (await one(run, agent)).token_ids.tolist() == [100, 101, 102]
        kinds = [type(each).__name__ for each in buffer.got if isinstance(each, Submit | Cancel)]
        assert kinds[:3] == ["Submit", "Cancel", "Submit"]
        assert {name for each in buffer.of(Submit) for name in each.prompt_ids} == {"0#0.0"}


async def test_the_error_of_a_cancelled_turn_is_the_buffers():
    def cancelling(message: Message) -> list[Any]:
        if not isinstance(message, Submit):
            return []
        return [
            Refused(
                code="cancelled", message="aborted by a weight update", rollout_id=message.rollout_id,
                prompt_ids=message.prompt_ids, submission=message.submission,
            )
        ]  # fmt: skip

    async def agent(trajectory: Trajectory) -> None:
        await trajectory.generate()

    async with agents(cancelling) as (_, run):
        failed = await one(run, agent)
        assert isinstance(failed, TrajectoryFailed)
        assert isinstance(failed.__cause__, RolloutCancelled)
        assert "aborted by a weight update" in str(failed)


async def test_trajectories_fail_by_name_when_the_client_is_closed_under_them():
    async with connected() as (buffer, client):
        buffer.script = generous
        generated = asyncio.Event()

        async def agent(trajectory: Trajectory) -> None:
            await trajectory.generate()
            generated.set()
            await asyncio.sleep(0.1)
            await trajectory.generate()

        async with client.trajectories([[1]], n=2, max_context=50, sampling=SAMPLING) as rollout:
            running = asyncio.create_task(anext(rollout.run(agent)))
            await generated.wait()
            await client.close()
            found = await running
        assert [type(each.__cause__) for each in found.trajectories] == [Unreachable] * 2


async def test_no_agent_runs_and_nothing_is_awaited_once_the_rollout_is_left():
    ended = []

    async def agent(trajectory: Trajectory) -> None:
        try:
            await trajectory.generate()
            await asyncio.sleep(100)
        finally:
            ended.append(trajectory.index)

    async with connected() as (buffer, client):
        buffer.script = generous
        async with client.trajectories([[1]], n=3, max_context=50, max_open=2, sampling=SAMPLING) as rollout:
            running = asyncio.create_task(anext(rollout.run(agent)))
            await buffer.until(Submit, 1)
            await asyncio.sleep(0.05)
        assert sorted(ended) == [0, 1]
        with pytest.raises(asyncio.CancelledError):
            await running
        assert not client._active
        assert client.trajectories([[1]], max_context=9, rollout_id=rollout._rollout.id)  # its id is free
        while sum(len(each.prompt_ids) for each in buffer.of(Cancel)) < 2:
            await asyncio.sleep(0.005)
        assert rollout.run_id
        with pytest.raises(InvalidField, match="has run: open another"):
            await anext(rollout.run(agent))


async def test_at_most_max_open_are_under_way():
    under_way, most = 0, 0

    async def agent(trajectory: Trajectory) -> None:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await trajectory.generate()
        under_way -= 1

    async with agents(n=5, max_open=2) as (_, run):
        await run(agent)
        assert most == 2


# --- what is asked for once --------------------------------------------------------------------------


async def test_what_an_environment_says_is_asked_for_once(tmp_path):
    calls: list[str] = []

    async def agent(trajectory: Trajectory) -> tuple[bool, object]:
        await trajectory.generate()
        known = trajectory.replaying

        async def environment(call_id: str) -> object:
            calls.append(call_id)
            return {"said": (5, 6)}

        said = await trajectory.once(environment)
        trajectory.append(said["said"])  # type: ignore[index]
        assert await trajectory.once(environment) == said
        return known, said

    async with agents(journal=tmp_path / "journal") as (_, run):
        first = await one(run, agent)
        assert first.result == (False, {"said": [5, 6]})  # as the file gives it back
        assert [call.rpartition("/")[2] for call in calls] == ["0", "1"]
        assert len({call.rpartition("/")[0] for call in calls}) == 1
        again = await one(run, agent)
        assert again.result == (True, {"said": [5, 6]})
        assert len(calls) == 2
        assert again.token_ids.tolist() == first.token_ids.tolist()


async def test_an_answer_to_another_context_is_not_used(tmp_path):
    async def says(call_id: str) -> str:
        return call_id

    def agent(extra: int) -> Callable[[Trajectory], Any]:
        async def run(trajectory: Trajectory) -> str:
            trajectory.append([extra])
            return await trajectory.once(says)

        return run

    async with agents(journal=tmp_path / "journal") as (_, run):
        await one(run, agent(5))
        assert "cannot be used again: the context is not what it was" in str(await one(run, agent(6)))
        assert (await one(run, agent(5))).result.endswith("/0/0/0")


async def test_a_call_that_failed_is_made_again_under_its_id(tmp_path):
    calls: list[str] = []

    async def fragile(call_id: str) -> int:
        calls.append(call_id)
        if len(calls) == 1:
            raise ConnectionError
        return 3

    async def agent(trajectory: Trajectory) -> int:
        with pytest.raises(ConnectionError):
            await trajectory.once(fragile)
        return await trajectory.once(fragile)

    async with agents(journal=tmp_path / "journal") as (_, run):
        assert (await one(run, agent)).result == 3
        assert len(set(calls)) == 1
