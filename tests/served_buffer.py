"""A buffer in a thread, over a real socket, for clients without asyncio."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from seer.common.ids import params_digest
from seer.common.net.hub import Hub
from seer.common.net.identity import Identity
from seer.common.net.transport.zmq import ZmqTransport
from seer.common.wire import (
    BufferToTrainer,
    GroupDone,
    Progress,
    Status,
    StatusRequest,
    Submit,
    TrainerToBuffer,
)


class ServedBuffer(threading.Thread):
    """Finishes every prompt of more than one token at once, last first."""

    def __init__(self, endpoint: str) -> None:
        super().__init__()
        self.endpoint = endpoint
        self.bound = threading.Event()
        self.loop = asyncio.new_event_loop()

    def run(self) -> None:
        self.task = self.loop.create_task(self._serve())
        self.loop.run_until_complete(asyncio.wait([self.task]))

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.task.cancel)
        self.join()

    async def _serve(self) -> None:
        transport = ZmqTransport()
        router = await transport.router(self.endpoint)
        me = Identity(role="buffer", name="buffer", incarnation=5)
        hub: Hub[BufferToTrainer, TrainerToBuffer] = Hub(router, me, TrainerToBuffer, False)
        self.bound.set()
        try:
            while True:
                sender, message = await hub.recv()
                for answer in self._answers(message):
                    await hub.send(sender, answer)
        finally:
            await transport.close()

    def _answers(self, message: TrainerToBuffer) -> Iterator[BufferToTrainer]:
        if isinstance(message, StatusRequest):
            yield Status(
                name="b", incarnation=5, policy="divided", instances=[], rollouts=0, requests_waiting=0,
                requests_running=0,
            )  # fmt: skip
        if not isinstance(message, Submit):
            return
        ids = [
            prompt for prompt, length in zip(message.prompt_ids, message.lengths, strict=True) if length > 1
        ]
        yield Progress(
            rollout_id=message.rollout_id, requests=2, finished=1, groups=2, groups_finished=1, tokens=1,
            chunks=1, migrations=0, preemptions=0, running=1, submission=message.submission,
        )  # fmt: skip
        for prompt_id in reversed(ids):
            place = message.prompt_ids.index(prompt_id)
            digest = params_digest(
                message.seed, message.rollout_number, message.n, message.sampling,
                *((message.groups[place], message.first_indices[place]) if message.open else ()),
            )  # fmt: skip
            yield GroupDone(
                rollout_id=message.rollout_id, prompt_id=prompt_id, weight_version=0,
                finish_reasons=["stop"] * message.n, stop_reasons=["2"] * message.n,
                lengths=[1] * message.n, tokens=np.full(message.n, 2, np.int32),
                logprobs=np.full(message.n, -0.5, np.float32), params_digest=digest,
                submission=message.submission,
            )  # fmt: skip


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[str]:
    served = ServedBuffer(f"ipc://{tmp_path}/b")
    served.start()
    assert served.bound.wait(10)
    yield served.endpoint
    served.stop()
