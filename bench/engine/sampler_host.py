"""Time what a step of the GPU's sampler costs the host before its launches, without a GPU; print JSON.

    PYTHONPATH=build/triton python bench/engine/sampler_host.py [--repeats 41]

`make kernel-test` puts Triton into build/triton. Microseconds of thread time, medians: the parameters of a
step, and all that is prepared and copied for the device (here: to other host memory); launches are left out.
Rows with penalties have 8,000 known tokens each: `kept` sends those that are new since the last step, `sent`
all of them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from itertools import count

import numpy as np
import torch
from lib.machine import machine

from seer.common.types import SamplingParams
from seer.services.engine.vllm.sampling import triton_sampler
from seer.services.engine.vllm.sampling.device_histories import Histories
from seer.services.engine.vllm.sampling.rows import RequestSampling, SamplingTable

VOCAB, KNOWN, ROWS = 2_100, 8_000, (1, 64, 256, 1024)
"""A small vocabulary: on the host, the clearing of marks would be timed, too."""

KINDS = {
    "plain": {},
    "top_k_top_p": {"top_k": 1000, "top_p": 0.9},
    "penalties": {"repetition_penalty": 1.1, "frequency_penalty": 0.2, "presence_penalty": 0.1},
}


def microseconds(call: Callable[[], object], repeats: int) -> float:
    call()
    times = []
    for _ in range(repeats):
        begun = time.thread_time_ns()
        call()
        times.append((time.thread_time_ns() - begun) / 1000)
    return round(statistics.median(times), 1)


def measure(kind: str, rows: int, repeats: int) -> dict[str, object]:
    sampling = SamplingParams(max_tokens=2**20, **KINDS[kind])
    table = SamplingTable(
        [RequestSampling.pack(sampling, key=k, prompt_len=9, stop_ids=(), vocab=VOCAB) for k in range(rows)]
    )
    history = np.random.default_rng(rows).integers(0, VOCAB, (rows, KNOWN + 2 * repeats), dtype=np.int32)
    logits, position, histories = torch.empty(rows, VOCAB), count(KNOWN), Histories()

    def step(kept: Histories | None) -> object:
        params = table.step(np.full(rows, next(position) if kept else KNOWN), history)
        return triton_sampler.sample(logits, params, kept)

    line = {"kind": kind, "rows": rows, "kept": microseconds(lambda: step(histories), repeats)}
    if kind == "penalties":
        line["sent"] = microseconds(lambda: step(None), repeats)
    return line


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=41)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    triton_sampler.launch = lambda *_: None
    results = [measure(kind, rows, arguments.repeats) for kind in KINDS for rows in ROWS]
    on = machine("torch", "triton", "numpy")
    print(
        json.dumps(
            {"machine": on, "unit": "microseconds a step, launches left out", "results": results}, indent=1
        )
    )


if __name__ == "__main__":
    main()
