"""The client against a scripted buffer: the invariants of seer.client.client and .rollout."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
from fake_buffer import FakeBuffer, answering, connect, group, progress
from memory_transport import MemoryNetwork, MemoryTransport
from msgspec import structs

from seer.client import (
    DeadlineExceeded,
    Prompt,
    RequestRefused,
    RolloutCancelled,
    RolloutFailed,
    SamplingParams,
    Unreachable,
)
from seer.client import prompts as prompts_module
from seer.client.active_rollouts import ActiveRollouts
from seer.common.net import channel as channel_module
from seer.common.wire import (
    MAX_PROMPTS,
    Accepted,
    Acknowledge,
    BufferToTrainer,
    Cancel,
    Message,
    Refused,
    Status,
    StatusRequest,
    Submit,
)


@pytest.fixture
async def buffer() -> AsyncIterator[FakeBuffer]:
    fake = FakeBuffer(MemoryTransport(MemoryNetwork()))
    await fake.start()
    yield fake
    await fake.stop()


async def test_groups_come_as_they_finish_and_in_input_order(buffer: FakeBuffer) -> None:
    buffer.script = answering()
    async with connect(buffer) as client:
        rollout = await client.submit(
            [Prompt("a", token_ids=[1, 2], metadata={"answer": 42}), Prompt("b", token_ids=np.array([3]))],
            n=3,
        )
        assert [g.prompt_id async for g in rollout] == ["b", "a"]
        assert [g.prompt_id async for g in rollout.in_order()] == ["a", "b"]
        first = (await rollout.result())[0]
    assert first.metadata == {"answer": 42}
    assert first.prompt_token_ids.tolist() == [1, 2]
    assert (first.weight_version, first.chunks) == (3, 2)
    assert [r.token_ids.tolist() for r in first.responses] == [[0], [1000, 1001], [2000, 2001, 2002]]
    assert [r.index for r in first.responses] == [0, 1, 2]
    assert first.responses[2].logprobs.dtype == np.float32
    assert first.responses[0].text is None


async def test_what_is_submitted(buffer: FakeBuffer) -> None:
    buffer.script = answering()
    async with connect(buffer) as client:
        sampling = SamplingParams(max_tokens=7)
        for number, expected in ((None, 0), (None, 1), (40, 40), (None, 41)):
            rollout = await client.submit(
                [[5, 6], [7]], n=2, seed=9, sampling=sampling, rollout_number=number
            )
            await rollout.result()
            sent = buffer.of(Submit)[-1]
            assert (sent.rollout_number, sent.seed, sent.n, sent.sampling) == (expected, 9, 2, sampling)
            assert rollout.rollout_number == expected
    assert (sent.prompt_ids, sent.lengths, sent.tokens.tolist()) == (["0", "1"], [2, 1], [5, 6, 7])


async def test_every_group_is_acknowledged_and_taken_once(buffer: FakeBuffer) -> None:
    def twice(message: Message) -> list[BufferToTrainer]:
        if not isinstance(message, Submit):
            return []
        return [group(message, "0"), group(message, "0", (9, 9)), group(message, "1")]

    buffer.script = twice
    async with connect(buffer) as client:
        rollout = await client.submit([[1], [2]], n=2)
        assert [g.prompt_id async for g in rollout] == ["0", "1"]
        assert [len(r.token_ids) for r in rollout.groups[0].responses] == [1, 2]
    acknowledged = [prompt for message in buffer.of(Acknowledge) for prompt in message.prompt_ids]
    assert sorted(acknowledged) == ["0", "0", "1"]


async def test_large_rollouts_are_sent_in_bounded_messages(
    buffer: FakeBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts_module, "BATCH_TOKENS", 10)
    monkeypatch.setattr(prompts_module, "BATCH_PROMPTS", 3)
    buffer.script = answering()
    async with connect(buffer) as client:
        prompts = [[1] * length for length in (4, 6, 1, 1, 1, 1, 25, 2)]
        rollout = await client.submit(prompts, n=1)
        groups = await rollout.result()
    assert [m.lengths for m in buffer.of(Submit)] == [[4, 6], [1, 1, 1], [1], [25], [2]]
    assert [g.prompt_token_ids.size for g in groups] == [4, 6, 1, 1, 1, 1, 25, 2]


async def test_finished_groups_first_then_one_error_that_names_the_rest(buffer: FakeBuffer) -> None:
    def script(message: Message) -> list[BufferToTrainer]:
        if not isinstance(message, Submit):
            return []
        where = {"rollout_id": message.rollout_id, "submission": message.submission}
        return [
            Refused(code="refused", message="too long", prompt_ids=["1"], **where),
            Refused(code="failed", message="engine broke", prompt_ids=["2"], **where),
            group(message, "0"),
        ]

    buffer.script = script
    async with connect(buffer) as client:
        rollout = await client.submit([[1], [2], [3]], n=2)
        seen = []
        with pytest.raises(
            RolloutFailed, match=r"2 of 3 prompts: too long \(prompts 1\); engine broke"
        ) as info:
            async for finished in rollout:
                seen.append(finished.prompt_id)  # noqa: PERF401 - must survive the error
        assert seen == ["0"]
        assert info.value.prompt_ids == ("1", "2")
        with pytest.raises(RolloutFailed):
            await rollout.result()
        assert [g.prompt_id for g in rollout.groups] == ["0"]


@pytest.mark.parametrize(
    ("code", "cls"),
    [
        ("refused", RequestRefused),
        ("failed", RolloutFailed),
        ("invalid_field", RequestRefused),
        ("engine", RolloutFailed),
        ("of the future", RolloutFailed),
    ],
)
async def test_refusals_are_typed(buffer: FakeBuffer, code: str, cls: type[Exception]) -> None:
    def script(message: Message) -> list[BufferToTrainer]:
        if not isinstance(message, Submit):
            return []
        of = message.submission
        return [Refused(code=code, message="no", rollout_id=message.rollout_id, submission=of)]

    buffer.script = script
    async with connect(buffer) as client:
        rollout = await client.submit([[1], [2]])
        with pytest.raises(cls) as info:
            await rollout.result()
    assert type(info.value) is cls
    assert info.value.prompt_ids == ("0", "1")


THREE_BYTES, UNASKED = np.zeros(3, np.uint8), np.zeros(8, np.uint8)


@pytest.mark.parametrize(
    ("lengths", "wrong", "told"),
    [
        ((1, 0), {}, "response 1 is empty"),
        ((1, 1, 1), {}, "where 2 were asked"),
        (None, {"params_digest": 77}, "generated"),
        (None, {"weight_version": 4}, "generated"),
        (None, {"beside_sizes": [{}, {"x |u1 2": 3}]}, "0 bytes beside the tokens where 3 are announced"),
        (None, {"beside": THREE_BYTES}, "3 bytes beside the tokens where 0"),
        (None, {"beside": THREE_BYTES, "beside_sizes": [{}, {"routed_experts |u1 2": 3}]}, "cannot be read"),
        (None, {"beside": THREE_BYTES, "beside_sizes": [{}, {"routed_experts |O8 1": 3}]}, "cannot be read"),
        (
            None,
            {"beside": UNASKED, "beside_sizes": [{"prompt_logprobs <f4 2 1": 8}, {}]},
            r"\(1, 2, 1\), not None",
        ),
    ],
)
async def test_a_malformed_group_or_one_made_for_something_else_is_an_error_not_a_result(
    buffer: FakeBuffer, lengths: tuple[int, ...] | None, wrong: dict[str, int], told: str
) -> None:
    async with connect(buffer) as client:
        rollout = await client.submit([[1], [2]], n=2)
        (submit,) = await buffer.until(Submit)
        await buffer.say(group(submit, "0"))
        await buffer.say(structs.replace(group(submit, "1", lengths), **wrong))
        with pytest.raises(RolloutFailed, match=told):
            await rollout.result()
        assert [found.prompt_id for found in rollout.groups] == ["0"]


async def test_cancel_names_what_was_given_up(buffer: FakeBuffer) -> None:
    buffer.script = answering(skip=("1", "2"))
    async with connect(buffer) as client:
        rollout = await client.submit([[1], [2], [3]], n=1)
        await anext(aiter(rollout))
        await rollout.cancel(["1"])
        assert rollout.unfinished == ["2"]
        await rollout.cancel()
        with pytest.raises(RolloutCancelled) as info:
            await rollout.result()
        assert info.value.prompt_ids == ("1", "2")
        with pytest.raises(Exception, match=r"prompt_ids\[0\] = 'x'"):
            await rollout.cancel(["x"])
        sent = await buffer.until(Cancel, 2)
    assert [message.prompt_ids for message in sent] == [["1"], []]


def test_no_message_names_more_prompts_than_the_buffer_reads_at_once() -> None:
    active, rollout = ActiveRollouts(None), MagicMock(id="r", submission=1, ended=False)
    active.add(rollout, None)
    ids = [str(index) for index in range(10_000)]
    active._acknowledge["r", 1] = list(ids)
    rollout.prepared.return_value = [SimpleNamespace(id=each, shows=lambda _: True) for each in ids]
    for messages in (active.cancel(rollout, ids), active.owed(), active.lose_image("i", "why")):
        parts = [message.prompt_ids for message in messages]
        assert max(map(len, parts)) <= MAX_PROMPTS
        assert [prompt_id for part in parts for prompt_id in part] == ids
    assert [message.prompt_ids for message in active.cancel(rollout, ())] == [[]]  # all of them


async def test_leaving_cancels_what_is_unfinished(buffer: FakeBuffer) -> None:
    async with connect(buffer) as client:
        rollout = await client.submit([[1]], n=1)
    await buffer.until(Cancel)
    with pytest.raises(RolloutCancelled):
        await rollout.result()
    with pytest.raises(Unreachable, match="closed"):
        await client.submit([[1]])


async def test_a_cancelled_submit_leaves_no_work_behind(
    buffer: FakeBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with connect(buffer) as client:
        sending = asyncio.Event()

        async def stuck(rollout: object) -> None:
            sending.set()
            await asyncio.sleep(60)

        monkeypatch.setattr(client, "_send_prompts", stuck)
        task = asyncio.create_task(client.submit([[1]]))
        await sending.wait()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await buffer.until(Cancel)


async def test_a_restarted_buffer_gets_the_unfinished_prompts_again(
    buffer: FakeBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel_module, "CHECK_SECONDS", 0.05)
    buffer.script = answering(skip=("1",))
    async with connect(buffer) as client:
        rollout = await client.submit([[1], [2]], n=2, seed=4)
        assert (await anext(aiter(rollout))).prompt_id == "0"
        first = buffer.of(Submit)[0]
        await buffer.stop()
        buffer.got.clear()
        buffer.script = answering()
        await buffer.start()
        groups = await rollout.result()
        again = buffer.of(Submit)[0]
    assert [g.prompt_id for g in groups] == ["0", "1"]
    assert (again.rollout_id, again.prompt_ids) == (first.rollout_id, ["1"])
    assert (again.seed, again.rollout_number) == (first.seed, first.rollout_number)


async def test_a_buffer_that_answers_is_not_silent(buffer: FakeBuffer) -> None:
    status = Status(
        name="b", incarnation=1, policy="p", instances=[], rollouts=1, requests_waiting=1, requests_running=0
    )
    buffer.script = lambda m: [status] if isinstance(m, StatusRequest) else []
    async with connect(buffer, silence_seconds=0.1) as client:
        rollout = await client.submit([[1]], n=1)
        await buffer.until(StatusRequest, 8)
        assert rollout.unfinished == ["0"]
        assert (await client.status()).policy == "p"
        await buffer.say(group(buffer.of(Submit)[0], "0"))
        await rollout.result()


async def test_what_was_given_up_is_cancelled_again_and_nothing_else_ever(buffer: FakeBuffer) -> None:
    async with connect(buffer) as client:
        rollout = await client.submit([[1]], n=2, rollout_id="r")
        await buffer.until(Submit)
        await rollout.cancel()
        (cancel,) = await buffer.until(Cancel)
        assert (cancel.rollout_id, cancel.submission) == ("r", rollout.submission)
        again = await client.submit([[1]], n=2, rollout_id="r")
        await buffer.until(Submit, 2)
        assert again.submission != rollout.submission
        # That of another incarnation, the one at work, and the one before.
        for submission in (5, again.submission, rollout.submission):
            await buffer.say(progress("r", submission))
        await buffer.until(Cancel, 2)
        await asyncio.sleep(0.1)
        assert [cancel.submission for cancel in buffer.of(Cancel)] == [rollout.submission] * 2


async def test_an_answer_to_another_use_of_the_id_changes_nothing_and_is_acknowledged(
    buffer: FakeBuffer,
) -> None:
    async with connect(buffer) as client:
        before = await client.submit([[1]], n=1, seed=0, rollout_id="r", deadline_seconds=0.01)
        with pytest.raises(DeadlineExceeded):
            await before.result()
        rollout = await client.submit([[1]], n=1, seed=1, rollout_id="r")
        _, submit = await buffer.until(Submit, 2)
        late = group(submit, "0")
        late.submission = before.submission
        await buffer.say(late)
        gone = Refused(
            code="cancelled", message="x", rollout_id="r", prompt_ids=["0"], submission=before.submission
        )
        await buffer.say(gone)
        (acknowledge,) = await buffer.until(Acknowledge)
        assert (acknowledge.submission, acknowledge.prompt_ids) == (before.submission, ["0"])
        assert rollout.unfinished == ["0"]
        mine = group(submit, "0", lengths=(3,))
        mine.submission = rollout.submission
        await buffer.say(mine)
        assert len((await rollout.result())[0].responses[0].token_ids) == 3


async def test_what_is_submitted_again_asks_for_the_weights_that_it_began_with(buffer: FakeBuffer) -> None:
    async with connect(buffer) as client:
        rollout = await client.submit([[1]], n=1)
        (submit,) = await buffer.until(Submit)
        assert submit.weight_version == -1
        await buffer.say(
            Accepted(rollout_id=rollout.id, prompt_ids=["0"], submission=rollout.submission, weight_version=7)
        )
        async with asyncio.timeout(5):
            while rollout.weight_version != 7:
                await asyncio.sleep(0.01)
        await client._send_prompts(rollout)
        _, again = await buffer.until(Submit, 2)
        assert (again.weight_version, again.submission) == (7, submit.submission)


async def test_progress(buffer: FakeBuffer) -> None:
    seen = []
    async with connect(buffer) as client:
        rollout = await client.submit([[1]], n=2)
        rollout.on_progress = seen.append
        await buffer.until(Submit)
        for finished, finish_time in ((1, 0.5), (2, 1.5)):
            news = progress(rollout.id, rollout.submission)
            await buffer.say(structs.replace(news, finished=finished, finish_times=[finish_time]))
        await buffer.say(group(buffer.of(Submit)[0], "0"))
        await rollout.result()
    assert [each.finished for each in seen] == [1, 2]
    assert rollout.progress is seen[-1]
    assert rollout.finish_times == [0.5, 1.5]
