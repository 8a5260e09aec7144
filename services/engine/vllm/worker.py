"""What runs in every vLLM worker: our sampler in the place of vLLM's.

Invariants:
- vLLM's sampler, log-softmax and ranks never run: `model_runner._sample` is replaced;
- the position of a sampled token is the number of tokens known before it, whatever the schedule;
- all ranks hold the same logits and rows, so all draw the same tokens without talking.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from vllm.distributed import get_tp_group
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.v1.outputs import LogprobsTensors, SamplerOutput

from seer.common.errors import EngineError
from seer.common.policy.draft_budget import DraftBudget
from seer.common.policy.draft_costs import StepCosts
from seer.services.engine.vllm.drafts.forks import Forks
from seer.services.engine.vllm.drafts.path_rows import PathRows
from seer.services.engine.vllm.drafts.scratch_blocks import path_blocks
from seer.services.engine.vllm.drafts.scripted import DraftScript
from seer.services.engine.vllm.requests import EXTRA, Extra
from seer.services.engine.vllm.sampling.rows import RowParams, SamplingTable
from seer.services.engine.vllm.sampling.sampler import sample_rows
from seer.services.engine.vllm.sampling.vectors import self_test

if TYPE_CHECKING:
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from seer.services.dgds.client import StreamDelta

REJECTED = -1
"""vLLM's sign for no token at all."""

UNDRAWN = -2
"""A token that cannot be drawn; no draft is equal to it."""

_NO_DRAFT = -3

_NO_DRAFTS = np.empty(0, np.int32)


