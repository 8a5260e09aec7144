"""A fuzzer of HTTP bodies: mutated requests to every route of a gateway, in one process, with replayed answers.

`python tests/process/fuzz_http.py --bodies 300000 --seed 1` prints as JSON how they were answered and the longest
hold of the event loop, and exits with 1 when any answer was a 500, or one did not come.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
from gateway_system import MODEL, TEMPLATE
from memory_transport import MemoryNetwork, MemoryTransport

from seer.client import Delta, Group, Response
from seer.common.config import Config, GatewayConfig, LogConfig, SharedConfig
from seer.common.process.log import configure
from seer.common.types import Capacity
from seer.gateway import serving
from seer.gateway.buffer_client import BufferClient, Outcome, Question
from seer.gateway.control_routes import ControlRoutes
from seer.gateway.request_bodies import REFUSED
from seer.gateway.responses_body import REFUSED as UNKEPT
from seer.gateway.serving import Serving

AT_ONCE = 8
SECONDS = 120.0
"""Deadline of an answer."""

USER = {"role": "user", "content": "a b c"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1, {"b": 2}]}'}}
SAMPLING = {
    "n": 2, "max_tokens": 8, "temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 3,
    "repetition_penalty": 1.1, "frequency_penalty": 0.1, "presence_penalty": 0.1, "logit_bias": {"5": 1.5, "6": -100},
    "stop": ["a b", "c"], "stop_token_ids": [7], "ignore_eos": True, "min_tokens": 2, "skip_special_tokens": False,
    "include_stop_str_in_output": True,
}  # fmt: skip
SHOWN = {
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
    "stream_options": {"include_usage": True},
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
CHAT = {
    "messages": [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "content": "d"}],
    "tools": [TOOL], "tool_choice": "auto", "logprobs": True, "top_logprobs": 1, "max_completion_tokens": 8,
    "chat_template_kwargs": {"enable_thinking": False}, "documents": [{"title": "a", "text": "b"}],
}  # fmt: skip
RESPONSE = {
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "a b"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "c"}], "id": "m"},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "1", "output": "d"}, {"type": "reasoning", "summary": []},
    ],
    "instructions": "a", "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}],
    "tool_choice": "auto", "max_output_tokens": 8, "text": {"format": {"type": "text"}}, "store": False,
    "metadata": {"a": "b"}, "reasoning": {"effort": "low"}, "previous_response_id": None, "truncation": "disabled",
}  # fmt: skip
BODIES: dict[str, list[dict[str, Any]]] = {
    "/v1/completions": [
        {**SAMPLING, **SHOWN, "prompt": "a b c", "logprobs": 1, "model": "model"},
        {**SAMPLING, "prompt": [[5, 6], [7]], "add_special_tokens": False},
        {"prompt": ["a b", "c"], "stream": True, **SHOWN},
        {"prompt": "a", "structured_outputs": {"json": {"type": "object"}, "regex": None}},
        {"prompt": "a", "structured_outputs": {"choice": ["a", "b"]}, "response_format": {"type": "text"}},
    ],
    "/v1/chat/completions": [
        {**SAMPLING, **SHOWN, **CHAT},
        {**CHAT, "stream": True, "n": 2, "tool_choice": "none"},
        {**CHAT, "tool_choice": "required", "parallel_tool_calls": False},
        {**CHAT, "tool_choice": {"type": "function", "function": {"name": "f"}}, "stream": True},
        {
            "messages": [USER],
            "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}},
        },
        {"messages": [USER], "max_tokens": 5},
    ],
    "/v1/responses": [
        {**SAMPLING, **RESPONSE, "n": 1},
        {**RESPONSE, "stream": True, "tool_choice": "none"},
        {**RESPONSE, "tool_choice": "required"},
        {
            "input": "a",
            "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}},
        },
        {"input": "a b c", "max_output_tokens": 5, "stream": True},
    ],
    "/inference/v1/generate": [
        {"token_ids": [5, 6, 7], "sampling_params": {**SAMPLING, "logprobs": 1}, "request_id": "a"},
        {"token_ids": [5], "sampling_params": {}, "stream": True, "stream_options": {"include_usage": True}},
    ],
    "/tokenize": [{"prompt": "a b", "return_token_strs": True, "add_special_tokens": True}, CHAT],
    "/detokenize": [{"tokens": [5, 6, 7]}],
    "/update_weights": [{"weight_dir": "/nowhere"}],
    "/areal_update_weights": [{"model_path": "/nowhere"}],
    "/v1/load_lora_adapter": [{"lora_name": "a", "lora_path": "/nowhere", "load_inplace": True}],
    "/v1/unload_lora_adapter": [{"lora_name": "a"}],
    "/pause": [{}],
    "/finish_session": [{}],
}
"""A route's valid bodies."""

