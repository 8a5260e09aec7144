"""What all routes share: reading bodies, answering, ending work whose client left.

Invariants:
- a body is read up to `most` bytes and `seconds`; more is refused, and the connection closed;
- work ends when its client disconnects;
- every outcome is an answer of `errors.py`'s form, and is counted; of a stream once it has ended;
- a stream waits for its client to read, and ends in an error's part if it cannot go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from seer.common.errors import SeerError
from seer.common.process.log import get_logger
from seer.gateway.errors import HttpError, as_http
from seer.gateway.stream_answers import DONE, event

T = TypeVar("T")

CLIENT_LEFT = 499
"""Status in the log of a request whose client disconnected; nobody reads it."""

_log = get_logger()

Handler = Callable[[Request], Awaitable[Response]]


def answer(body: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a JSON response."""
    return Response(msgspec.json.encode(body), status, headers, "application/json")


def refusal(error: HttpError) -> Response:
    """Return the response for an error."""
    return answer(error.body, error.status, error.headers)


def endpoint(handler: Handler, counters: Counter[str]) -> Handler:
    """Return a handler that answers its errors, and counts how requests end."""

    @functools.wraps(handler)
    async def handle(request: Request) -> Response:
        counters["requests"] += 1
        try:
            response = await handler(request)
        except ClientDisconnect:
            counters["cancelled"] += 1
            return Response(status_code=CLIENT_LEFT)
        except Exception as error:  # noqa: BLE001 - told, and no other request is affected
            return refusal(_told(request, error, counters))
        if isinstance(response, EventStream):
            response.counters = counters
        else:
            counters["completed"] += 1
        return response

    return handle


def _told(request: Request, error: Exception, counters: Counter[str]) -> HttpError:
    """Count and log an error; return what the client is told of it."""
    path = request.url.path
    if not isinstance(error, SeerError):
        counters["failed"] += 1
        _log.error("a request failed", path=path, exc_info=error)
        return HttpError(500, "the gateway failed: its log says why")
    told = as_http(error)
    counters["refused" if told.status < 500 else "failed"] += 1
    _log.debug("not served", path=path, status=told.status, error=str(told))
    return told


class EventStream(Response):
    """Server-sent events: `first` and what `parts` yields. An error of `parts` is a part, and the last.

    It counts how it ended in `counters`. `parts` is closed.
    """

    media_type = "text/event-stream"
    counters: Counter[str]

    def __init__(self, request: Request, first: bytes, parts: AsyncGenerator[bytes]) -> None:
        super().__init__()
        del self.headers["content-length"]
        self._request = request
        self._first = first
        self._parts = parts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it (ASGI). A client that reads nothing is disconnected by the kernel: `sockets`."""
        try:
            async with contextlib.aclosing(self._parts):
                await unless_gone(self._request, self._send(send))
        except ClientDisconnect:
            self.counters["cancelled"] += 1

    async def _send(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        await send(start)
        await send(_body(self._first))
        try:
            async for part in self._parts:
                await send(_body(part))
            self.counters["completed"] += 1
        except Exception as error:  # noqa: BLE001 - told, and no other request is affected
            told = _told(self._request, error, self.counters)
            await send(_body(event(told.body) + DONE))
        await send(_body(b"", more=False))


def _body(part: bytes, *, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": part, "more_body": more}


async def body_of(request: Request, most: int, seconds: float) -> bytes:
    """Return a request's body. Raises `HttpError` 413 or 408, `ClientDisconnect`."""
    too_long = HttpError(413, f"the body is longer than {most} bytes (gateway.max_body_bytes)")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > most:
        raise too_long
    parts = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for part in request.stream():
                parts += part
                if len(parts) > most:
                    raise too_long
    except TimeoutError as error:
        raise HttpError(
            408, f"the body did not arrive within {seconds:g} s (gateway.client_seconds)"
        ) from error
    return bytes(parts)


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return what work returns. Cancels it when the client disconnects; then raises `ClientDisconnect`.

    The request's body must have been read.
    """
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.wait([task, gone])


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
