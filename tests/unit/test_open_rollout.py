"""Rollouts that take prompts as they come, against a scripted buffer."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from fake_buffer import FakeBuffer, connected, group
from msgspec import structs

from seer.client import (
    InvalidField,
    Prompt,
    RolloutCancelled,
    RolloutFailed,
    SamplingParams,
    Unreachable,
    prompts,
)
from seer.client.open_rollout import MAX_STREAMED, PromptInFlight
from seer.common import ids
from seer.common.types import TurnSpec
from seer.common.wire import Acknowledge, Cancel, GroupDone, Refused, StreamedPart, Submit, TokensGenerated


def digest(submit: Submit, prompt_id: str) -> int:
    at = submit.prompt_ids.index(prompt_id)
    place = submit.groups[at], submit.first_indices[at]
    return ids.params_digest(submit.seed, submit.rollout_number, submit.n, submit.sampling, *place)


def done(submit: Submit, prompt_id: str) -> GroupDone:
    return structs.replace(
        group(submit, prompt_id), submission=submit.submission, params_digest=digest(submit, prompt_id)
    )


def piece(submit: Submit, prompt_id: str, index: int, start: int, count: int) -> TokensGenerated:
    """As `group` makes the response's tokens."""
    return TokensGenerated(
        parts=[StreamedPart(submit.rollout_id, prompt_id, index, start, count, submit.submission)],
        tokens=np.arange(1000 * index + start, 1000 * index + start + count, dtype=np.int32),
        logprobs=-np.ones(count, np.float32), weight_version=3,
    )  # fmt: skip


async def streamed(prompt: PromptInFlight) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    async for delta in prompt.tokens():
        found.setdefault(delta.index, []).extend(delta.token_ids.tolist())
    return found


async def finish_all(buffer: FakeBuffer) -> None:
    for submit in buffer.of(Submit):
        for prompt_id in submit.prompt_ids:
            await buffer.say(done(submit, prompt_id))


async def test_prompts_that_come_together_are_sent_together_by_what_they_ask_for():
    async with connected() as (buffer, client):
        rollout = client.open_rollout()
        short, long = SamplingParams(max_tokens=5), SamplingParams(max_tokens=9)
        prompts = [
            rollout.submit([1, 2], n=2, sampling=short, group="g", first_index=1),
            rollout.submit([3], n=2, sampling=SamplingParams(max_tokens=5)),
            rollout.submit(Prompt("mine", token_ids=[4]), n=3, sampling=long, seed=7, rollout_number=4),
        ]
        first, second = await buffer.until(Submit, 2)
        assert (first.prompt_ids, first.lengths, first.tokens.tolist()) == (["0", "1"], [2, 1], [1, 2, 3])
        assert (first.groups, first.first_indices, first.n, first.open) == (["g", ""], [1, 0], 2, True)
        assert (second.prompt_ids, second.n, second.seed, second.rollout_number) == (["mine"], 3, 7, 4)
        assert second.submission > first.submission > 0
        await finish_all(buffer)
        groups = [await prompt.result() for prompt in prompts]
        assert [len(each.responses) for each in groups] == [2, 2, 3]
        assert sum(len(each.prompt_ids) for each in await buffer.until(Acknowledge)) > 0
        assert (rollout.counts.submitted, rollout.counts.finished, rollout.unfinished) == (3, 3, [])


async def test_it_lasts_until_it_is_closed():
    async with connected() as (buffer, client):
        rollout = client.open_rollout("r")
        for number in range(3):
            prompt = rollout.submit([1])
            await buffer.until(Submit, number + 1)
            await buffer.say(done(buffer.of(Submit)[-1], str(number)))
            await prompt.result()
        with pytest.raises(InvalidField, match="rollout_id"):
            client.open_rollout("r")
        last = rollout.submit([1])
        rollout.close()
        with pytest.raises(InvalidField, match="closed"):
            rollout.submit([1])
        await buffer.until(Submit, 4)
        await buffer.say(done(buffer.of(Submit)[-1], "3"))
        await last.result()
        assert rollout.ended
        client.open_rollout("r")


