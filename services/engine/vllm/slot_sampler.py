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
from seer.services.engine.vllm.sampling.rows import LOGPROB_MODES
from seer.services.engine.vllm.sampling.slot_rows import slot_rows
from seer.services.engine.vllm.sampling.top_logprobs import divisors, top_logprobs

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.v1.worker.gpu.input_batch import InputBatch

    from seer.services.engine.vllm.drafts.device_paths import DevicePaths

RAW = LOGPROB_MODES.index("raw")


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
        self._tops: dict[int, int] = {}  # by slot: how many alternatives its request asks for
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
        if sampling_params.logprobs:
            self._tops[req_idx] = sampling_params.logprobs
        else:
            self._tops.pop(req_idx, None)
        (self.captures.add if extra.capture else self.captures.discard)(req_idx)

    def apply_staged_writes(self) -> None:
        """Do nothing: what the device needs is sent with a step."""

    def __call__(self, logits: torch.Tensor, input_batch: InputBatch, *_: object) -> SamplerOutput:
        """Return tokens int64 [requests, most drafts + 1], and their logprobs, all on the device."""
        tokens, logprobs = self._rows.draw(logits, input_batch)
        asking = self._asking(input_batch)
        # Where alternatives are asked for, numbers of rows go the way of logprobs: whose are they in the end?
        numbers = torch.arange(len(tokens), dtype=torch.float32, device=tokens.device) if asking else logprobs
        paths = self.paths.paths(input_batch) if self.paths is not None else None
        kept = self._rows.accept(tokens, numbers, input_batch if paths is None else paths)
        if self.paths is not None and paths is not None:
            kept = self.paths.keep_winners(*kept)
        self.sampled, numbers, gained = kept
        num_sampled, num_rejected = get_num_sampled_and_rejected(
            gained, input_batch.seq_lens, input_batch.cu_num_logits, input_batch.idx_mapping,
            self._states.prefill_len.gpu,
        )  # fmt: skip
        if self.captures:
            self._capture(logits, input_batch, num_sampled)
        if asking:
            found = self._with_tops(logits, logprobs, numbers, input_batch, asking)
        else:
            flat = self.sampled.view(-1, 1)
            found = flat, numbers.view(-1, 1), torch.zeros_like(flat[:, 0])  # ranks are not read
        width = self.sampled.shape[1]
        starts = list(range(0, self.sampled.numel() + 1, width)) if width > 1 else None
        return SamplerOutput(
            sampled_token_ids=self.sampled,
            logprobs_tensors=LogprobsTensors(*found, starts),
            num_nans=None,
            num_sampled=num_sampled,
            num_rejected=num_rejected,
        )

    def _asking(self, batch: InputBatch) -> list[int]:
        """Return which requests of a batch ask for alternatives."""
        if not self._tops:
            return []
        return [place for place, slot in enumerate(batch.idx_mapping_np.tolist()) if slot in self._tops]

    def _with_tops(
        self,
        logits: torch.Tensor,
        logprobs: torch.Tensor,
        numbers: torch.Tensor,
        batch: InputBatch,
        asking: list[int],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return ids and logprobs [requests * width, 1 + most], own ones first, and ranks [requests * width].

        `numbers` [requests, width] are the rows of what was sampled; after a rejected draft they say nothing.
        """
        (requests, width), device = self.sampled.shape, logits.device
        slots = batch.idx_mapping_np[asking]
        most = max(self._tops[slot] for slot in slots.tolist())
        rows = numbers.nan_to_num().clamp(0, len(logits) - 1).long()
        records = self._rows.table.records[slots]
        by = np.repeat(divisors(records["temperature"], records["logprobs"] == RAW), width)
        places = (np.array(asking)[:, None] * width + np.arange(width)).reshape(-1)
        at = torch.from_numpy(places).to(device, non_blocking=True)
        drawn, own = self.sampled.view(-1), rows.view(-1)
        best = top_logprobs(
            logits, own[at], torch.from_numpy(by).to(device, non_blocking=True), drawn[at].clamp(min=0), most
        )
        ids = drawn.new_zeros((requests * width, 1 + most))
        values, ranks = logprobs.new_zeros(ids.shape), torch.zeros_like(drawn)
        ids[:, 0], values[:, 0] = drawn, logprobs[own]
        ids[at, 1:], values[at, 1:], ranks[at] = best
        return ids, values, ranks

    def _capture(self, logits: torch.Tensor, batch: InputBatch, num_sampled: torch.Tensor) -> None:
        """Keep the logits of the tokens that requests gain: of none before the whole prompt is computed."""
        for request, slot in enumerate(batch.idx_mapping_np.tolist()):
            if slot in self.captures:
                begin, rows = batch.cu_num_logits_np[request], int(num_sampled[request])
                self.captured.extend(logits[begin : begin + rows].float().cpu().numpy().copy())
