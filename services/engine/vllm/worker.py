"""Our part of every vLLM worker: our sampler in place of vLLM's, and access to drafts, KV and the pool.

Invariants:
- vLLM's sampler, log-softmax and ranks never run: `model_runner._sample` is replaced;
- the position of a sampled token is the number of tokens before it, whatever the schedule;
- all ranks hold the same logits and rows, so all sample the same tokens without communication.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.distributed import get_tp_group
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.model_executor.model_loader import get_model_loader
from vllm.v1.outputs import LogprobsTensors, SamplerOutput

from seer.common.errors import EngineError
from seer.common.policy.draft_budget import DraftBudget
from seer.common.policy.draft_costs import StepCosts
from seer.common.process.log import get_logger
from seer.services.engine.vllm.drafts.draft_script import DraftScript
from seer.services.engine.vllm.drafts.path_rows import PathRows
from seer.services.engine.vllm.drafts.path_selector import PathSelector
from seer.services.engine.vllm.drafts.scratch_blocks import path_blocks
from seer.services.engine.vllm.merging import Adapter
from seer.services.engine.vllm.requests import EXTRA, ExtraArgs
from seer.services.engine.vllm.sampling.rows import RowParams, SamplingTable
from seer.services.engine.vllm.sampling.sampler import StepSampler
from seer.services.engine.vllm.sampling.vectors import self_test

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from seer.services.dgds.client import StreamDelta

REJECTED = -1
"""vLLM's mark for no token: what follows a rejected draft."""

UNSAMPLED = -2
"""Stands for a token that could not be sampled; no draft equals it."""

_NO_DRAFT = -3

_NO_DRAFTS = np.empty(0, np.int32)

MEMORY_SHRANK = "Memory usage increased after sleeping."
"""vLLM's assertion after it has freed all that it frees in sleep."""

_log = get_logger()


