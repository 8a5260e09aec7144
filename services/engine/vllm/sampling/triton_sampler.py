"""The sampler on GPUs: what the host prepares for the kernels, and their launches.

Invariants:
- one copy to the device per slab, and nothing waits for the device;
- slabs bound the memory of marks and biases, and of the cuts' histograms; histories have the bound of
  `KeptHistories`;
- with `Histories` of an earlier call, tokens are the same as without, and a step sends new tokens alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton

from seer.services.engine.vllm.sampling.device_histories import Histories, RunnerHistories
from seer.services.engine.vllm.sampling.kept_histories import NOTHING, Runs
from seer.services.engine.vllm.sampling.rows import RowParams
from seer.services.engine.vllm.sampling.triton_kernels import (
    BINS,
    BLOCK,
    EXTRA_WORDS,
    LEVELS,
    PLACES,
    RECORD_WORDS,
    WORDS,
    append_kernel,
    cut_kernel,
    draw_kernel,
    mark_kernel,
    top_kernel,
)  # fmt: skip
from seer.services.engine.vllm.sampling.triton_launch import launch

_SLAB_ROWS = 4096
"""Most rows in one launch: with cuts their histograms take 64 MiB."""

_SLAB_EDITED = 1 << 26
"""Most logits in one launch with edited rows: their marks take 256 MiB, their biases as much."""

_ALIGNED_ROWS = 16
"""Slabs begin at multiples of so many rows: Triton compiles anew for pointers that are less aligned."""

_CUT_PROGRAMS = 2048
"""Programs of a cut, if the rows have so many blocks: more would pay for starting, fewer leave units idle."""


_EXTRA = np.array(list(EXTRA_WORDS.values()), np.int64)

Drawn = tuple[torch.Tensor, torch.Tensor]
"""Tokens int32 [rows] and logprobs float32 [rows]."""


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


class _New:
    """New tokens of the histories, on their way to their places."""

    def __init__(self, runs: Runs, buffer: _Buffer) -> None:
        self._count = len(runs.where)
        if self._count:
            self._chunks = triton.cdiv(int(runs.where[:, 2].max()), BLOCK.value)
            self._where, self._tokens = buffer.add(runs.where), buffer.add(runs.tokens) // 4

    def on(self, sent: torch.Tensor, histories: torch.Tensor) -> None:
        """Copy them."""
        if self._count:
            where = sent[self._where :].view(torch.int64)
            arguments = (where, sent.view(torch.int32), histories, self._tokens, self._chunks)
            launch(append_kernel, self._count * self._chunks, arguments)


def _places(chosen: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    return np.where(chosen, np.cumsum(chosen) - 1, -1)


class _Edits:
    """The penalties, stop ids and biases of a slab's rows, on their way to the vocabulary."""

    def __init__(
        self, params: RowParams, starts: npt.NDArray[np.int64], words: npt.NDArray[np.int64], buffer: _Buffer
    ) -> None:
        records, penalised = params.records, params.penalised
        due = records["position"] - records["prompt_len"] < records["min_tokens"]
        marked, biased = penalised | due & (records["stop_len"] > 0), records["bias_len"] > 0
        edited = marked | biased
        self._marked, self._biased, self._edited = (int(flags.sum()) for flags in (marked, biased, edited))
        if not self._edited:
            return
        words[:, PLACES["mark"]], words[:, PLACES["bias"]] = _places(marked), _places(biased)
        words[:, PLACES["history"]] = starts
        self._rows = buffer.add(np.flatnonzero(edited))
        flat = (params.stop_ids, params.bias_ids, params.bias_values, params.extra)
        self._flat = [buffer.add(array) // 4 for array in flat]
        lengths = (records["position"], records["stop_len"], records["bias_len"])
        self._chunks = max(1, triton.cdiv(max(int(length[edited].max()) for length in lengths), BLOCK.value))

    def on(
        self, sent: torch.Tensor, histories: torch.Tensor, vocab: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what they do to each token: marks int32 [rows * vocab], biases float32 [rows * vocab]."""
        if not self._edited:
            return sent.view(torch.int32), sent.view(torch.float32)  # not read
        marks = torch.zeros(self._marked * vocab, dtype=torch.int32, device=sent.device)
        biases = torch.zeros(self._biased * vocab, dtype=torch.float32, device=sent.device)
        arguments = (
            sent.view(torch.int64), sent[self._rows :].view(torch.int64), sent.view(torch.int32), histories,
            marks, biases, vocab, *self._flat, self._chunks,
        )  # fmt: skip
        launch(mark_kernel, self._edited * self._chunks, arguments)
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

    def on(self, sent: torch.Tensor, row_arguments: tuple[Any, ...]) -> None:
        """Find the last values kept."""
        if not self._cut[1]:
            return
        blocks = triton.cdiv(self._vocab, BLOCK.value)

        def spread(flags: tuple[int, int]) -> tuple[int, torch.Tensor, int]:
            """Return the number of programs, the rows and the blocks of each program."""
            offset, rows = flags
            each = triton.cdiv(blocks, max(1, _CUT_PROGRAMS // rows))
            return rows * triton.cdiv(blocks, each), sent[offset:].view(torch.int64), each

        programs, cut, each = spread(self._cut)
        launch(top_kernel, programs, (*row_arguments, cut, each))
        most = max(self._top_k[1], self._top_p[1])
        if not most:
            return
        histograms = torch.zeros(most * BINS.value, dtype=torch.int64, device=sent.device)
        for flags, weighed in ((self._top_k, False), (self._top_p, True)):
            if flags[1]:
                programs, cut, each = spread(flags)
                for level in range(LEVELS):
                    launch(cut_kernel, programs, (*row_arguments, cut, each, histograms), weighed, level == 0)


class Slab:
    """The rows of one launch: what the host sends for them, and the kernels that read it."""

    def __init__(self, params: RowParams, vocab: int, starts: npt.NDArray[np.int64], runs: Runs) -> None:
        """Prepare what is sent: parameters, where each row's history begins, and tokens that are new."""
        words = np.empty((len(params.records), WORDS.value), np.int64)
        words[:, :RECORD_WORDS] = params.records.view(np.int64).reshape(len(words), -1)
        words[:, RECORD_WORDS:] = _EXTRA
        self._buffer = _Buffer()
        self._buffer.add(words)
        self._new = _New(runs, self._buffer)
        self._edits = _Edits(params, starts, words, self._buffer)
        self._cuts = _Cuts(params, vocab, self._buffer)

    def send(self, device: torch.device) -> torch.Tensor:
        """Return what the kernels read, on its way to the device: uint8 [bytes]."""
        return self._buffer.to(device)

    def run(self, logits: torch.Tensor, sent: torch.Tensor, histories: torch.Tensor, drawn: Drawn) -> None:
        """Launch the kernels. They change `sent`: it serves once."""
        rows, vocab = logits.shape
        parts = triton.cdiv(vocab, BLOCK.value)
        slots = triton.next_power_of_2(parts)
        self._new.on(sent, histories)
        edits = self._edits.on(sent, histories, vocab)
        row_arguments = (logits, logits.stride(0), vocab, sent.view(torch.int64), *edits)
        self._cuts.on(sent, row_arguments)
        found = torch.empty(rows * 2 * slots, dtype=torch.int64, device=logits.device)
        launch(draw_kernel, rows * parts, (*row_arguments, found, *drawn), slots)


def _slab_rows(params: RowParams, vocab: int) -> int:
    records = params.records
    if not (params.penalised | (records["stop_len"] > 0) | (records["bias_len"] > 0)).any():
        return _SLAB_ROWS
    return min(_SLAB_ROWS, max(1, _SLAB_EDITED // vocab // _ALIGNED_ROWS) * _ALIGNED_ROWS)


def sample(
    logits: torch.Tensor, params: RowParams, histories: Histories | RunnerHistories | None = None
) -> Drawn:
    """Return the tokens and logprobs of logits [rows, vocab].

    Floats of 16 bits are read as they are. Reads nothing back from the device. Rows that cannot be
    sampled get token -1, logprob NaN. `histories` hold what earlier calls sent; without them all is sent.
    """
    return unpacked(sample_packed(logits, params, histories), len(logits))


def unpacked(drawn: torch.Tensor, rows: int) -> Drawn:
    """Return what `sample_packed` drew for so many rows, as views."""
    return drawn[0, :rows], drawn[1, :rows].view(torch.float32)


def sample_packed(
    logits: torch.Tensor, params: RowParams, histories: Histories | RunnerHistories | None = None
) -> torch.Tensor:
    """Return what `sample` does as one int32 tensor, for one copy; `unpacked` takes it apart."""
    if logits.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        logits = logits.float()
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    rows, vocab = logits.shape
    aligned = -(-rows // _ALIGNED_ROWS) * _ALIGNED_ROWS
    drawn = torch.empty(2, aligned, dtype=torch.int32, device=logits.device)
    tokens, logprobs = unpacked(drawn, rows)
    histories = histories or Histories()
    try:
        starts, runs = histories.kept.step(params)
        kept, step = histories.on(logits.device).view(-1), _slab_rows(params, vocab)
        for start in range(0, rows, step):
            part = slice(start, start + step)
            one = params if rows <= step else params.part(start, start + step)
            slab = Slab(one, vocab, starts[part], NOTHING if start else runs)
            slab.run(logits[part], slab.send(logits.device), kept, (tokens[part], logprobs[part]))
    except BaseException:
        histories.kept.forget()
        raise
    return drawn
