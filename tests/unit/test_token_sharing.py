"""What an engine shares with the dgds, and when: steps by steps, at ends, and as chunks are dropped."""

import asyncio

import numpy as np
import pytest
from virtual_time import VIRTUAL

from seer.common import wire
from seer.common.clock import LoopClock
from seer.common.types import SamplingParams
from seer.services.dgds.client import StreamDelta
from seer.services.engine.backend import Generated
from seer.services.engine.chunks import RunningChunk
from seer.services.engine.token_sharing import SHARE_SECONDS, TokenSharing

pytestmark = VIRTUAL


class Dgds:
    """Writes down what it is told, and has `news` once."""

    def __init__(self):
        self.told, self.news, self.late = [], [], 0.0

    def register(self, group_id, prompt):
        self.told.append(("register", group_id, list(prompt)))

    def begin(self, group_id, index, attempt, output):
        self.told.append(("begin", group_id, index, attempt, list(output)))

    def append(self, group_id, index, attempt, previous, tokens):
        self.told.append(("append", group_id, index, attempt, previous, list(tokens)))

    def forget(self, groups):
        self.told.append(("forget", list(groups)))

    async def fetch(self, groups, own):
        await asyncio.sleep(self.late)
        news, self.news = self.news, []
        return news


class Driver:
    def __init__(self):
        self.fed = []

    def feed(self, deltas):
        self.fed += deltas


@pytest.fixture
def world():
    dgds, driver, running = Dgds(), Driver(), {}
    return dgds, driver, running, TokenSharing(dgds, running, driver, LoopClock(), drafts=True)


def start(world, index=0, attempt=7):
    """Start a chunk of a response that has two tokens after its prompt of three."""
    order = wire.RunChunk(
        request_id=f"g#{index}", group_id="g", attempt=attempt, tokens=np.arange(5, dtype=np.int32),
        prompt_len=3, max_new_tokens=9, sampling=SamplingParams(), key=1,
    )  # fmt: skip
    _, _, running, sharing = world
    run = running[order.request_id] = RunningChunk("g", index, attempt, serial=99, length=2)
    sharing.begin(run, order)
    return run


def step(run, *tokens):
    logprobs = [0.0] * len(tokens)
    run.add(Generated(request_id="g#0", attempt=99, token_ids=list(tokens), logprobs=logprobs))


async def passed(sharing, seconds):
    sharing_now = asyncio.create_task(sharing.run())
    await asyncio.sleep(seconds)
    sharing_now.cancel()


async def test_steps_are_shared_together_and_each_token_once(world):
    dgds, _, _, sharing = world
    run = start(world)
    assert dgds.told == [("register", "g", [0, 1, 2]), ("begin", "g", 0, 7, [3, 4])]
    dgds.told.clear()
    step(run, 5)
    step(run, 6, 7)
    assert dgds.told == []
    await passed(sharing, 1.5 * SHARE_SECONDS)
    assert dgds.told == [("append", "g", 0, 7, 2, [5, 6, 7])]
    await passed(sharing, 3.5 * SHARE_SECONDS)
    step(run, 8)
    await passed(sharing, 1.5 * SHARE_SECONDS)
    assert dgds.told[1:] == [("append", "g", 0, 7, 5, [8])]


async def test_a_dgds_that_does_not_answer_delays_nothing_that_is_for_others(world):
    dgds, _, _, sharing = world
    run, dgds.late = start(world), 100 * SHARE_SECONDS
    now = asyncio.create_task(sharing.run())
    await asyncio.sleep(0.5 * SHARE_SECONDS)
    for token in range(4):
        step(run, token)
        await asyncio.sleep(SHARE_SECONDS)
        assert dgds.told[-1] == ("append", "g", 0, 7, 2 + token, [token])
    now.cancel()


@pytest.mark.parametrize("finished", [True, False])
async def test_what_leaves_shares_its_rest_at_once(world, finished):
    dgds, _, running, sharing = world
    run = start(world)
    step(run, 5, 6)
    dgds.told.clear()
    sharing.leave(run, finished=finished)
    del running["g#0"]
    assert dgds.told == [("append", "g", 0, 7, 2, [5, 6])]
    await passed(sharing, 2.5 * SHARE_SECONDS)
    assert dgds.told[1:] == []
    assert sharing.groups.to_fetch(0.0) == {}


async def test_what_others_generate_is_fed_and_counted_and_all_is_forgotten_with_the_weights(world):
    dgds, driver, _, sharing = world
    start(world)
    delta = StreamDelta("g", 1, 0, np.array([1, 2], np.int32))
    dgds.news = [delta]
    await passed(sharing, 2.5 * SHARE_SECONDS)
    assert driver.fed == [delta]
    assert sharing.groups._running["g"].tokens == 2
    sharing.forget_all()
    assert dgds.told[-1] == ("forget", ["g"])
    assert sharing.groups.to_fetch(0.0) == {}
