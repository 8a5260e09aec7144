"""Streams of the gateway over real sockets, with replay engines: docs/gateway.md, "Streams"."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
from gateway_system import ENDLESS, GatewaySystem, ok, other, refused, under_way, wait_for
from gateway_system import http as http

from seer.client import RolloutClient

GATEWAYS = {
    "gateway": ("gateway.tool_parser=hermes",),
    "hurried": ("gateway.client_seconds=1",),
    "late": ("gateway.request_seconds=4",),
}


@pytest.fixture(scope="module")
def system() -> Iterator[GatewaySystem]:
    with GatewaySystem() as running:
        running.start("buffer")
        running.start("engine-0")
        running.start_gateways(GATEWAYS)
        yield running


ROUTES = ("/v1/completions", "/v1/chat/completions", "/inference/v1/generate")


def asked(path: str, **fields: object) -> dict[str, Any]:
    """A body for a route, with all that can be shown."""
    if path == "/inference/v1/generate":
        return {"token_ids": [4], "sampling_params": {**fields, "logprobs": 1}}
    shown = {"return_token_ids": True, "logprobs": True if "chat" in path else 1}
    prompt = {"messages": [{"role": "user", "content": "1"}]} if "chat" in path else {"prompt": "1"}
    return {**prompt, **shown, **fields}


async def parts_of(lines: AsyncIterator[str]) -> AsyncIterator[dict[str, Any]]:
    async for line in lines:
        if line and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


def joined(parts: list[dict[str, Any]], index: int) -> dict[str, Any]:
    """What the parts of a choice are together."""
    found = [each for part in parts for each in part["choices"] if each["index"] == index]
    said = [each.get("text", each.get("delta", {}).get("content", "")) for each in found]
    tokens: list[int] = []
    logprobs: list[float] = []
    for each in found:
        tokens += each.get("token_ids") or []
        content = each.get("logprobs") or {}
        logprobs += content.get("content") or content.get("token_logprobs") or []
    return {"text": "".join(said), "tokens": tokens, "logprobs": logprobs, "end": found[-1]["finish_reason"]}


@pytest.mark.parametrize("path", ROUTES)
async def test_a_stream_has_what_the_whole_answer_has(http: httpx.AsyncClient, path: str) -> None:
    body = asked(path, seed=5, max_tokens=70, n=2, ignore_eos=True, stop=["9 1"])
    whole = await ok(http.post(path, json=body))
    response = await http.post(path, json=body | {"stream": True, "stream_options": {"include_usage": True}})
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = response.text.strip().split("\n\n")
    assert lines[-1] == "data: [DONE]"
    parts = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert parts[-1]["usage"] == whole["usage"]
    for choice in whole["choices"]:
        logprobs = choice["logprobs"].get("content") or choice["logprobs"]["token_logprobs"]
        text = choice.get("text", choice.get("message", {}).get("content", ""))
        expected = {"text": text, "tokens": choice["token_ids"], "logprobs": logprobs}
        assert joined(parts, choice["index"]) == expected | {"end": choice["finish_reason"]}
    bad = await http.post(path, json=body | {"stream": True, "n": 0, "sampling_params": {"n": 0}})
    refused(bad, 400)


async def test_a_stream_of_several_prompts(http: httpx.AsyncClient) -> None:
    # A seed makes equal prompts one: it is generated once, and shown twice.
    body = asked("/v1/completions", seed=6, max_tokens=40, n=2) | {"prompt": ["1", "2 3", "1"]}
    whole = await ok(http.post("/v1/completions", json=body))
    async with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
        parts = [part async for part in parts_of(response.aiter_lines())]
    for choice in whole["choices"]:
        found = joined(parts, choice["index"])
        assert (found["text"], found["tokens"]) == (choice["text"], choice["token_ids"])


@pytest.mark.parametrize("path", ROUTES)
async def test_parts_come_while_the_response_is_generated(
    system: GatewaySystem, http: httpx.AsyncClient, path: str
) -> None:
    before = system.counts("gateway")
    async with http.stream("POST", path, json=asked(path, **ENDLESS) | {"stream": True}) as response:
        parts = parts_of(response.aiter_lines())
        counted = 0
        while counted < 3 * 16:  # three chunks
            part = await anext(parts)
            counted += len(part["choices"][0].get("token_ids") or [])
            assert part["choices"][0]["finish_reason"] is None
        assert system.counts("gateway")["under_way"] == 1
    await under_way(system, count=0)  # the client left
    assert system.counts("gateway")["cancelled"] == before["cancelled"] + 1
    async with RolloutClient(system.endpoint) as client:
        while (status := await client.status()).requests_running + status.requests_waiting:
            await asyncio.sleep(0.05)


async def test_a_stream_waits_for_its_first_tokens_to_answer(http: httpx.AsyncClient) -> None:
    await ok(http.post("/pause?mode=keep"))
    body = asked("/v1/completions", max_tokens=5, stream=True)
    held = asyncio.create_task(http.post("/v1/completions", json=body))
    await asyncio.sleep(0.5)
    assert not held.done()
    await ok(http.post("/resume"))
    assert (await held).text.endswith("data: [DONE]\n\n")


async def test_an_update_ends_a_stream_that_has_sent_tokens(
    system: GatewaySystem, http: httpx.AsyncClient
) -> None:
    before = system.counts("gateway")
    body = asked("/v1/completions", **ENDLESS) | {"stream": True}
    async with http.stream("POST", "/v1/completions", json=body) as response:
        parts = parts_of(response.aiter_lines())
        await anext(parts)
        await ok(http.post("/pause?mode=keep"))
        await ok(http.post("/update_weights", json={"weight_dir": str(system.model)}))
        last = [part async for part in parts][-1]
    await ok(http.post("/resume"))
    assert response.status_code == 200
    assert "cannot be taken back" in last["error"]["message"]
    assert last["error"]["code"] == 503
    after = system.counts("gateway")
    assert after["interrupted_streams"] == before["interrupted_streams"] + 1
    assert after["failed"] == before["failed"] + 1
    assert after["restarted"] == before["restarted"]


async def test_an_aborting_pause_and_the_deadline_end_a_stream_in_an_error(system: GatewaySystem) -> None:
    body = asked("/v1/completions", **ENDLESS) | {"stream": True}
    for name, why in (("gateway", "aborted"), ("late", "within 4 s")):
        async with other(system, name) as http, http.stream("POST", "/v1/completions", json=body) as response:
            parts = parts_of(response.aiter_lines())
            await anext(parts)
            if name == "gateway":
                await ok(http.post("/pause"))
                await ok(http.post("/resume"))
            assert why in [part async for part in parts][-1]["error"]["message"]


def test_a_stream_whose_client_reads_nothing_is_cancelled(system: GatewaySystem) -> None:
    before = system.counts("hurried")["cancelled"]
    body = json.dumps(asked("/inference/v1/generate", **ENDLESS, n=64) | {"stream": True}).encode()
    head = b"POST /inference/v1/generate HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
    url = httpx.URL(system.urls["hurried"]["data"])
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((url.host, url.port or 0))
        connection.sendall(head % len(body) + body)
        wait_for(lambda: system.counts("hurried")["cancelled"] == before + 1, system)
    wait_for(lambda: system.counts("hurried")["under_way"] == 0, system)
