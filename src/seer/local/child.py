"""One service as a child process.

Invariants:
- a child reports on a pipe of its own that the child is ready, or why it cannot start; if the pipe closes
  first, the child has ended;
- a child has its own session and process group: signals from our terminal do not reach the child, and its
  whole group is killed when the child ends;
- a child is killed when its parent ends (Linux);
- a child that is started again appends to its log.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import msgspec

from seer.common.config import ENV_PREFIX, Config, dump
from seer.common.errors import NOT_DECODED, ConfigError, SeerError
from seer.common.process.children import how_ended

COMMAND = (sys.executable, "-m", "seer.cli.main")
"""The command of a child; its service's subcommand follows."""

TAIL_BYTES, TAIL_LINES = 16_384, 15
"""How much is shown of the log of a child that ended unexpectedly."""


class LaunchError(SeerError):
    """A local system cannot start, or cannot go on."""

    code = "launch"


class StartError(LaunchError):
    """A child reported why it cannot start, so its log need not be shown."""


class SettingError(StartError, ConfigError):
    """A child cannot start because of its configuration."""

    code = "config"


class _StartReport(msgspec.Struct):
    """The line that a child writes when the child is ready, or cannot start."""

    error: str = ""
    code: str = ""


class Child:
    """`log` is None if it writes to our stderr. `ready` is the reading end of its pipe."""

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
        """Start `service`. Its configuration, and with `logged` its log, are files in `folder`."""
        file = folder / f"{name}.toml"
        try:
            file.write_text(dump(config))
        except OSError as error:
            raise SettingError(
                f"TMPDIR: cannot write {file}: {error.strerror}; give it a disk with room"
            ) from error
        log = folder / f"{name}.log" if logged else None
        # The file contains what the environment set, so the child must not read that again.
        inherited = {key: value for key, value in os.environ.items() if not _is_setting(key)}
        opened: list[int] = []
        try:
            opened += os.pipe()
            opened.append(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600) if log else os.dup(2))
            ready, write, sink = opened
            options = ("--config", str(file), "--ready-fd", str(write), "--parent-pid", str(os.getpid()))
            process = await asyncio.create_subprocess_exec(
                *COMMAND, service, *options,
                stdin=asyncio.subprocess.DEVNULL, stdout=sink, stderr=sink, pass_fds=(write,),
                env=inherited | dict(environ), start_new_session=True,
            )  # fmt: skip
            opened.remove(ready)
        except OSError as error:  # as of too many processes, or open files
            raise LaunchError(f"{name} cannot be started: {error}") from error
        finally:
            for each in opened:
                os.close(each)
        return cls(name, process, log, ready)

    async def ready(self, seconds: float) -> None:
        """Wait until the child is ready; call once. Raises `LaunchError` when it cannot start, ends or is
        late.
        """
        reader = asyncio.StreamReader()
        pipe, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(self._ready, "rb", buffering=0)
        )
        try:
            async with asyncio.timeout(seconds):
                line = await reader.readline()
                if not line:
                    await self.process.wait()
                    raise LaunchError(self.exit_report())
                report = msgspec.json.decode(line, type=_StartReport)
                if report.error:
                    cls = SettingError if report.code == ConfigError.code else StartError
                    raise cls(f"{self.name} cannot start: {report.error}")
        except (*NOT_DECODED, ValueError) as error:  # `ValueError`: a line without an end
            raise LaunchError(
                f"{self.name} told its start in a way unknown here: {error}{self._last_lines()}"
            ) from error
        except TimeoutError:
            raise LaunchError(f"{self.name} was not ready in {seconds:.0f} s{self._last_lines()}") from None
        finally:
            pipe.close()

    @property
    def alive(self) -> bool:
        """Whether the process still runs."""
        return self.process.returncode is None

    def exit_report(self) -> str:
        """Return a text of how it ended, with the end of its log."""
        return f"{self.name} {how_ended(self.process.returncode or 0)}{self._last_lines()}"

    def terminate(self) -> None:
        """Send SIGTERM if it still runs."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                self.process.terminate()

    async def gone(self, seconds: float) -> None:
        """Wait until it ends, at most `seconds`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.process.wait()

    def kill_group(self) -> None:
        """Kill its process group: the process and its own children."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def _last_lines(self) -> str:
        if self._log is None:
            return ""
        try:
            with self._log.open("rb") as file:
                file.seek(max(0, self._log.stat().st_size - TAIL_BYTES))
                lines = file.read().decode(errors="replace").splitlines()[-TAIL_LINES:]
        except OSError as error:  # as of a cleaned temporary folder
            return f"; its log cannot be read: {error}"
        return f"; the end of {self._log}:\n" + "\n".join(f"  {line}" for line in lines) if lines else ""


def _is_setting(name: str) -> bool:
    return name.startswith(ENV_PREFIX) and "__" in name
