"""Connections that send nothing, or little, by the thousand, and a gateway that stands still for a while."""

from __future__ import annotations

import os
import signal
import socket
from contextlib import ExitStack

import gateway_system
import httpx
import pytest
from gateway_system import SEER, GatewaySystem, wait_for

FILES = 400
CONNECTIONS = 700


def idle(url: str) -> socket.socket:
    """A connection on which a request begins, and does not go on."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    made = socket.create_connection((host, int(port)), timeout=60)
    made.sendall(b"POST /v1/comp")
    return made


def answered(url: str) -> bool:
    try:
        return httpx.get(f"{url}/version", timeout=60).status_code == 200
    except httpx.TransportError:
        return False


def test_idle_connections_take_no_file_that_others_need(monkeypatch: pytest.MonkeyPatch) -> None:
    """More of them than the process may open files: one too many is told so, and all else goes on."""
    few = ("bash", "-c", f'ulimit -n {FILES}; exec "$0" "$@"', *SEER)
    monkeypatch.setattr(gateway_system, "SEER", few)
    with GatewaySystem() as system, ExitStack() as held:
        addresses = ("gateway.data=127.0.0.1:0", "gateway.control=127.0.0.1:0", "gateway.client_seconds=10")
        system.start("gateway", *addresses, gateway=True)
        system.ready("gateway")
        data, control = (system.urls["gateway"][name] for name in ("data", "control"))
        made = [held.enter_context(idle(data)) for _ in range(CONNECTIONS)]
        assert made[-1].recv(12) == b"HTTP/1.1 503"
        assert answered(control)
        long = httpx.post(f"{control}/tokenize", json={"prompt": "1 " * 40_000}, timeout=60)
        assert long.json()["count"] == 40_000, "a process of its own needs files, too"
        wait_for(lambda: answered(data), system)
        process = system.processes["gateway"]
        os.kill(process.pid, signal.SIGSTOP)
        waiting = idle(data)
        os.kill(process.pid, signal.SIGCONT)
        waiting.close()
        assert answered(data)