class SeerWorker:
    """Methods that vLLM adds to its worker class (`worker_extension_cls`), for `collective_rpc`."""

    model_runner: GPUModelRunner
    vllm_config: VllmConfig
    reload_weights: Callable[..., None]
    sleep: Callable[[int], None]
    seer_sampler: RowSampler
    seer_paths: PathRows | None
    seer_freed: list[tuple[torch.UntypedStorage, int]]

    def seer_install(self, max_draft: int, scratch: list[int]) -> None:
        """Put our sampler into the model runner, and ourselves into the proposer if there is one.

        `scratch`: ids of the KV blocks for verifying several draft paths; if empty, one path is verified.
        """
        self.seer_paths = PathRows(self.model_runner, scratch) if scratch else None
        self.seer_sampler = RowSampler(self.model_runner, self.seer_paths)
        self.model_runner._sample = self.seer_sampler
        if max_draft and get_tp_group().is_first_rank:
            most = len(scratch) // path_blocks(max_draft, self.model_runner.cache_config.block_size)
            self.model_runner.drafter.bind(self.model_runner, max_draft, PathSelector(most))
        self.sleep = sleep_beside_others(self.sleep)
        # Else vLLM gives all requests dummy drafts once one nears max_model_len; our drafts end in time.
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

    def seer_change_trees(self, changes: list[tuple[str, dict[str, Any]]]) -> None:
        """Open, feed and forget trees, in order: methods above, and their arguments."""
        known = (self.seer_open_tree, self.seer_feed_trees, self.seer_forget_trees)
        methods: dict[str, Callable[..., None]] = {each.__name__: each for each in known}
        for name, arguments in changes:
            methods[name](**arguments)

    def seer_script_drafts(self, script: DraftScript | None) -> None:
        """Draft what a script says; None: draft from the trees."""
        self.model_runner.drafter.script = script

    def seer_use_common_tree(self, enabled: bool) -> None:
        """See `GroupProposer.use_common_tree`."""
        self.model_runner.drafter.use_common_tree(enabled)

    def seer_set_costs(self, costs: StepCosts, max_paths: int) -> None:
        """Draft from trees from now on, as many tokens as pay with these step times."""
        self.model_runner.drafter.path_selector.most_paths = max_paths
        self.model_runner.drafter.budget = DraftBudget(costs, self.model_runner.num_spec_tokens)
        self.model_runner.drafter.seconds = 0.0  # of what was drafted to measure

    def seer_take_acceptance(self, groups: list[str]) -> tuple[float, dict[str, tuple[list[int], list[int]]]]:
        """Return this rank's seconds spent on drafts so far, and `GroupProposer.take_acceptance` of each.

        A rank that does not draft has nothing of any.
        """
        drafter = self.model_runner.drafter
        learned = {group: drafter.take_acceptance(group) for group in groups}
        return drafter.seconds, {group: each for group, each in learned.items() if each[0]}

    def seer_path_counts(self) -> dict[str, int]:
        """Return the counters of `PathRows`: `rows`, `dropped`, `won`, `conflicts`."""
        return dict(self.seer_paths.counters) if self.seer_paths is not None else {}

    def seer_check_noise(self) -> str:
        """Compare samples on this worker's device with the reference; empty if they are equal."""
        try:
            self_test(self.seer_sampler.draw, self.model_runner.device)
        except EngineError as error:
            return str(error)
        return ""

    def seer_load_adapter(self, folder: str, base: str) -> None:
        """Load the model in the folder `base`, with the adapter in `folder` merged into it."""
        config = self.vllm_config.model_config
        config.model, config.model_weights, config.revision = base, "", None
        loader = get_model_loader(self.vllm_config.load_config)
        weights = loader.get_all_weights(config, self.model_runner.get_model())
        self.reload_weights(weights_iterator=Adapter(Path(folder), Path(base)).merged(weights))

    def seer_set_kv_allocated(self, allocated: bool) -> None:
        """Free the memory of the KV cache, or allocate it again: its tensors are views of a few storages.

        For CPUs, where vLLM has no sleep mode, and no CUDA graph holds the addresses.
        """
        tensors = self.model_runner.kv_caches
        storages = {storage.data_ptr(): storage for storage in (each.untyped_storage() for each in tensors)}
        if not allocated:
            self.seer_freed = [(storage, storage.nbytes()) for storage in storages.values()]
            for storage, _ in self.seer_freed:
                storage.resize_(0)
            return
        for storage, size in self.seer_freed:
            storage.resize_(size)
        for tensor in tensors:
            tensor.zero_()  # as at start: attention reads beyond valid KV, and masks it

    def seer_kv_layout(self) -> list[str]:
        """Describe the layout of KV in this worker's memory: equal texts mean equal bytes."""
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
        """Return and forget the raw logits of captured requests: [rows, vocab_size]."""
        kept, self.seer_sampler.captured = self.seer_sampler.captured, []
        return np.stack(kept) if kept else np.empty((0, 0), np.float32)


def sleep_beside_others(sleep: Callable[[int], None]) -> Callable[[int], None]:
    """Return vLLM's `sleep(level)`, which does not fail if others take device memory meanwhile.

    vLLM compares the free memory of the whole device: a trainer, or another engine that wakes, may take more
    than this one frees. All of ours is free by then.
    """

    def call(level: int = 1) -> None:
        try:
            sleep(level)
        except AssertionError as error:
            if str(error) != MEMORY_SHRANK:
                raise
            _log.warning("other processes took device memory while this engine fell asleep")

    return call


