"""One service as a child process.

Invariants:
- a child is ready, or says why it cannot start, on its own pipe; it is gone as soon as that pipe or
  it ends;
- it leads a session, and so a process group, of its own: what a terminal sends to ours does not
  reach it, and what it started ends with it;
- it dies with its parent (Linux);
- its log holds what its earlier lives wrote, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import msgspec

from seer.common.config import ENV_PREFIX, Config, dump
from seer.common.errors import ConfigError, SeerError

COMMAND = (sys.executable, "-m", "seer.cli.main")
"""What a child runs: its service's subcommand follows."""

TAIL_BYTES, TAIL_LINES = 16_384, 15
"""How much of a lost child's log is shown."""

_PR_SET_PDEATHSIG = 1


class LaunchError(SeerError):
    """A local system cannot start, or cannot go on."""

    code = "launch"


class StartError(LaunchError):
    """A child said why it cannot start: its log has nothing to add."""


class SettingError(StartError, ConfigError):
    """What it said was about its configuration."""

    code = "config"


class _Said(msgspec.Struct):
    """The line that a child writes once it is ready, or refuses to start."""

    error: str = ""
    code: str = ""


def die_with(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent ends (Linux; elsewhere a no-op)."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it ended before the request was made
        sys.exit(1)


class Child:
    """`log` is None when it writes to our stderr. `ready` is the pipe's reading end."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: Path | None, ready: int) -> None:
        self.name = name
        self.process = process
        self._log = log
        self._ready = ready

    @classmethod
    async def spawn(
        cls,
        service: str,
        name: str,
        config: Config,
        environ: Mapping[str, str],
        folder: Path,
        *,
        logged: bool,
    ) -> Self:
        """Start `service`; its configuration, and with `logged` its log, go into `folder`."""
        file = folder / f"{name}.toml"
        try:
            file.write_text(dump(config))
        except OSError as error:
            raise SettingError(
                f"TMPDIR: cannot write {file}: {error.strerror}; give it a disk with room"
            ) from error
        log = folder / f"{name}.log" if logged else None
        # The file holds what the environment said: it must not be said again.
        inherited = {key: value for key, value in os.environ.items() if not _is_setting(key)}
        ready, write = os.pipe()
        sink = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600) if log else os.dup(2)
        options = ("--config", str(file), "--ready-fd", str(write), "--parent-pid", str(os.getpid()))
        try:
            process = await asyncio.create_subprocess_exec(
                *COMMAND, service, *options,
                stdin=asyncio.subprocess.DEVNULL, stdout=sink, stderr=sink, pass_fds=(write,),
                env=inherited | dict(environ), start_new_session=True,
            )  # fmt: skip
        except BaseException:
            os.close(ready)
            raise
        finally:
            os.close(write)
            os.close(sink)
        return cls(name, process, log, ready)

    async def ready(self, seconds: float) -> None:
        """Wait until the child is ready; once. Raises `LaunchError` when it refuses, ends or is late."""
        reader = asyncio.StreamReader()
        pipe, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(self._ready, "rb", buffering=0)
        )
        try:
            async with asyncio.timeout(seconds):
                line = await reader.readline()
                if not line:
                    await self.process.wait()
                    raise LaunchError(self.obituary())
                said = msgspec.json.decode(line, type=_Said)
                if said.error:
                    cls = SettingError if said.code == ConfigError.code else StartError
                    raise cls(f"{self.name} cannot start: {said.error}")
        except TimeoutError:
            raise LaunchError(f"{self.name} was not ready in {seconds:.0f} s{self._last_lines()}") from None
        finally:
            pipe.close()

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        return self.process.returncode is None

    def obituary(self) -> str:
        """Say how it ended, with the end of its log."""
        code = self.process.returncode or 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"{self.name} {how}{self._last_lines()}"

    def terminate(self) -> None:
        """Send SIGTERM if it still runs."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                self.process.terminate()

    async def gone(self, seconds: float) -> None:
        """Wait for its end, at most so long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.process.wait()

    def kill_group(self) -> None:
        """Kill what is left, the process's own children included."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def _last_lines(self) -> str:
        if self._log is None:
            return ""
        with self._log.open("rb") as file:
            file.seek(max(0, self._log.stat().st_size - TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()[-TAIL_LINES:]
        return f"; the end of {self._log}:\n" + "\n".join(f"  {line}" for line in lines) if lines else ""


def _is_setting(name: str) -> bool:
    return name.startswith(ENV_PREFIX) and "__" in name
