"""The sampler on GPUs: what the host prepares for the kernels, and their launches.

Invariants:
- one copy to the device per slab, histories of rows with penalties in it; nothing waits for the device;
- slabs bound the memory of marks and biases, and of the cuts' histograms.
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
    LEVELS,
    PLACES,
    RECORD_WORDS,
    WORDS,
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


EXTRA = np.array(list(EXTRA_WORDS.values()), np.int64)

Drawn = tuple[torch.Tensor, torch.Tensor]
"""Tokens int32 [rows] and logprobs float32 [rows]."""

Kinds = npt.NDArray[np.bool_] | tuple[npt.NDArray[np.bool_], ...]
"""Which rows are of each of some kinds: bool [kinds, rows]."""

Lists = tuple[torch.Tensor, int, int, int]
"""Memory as int32, and where in it stop ids, ids of biases and values of biases begin."""


class Buffer:
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


def _add_histories(params: RowParams, buffer: Buffer) -> npt.NDArray[np.int64]:
    """Add what is known of rows with penalties, without drafts; return where it begins, int32, or -1."""
    records, starts = params.records, np.full(len(params.records), -1, np.int64)
    for row in np.flatnonzero(params.penalised).tolist():
        known = int(records["position"][row] - records["extra_len"][row])
        starts[row] = buffer.add(params.history_of(row)[:known]) // 4
    return starts


def _places(chosen: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    return np.where(chosen, np.cumsum(chosen) - 1, -1)


class Edits:
    """The rows of a slab with penalties, stop ids or biases; false if there are none.

    `marks` and `biases` int64 [rows] are their rows of what is edited, or -1.
    """

    def __init__(self, marked: npt.NDArray[np.bool_], biased: npt.NDArray[np.bool_], buffer: Buffer) -> None:
        edited = marked | biased
        self._marked, self._biased, self._edited = (int(flags.sum()) for flags in (marked, biased, edited))
        if self._edited:
            self.marks, self.biases = _places(marked), _places(biased)
            self._rows = buffer.add(np.flatnonzero(edited))

    def __bool__(self) -> bool:
        return self._edited > 0

    def on(
        self, sent: torch.Tensor, words: torch.Tensor, lists: Lists, extra: torch.Tensor,
        histories: torch.Tensor, vocab: int, chunks: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Return what they do to each token: marks int32 [rows * vocab], biases float32 [rows * vocab].

        `extra` int32 are the drafts that the rows' words speak of. The history, the stop ids and the biases
        of a row have at most `chunks` blocks.
        """
        if not self._edited:
            return words.view(torch.int32), words.view(torch.float32)  # not read
        marks = torch.zeros(self._marked * vocab, dtype=torch.int32, device=sent.device)
        biases = torch.zeros(self._biased * vocab, dtype=torch.float32, device=sent.device)
        flat, *flat_at = lists
        arguments = (
            words, sent[self._rows :].view(torch.int64), flat, extra, histories, marks, biases, vocab,
            *flat_at, chunks,
        )  # fmt: skip
        launch(mark_kernel, self._edited * chunks, arguments)
        return marks, biases


def cut_kinds(records: npt.NDArray[np.void], vocab: int) -> tuple[npt.NDArray[np.bool_], ...]:
    """Return which rows are cut at all, which by top-k, and which by top-p: bool [rows] each."""
    # The largest logit survives every cut: greedy rows need one for processed logprobs alone.
    drawn = (records["temperature"] > 0) | (records["logprobs"] == 2)
    top_k = drawn & (records["top_k"] > 0) & (records["top_k"] < vocab)
    top_p = drawn & (records["top_p"] < 1.0)
    return top_k | top_p | drawn & (records["log_min_p"] > -1e30), top_k, top_p


