"""Has work on requests done in processes that can be ended: the asking side of `jobs`.

Invariants (tests/unit/test_gateway_jobs.py):
- a job is tried for `QUICK_SECONDS` among the quick jobs; a job that takes longer begins again among the slow
  jobs, so that no quick job waits for a slow one;
- a job that nobody waits for any more is ended;
- a job that was ended by its bounds is refused by its field; the process that forks is started again if that
  process died.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import subprocess
import sys
from typing import Any

import msgspec

from seer.gateway.errors import HttpError, bad
from seer.gateway.jobs import CPU_SECONDS, MEMORY, Answer

QUICK_SECONDS = 0.5
"""A screen of two million pixels, or a text of 100,000 tokens, takes a third of it."""

AT_ONCE = 2
"""Quick jobs, and slow ones, that run side by side: each may take a core, and `MEMORY`."""

_answer = msgspec.msgpack.Decoder(Answer)


class JobProcesses:
    """`start` before use. `model`: a Hugging Face folder; `trust`: requests may bring chat templates.

    `seconds` of a core are the most that a job may take.
    """

    def __init__(self, model: str, *, trust: bool, seconds: int = CPU_SECONDS) -> None:
        self._seconds = seconds
        self._arguments = (model, str(int(trust)), str(seconds))
        self._quick = asyncio.Semaphore(AT_ONCE)
        self._slow = asyncio.Semaphore(AT_ONCE)
        self._process: subprocess.Popen[bytes] | None = None
        self._control, _ = socket.socketpair()

    def start(self) -> None:
        """Start the process that forks, or start it again. Its loading is not waited for."""
        self.close()
        self._control, theirs = socket.socketpair()
        self._control.setblocking(False)
        command = [sys.executable, "-m", "seer.gateway.jobs", str(theirs.fileno()), *self._arguments]
        # One thread: threads that exist are not forked, and those that wait for them would hang.
        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        environ = {**os.environ, **threads, "TOKENIZERS_PARALLELISM": "false"}
        self._process = subprocess.Popen(command, pass_fds=(theirs.fileno(),), env=environ)
        theirs.close()

    def close(self) -> None:
        """End the process that forks."""
        self._control.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    async def run(self, field: str, name: str, *arguments: object) -> Any:  # noqa: ANN401 - by the job
        """Return what a method of `Jobs` returns. Raises `HttpError` that names `field`."""
        try:
            request = msgspec.msgpack.encode((field, name, arguments))
        except OverflowError as error:
            raise bad(field, "a number", "whole numbers must be between -2^63 and 2^64") from error
        try:
            async with self._quick, asyncio.timeout(QUICK_SECONDS):
                answer = await self._once(request)
        except TimeoutError:
            async with self._slow:
                answer = await self._once(request)
        if not answer:
            fix = (
                f"takes more than {self._seconds} s of a core or {MEMORY >> 30} GiB to read: make it smaller"
            )
            raise bad(field, f"{len(request)} bytes", fix)
        told = _answer.decode(answer)
        if told.status != 200:
            raise HttpError(told.status, told.error, told.param)
        return told.result

    async def _once(self, request: bytes) -> bytes:
        """Return the answer of one process; nothing if the process was ended by its bounds.

        Raises `HttpError` if the process that forks has ended.
        """
        if self._process is None or self._process.poll() is not None:
            self.start()
        forks = self._process
        mine, theirs = socket.socketpair()
        mine.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=mine, limit=2**22)
        try:
            with theirs:
                await self._hand_over(theirs.fileno())
            writer.write(request)
            writer.write_eof()
            answer = await reader.read()
        except ConnectionError:
            answer = b""
        finally:
            writer.transport.abort()
        if not answer and (forks is None or forks is not self._process or forks.poll() is not None):
            raise HttpError(503, "the process that reads texts and images has ended: it is started again")
        return answer

    async def _hand_over(self, job: int) -> None:
        """Send a job's socket to the process that forks, once that has room for it. Raises `HttpError`."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + 10 * self._seconds
        while True:
            try:
                socket.send_fds(self._control, [b"j"], [job])
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.ETOOMANYREFS):
                    return  # it has ended
                if loop.time() >= deadline:
                    raise HttpError(
                        503, "the process that reads texts and images takes no work yet"
                    ) from error
            else:
                return
            await asyncio.sleep(0.02)
