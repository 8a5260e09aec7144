"""What all routes share: reading bodies, answering, ending work whose client left.

Invariants:
- a body is read up to `most` bytes and `seconds`; more is refused, and the connection closed;
- work ends when its client disconnects;
- every outcome is an answer of `errors.py`'s form, and is counted.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from seer.common.errors import SeerError
from seer.common.process.log import get_logger
from seer.gateway.errors import HttpError, as_http

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

    async def handle(request: Request) -> Response:
        counters["requests"] += 1
        try:
            response = await handler(request)
        except ClientDisconnect:
            counters["cancelled"] += 1
            return Response(status_code=CLIENT_LEFT)
        except SeerError as error:
            told = as_http(error)
            counters["refused" if told.status < 500 else "failed"] += 1
            _log.debug("not served", path=request.url.path, status=told.status, error=str(told))
            return refusal(told)
        except Exception:  # noqa: BLE001 - logged, and no other request is affected
            counters["failed"] += 1
            _log.exception("a request failed", path=request.url.path)
            return refusal(HttpError(500, "the gateway failed: its log says why"))
        counters["completed"] += 1
        return response

    return handle


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
