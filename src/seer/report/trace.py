"""A rollout as a trace for https://ui.perfetto.dev, in Chrome's JSON format: every chunk, however many.

A process is an engine, a thread a slot, a slice a chunk, an arrow a migration. Times are in microseconds
since the rollout was submitted.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from seer.common.process.log import printable
from seer.report.records import Chunk, EngineIncarnation, Span
from seer.report.view import RolloutView

Json = dict[str, object]


def trace(view: RolloutView) -> bytes:
    """Return the file's text."""
    pids = {name: number for number, name in enumerate(view.engines, 1)}
    events: list[Json] = [_name(pid, str(printable(name))) for name, pid in pids.items()]
    events += [_slice(view, pids, chunk) for chunk in (*view.others, *view.rollout.chunks)]
    for number, (before, after) in enumerate(_migrations(view), 1):
        events += _arrow(view, pids, number, before, after)
    events += [_death(view, pids, incarnation) for incarnation in view.lost_incarnations]
    events += [_span(view, span) for span in view.spans]
    return msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms"}) + b"\n"


def _micros(view: RolloutView, time: float) -> int:
    return round((time - view.start) * 1e6)


def _name(pid: int, name: str) -> Json:
    return {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}


def _slice(view: RolloutView, pids: dict[str, int], chunk: Chunk) -> Json:
    start, end = _micros(view, chunk.start), _micros(view, chunk.end)
    response = chunk.response
    return {
        "ph": "X", "cat": "chunk", "name": printable(response.name),
        "pid": pids[chunk.engine], "tid": chunk.slot + 1, "ts": start, "dur": end - start,
        "args": {
            "rollout": printable(response.rollout.rollout_id), "tokens": chunk.tokens,
            "context": chunk.context, "kv_blocks": chunk.blocks, "end": chunk.how.value,
            "preemptions": chunk.preemptions,
        },
    }  # fmt: skip


def _migrations(view: RolloutView) -> Iterator[tuple[Chunk, Chunk]]:
    for response in view.rollout.responses:
        for before, after in zip(response.chunks, response.chunks[1:], strict=False):
            if after.moved:
                yield before, after


def _arrow(view: RolloutView, pids: dict[str, int], number: int, before: Chunk, after: Chunk) -> list[Json]:
    start, end = _micros(view, before.start), _micros(view, before.end)
    common: Json = {"cat": "migration", "name": "migration", "id": number}
    leaves = {"ph": "s", "pid": pids[before.engine], "tid": before.slot + 1, "ts": max(start, end - 1)}
    arrives = {"ph": "f", "bp": "e", "pid": pids[after.engine], "tid": after.slot + 1}
    return [common | leaves, common | arrives | {"ts": _micros(view, after.start)}]


def _death(view: RolloutView, pids: dict[str, int], incarnation: EngineIncarnation) -> Json:
    name = f"lost; chunks lost: {incarnation.chunks_lost}"
    time = _micros(view, incarnation.left or 0.0)
    pid = pids[incarnation.name]
    return {"ph": "i", "s": "p", "cat": "engine", "name": name, "pid": pid, "tid": 0, "ts": time}


def _span(view: RolloutView, span: Span) -> Json:
    start, end = _micros(view, span.start), _micros(view, span.end)
    name = printable(span.text)
    return {"ph": "X", "cat": "buffer", "name": name, "pid": 0, "tid": 0, "ts": start, "dur": end - start}
