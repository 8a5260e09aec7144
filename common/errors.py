"""Typed errors. Every message names the field, the value and the fix.

`SeerError.code` is sent with a `Refused`, so a client raises the same class as the service.
"""

from __future__ import annotations

from collections.abc import Mapping


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
        shown = repr(value)
        if len(shown) > 80:
            shown = shown[:77] + "..."
        super().__init__(f"{field} = {shown}: {fix}")
        self.field = field
        self.fix = fix


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
    """A peer does not admit this process: its key, or that of the peer, is not the one expected."""

    code = "unauthorized"


class EngineError(SeerError):
    """An engine cannot start, or cannot run a request."""

    code = "engine"


class EngineBroken(EngineError):  # noqa: N818 - reads as what it says at the call site
    """An engine cannot go on: its process has to end, and to start again."""

    code = "engine_broken"


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
