"""Our sampler in vLLM's model runner V2, in place of its `sampler` and its `rejection_sampler`.

Invariants:
- nothing here waits for the device: positions follow from scheduled counts, and histories are the tokens that
  V2 itself keeps on the device, to which it appends what is drawn;
- as in `runner_v1`, a row that cannot be sampled has token 0 and logprob NaN.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.input_batch import get_num_sampled_and_rejected
from vllm.v1.worker.gpu.sample.output import SamplerOutput

from seer.services.engine.vllm.requests import EXTRA, ExtraArgs
from seer.services.engine.vllm.sampling.batch import REJECTED, Batch, accept_drafts
from seer.services.engine.vllm.sampling.device_histories import RunnerHistories
from seer.services.engine.vllm.sampling.sampler import DeviceSampler, StepSampler

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.v1.worker.gpu.input_batch import InputBatch

    from seer.services.engine.vllm.sampling.rows import RowParams


class SlotSampler:
    """Samples a token per row of a batch of V2, whose requests have slots; see `RowSampler` for drafts."""

    compute_nans = False

    def __init__(self, runner: Any) -> None:  # noqa: ANN401 - V2's runner differs from the one that we force
        self._states = runner.req_states
        # The runner counts tokens for the penalties of its own sampler, and hands these to speculators.
        self.penalties_state = runner.sampler.penalties_state
        self.sampling_states = runner.sampler.sampling_states
        self._sample = StepSampler(runner.device)
        self._histories = RunnerHistories(self._states.all_token_ids.gpu)
        self._draw = DeviceSampler(runner.device, self._histories)
        self.params: dict[int, SamplingParams] = {}
        """By slot."""
        self._slots: list[int] = []
        self._batch = Batch([])
        self.captured: list[npt.NDArray[np.float32]] = []

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> None:
        """Note how the request in a slot is sampled."""
        self.params[req_idx] = sampling_params
        self._slots = []

    def apply_staged_writes(self) -> None:
        """Do nothing: what the device needs is sent with a step."""

    def __call__(self, logits: torch.Tensor, input_batch: InputBatch, *_: object) -> SamplerOutput:
        """Return tokens int64 [requests, most drafts + 1], and their logprobs, all on the device."""
        slots = input_batch.idx_mapping_np.tolist()
        if slots != self._slots:
            self._batch, self._slots = Batch([self._extra(slot) for slot in slots], slots), slots
        lengths = input_batch.num_computed_tokens_np + input_batch.num_scheduled_tokens
        whole = lengths >= input_batch.prefill_len_np
        counts = input_batch.num_draft_tokens_per_req
        if counts is None:
            tokens, logprobs = self._draw(logits, self._batch.step(lengths, None))
            tokens, logprobs = tokens.clamp(min=0)[:, None], logprobs[:, None]
            num_sampled = input_batch.seq_lens.new_ones(input_batch.num_reqs)
        else:
            tokens, logprobs = self._verify(logits, input_batch, lengths, counts)
            num_sampled = (tokens != REJECTED).sum(dim=1, dtype=torch.int32)
        self._capture(logits, input_batch, whole, tokens)
        num_sampled, num_rejected = get_num_sampled_and_rejected(
            num_sampled, input_batch.seq_lens, input_batch.cu_num_logits, input_batch.idx_mapping,
            self._states.prefill_len.gpu,
        )  # fmt: skip
        sampled, width = tokens.long(), tokens.shape[1]
        flat = sampled.view(-1, 1)
        return SamplerOutput(
            sampled_token_ids=sampled,
            logprobs_tensors=LogprobsTensors(
                flat,
                logprobs.reshape(-1, 1),
                torch.zeros_like(flat[:, 0]),  # ranks are never read
                list(range(0, len(flat) + 1, width)) if width > 1 else None,
            ),
            num_nans=None,
            num_sampled=num_sampled,
            num_rejected=num_rejected,
        )

    def _extra(self, slot: int) -> ExtraArgs:
        extra: ExtraArgs = (self.params[slot].extra_args or {})[EXTRA]
        return extra

    def _verify(
        self, logits: torch.Tensor, batch: InputBatch, lengths: npt.NDArray[np.int32],
        counts: npt.NDArray[np.int32],
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Return the tokens of each request, [requests, most drafts + 1], and their logprobs; on CPUs."""
        rows = batch.input_ids.numpy()[batch.logits_indices.numpy()]
        drafts = np.delete(rows, batch.cu_num_logits_np[:-1]).astype(np.int32)
        params = self._batch.step(lengths - counts, None, counts, drafts)
        drawn, values = self._sample(logits, self._histories.on_cpu(params))
        return accept_drafts(np.maximum(drawn, 0), values, counts, drafts)

    def _capture(
        self, logits: torch.Tensor, batch: InputBatch, whole: npt.NDArray[np.bool_], tokens: torch.Tensor
    ) -> None:
        for request in self._batch.captures:
            if whole[request]:
                begin, rows = batch.cu_num_logits_np[request], int((tokens[request] != REJECTED).sum())
                self.captured.extend(logits[begin : begin + rows].float().cpu().numpy().copy())

    def draw(self, logits: torch.Tensor, params: RowParams) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens int32 [rows] and logprobs float32 [rows] on the host; see `StepSampler`."""
        tokens, logprobs = self._sample(logits, params)
        return torch.from_numpy(tokens), torch.from_numpy(logprobs)
