"""Messages of chats: the list in `seer.gateway.messages`."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from seer.common.types import MAX_IMAGES
from seer.gateway.errors import HttpError
from seer.gateway.messages import plain_messages

A, B, C = (f"data:image/png;base64,{base64.b64encode(each).decode()}" for each in (b"a", b"b", b"c"))


def image(url: object) -> dict[str, object]:
    return {"type": "image_url", "image_url": {"url": url}}


def test_messages_become_what_templates_expect() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    parts = [{"type": "text", "text": "a"}, "b"]
    messages: list[dict[str, Any]] = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "user", "content": parts},
    ]
    plain, images = plain_messages(messages)
    assert plain[0]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}
    assert call["function"]["arguments"] == '{"a": 1}'  # type: ignore[index]
    assert plain[1]["content"] == "a\nb"
    assert images == []


def test_images_come_in_the_order_of_their_placeholders_in_tools_answers_too() -> None:
    messages = [
        {"role": "user", "content": [image(A), {"type": "text", "text": "x"}, image(B)]},
        {"role": "tool", "content": ["seen", {"type": "image_url", "image_url": C}]},
        {"role": "user", "content": "y"},
    ]
    plain, images = plain_messages(messages)
    assert [(each.field, each.data) for each in images] == [
        ("messages[0].content[0].image_url.url", b"a"),
        ("messages[0].content[2].image_url.url", b"b"),
        ("messages[1].content[1].image_url.url", b"c"),
    ]
    assert plain[0]["content"] == [{"type": "image"}, {"type": "text", "text": "x"}, {"type": "image"}]
    assert plain[1]["content"] == [{"type": "text", "text": "seen"}, {"type": "image"}]
    assert plain[2]["content"] == "y"


URL = "messages[0].content[0].image_url.url"


@pytest.mark.parametrize(
    ("message", "param", "says"),
    [
        ({"content": "a"}, "messages[0].role", ""),
        ({"role": "user", "tool_calls": [1]}, "messages[0].tool_calls", ""),
        (
            {"role": "user", "tool_calls": [{"function": {"arguments": "{"}}]},
            "messages[0].tool_calls.function.arguments",
            "is not JSON",
        ),
        ([3], "messages[0].content[0].type", "give text or image_url"),
        ([{"type": "text"}], "messages[0].content[0].type", "give text or image_url"),
        (
            [{"type": "video_url"}],
            "messages[0].content[0].type",
            "'video_url': give text or image_url: video",
        ),
        ([{"type": "input_audio"}], "messages[0].content[0].type", "audio"),
        ([{"type": "image_embeds"}], "messages[0].content[0].type", "embeddings"),
        ([{"type": "image_url"}], URL, "give a data: URI"),
        ([image(7)], URL, "give a data: URI"),
        ([image("https://example.org/a.png")], URL, "nothing is fetched"),
        ([image("http://127.0.0.1/a.png")], URL, "nothing is fetched"),
        ([image("file:///etc/passwd")], URL, "nothing is fetched"),
        ([image("data:text/plain;base64,YQ==")], URL, "'data:text/plain;base64,YQ==': give data:image/png"),
        ([image("data:image/png,YQ==")], URL, "give data:image/png;base64"),
        ([image("data:image/png;base64")], URL, "give data:image/png;base64"),
        ([image(A[:-1])], URL, "is not base64"),
        ([image(A + "!")], URL, "is not base64"),
        ([image(A + "é")], URL, "is not base64"),
        (
            [image(A)] * (MAX_IMAGES + 1),
            f"messages[0].content[{MAX_IMAGES}]",
            f"give at most {MAX_IMAGES} images",
        ),
    ],
)
def test_other_messages_are_refused_by_name(message: Any, param: str, says: str) -> None:
    given = message if isinstance(message, dict) else {"role": "user", "content": message}
    with pytest.raises(HttpError) as info:
        plain_messages([given])
    assert info.value.param == param
    assert says in str(info.value)
    assert len(str(info.value)) < 300


@pytest.mark.parametrize(
    "arguments",
    ["[" * 1000 + "]" * 1000, "[" * 100_000, '"' + "\\ud800" + '"', "NaN", "1" * 4301, "1e999", "{", "\0"],
    ids=["nested", "deep", "surrogate", "nan", "digits", "float", "open", "null"],
)
def test_arguments_of_tools_that_are_no_json_are_refused_by_their_field(arguments: str) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    with pytest.raises(HttpError, match="is not JSON") as info:
        plain_messages([{"role": "assistant", "content": None, "tool_calls": [call]}])
    assert (info.value.status, info.value.param) == (400, "messages[0].tool_calls.function.arguments")


@pytest.mark.parametrize("calls", [1, "a", {"function": {}}, [1], [{"function": "f"}]])
def test_calls_that_are_none_are_refused_by_their_field(calls: object) -> None:
    with pytest.raises(HttpError, match="with a function") as info:
        plain_messages([{"role": "assistant", "content": None, "tool_calls": calls}])
    assert (info.value.status, info.value.param) == (400, "messages[0].tool_calls")
