"""Drafts in vLLM's model runner V2, in the place of its `speculator` and of its `draft_tokens_handler`.

vLLM has no name for a speculator of one's own: engines configure `ngram_gpu`, whose place `stand_in` takes.

Invariants:
- drafts go to the scheduler, and from there with the next step to every rank, which writes them where V2
  reads them: so ranks that make none verify the same ones;
- while drafts are switched off none are made, and what responses say meanwhile is in the trees afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.worker.gpu import model_runner
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

from seer.services.engine.vllm.drafts.proposer import GroupProposer

if TYPE_CHECKING:
    from vllm.config import CUDAGraphMode, VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.states import RequestState


def stand_in() -> None:
    """Have every V2 runner that is made from now on draft by `TreeSpeculator`; it must draft by n-grams."""
    model_runner.init_speculator = TreeSpeculator


class TreeSpeculator(BaseSpeculator):  # type: ignore[misc]
    """See the module's docstring. `attach` gives it the runner, and what the proposer needs of it."""

    supports_mm_inputs = False
    draft_logits = None

    def __init__(self, config: VllmConfig, device: torch.device, states: RequestState) -> None:
        self.proposer = GroupProposer(config)
        self._states = states
        self._none = torch.zeros_like(states.draft_tokens)
        self._made: DraftTokenIds | None = None
        # What the proposer reads of a V1 runner.
        self.max_num_reqs = config.scheduler_config.max_num_seqs
        self.input_batch = SimpleNamespace(req_ids=[])

    def attach(self, runner: Any, params: Callable[[int], object]) -> None:  # noqa: ANN401 - V2's runner
        """Take the place of what hands drafts on; `params(slot)`: a request's `SamplingParams`."""
        self.requests = _Requests(self._states, params)
        runner.draft_tokens_handler = self
        self._execute_model, runner.execute_model = runner.execute_model, self._execute
        self._update_requests, runner.update_requests = runner.update_requests, self._update

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        """Do nothing: there is no draft model."""

    def capture(self) -> None:
        """Do nothing: there is no draft model."""

    def propose(
        self, input_batch: InputBatch, attn_metadata: object, slot_mappings: object, hidden_states: object,
        aux_hidden_states: object, num_sampled: torch.Tensor, *_: object, dummy_run: bool = False,
        **__: object,
    ) -> torch.Tensor:  # fmt: skip
        """Draft for the requests of a step, whose tokens V2 has by now. Return zeros."""
        self._made = None
        if not dummy_run and self.proposer.drafts:
            slots = input_batch.idx_mapping_np
            tokens, lengths = self._states.all_token_ids.gpu.numpy(), self._states.total_len.gpu.numpy()
            ends = zip(slots.tolist(), lengths[slots].tolist(), num_sampled.tolist(), strict=True)
            sampled = [tokens[slot, end - new : end].tolist() for slot, end, new in ends]
            self.input_batch.req_ids = input_batch.req_ids
            drafts = self.proposer.propose(sampled, lengths, tokens, rows=slots.astype(np.int32))
            self._made = DraftTokenIds(input_batch.req_ids, drafts)
        return self._none[: input_batch.num_reqs]

    def set_draft_tokens(self, input_batch: InputBatch, draft_tokens: torch.Tensor) -> None:
        """Do nothing: `propose` has what the scheduler gets."""

    def get_draft_tokens(self) -> DraftTokenIds | None:
        """Return the drafts of the last step; None if it made none."""
        return self._made

    def _execute(self, scheduled: SchedulerOutput, *args: object, **kwargs: object) -> object:
        if not self.proposer.drafts:
            self.proposer.learn_ended(scheduled.finished_req_ids)
        return self._execute_model(scheduled, *args, **kwargs)

    def _update(self, scheduled: SchedulerOutput) -> None:
        """Write the drafts of a step to the device, where V2 reads them."""
        self._update_requests(scheduled)
        drafts = scheduled.scheduled_spec_decode_tokens
        if not drafts:
            return
        slots = np.fromiter(map(self._states.req_id_to_index.__getitem__, drafts), np.intp, len(drafts))
        counts = np.fromiter(map(len, drafts.values()), np.intp, len(drafts))
        places = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        tokens = np.fromiter(chain.from_iterable(drafts.values()), np.int64, len(places))
        self._states.draft_tokens.numpy()[np.repeat(slots, counts), places] = tokens


class _Requests:
    """The requests of V2's slots as the proposer reads them of a V1 runner, by id."""

    def __init__(self, states: RequestState, params: Callable[[int], object]) -> None:
        self._states = states
        self._params = params

    def __getitem__(self, request_id: str) -> SimpleNamespace:
        slot = self._states.req_id_to_index[request_id]
        return SimpleNamespace(sampling_params=self._params(slot))

    def get(self, request_id: str) -> SimpleNamespace | None:
        """Return a request with its tokens; None: it is not here."""
        slot = self._states.req_id_to_index.get(request_id)
        if slot is None:
            return None
        length = int(self._states.total_len.gpu[slot])
        tokens = self._states.all_token_ids.gpu[slot, :length].tolist()
        return SimpleNamespace(
            sampling_params=self._params(slot), prompt_token_ids=tokens, output_token_ids=[]
        )
