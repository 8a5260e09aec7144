"""Answers to generation requests: the list in `seer.gateway.generation`, but for what whole gateways show."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Mapping
from typing import Any

import msgspec
import numpy as np
import pytest
from starlette.requests import Request

from seer.client import Group, Response, SamplingParams
from seer.client.prompts import check_id
from seer.gateway.answers import Choice, Style, completion_answer
from seer.gateway.buffer_client import Question
from seer.gateway.errors import HttpError
from seer.gateway.generation import Asked, Generation
from seer.gateway.group_names import Place
from seer.gateway.request_bodies import SamplingFields
from seer.gateway.stream_answers import StreamedCompletion

PROMPTS = [[1], [2], [1]]
ASKED = Asked(PROMPTS, 2, SamplingParams(), SamplingFields())
STYLE = Style(logprobs=True)


class Requests:
    """Two responses to each prompt, whose tokens name prompt and response."""

    session: object = None

    async def run(self, prompts: Mapping[Place, Any], asks: Question) -> dict[Place, Group]:
        self.session = asks.session
        return {place: self._group(ids) for place, ids in reversed(prompts.items())}

    async def stream(self, prompts: Mapping[Place, Any], _: Question) -> AsyncIterator[tuple[Place, Group]]:
        for place, ids in prompts.items():
            yield place, self._group(ids)

    def _group(self, ids: Any) -> Group:
        responses = tuple(
            Response(index, np.array([ids[0], index], np.int32), np.zeros(2, np.float32), None, "length", "")
            for index in range(2)
        )
        return Group("p", ids, {}, 1, "", responses, 1, 0, 0)


class Texts:
    """Text of tokens; notes which threads ask for it. `problem`: raised instead."""

    def __init__(self, problem: Exception | None = None) -> None:
        self.threads: set[int] = set()
        self._problem = problem

    def text(self, prompt: Any, token_ids: list[int], *_: object, **__: object) -> str:
        self.threads.add(threading.get_ident())
        if self._problem is not None:
            raise self._problem
        return " ".join(map(str, token_ids))


class Models:
    def check_version(self, *_: object) -> None: ...


async def _never() -> dict[str, Any]:
    await asyncio.Event().wait()
    raise AssertionError


def request(*headers: tuple[bytes, bytes]) -> Request:
    return Request({"type": "http", "headers": headers, "method": "POST", "path": "/"}, _never)


def generation(texts: Texts) -> Generation:
    return Generation(Requests(), texts, Models())  # type: ignore[arg-type]


def body(choices: list[Choice]) -> dict[str, Any]:
    return completion_answer({}, choices, 2, STYLE)


TEXTS = ["1 0", "1 1", "2 0", "2 1", "1 0", "1 1"]


async def test_choices_are_in_the_order_of_the_prompts_and_no_text_is_made_on_the_event_loop() -> None:
    texts = Texts()
    answered = await generation(texts).whole(request(), ASKED, body)
    assert [each["text"] for each in msgspec.json.decode(answered.body)["choices"]] == TEXTS
    streamed = StreamedCompletion({}, PROMPTS, 2, STYLE)
    parts = generation(texts).parts(request(), ASKED, streamed, include_usage=False)
    found = [msgspec.json.decode(part[6:])["choices"] async for part in parts if b"DONE" not in part]
    assert [(each["index"], len(each["logprobs"]["tokens"])) for [each] in found] == [
        (i, 2) for i in range(6)
    ]
    assert texts.threads
    assert threading.get_ident() not in texts.threads


async def test_a_session_may_have_a_name_of_any_length() -> None:
    one = Asked([[1]], 1, SamplingParams(), SamplingFields(), textual=False, converses=True)
    requests = Requests()
    found = []
    for name in ("s", "s" * 1000, "s" * 999 + "t", "s" * 1000):
        headers = (b"x-session-id", name.encode())
        await Generation(requests, Texts(), Models()).whole(request(headers), one, body)  # type: ignore[arg-type]
        found.append(requests.session)
    assert found[0] == "s"
    assert len(set(found)) == 3
    assert found[1] == found[3]
    for session in found:
        check_id(session, "session")


async def test_an_error_of_a_thread_is_the_request_s_own() -> None:
    texts = Texts(HttpError(400, "no text"))
    with pytest.raises(HttpError, match="no text"):
        await generation(texts).whole(request(), ASKED, body)
    streamed = StreamedCompletion({}, PROMPTS, 2, STYLE)
    with pytest.raises(HttpError, match="no text"):
        await anext(generation(texts).parts(request(), ASKED, streamed, include_usage=False))
