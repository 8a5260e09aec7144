"""Ids of traces and spans: functions of the ids that the log has, so whoever reads it again finds the same.

Invariants (tests/unit/test_spans.py):
- equal arguments have equal ids, others do not;
- no id is 0, which OpenTelemetry takes for none.
"""

from __future__ import annotations

import hashlib

import msgspec

TRACE_BYTES, SPAN_BYTES = 16, 8


def group_trace(trainer: str, rollout_id: str, submission: int, prompt_id: str) -> int:
    """Return the id of the trace with a prompt's group, its requests and their chunks."""
    return _digest(TRACE_BYTES, "group", trainer, rollout_id, submission, prompt_id)


def rollout_trace(trainer: str, rollout_id: str, submission: int) -> int:
    """Return the id of a rollout's trace."""
    return _digest(TRACE_BYTES, "rollout", trainer, rollout_id, submission)


def update_trace(incarnation: int, trainer: str, call_id: int) -> int:
    """Return the id of the trace of an update of weights."""
    return _digest(TRACE_BYTES, "update", incarnation, trainer, call_id)


def span_id(trace: int, *names: str | int) -> int:
    """Return the id of the span of a trace that has these names; without any, of its first one."""
    return _digest(SPAN_BYTES, trace.to_bytes(TRACE_BYTES), *names)


def _digest(size: int, *parts: str | int | bytes) -> int:
    """Return a hash of the parts, each of which is told apart from its neighbours."""
    return int.from_bytes(hashlib.blake2b(msgspec.msgpack.encode(parts), digest_size=size).digest()) or 1
