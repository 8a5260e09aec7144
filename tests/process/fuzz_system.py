"""A real system to fuzz, and the honest rollouts that go on in it meanwhile."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
from living import resident

from seer.cli.keys import add, init
from seer.client import RolloutClient, SamplingParams
from seer.common.config import Config, SecurityConfig, dump

SERVICES = ("buffer", "context", "dgds", "engine")
OWNERS = {"trainers": "buffer", "engines": "buffer", "events": "buffer", "event_snapshots": "buffer",
          "estimates": "context", "estimate_snapshots": "context", "dgds": "dgds"}  # fmt: skip
PROMPTS = [[i + 1] * (i + 2) for i in range(6)]
USERS = ["engine:e0", "engine:*", "trainer:background", "trainer:*", "observer:*", "generator:*"]
"""Whose keys are admitted where keys are used."""

SAMPLING = SamplingParams(max_tokens=64)
DEADLINE = 120.0


class System:
    """Real processes on TCP: buffer, context, dgds and one replay engine. `commands` stand for `seer`.

    With `keys` each has one, and so must who talks to them.
    """

    def __init__(
        self,
        folder: Path,
        commands: dict[str, list[str]] | None = None,
        environ: dict[str, str] | None = None,
        *,
        keys: bool = False,
    ) -> None:
        self.folder = folder
        self.keys = folder / "keys"
        if keys:
            init(self.keys)
            add(self.keys, USERS, "")
        ports = _free_ports(len(OWNERS))
        self.at = {name: f"tcp://127.0.0.1:{port}" for name, port in zip(OWNERS, ports, strict=True)}
        table = {
            "endpoints": self.at,
            "buffer": {"chunk_size": 16, "result_ttl_seconds": 5.0, "max_requests": 20_000},
            "dgds": {"max_tokens": 2_000_000},
            "engine": {"backend": "replay", "name": "e0", "replay": {"mean_tokens": 40}},
            "log": {"format": "json"},
        }
        (folder / "seer.toml").write_text(dump(msgspec.convert(table, Config)))
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        for name in SERVICES:
            with self.log(name).open("wb") as log:
                command = (commands or {}).get(name, [sys.executable, "-m", "seer.cli.main"])
                self.processes[name] = subprocess.Popen(
                    [*command, name, "--config", str(folder / "seer.toml")],
                    stderr=log, env={**os.environ, **(environ or {}), **(self._key(name) if keys else {})},
                )  # fmt: skip

    def _key(self, service: str) -> dict[str, str]:
        security = self.security("engine-e0" if service == "engine" else "server")
        peers = self.keys / "public" / "peers"
        return {
            "SEER_SECURITY__KEY": security.key, "SEER_SECURITY__SERVER": security.server,
            "SEER_SECURITY__PEERS": str(peers),
        }  # fmt: skip

    def security(self, key: str) -> SecurityConfig:
        """What the holder of a key configures; without keys nothing."""
        if not self.keys.exists():
            return SecurityConfig()
        return SecurityConfig(
            key=str(self.keys / f"{key}.key"), server=str(self.keys / "public" / "server.pub")
        )

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def lines(self, name: str) -> list[dict]:
        """Return what a service logged; a line that is no JSON is a traceback's."""
        lines = self.log(name).read_text().splitlines()
        return [json.loads(line) if line[:1] == "{" else {"level": "error", "event": line} for line in lines]

    @property
    def alive(self) -> bool:
        return all(process.poll() is None for process in self.processes.values())

    def rss_mib(self) -> dict[str, float]:
        """Resident memory of each service."""
        return {name: round(resident(each.pid) / 2**20, 1) for name, each in self.processes.items()}

    def stop(self) -> dict[str, int]:
        """Drain all, the buffer first: its work needs the engine. Return their exit codes."""
        codes = {}
        for name in SERVICES:
            self.processes[name].send_signal(signal.SIGTERM)
            codes[name] = self.processes[name].wait(DEADLINE)
        return codes

    def kill(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()


class Honest(threading.Thread):
    """Rollouts of the same prompts, one after the other; `wrong` counts those that came out differently."""

    def __init__(self, system: System, known: list[str]) -> None:
        super().__init__(daemon=True)
        self.system = system
        self.known = known
        self.rollouts = self.wrong = 0
        self.slowest = 0.0
        self.error = ""
        self.expected: list[list[list[int]]] | None = None
        self.stopping = threading.Event()

    def run(self) -> None:
        try:
            asyncio.run(self._run())
        except Exception as error:  # noqa: BLE001 - whatever it is, the report says it
            self.error = repr(error)

    async def _run(self) -> None:
        async with self.client("background") as client:
            while not self.stopping.is_set():
                started = time.monotonic()
                got = await asyncio.wait_for(self.once(client), DEADLINE)
                self.slowest = max(self.slowest, time.monotonic() - started)
                self.expected = self.expected or got
                self.wrong += got != self.expected
                self.rollouts += 1

    def client(self, name: str) -> RolloutClient:
        """Return a client with a trainer's key, if keys are used."""
        return RolloutClient(
            self.system.at["trainers"], name=name, security=self.system.security("trainer-background")
        )

    async def once(self, client: RolloutClient) -> list[list[list[int]]]:
        rollout = await client.submit(PROMPTS, n=4, sampling=SAMPLING, rollout_number=0, repeat=True)
        self.known[:] = [f"{rollout.id}/{i}#{k}" for i in range(3) for k in range(2)] + [
            f"{rollout.id}/0",
            "e0",
        ]
        return [[r.token_ids.tolist() for r in group.responses] for group in await rollout.result()]


def _free_ports(count: int) -> list[int]:
    taken = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [server.getsockname()[1] for server in taken]
    for server in taken:
        server.close()
    return ports
