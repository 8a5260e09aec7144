"""Answers as streams: the list in `seer.gateway.stream_answers`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import msgspec
import pytest

from seer.common.detokenizer import Detokenizer
from seer.gateway import answers
from seer.gateway.answers import Choice, Style
from seer.gateway.errors import HttpError
from seer.gateway.stream_answers import StreamedAnswer, StreamedChat, StreamedCompletion
from seer.gateway.text_stream import TextStream
from seer.gateway.tools import HERMES

HEAD = {"id": "x", "model": "m", "created": 1}


def whole(kind: Callable[..., answers.Json], *given: Any, **named: Any) -> answers.Json:
    """An answer as clients read it."""
    found: answers.Json = msgspec.json.decode(msgspec.json.encode(kind(*given, **named)))
    return found


STYLE = Style(logprobs=True, token_ids=True, token_texts=lambda ids: [chr(token) for token in ids])
PROMPTS = [[1, 2], [9]]


def text_of(token_ids: Sequence[int]) -> str:
    return "".join(map(chr, token_ids))


def flat(lists: Iterable[list[Any]]) -> list[Any]:
    return [each for one in lists for each in one]


def choice(text: str, prompt: list[int]) -> Choice:
    ids = [ord(each) for each in text]
    return Choice(prompt, ids, [-token / 8 for token in ids], text, "stop", None, 7)


CHOICES = [choice(text, PROMPTS[i // 2]) for i, text in enumerate(("abcdef", "g", "hij", "kl"))]


def streamed(
    kind: Callable[..., StreamedAnswer],
    choices: Sequence[Choice],
    *,
    n: int = 2,
    pieces: int = 2,
    head: dict[str, Any] = HEAD,
) -> list[dict[str, Any]]:
    """The parts of a stream that has all but the last token of each choice in pieces, in turn."""
    prompts = [each.prompt_token_ids for each in choices[::n]]
    stream = kind(head, prompts, n, STYLE, lambda prompt: TextStream(Detokenizer(text_of), prompt))
    sent = b""
    for start in range(0, max(len(each.token_ids) for each in choices), pieces):
        for index, each in enumerate(choices):
            span = slice(start, min(start + pieces, len(each.token_ids) - 1))
            if each.token_ids[span]:
                sent += stream.piece(index, each.token_ids[span], each.logprobs[span])
    for index in reversed(range(len(choices))):
        sent += stream.last(index, choices[index])
    lines = (sent + stream.end(include_usage=True)).decode().split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def of(parts: Iterable[dict[str, Any]], index: int) -> list[dict[str, Any]]:
    found = [each for part in parts for each in part["choices"] if each["index"] == index]
    assert [each["finish_reason"] for each in found[:-1]] == [None] * (len(found) - 1)
    for each in found[:-1]:
        assert each.get("weight_version") is each.get("weight_versions") is each.get("stop_reason") is None
    return found


def test_completions() -> None:
    answer = whole(answers.completion_answer, HEAD, CHOICES, 2, STYLE)
    parts = streamed(StreamedCompletion, CHOICES)
    assert parts.pop() == {**HEAD, "object": "text_completion", "choices": [], "usage": answer["usage"]}
    assert all(
        {**part, "choices": 0} == {**HEAD, "object": "text_completion", "choices": 0} for part in parts
    )
    for expected in answer["choices"]:
        found = of(parts, expected["index"])
        *before, together = found
        assert [each["prompt_token_ids"] for each in found] == [
            expected["prompt_token_ids"],
            *[None] * len(before),
        ]
        together = dict(together) | {"prompt_token_ids": expected["prompt_token_ids"]}
        together["text"] = "".join(each["text"] for each in found)
        together["token_ids"] = flat(each["token_ids"] for each in found)
        together["logprobs"] = {
            name: flat(each["logprobs"][name] for each in found) for name in expected["logprobs"]
        }
        assert together == expected
    assert [each["text"] for each in of(parts, 0)] == ["ab", "cd", "e", "f"]


def test_generate() -> None:
    pair = CHOICES[:2]
    head = {"request_id": "r"}
    answer = whole(answers.generate_answer, head, pair, 2, STYLE)
    parts = streamed(StreamedAnswer, pair, head=head)
    assert parts.pop()["usage"] == answer["usage"]
    assert [part.get("prompt_token_ids") for part in parts] == [[1, 2], *[None] * (len(parts) - 1)]
    for expected in answer["choices"]:
        found = of(parts, expected["index"])
        together = dict(found[-1])
        together["token_ids"] = flat(each["token_ids"] for each in found)
        together["logprobs"] = {"content": flat(each["logprobs"]["content"] for each in found)}
        assert together == expected


def test_a_chat_begins_with_roles() -> None:
    pair = CHOICES[:2]
    answer = whole(answers.chat_answer, HEAD, pair, 2, STYLE)
    parts = streamed(StreamedChat, pair)
    assert parts.pop()["usage"] == answer["usage"]
    assert {part["object"] for part in parts} == {"chat.completion.chunk"}
    for index, part in enumerate(parts[:2]):
        role = {"role": "assistant", "content": ""}
        assert part["choices"] == [{"index": index, "delta": role, "finish_reason": None}]
        assert part["prompt_token_ids"] == [1, 2]
    for expected in answer["choices"]:
        found = of(parts[2:], expected["index"])
        assert "".join(each["delta"]["content"] for each in found) == expected["message"]["content"]
        assert flat(each["token_ids"] for each in found) == expected["token_ids"]
        content = flat(each["logprobs"]["content"] for each in found)
        assert content == expected["logprobs"]["content"]
        assert found[-1]["finish_reason"] == "stop"
        assert found[-1]["weight_version"] == "7"
        assert not any("role" in each["delta"] for each in found)


@pytest.mark.parametrize("text", ['so <tool_call>{"name": "f"}</tool_call>', "so <tool_call>{", "a<b"])
def test_tool_calls_come_at_the_end(text: str) -> None:
    answer = whole(answers.chat_answer, HEAD, [choice(text, [1])], 1, STYLE, HERMES)["choices"][0]
    found = of(streamed(partial(StreamedChat, calls_by=HERMES), [choice(text, [1])], n=1), 0)
    content = "".join(each["delta"]["content"] for each in found)
    assert content == answer["message"]["content"]
    assert not any("<tool" in each["delta"]["content"] for each in found[:-1])
    called = [call["function"] for call in found[-1]["delta"].get("tool_calls", [])]
    assert called == [call["function"] for call in answer["message"].get("tool_calls", [])]
    assert [call["index"] for call in found[-1]["delta"].get("tool_calls", [])] == [0] * len(called)
    assert found[-1]["finish_reason"] == answer["finish_reason"]


def test_other_tokens_than_those_that_were_sent_are_an_error() -> None:
    stream = StreamedAnswer(HEAD, [[1]], 1, STYLE)
    stream.piece(0, [5, 6], [0.0, 0.0])
    with pytest.raises(HttpError, match="generated anew") as info:
        stream.last(0, Choice([1], [5, 7, 8], [0.0] * 3, "", "stop", None, 7))
    assert info.value.status == 503
