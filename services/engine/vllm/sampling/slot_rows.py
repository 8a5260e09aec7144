"""The rows of a step of vLLM's model runner V2, whose requests have slots.

V2 begins a step before the host knows how many tokens its requests have: positions, histories and drafts
are on the device alone. What a request is sampled by is noted by slot when it comes; rows are made from both
there.

Invariants:
- rows are those of `SamplingTable.step` for the same requests, positions, histories and drafts, and tokens
  are accepted as by `accept_drafts`, on CPUs and GPUs alike;
- the host reads neither positions nor tokens of a device: see `triton_slots` for GPUs. Here, for CPUs, the
  device's memory is the host's.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from seer import _native
from seer.services.engine.vllm.sampling.rows import RECORD, RowParams
from seer.services.engine.vllm.sampling.sampler import sample_rows

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.input_batch import InputBatch

    from seer.services.engine.vllm.requests import ExtraArgs

REJECTED = -1
"""vLLM's mark for no token: what follows a rejected draft."""

_EMPTY_INT = np.empty(0, np.int32)
_EMPTY_FLOAT = np.empty(0, np.float32)

Lists = tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.float32]]
"""Stop ids, and tokens and values of biases."""


class SlotTable:
    """What the request in each slot is sampled by, on the host; `version` grows when that changes.

    `faults` [slots] are the positions that are sampled with a wrong key, or -1.
    """

    def __init__(self, slots: int) -> None:
        self.words = np.zeros((slots, RECORD.itemsize // 8), np.int64)
        self.records = self.words.view(RECORD)[:, 0]
        self.records["slot"] = range(slots)
        self.faults = np.full(slots, -1, np.int64)
        self.version = 0
        self._known = np.zeros(slots, np.int64)
        self._stop_ids, self._bias_ids = [_EMPTY_INT] * slots, [_EMPTY_INT] * slots
        self._bias_values = [_EMPTY_FLOAT] * slots
        self._lists: Lists | None = None

    def set(self, slot: int, extra: ExtraArgs) -> None:
        """Take the request that comes into a slot."""
        sampling, record = extra.sampling, self.records[slot]
        if sampling.stop_ids or sampling.bias or record["stop_len"] or record["bias_len"]:
            self._stop_ids[slot] = np.array(sampling.stop_ids, np.int32)
            self._bias_ids[slot] = np.array([token for token, _ in sampling.bias], np.int32)
            self._bias_values[slot] = np.array([value for _, value in sampling.bias], np.float32)
            self._lists = None
        self.words[slot] = np.frombuffer(sampling.record, np.int64)
        record["slot"] = slot
        record["stop_len"], record["bias_len"] = len(sampling.stop_ids), len(sampling.bias)
        self.faults[slot] = -1 if extra.fault_position is None else extra.fault_position
        self._known[slot] = 0
        self.version += 1

    def lists(self) -> Lists:
        """Return the lists of all slots; from now on `records` say where in them each slot's are."""
        if self._lists is None:
            for name in ("stop", "bias"):
                lengths = self.records[f"{name}_len"]
                self.records[f"{name}_start"] = np.cumsum(lengths) - lengths
            ids = np.concatenate(self._stop_ids), np.concatenate(self._bias_ids)
            self._lists = *ids, np.concatenate(self._bias_values)
        return self._lists

    def known(self, batch: InputBatch) -> npt.NDArray[np.int64]:
        """Return how many tokens are at least before the first row of each request: int64 [requests].

        Call it once in each step of a request: each computes a token of the prompt or draws one, at least.
        """
        slots, prefilled = batch.idx_mapping_np, batch.num_computed_prefill_tokens_np
        prefilled = np.minimum(batch.prefill_len_np, prefilled + batch.num_scheduled_tokens)
        known: npt.NDArray[np.int64] = np.maximum(self._known[slots], prefilled)
        self._known[slots] = known + 1
        return known


class SlotRows:
    """Samples the rows of V2's batches; on CPUs. `history` int32 [slots, length] are V2's own tokens."""

    def __init__(self, history: torch.Tensor) -> None:
        self.table = SlotTable(len(history))
        self.history = history

    def rows(self, batch: InputBatch) -> RowParams:
        """Return the rows of a batch."""
        stop_ids, bias_ids, bias_values = self.table.lists()
        slots, places = batch.expanded_idx_mapping.numpy(), batch.expanded_local_pos.numpy()
        indices = batch.logits_indices.numpy()
        records = self.table.words[slots].view(RECORD)[:, 0]
        records["position"] = batch.positions.numpy()[indices] + 1
        records["extra_start"] = indices - places + 1
        records["extra_len"] = places
        faults = self.table.faults[slots]
        if (faults >= 0).any():
            records["key"] ^= (faults == records["position"]).astype(np.uint64)
        return RowParams(
            records, stop_ids, bias_ids, bias_values, self.history.numpy(), batch.input_ids.numpy()
        )

    def draw(self, logits: torch.Tensor, batch: InputBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what `sample_rows` draws: tokens int32 [rows] and logprobs float32 [rows]."""
        return sample_rows(logits, self.rows(batch))

    def accept(
        self, tokens: torch.Tensor, logprobs: torch.Tensor, batch: InputBatch
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return what each request gains of its rows: tokens, logprobs, and how many tokens.

        These are int64 [requests, most drafts + 1], -1 after the first rejected draft, float32 of the same
        shape, and int32 [requests]. A row that cannot be sampled has token 0.
        """
        counts = batch.num_draft_tokens_per_req
        if counts is None:
            one = torch.ones(batch.num_reqs, dtype=torch.int32)
            return tokens.clamp(min=0).long()[:, None], logprobs[:, None], one
        inputs = batch.input_ids.numpy()[batch.logits_indices.numpy()]
        drafts = np.delete(inputs, batch.cu_num_logits_np[:-1])
        drawn = np.maximum(tokens.numpy(), 0)
        sampled, values = accept_drafts(drawn, logprobs.numpy(), counts.astype(np.int32), drafts)
        return sampled.long(), values, (sampled != REJECTED).sum(dim=1, dtype=torch.int32)


def accept_drafts(
    tokens: npt.NDArray[np.int32],
    logprobs: npt.NDArray[np.float32],
    counts: npt.NDArray[np.int32],
    drafts: npt.NDArray[np.int32],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Spread samples [rows] over [requests, most drafts + 1]; -1 after the first rejected draft.

    `counts` [requests] are numbers of drafts, `drafts` [sum(counts)] the drafts themselves.
    """
    width = int(counts.max(initial=0)) + 1
    sampled = np.empty((len(counts), width), np.int32)
    values = np.empty((len(counts), width), np.float32)
    _native.accept_drafts(tokens, logprobs, counts, drafts, REJECTED, sampled, values)
    return torch.from_numpy(sampled), torch.from_numpy(values)


def slot_rows(device: torch.device, history: torch.Tensor) -> SlotRows:
    """Return what samples the rows of V2 on a device."""
    if device.type == "cpu":
        return SlotRows(history)
    module = importlib.import_module("seer.services.engine.vllm.sampling.triton_slots")
    rows: SlotRows = module.TritonSlotRows(history)
    return rows
