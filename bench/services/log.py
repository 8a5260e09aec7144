"""What the buffer's log costs: microseconds and bytes a row, and the pause in which a segment begins.

The fleet of `bench/services/decisions.py` with 10,000 unfinished requests on 102 full instances: chunks end,
and every fourth row is a changed estimate of one group. What the machines are told and answer is kept, with
the time they take (`decided`), and then written: to the ring in memory that a crash dumps, and to files. A
snapshot begins each segment; `restored` is what its reader does, `replayed` the log run through the machines
again. `outage`: what it takes to try whether the folder can be written, and to write kept chunks again in a
tick once it can, beside a plain write of as many bytes. Prints JSON, in processor time: what else runs on
the machine is left out.

    python bench/services/log.py
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from decisions import CHUNK, Fleet
from lib.hardware import machine

from seer.common.policy.schedule import POLICIES
from seer.services.buffer.buffer_machine import BufferMachine
from seer.services.buffer.events import Weights
from seer.services.buffer.log import log_folder, rows
from seer.services.buffer.log.kept_chunks import KeptChunks, SoFar
from seer.services.buffer.log.outage import check_room
from seer.services.buffer.log.replay import replay_incarnation
from seer.services.buffer.log.snapshot import parse, restored, snapshot
from seer.services.buffer.log.writer import LogWriter
from seer.services.buffer.requests import events
from seer.services.buffer.requests.request_machine import RequestMachine
from seer.services.buffer.requests.state import Limits
from seer.services.buffer.sleep_machine import SleepMachine
from seer.services.buffer.weights.weights_machine import WeightsMachine

REQUESTS, INSTANCES = 10_000, 102
NEWS = 4
"""Chunks that end for each estimate that changes."""
RATE = 200
"""Rows a second: those of 100,000 tokens/s in chunks of 512."""
TIMES = 5
"""Repetitions; the median is told."""


def whole(fleet: Fleet) -> BufferMachine:
    """Return the machines of a fleet."""
    return BufferMachine(fleet.machine, WeightsMachine(), SleepMachine())


def header(fleet: Fleet) -> rows.Header:
    """Return the header of a fleet's log."""
    limits = Limits(chunk_size=CHUNK)
    return rows.Header(incarnation=1, policy=fleet.machine.policy.name, limits=limits, update_seconds=900.0)


def stream(fleet: Fleet, count: int) -> tuple[list[tuple[float, events.Event, list[Any]]], float]:
    """Return so many rows, and the processor time that the machines took for them."""
    told: list[tuple[float, events.Event, list[Any]]] = []
    apply = fleet.machine.apply

    def noted(event: events.Event, now: float) -> list[Any]:
        out = apply(event, now)
        told.append((len(told) / RATE, event, out))
        return out

    fleet.machine.apply = noted  # type: ignore[method-assign]
    spent = 0.0
    while len(told) < count:
        event = fleet.news(fleet.rng.choice(fleet.prompts)) if len(told) % NEWS == 0 else fleet.end()
        spent += fleet.told(event)[0]
    return told, spent


