"""Our sampler in vLLM's model runner V1, in place of `GPUModelRunner._sample`.

Invariants:
- the position of a sampled token is the number of tokens before it, whatever the schedule: how many are
  scheduled says it, whatever they are;
- a row that cannot be sampled has token 0, which the model can read, and logprob NaN, which the backend
  refuses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from vllm.v1.outputs import LogprobsTensors, SamplerOutput

from seer import _native
from seer.services.engine.vllm.requests import EXTRA
from seer.services.engine.vllm.sampling.batch import REJECTED, Batch, accept_drafts
from seer.services.engine.vllm.sampling.sampler import StepSampler

if TYPE_CHECKING:
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from seer.services.engine.vllm.drafts.path_rows import PathRows
    from seer.services.engine.vllm.sampling.rows import RowParams


class RowSampler:
    """Samples a token per row of vLLM's input batch.

    A request with d drafts has d + 1 rows, row j with the logits after its first j drafts. Each row samples
    its token; a draft is accepted if it equals the token sampled in its place, and a row counts if all drafts
    before it are accepted. So vLLM's rejection sampler never runs, and drafts cannot change a token.
    """

    def __init__(self, runner: GPUModelRunner, paths: PathRows | None = None) -> None:
        self._runner = runner
        self._paths = paths
        self._sample = StepSampler(runner.device)
        self._ids: list[str] = []
        self._batch = Batch([])
        self.captured: list[npt.NDArray[np.float32]] = []

    def __call__(self, logits: torch.Tensor, drafted: SpecDecodeMetadata | None) -> SamplerOutput:
        """Return tokens int32 [requests, most drafts + 1] and their logprobs, for logits [rows, vocab_size].

        Places after a rejected draft hold -1. Rows of unfinished prefills are sampled, too, and discarded, as
        with vLLM's own sampler.
        """
        batch = self._runner.input_batch
        if batch.req_ids != self._ids:
            requests = self._runner.requests
            self._batch = Batch([requests[i].sampling_params.extra_args[EXTRA] for i in batch.req_ids])
            self._ids = list(batch.req_ids)
        # Tokens that are computed when this step is done, with all its drafts.
        lengths = self._runner.optimistic_seq_lens_cpu.numpy()[: len(self._ids)]
        if drafted is not None:
            tokens, logprobs = self._verify(logits, lengths, np.array(drafted.num_draft_tokens, np.int32))
        else:
            tokens, logprobs = self._draw_one_each(logits, self._batch.step(lengths, batch.token_ids_cpu))
        flat = tokens.reshape(-1, 1)
        return SamplerOutput(
            sampled_token_ids=tokens,
            # Token ranks are never read.
            logprobs_tensors=LogprobsTensors(flat, logprobs.reshape(-1, 1), torch.zeros_like(flat[:, 0])),
        )

    def draw(self, logits: torch.Tensor, params: RowParams) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens int32 [rows] and logprobs float32 [rows] on the host; see `StepSampler`."""
        tokens, logprobs = self._sample(logits, params)
        return torch.from_numpy(tokens), torch.from_numpy(logprobs)

    def _draw_one_each(self, logits: torch.Tensor, params: RowParams) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a token of each request, [requests, 1], and logprobs."""
        tokens, logprobs = self.draw(logits, params)
        sampled = tokens.clamp(min=0)[:, None]
        self._capture(logits, np.zeros(len(sampled), np.int32), sampled)
        return sampled, logprobs

    def _verify(
        self, logits: torch.Tensor, lengths: npt.NDArray[np.int32], counts: npt.NDArray[np.int32]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tokens of each request, [requests, most drafts + 1], and their logprobs."""
        batch, positions = self._runner.input_batch, lengths - counts
        drafts = drafts_after(positions, batch.token_ids_cpu, counts)
        drawn, values = self._sample(logits, self._batch.step(positions, batch.token_ids_cpu, counts, drafts))
        tokens, logprobs = accept_drafts(np.maximum(drawn, 0), values, counts, drafts)
        self._capture(logits, counts, tokens)
        if self._paths is not None:
            kept = self._paths.keep_winners(tokens.numpy(), logprobs.numpy())
            tokens, logprobs = map(torch.from_numpy, kept)
        return tokens, logprobs

    def _capture(self, logits: torch.Tensor, counts: npt.NDArray[np.int32], tokens: torch.Tensor) -> None:
        unfinished = self._runner.discard_request_mask.np
        starts = np.cumsum(counts + 1) - counts - 1
        for request in self._batch.captures:
            if not unfinished[request]:
                rows = int((tokens[request] != REJECTED).sum())
                self.captured.extend(logits[starts[request] :][:rows].float().cpu().numpy().copy())


def drafts_after(
    positions: npt.NDArray[np.int32], token_ids: npt.NDArray[np.int32], counts: npt.NDArray[np.int32]
) -> npt.NDArray[np.int32]:
    """Return all requests' drafts, int32 [sum(counts)]: vLLM puts them behind the tokens known on the host.

    To read those that it copied to a GPU would wait for the forward pass.
    """
    drafts = np.empty(int(counts.sum()), np.int32)
    _native.take_drafts(token_ids, positions, counts, drafts)
    return drafts
