"""A child process of a pool's service: Mooncake's master, or the holder of the pool's memory.

Invariants:
- it is killed when the service ends, however that ends (Linux);
- it is in the service's process group, and logs to the service's stderr;
- Mooncake itself is never imported here: its calls can hang, and a hung thread cannot be ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, Self, TypeVar

from seer.common.process.children import die_with, how_ended

T = TypeVar("T")

END_SECONDS = 5.0
"""A killed process ends in milliseconds; one with much memory takes longer."""


class Program:
    """A running program. Raises `OSError` when it cannot be started."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, command: Sequence[str], environ: Mapping[str, str]) -> Self:
        """Start it; its standard output is read with `line`."""
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, **environ},
            preexec_fn=functools.partial(die_with, os.getpid()),
        )
        return cls(process)

    @property
    def ended(self) -> bool:
        """Whether the program has ended."""
        return self._process.returncode is not None

    async def line(self) -> str:
        """Return the next line that the program prints; empty once the program has ended."""
        if self._process.stdout is None:
            return ""
        return (await self._process.stdout.readline()).decode(errors="replace").strip()

    async def wait(self) -> str:
        """Wait for its end; return how it ended."""
        while await self.line():  # a full pipe would stop it
            pass
        return how_ended(await self._process.wait())

    async def kill(self) -> None:
        """Kill the program, and wait until it has ended, `END_SECONDS` at most."""
        with contextlib.suppress(ProcessLookupError, TimeoutError):
            self._process.kill()
            async with asyncio.timeout(END_SECONDS):
                await self._process.wait()


async def first_ended(*works: Coroutine[Any, Any, T]) -> T:
    """Return what the first call returns, or raise what that call raised; the others are cancelled."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        results = [task.result() for task in done]
        return results[0]
    finally:
        for task in tasks:
            task.cancel()
