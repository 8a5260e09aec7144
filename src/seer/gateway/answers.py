"""Answers in vLLM's schemas, whole and as the parts of a stream. Pure.

Invariants:
- choices are in the order of the prompts, and of each prompt's responses; `index` runs on;
- every choice has at least one token, and names the one weight version that generated all of it;
- a stream has the same content as the whole answer, and ends with `[DONE]`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from seer.gateway.tools import hermes_calls

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Choice:
    """One response. `logprobs` has one entry for each of `token_ids`.

    `stop_reason`: the stop string or stop token id that ended it; None: end of sequence, or the limit.
    """

    prompt_token_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    text: str
    finish_reason: str
    stop_reason: int | str | None
    weight_version: int


@dataclass(frozen=True, slots=True)
class Style:
    """What of a choice is shown. `token_texts` gives each token's own text; None: `token_id:7`."""

    logprobs: bool = False
    token_ids: bool = False
    top_logprobs: bool = False
    token_texts: Callable[[Sequence[int]], list[str]] | None = None

    def texts(self, token_ids: Sequence[int]) -> list[str]:
        """Return how each token is written in logprobs."""
        return _id_texts(token_ids) if self.token_texts is None else self.token_texts(token_ids)


def _id_texts(token_ids: Sequence[int]) -> list[str]:
    return [f"token_id:{token}" for token in token_ids]


def usage(choices: Sequence[Choice], n: int) -> Json:
    """Return the counts of tokens; each prompt counts once for its n choices."""
    prompts = sum(len(choice.prompt_token_ids) for choice in choices[::n])
    completions = sum(len(choice.token_ids) for choice in choices)
    return {"prompt_tokens": prompts, "completion_tokens": completions, "total_tokens": prompts + completions}


def generate_answer(head: Json, choices: Sequence[Choice], n: int, style: Style) -> Json:
    """Return the answer of `/inference/v1/generate`; `head` has request_id, model and created."""
    shown = [
        {
            "index": index,
            "token_ids": choice.token_ids,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            "logprobs": {"content": _id_logprobs(choice)} if style.logprobs else None,
            "routed_experts": None,
            "weight_versions": [
                {"version": str(choice.weight_version), "start": 0, "end": len(choice.token_ids)}
            ],
        }
        for index, choice in enumerate(choices)
    ]
    rest = {"prompt_logprobs": None, "kv_transfer_params": None}
    if style.token_ids:
        rest["prompt_token_ids"] = choices[0].prompt_token_ids  # type: ignore[assignment]
    return {**head, "output_mode": "tokens", "choices": shown, "usage": usage(choices, n), **rest}


def _id_logprobs(choice: Choice) -> list[Json]:
    return [
        # vLLM 0.32 writes `token_id`, earlier versions `token`, which some clients insist on.
        {
            "token_id": token,
            "token": f"token_id:{token}",
            "logprob": logprob,
            "rank": None,
            "top_logprobs": [],
        }
        for token, logprob in zip(choice.token_ids, choice.logprobs, strict=True)
    ]


def completion_answer(head: Json, choices: Sequence[Choice], n: int, style: Style) -> Json:
    """Return the answer of `/v1/completions`; `head` has id, model and created."""
    shown = [
        {
            "index": index,
            "text": choice.text,
            "logprobs": _completion_logprobs(choice, style) if style.logprobs else None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            "token_ids": choice.token_ids if style.token_ids else None,
            "prompt_token_ids": choice.prompt_token_ids if style.token_ids else None,
            "prompt_logprobs": None,
            "weight_version": str(choice.weight_version),
        }
        for index, choice in enumerate(choices)
    ]
    return {**head, "object": "text_completion", "choices": shown, "usage": usage(choices, n)}


def _completion_logprobs(choice: Choice, style: Style) -> Json:
    tokens = style.texts(choice.token_ids)
    offsets, end = [], 0
    for token in tokens:
        offsets.append(end)
        end += len(token)
    top = [{token: logprob} for token, logprob in zip(tokens, choice.logprobs, strict=True)]
    shown = {"tokens": tokens, "token_logprobs": choice.logprobs}
    return {**shown, "top_logprobs": top, "text_offset": offsets}


def chat_answer(head: Json, choices: Sequence[Choice], n: int, style: Style, *, tools: bool) -> Json:
    """Return the answer of `/v1/chat/completions`; `tools`: tool calls are read from the text."""
    shown = []
    for index, choice in enumerate(choices):
        content, calls = hermes_calls(choice.text) if tools else (choice.text, [])
        message = {"role": "assistant", "content": content, "refusal": None, "reasoning": None}
        if calls:
            message["tool_calls"] = calls  # type: ignore[assignment]
        shown.append(
            {
                "index": index,
                "message": message,
                "logprobs": {"content": _chat_logprobs(choice, style)} if style.logprobs else None,
                "finish_reason": "tool_calls"
                if calls and choice.finish_reason == "stop"
                else choice.finish_reason,
                "stop_reason": choice.stop_reason,
                "token_ids": choice.token_ids if style.token_ids else None,
                "weight_version": str(choice.weight_version),
            }
        )
    prompt = choices[0].prompt_token_ids if style.token_ids else None
    rest = {"usage": usage(choices, n), "prompt_token_ids": prompt, "prompt_logprobs": None}
    return {**head, "object": "chat.completion", "choices": shown, **rest}


def _chat_logprobs(choice: Choice, style: Style) -> list[Json]:
    content = []
    for token, logprob in zip(style.texts(choice.token_ids), choice.logprobs, strict=True):
        entry = {"token": token, "logprob": logprob, "bytes": list(token.encode())}
        content.append({**entry, "top_logprobs": [entry] if style.top_logprobs else []})
    return content


def stream_of(answer: Json, *, include_usage: bool) -> Iterator[bytes]:
    """Yield a whole answer as server-sent events: one part per choice, since all of it is there."""
    answer = dict(answer)
    total = answer.pop("usage")
    choices = answer.pop("choices")
    if answer.get("object") == "chat.completion":
        answer["object"] = "chat.completion.chunk"
        choices = [_delta(choice) for choice in choices]
    for choice in choices:
        yield _event({**answer, "choices": [choice]})
        answer.pop("prompt_token_ids", None)  # of a chat: once, in the first part
    if include_usage:
        yield _event({**answer, "choices": [], "usage": total})
    yield b"data: [DONE]\n\n"


def _delta(choice: Json) -> Json:
    choice = dict(choice)
    message = choice.pop("message")
    delta = {"role": message["role"], "content": message["content"] or ""}
    if calls := message.get("tool_calls"):
        delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
    return {**choice, "delta": delta}


def _event(part: Json) -> bytes:
    return b"data: " + msgspec.json.encode(part) + b"\n\n"
