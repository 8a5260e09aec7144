"""Sends spans to a collector, by OTLP over HTTP, with OpenTelemetry's own exporter.

Invariants (tests/unit/test_spans_service.py):
- an answer is one of three: the collector has taken the spans, refuses them for good, or may take them later;
- whatever the log's texts and numbers are, they can be encoded.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from enum import Enum
from functools import lru_cache
from urllib.parse import urlsplit

import requests
from google.protobuf.message import DecodeError
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, TraceFlags
from opentelemetry.trace.status import Status, StatusCode

from seer import __version__
from seer.common.errors import InvalidField
from seer.spans.span_reader import Ended, Place, Value

LATER = frozenset({None, 408, 429, 502, 503, 504})
"""Statuses after which OTLP has clients try again; None: there was no answer."""

TEXT_CHARACTERS = 1024
"""Of one attribute: tools cut longer ones, and an error may have all that engines said."""

_LARGEST = 2**63 - 1
_SAYS = logging.getLogger("opentelemetry.exporter.otlp.proto.http.trace_exporter")
_SCOPE = InstrumentationScope("seer", __version__)
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)


class Answer(Enum):
    """What a collector did with spans."""

    TAKEN = "taken"
    REFUSED = "refused"
    LATER = "later"


class Collector:
    """The collector at `url`; empty: as OpenTelemetry's own variables say, which also have headers, TLS and
    timeouts. `why` is what was wrong with the last answer, `rejected` the spans of it that were not taken.

    Raises `InvalidField` for an address of no use.
    """

    def __init__(self, url: str) -> None:
        if url and not _is_address(url):
            raise InvalidField(
                "--otlp", url, "give the collector's address for OTLP/HTTP, as http://host:4318"
            )
        session = requests.Session()
        session.hooks["response"].append(self._answered)
        endpoint = f"{url.removesuffix('/')}/v1/traces" if url else None
        self._exporter = OTLPSpanExporter(endpoint=endpoint, session=session)
        self._status: int | None = None
        self._body = b""
        self.why = ""
        self.rejected = 0
        _SAYS.addFilter(self._said)

    def send(self, spans: Sequence[Ended]) -> Answer:
        """Send spans, within the exporter's timeout of 10 s."""
        self._status, self._body, self.why, self.rejected = None, b"", "", 0
        if self._exporter.export([_span(each) for each in spans]) is SpanExportResult.SUCCESS:
            if self._status is not None and self._status >= 300:  # the exporter takes it for a success
                self.why = f"status {self._status}, a redirection: give the address that it leads to"
                return Answer.REFUSED
            self._rejections()
            return Answer.TAKEN
        if self._status in LATER and "encode" not in self.why:
            return Answer.LATER
        return Answer.REFUSED

    def close(self) -> None:
        """End, also a try that waits."""
        _SAYS.removeFilter(self._said)
        self._exporter.shutdown()  # type: ignore[no-untyped-call]

    def _answered(self, response: requests.Response, *_: object, **__: object) -> None:
        self._status, self._body = response.status_code, response.content

    def _rejections(self) -> None:
        """Note which spans the collector did not take though it answered that all is well."""
        try:
            partial = ExportTraceServiceResponse.FromString(self._body).partial_success
        except DecodeError:
            return
        self.rejected, self.why = partial.rejected_spans, partial.error_message

    def _said(self, record: logging.LogRecord) -> bool:
        """Keep what the exporter logs as the reason; whoever sends says the rest."""
        self.why = record.getMessage()
        return False


def _is_address(url: str) -> bool:
    """Return whether `/v1/traces` can follow it."""
    try:
        parts = urlsplit(url)
        return (
            parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and "?" not in url
        )
    except ValueError:  # no port, or no host in brackets
        return False


@lru_cache(maxsize=8)
def _resource(instance: int) -> Resource:
    """Return what all spans of an incarnation of the buffer share; it has the name of the log's files."""
    return Resource.create({"service.name": "seer", "service.instance.id": f"{instance:016x}"})


def _span(ended: Ended) -> ReadableSpan:
    start = _nanoseconds(ended.start)
    return ReadableSpan(
        ended.name,
        _context(ended.place),
        parent=None if ended.parent is None else _context(ended.parent),
        resource=_resource(ended.instance),
        attributes={name: _clean(value) for name, value in ended.attributes.items()},
        links=() if ended.link is None else (Link(_context(ended.link)),),
        status=Status() if ended.error is None else Status(StatusCode.ERROR, _text(ended.error)),
        start_time=start,
        end_time=max(start, _nanoseconds(ended.end)),
        instrumentation_scope=_SCOPE,
    )


def _context(place: Place) -> SpanContext:
    return SpanContext(place.trace, place.span, is_remote=False, trace_flags=_SAMPLED)


def _nanoseconds(seconds: float) -> int:
    return int(min(max(seconds, 0.0), 9e9) * 1e9)


def _clean(value: Value) -> Value:
    match value:
        case str():
            return _text(value)
        case int():
            return max(min(value, _LARGEST), -_LARGEST)
        case list():
            return [_text(each) for each in value]
    return value


def _text(text: str) -> str:
    return text[:TEXT_CHARACTERS]
