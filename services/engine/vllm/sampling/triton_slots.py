"""The rows of model runner V2 on GPUs: made, sampled and accepted on the device. See `slot_rows`.

Invariants:
- nothing waits for the device, and the host reads nothing from it;
- the records of the slots are sent when one of them changes; which rows have marks, biases or cuts is sent
  when that differs from the last step's, so that a usual step sends nothing;
- the host counts on bounds of positions alone: a row is marked for stop ids until `min_tokens` are there for
  sure, and chunks of a history are as many as it may have. Marks that say nothing change no bit.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import repeat
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
import triton

from seer.services.engine.vllm.sampling.slot_rows import SlotRows
from seer.services.engine.vllm.sampling.triton_kernels import (
    BLOCK,
    PLACES,
    RECORD_WORDS,
    WORDS,
    accept_kernel,
    rows_kernel,
)
from seer.services.engine.vllm.sampling.triton_launch import launch
from seer.services.engine.vllm.sampling.triton_sampler import (
    EXTRA,
    Buffer,
    Cuts,
    Edits,
    cut_kinds,
    draw_rows,
    empty_drawn,
    readable,
    slab_rows,
)

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.input_batch import InputBatch

_PENALISED, _STOPPED, _BIASED, _CUT = 0, 1, 2, 3
"""Rows of `TritonSlotRows._kinds`; from the last one on, those of `cut_kinds`."""


class _Plan:
    """What some rows, that are launched together, need besides their draw. Kept on the device.

    `kinds` bool [kinds, rows] says which row is of which kind.
    """

    def __init__(self, kinds: npt.NDArray[np.bool_], vocab: int, device: torch.device) -> None:
        buffer = Buffer()
        self.edits = Edits(kinds[_PENALISED] | kinds[_STOPPED], kinds[_BIASED], buffer)
        places = buffer.add(np.stack((self.edits.marks, self.edits.biases), axis=1)) if self.edits else 0
        self.cuts = Cuts(kinds[_CUT:], vocab, buffer)
        self.sent = buffer.to(device)
        self.places = self.sent[places:].view(torch.int64)


class TritonSlotRows(SlotRows):
    """Samples the rows of V2's batches on a GPU, or in Triton's interpreter."""

    def __init__(self, history: torch.Tensor) -> None:
        super().__init__(history)
        self._sent_for: tuple[int, int] | None = None
        self._plain = _Plan(np.zeros((_CUT + 3, 0), np.bool_), 1, history.device)
        self._planned_for: object = None
        self._plans: list[_Plan] = []

    def draw(self, logits: torch.Tensor, batch: InputBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """See `SlotRows`."""
        logits = readable(logits)
        rows, vocab = logits.shape
        self._send(vocab, logits.device)
        plans, step, chunks = self._plan(batch, rows, vocab, logits.device)
        drawn = tokens, logprobs = empty_drawn(rows, logits.device)
        lists, extra = (self._lists, *self._lists_at), batch.input_ids
        for start, plan in zip(range(0, rows, step), plans, strict=False):
            part = slice(start, min(start + step, rows))
            words = self._words(plan, part, batch)
            edits = plan.edits.on(plan.sent, words, lists, extra, self.history.view(-1), vocab, chunks)
            draw_rows(logits[part], words, edits, plan.cuts, plan.sent, (tokens[part], logprobs[part]))
        return drawn

    def accept(
        self, tokens: torch.Tensor, logprobs: torch.Tensor, batch: InputBatch
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `SlotRows`."""
        counts, requests, device = batch.num_draft_tokens_per_req, batch.num_reqs, tokens.device
        width = 1 if counts is None else int(counts.max(initial=0)) + 1
        sampled = torch.empty(requests, width, dtype=torch.int64, device=device)
        values = torch.empty(requests, width, dtype=torch.float32, device=device)
        gained = torch.empty(requests, dtype=torch.int32, device=device)
        arguments = (
            tokens, logprobs, batch.cu_num_logits, batch.logits_indices, batch.input_ids, sampled, values,
            gained, width,
        )  # fmt: skip
        launch(accept_kernel, requests, arguments, triton.next_power_of_2(width))
        return sampled, values, gained

    def _send(self, vocab: int, device: torch.device) -> None:
        """Have the table on the device, and on the host what kinds of rows the slots make."""
        table = self.table
        if self._sent_for == (table.version, vocab):
            return
        flat, records = table.lists(), table.records
        penalised = (records["repetition"] != 1) | (records["frequency"] != 0) | (records["presence"] != 0)
        kinds = (penalised, records["stop_len"] > 0, records["bias_len"] > 0, *cut_kinds(records, vocab))
        self._kinds = np.stack(kinds)
        self._longest_list = int(max(records["stop_len"].max(), records["bias_len"].max()))
        words = np.empty((len(records), WORDS.value), np.int64)
        words[:, :RECORD_WORDS], words[:, RECORD_WORDS:] = table.words, EXTRA
        words[:, PLACES["history"]] = np.where(penalised, np.arange(len(words)) * self.history.shape[1], -1)
        buffer = Buffer()
        buffer.add(words)
        faults = buffer.add(table.faults)
        self._lists_at = [buffer.add(array) // 4 for array in flat]
        sent = buffer.to(device)
        self._table, self._faults = sent.view(torch.int64), sent[faults:].view(torch.int64)
        self._lists = sent.view(torch.int32)
        self._sent_for = (table.version, vocab)

    def _plan(
        self, batch: InputBatch, rows: int, vocab: int, device: torch.device
    ) -> tuple[Iterable[_Plan], int, int]:
        """Return what a batch's rows need, by launch, how many rows each launch has, and how many chunks.

        So many chunks of `BLOCK` may the longest history or list have.
        """
        slots, counts = batch.idx_mapping_np, batch.num_draft_tokens_per_req
        kinds = self._kinds[:, slots]
        if kinds[_STOPPED].any():
            records, known = self.table.records, self.table.known(batch)
            kinds[_STOPPED] &= known - records["prompt_len"][slots] < records["min_tokens"][slots]
        edited = bool(kinds[:_CUT].any())
        step = slab_rows(edited, vocab)
        if not kinds.any():
            return repeat(self._plain), step, 0
        wanted = (vocab, kinds.tobytes(), None if counts is None else counts.tobytes())
        if wanted != self._planned_for:
            of_rows = kinds if counts is None else np.repeat(kinds, counts + 1, axis=1)
            parts = (of_rows[:, start : start + step] for start in range(0, rows, step))
            self._plans = [_Plan(part, vocab, device) for part in parts]
            self._planned_for = wanted
        if not edited:
            return self._plans, step, 0
        upper = batch.num_computed_tokens_np + batch.num_scheduled_tokens
        longest = max(int(upper[kinds[_PENALISED]].max(initial=0)), self._longest_list, 1)
        return self._plans, step, triton.cdiv(longest, BLOCK.value)

    def _words(self, plan: _Plan, part: slice, batch: InputBatch) -> torch.Tensor:
        rows = part.stop - part.start
        words = torch.empty(rows * WORDS.value, dtype=torch.int64, device=self._table.device)
        arguments = (
            self._table, self._faults, batch.expanded_idx_mapping[part], batch.expanded_local_pos[part],
            batch.logits_indices[part], batch.positions, plan.places if plan.edits else words, words,
        )  # fmt: skip
        launch(rows_kernel, rows, arguments, int(bool(plan.edits)))
        return words
