"""The largest batch that our sampler can meet, run while vLLM finds out how much memory is left for KV.

vLLM profiles its own sampler, which never runs, on a row per request. Ours sees a row per draft as well.

Invariant: no batch needs more memory than this one: all rows that can be, each with every parameter that
costs memory. Histories are V2's own, in memory that is there before.
"""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from seer.common.types import SamplingParams
from seer.services.engine.vllm.sampling.rows import RequestSampling, SamplingTable
from seer.services.engine.vllm.sampling.sampler import sample_rows

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

_EVERYTHING = SamplingParams(
    max_tokens=2, min_tokens=1, top_p=0.9, top_k=50, min_p=0.01, repetition_penalty=1.1,
    frequency_penalty=0.1, presence_penalty=0.1, logit_bias={0: 1.0}, logprobs="processed",
)  # fmt: skip


class LargestBatch:
    """Takes the place of a runner's `_dummy_sampler_run`; `rows` are the rows of logits."""

    def __init__(self, runner: GPUModelRunner, max_draft: int) -> None:
        self._runner = runner
        self._requests = min(runner.max_num_reqs, runner.max_num_tokens)
        self._drafts = min(max_draft, runner.max_num_tokens // self._requests - 1)
        self.rows = self._requests * (self._drafts + 1)

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Compute logits for random hidden states [rows, as those given], and draw; return the tokens."""
        shape = (self.rows, hidden_states.shape[-1])
        try:
            with torch.inference_mode():
                random = torch.rand(shape, dtype=hidden_states.dtype, device=hidden_states.device)
                return self._draw(self._runner.model.compute_logits(random))
        except torch.OutOfMemoryError as error:
            raise RuntimeError(
                f"out of memory for the largest batch, {self.rows} rows of logits: lower engine.max_num_seqs "
                f"or drafts.max_draft ({error})"
            ) from error

    def _draw(self, logits: torch.Tensor) -> torch.Tensor:
        vocab = logits.shape[1]
        request = RequestSampling.pack(_EVERYTHING, key=0, prompt_len=1, stop_ids=(1,), vocab=vocab)
        ones, counts = np.ones((self._requests, 1), np.int32), np.full(self._requests, self._drafts, np.int32)
        table = SamplingTable([request] * self._requests)
        params = table.step(ones[:, 0], ones, counts, np.zeros(counts.sum(), np.int32))
        return sample_rows(logits, params)[0].cpu()


def measured(runner: GPUModelRunner, max_draft: int) -> dict[str, float]:
    """Run the largest batch once more, on a loaded engine; return its `rows`, `seconds` and memory.

    `logits_bytes` are those of the logits, `peak_bytes` what the call took at most, logits included; on CPUs
    as far as the process grew for it.
    """
    batch = LargestBatch(runner, max_draft)
    hidden = torch.zeros((1, runner.model_config.get_hidden_size()), dtype=runner.dtype, device=runner.device)
    before, begun = _memory(runner.device, reset=True), time.perf_counter()
    batch(hidden)
    seconds, peak = time.perf_counter() - begun, _memory(runner.device, reset=False) - before
    logits = batch.rows * runner.model_config.get_vocab_size() * hidden.element_size()
    return {"rows": batch.rows, "logits_bytes": logits, "peak_bytes": peak, "seconds": seconds}


def _memory(device: torch.device, *, reset: bool) -> int:
    """Return the most bytes in use since the last reset; with `reset`, those in use now."""
    if device.type == "cuda":
        if reset:
            torch.cuda.reset_peak_memory_stats(device)
        return int(torch.cuda.max_memory_allocated(device))
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    most = re.search(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(most[1]) * 1024 if most else 0
