"""A system with replay engines and gateways, as processes that can be killed."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any, Self

import httpx
import pytest

MODEL = Path(__file__).parents[1] / "examples" / "countdown" / "model"
SEER = (sys.executable, "-m", "seer.cli.main")
SOCKETS = ("trainers", "engines", "events", "event_snapshots", "estimates", "estimate_snapshots", "dgds")
TEMPLATE = (
    "{% if tools %}ans {% for tool in tools %}{{ tool.function.name }} {% endfor %}{% endif %}"
    "{% for message in messages %}"
    "{% if message.role == 'assistant' %}= {% endif %}{{ message.content }} {% endfor %}"
    "{% if add_generation_prompt %}={% endif %}"
)
"""In words that the shipped model's tokenizer knows; other than its own, it shows tools and turns."""

REPLAY = ("engine.backend=replay", "engine.replay.vocab_size=66", "engine.replay.step_seconds=0.01")
ENDLESS = {"ignore_eos": True, "max_tokens": 50_000}
"""Sampling of a request that is under way for as long as any test runs."""


class GatewaySystem:
    """Use in a `with`; `backend`: settings of the engines. `model`: a folder, which is copied."""

    def __init__(self, *backend: str, model: Path = MODEL) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="s", dir="/tmp"))
        self.model = self.folder / "model"
        shutil.copytree(model, self.model)
        (self.model / "chat_template.jinja").write_text(TEMPLATE)
        self.endpoint = f"ipc://{self.folder}/trainers"
        self._backend = backend or REPLAY
        self._log = (self.folder / "log").open("ab")
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.urls: dict[str, dict[str, str]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for name in list(self.processes):
            self.kill(name)
        self._log.close()
        shutil.rmtree(self.folder)

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def start(self, name: str, *settings: str, gateway: bool = False) -> None:
        """Start a service by its name, or `engine-…`, or with `gateway` one by that name."""
        common = [f"endpoints.{each}=ipc://{self.folder}/{each}" for each in SOCKETS]
        common += [f"shared.model={self.model}", "buffer.chunk_size=16", *settings]
        if name.startswith("engine"):
            common += [f"engine.name={name}", *self._backend]
        sets = [part for each in common for part in ("--set", each)]
        command = "gateway" if gateway else name.partition("-")[0]
        read, write = os.pipe()
        self.processes[name] = subprocess.Popen(
            [*SEER, command, *sets, "--ready-fd", str(write)], stderr=self._log, pass_fds=(write,)
        )
        os.close(write)
        if not gateway:
            os.close(read)
            return
        self.urls[name] = {"fd": str(read)}

    def ready(self, name: str) -> None:
        """Wait until a gateway has said where it listens."""
        with os.fdopen(int(self.urls[name]["fd"])) as pipe:
            line = pipe.readline()
        assert line, self.log
        found = json.loads(line)
        assert "endpoints" in found, found
        self.urls[name] = {key.partition(".")[2]: url for key, url in found["endpoints"].items()}

    def kill(self, name: str) -> None:
        process = self.processes.pop(name)
        process.kill()
        process.wait()

    def start_gateways(self, settings: Mapping[str, tuple[str, ...]]) -> None:
        """Start gateways, each on free ports, at the same time: most of the time they import libraries."""
        for name, own in settings.items():
            self.start(name, "gateway.data=127.0.0.1:0", "gateway.control=127.0.0.1:0", *own, gateway=True)
        for name in settings:
            self.ready(name)
            self.healthy(name)

    def healthy(self, name: str) -> None:
        url = f"{self.urls[name]['control']}/health"
        wait_for(lambda: httpx.get(url).status_code == 200, self)

    def counts(self, name: str) -> dict[str, int]:
        info: dict[str, Any] = httpx.get(f"{self.urls[name]['control']}/server_info").json()
        counters: dict[str, int] = info["seer"]["counters"]
        return counters


def wait_for(condition: Callable[[], object], system: GatewaySystem, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited too long\n{system.log[-3000:]}"
        time.sleep(0.05)


def other(system: GatewaySystem, name: str) -> httpx.AsyncClient:
    """A client of all routes of the gateway `name`."""
    return httpx.AsyncClient(base_url=system.urls[name]["control"], timeout=120)


@pytest.fixture
async def http(system: GatewaySystem) -> AsyncIterator[httpx.AsyncClient]:
    """A client of all routes of the gateway "gateway"."""
    async with other(system, "gateway") as client:
        yield client


async def ok(response: Any) -> dict[str, Any]:
    """The body of an answer that must be 200."""
    got = await response
    assert got.status_code == 200, got.text
    body: dict[str, Any] = got.json()
    return body


def refused(response: httpx.Response, status: int) -> str:
    """The message of an error that must have this status."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == status
    assert ("retry-after" in response.headers) == (status == 503)
    message: str = error["message"]
    return message


async def under_way(system: GatewaySystem, name: str = "gateway", count: int = 1) -> None:
    """Wait until the buffer works on so many submissions of a gateway."""
    await asyncio.to_thread(wait_for, lambda: system.counts(name)["under_way"] == count, system)
