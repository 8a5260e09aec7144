"""What an HTTP client is told when something cannot be done. Pure.

Invariants:
- every error has the body `{"error": {"message", "type", "param", "code"}}`, and `code` is the HTTP status;
- an error that may be gone when the same request is sent again is 503 and says after how many seconds;
- no error is ever an answer with an empty choice.
"""

from __future__ import annotations

import re
from http import HTTPStatus

from seer.common.errors import (
    DeadlineExceeded,
    InvalidField,
    RequestRefused,
    RolloutCancelled,
    RolloutFailed,
    SeerError,
    Unreachable,
)

RETRY_SECONDS = 2
"""`Retry-After` of a 503: a restarted buffer, or an engine that joins again, takes a few seconds."""

_OF_SAMPLING = re.compile(r"sampling\.([\w.\[\]]+) = ")
"""How an engine's refusal of a sampling parameter begins, which then is the request's own fault."""

_TYPES = {
    400: "BadRequestError",
    404: "NotFoundError",
    409: "ConflictError",
    500: "InternalServerError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
}


class HttpError(SeerError):
    """An error with its HTTP status; `param` is the field of the body or query that is to blame."""

    code = "http"

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param

    @property
    def body(self) -> dict[str, object]:
        """The answer's body."""
        kind = _TYPES.get(self.status) or HTTPStatus(self.status).phrase.title().replace(" ", "") + "Error"
        shown = {"message": str(self), "type": kind, "param": self.param, "code": self.status}
        return {"error": shown}

    @property
    def headers(self) -> dict[str, str]:
        """The answer's headers, beside the headers that every answer has."""
        if self.status in (408, 413):  # what is left of the request's body is not read
            return {"connection": "close"}
        return {"retry-after": str(RETRY_SECONDS)} if self.status == 503 else {}


def bad(param: str, value: object, fix: str) -> HttpError:
    """Return a 400 that names field, value and fix."""
    return HttpError(400, str(InvalidField(param, value, fix)), param)


def as_http(error: SeerError) -> HttpError:
    """Return what an HTTP client is told of an error of Seer's client.

    The buffer's refusals are 503: what depends on the request alone was refused before the request was
    submitted.
    """
    match error:
        case HttpError():
            return error
        case InvalidField():
            return HttpError(400, str(error), error.field)
        case Unreachable():  # `BufferLost`, too
            return HttpError(503, f"the buffer is away: {error}")
        case DeadlineExceeded():
            return HttpError(504, str(error))
        case RolloutCancelled():
            return HttpError(503, f"cancelled before it was finished: {error}")
        case RequestRefused() if found := _OF_SAMPLING.match(str(error)):  # as an engine alone can find out
            return HttpError(400, str(error).removeprefix("sampling."), found[1])
        case RolloutFailed():
            return HttpError(500, f"failed: {error}")
        case RequestRefused():
            return HttpError(503, f"the buffer refuses it now: {error}")
        case _:
            return HttpError(500, str(error))
