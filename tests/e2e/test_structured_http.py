"""Structured outputs and demanded tool calls over HTTP, with real engines and a model that knows all bytes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import torch
from gateway_clients.scripted import make_model
from gateway_system import GatewaySystem, ok, refused
from gateway_system import http as http
from tokenizers import pre_tokenizers
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM

ENGINE = ("engine.backend=vllm", "engine.kv_blocks=256", "engine.max_model_len=1024")
MESSAGES = [{"role": "user", "content": "hi"}]
COLOURS = {"type": "string", "enum": ["red", "green", "blue"]}
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"$ref": "#/$defs/colour"}, "count": {"type": "integer", "minimum": 0, "maximum": 999}},
    "required": ["colour", "count"], "additionalProperties": False, "$defs": {"colour": COLOURS},
}  # fmt: skip
PAINT = {"type": "function", "function": {"name": "paint", "parameters": SCHEMA}}
STOP = {"type": "function", "function": {"name": "stop"}}
"""Without parameters: any object, in which a random model may never come to an end."""

VOCAB = {sign: i for i, sign in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
SPACES = {str(VOCAB[sign]): -30 for sign in "\u0120\u010a\u0109\u010d"}
"""JSON may have spaces between its parts, of which a random model makes hundreds."""

LIMITS = {"max_tokens": 400, "temperature": 0.7, "seed": 3, "logit_bias": SPACES}


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewaySystem]:
    folder = tmp_path_factory.mktemp("bytes")
    make_model(folder)
    described = json.loads((folder / "config.json").read_text())
    torch.manual_seed(5)
    config = Qwen3Config(
        vocab_size=described["vocab_size"], eos_token_id=described["eos_token_id"], hidden_size=32,
        intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, head_dim=32,
        max_position_embeddings=1024, initializer_range=0.25,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)
    with GatewaySystem(*ENGINE, model=folder) as running:
        for name in ("buffer", "context", "dgds", "engine-0"):
            running.start(name)
        running.start_gateways({"gateway": ()})
        yield running


async def streamed(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    async with http.stream("POST", path, json=body | {"stream": True}) as response:
        lines = [line async for line in response.aiter_lines()]
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]


def fits(value: Any) -> bool:
    return (
        set(value) == {"colour", "count"}
        and value["colour"] in COLOURS["enum"]
        and 0 <= value["count"] <= 999
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}},
        {"structured_outputs": {"json": SCHEMA}},
    ],
)  # fmt: skip
async def test_a_chat_answers_with_what_its_schema_says(
    http: httpx.AsyncClient, fields: dict[str, Any]
) -> None:
    body = {"messages": MESSAGES, "n": 3, "logprobs": True, "return_token_ids": True, **LIMITS, **fields}
    answer = await ok(http.post("/v1/chat/completions", json=body))
    for choice in answer["choices"]:
        assert fits(json.loads(choice["message"]["content"]))
        assert choice["finish_reason"] == "stop"
        assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])
        assert all(entry["logprob"] <= 0 for entry in choice["logprobs"]["content"])
    said: dict[int, str] = {}
    for part in await streamed(http, "/v1/chat/completions", body):
        for choice in part["choices"]:
            said[choice["index"]] = said.get(choice["index"], "") + choice["delta"].get("content", "")
    assert [said[each] for each in range(3)] == [each["message"]["content"] for each in answer["choices"]]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "paint"}}])
async def test_a_tool_is_called_if_that_is_demanded(http: httpx.AsyncClient, choice: Any) -> None:
    """No parser is configured: none is needed."""
    body = {"messages": MESSAGES, "tools": [PAINT], "tool_choice": choice, "n": 2, **LIMITS}
    answer = await ok(http.post("/v1/chat/completions", json=body | {"parallel_tool_calls": False}))
    for got in answer["choices"]:
        assert got["message"]["content"] is None
        (call,) = got["message"]["tool_calls"]
        assert call["function"]["name"] == "paint"
        assert fits(json.loads(call["function"]["arguments"]))
        assert got["finish_reason"] == "tool_calls"
    parts = await streamed(http, "/v1/chat/completions", body | {"parallel_tool_calls": False})
    deltas = [each["delta"] for part in parts for each in part["choices"] if each["index"] == 0]
    assert not any(delta.get("content") for delta in deltas)
    (called,) = [call for delta in deltas for call in delta.get("tool_calls", [])]
    whole = answer["choices"][0]["message"]["tool_calls"][0]
    assert called["function"] == whole["function"]


async def test_a_demanded_call_that_is_cut_is_content(http: httpx.AsyncClient) -> None:
    body = {
        "messages": MESSAGES,
        "tools": [STOP, PAINT],
        "tool_choice": "required",
        **LIMITS,
        "max_tokens": 6,
    }
    (got,) = (await ok(http.post("/v1/chat/completions", json=body)))["choices"]
    assert got["finish_reason"] == "length"
    assert got["message"]["content"].lstrip().startswith("[")
    assert "tool_calls" not in got["message"]


async def test_responses_have_them_too(http: httpx.AsyncClient) -> None:
    shape = {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}
    body = {"input": "hi", "text": shape, "logit_bias": SPACES, "max_output_tokens": 400}
    answer = await ok(http.post("/v1/responses", json=body))
    assert fits(json.loads(answer["output"][0]["content"][0]["text"]))
    tool = {"type": "function", "name": "paint", "parameters": SCHEMA}
    body = {"input": "hi", "tools": [tool], "tool_choice": "required", "logit_bias": SPACES}
    (call, *_) = (await ok(http.post("/v1/responses", json=body)))["output"]
    assert (call["type"], call["name"]) == ("function_call", "paint")
    assert fits(json.loads(call["arguments"]))


@pytest.mark.parametrize(
    ("constraint", "wanted"),
    [({"regex": "(ab|cd){2,9}!"}, "(ab|cd){2,9}!"), ({"choice": ["yes", "no"]}, "yes|no"),
     ({"grammar": 'root ::= "x" [0-9] "y"'}, "x[0-9]y")],
)  # fmt: skip
async def test_completions_and_token_ids(http: httpx.AsyncClient, constraint: Any, wanted: str) -> None:
    """A request that only asks otherwise for its answer has the same tokens: chunks of 16 as drawn."""
    fields = {"structured_outputs": constraint, **LIMITS}
    answer = await ok(http.post("/v1/completions", json={"prompt": "a", "return_token_ids": True, **fields}))
    (choice,) = answer["choices"]
    assert re.fullmatch(wanted, choice["text"])
    body = {"token_ids": choice["prompt_token_ids"], "sampling_params": fields}
    found = await ok(http.post("/inference/v1/generate", json=body))
    assert found["choices"][0]["token_ids"] == choice["token_ids"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"grammar": "root ::= rest"}}, "structured_outputs.grammar"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "integer", "multipleOf": 3}}}},
         "structured_outputs.json"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
async def test_what_cannot_be_compiled_is_the_requests_own_fault(
    http: httpx.AsyncClient, fields: Any, param: str, stream: bool
) -> None:
    body = {"prompt": "a", "max_tokens": 9, "stream": stream, **fields}
    response = await http.post("/v1/completions", json=body)
    refused(response, 400)
    assert response.json()["error"]["param"] == param
