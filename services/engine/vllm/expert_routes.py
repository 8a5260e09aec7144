"""Which experts each token went to, kept beside the token's KV. Runs in workers.

A place for a token's expert ids belongs to each place for its KV, and every step writes both. So whatever
block a request has, computed for another request, before a preemption or by another engine (`kv_pool`), the
ids in it are those of the computation that made its KV.

Invariants (tests/e2e/test_expert_routes.py asserts them):
- ids are logical ones, as routers choose them, in every layer; layers without experts have zeros;
- reading waits for no step that has begun since: what is read was written by steps whose results are known;
- all ranks route alike, and keep the same: KV that the pool has of one rank may be another's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.parallel_state import get_tp_group
from vllm.model_executor.layers.fused_moe.routed_experts_capturer import (
    RoutedExpertsCapturer,
    bind_routed_experts_capturer,
)

from seer.services.engine.backend import Routes

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu.input_batch import InputBatch


class ExpertRoutes:
    """Has a runner's routers report their choices; from `keep` on, they are kept by KV slot.

    Routers must report before graphs are captured, and how much KV there is becomes known later.
    """

    def __init__(self, runner: Any) -> None:  # noqa: ANN401 - V2's
        config: VllmConfig = runner.vllm_config
        self._runner = runner
        self._step = RoutedExpertsCapturer(config.scheduler_config.max_num_batched_tokens, config)
        bind_routed_experts_capturer(runner.get_model(), self._step)
        self._memory: torch.Tensor
        self._stream = torch.cuda.Stream(runner.device) if runner.device.type == "cuda" else None

    def keep(self, group: int) -> torch.Tensor:
        """Keep ids beside the KV of this group of layers, which attends to all tokens.

        Returns where they are kept: bytes [blocks, bytes of a block's tokens].
        """
        runner, size = self._runner, self._runner.cache_config.block_size
        blocks, width = runner.kv_cache_config.num_blocks, self._step.snapshot_routing_data(1).nbytes
        self._memory = torch.zeros((blocks, size * width), dtype=torch.uint8, device=runner.device)
        rows, slots = self._memory.view(blocks * size, width), runner.block_tables.slot_mappings[group]
        sample = runner.sample

        def keep_and_sample(hidden_states: torch.Tensor, batch: InputBatch, *rest: object) -> object:
            taken = self._step.snapshot_routing_data(batch.num_tokens).flatten(1).view(torch.uint8)
            rows.index_copy_(0, slots[: batch.num_tokens], taken)
            return sample(hidden_states, batch, *rest)

        runner.sample = keep_and_sample
        return self._memory

    def read(self, blocks: list[int], first: int, end: int) -> Routes | None:
        """Return the ids of the tokens from `first` to `end` of a request that had these blocks.

        No later step may have been given any of them. None on ranks but the first.
        """
        if not get_tp_group().is_first_rank:
            return None
        size = self._runner.cache_config.block_size
        used = blocks[first // size : -(-end // size)]
        with torch.cuda.stream(self._stream):
            found = self._memory[torch.tensor(used, device=self._memory.device)].cpu()
        rows = found.numpy().reshape(len(used) * size, -1)[first % size :][: end - first]
        routes: Routes = rows.view(self._step.output_dtype_name).reshape(-1, *self._step.shape_per_token)
        return routes
