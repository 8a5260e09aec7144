"""One service of Seer as the child of a Ray actor.

Invariants:
- the child is killed with its actor (Linux), and an actor whose child ended by itself ends, too: Ray then
  starts both again;
- keys are files in a folder of the actor's own; they stand neither on a command line nor in a log.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import msgspec

from seer.common.config import ENV_PREFIX, Config, SecurityConfig, dump
from seer.common.process.scratch import Scratch, sweep
from seer.local.child import COMMAND

PAUSE_SECONDS = 2.0
"""Between the end of a child and that of its actor: what cannot run is not started again without a pause."""

DRAIN_SECONDS, STOP_SECONDS = 20.0, 5.0
"""Longest wait for a child after the first SIGTERM, and after the second."""


class KeyTexts(msgspec.Struct, frozen=True):
    """What a process is given: its secret, the services' key, and the list of admitted keys, if any."""

    secret: str
    server: str
    peers: str = ""

    def write(self, folder: Path) -> SecurityConfig:
        """Write them into a folder that only this user can enter; return the settings that name them."""
        secret, peers = folder / "key", folder / "peers"
        secret.touch(0o600)
        secret.write_text(self.secret)
        peers.write_text(self.peers)
        return SecurityConfig(key=str(secret), server=self.server, peers=str(peers) if self.peers else "")


class ServiceProcess:
    """The class of all actors. It starts its child at once; `ready` says how that went.

    The child is started on the thread that makes the actor, which lives as long as the actor does: the kernel
    ends a child with the thread that started it.
    """

    def __init__(self, service: str, config: Config, keys: KeyTexts) -> None:
        self._service = service
        sweep(tempfile.gettempdir())  # what a killed actor left
        self._scratch = Scratch("ray", tempfile.gettempdir())
        file = self._scratch.path / "seer.toml"
        file.write_text(dump(msgspec.structs.replace(config, security=keys.write(self._scratch.path))))
        self._ready, write = os.pipe()
        options = ("--config", str(file), "--ready-fd", str(write), "--parent-pid", str(os.getpid()))
        # The file has all settings. GPUs stay as Ray chose them for this actor, in CUDA_VISIBLE_DEVICES.
        environ = {name: text for name, text in os.environ.items() if not name.startswith(ENV_PREFIX)}
        self._process = subprocess.Popen(
            [*COMMAND, service, *options],
            stdin=subprocess.DEVNULL, pass_fds=(write,), env=environ, start_new_session=True,
        )  # fmt: skip
        os.close(write)
        self._stopping = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def ready(self, seconds: float) -> str:
        """Wait until the child is ready; return why it cannot start, or nothing. Call once."""
        deadline, line = time.monotonic() + seconds, b""
        while not line.endswith(b"\n"):
            if not select.select([self._ready], [], [], max(0.0, deadline - time.monotonic()))[0]:
                return f"{self._service} was not ready in {seconds:.0f} s"
            if not (chunk := os.read(self._ready, 65_536)):
                return f"{self._service} ended as it started; Ray's logs of this actor say why"
            line += chunk
        os.close(self._ready)
        return str(msgspec.json.decode(line).get("error", ""))

    def pid(self) -> int:
        """Return the child's process id."""
        return self._process.pid

    def stop(self) -> None:
        """Drain the child, or end it if that takes too long."""
        self._stopping.set()
        for patience in (DRAIN_SECONDS, STOP_SECONDS):
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(patience)
                break
        self._kill()
        self._scratch.close()

    def _watch(self) -> None:
        self._process.wait()
        if not self._stopping.wait(PAUSE_SECONDS):
            self._kill()
            self._scratch.close()
            os._exit(1)  # not `exit_actor`, after which Ray would not start it again

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
