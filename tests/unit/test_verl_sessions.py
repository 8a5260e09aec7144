"""Sessions of a prompt on virtual time: who gets which response, errors, cancels, deadlines. No veRL."""

from __future__ import annotations

import asyncio

import pytest
from virtual_time import VIRTUAL

from seer.client import RolloutFailed, SamplingParams
from seer.integrations.verl.groups import WAIT_SECONDS, GroupKey, Request, Submission
from seer.integrations.verl.sessions import Sessions

pytestmark = VIRTUAL

KEY = GroupKey(step=1, validate=False, index="0", copy=0)
REQUEST = Request((1, 2), SamplingParams())
N = 3


class Seer:
    """Answers with the index of each response, after a second."""

    def __init__(self, error: Exception | None = None) -> None:
        self.submitted: list[tuple[float, Submission]] = []
        self._error = error

    async def submit(self, what: Submission) -> list[str]:
        self.submitted.append((asyncio.get_running_loop().time(), what))
        await asyncio.sleep(1)
        if self._error is not None:
            raise self._error
        return [f"{what.kind} {index}" for index in range(what.n)]


async def test_each_session_gets_its_response():
    seer = Seer()
    sessions = Sessions(KEY, N, seer.submit)
    found = await asyncio.gather(*(sessions.ask(session, REQUEST) for session in (2, 0, 1)))
    assert found == ["whole 2", "whole 0", "whole 1"]
    assert [(when, what.n) for when, what in seer.submitted] == [(0.0, N)]
    assert await sessions.ask(1, REQUEST) == "again 0"


async def test_a_session_may_ask_several_times_at_once():
    seer = Seer()
    sessions = Sessions(KEY, 2, seer.submit)
    asked = [sessions.ask(session, REQUEST) for session in (0, 0, 1, 0)]
    assert await asyncio.gather(*asked) == ["whole 0", "again 0", "whole 1", "again 0"]
    assert len({what.prompt_id for _, what in seer.submitted}) == 3


async def test_an_error_reaches_every_session():
    sessions = Sessions(KEY, N, Seer(RolloutFailed("no")).submit)
    asked = [sessions.ask(session, REQUEST) for session in range(N)]
    found = await asyncio.gather(*asked, return_exceptions=True)
    assert [str(error) for error in found] == ["no"] * N


async def test_nobody_waits_for_siblings_beyond_the_deadline():
    seer = Seer()
    sessions = Sessions(KEY, N, seer.submit)
    early = asyncio.create_task(sessions.ask(1, REQUEST))
    await asyncio.sleep(3)
    later = asyncio.create_task(sessions.ask(0, REQUEST))
    assert (await early, await later) == ("whole 1", "whole 0")
    assert await sessions.ask(2, REQUEST) == "whole 2"
    assert [(when, what.n) for when, what in seer.submitted] == [(WAIT_SECONDS, N)]


async def test_a_session_that_ends_is_not_waited_for():
    seer = Seer()
    sessions = Sessions(KEY, 2, seer.submit)
    asked = asyncio.create_task(sessions.ask(0, REQUEST))
    await asyncio.sleep(2)
    sessions.ended(1)
    assert await asked == "whole 0"
    assert seer.submitted[0][0] == 2.0


@pytest.mark.parametrize("when", [0.5, 2.5])
async def test_a_cancelled_session_takes_nothing_from_its_siblings(when):
    sessions = Sessions(KEY, 2, Seer().submit)
    first = asyncio.create_task(sessions.ask(0, REQUEST))
    asyncio.get_running_loop().call_at(when, first.cancel)
    await asyncio.sleep(2)
    assert await sessions.ask(1, REQUEST) == "whole 1"
    with pytest.raises(asyncio.CancelledError):
        await first
