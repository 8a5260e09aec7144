"""The gateway over real sockets, with replay engines: every route, and what goes wrong around it."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from gateway_system import ENDLESS, GatewaySystem, ok, other, refused, under_way, wait_for
from gateway_system import http as http
from living import children

from seer.client import Prompt, RolloutClient, SamplingParams
from seer.client.tensor_stream import TensorStream
from seer.gateway.group_names import group_seed, request_hashes
from seer.services.engine.replay.backend import made_up_routes

USER = {"role": "user", "content": "1 2"}
GATEWAYS = {
    "gateway": ("gateway.tool_parser=hermes",),
    "aborting": ("gateway.on_update=abort", "gateway.client_seconds=3", "gateway.max_body_bytes=20000"),
    "refusing": (
        "gateway.trust_chat_templates=true",
        "gateway.routed_experts=true",
        "gateway.on_update=refuse",
        "gateway.request_seconds=4",
    ),
}


@pytest.fixture(scope="module")
def system() -> Iterator[GatewaySystem]:
    with GatewaySystem() as running:
        running.start("buffer")
        for name in ("engine-0", "engine-1"):
            running.start(name)
        running.start_gateways(GATEWAYS)
        yield running


# --- generation ------------------------------------------------------------------------------


async def test_the_same_tokens_as_seer_s_own_client(system: GatewaySystem, http: httpx.AsyncClient) -> None:
    sampling = SamplingParams(max_tokens=30, temperature=0.5)
    name = f"seed-{request_hashes([[4, 5]], sampling)[0]}"
    async with RolloutClient(system.endpoint) as client:
        rollout = await client.submit(
            [Prompt(name, token_ids=[4, 5])], n=2, sampling=sampling, seed=11, rollout_number=0
        )
        (expected,) = await rollout.result()
    fields = {"max_tokens": 30, "temperature": 0.5, "seed": 11, "n": 2}
    body = {"token_ids": [4, 5], "sampling_params": {**fields, "logprobs": 1}}
    got = await ok(http.post("/inference/v1/generate", json=body))
    text = await ok(
        http.post(
            "/v1/completions", json={"prompt": "1 2", "return_token_ids": True, "logprobs": 0, **fields}
        )
    )
    for choice, flat, response in zip(got["choices"], text["choices"], expected.responses, strict=True):
        assert choice["token_ids"] == flat["token_ids"] == response.token_ids.tolist()
        logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        assert logprobs == flat["logprobs"]["token_logprobs"] == response.logprobs.tolist()
        assert choice["finish_reason"] == flat["finish_reason"] == response.finish_reason
        version = str(expected.weight_version)
        assert choice["weight_versions"] == [{"version": version, "start": 0, "end": len(logprobs)}]
        assert flat["weight_version"] == version
        detokenized = await ok(http.post("/detokenize", json={"tokens": choice["token_ids"]}))
        assert flat["text"].split() == [
            word
            for word in detokenized["prompt"].split()
            if not word.startswith(("<bos", "<eos", "<pad", "<unk"))
        ]


async def test_experts_come_with_the_same_tokens_where_they_are_asked_for(
    system: GatewaySystem, http: httpx.AsyncClient
) -> None:
    body = {"token_ids": [4, 5], "sampling_params": {"max_tokens": 9, "seed": 11, "n": 2}}
    plain = (await ok(http.post("/inference/v1/generate", json=body)))["choices"]
    lists = (await ok(http.post("/skyrl/v1/generate", json=body)))["choices"]
    async with httpx.AsyncClient(base_url=system.urls["refusing"]["control"], timeout=120) as asking:
        arrays = (await ok(asking.post("/inference/v1/generate", json=body)))["choices"]
    for choice, listed, coded in zip(plain, lists, arrays, strict=True):
        assert choice["routed_experts"] is None
        assert choice["token_ids"] == listed["token_ids"] == coded["token_ids"]
        expected = made_up_routes([4, 5, *choice["token_ids"][:-1]])
        assert listed["routed_experts"] == expected.tolist()
        array = np.load(io.BytesIO(base64.b64decode(coded["routed_experts"])), allow_pickle=False)
        assert array.dtype == np.uint8
        assert np.array_equal(array, expected)


async def test_completions_take_prompts_in_four_forms(http: httpx.AsyncClient) -> None:
    for prompt in ("1 2", ["1 2", "3"], [4, 5], [[4, 5], [6], [4, 5]]):
        body = {"prompt": prompt, "n": 2, "max_tokens": 5, "return_token_ids": True}
        got = await ok(http.post("/v1/completions", json=body))
        prompts = [each["prompt_token_ids"] for each in got["choices"]]
        assert prompts[::2] == prompts[1::2]
        assert prompts[0] == [4, 5]
        assert [each["index"] for each in got["choices"]] == list(range(len(prompts)))
        assert len({tuple(each["token_ids"]) for each in got["choices"]}) == len(prompts)


async def test_a_chat(http: httpx.AsyncClient) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "1 2"}]}]
    tools = [{"type": "function", "function": {"name": "S4", "parameters": {}}}]
    for extra, words in (({}, "1 2 ="), ({"tools": tools}, "ans S4 1 2 =")):
        expected = await ok(http.post("/tokenize", json={"prompt": words}))
        got = await ok(http.post("/tokenize", json={"messages": messages, **extra}))
        assert got["tokens"] == expected["tokens"]
        assert got["count"] == len(got["tokens"])
        body = {"messages": messages, "max_completion_tokens": 8, "return_token_ids": True, "logprobs": True}
        answer = await ok(http.post("/v1/chat/completions", json=body | extra))
        assert answer["prompt_token_ids"] == expected["tokens"]
        (choice,) = answer["choices"]
        assert choice["message"]["role"] == "assistant"
        assert len(choice["token_ids"]) == len(choice["logprobs"]["content"]) <= 8
    refusals = (
        ({"tools": tools, "tool_choice": "any"}, "tool_choice"),
        ({"tools": tools, "tool_choice": "required"}, "structured_outputs"),
        ({"response_format": {"type": "json_object"}}, "structured_outputs"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"chat_template": "x"}, "chat_template"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"messages": [{"role": "user", "content": [{"type": "video_url"}]}]}, "messages[0].content[0].type"),
        ({"messages": []}, "messages"),
    )
    for extra, param in refusals:
        response = await http.post("/v1/chat/completions", json={"messages": messages, "n": 1} | extra)
        refused(response, 400)
        assert response.json()["error"]["param"] == param or param == "messages"


async def test_a_chat_fills_the_context_by_default(http: httpx.AsyncClient) -> None:
    body = {"messages": [{"role": "user", "content": "1"}], "seed": 1}
    got = await ok(http.post("/v1/chat/completions", json=body))
    assert got["choices"][0]["finish_reason"] == "stop"


async def test_noise(system: GatewaySystem, http: httpx.AsyncClient) -> None:
    async def tokens(
        client: httpx.AsyncClient, headers: dict[str, str] | None = None, **fields: object
    ) -> str:
        body = {"prompt": [7, 8], "max_tokens": 20, "ignore_eos": True, **fields}
        return str(
            (await ok(client.post("/v1/completions", json=body, headers=headers)))["choices"][0]["text"]
        )

    async with other(system, "aborting") as second:
        anonymous = await asyncio.gather(*(tokens(client) for client in (http, second) for _ in range(6)))
        assert len(set(anonymous)) == 12
        seeded = {await tokens(client, seed=3) for client in (http, second) for _ in range(2)}
        assert len(seeded) == 1
        for header in ("X-Request-Id", "Idempotency-Key"):
            named = {await tokens(client, {header: "r"}) for client in (http, second)}
            assert len(named) == 1
            assert await tokens(http, {header: "s"}) not in named | seeded


@pytest.mark.parametrize("headers", [{}, {"X-Session-ID": "s"}, {"X-Request-Id": "r"}])
@pytest.mark.parametrize("stream", [False, True])
async def test_turns_have_the_tokens_of_single_requests(
    system: GatewaySystem, http: httpx.AsyncClient, headers: dict[str, str], stream: bool
) -> None:
    """Conversations are known by their contexts; what a request gets is a function of it alone."""
    before = system.counts("gateway")
    headers = {name: f"{value}{stream}" for name, value in headers.items()}
    context, turns = [4, 5, 6 + stream], []
    sampling = {"max_tokens": 12, "ignore_eos": True, "seed": None if "X-Request-Id" in headers else 7}
    for _ in range(3):
        body = {"token_ids": context, "sampling_params": sampling}
        first = await generated(http, body, headers, stream=stream)
        turns.append((body, first))
        context = [*context, *first, 9]
    after = system.counts("gateway")
    assert {name: after[name] - before[name] for name in ("later_turns", "segments")} == {
        "later_turns": 2,
        "segments": 0,
    }
    for body, tokens in turns:  # in another process, each alone
        async with other(system, "aborting") as alone:
            assert await generated(alone, {**body, "n": 1}, headers) == tokens
    if "X-Request-Id" not in headers:
        async with RolloutClient(system.endpoint) as client:
            params = SamplingParams(max_tokens=12, ignore_eos=True)
            for body, tokens in turns:
                name = f"seed-{request_hashes([body['token_ids']], params)[0]}"
                prompt = Prompt(name, token_ids=body["token_ids"])
                [group] = await (
                    await client.submit([prompt], n=1, sampling=params, seed=7, rollout_number=0)
                ).result()
                assert group.responses[0].token_ids.tolist() == tokens


async def generated(
    http: httpx.AsyncClient, body: dict[str, Any], headers: dict[str, str], *, stream: bool = False
) -> list[int]:
    """Return the token ids of an answer."""
    if not stream:
        got = await ok(http.post("/inference/v1/generate", json=body, headers=headers))
        return got["choices"][0]["token_ids"]
    tokens: list[int] = []
    async with http.stream(
        "POST", "/inference/v1/generate", json=body | {"stream": True}, headers=headers
    ) as got:
        async for line in got.aiter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    tokens += choice["token_ids"]
    return tokens


@pytest.mark.parametrize(("headers", "segments"), [({}, 0), ({"X-Session-ID": "t"}, 2)])
async def test_a_chat_whose_template_drops_earlier_reasoning(
    system: GatewaySystem, http: httpx.AsyncClient, headers: dict[str, str], segments: int
) -> None:
    """What the model said is shown to it without all but its last word from the next turn on."""
    template = (
        "{% for message in messages %}{% if message.role == 'assistant' %}= {{ message.content.split() | last }} "
        "{% else %}{{ message.content }} {% endif %}{% endfor %}{% if add_generation_prompt %}={% endif %}"
    )
    before, messages, turns = system.counts("refusing"), [{"role": "user", "content": "1 2"}], []
    async with other(system, "refusing") as trusting:
        for _ in range(3):
            body = {"messages": messages, "max_tokens": 8, "seed": 3, "chat_template": template}
            asked = body | {"return_token_ids": True}
            got = await ok(trusting.post("/v1/chat/completions", json=asked, headers=headers))
            turns.append((got["prompt_token_ids"], got["choices"][0]["token_ids"]))
            said = got["choices"][0]["message"]["content"]
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "3"}]
    after = system.counts("refusing")
    assert after["later_turns"] == before["later_turns"]
    assert after["segments"] - before["segments"] == segments
    for prompt, tokens in turns:
        alone = {"token_ids": prompt, "sampling_params": {"max_tokens": 8, "seed": 3}}
        assert await generated(http, alone, {}) == tokens


async def test_single_requests_of_one_group(system: GatewaySystem, http: httpx.AsyncClient) -> None:
    body = {"token_ids": [7, 8], "sampling_params": {"max_tokens": 20, "ignore_eos": True}}

    async def tokens(client: httpx.AsyncClient, index: int, n: int = 1) -> list[list[int]]:
        headers = {"X-Seer-Group": "step 1/7", "X-Seer-Index": str(index)}
        asked = {**body, "sampling_params": {**body["sampling_params"], "n": n}}
        got = await ok(client.post("/inference/v1/generate", json=asked, headers=headers))
        return [choice["token_ids"] for choice in got["choices"]]

    async with other(system, "aborting") as second:
        clients = (http, second, http, second)
        singles = await asyncio.gather(*(tokens(client, i) for i, client in enumerate(clients)))
        assert len(set(map(str, singles))) == 4
        assert await tokens(second, 0, n=4) == [one for [one] in singles]
    sampling = SamplingParams(max_tokens=20, ignore_eos=True)
    seed = group_seed(request_hashes([[7, 8]], sampling), None)
    async with RolloutClient(system.endpoint) as client:
        prompt = client.open_rollout(rollout_number=0).submit(
            [7, 8], n=2, sampling=sampling, seed=seed, group="/step 1/7", first_index=2
        )
        responses = (await prompt.result()).responses
    assert [each.token_ids.tolist() for each in responses] == [one for [one] in singles[2:]]


@pytest.mark.parametrize("stream", [False, True])
async def test_bad_headers_of_a_group(http: httpx.AsyncClient, stream: bool) -> None:
    body = {"prompt": "1", "max_tokens": 2, "stream": stream}
    response = await http.post("/v1/completions", json=body, headers={"X-Seer-Group": "g"})
    assert refused(response, 400).startswith("X-Seer-Index = ")
    assert response.json()["error"]["param"] == "X-Seer-Index"


# --- the rest of the routes ------------------------------------------------------------------


async def test_what_is_there(system: GatewaySystem, http: httpx.AsyncClient) -> None:
    (card,) = (await ok(http.get("/v1/models")))["data"]
    assert card["id"] == "model"
    assert card["root"] == str(system.model)
    assert card["max_model_len"] > 1000
    for name in ("model", str(system.model)):
        await ok(http.post("/v1/completions", json={"prompt": "1", "max_tokens": 1, "model": name}))
    response = await http.post("/v1/completions", json={"prompt": "1", "model": "lora"})
    assert "this system has 'model' alone" in refused(response, 404)
    assert (await ok(http.get("/get_world_size")))["world_size"] == 2
    assert set(await ok(http.get("/version"))) == {"version"}
    assert [(await http.request(how, "/ping")).status_code for how in ("GET", "POST")] == [200, 200]
    info = await ok(http.get("/server_info", params={"config_format": "json"}))
    assert info["vllm_config"]["weight_transfer_config"] is None
    assert await ok(http.post("/reset_prefix_cache")) == {"success": True}
    strings = (await ok(http.post("/tokenize", json={"prompt": "1 2", "return_token_strs": True})))[
        "token_strs"
    ]
    assert strings == ["1", "2"]


async def test_prometheus_reads_every_counter_once(http: httpx.AsyncClient) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    await ok(http.post("/v1/completions", json={"prompt": "1", "max_tokens": 2}))
    info = await ok(http.get("/server_info", params={"config_format": "json"}))
    scraped = await http.get("/metrics")
    assert scraped.status_code == 200
    samples = {
        (sample.name, sample.labels.get("outcome", "")): sample.value
        for family in text_string_to_metric_families(scraped.text)
        for sample in family.samples
    }
    assert len(samples) == len(info["seer"]["counters"])
    assert samples["seer_gateway_requests_total", "completed"] > 0
    assert samples["seer_gateway_requests_begun_total", ""] > info["seer"]["counters"]["completed"]
    assert samples["seer_gateway_processes", ""] == info["seer"]["counters"]["processes"]


async def test_the_data_address_has_no_control_routes(system: GatewaySystem) -> None:
    async with httpx.AsyncClient(base_url=system.urls["gateway"]["data"]) as data:
        assert (await data.get("/health")).status_code == 200
        for method, path in (
            ("POST", "/pause"), ("POST", "/resume"), ("POST", "/update_weights"), ("POST", "/sleep"),
            ("POST", "/areal_update_weights"), ("GET", "/server_info"), ("POST", "/v1/load_lora_adapter"),
            ("GET", "/metrics"),
        ):  # fmt: skip
            refused(await data.request(method, path), 404)
        await ok(data.post("/v1/completions", json={"prompt": "1", "max_tokens": 2}))


async def test_refusals_by_name(http: httpx.AsyncClient) -> None:
    assert "NCCL" in refused(await http.post("/init_weight_transfer_engine", json={}), 501)
    assert "NCCL" in refused(await http.post("/update_weights", json={"weight_dir": None}), 400)
    assert "mode = 'later'" in refused(await http.post("/pause?mode=later"), 400)
    refused(await http.get("/v1/completions"), 405)
    refused(await http.get("/nowhere"), 404)
    for content in (b"", b"{", b"[1]", b"\xff", b"[" * 9999):
        for path in ("/v1/completions", "/v1/chat/completions", "/inference/v1/generate", "/tokenize"):
            refused(await http.post(path, content=content), 400)
    body = {"prompt": [999]}
    assert "token ids are in [0, 66)" in refused(await http.post("/v1/completions", json=body), 400)
    for extra in (
        {"echo": True, "stream": True},
        {"prompt_logprobs": 1, "stream": True},
        {"prompt_logprobs": -1},
        {"logprobs": 21},
        {"top_logprobs": 2},
        {"seed": 2**64},
    ):
        refused(await http.post("/v1/completions", json={"prompt": "1"} | extra), 400)
    long = await http.post("/v1/completions", json={"prompt": [4] * 300_000})
    assert "longer than any engine can take: prompts of at most " in refused(long, 400)


async def test_alternatives_and_echoed_prompts_are_in_vllms_schemas(http: httpx.AsyncClient) -> None:
    fields = {"max_tokens": 4, "seed": 3}
    asked = {"prompt": [4, 5, 6], "echo": True, "logprobs": 2}
    for tokens in (0, 1, 4):  # lm-evaluation-harness has 1
        answer = await ok(http.post("/v1/completions", json={**asked, **fields, "max_tokens": tokens}))
        (choice,) = answer["choices"]
        found = choice["logprobs"]
        assert found["token_logprobs"][:3] == [None, -5 / 32, -6 / 32]
        assert {len(each) for each in found.values()} == {3 + tokens}
        assert found["top_logprobs"][0] is None
        for token, own, tops in list(
            zip(*(found[k] for k in ("tokens", "token_logprobs", "top_logprobs")), strict=True)
        )[1:]:
            assert len(tops) == 2
            assert tops[token] == own == max(tops.values())
        assert choice["text"].startswith(
            (await ok(http.post("/detokenize", json={"tokens": [4, 5, 6]})))["prompt"]
        )
    several = {"prompt": ["1  2", "3"], "echo": True, "n": 2, **fields}
    texts = [choice["text"] for choice in (await ok(http.post("/v1/completions", json=several)))["choices"]]
    given = [*["1  2"] * 2, *["3"] * 2]
    assert all(text.startswith(prompt) for text, prompt in zip(texts, given, strict=True)), "as it was given"
    plain = await ok(
        http.post("/v1/completions", json={"prompt": [4, 5, 6], "return_token_ids": True, **fields})
    )
    given = {"sampling_params": {**fields, "logprobs": 3, "prompt_logprobs": 0}}
    answer = await ok(http.post("/inference/v1/generate", json={"token_ids": [4, 5, 6], **given}))
    (choice,) = answer["choices"]
    assert choice["token_ids"] == plain["choices"][0]["token_ids"], "who asks for more gets the same tokens"
    assert answer["prompt_logprobs"] == [
        None, *({str(t): {"logprob": -t / 32, "rank": 1, "decoded_token": None}} for t in (5, 6))
    ]  # fmt: skip
    for token, entry in zip(choice["token_ids"], choice["logprobs"]["content"], strict=True):
        assert [each["token_id"] for each in entry["top_logprobs"]] == [(token + i) % 66 for i in range(3)]
        assert [each["rank"] for each in entry["top_logprobs"]] == [1, 2, 3]
    messages = [{"role": "user", "content": "1"}]
    body = {"messages": messages, **fields, "logprobs": True, "top_logprobs": 3}
    (choice,) = (await ok(http.post("/v1/chat/completions", json=body)))["choices"]
    for entry in choice["logprobs"]["content"]:
        assert len(entry["top_logprobs"]) == 3
        assert entry["top_logprobs"][0] == {k: entry[k] for k in ("token", "logprob", "bytes")}
    refused(await http.post("/v1/chat/completions", json={**body, "logprobs": False}), 400)
    many = {"prompt": "1", "n": 4096, "logprobs": 20, "max_tokens": 100}
    assert "have at most 2097152 in an answer" in refused(await http.post("/v1/completions", json=many), 400)


async def test_a_response_is_a_chat_s_answer(http: httpx.AsyncClient) -> None:
    system = {"role": "system", "content": "2"}
    messages = [{"role": "user", "content": "1 2"}, {"role": "assistant", "content": "3"}, USER]
    chat = {"messages": [system, *messages], "seed": 5, "max_tokens": 30, "ignore_eos": True}
    expected = await ok(http.post("/v1/chat/completions", json=chat))
    asked = {"input": messages, "instructions": "2", "seed": 5, "max_output_tokens": 30, "ignore_eos": True}
    got = await ok(http.post("/v1/responses", json=asked))
    text = expected["choices"][0]["message"]["content"]
    assert (got["status"], got["output"][0]["content"][0]["text"]) == ("incomplete", text)
    assert got["usage"]["total_tokens"] == expected["usage"]["total_tokens"]
    streamed = await http.post("/v1/responses", json={**asked, "stream": True})
    last = json.loads(streamed.text.split("data: ")[-1])
    assert last["type"] == "response.incomplete"
    assert last["response"]["output"][0]["content"] == got["output"][0]["content"]


async def test_the_document_of_routes_has_what_each_address_serves(system: GatewaySystem) -> None:
    for name, more in (("data", set()), ("control", {"/pause", "/update_weights"})):
        async with httpx.AsyncClient(base_url=system.urls["gateway"][name]) as client:
            document = await ok(client.get("/openapi.json"))
            assert document["paths"].keys() >= {"/v1/responses", "/ping", "/openapi.json"} | more
            assert ("/pause" in document["paths"]) == (name == "control")
            for path, operations in document["paths"].items():
                for how, operation in operations.items():
                    assert operation["summary"], path
                    body = operation.get("requestBody", {"content": {"application/json": {"schema": {}}}})
                    schema = body["content"]["application/json"]["schema"]
                    assert schema.get("$ref", "").rpartition("/")[2] in {
                        "",
                        *document["components"]["schemas"],
                    }
                    if how == "post" and "requestBody" in operation:  # it is read: an empty body is none
                        refused(await client.post(path, content=b""), 400)


# --- pause and update ------------------------------------------------------------------------


async def test_a_pause_holds_what_comes(system: GatewaySystem, http: httpx.AsyncClient) -> None:
    assert await ok(http.post("/pause?mode=keep")) == {"status": "paused"}
    held = asyncio.create_task(ok(http.post("/v1/completions", json={"prompt": "1", "max_tokens": 2})))
    await asyncio.to_thread(wait_for, lambda: system.counts("gateway")["open_requests"] == 1, system)
    assert system.counts("gateway")["under_way"] == 0
    assert await ok(http.get("/is_paused")) == {"is_paused": True}
    assert not held.done()
    assert await ok(http.post("/resume")) == {"status": "resumed"}
    assert (await held)["usage"]["completion_tokens"] <= 2
    assert await ok(http.get("/is_paused")) == {"is_paused": False}


async def test_pauses_that_abort_and_that_wait(system: GatewaySystem, http: httpx.AsyncClient) -> None:
    endless = asyncio.create_task(http.post("/v1/completions", json={"prompt": "1", **ENDLESS}))
    await under_way(system)
    await ok(http.post("/pause"))  # abort is vLLM's default
    assert "aborted" in refused(await endless, 503)
    await ok(http.post("/resume"))
    short = asyncio.create_task(ok(http.post("/v1/completions", json={"prompt": "1", "max_tokens": 100})))
    await under_way(system)
    await ok(http.post("/pause?mode=wait"))
    assert system.counts("gateway")["under_way"] == 0
    await ok(http.post("/resume"))
    await short


async def test_an_update_while_paused_starts_requests_again(
    system: GatewaySystem, http: httpx.AsyncClient
) -> None:
    before = system.counts("gateway")
    version = int((await ok(http.get("/weight_info")))["weight_version"])
    body = {"token_ids": [4], "sampling_params": {"max_tokens": 600, "ignore_eos": True, "seed": 1}}
    async with RolloutClient(system.endpoint) as client:
        tokens = (await client.status()).counters["tokens"]
        task = asyncio.create_task(ok(http.post("/inference/v1/generate", json=body)))
        await under_way(system)
        while (await client.status()).counters["tokens"] < tokens + 200:  # and progress was reported
            await asyncio.sleep(0.05)
    await ok(http.post("/pause?mode=keep&clear_cache=false"))
    updated = await ok(http.post("/update_weights", json={"weight_dir": str(system.model)}))
    assert updated["weight_version"] == str(version + 1)
    assert not task.done()
    assert system.counts("gateway")["under_way"] == 0
    await ok(http.post("/resume"))
    (choice,) = (await task)["choices"]
    assert choice["weight_versions"] == [{"version": str(version + 1), "start": 0, "end": 600}]
    after = system.counts("gateway")
    assert after["restarted"] == before["restarted"] + 1
    assert after["discarded_tokens"] > before["discarded_tokens"]
    again = await ok(http.post("/inference/v1/generate", json=body))
    assert again["choices"][0]["token_ids"] == choice["token_ids"]


def write_adapter(folder: Path, fill: float) -> Path:
    """An adapter of one matrix of the shipped model."""
    folder.mkdir()
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    pair = {
        f"{name}A.weight": np.full((2, 128), fill, np.float32),
        f"{name}B.weight": np.ones((128, 2), np.float32),
    }
    stream = TensorStream(pair)
    (folder / "adapter_model.safetensors").write_bytes(stream.read(0, stream.size).tobytes())
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2, "lora_alpha": 4}')
    return folder


async def test_adapters(system: GatewaySystem, http: httpx.AsyncClient, tmp_path: Path) -> None:
    one, two = (write_adapter(tmp_path / name, fill) for name, fill in (("one", 0.1), ("two", 0.2)))
    body = {"prompt": "1", "max_tokens": 40, "ignore_eos": True, "seed": 3}

    async def text(model: str) -> str:
        (choice,) = (await ok(http.post("/v1/completions", json={**body, "model": model})))["choices"]
        found: str = choice["text"]
        return found

    # Replay engines that have loaded nothing yet know no digest, and say other things.
    await ok(http.post("/update_weights", json={"weight_dir": str(system.model)}))
    before = await text("model")
    fields = {"lora_name": "policy", "lora_path": str(one)}
    loaded = await http.post("/v1/load_lora_adapter", json=fields)
    assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'policy' added successfully.")
    adapted = await text("policy")
    assert adapted == await text("model") != before
    cards = (await ok(http.get("/v1/models")))["data"]
    assert [(card["id"], card["root"], card["parent"]) for card in cards] == [
        ("model", str(system.model), None),
        ("policy", str(one), "model"),
    ]
    assert "load_inplace" in refused(await http.post("/v1/load_lora_adapter", json=fields), 400)
    fields |= {"lora_path": str(two), "load_inplace": True}
    assert (await http.post("/v1/load_lora_adapter", json=fields)).status_code == 200
    assert await text("policy") != adapted
    wrong = {"lora_name": "policy", "lora_path": "/nowhere", "load_inplace": True}
    assert "lora_path = '/nowhere'" in refused(await http.post("/v1/load_lora_adapter", json=wrong), 400)
    flag = fields | {"is_3d_lora_weight": True}
    assert "is_3d_lora_weight" in refused(await http.post("/v1/load_lora_adapter", json=flag), 400)
    assert "lora_path" in refused(await http.post("/v1/load_lora_adapter", json={"lora_name": "x"}), 400)
    other_name = await http.post("/v1/completions", json={**body, "model": "other"})
    assert "and the adapter 'policy'" in refused(other_name, 404)
    refused(await http.post("/v1/unload_lora_adapter", json={"lora_name": "other"}), 404)
    unloaded = await http.post("/v1/unload_lora_adapter", json={"lora_name": "policy"})
    assert (unloaded.status_code, unloaded.text) == (
        200,
        "Success: LoRA adapter 'policy' removed successfully.",
    )
    refused(await http.post("/v1/completions", json={**body, "model": "policy"}), 404)
    assert await text("model") == before


async def test_areal_s_routes(system: GatewaySystem, http: httpx.AsyncClient) -> None:
    assert (await ok(http.post("/areal_pause_generation", json={})))["success"]
    held = asyncio.create_task(ok(http.post("/v1/completions", json={"prompt": [4], "max_tokens": 2})))
    answer = await ok(http.post("/areal_update_weights", json={"model_path": str(system.model)}))
    assert answer["success"]
    assert await ok(http.get("/is_paused")) == {"is_paused": True}
    assert (await ok(http.post("/areal_continue_generation", json={})))["success"]
    assert (await held)["choices"][0]["weight_version"] == answer["weight_version"]
    response = await http.post("/areal_update_weights", json={"model_path": "/nowhere"})
    assert "model_path = '/nowhere'" in refused(response, 400)


async def test_an_update_may_abort_or_be_refused(system: GatewaySystem) -> None:
    body = {"prompt": "1", **ENDLESS}
    update = {"weight_dir": str(system.model)}
    async with other(system, "aborting") as http:
        task = asyncio.create_task(http.post("/v1/completions", json=body))
        await under_way(system, "aborting")
        await ok(http.post("/update_weights", json=update))
        assert "gateway.on_update = abort" in refused(await task, 503)
    async with other(system, "refusing") as http:
        version = await ok(http.get("/weight_info"))
        task = asyncio.create_task(http.post("/v1/completions", json={"prompt": "1", **ENDLESS}))
        await under_way(system, "refusing")
        assert "1 requests are under way" in refused(await http.post("/update_weights", json=update), 409)
        assert await ok(http.get("/weight_info")) == version
        assert "within 4 s" in refused(await task, 504)


async def test_sleep_and_wake(http: httpx.AsyncClient) -> None:
    assert await ok(http.post("/sleep?level=1")) == {"status": "sleeping", "level": 1}
    asleep = asyncio.create_task(ok(http.post("/v1/completions", json={"prompt": "1", "max_tokens": 2})))
    await asyncio.sleep(2.5)  # engines that sleep are not away: not after the next status either
    later = asyncio.create_task(ok(http.post("/v1/completions", json={"prompt": "1", "max_tokens": 2})))
    assert (await http.get("/health")).status_code == 200
    assert (await ok(http.get("/get_world_size")))["world_size"] == 2
    assert not asleep.done()
    assert await ok(http.post("/wake_up?tags=weights")) == {"status": "sleeping", "tags": ["weights"]}
    assert await ok(http.post("/wake_up?tags=kv_cache")) == {"status": "awake", "tags": ["kv_cache"]}
    await asyncio.gather(asleep, later)


async def test_weights_are_updated_while_kv_sleeps(system: GatewaySystem, http: httpx.AsyncClient) -> None:
    body = {"prompt": "1 2 3", "max_tokens": 8, "seed": 5}
    update = {"weight_dir": str(system.model)}
    await ok(http.post("/update_weights", json=update))
    before = await ok(http.post("/v1/completions", json=body))
    assert await ok(http.post("/sleep?level=2")) == {"status": "sleeping", "level": 2}
    asleep = asyncio.create_task(ok(http.post("/v1/completions", json=body)))
    assert "the weights sleep: wake them first" in refused(await http.post("/wake_up?tags=kv_cache"), 409)
    assert "wake them first" in refused(await http.post("/update_weights", json=update), 400)
    await ok(http.post("/wake_up?tags=weights"))
    version = (await ok(http.post("/update_weights", json=update)))["weight_version"]
    assert not asleep.done()
    assert await ok(http.post("/wake_up?tags=kv_cache&tags=weights")) == {
        "status": "awake", "tags": ["kv_cache", "weights"],
    }  # fmt: skip
    [choice] = (await asleep)["choices"]
    assert choice["text"] == before["choices"][0]["text"]
    assert choice["weight_version"] == version
    await ok(http.post("/sleep?level=2"))
    assert await ok(http.post("/wake_up")) == {"status": "awake", "tags": None}
    assert (await ok(http.post("/v1/completions", json=body)))["choices"][0]["text"] == choice["text"]


async def test_levels_and_tags_that_are_not_known(http: httpx.AsyncClient) -> None:
    for query, named in (("sleep?level=0", "level = '0'"), ("sleep?level=3", "level = '3'"),
                         ("wake_up?tags=weights&tags=kv", "tags = 'kv'")):  # fmt: skip
        assert named in refused(await http.post(f"/{query}"), 400)


# --- clients that misbehave ------------------------------------------------------------------


async def test_a_disconnect_cancels_in_the_buffer(system: GatewaySystem, http: httpx.AsyncClient) -> None:
    before = system.counts("gateway")["cancelled"]
    task = asyncio.create_task(http.post("/v1/completions", json={"prompt": "1", "n": 3, **ENDLESS}))
    await under_way(system)
    task.cancel()
    await asyncio.wait([task])
    await under_way(system, count=0)
    assert system.counts("gateway")["cancelled"] == before + 1
    async with RolloutClient(system.endpoint) as client:
        while (status := await client.status()).requests_running + status.requests_waiting:
            await asyncio.sleep(0.05)


def speak(url: str, *parts: bytes) -> socket.socket:
    connection = socket.create_connection((httpx.URL(url).host, httpx.URL(url).port or 0), timeout=60)
    for part in parts:
        connection.sendall(part)
    return connection


def test_bodies_that_are_too_long_or_never_come(system: GatewaySystem) -> None:
    url = system.urls["aborting"]["data"]
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    said = {}
    for name, parts in {
        "declared": (head + b"content-length: 20001\r\n\r\n",),
        "chunked": (
            head + b"transfer-encoding: chunked\r\n\r\n",
            (b"2000\r\n" + b"x" * 0x2000 + b"\r\n") * 4,
        ),
        "late": (head + b"content-length: 100\r\n\r\n{",),
        "half a head": (head,),
        "nothing": (),
        "no http": (b"hello\r\n\r\n",),
    }.items():
        with speak(url, *parts) as connection:
            data = b""
            while part := connection.recv(65536):  # the gateway closes each of them
                data += part
        said[name] = data.split(b"\r\n")[0]
    assert b" 413 " in said["declared"]
    assert b" 413 " in said["chunked"]
    assert b" 408 " in said["late"]
    assert said["half a head"] == said["nothing"] == b""
    assert b" 400 " in said["no http"]


# --- what goes away --------------------------------------------------------------------------


async def test_all_engines_away(system: GatewaySystem, http: httpx.AsyncClient) -> None:
    for name in ("engine-0", "engine-1"):
        system.processes[name].send_signal(signal.SIGTERM)
        system.processes[name].wait()
    await asyncio.to_thread(wait_for, lambda: httpx.get(f"{http.base_url}/health").status_code == 503, system)
    response = await http.post("/v1/completions", json={"prompt": "1", "max_tokens": 2})
    assert "no engine is there" in refused(response, 503)
    for name in ("engine-0", "engine-1"):
        system.kill(name)
        system.start(name)
    await asyncio.to_thread(system.healthy, "gateway")
    await ok(http.post("/v1/completions", json={"prompt": "1", "max_tokens": 2}))


async def test_a_buffer_that_is_killed_and_comes_back(system: GatewaySystem, http: httpx.AsyncClient) -> None:
    body = {"prompt": "1", "max_tokens": 300, "ignore_eos": True, "seed": 2, "return_token_ids": True}
    expected = await ok(http.post("/v1/completions", json=body))
    task = asyncio.create_task(ok(http.post("/v1/completions", json=body)))
    await under_way(system)
    system.kill("buffer")
    await asyncio.to_thread(wait_for, lambda: httpx.get(f"{http.base_url}/health").status_code == 503, system)
    response = await http.post("/v1/completions", json={"prompt": "1"})
    assert "is away" in refused(response, 503)
    assert "is away" in refused(await http.post("/update_weights", json={"weight_dir": "/w"}), 503)
    system.start("buffer")
    await asyncio.to_thread(system.healthy, "gateway")
    assert (await task)["choices"][0]["token_ids"] == expected["choices"][0]["token_ids"]


async def test_several_processes(system: GatewaySystem, tmp_path: Path) -> None:
    system.start_gateways({"several": ("gateway.workers=3",)})
    body = {"prompt": "1", "max_tokens": 800, "ignore_eos": True}
    before = children(system.processes["several"].pid)
    assert len(before) == 3
    async with other(system, "several") as http:
        tasks = [asyncio.create_task(ok(http.post("/v1/completions", json=body))) for _ in range(30)]
        await under_way(system, "several", 30)
        await ok(http.post("/pause?mode=keep"))
        assert {(await ok(http.get("/is_paused")))["is_paused"] for _ in range(10)} == {True}
        held = [asyncio.create_task(ok(http.post("/v1/completions", json=body))) for _ in range(10)]
        await asyncio.to_thread(wait_for, lambda: system.counts("several")["open_requests"] == 40, system)
        updated = await ok(http.post("/update_weights", json={"weight_dir": str(system.model)}))
        assert system.counts("several")["under_way"] == 0
        await ok(http.post("/resume"))
        answers = await asyncio.gather(*tasks, *held)
        assert {each["choices"][0]["weight_version"] for each in answers} == {updated["weight_version"]}
        assert len({each["choices"][0]["text"] for each in answers}) == 40
        assert system.counts("several")["restarted"] == 30
        fields = {"lora_name": "policy", "lora_path": str(write_adapter(tmp_path / "one", 0.1))}
        assert (await http.post("/v1/load_lora_adapter", json=fields)).status_code == 200
        named = {"prompt": "1", "max_tokens": 1, "model": "policy"}
        turned = system.counts("several")["later_turns"]
        context = [4, 5, 9]
        for number in range(8):  # each over a connection of its own, so to any process
            async with other(system, "several") as anew:
                asked = {"token_ids": context, "sampling_params": {"max_tokens": 4, "ignore_eos": True}}
                context += [*await generated(anew, asked, {"X-Session-ID": "s"}, stream=number % 2 > 0), 7]
        assert system.counts("several")["later_turns"] == turned + 7
        # One dies while generation is paused: the one that takes its place begins paused.
        await ok(http.post("/pause?mode=keep"))
        os.kill(before[0], signal.SIGKILL)
    alive = lambda: len(children(system.processes["several"].pid)) == 3  # noqa: E731
    await asyncio.to_thread(wait_for, lambda: alive() and system.counts("several")["processes"] == 3, system)
    async with other(system, "several") as http:
        held = [asyncio.create_task(ok(http.post("/v1/completions", json=body))) for _ in range(12)]
        await asyncio.to_thread(wait_for, lambda: system.counts("several")["open_requests"] == 12, system)
        assert system.counts("several")["under_way"] == 0
        await ok(http.post("/resume"))
        await asyncio.gather(*held)
        for _ in range(12):  # every process knows of the adapter, also the one that came later
            async with other(system, "several") as anew:
                await ok(anew.post("/v1/completions", json=named))
    system.processes["several"].send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(system.processes["several"].wait, 60) == 0
    assert not any(alive_as_worker(pid) for pid in before)


async def test_processes_end_with_the_first_one(system: GatewaySystem) -> None:
    system.start_gateways({"orphans": ("gateway.workers=2",)})
    workers = children(system.processes["orphans"].pid)
    assert len(workers) == 2
    system.kill("orphans")
    await asyncio.to_thread(wait_for, lambda: not any(alive_as_worker(pid) for pid in workers), system)


def alive_as_worker(pid: int) -> bool:
    try:
        return b"seer.gateway.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


async def test_a_gateway_that_stops_answers_what_it_has(system: GatewaySystem) -> None:
    system.start_gateways({"stopping": ()})
    async with other(system, "stopping") as http:
        body = {"prompt": "1", "max_tokens": 150, "ignore_eos": True}
        task = asyncio.create_task(http.post("/v1/completions", json=body))
        await under_way(system, "stopping")
        await ok(http.post("/pause?mode=keep"))
        held = asyncio.create_task(http.post("/v1/completions", json=body))
        await asyncio.to_thread(wait_for, lambda: system.counts("stopping")["open_requests"] == 2, system)
        os.kill(system.processes["stopping"].pid, signal.SIGTERM)
        assert "stops" in refused(await held, 503)
        assert (await task).json()["usage"]["completion_tokens"] == 150
    assert await asyncio.to_thread(system.processes["stopping"].wait, 60) == 0


def test_a_gateway_that_cannot_start_says_why(system: GatewaySystem) -> None:
    taken = httpx.URL(system.urls["gateway"]["data"])
    for setting, why in {
        f"gateway.data=127.0.0.1:{taken.port}": "gateway.data",
        "shared.model=/nowhere": "shared.model",
        "gateway.control=here": "gateway.control",
    }.items():
        settings = {"gateway.data": "127.0.0.1:0", "gateway.control": "127.0.0.1:0"}
        name, _, value = setting.partition("=")
        given = [f"{key}={each}" for key, each in (settings | {name: value}).items()]
        system.start("failing", *given, gateway=True)
        assert system.processes["failing"].wait(60) == 2
        os.close(int(system.urls["failing"]["fd"]))
        assert why in system.log
