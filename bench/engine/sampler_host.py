"""Time what a step of the GPU's sampler costs the host before its launches, without a GPU; print JSON.

    PYTHONPATH=build/triton python bench/engine/sampler_host.py [--repeats 41]

`make kernel-test` puts Triton into build/triton. Microseconds of thread time, medians: the parameters of a
step, and all that is prepared and copied for the device (here: to other host memory); launches are left out.
Rows with penalties have 8,000 known tokens each, all of which `sent` sends. `by_slot` is the step of an
engine, whose device makes the rows and keeps the histories, with the acceptance of drafts;
`by_slot_drafts` has three drafts a request.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import torch
from lib.hardware import machine

from seer.common.types import SamplingParams
from seer.services.engine.vllm.sampling import triton_sampler, triton_slots
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
    requests = [
        RequestSampling.pack(sampling, key=k, prompt_len=9, stop_ids=(), vocab=VOCAB) for k in range(rows)
    ]
    table = SamplingTable(requests)
    history = np.random.default_rng(rows).integers(0, VOCAB, (rows, KNOWN), dtype=np.int32)
    logits = torch.empty(rows, VOCAB)

    def step() -> object:
        return triton_sampler.sample(logits, table.step(np.full(rows, KNOWN), history))

    line = {"kind": kind, "rows": rows, "sent": microseconds(step, repeats)}
    line["by_slot"] = by_slot(requests, 0, repeats)
    line["by_slot_drafts"] = by_slot(requests, 3, repeats)
    return line


def by_slot(requests: list[RequestSampling], drafts: int, repeats: int) -> float:
    """Return what a step of V2's requests takes, with so many drafts each."""
    slots, rows = len(requests), len(requests) * (drafts + 1)
    sampler = triton_slots.TritonSlotRows(torch.zeros((slots, KNOWN + 9), dtype=torch.int32))
    for slot, sampling in enumerate(requests):
        sampler.table.set(slot, SimpleNamespace(sampling=sampling, fault_position=None))
    order, each = np.random.default_rng(slots).permutation(slots), np.full(slots, drafts + 1, np.int32)
    ends, known = np.arange(slots + 1, dtype=np.int32) * (drafts + 1), np.full(slots, KNOWN, np.int32)
    batch = SimpleNamespace(
        num_reqs=slots, idx_mapping_np=order, num_draft_tokens_per_req=each - 1 if drafts else None,
        expanded_idx_mapping=torch.from_numpy(np.repeat(order, drafts + 1)),
        expanded_local_pos=torch.arange(rows, dtype=torch.int32) % (drafts + 1),
        logits_indices=torch.arange(rows), input_ids=torch.zeros(rows, dtype=torch.int32),
        positions=torch.full((rows,), KNOWN), cu_num_logits=torch.from_numpy(ends), cu_num_logits_np=ends,
        num_computed_tokens_np=known, num_scheduled_tokens=each, prefill_len_np=known,
        num_computed_prefill_tokens_np=known,
    )  # fmt: skip
    logits = torch.empty(rows, VOCAB)
    return microseconds(lambda: sampler.accept(*sampler.draw(logits, batch), batch), repeats)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=41)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    triton_sampler.launch = triton_slots.launch = lambda *_: None
    results = [measure(kind, rows, arguments.repeats) for kind in KINDS for rows in ROWS]
    on = machine("torch", "triton", "numpy")
    print(
        json.dumps(
            {"machine": on, "unit": "microseconds a step, launches left out", "results": results}, indent=1
        )
    )


if __name__ == "__main__":
    main()
