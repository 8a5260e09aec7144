"""`/v1/responses`: bodies as chats, answers and events; the lists in `responses_body` and `responses_answer`."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from seer.common.detokenizer import Detokenizer
from seer.gateway.answers import Choice, Style
from seer.gateway.errors import HttpError
from seer.gateway.request_bodies import read_body
from seer.gateway.responses_answer import StreamedResponse, response_answer, response_head
from seer.gateway.responses_body import ResponsesBody
from seer.gateway.text_stream import TextStream
from seer.gateway.tools import HERMES, CallReader

CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'


def body(**fields: Any) -> ResponsesBody:
    return read_body(ResponsesBody, json.dumps({"input": "hi", **fields}).encode())


def test_a_conversation_is_the_chat_that_a_chat_client_would_send() -> None:
    given = [
        {"role": "developer", "content": "d"},
        {"role": "user", "content": [{"type": "input_text", "text": "a"},
                                     {"type": "input_image", "image_url": "data:image/png;base64,AA"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b"}]},
        {"type": "reasoning", "summary": []},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "2", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "x"},
        {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "y" * 10**6}]},
        {"type": "function_call", "call_id": "3", "name": "f", "arguments": "{}"},
    ]  # fmt: skip
    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}
    chat = body(
        input=given, instructions="i", tools=[tool], tool_choice={"type": "function", "name": "f"},
        max_output_tokens=7, temperature=0.5, reasoning={"effort": "low"},
    ).chat()  # fmt: skip

    def call(name: str, f: str) -> dict[str, Any]:
        return {"id": name, "type": "function", "function": {"name": f, "arguments": "{}"}}

    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
    assert chat.messages == [
        {"role": "system", "content": "i"},
        {"role": "system", "content": "d"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, image]},
        {"role": "assistant", "content": "b", "tool_calls": [call("1", "f"), call("2", "g")]},
        {"role": "tool", "tool_call_id": "1", "content": "x"},
        {"role": "tool", "tool_call_id": "2", "content": "y" * 10**6},
        {"role": "assistant", "content": None, "tool_calls": [call("3", "f")]},
    ]
    function = {"name": "f", "parameters": {"type": "object"}, "strict": True}
    assert chat.tools == [{"type": "function", "function": function}]
    assert chat.tool_choice == {"type": "function", "function": {"name": "f"}}
    assert (chat.max_tokens, chat.temperature) == (7, 0.5)
    assert chat.template_arguments() == {"enable_thinking": True, "reasoning_effort": "low"}


def test_efforts_and_arguments_reach_the_template() -> None:
    own = {"a": 1, "enable_thinking": True}
    chat = body(input="a", reasoning={"effort": "none"}, chat_template_kwargs=own).chat()
    assert chat.template_arguments() == own | {"reasoning_effort": "none"}
    assert body(input="a", reasoning={"effort": "none"}).chat().template_arguments() == {
        "enable_thinking": False, "reasoning_effort": "none"
    }  # fmt: skip
    assert body(input="a", chat_template_kwargs=own).chat().template_arguments() == own
    assert body(input="a").chat().template_arguments() is None
    with pytest.raises(HttpError, match=r"reasoning\.effort = 'x': give one of none, minimal"):
        body(input="a", reasoning={"effort": "x"}).chat()


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"previous_response_id": "resp_1"}, "previous_response_id"), ({"background": True}, "background"),
     ({"conversation": "c"}, "conversation"), ({"truncation": "auto"}, "truncation"), ({"n": 2}, "n"),
     ({"include": ["message.output_text.logprobs"]}, "include"), ({"prompt": {"id": "p"}}, "prompt"),
     ({"input": [{"type": "item_reference", "id": "m"}]}, "input[0].type"),
     ({"input": [{"role": "tool", "content": "a"}]}, "input[0].role"),
     ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0].type"),
     ({"input": [{"type": "function_call_output", "call_id": 1, "output": "a"}]}, "input[0].call_id"),
     ({"tools": [{"type": "web_search"}]}, "tools[0].type"), ({"tools": [{"type": "function"}]}, "tools[0].name"),
     ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
     ({"text": {"format": {"type": "xml"}}}, "text.format.type")],
)  # fmt: skip
def test_what_a_gateway_without_state_cannot_do_is_refused_by_name(
    fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(HttpError) as info:
        body(**fields).chat()
    assert (info.value.status, info.value.param) == (400, param)


def events(
    text: str, finish: str, pieces: int, calls_by: CallReader
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The events of a response in pieces, and the whole answer."""
    ids = [ord(each) for each in text]
    choice = Choice([1, 2], ids, [-1.0] * len(ids), text, finish, None, 7)
    given = body(instructions="i", temperature=0.5)
    head = response_head("resp_1", "m", 1, given, given.chat())
    texts = Detokenizer(lambda found: "".join(map(chr, found)))
    stream = StreamedResponse(head, [[1, 2]], 1, Style(), lambda prompt: TextStream(texts, prompt), calls_by)
    sent = b""
    for start in range(0, len(ids) - 1, pieces):
        span = slice(start, min(start + pieces, len(ids) - 1))
        sent += stream.piece(0, ids[span], choice.logprobs[span])
    sent += stream.last(0, choice) + stream.end(include_usage=True)
    told = []
    for block in sent.decode().split("\n\n")[:-1]:
        kind, data = block.split("\n")
        told.append(json.loads(data.removeprefix("data: ")))
        assert kind == "event: " + told[-1]["type"]
    return told, msgspec.json.decode(msgspec.json.encode(response_answer(head, choice, calls_by)))