BIG, DEEP, OBJECTS = "@big@", "@deep@", "@objects@"
RAW = {BIG: "1" * 4301, DEEP: "[" * 1500 + "]" * 1500, OBJECTS: '{"a":' * 900 + "1" + "}" * 900}
"""What the standard library would not write."""

HOSTILE: list[Any] = [
    BIG, DEEP, OBJECTS, None, True, False, 0, -1, 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64, -(2**63) - 1, 10**30, 0.5,
    -0.0, 1e-320, 1e308, float("nan"), float("inf"), -float("inf"), "", " ", "\0", "\ud800", "\udfff\ud800", "é" * 300,
    "😀" * 50, "1" * 4301, "NaN", "<tool_call>", [], {}, [[]], [None], [[1], "a"], {"": ""}, {"\0": None},
    {"\ud800": 1}, ["a"] * 9, {"1" * 4301: 1}, [5, 199, 200], "data:image/png;base64,AAAA",
    [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}], [{"type": "text", "text": "a"}],
    "[" * 1000 + "]" * 1000, '{"a": "\\ud800"}', "{{ 1 / 0 }}", [USER] * 9, [CALL] * 5,
]  # fmt: skip

LONG: list[Any] = ["a" * 70_000, [1] * 9000, ["a"] * 5000, [USER] * 3000, [CALL] * 500, {"a": [{}] * 3000}]
"""What takes time to make: one of thirty."""


class Maker:
    """Makes bodies: valid ones, with other values, other bytes, or both."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def request(self) -> tuple[str, bytes]:
        """Return a route and a body."""
        rng = self.rng
        path = rng.choice(list(BODIES))
        body = json.loads(json.dumps(rng.choice(BODIES[path])))
        for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
            body = self._changed(body)
        text = json.dumps(body, ensure_ascii=rng.random() < 0.9)
        for mark, raw in RAW.items():
            text = text.replace(f'"{mark}"', raw)
        data = text.encode(errors="surrogatepass")
        for _ in range(rng.choice((0, 0, 0, 1, 2, 8))):
            data = self._bytes(data)
        return path, data

    def _changed(self, node: Any) -> Any:
        """Return the body with another value, key or part somewhere."""
        rng = self.rng
        if isinstance(node, dict) and node and rng.random() < 0.9:
            key = rng.choice(list(node))
            match rng.randrange(12):
                case 0:
                    del node[key]
                case 1:
                    node[rng.choice((*REFUSED, *UNKEPT, "\0", "a" * 500))] = self._hostile()
                case 2:
                    node[str(rng.choice(("", "\ud800", "1" * 4301, "-1", "٣")))] = node[key]
                case _:
                    node[key] = self._changed(node[key])
            return node
        if isinstance(node, list) and node and rng.random() < 0.8:
            place = rng.randrange(len(node))
            node[place] = self._changed(node[place])
            short = len(node) < 50 and len(repr(node)) < 10_000  # else two changes make a body of gigabytes
            return node * (rng.choice((1, 1, 1, 2, 50)) if short else 1)
        return self._hostile()

    def _hostile(self) -> Any:
        return deepcopy(self.rng.choice(LONG if self.rng.random() < 1 / 30 else HOSTILE))

    def _bytes(self, data: bytes) -> bytes:
        rng, end = self.rng, len(data)
        start = rng.randrange(end + 1)
        stop = min(end, start + rng.randrange(20))
        match rng.randrange(5):
            case 0:
                return data[:start]
            case 1:
                return data[:start] + data[stop:]
            case 2:
                return data[:start] + rng.randbytes(rng.randrange(1, 5)) + data[stop:]
            case 3:
                return data[:start] + data[start:stop] * rng.choice((2, 100)) + data[stop:]
        return data[:start] + rng.choice(
            (b'"', b"[", b"{", b"}", b",", b":", b"\\", b"\\u", b"\xff", b"\0", b"e9")
        )


class Replayed(BufferClient):
    """A buffer whose engines answer at once."""

    status: Any = SimpleNamespace(engines=1, instances=[1], quarantined=[], weight_version=1)
    client: Any = None

    def capacities(self) -> list[Capacity]:
        return [
            Capacity(kv_blocks=1000, block_size=16, max_num_seqs=8, max_model_len=4096, image_tokens=4096)
        ]

    @property
    def max_model_len(self) -> int | None:
        return 4096

    async def generate(self, prompts: Any, asks: Question, sink: Any = None) -> Outcome:
        n, sampling, seed = asks.n, asks.sampling, asks.seed
        msgspec.msgpack.encode((n, sampling, seed, [[place.group, place.first_index] for place in prompts]))
        outcome = Outcome()
        for place, ids in prompts.items():
            tokens = np.array([5, 6, 7, 8], np.int32)[: min(4, sampling.max_tokens)]
            logprobs = -np.ones(len(tokens), np.float32)
            responses = tuple(
                Response(each, tokens, logprobs, None, "length", "") for each in range(min(n, 64))
            )
            if sink is not None:
                await sink(place, Delta(0, tokens[:1], logprobs[:1]))
            outcome.groups[place] = Group("p", ids, {}, 1, "", responses, 1, 0, 0)
            if sink is not None:
                await sink(place, outcome.groups[place])
        return outcome


class Control:
    """Control of nothing: every call is done at once."""

    def __getattr__(self, name: str) -> Any:
        async def done(*_: object, **__: object) -> int:
            return 1

        return done


@contextlib.asynccontextmanager
async def gateway() -> AsyncIterator[Any]:
    """Serve all routes; yields the ASGI application."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        if importlib.util.find_spec("torchvision") is not None:
            import vision_chats

            vision_chats.make(model)
        else:
            shutil.copytree(MODEL, model)
            (model / "chat_template.jinja").write_text(TEMPLATE)
        settings = GatewayConfig(tool_parser="hermes", trust_chat_templates=True)
        config = Config(shared=SharedConfig(model=str(model)), gateway=settings)
        async with application(config, Replayed) as app:
            yield app


