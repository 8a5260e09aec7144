"""How long `seer report` takes and how large its files are, for 400 to 200,000 chunks.

Logs are written by the buffer's own machines, told of engines that give every response 30 tokens/s and of one
that dies in mid-run. Prints JSON: seconds of processor time, bytes, and what of the page gzip leaves.

    python bench/services/report.py
    python bench/services/report.py --chunks 400 20000
"""

from __future__ import annotations

import argparse
import gzip
import heapq
import itertools
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from lib.hardware import machine

from seer.common import wire
from seer.common.types import Capacity
from seer.report.log_reader import read_timeline
from seer.report.timeline_page import page
from seer.report.trace import trace
from seer.report.view import RolloutView, choose_rollout, lay_out
from seer.services.buffer.buffer_machine import Event
from seer.services.buffer.events import Joined, Left
from seer.services.buffer.log import rows
from seer.services.buffer.requests import events, instructions
from seer.services.buffer.requests.state import Limits

CHUNK, CAP = 2048, 65_536
GROUP = 16
CHUNKS_PER_RESPONSE = 6.0
"""About as many as responses of 11,000 tokens have."""
SLOTS = 64
CAPACITY = Capacity(kv_blocks=SLOTS * CAP // 16, block_size=16, max_num_seqs=SLOTS, max_model_len=CAP + 512)
REGISTER = wire.Register(capacity=CAPACITY, weight_version=0)
CHUNKS_PER_ENGINE = 3000
TOKENS_PER_SECOND = 30.0


def write_log(path: Path, chunks: int) -> int:
    """Write the log of a rollout of about so many chunks; return its rows."""
    rng = random.Random(0)
    header = rows.Header(policy="seer", limits=Limits(CHUNK), update_seconds=60.0, started=1e9)
    buffer = header.machine()
    names = [f"engine-{number}" for number in range(max(2, chunks // CHUNKS_PER_ENGINE))]
    groups = [f"p{number}" for number in range(max(2, round(chunks / CHUNKS_PER_RESPONSE / GROUP)))]
    left: dict[str, int] = {}
    ends: list[tuple[float, str, str, int, int]] = []
    count = 0
    with path.open("wb") as file:
        file.write(rows.header_line(header))

        def tell(event: Event, now: float) -> None:
            nonlocal count
            count += 1
            out = buffer.apply(event, now)
            file.write(rows.line(now, event, out))
            for item in out:
                if isinstance(item, instructions.Dispatch):
                    length = min(CAP, int(rng.lognormvariate(9.0, 0.9)) + 1)
                    tokens = min(left.setdefault(item.request_id, length), item.max_new_tokens)
                    end = now + tokens / TOKENS_PER_SECOND
                    heapq.heappush(ends, (end, item.instance, item.request_id, item.attempt, tokens))

        for number, name in enumerate(names):
            tell(Joined(name, REGISTER, number + 1), 0.0)
            best = TOKENS_PER_SECOND * REGISTER.capacity.max_num_seqs, 1 / TOKENS_PER_SECOND
            tell(events.EngineReported(name, 0, 0, *best), 0.0)
        specs = [events.GroupSpec(name, 500) for name in groups]
        tell(events.GroupsSubmitted("t", "r", GROUP, CAP, specs), 0.0)
        dead = ""
        while ends:
            now, name, request_id, attempt, tokens = heapq.heappop(ends)
            if name == dead:
                continue
            left[request_id] -= tokens
            finish = "" if left[request_id] else "stop"
            tell(events.ChunkEnded(name, wire.ChunkResult(request_id, attempt, tokens, finish, "", 0)), now)
            if not dead and now > 300.0:
                dead = names[-1]
                tell(Left([dead], died=True), now)
    return count


def measured(chunks: int, folder: Path) -> dict[str, Any]:
    path = folder / "log.jsonl"
    count = write_log(path, chunks)
    times = [time.process_time()]
    timeline = read_timeline(path)
    view = RolloutView(timeline, choose_rollout(timeline))
    times.append(time.process_time())
    html = page(view).encode()
    times.append(time.process_time())
    perfetto = trace(view)
    times.append(time.process_time())
    read, drawn, traced = (round(after - before, 3) for before, after in itertools.pairwise(times))
    return {
        "chunks": len(view.rollout.chunks), "engines": len(view.engines), "rows": count,
        "log_bytes": path.stat().st_size, "bars": lay_out(view).count,
        "read_seconds": read, "html_seconds": drawn, "html_bytes": len(html),
        "html_gzip_bytes": len(gzip.compress(html)), "trace_seconds": traced, "trace_bytes": len(perfetto),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--chunks", type=int, nargs="+", default=[400, 20_000, 200_000])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = [measured(chunks, Path(folder)) for chunks in options.chunks]
    json.dump({"machine": machine(), "reports": found}, sys.stdout, indent=2)
    print()


if __name__ == "__main__":
    main()
