"""The client over time: silence, deadlines, a buffer that is restarted, and answers that come late."""

import asyncio
import time

import pytest
from fake_buffer import ENDPOINT, answering, connect, connected, group, progress
from msgspec import structs
from virtual_time import VIRTUAL

from seer.client import BufferLost, DeadlineExceeded, RolloutFailed, WeightsRefused, prompts
from seer.client.rollout import submissions
from seer.common import wire
from seer.common.errors import InvalidField, Unreachable
from seer.common.net.identity import CHECK_SECONDS

pytestmark = VIRTUAL


async def restart(buffer):
    """Have the buffer know nothing of its client any more, and the client learn it."""
    buffer.hub.dismiss(buffer.address)
    await asyncio.sleep(CHECK_SECONDS + 1)


async def test_submitting_more_makes_no_silent_buffer_heard():
    async with connected(silence_seconds=60) as (_, client):
        first = await client.submit([[1]])
        for _ in range(4):
            await asyncio.sleep(20)
            await client.submit([[2]])
        assert isinstance(first.failure, BufferLost)


async def test_time_in_which_the_trainers_own_loop_stood_still_is_not_the_buffers_silence():
    async with connected(silence_seconds=60) as (buffer, client):
        rollout = await client.submit([[1]], n=1)
        (submitted,) = await buffer.until(wire.Submit)
        asyncio.get_running_loop()._now += 600
        await asyncio.sleep(1)
        await buffer.say(group(submitted, "0"))
        assert await rollout.result()


async def test_a_silent_buffer_is_asked_and_given_up_by_name_and_told_so_when_it_speaks_again():
    async with connected(silence_seconds=60) as (buffer, client):
        rollout = await client.submit([[1], [2]], n=2)
        with pytest.raises(BufferLost, match=ENDPOINT) as info:
            await rollout.result()
        assert info.value.prompt_ids == ("0", "1")
        assert isinstance(info.value, Unreachable)
        assert isinstance(info.value, RolloutFailed)
        assert buffer.of(wire.StatusRequest)
        await buffer.say(progress(rollout.id, rollout.submission))
        (cancel,) = await buffer.until(wire.Cancel)
        assert (cancel.rollout_id, cancel.submission) == (rollout.id, rollout.submission)


async def test_a_group_is_acknowledged_when_it_arrives_and_before_leaving():
    async with connected() as (buffer, client):
        await client.submit([[1]], n=1)
        (submitted,) = await buffer.until(wire.Submit)
        await asyncio.sleep(1)
        await buffer.say(group(submitted, "0"))
        await asyncio.sleep(0.01)
        assert buffer.of(wire.Acknowledge)
        client._active._acknowledge["r", 1] = ["left"]
    assert [type(message) for message in buffer.got[-2:]] == [wire.Acknowledge, wire.Goodbye]
    assert buffer.got[-2].prompt_ids == ["left"]


async def test_what_is_finished_is_not_cancelled_nor_what_is_left_of_a_rollout():
    async with connected() as (buffer, client):
        rollout = await client.submit([[1], [2]], n=1)
        await rollout.cancel(["0"])
        await buffer.say(progress(rollout.id, rollout.submission))
        await asyncio.sleep(1)
        await rollout.cancel()
        await buffer.say(structs.replace(progress(rollout.id, rollout.submission), finished=2))
        await asyncio.sleep(1)
        assert [cancel.prompt_ids for cancel in buffer.of(wire.Cancel)] == [["0"], []]


async def test_a_group_whose_prompt_was_given_up_is_no_result_and_progress_of_another_use_none():
    async with connected() as (buffer, client):
        rollout = await client.submit([[1], [2]], n=1)
        (submitted,) = await buffer.until(wire.Submit)
        await rollout.cancel(["0"])
        await buffer.say(progress(rollout.id, rollout.submission + 1))
        for prompt_id in ("0", "1"):
            await buffer.say(group(submitted, prompt_id))
        await asyncio.sleep(1)
        assert [done.prompt_id for done in rollout.groups] == ["1"]
        assert rollout.progress is None


async def test_a_deadline_cancels_the_rest_of_its_own_rollout_and_no_later_one_of_its_id():
    async with connected() as (buffer, client):
        buffer.script = answering()
        await (await client.submit([[1]], n=1, rollout_id="r", deadline_seconds=9)).result()
        buffer.script = lambda message: []
        later = await client.submit([[1]], n=1, rollout_id="r")
        with pytest.raises(InvalidField, match="under way"):
            await client.submit([[1]], rollout_id="r")
        soon = await client.submit([[1], [2]], n=1, deadline_seconds=1)
        *_, submitted = await buffer.until(wire.Submit, 3)
        await buffer.say(group(submitted, "0"))
        await asyncio.sleep(1.1)
        with pytest.raises(DeadlineExceeded) as info:
            await soon.result()
        assert info.value.prompt_ids == ("1",)
        assert [each.prompt_id for each in soon.groups] == ["0"]
        (cancel,) = buffer.of(wire.Cancel)
        assert cancel.rollout_id == soon.id
        await asyncio.sleep(9)
        assert later.unfinished == ["0"]


