"""Answers of `/v1/responses`, whole and as events, in OpenAI's schema. Pure.

Invariants:
- the events' last has the whole answer, which is what a request without a stream gets, but for its names;
- every event has the next number, and every item is opened, told and closed in order;
- text is sent as it is settled; a call once it is complete.
"""

from __future__ import annotations

import secrets
from functools import cached_property

import msgspec

from seer.gateway.answers import Choice, Json
from seer.gateway.request_bodies import ChatBody
from seer.gateway.responses_body import ResponsesBody
from seer.gateway.stream_answers import Sent, StreamedAnswer
from seer.gateway.tools import CallReader


def response_head(name: str, model: str, created: int, body: ResponsesBody, chat: ChatBody) -> Json:
    """Return what a response has before it is generated: its name, and what was asked for."""
    return {
        "id": name, "object": "response", "created_at": created, "model": model, "status": "in_progress",
        "background": False, "error": None, "incomplete_details": None, "instructions": body.instructions,
        "max_output_tokens": chat.max_tokens, "metadata": body.metadata or {}, "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False, "previous_response_id": None,
        "store": False, "temperature": 1.0 if chat.temperature is None else chat.temperature,
        "text": body.text or {"format": {"type": "text"}}, "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [], "top_p": 1.0 if chat.top_p is None else chat.top_p,
        "truncation": "disabled", "usage": None,
    }  # fmt: skip


def response_answer(head: Json, choice: Choice, calls_by: CallReader | None = None) -> Json:
    """Return the whole answer, with calls that `calls_by` reads from the text."""
    content, calls = calls_by.read(choice.text) if calls_by else (choice.text, [])
    output = [] if calls and not content else [_message(_new("msg"), content or "", choice)]
    return _finished(head, [*output, *map(_call, calls)], choice, len(choice.token_ids))


def _finished(head: Json, output: list[Json], choice: Choice, tokens: int) -> Json:
    prompt = len(choice.prompt_token_ids)
    cut = _cut(choice)
    return {
        **head,
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": output,
        "usage": {
            "input_tokens": prompt,
            # What engines had cached does not reach the gateway; clients insist on the counts.
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + tokens,
        },
        "weight_version": choice.version,
    }


def _cut(choice: Choice) -> bool:
    return choice.finish_reason == "length"


def _new(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(16)}"


def _message(name: str, text: str, choice: Choice) -> Json:
    status = "incomplete" if _cut(choice) else "completed"
    return {"id": name, "type": "message", "role": "assistant", "status": status, "content": [_part(text)]}


def _part(text: str) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _call(call: Json) -> Json:
    item = {"id": _new("fc"), "type": "function_call", "status": "completed", "call_id": call["id"]}
    return {**item, **call["function"]}


class StreamedResponse(StreamedAnswer):
    """The events of a response."""

    _number = 0

    @cached_property
    def _message(self) -> str:
        return _new("msg")

    @cached_property
    def _said(self) -> list[str]:
        return []

    def end(self, *, include_usage: bool) -> bytes:
        """Return nothing: the last part of the one choice ends the events."""
        return b""

    def _event(self, kind: str, **fields: object) -> bytes:
        number, self._number = self._number, self._number + 1
        told = {"type": kind, "sequence_number": number, **fields}
        return b"event: " + kind.encode() + b"\ndata: " + msgspec.json.encode(told) + b"\n\n"

    def _parts(self, index: int, sent: Sent, piece: Choice) -> bytes:
        first = b"" if self._begun else self._begin()
        self._begun = True
        sent.token_ids += piece.token_ids
        if piece.finish_reason is None:
            return first + self._told(sent.content(piece.text))
        text, calls = sent.rest(piece.text)
        return first + self._told(text) + self._closed(calls, piece, len(sent.token_ids))

    def _begin(self) -> bytes:
        created = self._event("response.created", response=self._head)
        return created + self._event("response.in_progress", response=self._head)

    def _told(self, text: str) -> bytes:
        """Return the events of the message's next text, none for no text."""
        if not text:
            return b""
        first = b"" if self._said else self._opened()
        self._said.append(text)
        return first + self._event("response.output_text.delta", **self._place, delta=text, logprobs=[])

    @property
    def _place(self) -> Json:
        return {"item_id": self._message, "output_index": 0, "content_index": 0}

    def _opened(self) -> bytes:
        item = {"id": self._message, "type": "message", "role": "assistant", "status": "in_progress"}
        added = self._event("response.output_item.added", output_index=0, item={**item, "content": []})
        return added + self._event("response.content_part.added", **self._place, part=_part(""))

    def _closed(self, calls: list[Json], last: Choice, tokens: int) -> bytes:
        """Return the events that end the message, tell the calls, and end the response."""
        told, output = b"", []
        if self._said or not calls:
            told += b"" if self._said else self._opened()
            text = "".join(self._said)
            output.append(_message(self._message, text, last))
            told += self._event("response.output_text.done", **self._place, text=text, logprobs=[])
            told += self._event("response.content_part.done", **self._place, part=_part(text))
            told += self._event("response.output_item.done", output_index=0, item=output[0])
        for item in map(_call, calls):
            place = {"item_id": item["id"], "output_index": len(output)}
            arguments, name = item["arguments"], item["name"]
            added = {**item, "arguments": "", "status": "in_progress"}
            told += self._event("response.output_item.added", output_index=len(output), item=added)
            told += self._event("response.function_call_arguments.delta", **place, delta=arguments)
            kind = "response.function_call_arguments.done"
            told += self._event(kind, **place, arguments=arguments, name=name)
            told += self._event("response.output_item.done", output_index=len(output), item=item)
            output.append(item)
        whole = _finished(self._head, output, last, tokens)
        return told + self._event(f"response.{whole['status']}", response=whole)