class SeerWorker:
    """Methods that vLLM adds to its worker class (`worker_extension_cls`), for `collective_rpc`."""

    model_runner: GPUModelRunner
    seer_sampler: RowSampler
    seer_paths: PathRows | None
    seer_freed: list[tuple[torch.UntypedStorage, int]]

    def seer_install(self, max_draft: int, scratch: list[int]) -> None:
        """Put our sampler into the model runner, and ourselves into the proposer if there is one.

        `scratch` KV blocks are ours, for verifying several paths of a draft; without, there is one path.
        """
        self.seer_paths = PathRows(self.model_runner, scratch) if scratch else None
        self.seer_sampler = RowSampler(self.model_runner, self.seer_paths)
        self.model_runner._sample = self.seer_sampler
        if max_draft and get_tp_group().is_first_rank:
            most = len(scratch) // path_blocks(max_draft, self.model_runner.cache_config.block_size)
            self.model_runner.drafter.bind(self.model_runner, max_draft, Forks(most))
        # Else the whole batch gets dummy drafts once a request nears the longest: ours end at the limit.
        self.model_runner._input_fits_in_drafter = lambda metadata: True

    def seer_open_tree(self, group: str, prompt: list[int]) -> None:
        """See `GroupProposer.open`."""
        self.model_runner.drafter.open(group, prompt)

    def seer_feed_trees(self, deltas: list[StreamDelta]) -> None:
        """See `GroupProposer.feed`."""
        self.model_runner.drafter.feed(deltas)

    def seer_forget_trees(self, groups: list[str]) -> None:
        """See `GroupProposer.forget`."""
        self.model_runner.drafter.forget(groups)

    def seer_script_drafts(self, script: DraftScript | None) -> None:
        """Draft what the script says; None: what the trees say."""
        self.model_runner.drafter.script = script

    def seer_share_trees(self, whole: bool) -> None:
        """See `GroupProposer.share`."""
        self.model_runner.drafter.share(whole)

    def seer_set_costs(self, costs: StepCosts, max_paths: int) -> None:
        """Begin to draft from trees, as much as pays with these step times, on at most so many paths."""
        self.model_runner.drafter.forks.most_paths = max_paths
        self.model_runner.drafter.budget = DraftBudget(costs, self.model_runner.num_spec_tokens)
        self.model_runner.drafter.seconds = 0.0  # of what was drafted to measure

    def seer_take_acceptance(self, group: str) -> tuple[float, list[int], list[int]]:
        """Return the seconds that this rank has drafted in all, and `GroupProposer.take_acceptance`."""
        drafter = self.model_runner.drafter
        return drafter.seconds, *drafter.take_acceptance(group)

    def seer_path_counts(self) -> dict[str, int]:
        """Return what became of paths after the first: `siblings`, and those `dropped`, `won`, `torn`."""
        return dict(self.seer_paths.counters) if self.seer_paths is not None else {}

    def seer_check_noise(self) -> str:
        """Compare what is drawn on this worker's device with the reference; empty when equal."""
        try:
            self_test(_draw, self.model_runner.device)
        except EngineError as error:
            return str(error)
        return ""

    def seer_hold_kv(self, held: bool) -> None:
        """Free the memory of the KV cache, or take it again: its tensors are views of a few storages.

        For CPUs, where vLLM has no sleep mode and no captured graph knows the addresses.
        """
        tensors = self.model_runner.kv_caches
        storages = {storage.data_ptr(): storage for storage in (each.untyped_storage() for each in tensors)}
        if not held:
            self.seer_freed = [(storage, storage.nbytes()) for storage in storages.values()]
            for storage, _ in self.seer_freed:
                storage.resize_(0)
            return
        for storage, size in self.seer_freed:
            storage.resize_(size)
        for tensor in tensors:
            tensor.zero_()  # as vLLM begins: attention reads beyond what is valid, and masks it

    def seer_kv_layout(self) -> list[str]:
        """Describe how KV lies in this worker's memory: equal texts, equal bytes."""
        runner = self.model_runner
        backends = [group.backend.full_cls_name() for groups in runner.attn_groups for group in groups]
        device = runner.device.type
        unit = torch.backends.cpu.get_cpu_capability() if device == "cpu" else device
        layout = runner.cache_config.get_resolved_kv_cache_layout()
        return [f"{backend} {layout} {unit}" for backend in backends]

    def seer_use_pool_namespace(self, namespace: str) -> None:
        """See `GuardedStore.use_namespace`."""
        get_kv_transfer_group().store.use_namespace(namespace)

    def seer_remove_from_pool(self, hashes: list[str]) -> None:
        """See `GuardedStore.remove`."""
        get_kv_transfer_group().store.remove(hashes)

    def seer_pool_counts(self) -> dict[str, int]:
        """See `GuardedStore.counts`."""
        counts: dict[str, int] = get_kv_transfer_group().store.counts()
        return counts

    def seer_take_captured(self) -> npt.NDArray[np.float32]:
        """Return and forget the raw logits kept for rows that asked: [rows, vocab_size]."""
        kept, self.seer_sampler.captured = self.seer_sampler.captured, []
        return np.stack(kept) if kept else np.empty((0, 0), np.float32)


