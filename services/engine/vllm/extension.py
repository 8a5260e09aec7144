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
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.v1.outputs import LogprobsTensors, SamplerOutput

from seer.common.errors import EngineError
from seer.services.engine.vllm.requests import EXTRA, Extra
from seer.services.engine.vllm.sampler_check import self_test
from seer.services.engine.vllm.sampling import RowParams, SamplingTable, sample_rows

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner


class SeerWorker:
    """Methods that vLLM adds to its worker class (`worker_extension_cls`), for `collective_rpc`."""

    model_runner: GPUModelRunner
    seer_sampler: RowSampler
    seer_freed: list[tuple[torch.UntypedStorage, int]]

    def seer_install(self) -> None:
        """Put our sampler into the model runner."""
        self.seer_sampler = RowSampler(self.model_runner)
        self.model_runner._sample = self.seer_sampler

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

    def seer_pool_use(self, namespace: str) -> None:
        """See `GuardedStore.use`."""
        get_kv_transfer_group().store.use(namespace)

    def seer_pool_forget(self, hashes: list[str]) -> None:
        """See `GuardedStore.forget`."""
        get_kv_transfer_group().store.forget(hashes)

    def seer_pool_counts(self) -> dict[str, int]:
        """See `GuardedStore.counts`."""
        counts: dict[str, int] = get_kv_transfer_group().store.counts()
        return counts

    def seer_take_captured(self) -> npt.NDArray[np.float32]:
        """Return and forget the raw logits kept for rows that asked: [rows, vocab_size]."""
        kept, self.seer_sampler.captured = self.seer_sampler.captured, []
        return np.stack(kept) if kept else np.empty((0, 0), np.float32)


class RowSampler:
    """Draws one token per row of vLLM's input batch: stands in for `GPUModelRunner._sample`."""

    def __init__(self, runner: GPUModelRunner) -> None:
        self._runner = runner
        self._compose([])
        self.captured: list[npt.NDArray[np.float32]] = []

    def __call__(self, logits: torch.Tensor, spec_decode_metadata: None) -> SamplerOutput:
        """Return tokens int32 [rows, 1] and logprobs for logits [rows, vocab_size].

        Rows of unfinished prefills are drawn too and thrown away, as with vLLM's own sampler. A
        row that cannot be sampled holds token -1: the backend refuses it.
        """
        batch = self._runner.input_batch
        if batch.req_ids != self._ids:
            self._compose(batch.req_ids)
        params = self._table.step(batch.num_tokens_no_spec[: len(self._ids)], batch.token_ids_cpu)
        if self._captures:
            self._capture(logits)
        if self._faults:
            self._plant(params)
        tokens, logprobs = _draw(logits, params)
        sampled = tokens[:, None]
        return SamplerOutput(
            sampled_token_ids=sampled,
            # No ranks: nobody reads them.
            logprobs_tensors=LogprobsTensors(sampled, logprobs[:, None], torch.zeros_like(tokens)),
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

    def _capture(self, logits: torch.Tensor) -> None:
        unfinished = self._runner.discard_request_mask.np
        self.captured += [
            logits[row].float().cpu().numpy().copy() for row in self._captures if not unfinished[row]
        ]

    def _plant(self, params: RowParams) -> None:
        for row, position in self._faults:
            if params.records[row]["position"] == position:
                params.records["key"][row] ^= np.uint64(1)


def _draw(logits: torch.Tensor, params: RowParams) -> tuple[torch.Tensor, torch.Tensor]:
    # Unchecked: reading tokens back here would make a GPU wait twice per step.
    return sample_rows(logits, params, check=False)
