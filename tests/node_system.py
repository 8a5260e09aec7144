"""A system with one engine of two ranks, each on a node of its own: a network namespace of this machine.

The other services are outside of it, and reached over Unix sockets, which know no network namespaces.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from chaos.network import Network
from up import ENDPOINTS

from seer.client import RolloutClient

NODES = ("leader", "other")
SERVICES = ("buffer", "context", "dgds")
START_SECONDS = 150.0


class NodeSystem:
    """Use as an asynchronous context. `settings` are those of all processes. `client` is a trainer's."""

    client: RolloutClient

    def __init__(self, model: Path, *settings: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="s", dir="/tmp"))
        self.network = Network()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        addresses = [self.network.add(name) for name in NODES]
        given = [f"endpoints.{name}=ipc://{self.folder}/{name}" for name in ENDPOINTS]
        given += [
            f"shared.model={model}",
            "engine.tensor_parallel=2",
            "engine.nodes=2",
            "security.insecure=true",
        ]
        self._settings = [*given, f"engine.leader=tcp://{addresses[0]}:7120", "engine.name=e0", *settings]

    async def __aenter__(self) -> NodeSystem:
        for name in SERVICES:
            self._run(name, name, [])
        for name in NODES:
            await self.start(name)
        self.client = RolloutClient(f"ipc://{self.folder}/trainers")
        await self.client.__aenter__()
        await self.registered()
        return self

    async def __aexit__(self, failed: type[BaseException] | None, *_: object) -> None:
        await self.client.__aexit__(None, None, None)
        for process in self.processes.values():
            process.kill()
            process.wait()
        self.network.close()
        if failed is None:
            shutil.rmtree(self.folder)

    async def start(self, node: str, *settings: str) -> None:
        """Start a node's process in its namespace."""
        core = sorted(os.sched_getaffinity(0))[NODES.index(node) % len(os.sched_getaffinity(0))]
        own = [f"engine.node_rank={NODES.index(node)}", f"engine.cpu_cores={core}", *settings]
        async with self.network.entering:
            with self.network.inside(node):
                self._run(node, "engine", own)

    async def service(self, name: str) -> None:
        """Start a further service on the leader's node, and wait until it is ready."""
        async with self.network.entering:
            with self.network.inside("leader"):
                self._run(name, name, [])
        async with asyncio.timeout(START_SECONDS):
            while " ready " not in self.log(name):
                await asyncio.sleep(0.1)

    async def registered(self, *, after: bool = False) -> None:
        """Wait until the buffer has the engine; `after`: that of new processes, which it does not know yet."""
        async with asyncio.timeout(START_SECONDS):
            while after and (await self.client.status()).instances:
                await asyncio.sleep(0.1)
            while not (await self.client.status()).instances:
                ended = [node for node in NODES if self.processes[node].poll() is not None]
                assert not ended, "\n".join(f"{node}:\n{self.log(node)}" for node in NODES)
                await asyncio.sleep(0.2)

    async def ended(self, node: str, seconds: float) -> int:
        """Return a node's exit code once it has ended; fail if that takes longer."""
        async with asyncio.timeout(seconds):
            while (code := self.processes[node].poll()) is None:
                await asyncio.sleep(0.05)
        return code

    def signal(self, node: str, number: signal.Signals) -> None:
        """Send a signal to a node's process, not to its ranks."""
        self.processes[node].send_signal(number)

    def log(self, name: str) -> str:
        """Return what a process has written."""
        return (self.folder / f"{name}.log").read_text()

    def _run(self, name: str, service: str, settings: list[str]) -> None:
        command = [sys.executable, "-m", "seer.cli.main", service]
        command += [part for each in (*self._settings, *settings) for part in ("--set", each)]
        environ = os.environ | {
            "GLOO_SOCKET_IFNAME": "lo"
        }  # as an engine of one node leaves it to its children
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environ
            )