class Cuts:
    """The rows of a slab that are cut, and where; `kinds` as of `cut_kinds`, or empty if there are none."""

    def __init__(self, kinds: Kinds, vocab: int, buffer: Buffer) -> None:
        self._vocab = vocab
        self._cut = self._top_k = self._top_p = (0, 0)
        if len(kinds) and kinds[0].any():
            self._cut, self._top_k, self._top_p = (
                (buffer.add(np.flatnonzero(rows)), int(rows.sum())) for rows in kinds
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


def draw_rows(
    logits: torch.Tensor, words: torch.Tensor, edits: tuple[torch.Tensor, torch.Tensor], cuts: Cuts,
    sent: torch.Tensor, drawn: Drawn,
) -> None:  # fmt: skip
    """Launch the kernels from the cuts on. They change `words`, int64 [rows * WORDS]: it serves once."""
    rows, vocab = logits.shape
    parts = triton.cdiv(vocab, BLOCK.value)
    slots = triton.next_power_of_2(parts)
    row_arguments = (logits, logits.stride(0), vocab, words, *edits)
    cuts.on(sent, row_arguments)
    found = torch.empty(rows * 2 * slots, dtype=torch.int64, device=logits.device)
    launch(draw_kernel, rows * parts, (*row_arguments, found, *drawn), slots)


class Slab:
    """The rows of one launch: what the host sends for them, and the kernels that read it."""

    def __init__(self, params: RowParams, vocab: int) -> None:
        """Prepare what is sent. Raises `ValueError` when a row with penalties has no history."""
        records = params.records
        words = np.empty((len(records), WORDS.value), np.int64)
        words[:, :RECORD_WORDS] = records.view(np.int64).reshape(len(words), -1)
        words[:, RECORD_WORDS:] = EXTRA
        self._buffer = buffer = Buffer()
        buffer.add(words)
        due = records["position"] - records["prompt_len"] < records["min_tokens"]
        marked, biased = params.penalised | due & (records["stop_len"] > 0), records["bias_len"] > 0
        self._edits = Edits(marked, biased, buffer)
        self._chunks, self._flat = 1, [0] * 4
        if self._edits:
            words[:, PLACES["mark"]], words[:, PLACES["bias"]] = self._edits.marks, self._edits.biases
            words[:, PLACES["history"]] = _add_histories(params, buffer)
            flat = (params.stop_ids, params.bias_ids, params.bias_values, params.extra)
            self._flat = [buffer.add(array) // 4 for array in flat]
            lengths = (records["position"], records["stop_len"], records["bias_len"])
            longest = max(int(length[marked | biased].max()) for length in lengths)
            self._chunks = max(1, triton.cdiv(longest, BLOCK.value))
        self._cuts = Cuts(cut_kinds(records, vocab) if params.truncated else (), vocab, buffer)

    def send(self, device: torch.device) -> torch.Tensor:
        """Return what the kernels read, on its way to the device: uint8 [bytes]."""
        return self._buffer.to(device)

    def run(self, logits: torch.Tensor, sent: torch.Tensor, drawn: Drawn) -> None:
        """Launch the kernels. They change `sent`: it serves once."""
        words, flat = sent.view(torch.int64), sent.view(torch.int32)
        lists, extra = (flat, *self._flat[:3]), flat[self._flat[3] :]
        edits = self._edits.on(sent, words, lists, extra, flat, logits.shape[1], self._chunks)
        draw_rows(logits, words, edits, self._cuts, sent, drawn)


def slab_rows(edited: bool, vocab: int) -> int:
    """Return the most rows of one launch, if none of them is edited or some are."""
    if not edited:
        return _SLAB_ROWS
    return min(_SLAB_ROWS, max(1, _SLAB_EDITED // vocab // _ALIGNED_ROWS) * _ALIGNED_ROWS)


def readable(logits: torch.Tensor) -> torch.Tensor:
    """Return logits that the kernels can read: floats of 16 or 32 bits, those of a row side by side."""
    if logits.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        logits = logits.float()
    return logits if logits.stride(1) == 1 else logits.contiguous()


def empty_drawn(rows: int, device: torch.device) -> Drawn:
    """Return memory for what is drawn."""
    aligned = -(-rows // _ALIGNED_ROWS) * _ALIGNED_ROWS
    drawn = torch.empty(2, aligned, dtype=torch.int32, device=device)
    return drawn[0, :rows], drawn[1, :rows].view(torch.float32)


def sample(logits: torch.Tensor, params: RowParams) -> Drawn:
    """Return the tokens and logprobs of logits [rows, vocab].

    Floats of 16 bits are read as they are. Reads nothing back from the device. Rows that cannot be
    sampled get token -1, logprob NaN.
    """
    logits = readable(logits)
    rows, vocab = logits.shape
    drawn = tokens, logprobs = empty_drawn(rows, logits.device)
    records = params.records
    edited = (params.penalised | (records["stop_len"] > 0) | (records["bias_len"] > 0)).any()
    step = slab_rows(bool(edited), vocab)
    for start in range(0, rows, step):
        part = slice(start, start + step)
        slab = Slab(params if rows <= step else params.part(start, start + step), vocab)
        slab.run(logits[part], slab.send(logits.device), (tokens[part], logprobs[part]))
    return drawn