class RowSampler:
    """Draws a token per row of vLLM's input batch: stands in for `GPUModelRunner._sample`.

    A request with d drafts has d + 1 rows, row j with the logits after its first j drafts. Each draws
    its token; a draft is right if it is the token drawn in its place, and a row counts if all drafts
    before it are right. So vLLM's rejection sampler never runs, and drafts cannot change a token.
    """

    def __init__(self, runner: GPUModelRunner, paths: PathRows | None = None) -> None:
        self._runner = runner
        self._paths = paths
        self._compose([])
        self.captured: list[npt.NDArray[np.float32]] = []

    def __call__(self, logits: torch.Tensor, drafted: SpecDecodeMetadata | None) -> SamplerOutput:
        """Return tokens int32 [requests, most drafts + 1] and their logprobs, for logits [rows, vocab_size].

        What was not sampled is -1. Rows of unfinished prefills are drawn too and thrown away, as with
        vLLM's own sampler. A row that cannot be sampled holds token -2: the backend refuses it.
        """
        batch = self._runner.input_batch
        if batch.req_ids != self._ids:
            self._compose(batch.req_ids)
        positions = batch.num_tokens_no_spec[: len(self._ids)]
        if drafted is None:
            counts, drafts = np.zeros(len(self._ids), np.int32), _NO_DRAFTS
            params = self._table.step(positions, batch.token_ids_cpu)
        else:
            counts = np.array(drafted.num_draft_tokens, np.int32)
            drafts = drafted.draft_token_ids.cpu().numpy()
            params = self._table.step(positions, batch.token_ids_cpu, counts, drafts)
        if self._faults:
            self._plant(params, counts)
        tokens, logprobs = _draw(logits, params)
        tokens[tokens < 0] = UNDRAWN
        if drafted is not None:
            tokens, logprobs = right_rows(tokens.cpu().numpy(), logprobs.cpu().numpy(), counts, drafts)
        if self._captures:
            self._capture(logits, counts, tokens)
        if drafted is not None and self._paths is not None:
            tokens, logprobs = map(torch.from_numpy, self._paths.settle(tokens.numpy(), logprobs.numpy()))
        sampled = tokens[:, None] if drafted is None else tokens
        flat = sampled.reshape(-1, 1)
        return SamplerOutput(
            sampled_token_ids=sampled,
            # No ranks: nobody reads them.
            logprobs_tensors=LogprobsTensors(flat, logprobs.reshape(-1, 1), torch.zeros_like(flat[:, 0])),
        )

    def _compose(self, ids: list[str]) -> None:
        requests = self._runner.requests
        extras: list[Extra] = [requests[i].sampling_params.extra_args[EXTRA] for i in ids]
        self._ids = list(ids)
        self._table = SamplingTable([extra.sampling for extra in extras])
        self._captures = [row for row, extra in enumerate(extras) if extra.capture]
        self._faults = [
            (row, e.fault_position) for row, e in enumerate(extras) if e.fault_position is not None
        ]

    def _capture(self, logits: torch.Tensor, counts: npt.NDArray[np.int32], tokens: torch.Tensor) -> None:
        unfinished = self._runner.discard_request_mask.np
        starts = np.cumsum(counts + 1) - counts - 1
        for request in self._captures:
            if not unfinished[request]:
                rows = int((tokens[request] != REJECTED).sum())
                self.captured.extend(logits[starts[request] :][:rows].float().cpu().numpy().copy())

    def _plant(self, params: RowParams, counts: npt.NDArray[np.int32]) -> None:
        requests = np.repeat(np.arange(len(counts)), counts + 1)
        for request, position in self._faults:
            hit = (requests == request) & (params.records["position"] == position)
            params.records["key"][hit] ^= np.uint64(1)


def right_rows(
    tokens: npt.NDArray[np.int32],
    logprobs: npt.NDArray[np.float32],
    counts: npt.NDArray[np.int32],
    drafts: npt.NDArray[np.int32],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Spread what was drawn [rows] over [requests, most drafts + 1]: -1 from the first wrong draft on.

    `counts` [requests] are drafts per request, `drafts` [sum(counts)] the drafts.
    """
    requests = np.repeat(np.arange(len(counts)), counts + 1)
    starts = np.cumsum(counts + 1) - counts - 1
    column = np.arange(len(tokens)) - starts[requests]
    width = int(counts.max(initial=0)) + 1
    drawn = np.full((len(counts), width), REJECTED, np.int32)
    drawn[requests, column] = tokens
    said = np.zeros((len(counts), width), np.float32)
    said[requests, column] = logprobs
    guessed = np.full((len(counts), width), _NO_DRAFT, np.int32)
    guessed[requests[column > 0], column[column > 0] - 1] = drafts
    reached = np.logical_and.accumulate(drawn == guessed, axis=1)
    drawn[:, 1:][~reached[:, :-1]] = REJECTED
    return torch.from_numpy(drawn), torch.from_numpy(said)


def _draw(logits: torch.Tensor, params: RowParams) -> tuple[torch.Tensor, torch.Tensor]:
    # Unchecked: reading tokens back here would make a GPU wait twice per step.
    return sample_rows(logits, params, check=False)
