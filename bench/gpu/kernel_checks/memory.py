"""Memory of the sampler at the largest batch: max_num_seqs requests with K drafts each."""

from __future__ import annotations

import functools

import numpy as np
import torch
from kernel_checks.timing import device_us, peak_bytes

from seer.doctor.device import GPU, sampler
from seer.doctor.report_lines import Report
from seer.doctor.sample_rows import HISTORY, of_kind, random_logits

_REQUESTS, _DRAFTS, _VOCAB = 256, 8, 151_936

_ALLOWED = {"plain": 64 << 20, "top_k_top_p": 128 << 20, "penalties": 768 << 20}
"""Bytes beside the logits: histograms of 4,096 rows are 64 MiB, a slab's marks and biases 512 MiB."""


def slabs(report: Report) -> None:
    """Measure the peak of each kind that takes memory; fail where it is over its bound."""
    if not GPU:
        report.skip("no GPU: memory is bounded by the native kernel's own tests")
        return
    _, sample = sampler()
    rows = _REQUESTS * (_DRAFTS + 1)
    for dtype in (torch.bfloat16, torch.float32):
        logits = random_logits(rows, _VOCAB, dtype)
        name = str(dtype).removeprefix("torch.")
        taken = logits.numel() * logits.element_size()
        report.note(
            f"{rows} rows x {_VOCAB} {name}", logits_bytes=taken,
            float_copy_bytes=peak_bytes(logits.float) if dtype != torch.float32 else 0,
            softmax_bytes=peak_bytes(functools.partial(_softmax, logits)),
        )  # fmt: skip
        for kind, allowed in _ALLOWED.items():
            table, history = of_kind(kind, _REQUESTS, _VOCAB)
            drafts = np.zeros(_REQUESTS * _DRAFTS, np.int32)
            positions = np.full(_REQUESTS, HISTORY)
            params = table.step(positions, history, [_DRAFTS] * _REQUESTS, drafts)
            call = functools.partial(sample, logits, params)
            peak = peak_bytes(call)
            report.expect(
                peak <= allowed, f"{rows} rows {name} {kind}: memory beside the logits is bounded",
                "lower engine.max_num_seqs or drafts.max_draft, and report this line",
                peak_mib=peak / 2**20, allowed_mib=allowed >> 20,
                device_us=device_us(call, calls=2, repeats=2),
            )  # fmt: skip
        random_logits.cache_clear()


def _softmax(logits: torch.Tensor) -> torch.Tensor:
    return logits.float().softmax(-1)
