"""Loops that send whole contexts: what goes on, what begins a segment, and what the buffer is told to await."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from fake_buffer import FakeBuffer, connected, turns
from prepared_images import placed as image_at

from seer.client import InvalidField, RequestRefused, SamplingParams
from seer.client.turns import PrefixTrajectories
from seer.common.wire import Cancel, Message, Refused, Submit, Tokens

SAMPLING = SamplingParams(max_tokens=2)
SAID = [100, 101]
"""What every turn generates."""


@contextlib.asynccontextmanager
async def loops(**options: Any) -> AsyncIterator[tuple[FakeBuffer, PrefixTrajectories]]:
    async with connected() as (buffer, client):
        buffer.script = lambda message: list(turns(message)) if isinstance(message, Submit) else []
        yield buffer, PrefixTrajectories(client.open_rollout(), **options)


async def turn(sessions: PrefixTrajectories, session: str, *tokens: int, **options: Any) -> list[int]:
    """Ask for a turn after these tokens; return the context that it leaves."""
    asked = {"group": "g", "index": 0, **options}
    found = await sessions.generate(session, np.array(tokens, np.int32), SAMPLING, **asked)
    return [*tokens, *found.responses[0].token_ids.tolist()]


def places(buffer: FakeBuffer) -> list[tuple[str, int]]:
    return [
        place
        for each in buffer.of(Submit)
        for place in zip(each.groups, each.first_indices, strict=True)
        if isinstance(each, Submit)
    ]


async def ended(buffer: FakeBuffer, count: int) -> list[str]:
    """Return the last turns that the buffer was told of, once there are so many, and no more come."""
    async with asyncio.timeout(5):
        while len(names := [name for each in buffer.of(Cancel) for name in each.prompt_ids]) < count:
            await asyncio.sleep(0.005)
    await asyncio.sleep(0.02)
    assert len(names) == count
    return names


async def test_what_goes_on_is_the_next_turn_and_anything_else_a_segment():
    async with loops() as (buffer, sessions):
        context = await turn(sessions, "s", 1, 2)
        context = await turn(sessions, "s", *context, 7)
        assert context == [1, 2, *SAID, 7, *SAID]
        assert (sessions.turns, sessions.segments) == (2, 0)
        assert places(buffer) == [("g", 0)] * 2
        assert [
            (t.prompt_len, t.generated, t.idle_seconds) for each in buffer.of(Submit) for t in each.turns
        ] == [(2, 0, 600), (2, 2, 600)]
        for prompt in ([1, *context[2:]], context[:-1], [1, 2]):  # rewritten, cut, begun again
            await turn(sessions, "s", *prompt)
        assert (sessions.turns, sessions.segments) == (5, 3)
        names = [group for group, _ in places(buffer)]
        assert len(set(names[2:])) == 3
        assert all(name.startswith("g~") for name in names[2:])
        assert {index for _, index in places(buffer)} == {0}
        specs = [t for each in buffer.of(Submit) for t in each.turns]
        assert [(t.prompt_len, t.generated) for t in specs[2:]] == [(6, 0), (6, 0), (2, 0)]
        assert await ended(buffer, 3) == [name for each in buffer.of(Submit)[1:4] for name in each.prompt_ids]


async def test_a_context_goes_on_with_its_own_images_alone():
    """Their tokens are equal: one placeholder each."""
    one, other, later = image_at(1, 0), image_at(2, 0), image_at(3, 4)
    async with loops() as (buffer, sessions):
        context = await turn(sessions, "s", 9, 2, images=[one])
        for images in ([], [other], [later, one]):
            assert not sessions.goes_on("s", np.array(context), images)
        assert sessions.goes_on("s", np.array(context), [one])
        context = await turn(sessions, "s", *context, 9, images=[one, later])
        assert (sessions.turns, sessions.segments) == (2, 0)
        await turn(sessions, "s", *context, images=[other, later])
        assert sessions.segments == 1
        assert [len(each.images[0]) for each in buffer.of(Submit)] == [1, 2, 2]


async def test_the_noise_of_a_segment_is_named_by_its_first_prompt_and_how_often_that_came():
    found = []
    for _ in range(2):
        async with loops() as (buffer, sessions):
            for session in ("s", "t"):  # of another session, it is another's
                for prompt in ([1], [2], [1], [2], [1], [2]):
                    await turn(sessions, session, *prompt, index="st".index(session))
            found.append(places(buffer))
    assert found[0] == found[1]
    first, second = ([name for name, index in found[0] if index == at] for at in (0, 1))
    assert first[0] == second[0] == "g"
    assert len(set(first)) == 6
    assert first == second  # and other indices
    assert [name.rpartition(".")[2] for name in first[1:]] == ["0", "1", "1", "2", "2"]


async def test_content_is_what_counts_whatever_numbers_it_comes_in():
    async with loops() as (buffer, sessions):
        for seed, kind in enumerate((np.int32, np.int64)):
            for token in (1, 2):
                asked = np.array([token], kind)
                await sessions.generate(f"{kind}", asked, SAMPLING, group="g", seed=seed)
        assert places(buffer)[:2] == places(buffer)[2:]
        with pytest.raises(InvalidField, match=r"^prompt = "):
            await turn(sessions, "s")


async def test_a_prompt_that_comes_while_its_session_is_generating_waits_for_nothing_and_is_awaited_no_more():
    async with loops() as (buffer, sessions):
        answer, buffer.script = buffer.script, lambda message: []
        first = asyncio.create_task(turn(sessions, "s", 1))
        (held,) = await buffer.until(Submit)
        buffer.script = answer
        await turn(sessions, "s", 1)
        assert await ended(buffer, 1) == [buffer.of(Submit)[1].prompt_ids[0]]
        for done in turns(held):
            await buffer.say(done)
        context = await first
        await turn(sessions, "s", *context, 5)  # the first goes on
        assert [name.partition("~")[0] for name, _ in places(buffer)] == ["g"] * 3
        assert [("~" in name) for name, _ in places(buffer)] == [False, True, False]
        assert (sessions.turns, sessions.segments) == (3, 1)


async def test_a_session_that_ends_while_it_generates_is_awaited_no_more_either():
    async with loops() as (buffer, sessions):
        buffer.script = lambda message: []
        asked = asyncio.create_task(turn(sessions, "s", 1))
        (held,) = await buffer.until(Submit)
        sessions.end("s")
        assert await ended(buffer, 0) == []
        for done in turns(held):
            await buffer.say(done)
        await asked
        assert await ended(buffer, 1) == held.prompt_ids
        sessions.end("s")
        sessions.end("unknown")
        assert await ended(buffer, 1) == held.prompt_ids


async def test_at_most_max_sessions_are_known_and_the_oldest_begins_again():
    async with loops(max_sessions=2) as (buffer, sessions):
        contexts = [await turn(sessions, name, 1, group=name) for name in ("a", "b")]
        contexts[0] = await turn(sessions, "a", *contexts[0], group="a")
        await turn(sessions, "c", 1, group="c")
        assert len(sessions) == 2
        assert await ended(buffer, 1) == ["b.0"]
        await turn(sessions, "a", *contexts[0], group="a")
        assert (len(sessions), sessions.segments) == (2, 0)
        await turn(sessions, "b", *contexts[1], group="b")
        spec = buffer.of(Submit)[-1].turns[0]
        assert (spec.prompt_len, spec.generated) == (3, 0)


async def test_a_turn_that_failed_can_be_asked_for_again_and_one_that_was_given_up_is_cancelled():
    def refusing(message: Message) -> list[Any]:
        if not isinstance(message, Submit):
            return []
        return [
            Refused(
                code="refused", message="no room", rollout_id=message.rollout_id,
                prompt_ids=message.prompt_ids, submission=message.submission,
            )
        ]  # fmt: skip

    async with loops() as (buffer, sessions):
        answer, buffer.script = buffer.script, refusing
        with pytest.raises(RequestRefused, match="no room"):
            await turn(sessions, "s", 1)
        buffer.script = lambda message: []
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await turn(sessions, "s", 1)
        await buffer.until(Cancel)
        buffer.script = answer
        assert await turn(sessions, "s", 1) == [1, *SAID]
        assert places(buffer) == [("g", 0)] * 3
        assert sessions.segments == 0


async def test_the_room_of_a_context_bounds_what_its_turns_generate_together():
    async with loops(idle_seconds=5.0) as (buffer, sessions):
        context: Tokens | list[int] = await turn(sessions, "s", 1, 2, max_context=6)
        await turn(sessions, "s", *context, 3, 3, 3, max_context=6)
        assert [(t.cap, t.idle_seconds) for each in buffer.of(Submit) for t in each.turns] == [(4, 5), (4, 5)]
        context = await turn(sessions, "t", 1, max_context=1, index=1)
        assert buffer.of(Submit)[-1].turns[0].cap == 2
        await turn(sessions, "t", *context, max_context=1, index=1)
        assert buffer.of(Submit)[-1].turns[0].cap == 4
