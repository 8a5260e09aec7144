"""What a body says that text must be, and the calls that it demands: constraints, or errors by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from seer.common.structured_outputs import MAX_CHARACTERS, StructuredOutputs
from seer.gateway.errors import HttpError
from seer.gateway.request_bodies import ChatBody, CompletionBody, GenerateBody, read_body
from seer.gateway.responses_body import ResponsesBody
from seer.gateway.tools import calls_of

SCHEMA = {"type": "object", "properties": {"a": {"$ref": "#/$defs/n"}}, "$defs": {"n": {"type": "integer"}}}
OBJECT = '{"type":"object"}'


def constraint(**fields: Any) -> StructuredOutputs | None:
    body = read_body(CompletionBody, json.dumps({"prompt": [1], **fields}).encode())
    return body.sampling("scaled").structured_outputs


def tool(name: str, parameters: object = None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, {"json": OBJECT}),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"a": 1}}}},
         {"json": '{"a":1}'}),
        ({"structured_outputs": {"json": {"type": "object"}}}, {"json": OBJECT}),
        ({"structured_outputs": {"json": OBJECT, "regex": None, "json_object": False}}, {"json": OBJECT}),
        ({"structured_outputs": {"json_object": True}}, {"json": OBJECT}),
        ({"structured_outputs": {"regex": "a+", "disable_any_whitespace": False}}, {"regex": "a+"}),
        ({"structured_outputs": {"choice": ["a", "b"]}}, {"choice": ("a", "b")}),
        ({"structured_outputs": {"grammar": "root ::= \"a\""}}, {"grammar": "root ::= \"a\""}),
    ],
)  # fmt: skip
def test_constraints_are_vllms(fields: dict[str, Any], expected: dict[str, Any] | None) -> None:
    found = constraint(**fields)
    assert found == (None if expected is None else StructuredOutputs(**expected))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp"),
        ({"structured_outputs": {"regex": 1}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": [1]}}, "structured_outputs.json"),
        ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
         "structured_outputs.whitespace_pattern"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"regex": "a" * (MAX_CHARACTERS + 1)}}, "structured_outputs.regex"),
        ({"structured_outputs": "a"}, "structured_outputs"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": 3}}},
         "response_format.json_schema.schema"),
        ({"response_format": {"type": "structural_tag"}}, "response_format.type"),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "response_format"),
        ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos"),
        ({"guided_json": {"type": "object"}}, "guided_json"),
    ],
)  # fmt: skip
def test_what_cannot_be_had_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(HttpError) as info:
        constraint(**fields)
    assert (info.value.status, info.value.param) == (400, param)
    assert str(info.value).startswith(f"{param} = ") or param in str(info.value)


def test_all_routes_have_them() -> None:
    of_tokens = {"token_ids": [1], "sampling_params": {"structured_outputs": {"regex": "a"}}}
    generate = read_body(GenerateBody, json.dumps(of_tokens).encode())
    sampling = generate.sampling_params.sampling("scaled", "sampling_params.")
    assert sampling.structured_outputs == StructuredOutputs(regex="a")
    chat = read_body(ChatBody, b'{"messages": [], "response_format": {"type": "json_object"}}')
    assert chat.sampling("scaled").structured_outputs == StructuredOutputs(json=OBJECT)
    shape = {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}}
    response = read_body(ResponsesBody, json.dumps({"input": "a", "text": shape}).encode())
    assert response.chat().sampling("scaled").structured_outputs == StructuredOutputs(json=OBJECT)


def test_required_calls_are_a_list_of_any_tools() -> None:
    reader, schema = calls_of("required", [tool("f", SCHEMA), tool("g")], "", several=True)
    parameters = {name: value for name, value in SCHEMA.items() if name != "$defs"}
    assert schema is not None
    assert reader is not None
    assert (schema["type"], schema["minItems"], schema["$defs"]) == ("array", 1, SCHEMA["$defs"])
    assert "maxItems" not in schema
    kinds = [kind["properties"] for kind in schema["items"]["anyOf"]]
    assert kinds == [
        {"name": {"type": "string", "enum": ["f"]}, "parameters": parameters},
        {"name": {"type": "string", "enum": ["g"]}, "parameters": {"type": "object", "properties": {}}},
    ]
    content, calls = reader.read('[{"name": "f", "parameters": {"a": 1}}, {"name": "g", "parameters": {}}]')
    assert content is None
    called = [call["function"] for call in calls]
    assert called == [{"name": "f", "arguments": '{"a": 1}'}, {"name": "g", "arguments": "{}"}]
    for cut in ("", "[", "[]", '[{"name": "f", "param', '{"name": "f"}', "[1]"):
        assert reader.read(cut) == (cut, [])
    _, one = calls_of("required", [tool("f")], "", several=False)
    assert one is not None
    assert one["maxItems"] == 1


def test_a_named_tool_is_called_once() -> None:
    choice = {"type": "function", "function": {"name": "f"}}
    reader, schema = calls_of(choice, [tool("g"), tool("f", SCHEMA)], "", several=True)
    assert reader is not None
    assert schema == SCHEMA
    content, (call,) = reader.read('{"a": 1}')
    assert content is None
    assert call["function"] == {"name": "f", "arguments": '{"a": 1}'}
    assert reader.read('{"a": ') == ('{"a": ', [])


def test_calls_that_nothing_demands_need_a_parser() -> None:
    text = '<tool_call>{"name": "f"}</tool_call>'
    for choice in (None, "auto"):
        for several in (True, False):
            reader, schema = calls_of(choice, [tool("f")], "hermes", several=several)
            assert reader is not None
            assert schema is None
            assert len(reader.read(text + text)[1]) == 1 + several
        assert calls_of(choice, [], "", several=True) == (None, None)
    assert calls_of("none", [tool("f")], "hermes", several=True) == (None, None)


@pytest.mark.parametrize(
    ("choice", "tools", "param"),
    [
        ("auto", [tool("f")], "tool_choice"),
        ("required", [], "tools"),
        ("any", [tool("f")], "tool_choice"),
        ({"type": "allowed_tools"}, [tool("f")], "tool_choice"),
        ({"type": "function", "function": {"name": "h"}}, [tool("f")], "tool_choice.function.name"),
        ({"type": "function", "function": {"name": "h"}}, [], "tool_choice.function.name"),
        ("required", [{"type": "function"}], "tools[0].function.name"),
        ("required", [tool("f"), tool("g", 3)], "tools[1].function.parameters"),
        ("required", [tool("f", SCHEMA), tool("g", {"$defs": {"n": {}}})], "tools, parameters.$defs.n"),
        ("required", [tool("f", {"$defs": 3})], "tools[0].function.parameters.$defs"),
    ],
)
def test_choices_that_cannot_be_had_are_refused_by_name(choice: Any, tools: Any, param: str) -> None:
    with pytest.raises(HttpError) as info:
        calls_of(choice, tools, "", several=True)
    assert (info.value.status, info.value.param) == (400, param)
