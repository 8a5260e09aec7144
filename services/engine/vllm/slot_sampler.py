"""Our sampler in vLLM's model runner V2, in place of its `sampler` and its `rejection_sampler`.

Invariants:
- nothing here waits for the device, but for captured logits: positions, histories and drafts are those that
  V2 itself keeps on the device (see `slot_rows`);
- the position of a sampled token is the number of tokens before it, whatever the schedule;
- a row that cannot be sampled has token 0, which the model can read, and logprob NaN, which the backend
  refuses.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.input_batch import get_num_sampled_and_rejected
from vllm.v1.worker.gpu.sample.output import SamplerOutput

from seer.services.engine.vllm.requests import EXTRA, ExtraArgs
from seer.services.engine.vllm.sampling.slot_rows import slot_rows

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.v1.worker.gpu.input_batch import InputBatch

    from seer.services.engine.vllm.drafts.device_paths import DevicePaths


class SlotSampler:
    """Samples a token per row of a batch of V2, whose requests have slots.

    A request with d drafts has d + 1 rows, row j with the logits after its first j drafts. Each row samples
    its token; a draft is accepted if it equals the token sampled in its place, and a row counts if all drafts
    before it are accepted. So vLLM's rejection sampler never runs, and drafts cannot change a token.
    """

    compute_nans = False

    def __init__(self, runner: Any) -> None:  # noqa: ANN401 - V2's runner
        self._states = runner.req_states
        self.sampling_states = runner.sampler.sampling_states  # for speculators
        # V2 would count the tokens of all requests for its own penalties, int32 [slots, vocabulary].
        runner.sampler.penalties_state.output_bin_counts = None
        self.penalties_state = SimpleNamespace(output_bin_counts=None)
        self._rows = slot_rows(runner.device, self._states.all_token_ids.gpu)
        self.params: dict[int, SamplingParams] = {}
        """By slot."""
        self.captures: set[int] = set()
        """Slots of the requests whose logits are kept."""
        self.paths: DevicePaths | None = None  # None: drafts have one path
        self.captured: list[npt.NDArray[np.float32]] = []
        self.sampled = torch.empty((0, 1), dtype=torch.int64, device=runner.device)
        """What the last step drew, [requests, most drafts + 1], on the device; for drafts."""

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> None:
        """Note how the request in a slot is sampled."""
        self.params[req_idx] = sampling_params
        extra: ExtraArgs = (sampling_params.extra_args or {})[EXTRA]
        self._rows.table.set(req_idx, extra)
        (self.captures.add if extra.capture else self.captures.discard)(req_idx)

    def apply_staged_writes(self) -> None:
        """Do nothing: what the device needs is sent with a step."""

    def __call__(self, logits: torch.Tensor, input_batch: InputBatch, *_: object) -> SamplerOutput:
        """Return tokens int64 [requests, most drafts + 1], and their logprobs, all on the device."""
        drawn = self._rows.draw(logits, input_batch)
        paths = self.paths.paths(input_batch) if self.paths is not None else None
        kept = self._rows.accept(*drawn, input_batch if paths is None else paths)
        if self.paths is not None and paths is not None:
            kept = self.paths.keep_winners(*kept)
        self.sampled, logprobs, gained = kept
        num_sampled, num_rejected = get_num_sampled_and_rejected(
            gained, input_batch.seq_lens, input_batch.cu_num_logits, input_batch.idx_mapping,
            self._states.prefill_len.gpu,
        )  # fmt: skip
        if self.captures:
            self._capture(logits, input_batch, num_sampled)
        width, flat = self.sampled.shape[1], self.sampled.view(-1, 1)
        return SamplerOutput(
            sampled_token_ids=self.sampled,
            logprobs_tensors=LogprobsTensors(
                flat,
                logprobs.view(-1, 1),
                torch.zeros_like(flat[:, 0]),  # ranks are never read
                list(range(0, len(flat) + 1, width)) if width > 1 else None,
            ),
            num_nans=None,
            num_sampled=num_sampled,
            num_rejected=num_rejected,
        )

    def _capture(self, logits: torch.Tensor, batch: InputBatch, num_sampled: torch.Tensor) -> None:
        """Keep the logits of the tokens that requests gain: of none before the whole prompt is computed."""
        for request, slot in enumerate(batch.idx_mapping_np.tolist()):
            if slot in self.captures:
                begin, rows = batch.cu_num_logits_np[request], int(num_sampled[request])
                self.captured.extend(logits[begin : begin + rows].float().cpu().numpy().copy())
