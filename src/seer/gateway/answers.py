"""Whole answers in vLLM's schemas. Pure.

Invariants:
- choices are in the order of the prompts, and of each prompt's responses; `index` runs on;
- every choice has at least one token, and names the one weight version that generated all of it;
- of an answer's choices, one at a time is more than JSON: the objects of all would be millions, through which
  the garbage collector would go again and again.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from seer.gateway.tools import hermes_calls

Json = dict[str, Any]
Experts = npt.NDArray[Any]
"""`Response.routed_experts`."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One response, or the next piece of one. `logprobs` has one entry for each of `token_ids`.

    `stop_reason`: the stop string or stop token id that ended it; None: end of sequence, or the limit.
    Pieces but the last have neither `finish_reason` nor `weight_version`: that is known at the end.
    """

    prompt_token_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    text: str
    finish_reason: str | None
    stop_reason: int | str | None
    weight_version: int | None
    routed_experts: Experts | None = None

    @property
    def version(self) -> str | None:
        """The weight version as answers have it."""
        return None if self.weight_version is None else str(self.weight_version)


@dataclass(frozen=True, slots=True)
class Style:
    """What of a choice is shown. `token_texts` gives each token's own text; None: `token_id:7`.

    `experts` gives what is shown of routed experts; `images`: what is said of the prompt's images, once.
    """

    logprobs: bool = False
    token_ids: bool = False
    top_logprobs: bool = False
    token_texts: Callable[[Sequence[int]], list[str]] | None = None
    experts: Callable[[Experts], object] | None = None
    images: Json = field(default_factory=dict)

    def texts(self, token_ids: Sequence[int]) -> list[str]:
        """Return how each token is written in logprobs."""
        return _id_texts(token_ids) if self.token_texts is None else self.token_texts(token_ids)

    def shown_experts(self, choice: Choice) -> object:
        """Return what is shown of the experts that a choice's tokens went to; None: nothing."""
        found = choice.routed_experts
        return self.experts(found) if found is not None and self.experts is not None else None


def base64_npy(array: Experts) -> str:
    """Return the text of an array as vLLM has it (`utils/serial_utils.py`)."""
    with io.BytesIO() as file:
        np.save(file, array, allow_pickle=False)
        return base64.b64encode(file.getbuffer()).decode()


def _id_texts(token_ids: Sequence[int]) -> list[str]:
    return [f"token_id:{token}" for token in token_ids]


def _written(choice: Json) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(choice))


def usage(choices: Sequence[Choice], n: int) -> Json:
    """Return the counts of tokens; each prompt counts once for its n choices."""
    prompts = sum(len(choice.prompt_token_ids) for choice in choices[::n])
    completions = sum(len(choice.token_ids) for choice in choices)
    return {"prompt_tokens": prompts, "completion_tokens": completions, "total_tokens": prompts + completions}


def generate_answer(head: Json, choices: Sequence[Choice], n: int, style: Style) -> Json:
    """Return the answer of `/inference/v1/generate`; `head` has request_id, model and created."""
    shown = [_written(generate_choice(index, choice, style)) for index, choice in enumerate(choices)]
    rest: Json = {"prompt_logprobs": None, "kv_transfer_params": None}
    if style.token_ids:
        rest["prompt_token_ids"] = choices[0].prompt_token_ids
    return {**head, "output_mode": "tokens", "choices": shown, "usage": usage(choices, n), **rest}


def generate_choice(index: int, choice: Choice, style: Style) -> Json:
    """Return a choice of `/inference/v1/generate`, or a part of one."""
    versions = [{"version": choice.version, "start": 0, "end": len(choice.token_ids)}]
    return {
        "index": index,
        "token_ids": choice.token_ids,
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
        "logprobs": {"content": _id_logprobs(choice)} if style.logprobs else None,
        "routed_experts": style.shown_experts(choice),
        "weight_versions": None if choice.version is None else versions,
    }


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
    shown = [_written(completion_choice(index, choice, style)) for index, choice in enumerate(choices)]
    return {**head, "object": "text_completion", "choices": shown, "usage": usage(choices, n)}


def completion_choice(index: int, choice: Choice, style: Style, offset: int = 0) -> Json:
    """Return a choice of `/v1/completions`, or a part of one; `offset`: of its first token, in characters."""
    return {
        "index": index,
        "text": choice.text,
        "logprobs": _completion_logprobs(choice, style, offset) if style.logprobs else None,
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
        "token_ids": choice.token_ids if style.token_ids else None,
        "prompt_token_ids": choice.prompt_token_ids if style.token_ids else None,
        "prompt_logprobs": None,
        "weight_version": choice.version,
    }


def _completion_logprobs(choice: Choice, style: Style, end: int) -> Json:
    tokens = style.texts(choice.token_ids)
    offsets = []
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
        message: Json = {"role": "assistant", "content": content, "refusal": None, "reasoning": None}
        if calls:
            message["tool_calls"] = calls
        shown.append(_written(chat_choice(index, {"message": message}, choice, style, called=bool(calls))))
    prompt = choices[0].prompt_token_ids if style.token_ids else None
    rest = {"usage": usage(choices, n), "prompt_token_ids": prompt, "prompt_logprobs": None}
    return {**head, "object": "chat.completion", "choices": shown, **rest, **style.images}


def chat_choice(index: int, said: Json, choice: Choice, style: Style, *, called: bool) -> Json:
    """Return a choice of `/v1/chat/completions`, or a part of one; `said`: its message, or its delta."""
    return {
        "index": index,
        **said,
        "logprobs": {"content": _chat_logprobs(choice, style)} if style.logprobs else None,
        "finish_reason": "tool_calls" if called else choice.finish_reason,
        "stop_reason": choice.stop_reason,
        "token_ids": choice.token_ids if style.token_ids else None,
        "weight_version": choice.version,
    }


def _chat_logprobs(choice: Choice, style: Style) -> list[Json]:
    content = []
    for token, logprob in zip(style.texts(choice.token_ids), choice.logprobs, strict=True):
        entry = {"token": token, "logprob": logprob, "bytes": list(token.encode())}
        content.append({**entry, "top_logprobs": [entry] if style.top_logprobs else []})
    return content