async def test_an_id_that_was_given_up_before_it_was_sent_may_be_used_again():
    async with connected() as (buffer, client):
        rollout = client.open_rollout()
        for _ in range(2):
            await rollout.submit(Prompt("a", token_ids=[1])).cancel()
        asked = rollout.submit(Prompt("a", token_ids=[2]))
        (submit,) = await buffer.until(Submit)
        assert (submit.prompt_ids, submit.tokens.tolist()) == (["a"], [2])
        await finish_all(buffer)
        assert (await asked.result()).prompt_id == "a"


async def test_a_prompt_fails_alone():
    async with connected() as (buffer, client):
        rollout = client.open_rollout()
        good, wrong, given_up = (rollout.submit([token]) for token in (1, 2, 3))
        (submit,) = await buffer.until(Submit)
        await given_up.cancel()
        (cancel,) = await buffer.until(Cancel)
        assert (cancel.prompt_ids, cancel.submission) == (["2"], submit.submission)
        await buffer.say(structs.replace(done(submit, "1"), params_digest=digest(submit, "1") ^ 1))
        await buffer.say(done(submit, "0"))
        with pytest.raises(RolloutCancelled, match="cancelled"):
            await given_up.result()
        with pytest.raises(RolloutFailed, match="generated for another seed"):
            await wrong.result()
        assert (await good.result()).prompt_id == "0"
        assert (rollout.counts.finished, rollout.counts.failed) == (1, 2)


async def test_a_prompt_id_can_be_used_again_and_late_answers_to_its_earlier_use_change_nothing():
    async with connected() as (buffer, client):
        rollout = client.open_rollout()
        same = {"n": 1, "stream": True}
        first = rollout.submit(Prompt("a", token_ids=[1]), **same)
        (earlier,) = await buffer.until(Submit)
        await first.cancel()
        second = rollout.submit(Prompt("a", token_ids=[2]), **same)
        later = (await buffer.until(Submit, 2))[1]
        assert later.submission > earlier.submission
        refusal = {"rollout_id": rollout.id, "prompt_ids": ["a"], "submission": earlier.submission}
        await buffer.say(Refused(code="cancelled", message="cancelled by its trainer", **refusal))
        await buffer.say(piece(earlier, "a", 0, 0, 1))
        stale = structs.replace(done(earlier, "a"), tokens=np.array([77], np.int32))
        await buffer.say(stale)
        await buffer.say(done(later, "a"))
        assert (await second.result()).responses[0].token_ids.tolist() == [0]
        with pytest.raises(RolloutCancelled):
            await first.result()
        assert (rollout.counts.finished, rollout.counts.failed) == (1, 1)


async def test_what_is_cancelled_while_others_are_sent_is_not_sent_any_more(monkeypatch):
    monkeypatch.setattr(prompts, "BATCH_PROMPTS", 1)
    async with connected() as (_, client):
        rollout = client.open_rollout()
        given_up = [rollout.submit([token]) for token in (1, 2, 3)][1]
        sending = rollout.to_submit()
        assert next(sending).prompt_ids == ["0"]
        await given_up.cancel()
        assert [submit.prompt_ids for submit in sending] == [["2"]]


async def test_a_rollout_that_is_closed_when_idle_leaves_nothing_behind():
    async with connected() as (_, client):
        for _ in range(3):
            rollout = client.open_rollout("r")
            rollout.close()
        assert not list(client._active)
    rollout.close()  # its client is closed, too


async def test_turns_and_other_prompts_are_not_sent_together():
    async with connected() as (buffer, client):
        rollout = client.open_rollout()
        rollout.submit([1])
        rollout.submit([1], group="g", n=1, turn=TurnSpec(1))
        single, turn = await buffer.until(Submit, 2)
        assert (single.prompt_ids, single.turns) == (["0"], [])
        assert (turn.prompt_ids, turn.turns) == (["1"], [TurnSpec(1)])


