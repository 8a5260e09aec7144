"""Answers and tool calls: the lists in `seer.gateway.answers` and `seer.gateway.tools`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seer.gateway import answers
from seer.gateway.answers import Choice, Style
from seer.gateway.errors import HttpError
from seer.gateway.tools import HERMES, hermes_calls

HEAD = {"id": "x", "model": "m", "created": 1}


def whole(kind: Callable[..., answers.Json], *given: Any, **named: Any) -> answers.Json:
    """An answer as clients read it."""
    found: answers.Json = msgspec.json.decode(msgspec.json.encode(kind(*given, **named)))
    return found


def choice(*token_ids: int, text: str = "t", prompt: tuple[int, ...] = (1, 2), version: int = 7) -> Choice:
    logprobs = [-token / 8 for token in token_ids]
    return Choice([*prompt], [*token_ids], logprobs, text, "stop", None, version)


PAIR = [choice(3, 4), choice(5)]
TWO_PROMPTS = [*PAIR, choice(6, prompt=(9,)), choice(7, prompt=(9,))]


def test_generate() -> None:
    answer = whole(answers.generate_answer, {"request_id": "r"}, PAIR, 2, Style(logprobs=True))
    assert answer["request_id"] == "r"
    assert answer["output_mode"] == "tokens"
    assert [each["index"] for each in answer["choices"]] == [0, 1]
    first = answer["choices"][0]
    assert first["token_ids"] == [3, 4]
    assert first["weight_versions"] == [{"version": "7", "start": 0, "end": 2}]
    assert first["logprobs"]["content"][1] == {
        "token_id": 4, "token": "token_id:4", "logprob": -0.5, "rank": None, "top_logprobs": [],
    }  # fmt: skip
    assert answer["usage"] == {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}
    assert whole(answers.generate_answer, {}, PAIR, 2, Style())["choices"][0]["logprobs"] is None


def test_completions_are_prompt_major_and_count_each_prompt_once() -> None:
    style = Style(logprobs=True, token_ids=True)
    answer = whole(answers.completion_answer, HEAD, TWO_PROMPTS, 2, style)
    assert [each["index"] for each in answer["choices"]] == [0, 1, 2, 3]
    assert [each["prompt_token_ids"] for each in answer["choices"]] == [[1, 2], [1, 2], [9], [9]]
    assert answer["usage"]["prompt_tokens"] == 3
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["token_id:3", "token_id:4"]
    assert logprobs["token_logprobs"] == [-0.375, -0.5]
    assert logprobs["top_logprobs"] == [{"token_id:3": -0.375}, {"token_id:4": -0.5}]
    assert logprobs["text_offset"] == [0, 10]
    assert {each["weight_version"] for each in answer["choices"]} == {"7"}


def test_tokens_are_shown_as_text_unless_ids_are_asked_for() -> None:
    style = Style(logprobs=True, token_texts=lambda ids: [f"<{token}>" for token in ids])
    answer = whole(answers.completion_answer, HEAD, PAIR, 2, style)
    assert answer["choices"][0]["logprobs"]["tokens"] == ["<3>", "<4>"]
    assert answer["choices"][0]["token_ids"] is None
    chat = whole(answers.chat_answer, HEAD, PAIR, 2, style)
    entry = chat["choices"][0]["logprobs"]["content"][0]
    assert entry == {"token": "<3>", "logprob": -0.375, "bytes": [60, 51, 62], "top_logprobs": []}


def test_chat() -> None:
    answer = whole(answers.chat_answer, HEAD, PAIR, 2, Style(token_ids=True), HERMES)
    assert answer["object"] == "chat.completion"
    assert answer["prompt_token_ids"] == [1, 2]
    message = answer["choices"][0]["message"]
    assert (message["role"], message["content"]) == ("assistant", "t")
    assert "tool_calls" not in message
    assert answer["choices"][1]["token_ids"] == [5]


def test_a_chat_with_tool_calls() -> None:
    text = 'so <tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call><tool_call>{"name": "g"}'
    answer = whole(answers.chat_answer, HEAD, [choice(3, text=text)], 1, Style(), HERMES)
    got = answer["choices"][0]
    assert got["finish_reason"] == "tool_calls"
    assert got["message"]["content"] == "so "
    called = [call["function"] for call in got["message"]["tool_calls"]]
    assert called == [{"name": "f", "arguments": '{"a": "é"}'}, {"name": "g", "arguments": "{}"}]
    plain = whole(answers.chat_answer, HEAD, [choice(3, text=text)], 1, Style())
    assert plain["choices"][0]["message"]["content"] == text


@pytest.mark.parametrize(
    "text",
    ["", "plain", "<tool_call>", "<tool_call>{}</tool_call>", '<tool_call>{"name": 1}</tool_call>',
     '<tool_call>{"name": "f"}</tool_call> <tool_call>{', "<tool_call>[1]</tool_call>"],
)  # fmt: skip
def test_without_a_well_formed_call_all_is_content(text: str) -> None:
    assert hermes_calls(text) == (text, [])


@given(st.text(), st.text(alphabet="<>tool_call/{}\"name:f, '"))
def test_any_text_has_a_reading(before: str, after: str) -> None:
    for text in (before + after, before + "<tool_call>" + after):
        content, calls = hermes_calls(text)
        assert calls or content == text


def test_errors_have_openai_s_form() -> None:
    error = HttpError(503, "away")
    assert error.body == {
        "error": {"message": "away", "type": "ServiceUnavailableError", "param": None, "code": 503}
    }
    assert int(error.headers["retry-after"]) > 0
    assert HttpError(413, "long").headers == {"connection": "close"}
    assert HttpError(504, "late").headers == {}
    assert msgspec.json.encode(HttpError(418, "x", "p").body)


@pytest.mark.parametrize(
    "call",
    [
        '{"name": "f", "arguments": {"a": "\\ud800"}}',
        '{"name": "f\\udfff"}',
        '{"name": "f", "arguments": {"a": NaN}}',
        '{"name": "f", "arguments": {"a": 1e999}}',
    ],
)
def test_a_call_that_no_answer_can_hold_is_content(call: str) -> None:
    text = f"<tool_call>{call}</tool_call>"
    assert hermes_calls(text) == (text, [])
    answer = whole(answers.chat_answer, HEAD, [choice(3, text=text)], 1, Style(), HERMES)
    assert answer["choices"][0]["message"]["content"] == text