def unnamed(response: dict[str, Any]) -> dict[str, Any]:
    return response | {
        "output": [{**item, "id": "", **({"call_id": ""} if "call_id" in item else {})} for item in response["output"]]
    }  # fmt: skip


@pytest.mark.parametrize("pieces", [1, 3, 1000])
@pytest.mark.parametrize("finish", ["stop", "length"])
@pytest.mark.parametrize("text", ["ab", CALL, f"so {CALL}{CALL}", "so <tool_call>{", "x"])
def test_events_put_together_are_the_whole_answer(text: str, finish: str, pieces: int) -> None:
    told, whole = events(text, finish, pieces, HERMES)
    assert [each["sequence_number"] for each in told] == list(range(len(told)))
    assert [each["type"] for each in told[:2]] == ["response.created", "response.in_progress"]
    assert told[-1]["type"] == f"response.{whole['status']}"
    assert whole["status"] == ("completed" if finish == "stop" else "incomplete")
    assert unnamed(told[-1]["response"]) == unnamed(whole)
    said = "".join(each["delta"] for each in told if each["type"] == "response.output_text.delta")
    messages = [item for item in whole["output"] if item["type"] == "message"]
    assert [item["content"][0]["text"] for item in messages] == ([said] if messages else [])
    done = [each["item"] for each in told if each["type"] == "response.output_item.done"]
    assert done == told[-1]["response"]["output"]
    assert len([each for each in told if each["type"] == "response.output_item.added"]) == len(done)
    calls = [item["arguments"] for item in done if item["type"] == "function_call"]
    assert calls == ['{"a": 1}'] * text.count(CALL)
    assert whole["usage"]["input_tokens"] == 2
    assert whole["usage"]["output_tokens"] == len(text)
    assert whole["weight_version"] == "7"


def test_the_openai_package_reads_every_event() -> None:
    types = pytest.importorskip("openai.types.responses")
    pydantic = pytest.importorskip("pydantic")
    told, whole = events(f"so {CALL}", "stop", 2, HERMES)
    for each in told:
        pydantic.TypeAdapter(types.ResponseStreamEvent).validate_python(each)
    types.Response.model_validate(whole)