async def test_ends_of_trajectories_are_told_before_a_rollout_is_over():
    async with connected() as (buffer, client):
        rollout = client.open_rollout("r")
        rollout.end_trajectory("turn")
        rollout.close()
        assert not rollout.ended
        (cancel,) = await buffer.until(Cancel)
        assert (cancel.rollout_id, cancel.prompt_ids) == ("r", ["turn"])
        assert rollout.ended


async def test_a_rollout_that_was_left_has_told_all_ends_and_frees_its_id():
    async with connected() as (buffer, client):
        rollout = client.open_rollout("r")
        rollout.end_trajectory("turn")
        await rollout.leave()
        client.open_rollout("r")
        (cancel,) = await buffer.until(Cancel)
        assert cancel.prompt_ids == ["turn"]


async def test_what_was_streamed_is_never_followed_by_tokens_of_other_weights():
    async with connected() as (buffer, client):
        rollout = client.open_rollout()
        prompt, whole = rollout.submit([1], stream=True), rollout.submit([2])
        submits = await buffer.until(Submit, 2)
        await buffer.say(piece(submits[0], "0", 0, 0, 2))
        assert (await anext(prompt.tokens())).token_ids.tolist() == [0, 1]
        await buffer.stop()
        await buffer.start()
        again = (await buffer.until(Submit, 4))[2:]
        assert [(submit.prompt_ids, submit.weight_version) for submit in again] == [(["0"], 3), (["1"], -1)]
        await buffer.say(structs.replace(piece(again[0], "0", 0, 0, 4), weight_version=4))
        await buffer.say(structs.replace(done(again[0], "0"), weight_version=4))
        await buffer.say(structs.replace(done(again[1], "1"), weight_version=4))
        assert (await whole.result()).weight_version == 4
        with pytest.raises(RolloutFailed, match="weight version 4, not 3"):
            await streamed(prompt)


async def test_a_prompt_asks_for_the_weights_it_was_given():
    async with connected() as (buffer, client):
        rollout = client.open_rollout()
        pinned, free = rollout.submit([1], weight_version=4), rollout.submit([2])
        await buffer.until(Submit, 2)
        assert [submit.weight_version for submit in buffer.of(Submit)] == [4, -1]
        await finish_all(buffer)  # by version 3
        with pytest.raises(RolloutFailed, match="weight version 3, not 4"):
            await pinned.result()
        assert (await free.result()).weight_version == 3


async def test_a_restarted_buffer_gets_what_is_unfinished_again():
    async with connected() as (buffer, client):
        rollout = client.open_rollout()
        ended, left = rollout.submit([1]), rollout.submit([2])
        (submit,) = await buffer.until(Submit)
        await buffer.say(done(submit, "0"))
        await ended.result()
        await buffer.stop()
        await buffer.start()
        again = (await buffer.until(Submit, 2))[1]
        assert (again.prompt_ids, again.open) == (["1"], True)
        assert again.submission > submit.submission
        (cancel,) = await buffer.until(Cancel)  # what it may have, and nobody waits for
        assert (cancel.prompt_ids, cancel.submission) == ([], submit.submission)
        await buffer.say(done(again, "1"))
        await left.result()


async def test_tokens_are_streamed_once_and_in_order_whatever_is_lost_or_repeated():
    async with connected() as (buffer, client):
        rollout = client.open_rollout()
        prompt = rollout.submit([1], n=3, stream=True)
        (submit,) = await buffer.until(Submit)
        assert submit.stream
        ended = structs.replace(
            done(submit, "0"), lengths=[4, 6, 2], finish_reasons=["length"] * 3, stop_reasons=[""] * 3,
            tokens=np.array([*range(4), *range(1000, 1006), 2000, 2001], np.int32),
            logprobs=-np.ones(12, np.float32),
        )  # fmt: skip
        for index, start, count in [(0, 0, 2), (0, 0, 2), (0, 1, 2), (1, 3, 2), (1, 0, 1), (7, 0, 1)]:
            await buffer.say(piece(submit, "0", index, start, count))
        reading = asyncio.create_task(streamed(prompt))
        await buffer.say(piece(submit, "gone", 0, 0, 1))
        assert not prompt.ended
        await buffer.say(ended)
        assert await reading == {0: [0, 1, 2, 3], 1: [*range(1000, 1006)], 2: [2000, 2001]}
        assert prompt.ended
        assert (await prompt.result()).responses[1].token_ids.tolist() == [*range(1000, 1006)]


