"""Calls both ways between a gateway's processes: JSON lines over a pair of sockets.

Invariants:
- every call ends: with its result, the error of the other side, `LinkLost` or its deadline;
- calls begin on the other side in the order in which they were made;
- at most `MOST_CALLS` calls of the other side are served at once;
- a call, or an answer, that is too long fails alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from seer.common.errors import SeerError
from seer.common.process.log import get_logger
from seer.gateway.errors import HttpError, as_http

MOST_CALLS = 256

LINE_BYTES = 2**20
"""Longest message: a configuration, or an error that names many engines."""

_log = get_logger()

Serve = Callable[[str, list[Any]], Awaitable[object]]
"""Does what a call asks for, given its name and arguments."""


class LinkLost(SeerError):  # noqa: N818 - reads as what it says
    """The process on the other side has ended."""


class _Message(msgspec.Struct, omit_defaults=True):
    """A call has a name; anything else answers the call of that number."""

    number: int
    name: str = ""
    arguments: list[Any] = []
    result: Any = None
    status: int = 0
    error: str = ""
    param: str | None = None


class Link:
    """One side. `run` must run for calls to be answered."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, serve: Serve) -> None:
        self._reader = reader
        self._writer = writer
        self._serve = serve
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._served: set[asyncio.Task[None]] = set()
        self._lost = False

    @classmethod
    async def over(cls, end: socket.socket, serve: Serve) -> Link:
        """Return a link over one end of a pair of sockets."""
        end.setblocking(False)
        return cls(*await asyncio.open_connection(sock=end, limit=LINE_BYTES), serve)

    async def call(self, name: str, *arguments: object, seconds: float) -> Any:  # noqa: ANN401
        """Return what the other side does. Raises `HttpError`, `LinkLost`, `TimeoutError`."""
        number = next(self._numbers)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            async with asyncio.timeout(seconds):
                await self._send(_Message(number, name, list(arguments)))
                return await answer
        finally:
            del self._waiting[number]

    async def run(self) -> None:
        """Serve calls and take answers until the other side ends."""
        try:
            with contextlib.suppress(ConnectionError, ValueError):  # a line that is too long
                while line := await self._reader.readline():
                    self._take(msgspec.json.decode(line, type=_Message))
        finally:
            self._lost = True
            for answer in self._waiting.values():
                if not answer.done():
                    answer.set_exception(LinkLost("the process has ended"))
            for task in self._served:
                task.cancel()
            self._writer.close()

    def _take(self, message: _Message) -> None:
        if message.name:
            task = asyncio.create_task(self._answer(message, full=len(self._served) >= MOST_CALLS))
            self._served.add(task)
            task.add_done_callback(self._served.discard)
            return
        answer = self._waiting.get(message.number)
        if answer is None or answer.done():
            return
        if message.status:
            answer.set_exception(HttpError(message.status, message.error, message.param))
        else:
            answer.set_result(message.result)

    async def _answer(self, call: _Message, *, full: bool) -> None:
        try:
            if full:
                raise HttpError(503, f"{MOST_CALLS} calls of this process are under way")
            reply = _Message(call.number, result=await self._serve(call.name, call.arguments))
        except SeerError as error:
            told = as_http(error)
            reply = _Message(call.number, status=told.status, error=str(told)[:4096], param=told.param)
        except Exception:  # noqa: BLE001 - logged, and no other call is affected
            _log.exception("a call failed", call=call.name)
            reply = _Message(call.number, status=500, error="the gateway failed: its log says why")
        with contextlib.suppress(LinkLost):
            try:
                await self._send(reply)
            except HttpError as error:
                await self._send(_Message(call.number, status=500, error=f"the answer is {error}"))

    async def _send(self, message: _Message) -> None:
        if self._lost:
            raise LinkLost("the process has ended")
        line = msgspec.json.encode(message) + b"\n"
        if len(line) > LINE_BYTES:  # the other side would end the link
            raise HttpError(413, f"longer than {LINE_BYTES} bytes with all that comes with it")
        try:
            self._writer.write(line)
            await self._writer.drain()
        except ConnectionError as error:
            raise LinkLost("the process has ended") from error
