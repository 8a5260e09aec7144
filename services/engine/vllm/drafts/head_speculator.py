"""Drafts of a trained head beside those of trees: EAGLE, EAGLE-3, or a model's own layers of prediction.

The head is vLLM's own speculator. It runs in every step, since its KV needs all tokens, and drafts while that
is worth it; each request's draft is the head's or its tree's, whichever promises more.

Invariants:
- a head's draft has at most the tokens that its chunk may still have, and no placeholder of images;
- a load of the head's weights changes nothing that the model reads, though both share embeddings;
- all ranks run the head equally often.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.config import set_current_vllm_config
from vllm.distributed import get_tp_group
from vllm.model_executor.model_loader.reload.inplace import reload_weights
from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_reload
from vllm.v1.worker.gpu.spec_decode.mtp.speculator import MTPSpeculator

from seer.common.process.log import get_logger
from seer.services.engine.vllm.drafts.speculator import HeadDrafts, Ints, TreeSpeculator
from seer.services.engine.vllm.drafts.tree_drafter import placeholder_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.states import RequestState

    from seer.common.policy.draft_budget import DraftBudget
    from seer.services.engine.vllm.drafts.draft_gate import StepMemory
    from seer.services.engine.vllm.slot_sampler import SlotSampler

HEAD_TOKENS = 4
"""Most tokens that a head drafts: heads are trained for three to five, and each costs a run of the head."""

TRIES = 16
"""Steps in a row in which the head's drafts did not pay, after which it drafts only in every 16th step."""

_OUTPUTS = {"lm_head", "head"}
"""Names of output layers: a head's own may be in a shared one's place."""

_log = get_logger()


def speculator_of(config: VllmConfig, device: torch.device, states: RequestState) -> TreeSpeculator:
    """Return the speculator of a configuration, which drafts by n-grams or has a head."""
    kind = TreeSpeculator if config.speculative_config.use_ngram() else HeadSpeculator
    return kind(config, device, states)