async def test_one_message_has_the_tokens_of_many_responses_and_one_that_does_not_add_up_is_left_out():
    async with connected() as (buffer, client):
        rollout = client.open_rollout()
        first, second = rollout.submit([1], n=2, stream=True), rollout.submit([1], stream=True)
        submits = await buffer.until(Submit, 2)
        parts = [
            StreamedPart(rollout.id, name, index, 0, count, submits[-1].submission)
            for name, index, count in [("0", 1, 2), ("gone", 0, 3), ("1", 0, 1), ("0", 0, 1)]
        ]
        told = TokensGenerated(
            parts=parts,
            tokens=np.arange(7, dtype=np.int32),
            logprobs=-np.ones(7, np.float32),
            weight_version=3,
        )
        await buffer.say(structs.replace(told, parts=parts[:3]))
        await buffer.say(structs.replace(told, logprobs=told.logprobs[:6]))
        await buffer.say(structs.replace(told, beside=np.zeros(1, np.uint8)))
        await buffer.say(told)
        deltas = [await anext(aiter(each.tokens())) for each in (first, second)]
        assert [(each.index, each.token_ids.tolist()) for each in deltas] == [(1, [0, 1]), (0, [5])]
        assert first._lengths == [1, 2]
        assert second._lengths == [1]


async def test_a_stream_that_nobody_reads_is_bounded_and_loses_nothing():
    async with connected() as (buffer, client):
        prompt = client.open_rollout().submit([1], stream=True)
        (submit,) = await buffer.until(Submit)
        count = MAX_STREAMED + 100
        for start in range(count):
            await buffer.say(piece(submit, "0", 0, start, 1))
        tokens, logprobs = np.arange(count, dtype=np.int32), -np.ones(count, np.float32)
        await buffer.say(
            structs.replace(done(submit, "0"), lengths=[count], tokens=tokens, logprobs=logprobs)
        )
        await prompt.result()
        assert len(prompt._deltas) == MAX_STREAMED
        assert await streamed(prompt) == {0: [*range(count)]}


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("n", {"n": 0}),
        ("first_index", {"first_index": 4096}),
        ("first_index", {"first_index": -1}),
        ("group", {"group": "g" * 500}),
        ("session", {"group": "g", "session": "s" * 513}),
        ("session", {"group": "g", "session": "\ud800"}),
        ("session", {"group": "g", "session": "s", "turn": TurnSpec(1)}),
        ("sampling.temperature", {"sampling": SamplingParams(temperature=-1.0)}),
    ],
)
async def test_bad_input_names_the_field_and_affects_nothing_else(field, given):
    async with connected() as (buffer, client):
        rollout = client.open_rollout()
        with pytest.raises(InvalidField, match=field):
            rollout.submit([1], **given)
        prompt = rollout.submit([2])
        (submit,) = await buffer.until(Submit)
        assert submit.tokens.tolist() == [2]
        await buffer.say(done(submit, submit.prompt_ids[0]))
        await prompt.result()


async def test_a_closed_client_takes_nothing_and_ends_everything():
    async with connected() as (_, client):
        rollout = client.open_rollout()
        prompt = rollout.submit([1])
    with pytest.raises(RolloutCancelled):
        await prompt.result()
    with pytest.raises(Unreachable, match="closed"):
        rollout.submit([1])
    rollout.end_trajectory("turn")
    assert rollout.counts.submitted == 1
