"""A buffer that answers a client with what a script says."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import numpy as np
from memory_transport import MemoryNetwork, MemoryTransport
from msgspec import structs

from seer.client import RolloutClient
from seer.common.ids import new_incarnation, params_digest
from seer.common.net.hub import Hub
from seer.common.net.identity import Identity
from seer.common.wire import Accepted, BufferToTrainer, GroupDone, Message, Progress, Submit, TrainerToBuffer

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
        submission=submit.submission,
    )


def turns(submit: Submit, **changes: object) -> list[GroupDone]:
    """What generates as many tokens as it may: 100 and on, with logprobs that tell the number of the turn."""
    length = submit.sampling.max_tokens
    images = submit.images or [[]] * len(submit.groups)
    places = zip(submit.groups, submit.first_indices, images, strict=True)
    return [
        structs.replace(
            group(submit, prompt_id, (length,)),
            tokens=np.arange(100, 100 + length, dtype=np.int32),
            logprobs=np.full(length, -0.5 - int(prompt_id.rpartition(".")[2]), np.float32),
            params_digest=params_digest(
                submit.seed, submit.rollout_number, submit.n, submit.sampling, *place
            ),
            **changes,
        )
        for prompt_id, place in zip(submit.prompt_ids, places, strict=True)
    ]


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
        accepted = Accepted(
            rollout_id=message.rollout_id, prompt_ids=message.prompt_ids, submission=message.submission
        )
        return [accepted, *done]

    return script


def connect(buffer: FakeBuffer, **options: float) -> RolloutClient:
    return RolloutClient(ENDPOINT, transport=buffer.transport, **options)


def progress(rollout_id: str, submission: int) -> Progress:
    return Progress(
        rollout_id=rollout_id, requests=2, finished=1, groups=1, groups_finished=0, tokens=5, chunks=1,
        migrations=0, preemptions=0, running=1, submission=submission,
    )  # fmt: skip


@contextlib.asynccontextmanager
async def connected(**options: float) -> AsyncIterator[tuple[FakeBuffer, RolloutClient]]:
    """Yield a buffer that says nothing, and a client of it."""
    buffer = FakeBuffer(MemoryTransport(MemoryNetwork()))
    await buffer.start()
    async with connect(buffer, **options) as client:
        yield buffer, client
    await buffer.stop()