async def test_the_default_number_is_above_all_and_uses_of_later_incarnations_are_later():
    async with connected() as (buffer, client):
        numbers = [(await client.submit([[1]], rollout_number=number)) for number in (40, 5, None)]
        assert [rollout.rollout_number for rollout in numbers] == [40, 5, 41]
        time.sleep(0.002)
        async with connect(buffer) as other:
            assert (await other.submit([[1]])).submission > max(rollout.submission for rollout in numbers)


async def test_all_questions_are_asked_again_of_a_restarted_buffer():
    async with connected() as (buffer, client):
        asking = [
            asyncio.create_task(question) for question in (client.update_weights(3, "/new"), client.sleep())
        ]
        await asyncio.sleep(1)
        await restart(buffer)
        assert [len(buffer.of(kind)) for kind in (wire.UpdateWeights, wire.Sleep)] == [2, 2]
        for task in asking:
            task.cancel()
    async with connected() as (buffer, client):
        task = asyncio.create_task(client.status(60))
        await asyncio.sleep(1)
        await restart(buffer)
        assert len(buffer.of(wire.StatusRequest)) == 2
        task.cancel()


async def test_a_question_of_status_fails_as_soon_as_the_client_is_closed():
    async with connected() as (buffer, client):
        task = asyncio.create_task(client.status(3600))
        await buffer.until(wire.StatusRequest)
        await client.close()
        async with asyncio.timeout(10):
            with pytest.raises(Unreachable, match=f"{client.endpoint}: the client was closed"):
                await task


async def test_a_buffer_restarted_while_prompts_are_sent_again_is_sent_them_once_more():
    async with connected() as (buffer, client):
        await client.submit([[1]], n=1)
        await buffer.until(wire.Submit)
        send = client._channel.send

        async def slowly(message):
            if isinstance(message, wire.Submit):
                await asyncio.sleep(10)
            await send(message)

        client._channel.send = slowly
        await restart(buffer)
        await restart(buffer)
        client._channel.send = send
        await asyncio.sleep(30)
        assert len(buffer.of(wire.Submit)) == 3


async def test_a_late_answer_to_another_question_of_sleep_is_not_taken():
    async with connected() as (buffer, client):
        with pytest.raises(Unreachable):
            await client.sleep(timeout_seconds=5)
        (first,) = buffer.of(wire.Sleep)
        for asleep, late in ((True, first.call_id), (False, 0)):
            task = asyncio.create_task(client.sleep(60) if asleep else client.wake(60))
            await asyncio.sleep(1)
            await buffer.say(wire.Slept(asleep=True, call_id=late))
            await asyncio.sleep(1)
            assert not task.done()
            await buffer.say(wire.Slept(asleep=asleep, call_id=buffer.of(wire.Sleep)[-1].call_id))
            await task


async def test_what_ends_the_connection_ends_rollouts_updates_and_sleep_with_its_reason():
    async with connected() as (buffer, client):
        rollout = await client.submit([[1]], n=1)
        asking = [asyncio.create_task(client.update_weights(3, "/new")), asyncio.create_task(client.sleep())]
        await asyncio.sleep(1)
        await buffer.say(wire.Refused(code="protocol", message="speaks protocol 9.0"))
        for task in asking:
            with pytest.raises(Unreachable, match="speaks protocol"):
                await task
        with pytest.raises(BufferLost, match="speaks protocol"):
            await rollout.result()
        with pytest.raises(Unreachable):
            await client.submit([[1]])


async def test_submissions_ask_for_the_weights_of_the_last_update_that_succeeded():
    async with connected() as (buffer, client):
        for version, answer in (
            (3, wire.WeightsLive(version=3, digest="d")),
            (4, wire.WeightsFailed(version=4, reasons={})),
        ):
            buffer.script = lambda said, answer=answer: (
                [structs.replace(answer, call_id=said.call_id)]
                if isinstance(said, wire.UpdateWeights)
                else []
            )
            if version == 3:
                await client.update_weights(version, "/new")
            else:
                with pytest.raises(WeightsRefused):
                    await client.update_weights(version, "/new")
            await client.submit([[1]])
        assert [submit.weight_version for submit in await buffer.until(wire.Submit, 2)] == [3, 3]


async def test_what_fails_while_it_is_sent_is_not_sent(monkeypatch):
    monkeypatch.setattr(prompts, "BATCH_PROMPTS", 1)
    async with connected() as (_, client):
        rollout = await client.submit([[1], [2], [3]], n=1)
        sent = submissions(rollout)
        assert next(sent).prompt_ids == ["0"]
        await rollout.cancel(["1"])
        assert [submit.prompt_ids for submit in sent] == [["2"]]


async def test_single_prompts_whose_cancel_was_lost_are_cancelled_once_nobody_waits_for_the_rest():
    async with connected() as (buffer, client):
        rollout = await client.submit([[1], [2]], n=1)
        (submitted,) = await buffer.until(wire.Submit)
        await rollout.cancel(["1"])
        await buffer.until(wire.Cancel)  # and loses it
        await buffer.say(group(submitted, "0"))
        await asyncio.sleep(1)
        await buffer.say(progress(rollout.id, rollout.submission))
        _, cancel = await buffer.until(wire.Cancel, 2)
        assert (cancel.prompt_ids, cancel.submission) == ([], rollout.submission)
