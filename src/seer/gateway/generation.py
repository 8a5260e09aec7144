"""Answers to generation requests, whole or as they are generated.

Invariants:
- choices are in the order of the prompts, whatever order their groups come in;
- a stream has what the whole answer has;
- prompts whose client disconnects are cancelled;
- threads decode and write what was generated, which may be long: the event loop never waits for that.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from starlette.requests import Request
from starlette.responses import Response as HttpResponse

from seer.client import Delta, Group, Placed, Response, SamplingParams
from seer.client.text import ended_by_id
from seer.common.wire import Tokens
from seer.gateway.answers import Choice, Json
from seer.gateway.bearer import client_of
from seer.gateway.buffer_client import Question
from seer.gateway.group_names import (
    MAX_NAME_BYTES,
    GroupNames,
    Place,
    group_seed,
    places_in_headers,
    request_hashes,
)
from seer.gateway.http import answer, unless_gone
from seer.gateway.models import Models
from seer.gateway.open_requests import OpenRequests
from seer.gateway.request_bodies import SamplingFields
from seer.gateway.stream_answers import StreamedAnswer
from seer.gateway.text import ModelText
from seer.gateway.text_stream import TextStream

SESSION_HEADER = "X-Session-ID"
"""Says which requests may be of one conversation. Several may have one name, as all samples of a prompt."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request asks for: n responses to each prompt; `textual`: with their text.

    `adapter`: the adapter that it names as its model. `converses`: later requests may go on from its answer.
    `images`: those of the prompt, of which there is one then.
    """

    prompts: Sequence[list[int]]
    n: int
    sampling: SamplingParams
    fields: SamplingFields
    textual: bool = True
    adapter: str = ""
    converses: bool = False
    images: Sequence[Placed] = ()

    @property
    def skip_special(self) -> bool:
        """Whether text is without special tokens."""
        return self.fields.skip_special_tokens is not False

    @property
    def with_stop(self) -> bool:
        """Whether text has the stop string that ended it."""
        return bool(self.fields.include_stop_str_in_output)


class Generation:
    """Generates through `requests`, and decodes with `text`."""

    def __init__(self, requests: OpenRequests, text: ModelText, models: Models) -> None:
        self._requests = requests
        self._models = models
        self._text = text
        self._names = GroupNames()

    async def whole(
        self, request: Request, asked: Asked, body: Callable[[list[Choice]], Json]
    ) -> HttpResponse:
        """Return the answer whose body `body` makes of all choices, in order."""
        places, prompts, asks = self._places(request, asked)
        groups = await unless_gone(request, self._requests.run(prompts, asks))
        for group in groups.values():
            self._models.check_version(asked.adapter, group.weight_version)

        def written() -> HttpResponse:
            choices = [
                self._choice(prompt, groups[place], response, asked)
                for place, prompt in zip(places, asked.prompts, strict=True)
                for response in groups[place].responses
            ]
            return answer(body(choices))

        return await asyncio.to_thread(written)

    async def parts(
        self, request: Request, asked: Asked, streamed: StreamedAnswer, *, include_usage: bool
    ) -> AsyncGenerator[bytes]:
        """Yield the parts of a stream as its tokens come. Close a stream that is not read to its end."""
        places, prompts, asks = self._places(request, asked)
        # A seed gives equal prompts one place: they are generated once, and shown as the choices of each.
        choices: dict[Place, list[int]] = {}
        for position, place in enumerate(places):
            choices.setdefault(place, []).append(position * asked.n)
        async with contextlib.aclosing(self._requests.stream(prompts, asks)) as events:
            async for place, what in events:
                if isinstance(what, Group):
                    self._models.check_version(asked.adapter, what.weight_version)
                for first in choices[place]:
                    shown = self._shown(streamed, first, what, asked)
                    while (part := await asyncio.to_thread(next, shown, None)) is not None:
                        yield part
        yield streamed.end(include_usage=include_usage)

    def _shown(
        self, streamed: StreamedAnswer, first: int, what: Delta | Group, asked: Asked
    ) -> Iterator[bytes]:
        """Yield the parts for what came of the prompt whose first choice is `first`."""
        if isinstance(what, Delta):
            tokens, logprobs = what.token_ids.tolist(), what.logprobs.tolist()
            yield streamed.piece(first + what.index, tokens, logprobs, what.top_logprobs)
            return
        prompt = asked.prompts[first // asked.n]
        for response in what.responses:
            yield streamed.last(first + response.index, self._choice(prompt, what, response, asked))

    def new_text(self, asked: Asked) -> Callable[[list[int]], TextStream] | None:
        """Return what makes a decoder for each choice of a stream; None: the stream has no text."""
        if not asked.textual:
            return None
        return lambda prompt: self._text.stream(
            prompt, asked.sampling, skip_special=asked.skip_special, whole=asked.with_stop
        )

    def _places(self, request: Request, asked: Asked) -> tuple[list[Place], dict[Place, Tokens], Question]:
        """Return each prompt's place, the prompts by place, and what is asked of all.

        Raises `HttpError` for the headers of a group.
        """
        headers, seed = request.headers, asked.fields.seed
        prompts = [np.asarray(prompt, np.int32) for prompt in asked.prompts]
        images = [each.image.name for each in asked.images]
        hashes = request_hashes(prompts, asked.sampling, images)
        places = places_in_headers(headers, len(prompts), asked.n)
        if places:
            seed = group_seed(hashes, seed)
        else:
            request_id = headers.get("idempotency-key") or headers.get("x-request-id") or ""
            places = self._names.places(hashes, seed, request_id)
        session, client = _session(request, asked), client_of(request)
        asks = Question(asked.n, asked.sampling, seed or 0, session, asked.images, client)
        return places, dict(zip(places, prompts, strict=True)), asks

    def _choice(self, prompt: list[int], group: Group, response: Response, asked: Asked) -> Choice:
        token_ids, reason, text = response.token_ids.tolist(), response.stop_reason, ""
        if asked.textual:
            text = self._text.text(
                prompt, token_ids, reason, asked.sampling, skip_special=asked.skip_special,
                whole=asked.with_stop,
            )  # fmt: skip
        return Choice(
            prompt_token_ids=prompt,
            token_ids=token_ids,
            logprobs=response.logprobs.tolist(),
            text=text,
            finish_reason=response.finish_reason,
            stop_reason=_stop_reason(token_ids[-1], reason, asked.sampling),
            weight_version=group.weight_version,
            routed_experts=response.routed_experts,
            tops=response.top_logprobs,
            prompt_tops=group.prompt_logprobs,
        )


def _session(request: Request, asked: Asked) -> str | None:
    """Return the session of a request that is one turn of a conversation, "" without a name; else None."""
    if not (len(asked.prompts) == 1 and asked.n == 1 and asked.converses):
        return None
    name = request.headers.get(SESSION_HEADER, "")
    if len(name.encode()) <= MAX_NAME_BYTES:
        return name
    return hashlib.blake2b(name.encode(), digest_size=16).hexdigest()  # a message with it would be malformed


def _stop_reason(last_token: int, reason: str, sampling: SamplingParams) -> int | str | None:
    """Return what vLLM does: a stop string, the number of a stop token, None for an end-of-sequence token."""
    if not ended_by_id(last_token, reason, sampling):
        return reason or None
    return last_token if last_token in sampling.stop_token_ids else None
