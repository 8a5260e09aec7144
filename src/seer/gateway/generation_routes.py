"""Routes of the data address: generation, models, tokens and text.

Invariants:
- a request is submitted once it was read and checked as a whole: a refused request costs no engine time;
- `model` is the system's model, the live adapter, or left out; another name is refused by name;
- a stream's answer begins with its first tokens: what fails before has a status of its own;
- what a request may make long (long texts, templates of its own, images) runs in processes that can be
  ended, short texts on a thread: no request holds up others for long.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import msgspec
import numpy as np
from msgspec import structs
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from seer import __version__
from seer.client import Placed, SamplingParams
from seer.common.config import Config
from seer.gateway import answers
from seer.gateway.answers import Choice, Experts, Json, Style, base64_npy
from seer.gateway.buffer_client import BufferClient
from seer.gateway.errors import HttpError, bad
from seer.gateway.generation import Asked, Generation
from seer.gateway.http import EventStream, answer, body_of, endpoint, unless_gone
from seer.gateway.images import Images
from seer.gateway.job_processes import JobProcesses
from seer.gateway.jobs import not_taken, text_work
from seer.gateway.messages import plain_messages
from seer.gateway.models import Models
from seer.gateway.open_requests import OpenRequests
from seer.gateway.output_constraint import json_constraint
from seer.gateway.request_bodies import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerateBody,
    StreamOptions,
    TextFields,
    TokenizeBody,
    alternatives,
    read_body,
)
from seer.gateway.responses_answer import StreamedResponse, response_answer, response_head
from seer.gateway.responses_body import ResponsesBody
from seer.gateway.stream_answers import StreamedAnswer, StreamedChat, StreamedCompletion
from seer.gateway.text import ModelText
from seer.gateway.tools import CallReader, calls_of

T = TypeVar("T")
B = TypeVar("B", bound=msgspec.Struct)

SHORT = 2**16
"""Characters of texts that are tokenized here, and bytes of a chat: at most 0.2 s."""

MAX_SHOWN = 2**21
"""Bound on the logprobs of tokens and alternatives in an answer."""

SHORT_TOKENS = 2**13
"""Tokens that become text here."""


class GenerationRoutes:
    """`routes` are to be served; see the module's docstring."""

    def __init__(
        self, config: Config, buffer: BufferClient, requests: OpenRequests, text: ModelText, images: Images,
        models: Models, jobs: JobProcesses,
    ) -> None:  # fmt: skip
        self._settings = config.gateway
        self._models = models
        self._buffer = buffer
        self._requests = requests
        self._generation = Generation(requests, text, models)
        self._counters = requests.counters
        self._text = text
        self._images = images
        self._thread = ThreadPoolExecutor(1, "tokenizer")
        self._jobs = jobs
        self._started = int(time.time())

    @property
    def routes(self) -> list[Route]:
        """The routes with their handlers."""
        handlers = [
            ("POST", "/inference/v1/generate", self.generate),
            ("POST", "/skyrl/v1/generate", self.generate_with_experts),
            ("POST", "/v1/completions", self.completions),
            ("POST", "/v1/chat/completions", self.chat),
            ("POST", "/v1/responses", self.responses),
            ("GET", "/v1/models", self.models),
            ("GET", "/version", self.version),
            ("POST", "/finish_session", self.finish_session),
            ("POST", "/tokenize", self.tokenize),
            ("POST", "/detokenize", self.detokenize),
        ]
        served = [
            Route(path, endpoint(handler, self._counters), methods=[how]) for how, path, handler in handlers
        ]
        probed = endpoint(self.health, Counter())  # asked all the time
        return [
            *served,
            Route("/health", probed, methods=["GET"]),
            Route("/ping", probed, methods=["GET", "POST"]),
        ]

    # --- generation ----------------------------------------------------------------------

    async def generate(self, request: Request) -> Response:
        """`/inference/v1/generate`: token ids in, token ids out."""
        return await self._generate(request, base64_npy if self._settings.routed_experts else None)

    async def generate_with_experts(self, request: Request) -> Response:
        """`/skyrl/v1/generate`: the same with routed experts, as lists."""
        return await self._generate(request, np.ndarray.tolist)

    async def _generate(self, request: Request, experts: Callable[[Experts], object] | None) -> Response:
        """Answer with token ids, and with `experts` of what tokens were routed to; None: without."""
        body = await self._read(request, GenerateBody)
        fields = body.sampling_params
        self._text.check(body.token_ids, "token_ids")
        self._images.check_text(body.token_ids, "token_ids")
        where = "sampling_params."
        sampling = fields.sampling(self._settings.logprobs, where)
        names, top = (f"{where}logprobs", f"{where}prompt_logprobs"), fields.logprobs or 0
        asks = None if top == 1 else top
        sampling = alternatives(sampling, asks, fields.prompt_logprobs, names, stream=bool(body.stream))
        if experts is not None:
            sampling = structs.replace(sampling, routed_experts_from=0)
        adapter = self._models.check(body.model)
        n = fields.group_size(where)
        asked = Asked([body.token_ids], n, sampling, fields, textual=False, adapter=adapter, converses=True)
        head = self._head("request_id", body.request_id or secrets.token_hex(16))
        self._bound(asked, "sampling_params.logprobs")
        style = Style(
            logprobs=fields.logprobs is not None, token_ids=True, experts=experts, tops=top if top > 1 else 0,
            prompt_tops=fields.prompt_logprobs is not None,
        )  # fmt: skip
        if body.stream:
            return await self._streamed(request, asked, StreamedAnswer, head, style, body.stream_options)
        return await self._generation.whole(
            request, asked, lambda choices: answers.generate_answer(head, choices, asked.n, style)
        )

    async def completions(self, request: Request) -> Response:
        """`/v1/completions`: prompts of text or token ids, answers of both."""
        body = await self._read(request, CompletionBody)
        if body.echo and body.stream:
            raise bad("echo", True, "comes with whole answers alone: leave out stream")
        nothing = bool(body.echo) and body.max_tokens == 0
        if nothing:  # as in vLLM, a token is generated, and not shown
            body.max_tokens = 1
        of_prompt = body.logprobs if body.echo and body.prompt_logprobs is None else body.prompt_logprobs
        sampling, n = body.sampling(self._settings.logprobs), body.group_size()
        names = "logprobs", "prompt_logprobs"
        sampling = alternatives(sampling, body.logprobs, of_prompt, names, stream=bool(body.stream))
        prompts = await self._prompt_ids(request, body)
        asked = Asked(prompts, n, sampling, body, adapter=self._models.check(body.model))
        self._bound(asked, "logprobs")
        style = replace(
            self._style(body, shown=body.logprobs is not None), tops=body.logprobs or 0, echo=bool(body.echo),
            prompt_tops=of_prompt is not None,
        )  # fmt: skip
        head = self._head("id", f"cmpl-{secrets.token_hex(16)}")
        if body.stream:
            return await self._streamed(request, asked, StreamedCompletion, head, style, body.stream_options)

        def completed(choices: list[Choice]) -> Json:
            if body.echo:
                given = body.prompts()
                choices = [
                    self._echoed(choice, given[index // n], body, nothing=nothing)
                    for index, choice in enumerate(choices)
                ]
            return answers.completion_answer(head, choices, n, style)

        return await self._generation.whole(request, asked, completed)

    def _echoed(
        self, choice: Choice, given: str | list[int], body: CompletionBody, *, nothing: bool
    ) -> Choice:
        """Return a choice with its prompt's text, as it was `given` if so, and with `nothing` else."""
        text = given if isinstance(given, str) else self._text.decode(given)
        if body.return_token_ids:
            text = ""
        choice = replace(choice, prompt_text=text)
        if nothing:
            tops = None if choice.tops is None else choice.tops[:0]
            choice = replace(choice, text="", token_ids=[], logprobs=[], tops=tops)
        return choice

    def _bound(self, asked: Asked, name: str) -> None:
        """Refuse what would have so many alternatives that to write them takes long."""
        sampling, longest = asked.sampling, self._max_model_len() or 2**31
        made = len(asked.prompts) * asked.n * min(sampling.max_tokens, longest)
        found = 0 if sampling.top_logprobs is None else made * (1 + sampling.top_logprobs)
        if sampling.prompt_logprobs is not None:
            found += asked.n * sum(map(len, asked.prompts)) * (1 + sampling.prompt_logprobs)
        if found > MAX_SHOWN:
            raise bad(name, f"{found} logprobs", f"have at most {MAX_SHOWN} in an answer")

    async def chat(self, request: Request) -> Response:
        """`/v1/chat/completions`: messages in, a message out."""
        body = await self._read(request, ChatBody)
        if body.max_completion_tokens is not None:
            body.max_tokens = body.max_completion_tokens
        (sampling, calls_by), n = self._chosen(body), body.group_size()
        top = body.top_logprobs or 0
        if top and not body.logprobs:
            raise bad("top_logprobs", top, "needs logprobs: true")
        asks, names = None if top == 1 else top, ("top_logprobs", "prompt_logprobs")
        sampling = alternatives(sampling, asks, body.prompt_logprobs, names, stream=bool(body.stream))
        prompt, images = await self._chat_prompt(request, body)
        adapter = self._models.check(body.model)
        asked = Asked([prompt], n, sampling, body, adapter=adapter, converses=True, images=images)
        style = replace(
            self._style(body, shown=bool(body.logprobs)), tops=top,
            prompt_tops=body.prompt_logprobs is not None,
            images=self._said_of(images),
        )  # fmt: skip
        self._bound(asked, "top_logprobs")
        head = self._head("id", f"chatcmpl-{secrets.token_hex(16)}")
        if body.stream:
            kind = partial(StreamedChat, calls_by=calls_by)
            return await self._streamed(request, asked, kind, head, style, body.stream_options)
        return await self._generation.whole(
            request, asked, lambda choices: answers.chat_answer(head, choices, n, style, calls_by)
        )

    async def responses(self, request: Request) -> Response:
        """`/v1/responses`: the same as a chat, in OpenAI's later schema; nothing is kept."""
        body = await self._read(request, ResponsesBody)
        chat = body.chat()
        sampling, calls_by = self._chosen(chat)
        prompt, images = await self._chat_prompt(request, chat)
        adapter = self._models.check(body.model)
        asked = Asked([prompt], 1, sampling, chat, adapter=adapter, converses=True, images=images)
        name = f"resp_{secrets.token_hex(16)}"
        head = response_head(name, self._models.name, int(time.time()), body, chat)
        if body.stream:
            kind = partial(StreamedResponse, calls_by=calls_by)
            return await self._streamed(request, asked, kind, head, Style(), None)
        return await self._generation.whole(
            request, asked, lambda choices: response_answer(head, choices[0], calls_by)
        )

    async def finish_session(self, request: Request) -> Response:
        """`/finish_session?session_id=`: SkyRL's client ends a trajectory; nothing awaits its next turn."""
        session = request.query_params.get("session_id", "")
        if not session:
            raise bad("session_id", session, "give the X-Session-ID that has ended")
        return answer({"status": "ok"})

    async def _streamed(
        self,
        request: Request,
        asked: Asked,
        kind: Callable[..., StreamedAnswer],
        head: Json,
        style: Style,
        options: StreamOptions | None,
    ) -> Response:
        """Answer once there are tokens: until then an error has its own status."""
        streamed = kind(head, asked.prompts, asked.n, style, self._generation.new_text(asked))
        include_usage = bool(options and options.include_usage)
        parts = self._generation.parts(request, asked, streamed, include_usage=include_usage)
        return EventStream(request, await unless_gone(request, anext(parts)), parts)

    async def _prompt_ids(self, request: Request, body: CompletionBody) -> list[list[int]]:
        given: list[Any] = body.prompts()
        if isinstance(given[0], str):
            special = body.add_special_tokens is not False
            given = await self._encoded(request, given, special=special)
        for position, ids in enumerate(given):
            self._text.check(ids, f"prompt[{position}]")
            self._images.check_text(ids, f"prompt[{position}]")
        return given

    async def _encoded(self, request: Request, texts: list[str], *, special: bool) -> list[list[int]]:
        long = sum(map(len, texts)) > SHORT
        ids: list[list[int]] = await self._work(request, "prompt", "encode", texts, special, long=long)
        return ids

    async def _chat_prompt(
        self, request: Request, body: ChatBody | TokenizeBody
    ) -> tuple[list[int], list[Placed]]:
        """Return a chat's token ids and images. Raises `HttpError`, `ClientDisconnect`."""
        messages, files = await self._on_thread("messages", plain_messages, body.messages or [])
        chat = body if isinstance(body, ChatBody) else None
        options: dict[str, Any] = {
            "tools": body.tools,
            "template": body.chat_template,
            "arguments": chat.template_arguments() if chat else body.chat_template_kwargs,
            "documents": chat.documents if chat else None,
            "generation_prompt": body.add_generation_prompt is not False,
        }
        special = bool(body.add_special_tokens)
        rest = request.state.body_bytes - sum(4 * len(file.data) // 3 for file in files)
        long = rest > SHORT or body.chat_template is not None
        ids: list[int] = await self._work(request, "messages", "chat", messages, options, special, long=long)
        self._text.check(ids, "messages")
        if not files:
            self._images.check_text(ids, "messages")
            return ids, []
        return await self._job(request, self._images.place(ids, files))

    async def _work(self, request: Request, field: str, *work: Any, long: bool) -> Any:  # noqa: ANN401
        """Return what `text_work` returns: of what the request made `long` by another process."""
        if long:
            return await self._job(request, self._jobs.run(field, *work))
        return await self._on_thread(field, text_work, self._text, *work)

    async def _job(self, request: Request, work: Coroutine[Any, Any, T]) -> T:
        """Return what work in other processes returns, unless the client leaves, or in vain."""
        seconds = self._settings.request_seconds
        try:
            async with asyncio.timeout(seconds):
                return await unless_gone(request, work)
        except TimeoutError as error:
            late = f"texts and images were not read within {seconds:g} s (gateway.request_seconds)"
            raise HttpError(504, late) from error

    def _said_of(self, images: Sequence[Placed]) -> Json:
        """Return what a trainer compares with its own processing: image names, and what made the tensors."""
        if not images:
            return {}
        places = [{"name": e.image.name, "offset": e.offset, "length": e.length} for e in images]
        return {"images": places, "processed_by": self._images.made_by}

    def _chosen(self, body: ChatBody) -> tuple[SamplingParams, CallReader | None]:
        """Return a chat's sampling, which may demand calls of tools, and how calls are read."""
        sampling, choice = body.sampling(self._settings.logprobs), body.tool_choice
        several = body.parallel_tool_calls is not False
        reader, schema = calls_of(choice, body.tools or [], self._settings.tool_parser, several=several)
        if schema is None:
            return sampling, reader
        if sampling.structured_outputs is not None:
            raise bad("tool_choice", choice, "give it or what the text must be, not both")
        return structs.replace(sampling, structured_outputs=json_constraint(schema, "tools")), reader

    def _style(self, body: TextFields, *, shown: bool) -> Style:
        texts = None if body.return_tokens_as_token_ids else self._text.tokens
        return Style(logprobs=shown, token_ids=bool(body.return_token_ids), token_texts=texts)

    def _head(self, key: str, name: str) -> Json:
        return {key: name, "model": self._models.name, "created": int(time.time())}

    # --- models, tokens and text ---------------------------------------------------------

    async def models(self, request: Request) -> Response:
        """`/v1/models`."""
        models, adapter = self._models, self._models.adapter
        shown: list[tuple[str, str, str | None]] = [(models.name, models.path, None)]
        if adapter is not None:
            shown.append((adapter.name, adapter.path, models.name))
        cards: list[Json] = [
            {
                "id": name, "object": "model", "created": self._started, "owned_by": "seer", "root": root,
                "parent": parent, "max_model_len": self._max_model_len(), "permission": [],
            }
            for name, root, parent in shown
        ]  # fmt: skip
        return answer({"object": "list", "data": cards})

    async def health(self, request: Request) -> Response:
        """`/health`: 200 if generation is possible, else 503 that says why not."""
        self._buffer.capacities()
        return Response()

    async def version(self, request: Request) -> Response:
        """`/version`: Seer's."""
        return answer({"version": __version__})

    async def tokenize(self, request: Request) -> Response:
        """`/tokenize`: token ids of a text or a chat."""
        body = await self._read(request, TokenizeBody)
        if (body.prompt is None) == (body.messages is None):
            raise bad("prompt", body.prompt, "give either prompt or messages")
        if body.prompt is None:
            ids, _ = await self._chat_prompt(request, body)
        else:
            special = body.add_special_tokens is not False
            [ids] = await self._encoded(request, [body.prompt], special=special)
        texts = None
        if body.return_token_strs:
            long = len(ids) > SHORT_TOKENS
            texts = await self._work(request, "return_token_strs", "tokens", ids, long=long)
        shown = {"count": len(ids), "max_model_len": self._max_model_len(), "tokens": ids}
        return answer({**shown, "token_strs": texts})

    async def detokenize(self, request: Request) -> Response:
        """`/detokenize`: the text of token ids."""
        body = await self._read(request, DetokenizeBody)
        if body.tokens:
            self._text.check(body.tokens, "tokens")
        long = len(body.tokens) > SHORT_TOKENS
        return answer({"prompt": await self._work(request, "tokens", "decode", body.tokens, long=long)})

    # --- shared --------------------------------------------------------------------------

    async def _read(self, request: Request, kind: type[B]) -> B:
        settings = self._settings
        given = await body_of(request, settings.max_body_bytes, settings.client_seconds)
        body = read_body(kind, given)
        request.state.body_bytes = len(given)
        self._models.check(getattr(body, "model", None))
        return body

    async def _on_thread(self, field: str, work: Callable[..., T], *arguments: object) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)
        except (ValueError, TypeError, LookupError, OverflowError, RecursionError) as error:
            raise not_taken(field, error) from error

    def _max_model_len(self) -> int | None:
        return self._buffer.max_model_len
