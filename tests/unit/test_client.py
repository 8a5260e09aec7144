"""The client against a scripted buffer: the invariants of seer.client.client and .rollout."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable

import numpy as np
import pytest

from seer.client import (
    BufferLost,
    DeadlineExceeded,
    Prompt,
    RequestRefused,
    RolloutCancelled,
    RolloutClient,
    RolloutFailed,
    SamplingParams,
    Unreachable,
)
from seer.client import rollout as rollout_module
from seer.common import channel as channel_module
from seer.common.channel import Hub, Identity
from seer.common.ids import new_incarnation
from seer.common.transport.memory import MemoryNetwork, MemoryTransport
from seer.common.wire.messages import (
    Accepted,
    Acknowledge,
    BufferToTrainer,
    Cancel,
    GroupDone,
    Hello,
    Message,
    Progress,
    Refused,
    Status,
    StatusRequest,
    Submit,
    TrainerToBuffer,
)

ENDPOINT = "tcp://127.0.0.1:7101"


def group(submit: Submit, prompt_id: str, lengths: tuple[int, ...] | None = None) -> GroupDone:
    """Responses whose tokens tell the prompt and index they belong to."""
    lengths = lengths or tuple(range(1, submit.n + 1))
    tokens = [1000 * index + position for index, length in enumerate(lengths) for position in range(length)]
    return GroupDone(
        rollout_id=submit.rollout_id,
        prompt_id=prompt_id,
        weight_version=3,
        finish_reasons=["length"] * len(lengths),
        stop_reasons=[""] * len(lengths),
        lengths=list(lengths),
        tokens=np.array(tokens, np.int32),
        logprobs=-np.ones(len(tokens), np.float32),
        chunks=2,
    )


class FakeBuffer:
    """Answers with what `script` returns for each message; keeps everything it got."""

    def __init__(self, transport: MemoryTransport) -> None:
        self.transport = transport
        self.got: list[Message] = []
        self.script: Callable[[Message], list[BufferToTrainer]] = lambda message: []
        self.address = b""

    async def start(self) -> None:
        me = Identity(role="buffer", name="buffer", incarnation=new_incarnation())
        router = await self.transport.router(ENDPOINT)
        self.hub: Hub[BufferToTrainer, TrainerToBuffer] = Hub(router, me, TrainerToBuffer, False)
        self.task = asyncio.create_task(self._serve())

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.wait([self.task])
        self.hub.close()

    async def _serve(self) -> None:
        while True:
            self.address, message = await self.hub.recv()
            self.got.append(message)
            for answer in self.script(message):
                await self.say(answer)

    async def say(self, message: BufferToTrainer) -> None:
        await self.hub.send(self.address, message)

    def of(self, kind: type[Message]) -> list[Message]:
        return [message for message in self.got if isinstance(message, kind)]

    async def until(self, kind: type[Message], count: int = 1) -> list[Message]:
        async with asyncio.timeout(10):
            while len(self.of(kind)) < count:
                await asyncio.sleep(0.005)
        return self.of(kind)


def answering(*, skip: tuple[str, ...] = ()) -> Callable[[Message], list[BufferToTrainer]]:
    """Finish every submitted prompt at once, last first, but those in `skip`."""

    def script(message: Message) -> list[BufferToTrainer]:
        if not isinstance(message, Submit):
            return []
        done = [
            group(message, prompt_id) for prompt_id in reversed(message.prompt_ids) if prompt_id not in skip
        ]
        return [Accepted(rollout_id=message.rollout_id, prompt_ids=message.prompt_ids), *done]

    return script


@pytest.fixture
async def buffer() -> AsyncIterator[FakeBuffer]:
    fake = FakeBuffer(MemoryTransport(MemoryNetwork()))
    await fake.start()
    yield fake
    await fake.stop()


def connect(buffer: FakeBuffer, **options: float) -> RolloutClient:
    return RolloutClient(ENDPOINT, transport=buffer.transport, **options)


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
    monkeypatch.setattr(rollout_module, "BATCH_TOKENS", 10)
    monkeypatch.setattr(rollout_module, "BATCH_PROMPTS", 3)
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
        where = {"rollout_id": message.rollout_id}
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
        return [Refused(code=code, message="no", rollout_id=message.rollout_id)]

    buffer.script = script
    async with connect(buffer) as client:
        rollout = await client.submit([[1], [2]])
        with pytest.raises(cls) as info:
            await rollout.result()
    assert type(info.value) is cls
    assert info.value.prompt_ids == ("0", "1")


@pytest.mark.parametrize(
    ("lengths", "problem"), [((1, 0), "response 1 is empty"), ((1, 1, 1), "where 2 were asked")]
)
async def test_an_empty_or_malformed_success_is_an_error(
    buffer: FakeBuffer, lengths: tuple[int, ...], problem: str
) -> None:
    buffer.script = lambda m: [group(m, "0", lengths)] if isinstance(m, Submit) else []
    async with connect(buffer) as client:
        rollout = await client.submit([[1]], n=2)
        with pytest.raises(RolloutFailed, match=problem):
            await rollout.result()


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


async def test_deadline_cancels_the_rest(buffer: FakeBuffer) -> None:
    buffer.script = answering(skip=("1",))
    async with connect(buffer) as client:
        rollout = await client.submit([[1], [2]], n=1, deadline_seconds=0.05)
        with pytest.raises(DeadlineExceeded) as info:
            await rollout.result()
        assert info.value.prompt_ids == ("1",)
        assert [g.prompt_id for g in rollout.groups] == ["0"]
        await buffer.until(Cancel)


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


async def test_a_silent_buffer_is_reported_with_its_endpoint_and_prompts(buffer: FakeBuffer) -> None:
    async with connect(buffer, silence_seconds=0.2) as client:
        rollout = await client.submit([[1], [2]], n=1)
        with pytest.raises(BufferLost, match=ENDPOINT) as info:
            await rollout.result()
    assert info.value.prompt_ids == ("0", "1")
    assert isinstance(info.value, Unreachable)
    assert isinstance(info.value, RolloutFailed)
    assert buffer.of(StatusRequest), "it is asked before it is given up"


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


async def test_a_trainer_that_blocks_the_loop_does_not_lose_the_buffer(buffer: FakeBuffer) -> None:
    async with connect(buffer, silence_seconds=0.1) as client:
        rollout = await client.submit([[1]], n=1)
        (submitted,) = await buffer.until(Submit)
        time.sleep(0.5)  # a training step
        await asyncio.sleep(0)
        assert rollout.unfinished == ["0"]
        await buffer.say(group(submitted, "0"))
        await rollout.result()


async def test_work_that_nobody_waits_for_is_cancelled(buffer: FakeBuffer) -> None:
    async with connect(buffer):
        await buffer.until(Hello)
        await buffer.say(
            Progress(
                rollout_id="old", requests=2, finished=1, groups=1, groups_finished=0, tokens=5, chunks=1,
                migrations=0, preemptions=0, running=1,
            )
        )  # fmt: skip
        (cancel,) = await buffer.until(Cancel)
    assert cancel.rollout_id == "old"


async def test_a_refused_connection_ends_everything_with_the_reason(buffer: FakeBuffer) -> None:
    async with connect(buffer) as client:
        rollout = await client.submit([[1]], n=1)
        await buffer.until(Submit)
        await buffer.say(Refused(code="protocol", message="speaks protocol 9.0"))
        with pytest.raises(BufferLost, match=r"speaks protocol 9\.0"):
            await rollout.result()
        with pytest.raises(Unreachable):
            await client.submit([[1]])


async def test_nobody_there() -> None:
    client = RolloutClient(ENDPOINT, transport=MemoryTransport(MemoryNetwork()), connect_seconds=0.05)
    with pytest.raises(Unreachable, match=ENDPOINT):
        await client.__aenter__()


async def test_progress(buffer: FakeBuffer) -> None:
    seen = []
    async with connect(buffer) as client:
        rollout = await client.submit([[1]], n=2)
        rollout.on_progress = seen.append
        await buffer.until(Submit)
        for finished, finish_time in ((1, 0.5), (2, 1.5)):
            await buffer.say(
                Progress(
                    rollout_id=rollout.id, requests=2, finished=finished, groups=1, groups_finished=0, tokens=5,
                    chunks=1, migrations=0, preemptions=0, running=2, finish_times=[finish_time],
                )
            )  # fmt: skip
        await buffer.say(group(buffer.of(Submit)[0], "0"))
        await rollout.result()
    assert [progress.finished for progress in seen] == [1, 2]
    assert rollout.progress is seen[-1]
    assert rollout.finish_times == [0.5, 1.5]
