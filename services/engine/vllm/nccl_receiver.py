"""A rank's side of vLLM's NCCL transfer engine: takes the buckets of a plan, one after the other.

vLLM's engine receives and unpacks; loading stays with `Receiver`, which ends a load in order when a bucket is
missing.

Invariants (tests/unit/test_vllm_transfer.py):
- the group's ranks are those that the trainer saw; vLLM's way to count ranks knows one engine alone;
- what is received after a bucket was given up is never returned.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from vllm.config import WeightTransferConfig
from vllm.distributed.weight_transfer.nccl_engine import (
    NCCLWeightTransferEngine,
    NCCLWeightTransferInitInfo,
    NCCLWeightTransferUpdateInfo,
)

from seer.common.weights.broadcast_group import meet
from seer.common.weights.in_place import Bucket, Plan
from seer.common.weights.vllm_group import Watch, usable
from seer.services.engine.vllm.in_place import TYPES, Place


class NcclReceiver:
    """Joins at once. Raises `RuntimeError`, `OSError` or `ValueError`."""

    def __init__(self, plan: Plan, place: Place) -> None:
        self._watch = Watch(torch.accelerator.current_device_index(), plan.step_seconds)
        address = plan.host, plan.port
        _, ranks = meet(address, place.engine, place.rank, place.ranks, plan.step_seconds)
        ours = SimpleNamespace(data_parallel_index=0, world_size=place.ranks, rank=place.rank)
        config = SimpleNamespace(parallel_config=ours, model_config=None)
        self._engine = NCCLWeightTransferEngine(WeightTransferConfig("nccl"), config, place.device, _Taken())
        joining = NCCLWeightTransferInitInfo(
            nccl_unique_id_b64=ranks.nccl_id,
            rank_offset=ranks.first[place.engine],
            world_size=ranks.size,
            packed=True,
            packed_buffer_size_bytes=max(bucket.size for bucket in plan.buckets),  # a bucket is never divided
        )
        self._watch.run(lambda: self._engine.init_transfer_engine(joining))
        usable(self._engine.model_update_group)

    def take(self, index: int, bucket: Bucket) -> list[tuple[str, torch.Tensor]]:
        """Receive a bucket's tensors. Raises `RuntimeError` or `TimeoutError`."""
        # vLLM receives on streams of its own, into memory that the load before may still read.
        torch.accelerator.synchronize()
        self._engine.model = taken = _Taken()
        update = NCCLWeightTransferUpdateInfo(
            names=[tensor.name for tensor in bucket.tensors],
            dtype_names=[str(TYPES[tensor.dtype]).removeprefix("torch.") for tensor in bucket.tensors],
            shapes=[list(tensor.shape) for tensor in bucket.tensors],
        )
        self._watch.run(lambda: self._engine.receive_weights(update), self._engine.shutdown)
        return taken.tensors

    def close(self) -> None:
        """Leave the group."""
        self._engine.shutdown()


class _Taken:
    """Stands where vLLM's engine has its model, and keeps what it is to load."""

    def __init__(self) -> None:
        self.tensors: list[tuple[str, torch.Tensor]] = []

    def load_weights(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        """Take a bucket's tensors."""
        self.tensors += tensors