class HeadSpeculator(TreeSpeculator, MTPSpeculator):  # type: ignore[misc]
    """See the module's docstring."""

    init_cudagraph_manager = MTPSpeculator.init_cudagraph_manager
    capture = MTPSpeculator.capture

    def __init__(self, config: VllmConfig, device: torch.device, states: RequestState) -> None:
        MTPSpeculator.__init__(self, config, device)
        TreeSpeculator.__init__(self, config, device, states)
        self._width = min(HEAD_TOKENS, config.num_speculative_tokens)
        # As wide as graphs are captured.
        self._confidence = torch.zeros((self.max_num_reqs, config.num_speculative_tokens), device=device)
        self._placeholder = placeholder_of(config)
        self._unpaid = 0  # steps since the head's drafts saved more time than the head took
        self._cost = 0.0  # seconds that it takes in a step in which it drafts, as the host sees them
        self._tokens_drafted = 0  # in this step, a request
        self.updates_behind = 0  # loaded since the one that the head is of

    def attach(self, runner: Any, sampler: SlotSampler) -> None:  # noqa: ANN401 - V2's runner
        """See `TreeSpeculator.attach`."""
        super().attach(runner, sampler)
        self._models = set(map(id, runner.get_model().modules()))

    def load_model(self, target_model: torch.nn.Module) -> None:
        """See vLLM's. Raises `ValueError` for a head that drafts tokens which the model lacks."""
        super().load_model(target_model)
        table = getattr(self.model, "draft_id_to_target_id", None)
        if table is not None:
            tokens = torch.arange(len(table), device=table.device) + table
            if int(tokens.min()) < 0 or int(tokens.max()) >= self.vocab_size:
                raise ValueError("the head's d2t names tokens that the model lacks")

    def load_head(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Load new weights of the head, if there are any; one that vLLM cannot load only drafts worse."""
        self.updates_behind += 1
        with self._apart() as shared:
            own = ((name, each) for name, each in tensors if shared.isdisjoint(name.split(".")[-2:-1]))
            first = next(own, None)
            if first is None:
                return
            try:
                with set_current_vllm_config(self.vllm_config):
                    reload_weights(self.vllm_config, self.model, chain([first], own), None, True)
                self.updates_behind = 0
            except Exception as error:  # noqa: BLE001 - vLLM's may be any
                finalize_layerwise_reload(self.model, self.vllm_config.model_config)
                _log.warning("the draft head's new weights cannot be loaded", why=str(error)[:300])

    @contextlib.contextmanager
    def _apart(self) -> Iterator[set[str]]:
        """Take out of the head what is the model's, too, as its embeddings; yield the names of those."""
        shared = [
            (parent, name, part)
            for parent in self.model.modules()
            for name, part in parent._modules.items()
            if id(part) in self._models
        ]
        names = {name for _, name, _ in shared}
        for parent, name, _ in shared:
            parent._modules[name] = torch.nn.Identity()
        try:
            yield names | (_OUTPUTS if names & _OUTPUTS else set())
        finally:
            for parent, name, part in shared:
                parent._modules[name] = part

    def propose(
        self, input_batch: InputBatch, *given: Any,  # noqa: ANN401 - vLLM's
        num_speculative_tokens: int = 0, dummy_run: bool = False, **named: Any,  # noqa: ANN401
    ) -> torch.Tensor:  # fmt: skip
        """Run the head, then draft; see `TreeSpeculator.propose`."""
        wanted = num_speculative_tokens if self._ahead and not dummy_run else self._width
        self._tokens_drafted = min(wanted, self._width) if dummy_run or self._worth_a_try() else 0
        begun = time.perf_counter()
        MTPSpeculator.propose(
            self,
            input_batch,
            *given,
            num_speculative_tokens=self._tokens_drafted,
            dummy_run=dummy_run,
            **named,
        )
        self._unpaid += not dummy_run
        if self._tokens_drafted and not dummy_run:
            took = time.perf_counter() - begun
            self._cost = 0.9 * self._cost + 0.1 * took if self._cost else took
        named = {"num_speculative_tokens": num_speculative_tokens, "dummy_run": dummy_run}
        return TreeSpeculator.propose(self, input_batch, *given, **named)

    def _worth_a_try(self) -> bool:
        if self._always or self._ahead or get_tp_group().world_size > 1:  # other ranks know no more
            return self._drafts_now
        return self._drafts_now and (self._unpaid < TRIES or self._unpaid % TRIES == 0)

    def sample_draft(
        self, hidden_states: torch.Tensor, sample_src_positions: torch.Tensor, idx_mapping: torch.Tensor,
        temperature: torch.Tensor, seeds: torch.Tensor, draft_step: torch.Tensor, *_: object, **__: object,
    ) -> torch.Tensor:  # fmt: skip
        """Return the likeliest token of each row, int64 [n], and keep its probability."""
        logits = self.compute_draft_logits(hidden_states, 0).float()
        if self._placeholder >= 0:
            logits[:, self._placeholder] = -torch.inf
        best, tokens = logits.log_softmax(-1).max(-1)
        self._confidence[: len(best)].index_copy_(1, draft_step.view(1), best.exp()[:, None])
        return tokens

    def _head_drafts(
        self, slots: npt.NDArray[np.intp], lengths: Sequence[int], drawn: Ints
    ) -> HeadDrafts | None:
        """See `TreeSpeculator._head_drafts`; this waits for the device."""
        k = self._tokens_drafted
        if not k:
            return None
        n = len(slots)
        tokens = self.draft_tokens[:n, :k].cpu().numpy().astype(np.int32)
        scores = self._confidence[:n, :k].cpu().numpy().cumprod(axis=1)
        rooms = np.fromiter(map(self._room, slots.tolist(), lengths), np.int32, n)
        counts = np.where(drawn > 0, np.minimum(rooms, k), 0).astype(np.int32)
        return HeadDrafts(tokens, scores.astype(np.float32), counts)

    def _better(self, drafts: torch.Tensor, memory: StepMemory) -> torch.Tensor:
        """See `TreeSpeculator._better`."""
        (n, width), most = drafts.shape, self._tokens_drafted
        own, trees = self._confidence[:n, :most].cumprod(1).sum(1), self._gate.scores_on_device(memory).sum(1)
        heads = drafts.clone()
        heads[:, : min(width, most)] = self.draft_tokens[:n, : min(width, most)]
        return torch.where((own > trees)[:, None], heads, drafts)

    def _choose(
        self, budget: DraftBudget, slots: npt.NDArray[np.intp], lengths: Sequence[int], memory: StepMemory,
        head: HeadDrafts | None, *, forks: bool,
    ) -> list[list[int]]:  # fmt: skip
        drafts = super()._choose(budget, slots, lengths, memory, head, forks=forks)
        if self._choice is not None and self._choice[0].saves > self._cost:
            self._unpaid = 0
        return drafts
