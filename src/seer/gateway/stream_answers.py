"""Answers in vLLM's schemas as the parts of a stream (server-sent events). Pure.

Invariants:
- the parts of a choice put together are the choice of the whole answer: text, token ids, logprobs, calls;
- a choice's last part, and no other, has its finish_reason, stop_reason and weight version;
- a chat begins with the role of every choice; its tool calls come with the last part;
- tokens that were sent are never taken back: a response that has others is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from seer.common.beside import TopLogprobs
from seer.gateway.answers import Choice, Json, Style, chat_choice, completion_choice, generate_choice
from seer.gateway.errors import HttpError
from seer.gateway.text_stream import TextStream
from seer.gateway.tools import CallReader, CallStream

DONE = b"data: [DONE]\n\n"


def event(part: Json) -> bytes:
    """Return a server-sent event."""
    return b"data: " + msgspec.json.encode(part) + b"\n\n"


@dataclass(slots=True)
class Sent:
    """What was sent of a choice. `offset`: the characters of its tokens' texts; `calls` reads its calls."""

    text: TextStream | None
    calls: CallStream | None = None
    token_ids: list[int] = field(default_factory=list)
    offset: int = 0

    def content(self, text: str) -> str:
        """Return what of the text so far is content and was not sent, given its next text."""
        return self.calls.push(text) if self.calls else text

    def rest(self, text: str) -> tuple[str, list[Json]]:
        """Return the rest of the content and the calls, given the last text."""
        return self.calls.finish(text) if self.calls else (text, [])


class StreamedAnswer:
    """The answer to prompts with n choices each, of `/inference/v1/generate`; subclasses are of other routes.

    `head` is what every part has; `new_text` makes the decoder of a response to a prompt (None: no text);
    `calls_by` reads tool calls from the text (None: there are none).
    """

    def __init__(
        self,
        head: Json,
        prompts: Sequence[list[int]],
        n: int,
        style: Style,
        new_text: Callable[[list[int]], TextStream] | None = None,
        calls_by: CallReader | None = None,
    ) -> None:
        self._head = head
        self._prompts = prompts
        self._n = n
        self._style = style
        self._new_text = new_text
        self._calls_by = calls_by
        self._choices: dict[int, Sent] = {}
        self._begun = False

    def piece(
        self, index: int, token_ids: list[int], logprobs: list[float], tops: TopLogprobs | None = None
    ) -> bytes:
        """Return the parts for the next tokens of choice `index`, at least one."""
        sent = self._of(index)
        text = sent.text.push(token_ids) if sent.text else ""
        prompt = self._prompts[index // self._n]
        piece = Choice(prompt, token_ids, logprobs, text, None, None, None, tops=tops)
        return self._parts(index, sent, piece)

    def last(self, index: int, whole: Choice) -> bytes:
        """Return the last parts of choice `index`. Raises `HttpError` if others were sent than it has."""
        sent = self._of(index)
        count = len(sent.token_ids)
        if whole.token_ids[:count] != sent.token_ids:
            raise HttpError(503, "generated anew, with other tokens than those that were sent: send it again")
        text = sent.text.finish(whole.text) if sent.text else ""
        rest = replace(
            whole, token_ids=whole.token_ids[count:], logprobs=whole.logprobs[count:], text=text,
            tops=None if whole.tops is None else whole.tops[count:],
        )  # fmt: skip
        return self._parts(index, sent, rest)

    def end(self, *, include_usage: bool) -> bytes:
        """Return what ends the stream."""
        prompts = sum(map(len, self._prompts))
        tokens = sum(len(sent.token_ids) for sent in self._choices.values())
        usage = {"prompt_tokens": prompts, "completion_tokens": tokens, "total_tokens": prompts + tokens}
        return (event({**self._base(), "choices": [], "usage": usage}) if include_usage else b"") + DONE

    def _of(self, index: int) -> Sent:
        if index not in self._choices:
            prompt = self._prompts[index // self._n]
            text = self._new_text(prompt) if self._new_text else None
            self._choices[index] = Sent(text, CallStream(self._calls_by) if self._calls_by else None)
        return self._choices[index]

    def _parts(self, index: int, sent: Sent, piece: Choice) -> bytes:
        first = b"" if self._begun else self._begin()
        base = {**self._base(), **({} if self._begun else self._first_base())}
        self._begun = True
        part = event({**base, "choices": [self._choice(index, sent, piece)]})
        sent.token_ids += piece.token_ids
        return first + part

    # --- what differs between routes -------------------------------------------------------

    def _base(self) -> Json:
        return {**self._head, "output_mode": "tokens"}

    def _first_base(self) -> Json:
        """Return what the first part has beside."""
        shown = {"prompt_token_ids": self._prompts[0]} if self._style.token_ids else {}
        return {**shown, **self._style.images}

    def _begin(self) -> bytes:
        return b""

    def _choice(self, index: int, sent: Sent, piece: Choice) -> Json:
        choice = generate_choice(index, piece, self._style)
        for span in choice["weight_versions"] or []:
            span["end"] += len(sent.token_ids)
        return choice


class StreamedCompletion(StreamedAnswer):
    """Of `/v1/completions`."""

    def _base(self) -> Json:
        return {**self._head, "object": "text_completion"}

    def _first_base(self) -> Json:
        return {}

    def _choice(self, index: int, sent: Sent, piece: Choice) -> Json:
        choice = completion_choice(index, piece, self._style, sent.offset)
        if choice["logprobs"]:
            sent.offset += sum(map(len, choice["logprobs"]["tokens"]))
        if sent.token_ids:  # it had a part
            choice["prompt_token_ids"] = None
        return choice


class StreamedChat(StreamedAnswer):
    """Of `/v1/chat/completions`."""

    def _base(self) -> Json:
        return {**self._head, "object": "chat.completion.chunk"}

    def _first_base(self) -> Json:
        return {}

    def _begin(self) -> bytes:
        delta = {"role": "assistant", "content": ""}
        base = {**self._base(), **super()._first_base()}
        roles = ({"index": index, "delta": delta, "finish_reason": None} for index in range(self._n))
        return b"".join(event({**base, "choices": [role]}) for role in roles)

    def _choice(self, index: int, sent: Sent, piece: Choice) -> Json:
        if piece.finish_reason is None:
            delta: Json = {"content": sent.content(piece.text)}
            return chat_choice(index, {"delta": delta}, piece, self._style, called=False)
        content, calls = sent.rest(piece.text)
        delta = {"content": content}
        if calls:
            delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
        return chat_choice(index, {"delta": delta}, piece, self._style, called=bool(calls))
