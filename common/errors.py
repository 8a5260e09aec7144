"""Typed errors. Every message names the field, the value and the fix.

`SeerError.code` is sent with a `Refused`, so a client raises the same class as the service.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import cast

import msgspec

NOT_DECODED = (msgspec.MsgspecError, UnicodeError, RecursionError)
"""What msgspec raises for what it cannot decode or convert: also text that is not UTF-8, too many levels."""


class SeerError(Exception):
    """Base of all errors that Seer raises deliberately; can be pickled, to be raised in another process."""

    code = "error"

    def __reduce__(self) -> tuple[object, ...]:
        return _restored, (type(self), self.args, self.__dict__)


def _restored(cls: type[SeerError], args: tuple[object, ...], state: Mapping[str, object]) -> SeerError:
    error = cls.__new__(cls, *args)
    error.__dict__.update(state)
    return error


class InvalidField(SeerError):  # noqa: N818 - reads as what it says at the call site
    """A value that cannot be accepted; `field` is its dotted path."""

    code = "invalid_field"

    def __init__(self, field: str, value: object, fix: str) -> None:
        super().__init__(f"{field} = {_shown(value)}: {fix}")
        self.field = field
        self.fix = fix


_SHOWN = 80
"""Characters of a value in an error."""

_PARTS = (_SHOWN, 8, 8, 4)
"""Entries of a value that are looked at, by their depth: others do not fit."""


def _shown(value: object) -> str:
    """Return the beginning of `repr(value)`: of any value, in little time."""
    try:
        shown = repr(_beginning(value))
    except (ValueError, RecursionError):  # an integer of more digits than Python prints; a `repr` without end
        shown = f"<{type(value).__name__}>"
    return shown if len(shown) <= _SHOWN else shown[: _SHOWN - 3] + "..."


def _beginning(value: object, depth: int = 0) -> object:
    if isinstance(value, str | bytes):
        return value[:_SHOWN]
    if type(value) not in (list, tuple, set, frozenset, dict):
        return value
    if depth == len(_PARTS):
        return ...
    if isinstance(value, dict):
        items = islice(value.items(), _PARTS[depth])
        return {_beginning(key, depth + 1): _beginning(each, depth + 1) for key, each in items}
    entries = islice(cast("Iterable[object]", value), _PARTS[depth])
    parts = [_beginning(each, depth + 1) for each in entries]
    return cast("type[list[object]]", type(value))(parts)


class ConfigError(SeerError):
    """A configuration file, environment variable or `--set` that cannot be used."""

    code = "config"


class WireError(SeerError):
    """Bytes that are not a well-formed, size-bounded message of the expected union."""

    code = "wire"


class ProtocolMismatch(SeerError):  # noqa: N818 - reads as what it says at the call site
    """The peer speaks another protocol major version or runs another shared configuration."""

    code = "protocol"


class Unreachable(SeerError):  # noqa: N818 - reads as what it says at the call site
    """A peer did not answer within its deadline."""

    code = "unreachable"


class Unauthorized(Unreachable):
    """A peer does not admit this process: this process's key, or the peer's, is not the expected key."""

    code = "unauthorized"


class EngineError(SeerError):
    """An engine cannot start, or cannot run a request."""

    code = "engine"


class EngineBroken(EngineError):  # noqa: N818 - reads as what it says at the call site
    """An engine cannot go on: its process has to end, and to start again."""

    code = "engine_broken"


class Unsampleable(EngineError):  # noqa: N818 - reads as what it says at the call site
    """A request has no next token: its logits are not numbers, or leave none. Any engine finds the same."""

    code = "unsampleable"


class NotLoaded(EngineError):  # noqa: N818 - reads as what it says at the call site
    """An engine has no weights loaded: the chunk did not run, and is not to blame."""

    code = "not_loaded"


class RequestRefused(SeerError):  # noqa: N818 - reads as what it says at the call site
    """The system will not run these prompts; nothing else of the rollout is affected.

    `prompt_ids` lists every prompt concerned.
    """

    code = "refused"

    def __init__(self, message: str, prompt_ids: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.prompt_ids = prompt_ids


class RolloutFailed(RequestRefused):
    """Accepted prompts that could not be completed; never reported as an empty success."""

    code = "failed"


class RolloutCancelled(RequestRefused):
    """Prompts that were cancelled before they completed."""

    code = "cancelled"


class DeadlineExceeded(RequestRefused):
    """Prompts that were still unfinished when the caller's deadline passed."""

    code = "deadline"


class WeightsRefused(SeerError):  # noqa: N818 - reads as what it says at the call site
    """A weight update that failed and changed nothing. `reasons` by instance; empty name: the update."""

    code = "weights"

    def __init__(self, version: int, reasons: Mapping[str, str]) -> None:
        listed = "; ".join(f"{name}: {why}" if name else why for name, why in reasons.items())
        super().__init__(f"weight version {version}: {listed}")
        self.reasons = dict(reasons)


def error_class(code: str) -> type[SeerError]:
    """Return the error class whose `code` this is (`SeerError` for an unknown one)."""
    pending = [SeerError]
    while pending:
        cls = pending.pop(0)  # the shallowest first: a subclass may share a code
        if cls.code == code:
            return cls
        pending.extend(cls.__subclasses__())
    return SeerError
