"""Structured logs on stderr: stdout belongs to the program's own output.

Without `configure`, e.g. in a trainer that uses the client, the program's own structlog settings apply, still
on stderr.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from typing import cast

import structlog
from structlog.typing import FilteringBoundLogger, Processor

from seer.common.config import LogConfig


class _Stderr:
    """Looks up `sys.stderr` for each line, so that it may be redirected later."""

    def msg(self, line: str) -> None:
        with contextlib.suppress(OSError):  # a full disk costs log lines, not the service
            print(line, file=sys.stderr, flush=True)

    debug = info = warning = error = critical = exception = msg


class _Forward(logging.Handler):
    """Passes on what libraries log to `logging`, so that JSON logs hold nothing but JSON."""

    def emit(self, record: logging.LogRecord) -> None:
        level = min(record.levelno // 10 * 10, logging.CRITICAL)  # structlog knows only the named levels
        get_logger().log(level, record.getMessage(), logger=record.name, exc_info=record.exc_info)


def printable(value: object) -> object:
    """Return a value with control characters in its texts escaped: texts of peers are shown on terminals."""
    match value:
        case str():
            return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in value)
        case dict():
            return {printable(key): printable(each) for key, each in value.items()}
        case list() | tuple() | set() | frozenset():
            return [printable(each) for each in value]
        case bytes() | bool() | int() | float() | None:
            return value
        case BaseException():
            return printable(str(value))
    return value


def _escape(_: object, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    return {key: value if key == "exc_info" else _one_line(printable(value)) for key, value in event.items()}


def _one_line(value: object) -> object:
    return value.replace("\n", "\\n") if isinstance(value, str) else value


def configure(config: LogConfig, service: str) -> None:
    """Send every log line of this process to stderr, with `service` on it."""
    json = config.format == "json"
    renderer: list[Processor] = (
        [structlog.processors.dict_tracebacks, structlog.processors.JSONRenderer(default=repr)]
        if json
        else [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())]
    )

    def name_service(_: object, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        event.setdefault("service", service)
        return event

    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            name_service,
            _escape,
            *renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(
            logging.getLevelNamesMapping()[config.level.upper()]
        ),
    )
    logging.basicConfig(handlers=[_Forward()], level=logging.WARNING, force=True)


def get_logger() -> FilteringBoundLogger:
    """Return a logger that follows a later `configure`."""
    return cast("FilteringBoundLogger", structlog.wrap_logger(_Stderr()))