@contextlib.asynccontextmanager
async def application(config: Config, buffer: type[BufferClient]) -> AsyncIterator[Any]:
    """Serve all routes over such a buffer; yields the ASGI application."""
    apps: list[Any] = []
    make, serving._app = serving._app, lambda routes: apps.append(make(routes)) or apps[-1]
    real, serving.BufferClient = serving.BufferClient, buffer  # type: ignore[misc]
    try:
        served = Serving(config, MemoryTransport(MemoryNetwork()))
        served.load(ControlRoutes(config, Control()).handle, {})
    finally:
        serving._app, serving.BufferClient = make, real  # type: ignore[misc]
    with contextlib.closing(served._jobs):
        await served._jobs.run("prompt", "encode", ["a"], False)
        yield apps[-1]


async def status_of(app: Any, path: str, body: bytes) -> int:
    """Return the status of an answer; 500 for one that ends in an error's part, as streams do."""
    sent: list[dict[str, Any]] = []
    given = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> dict[str, Any]:
        for message in given:
            return message
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "path": path, "headers": [],
        "raw_path": path.encode(), "root_path": "", "scheme": "http", "query_string": b"", "state": {},
    }  # fmt: skip
    async with asyncio.timeout(SECONDS):
        await app(scope, receive, send)
    content = b"".join(message.get("body", b"") for message in sent)
    return 500 if b'"code":500' in content else int(sent[0]["status"])


async def fuzz(bodies: int, seed: int) -> dict[str, Any]:
    """Return how so many bodies were answered; `harm` has the beginnings of bodies that came to any."""
    maker, statuses, routes = Maker(seed), Counter[int](), Counter[str]()
    harm: list[str] = []
    left = iter(range(bodies))
    hold = making = 0.0
    async with gateway() as app:

        async def send_all() -> None:
            nonlocal making
            for _ in left:
                began = time.monotonic()
                path, body = maker.request()
                making += time.monotonic() - began
                try:
                    status = await status_of(app, path, body)
                except Exception as error:  # noqa: BLE001 - whatever it is, the report says it
                    status = 500
                    harm.append(repr(error))
                if status == 500:
                    harm.append(f"{path} {body[:2000]!r}")
                statuses[status] += 1
                routes[path] += 1

        async def watch() -> None:
            nonlocal hold
            while True:
                began, made = time.monotonic(), making
                await asyncio.sleep(0.01)
                hold = max(hold, time.monotonic() - began - 0.01 - (making - made))

        watching = asyncio.create_task(watch())
        async with asyncio.TaskGroup() as tasks:
            for _ in range(AT_ONCE):
                tasks.create_task(send_all())
        watching.cancel()
    return {
        "bodies": statuses.total(), "seed": seed, "statuses": dict(sorted(statuses.items())), "routes": dict(routes),
        "longest_hold_seconds": round(hold, 3), "harm": harm[:20],
    }  # fmt: skip


def main() -> int:
    """Run it; 1 if anything came to harm."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bodies", type=int, default=300_000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    began = time.monotonic()
    configure(LogConfig(level="error"), "fuzz")
    report = asyncio.run(fuzz(args.bodies, args.seed))
    print(json.dumps({**report, "seconds": round(time.monotonic() - began, 1)}, indent=1))
    return int(bool(report["harm"]))


if __name__ == "__main__":
    sys.exit(main())