class RowSampler:
    """Samples a token per row of vLLM's input batch, in place of `GPUModelRunner._sample`.

    A request with d drafts has d + 1 rows, row j with the logits after its first j drafts. Each row samples
    its token; a draft is accepted if it equals the token sampled in its place, and a row counts if all drafts
    before it are accepted. So vLLM's rejection sampler never runs, and drafts cannot change a token.
    """

    def __init__(self, runner: GPUModelRunner, paths: PathRows | None = None) -> None:
        self._runner = runner
        self._paths = paths
        self._sample = StepSampler(runner.device)
        self._set_batch([])
        self.captured: list[npt.NDArray[np.float32]] = []

    def __call__(self, logits: torch.Tensor, drafted: SpecDecodeMetadata | None) -> SamplerOutput:
        """Return tokens int32 [requests, most drafts + 1] and their logprobs, for logits [rows, vocab_size].

        Places after a rejected draft hold -1. Rows of unfinished prefills are sampled, too, and discarded, as
        with vLLM's own sampler. A row that cannot be sampled holds token -2, which the backend refuses.
        """
        batch = self._runner.input_batch
        if batch.req_ids != self._ids:
            self._set_batch(batch.req_ids)
        positions = batch.num_tokens_no_spec[: len(self._ids)]
        if drafted is None:
            counts, drafts = np.zeros(len(self._ids), np.int32), _NO_DRAFTS
            params = self._table.step(positions, batch.token_ids_cpu)
        else:
            counts = np.array(drafted.num_draft_tokens, np.int32)
            drafts = drafts_after(positions, batch.token_ids_cpu, counts)
            params = self._table.step(positions, batch.token_ids_cpu, counts, drafts)
        if self._faults:
            self._inject_faults(params, counts)
        tokens, logprobs = self.draw(logits, params)
        tokens[tokens < 0] = UNSAMPLED
        if drafted is not None:
            tokens, logprobs = accept_drafts(tokens.numpy(), logprobs.numpy(), counts, drafts)
        if self._captures:
            self._capture(logits, counts, tokens)
        if drafted is not None and self._paths is not None:
            tokens, logprobs = map(
                torch.from_numpy, self._paths.keep_winners(tokens.numpy(), logprobs.numpy())
            )
        sampled = tokens[:, None] if drafted is None else tokens
        flat = sampled.reshape(-1, 1)
        return SamplerOutput(
            sampled_token_ids=sampled,
            # Token ranks are never read.
            logprobs_tensors=LogprobsTensors(flat, logprobs.reshape(-1, 1), torch.zeros_like(flat[:, 0])),
        )

    def draw(self, logits: torch.Tensor, params: RowParams) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens int32 [rows] and logprobs float32 [rows] on the host; see `StepSampler`."""
        tokens, logprobs = self._sample(logits, params)
        return torch.from_numpy(tokens), torch.from_numpy(logprobs)

    def _set_batch(self, ids: list[str]) -> None:
        requests = self._runner.requests
        extras: list[ExtraArgs] = [requests[i].sampling_params.extra_args[EXTRA] for i in ids]
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

    def _inject_faults(self, params: RowParams, counts: npt.NDArray[np.int32]) -> None:
        requests = np.repeat(np.arange(len(counts)), counts + 1)
        for request, position in self._faults:
            hit = (requests == request) & (params.records["position"] == position)
            params.records["key"][hit] ^= np.uint64(1)


def drafts_after(
    positions: npt.NDArray[np.int32], token_ids: npt.NDArray[np.int32], counts: npt.NDArray[np.int32]
) -> npt.NDArray[np.int32]:
    """Return all requests' drafts, int32 [sum(counts)]: vLLM puts them behind the tokens known on the host.

    To read those that it copied to a GPU would wait for the forward pass.
    """
    requests = np.repeat(np.arange(len(counts)), counts)
    draft = np.arange(len(requests)) - (np.cumsum(counts) - counts)[requests]
    return token_ids[requests, positions[requests] + draft]


def accept_drafts(
    tokens: npt.NDArray[np.int32],
    logprobs: npt.NDArray[np.float32],
    counts: npt.NDArray[np.int32],
    drafts: npt.NDArray[np.int32],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Spread samples [rows] over [requests, most drafts + 1]; -1 after the first rejected draft.

    `counts` [requests] are numbers of drafts, `drafts` [sum(counts)] the drafts themselves.
    """
    requests = np.repeat(np.arange(len(counts)), counts + 1)
    starts = np.cumsum(counts + 1) - counts - 1
    column = np.arange(len(tokens)) - starts[requests]
    width = int(counts.max(initial=0)) + 1
    sampled = np.full((len(counts), width), REJECTED, np.int32)
    sampled[requests, column] = tokens
    values = np.zeros((len(counts), width), np.float32)
    values[requests, column] = logprobs
    drafted = np.full((len(counts), width), _NO_DRAFT, np.int32)
    drafted[requests[column > 0], column[column > 0] - 1] = drafts
    accepted = np.logical_and.accumulate(sampled == drafted, axis=1)
    sampled[:, 1:][~accepted[:, :-1]] = REJECTED
    return torch.from_numpy(sampled), torch.from_numpy(values)
