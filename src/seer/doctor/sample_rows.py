"""Rows that checks sample: every parameter, or one kind of request with random logits."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from seer.common.types import SamplingParams
from seer.doctor.device import DEVICE
from seer.services.engine.vllm.sampling import vectors
from seer.services.engine.vllm.sampling.rows import RequestSampling, RowParams, SamplingTable

KINDS: dict[str, dict[str, float]] = {
    "plain": {},
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.7},
    "min_p": {"min_p": 0.05},
    "top_p": {"top_p": 0.95},
    "top_k": {"top_k": 50},
    "top_k_top_p": {"top_k": 1000, "top_p": 0.9},
    "penalties": {"repetition_penalty": 1.1, "frequency_penalty": 0.2, "presence_penalty": 0.1},
}

HISTORY = 8_000
"""Known tokens of each request with penalties."""

_SCALES = (1.0, 1.0, 1.0, 1e-30, 1e4, 1.0, 1e25)


@dataclass(frozen=True, slots=True)
class Rows:
    """Logits [rows, vocab] on the host, and their parameters."""

    logits: torch.Tensor
    params: RowParams

    def part(self, start: int, stop: int) -> Rows:
        """Return rows [start, stop)."""
        return Rows(self.logits[start:stop], self.params.part(start, stop))


def every_parameter(rows: int, vocab: int, dtype: torch.dtype) -> Rows:
    """Return rows with every parameter, ties, masked tokens, logits of all scales, rows without a token."""
    logits, params = vectors.row_cases(rows, vocab)
    scales = np.resize(np.array(_SCALES, np.float32), rows)[:, None]
    if dtype == torch.float16:  # from 65,520 on it is infinite
        scales = scales.clip(1e-3, 1e3)
    return Rows(torch.from_numpy(logits * scales).to(dtype), params)


def drafted(requests: int, vocab: int) -> Rows:
    """Return the rows of requests of which each has 0 to 8 drafts."""
    drafts = np.arange(requests) % 9
    rows = int(drafts.sum()) + requests
    logits, _ = vectors.row_cases(rows, vocab)
    rng = np.random.default_rng(requests)
    table = SamplingTable([vectors.row_request(row, vocab) for row in range(requests)])
    history = rng.integers(0, vocab, (requests, 96)).astype(np.int32)
    tokens = rng.integers(0, vocab, int(drafts.sum())).astype(np.int32)
    return Rows(torch.from_numpy(logits), table.step(40 + np.arange(requests) % 50, history, drafts, tokens))


@functools.cache
def random_logits(rows: int, vocab: int, dtype: torch.dtype) -> torch.Tensor:
    """Return normal logits with sigma 3 on the device: [rows, vocab]."""
    generator = torch.Generator(DEVICE).manual_seed(vocab)
    return (torch.randn(rows, vocab, generator=generator, device=DEVICE) * 3).to(dtype)


def of_kind(kind: str, rows: int, vocab: int, history: int = HISTORY) -> tuple[SamplingTable, _History]:
    """Return a batch of one kind, and its histories int32 [rows, history] if they count."""
    sampling = SamplingParams(max_tokens=2**20, **KINDS[kind])  # type: ignore[arg-type]
    pack = functools.partial(RequestSampling.pack, sampling, prompt_len=100, stop_ids=(), vocab=vocab)
    table = SamplingTable([pack(key=row) for row in range(rows)])
    if kind != "penalties":
        return table, None
    return table, np.random.default_rng(rows).integers(0, vocab, (rows, history)).astype(np.int32)


_History = npt.NDArray[np.int32] | None
