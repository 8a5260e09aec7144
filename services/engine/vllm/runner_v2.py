"""Our sampler in vLLM's model runner V2, in place of `GPUModelRunner.sampler`. A prototype, without drafts.

Engines force V1 (`env`). What is left to do before V2 can take its place: docs/async.md.

Invariants:
- nothing here waits for the device: positions follow from scheduled counts, and histories are the tokens that
  V2 itself keeps on the device, to which it appends what is drawn;
- as in `runner_v1`, a row that cannot be sampled has token 0 and logprob NaN.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.input_batch import get_num_sampled_and_rejected
from vllm.v1.worker.gpu.sample.output import SamplerOutput

from seer.services.engine.vllm.requests import EXTRA, ExtraArgs
from seer.services.engine.vllm.sampling.batch import Batch
from seer.services.engine.vllm.sampling.kept_histories import NOTHING, Runs
from seer.services.engine.vllm.sampling.sampler import DeviceSampler, StepSampler

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.v1.worker.gpu.input_batch import InputBatch

    from seer.services.engine.vllm.sampling.rows import RowParams


class RunnerHistories:
    """Histories that the runner keeps: `tokens` int32 [slots, length] on the device. See `Histories`."""

    def __init__(self, tokens: torch.Tensor) -> None:
        self._tokens = tokens
        self.kept = self

    def step(self, params: RowParams) -> tuple[npt.NDArray[np.int64], Runs]:
        """Return where each row's history begins; there is nothing to copy."""
        starts = params.records["slot"].astype(np.int64) * self._tokens.shape[1]
        return np.where(params.penalised, starts, -1), NOTHING

    def forget(self) -> None:
        """Do nothing: the runner keeps them."""

    def on(self, device: torch.device) -> torch.Tensor:
        """Return the tokens."""
        return self._tokens

    def on_cpu(self, params: RowParams) -> RowParams:
        """Return the rows with the tokens as their history."""
        return replace(params, history=self._tokens.numpy())

    def append(self, params: RowParams, drawn: torch.Tensor, chosen: npt.NDArray[np.bool_]) -> None:
        """Do nothing: the runner appends what is drawn."""


class SlotSampler:
    """Samples a token per row of a batch of V2, whose requests have slots."""

    compute_nans = False

    def __init__(self, runner: Any) -> None:  # noqa: ANN401 - V2's runner differs from the one that we force
        self._states = runner.req_states
        # The runner counts tokens for the penalties of its own sampler, and hands these to speculators.
        self.penalties_state = runner.sampler.penalties_state
        self.sampling_states = runner.sampler.sampling_states
        self._sample = StepSampler(runner.device)
        self._ahead = DeviceSampler(runner.device, RunnerHistories(self._states.all_token_ids.gpu))
        self._extras: dict[int, ExtraArgs] = {}
        self._slots: list[int] = []
        self._batch = Batch([])
        self.captured: list[npt.NDArray[np.float32]] = []

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> None:
        """Note how the request in a slot is sampled."""
        assert sampling_params.extra_args is not None  # noqa: S101 - every request of ours has some
        self._extras[req_idx] = sampling_params.extra_args[EXTRA]
        self._slots = []

    def apply_staged_writes(self) -> None:
        """Do nothing: what the device needs is sent with a step."""

    def __call__(self, logits: torch.Tensor, input_batch: InputBatch) -> SamplerOutput:
        """Return a token of each request, int64 [requests, 1], and logprobs, all on the device."""
        slots = input_batch.idx_mapping_np.tolist()
        if slots != self._slots:
            self._batch, self._slots = Batch([self._extras[slot] for slot in slots], slots), slots
        lengths = input_batch.num_computed_tokens_np + input_batch.num_scheduled_tokens
        whole = lengths >= input_batch.prefill_len_np
        params = self._batch.step(lengths, None)
        tokens, logprobs = self._ahead(logits, params, whole)
        for row in self._batch.captures:
            if whole[row]:
                self.captured.append(logits[row].float().cpu().numpy().copy())
        sampled = tokens.clamp(min=0).long()[:, None]
        counts = get_num_sampled_and_rejected(
            input_batch.seq_lens.new_ones(input_batch.num_reqs), input_batch.seq_lens,
            input_batch.cu_num_logits, input_batch.idx_mapping, self._states.prefill_len.gpu,
        )  # fmt: skip
        return SamplerOutput(
            sampled_token_ids=sampled,
            logprobs_tensors=LogprobsTensors(
                sampled, logprobs[:, None], torch.zeros_like(sampled[:, 0])
            ),  # ranks are never read
            num_nans=None,
            num_sampled=counts[0],
            num_rejected=counts[1],
        )

    def draw(self, logits: torch.Tensor, params: RowParams) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens int32 [rows] and logprobs float32 [rows] on the host; see `StepSampler`."""
        tokens, logprobs = self._sample(logits, params)
        return torch.from_numpy(tokens), torch.from_numpy(logprobs)