def written(log: LogWriter, told: list[tuple[float, events.Event, list[Any]]]) -> float:
    """Return the processor time to write rows; those of half a second are flushed together.

    A log that is closed writes nothing: that is this loop's own time.
    """
    start = time.thread_time()
    for number, row in enumerate(told):
        log.record(*row)
        if number % (RATE // 2) == 0:
            log.flush()
    log.flush()
    return time.thread_time() - start


def timed(work: Callable[[], object]) -> float:
    """Return the median milliseconds of processor time of some work."""
    spent = []
    for _ in range(TIMES):
        start = time.thread_time()
        work()
        spent.append(time.thread_time() - start)
    return round(1e3 * statistics.median(spent), 2)


def row_costs(policy: str, count: int) -> dict[str, Any]:
    """Return microseconds and bytes a row, and how fast a log runs through the machines again."""
    fleet = Fleet(policy, REQUESTS, INSTANCES)
    machines = whole(fleet)
    begun = snapshot(machines)
    told, decided = stream(fleet, count)
    gc.collect()
    gc.freeze()
    found: dict[str, list[float]] = {"nowhere": [], "in_memory": [], "in_files": []}
    figures: dict[str, Any] = {"us_a_row_decided": round(1e6 * decided / len(told), 2)}
    for _ in range(TIMES):
        for name, spent in found.items():
            with tempfile.TemporaryDirectory() as folder:
                before = restored(parse(begun), RequestMachine(fleet.machine.policy, fleet.machine.limits))
                log = LogWriter(folder if name == "in_files" else "", header(fleet), before)
                if name == "nowhere":
                    log.close()
                spent.append(written(log, told))
                log.close()
                if name == "in_files":
                    figures |= replayed(Path(folder))
    gc.unfreeze()
    each = {name: 1e6 * statistics.median(spent) / len(told) for name, spent in found.items()}
    for name in ("in_memory", "in_files"):
        figures[f"us_a_row_{name}"] = round(each[name] - each["nowhere"], 2)
    return figures


def replayed(folder: Path) -> dict[str, Any]:
    """Return the bytes of a row in a log of one segment, and how fast it is replayed."""
    [[path]] = log_folder.incarnations(folder)
    start = time.thread_time()
    number = sum(1 for _ in replay_incarnation([path]))
    spent = time.thread_time() - start
    size = path.stat().st_size - len(_first(path))
    return {"bytes_a_row": round(size / number, 1), "replayed_rows_a_second": round(number / spent)}


def _first(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.readline()


def snapshot_costs(policy: str) -> dict[str, Any]:
    """Return milliseconds and bytes of a snapshot, and milliseconds to make machines of it."""
    fleet = Fleet(policy, REQUESTS, INSTANCES)
    text = snapshot(whole(fleet))
    return {
        "snapshot_ms": timed(lambda: snapshot(whole(fleet))),
        "snapshot_bytes": len(text),
        "restored_ms": timed(
            lambda: restored(parse(text), RequestMachine(POLICIES[policy], Limits(chunk_size=CHUNK)))
        ),
    }


def outage_costs() -> dict[str, Any]:
    """Return milliseconds of what the buffer does after its folder could not be written."""
    rng, groups = np.random.default_rng(0), [f"p{number}" for number in range(16)]
    tokens = rng.integers(0, 150_000, 32_768).astype(np.int32)
    outputs = {index: (tokens, -rng.random(tokens.size).astype(np.float32), ("", "")) for index in range(8)}
    so_far = SoFar(1, tokens[:1000], Weights(1, "d"), outputs)
    spent = []
    for _ in range(TIMES):
        with tempfile.TemporaryDirectory() as folder:
            kept = KeptChunks(folder, 900.0, 0.0, lambda _: so_far)
            for group in groups:
                kept.open("r", group)
            [[file]] = kept._files.values()
            file.behind = set(groups)
            start = time.thread_time()
            kept.tick(0.0)
            spent.append(time.thread_time() - start)
            size = file.size
            kept.close()
    with tempfile.TemporaryDirectory() as folder:
        plain = bytes(size)
        return {
            "try_ms": timed(lambda: check_room(Path(folder))),
            "catch_up_ms": round(1e3 * statistics.median(spent), 2),
            "plain_write_ms": timed(lambda: (Path(folder) / "plain").write_bytes(plain)),
            "catch_up_bytes": size,
        }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policies", nargs="+", choices=sorted(POLICIES), default=["divided", "seer"])
    parser.add_argument("--rows", type=int, default=20_000)
    arguments = parser.parse_args()
    runs = [
        {"policy": policy, "requests": REQUESTS, "instances": INSTANCES}
        | row_costs(policy, arguments.rows)
        | snapshot_costs(policy)
        for policy in arguments.policies
    ]
    json.dump(
        {"machine": machine(), "rows": arguments.rows, "runs": runs, "outage": outage_costs()},
        sys.stdout,
        indent=1,
    )
    print()


if __name__ == "__main__":
    main()
