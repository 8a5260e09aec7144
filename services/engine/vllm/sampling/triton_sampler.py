"""The sampler on GPUs: what the host prepares for the kernels, and their launches.

Invariants:
- one copy to the device per slab, and nothing waits for the device;
- slabs bound the memory: of histories, marks and biases, and of the cuts' histograms.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton

from seer.services.engine.vllm.sampling.rows import RowParams
from seer.services.engine.vllm.sampling.triton_kernels import (
    BINS,
    BLOCK,
    EXTRA_WORDS,
    LAUNCH,
    LEVELS,
    PLACES,
    RECORD_WORDS,
    WORDS,
    cut_kernel,
    draw_kernel,
    mark_kernel,
    top_kernel,
)  # fmt: skip

_SLAB_ROWS = 4096
"""Most rows in one launch: with cuts their histograms take 64 MiB."""

_SLAB_EDITED = 1 << 26
"""Most logits in one launch with edited rows: their marks take 256 MiB, their biases as much."""

_ALIGNED_ROWS = 16
"""Slabs begin at multiples of so many rows: Triton compiles anew for pointers that are less aligned."""

_CUT_PROGRAMS = 2048
"""Programs of a cut, if the rows have so many blocks: more would pay for starting, fewer leave units idle."""


class _Buffer:
    """Arrays for the device, laid out for one copy: its offsets are aligned as its beginning is."""

    def __init__(self) -> None:
        self._arrays: list[tuple[int, npt.NDArray[np.uint8]]] = []
        self._bytes = 0

    def add(self, array: npt.NDArray[Any]) -> int:
        """Return the array's offset in bytes; its elements are read when the buffer is copied."""
        flat = array.reshape(-1).view(np.uint8)
        offset = self._bytes
        self._arrays.append((offset, flat))
        self._bytes += -(-len(flat) // 16) * 16
        return offset

    def to(self, device: torch.device) -> torch.Tensor:
        """Return the arrays on the device: uint8 [bytes]."""
        # PyTorch hands pinned memory out again when the copies from it are done, so nothing waits here.
        host = torch.empty(self._bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        view = host.numpy()
        for offset, array in self._arrays:
            view[offset : offset + len(array)] = array
        return host.to(device, non_blocking=True)


def _add_histories(
    buffer: _Buffer, params: RowParams, penalised: npt.NDArray[np.bool_], words: npt.NDArray[np.int64]
) -> None:
    """Add the histories of penalised rows, each slot's once."""
    rows = np.flatnonzero(penalised)
    records = params.records[rows]
    history = np.empty((0, 0), np.int32) if params.history is None else params.history
    slots, extra_end = records["slot"], records["extra_start"] + records["extra_len"]
    known = records["position"] - records["extra_len"]
    inside = (slots >= 0) & (known >= 0) & (records["extra_len"] >= 0) & (records["extra_start"] >= 0)
    inside &= (slots < len(history)) & (known <= history.shape[1]) & (extra_end <= len(params.extra))
    if not inside.all():
        params.history_of(int(rows[np.argmin(inside)]))  # raises
    used, place = np.unique(slots, return_inverse=True)
    longest = np.zeros(len(used), np.int64)
    np.maximum.at(longest, place, known)
    starts = [buffer.add(history[slot, :n]) for slot, n in zip(used, longest, strict=True)]
    words[rows, PLACES["history"]] = np.array(starts, np.int64)[place] // 4


def _places(chosen: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    return np.where(chosen, np.cumsum(chosen) - 1, -1)


class _Edits:
    """The penalties, stop ids and biases of a slab's rows, on their way to the vocabulary."""

    def __init__(self, params: RowParams, words: npt.NDArray[np.int64], buffer: _Buffer) -> None:
        records, penalised = params.records, params.penalised
        due = records["position"] - records["prompt_len"] < records["min_tokens"]
        marked, biased = penalised | due & (records["stop_len"] > 0), records["bias_len"] > 0
        edited = marked | biased
        self._marked, self._biased, self._edited = (int(flags.sum()) for flags in (marked, biased, edited))
        if not self._edited:
            return
        words[:, PLACES["mark"]], words[:, PLACES["bias"]] = _places(marked), _places(biased)
        if penalised.any():
            _add_histories(buffer, params, penalised, words)
        self._rows = buffer.add(np.flatnonzero(edited))
        flat = (params.stop_ids, params.bias_ids, params.bias_values, params.extra)
        self._flat = [buffer.add(array) // 4 for array in flat]
        lengths = (records["position"], records["stop_len"], records["bias_len"])
        self._chunks = max(1, triton.cdiv(max(int(length[edited].max()) for length in lengths), BLOCK.value))

    def on(self, sent: torch.Tensor, vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what they do to each token: marks int32 [rows * vocab], biases float32 [rows * vocab]."""
        if not self._edited:
            return sent.view(torch.int32), sent.view(torch.float32)  # not read
        marks = torch.zeros(self._marked * vocab, dtype=torch.int32, device=sent.device)
        biases = torch.zeros(self._biased * vocab, dtype=torch.float32, device=sent.device)
        mark_kernel[(self._edited * self._chunks,)](
            vocab, sent.view(torch.int64), sent[self._rows :].view(torch.int64), sent.view(torch.int32),
            *self._flat, marks, biases, self._chunks, **LAUNCH,
        )  # fmt: skip
        return marks, biases


class _Cuts:
    """The rows of a slab that are cut, and where."""

    def __init__(self, params: RowParams, vocab: int, buffer: _Buffer) -> None:
        self._vocab, records = vocab, params.records
        self._cut = self._top_k = self._top_p = (0, 0)
        if not params.truncated:
            return
        # The largest logit survives every cut: greedy rows need one for processed logprobs alone.
        drawn = (records["temperature"] > 0) | (records["logprobs"] == 2)
        top_k = drawn & (records["top_k"] > 0) & (records["top_k"] < vocab)
        top_p = drawn & (records["top_p"] < 1.0)
        cut = top_k | top_p | drawn & (records["log_min_p"] > -1e30)
        self._cut, self._top_k, self._top_p = (
            (buffer.add(np.flatnonzero(rows)), int(rows.sum())) for rows in (cut, top_k, top_p)
        )

    def on(self, sent: torch.Tensor, row_arguments: tuple[object, ...]) -> None:
        """Find the last values kept."""
        if not self._cut[1]:
            return
        blocks = triton.cdiv(self._vocab, BLOCK.value)

        def spread(flags: tuple[int, int]) -> tuple[tuple[int], torch.Tensor, int]:
            """Return a grid, its rows and the blocks of each program."""
            offset, rows = flags
            each = triton.cdiv(blocks, max(1, _CUT_PROGRAMS // rows))
            return (rows * triton.cdiv(blocks, each),), sent[offset:].view(torch.int64), each

        grid, cut, each = spread(self._cut)
        top_kernel[grid](*row_arguments, cut, each, **LAUNCH)
        most = max(self._top_k[1], self._top_p[1])
        histograms = torch.zeros(most * BINS.value, dtype=torch.int64, device=sent.device)
        for flags, weighed in ((self._top_k, False), (self._top_p, True)):
            if flags[1]:
                grid, cut, each = spread(flags)
                for level in range(LEVELS):
                    cut_kernel[grid](*row_arguments, cut, each, histograms, weighed, level == 0, **LAUNCH)


class Slab:
    """The rows of one launch: what the host sends for them, and the kernels that read it."""

    def __init__(self, params: RowParams, vocab: int) -> None:
        """Prepare what is sent; raises `ValueError` when a penalised row has no history."""
        words = np.empty((len(params.records), WORDS.value), np.int64)
        words[:, :RECORD_WORDS] = params.records.view(np.int64).reshape(len(words), -1)
        words[:, RECORD_WORDS:] = list(EXTRA_WORDS.values())
        self._buffer = _Buffer()
        self._buffer.add(words)
        self._edits, self._cuts = _Edits(params, words, self._buffer), _Cuts(params, vocab, self._buffer)

    def send(self, device: torch.device) -> torch.Tensor:
        """Return what the kernels read, on its way to the device: uint8 [bytes]."""
        return self._buffer.to(device)

    def run(
        self, logits: torch.Tensor, sent: torch.Tensor, tokens: torch.Tensor, logprobs: torch.Tensor
    ) -> None:
        """Launch the kernels. They change `sent`: it serves once."""
        rows, vocab = logits.shape
        parts = triton.cdiv(vocab, BLOCK.value)
        slots = triton.next_power_of_2(parts)
        row_arguments = (
            logits, logits.stride(0), vocab, sent.view(torch.int64), *self._edits.on(sent, vocab)
        )  # fmt: skip
        self._cuts.on(sent, row_arguments)
        found = torch.empty(rows * 2 * slots, dtype=torch.int64, device=logits.device)
        draw_kernel[(rows * parts,)](*row_arguments, found, tokens, logprobs, slots, **LAUNCH)


def _launch(logits: torch.Tensor, params: RowParams, tokens: torch.Tensor, logprobs: torch.Tensor) -> None:
    slab = Slab(params, logits.shape[1])
    slab.run(logits, slab.send(logits.device), tokens, logprobs)


def _slab_rows(params: RowParams, vocab: int) -> int:
    records = params.records
    if not (params.penalised | (records["stop_len"] > 0) | (records["bias_len"] > 0)).any():
        return _SLAB_ROWS
    return min(_SLAB_ROWS, max(1, _SLAB_EDITED // vocab // _ALIGNED_ROWS) * _ALIGNED_ROWS)


def sample(logits: torch.Tensor, params: RowParams) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (tokens int32 [rows], logprobs float32 [rows]) of logits [rows, vocab].

    Floats of 16 bits are read as they are. Reads nothing back from the device. Rows that cannot be
    sampled get token -1, logprob NaN.
    """
    if logits.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        logits = logits.float()
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    rows, vocab = logits.shape
    tokens = torch.empty(rows, dtype=torch.int32, device=logits.device)
    logprobs = torch.empty(rows, dtype=torch.float32, device=logits.device)
    step = _slab_rows(params, vocab)
    if 0 < rows <= step:
        _launch(logits, params, tokens, logprobs)
        return tokens, logprobs
    for start in range(0, rows, step):
        part = slice(start, start + step)
        _launch(logits[part], params.part(start, start + step), tokens[part], logprobs[part])
    return tokens, logprobs
