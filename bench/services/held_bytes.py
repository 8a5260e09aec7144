"""Resident memory of what the buffer and a dgds count towards their bounds, per counted byte.

    python bench/services/held_bytes.py

Fills a `Store` of each kind in a process of its own, as chunks and flushes do, and prints JSON: for each kind
the bytes that became resident, over those counted. `buffer.unfinished_bytes` and `buffer.result_bytes` count
8 bytes a token, `dgds.max_tokens` 3 bytes. A process may promise `memory.MOST` of its limit.
"""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import numpy as np
from lib.hardware import machine

from seer.common.process.memory_limit import MOST
from seer.common.types import SamplingParams
from seer.services.buffer.events import Weights
from seer.services.buffer.log.chunk_file import Output
from seer.services.buffer.response_store import TOKEN_BYTES, SubmittedPrompt
from seer.services.buffer.response_store import Store as BufferStore
from seer.services.dgds.group_store import Store as DgdsStore

COUNTED = 400_000_000
"""Bytes that each case counts."""

GROUP = 8
CASES = [("buffer", 64, 16), ("buffer", 1024, 16), ("buffer", 4096, 256), ("buffer", 32768, 512),
         ("dgds", 1024, 64), ("dgds", 32768, 64)]  # fmt: skip
"""Who, tokens of a response, tokens of a chunk or flush."""


def resident() -> int:
    """Return this process's resident bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def filled(who: str, length: int, part: int) -> float:
    """Return resident bytes over counted ones."""
    groups = max(1, COUNTED // ((TOKEN_BYTES if who == "buffer" else 3) * length * GROUP))
    before = resident()
    counted = buffer(groups, length, part) if who == "buffer" else dgds(groups, length, part)
    return (resident() - before) / counted


def buffer(groups: int, length: int, part: int) -> int:
    """Fill a buffer's store; return the bytes counted."""
    global store
    store, weights = BufferStore(), Weights(0, "")
    tokens, logprobs = np.zeros(part, np.int32), np.zeros(part, np.float32)
    for group in range(groups):
        prompt = np.zeros(16, np.int32)
        store.open(str(group), SubmittedPrompt(prompt, "", "", 0, GROUP, SamplingParams(), 0, 0, 1))
    for _ in range(length // part):
        for group in range(groups):
            for index in range(GROUP):
                store.keep(str(group), index, Output(tokens, logprobs, ("", "")), weights)
    return groups * GROUP * length * TOKEN_BYTES


def dgds(groups: int, length: int, part: int) -> int:
    """Fill a dgds's store; return the bytes counted."""
    global store
    store, tokens = DgdsStore(2**40, 600.0), bytes(3 * part)
    for start in range(0, length, part):
        for group in range(groups):
            for index in range(GROUP):
                store.append(group, index, 1, start, tokens, 0.0)
    return 3 * store.held


def main() -> None:
    """Measure each case in a process of its own."""
    ratios = {}
    for case in CASES:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            ratios[f"{case[0]}, {case[1]} tokens in parts of {case[2]}"] = round(pool.apply(filled, case), 3)
    print(
        json.dumps(
            {"machine": machine(), "resident_per_counted_byte": ratios, "promised_share": MOST}, indent=2
        )
    )


if __name__ == "__main__":
    main()
