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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from seer.common.beside import TopLogprobs
from seer.gateway.tools import CallReader

Json = dict[str, Any]
LEAST = -9999.0
"""vLLM's logprob in place of minus infinity, which JSON has not."""

Experts = npt.NDArray[Any]
"""`Response.routed_experts`."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One response, or the next piece of one. `logprobs` has one entry for each of `token_ids`.

    `stop_reason`: the stop string or stop token id that ended it; None: end of sequence, or the limit.
    `tops` and `prompt_tops`: alternatives of its tokens, and of the prompt's. `prompt_text` stands before
    `text`. Pieces but the last have neither `finish_reason` nor `weight_version`: that is known at the end.
    """

    prompt_token_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    text: str
    finish_reason: str | None
    stop_reason: int | str | None
    weight_version: int | None
    routed_experts: Experts | None = None
    tops: TopLogprobs | None = None
    prompt_tops: TopLogprobs | None = None
    prompt_text: str = ""

    @property
    def version(self) -> str | None:
        """The weight version as answers have it."""
        return None if self.weight_version is None else str(self.weight_version)


@dataclass(frozen=True, slots=True)
class Style:
    """What of a choice is shown. `token_texts` gives each token's own text; None: `token_id:7`.

    `tops`: so many of each token's alternatives, its own logprob first. `prompt_tops`: those of the prompt.
    `echo`: the prompt is a part of text and logprobs. `experts` gives what is shown of routed experts;
    `images`: what is said of the prompt's images, once.
    """

    logprobs: bool = False
    token_ids: bool = False
    tops: int = 0
    prompt_tops: bool = False
    echo: bool = False
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
    rest: Json = {"prompt_logprobs": _prompt_logprobs(choices[0], style), "kv_transfer_params": None}
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
        "logprobs": {"content": _id_logprobs(choice, style)} if style.logprobs else None,
        "routed_experts": style.shown_experts(choice),
        "weight_versions": None if choice.version is None else versions,
    }


def _id_logprobs(choice: Choice, style: Style) -> list[Json]:
    content = []
    for place in _places(choice.token_ids, choice.logprobs, choice.tops):
        # vLLM 0.32 writes `token_id`, earlier versions `token`, which some clients insist on.
        entries = [
            {"token_id": token, "token": f"token_id:{token}", "logprob": logprob, "rank": rank}
            for token, (logprob, rank) in place.items()
        ]
        content.append({**entries[0], "top_logprobs": entries[: style.tops]})
    return content


def _places(
    token_ids: Sequence[int], logprobs: Sequence[float], tops: TopLogprobs | None
) -> Iterator[dict[int, tuple[float, int | None]]]:
    """Yield the logprob and the rank of each token and of its alternatives, by id, as vLLM orders them."""
    if tops is None:
        for token, logprob in zip(token_ids, logprobs, strict=True):
            yield {token: (logprob, None)}
        return
    columns = tops.ranks.tolist(), tops.top_ids.tolist(), tops.top_logprobs.tolist()
    for token, logprob, rank, ids, values in zip(token_ids, logprobs, *columns, strict=True):
        found: dict[int, tuple[float, int | None]] = {token: (max(logprob, LEAST), rank)}
        for place, (other, value) in enumerate(zip(ids, values, strict=True), 1):
            found.setdefault(other, (max(value, LEAST), place))
        yield found


def _prompt_logprobs(choice: Choice, style: Style) -> list[Json | None] | None:
    """Return logprobs of the prompt's tokens as vLLM does: the first token has none."""
    if not style.prompt_tops:
        return None
    found: list[Json | None] = [None]
    tops, tokens = choice.prompt_tops, choice.prompt_token_ids[1:]
    for place in _places(tokens, [] if tops is None else tops.logprobs.tolist(), tops):
        texts = style.texts(list(place)) if style.token_texts else [None] * len(place)
        found.append(
            {
                str(token): {"logprob": logprob, "rank": rank, "decoded_token": text}
                for text, (token, (logprob, rank)) in zip(texts, place.items(), strict=True)
            }
        )
    return found


def completion_answer(head: Json, choices: Sequence[Choice], n: int, style: Style) -> Json:
    """Return the answer of `/v1/completions`; `head` has id, model and created."""
    shown = [_written(completion_choice(index, choice, style)) for index, choice in enumerate(choices)]
    return {**head, "object": "text_completion", "choices": shown, "usage": usage(choices, n)}


def completion_choice(index: int, choice: Choice, style: Style, offset: int = 0) -> Json:
    """Return a choice of `/v1/completions`, or a part of one; `offset`: of its first token, in characters."""
    return {
        "index": index,
        "text": choice.prompt_text + choice.text,
        "logprobs": _completion_logprobs(choice, style, offset) if style.logprobs else None,
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
        "token_ids": choice.token_ids if style.token_ids else None,
        "prompt_token_ids": choice.prompt_token_ids if style.token_ids else None,
        "prompt_logprobs": _prompt_logprobs(choice, style),
        "weight_version": choice.version,
    }


def _completion_logprobs(choice: Choice, style: Style, end: int) -> Json:
    ids, logprobs = choice.token_ids, list[float | None](choice.logprobs)
    top: list[dict[str, float] | None] = [
        _texts_of(place, style) for place in _places(ids, choice.logprobs, choice.tops)
    ]
    if style.echo:
        prompt, tops = choice.prompt_token_ids, choice.prompt_tops
        own = [] if tops is None else tops.logprobs.tolist()
        ids, logprobs = [*prompt, *ids], [None, *(max(each, LEAST) for each in own), *logprobs]
        top = [None, *(_texts_of(place, style) for place in _places(prompt[1:], own, tops)), *top]
    tokens, offsets = style.texts(ids), []
    for token in tokens:
        offsets.append(end)
        end += len(token)
    shown = {"tokens": tokens, "token_logprobs": logprobs}
    return {**shown, "top_logprobs": top, "text_offset": offsets}


def _texts_of(place: dict[int, tuple[float, int | None]], style: Style) -> dict[str, float]:
    texts = style.texts(list(place)[: 1 + style.tops])
    return {text: logprob for text, (logprob, _) in zip(texts, place.values(), strict=False)}


def chat_answer(
    head: Json, choices: Sequence[Choice], n: int, style: Style, calls_by: CallReader | None = None
) -> Json:
    """Return the answer of `/v1/chat/completions`, with calls that `calls_by` reads from the text."""
    shown = []
    for index, choice in enumerate(choices):
        content, calls = calls_by.read(choice.text) if calls_by else (choice.text, [])
        message: Json = {"role": "assistant", "content": content, "refusal": None, "reasoning": None}
        if calls:
            message["tool_calls"] = calls
        shown.append(_written(chat_choice(index, {"message": message}, choice, style, called=bool(calls))))
    prompt = choices[0].prompt_token_ids if style.token_ids else None
    rest: Json = {"usage": usage(choices, n), "prompt_token_ids": prompt}
    rest["prompt_logprobs"] = _prompt_logprobs(choices[0], style)
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
    for place in _places(choice.token_ids, choice.logprobs, choice.tops):
        texts = style.texts(list(place)[: max(1, style.tops)])
        entries = [
            {"token": text, "logprob": logprob, "bytes": list(text.encode())}
            for text, (logprob, _) in zip(texts, place.values(), strict=False)
        ]
        content.append({**entries[0], "top_logprobs": entries[: style.tops]})
    return content
